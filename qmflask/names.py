"""Names at run time: what a requested name means, which are near it, and which begins a path under `/upstream`."""

from __future__ import annotations

from urllib.parse import unquote

from qmflask.config import Config
from qmflask.config.nametable import NameTable, Resolved
from qmflask.config.problems import nearest

__all__ = ["Names", "Resolved"]

#: A path may have this many segments before the rest is not looked at for a model's name.
_MAX_SEGMENTS = 64


class Names:
    """Lookups of one configuration; build it once, it never changes."""

    def __init__(self, config: Config) -> None:
        aliases = {alias: model.id for model in config.models.values() for alias in model.aliases if alias}
        self._table = NameTable(frozenset(config.models), aliases, frozenset(config.selectors))
        self._table.add_peers((peer.id, peer.models) for _name, peer in sorted(config.peers.items()))
        self._all = self._table.all()

    def resolve(self, name: str) -> Resolved | None:
        """What `name` means: a local model by id or alias, a selector, or a peer's model; None when nothing."""
        return self._table.resolve(name)

    def nearest(self, name: str, limit: int = 3) -> list[str]:
        """The names most like `name`, best first; empty when none is close."""
        return nearest(name, self._all, limit)

    def split_upstream_path(self, raw_path: str) -> tuple[Resolved, str, str] | None:
        """What the path after `/upstream` names: (meaning, name as given, remaining path).

        The longest run of leading segments that is a local model, alias or peer model wins; selectors do not count.
        Segments may be percent-encoded (`org%2Fcat`); the remaining path keeps its encoding and is empty only when
        nothing, not even a slash, follows the name. None when no run is a name.
        """
        path = raw_path.split("?", 1)[0]
        best: tuple[Resolved, str, str] | None = None
        parts: list[str] = []
        at = 0
        while at < len(path) and len(parts) < _MAX_SEGMENTS:
            end = path.find("/", at)
            end = len(path) if end < 0 else end
            if end > at:
                parts.append(unquote(path[at:end]))
                name = "/".join(parts)
                found = self._table.resolve(name, selectors=False)
                if found is not None:
                    best = (found, name, path[end:])
            at = end + 1
        return best

"""Which name means what: local models, aliases, selectors and peers' models, in the order in which they win."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["model", "peer", "selector"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a name means. `id` is the model's or selector's id, or for a peer's model the name as it was asked for.

    `upstream_name` is the name the server behind it expects (before `useModelName`).
    """

    kind: Kind
    id: str
    peer: str | None = None
    upstream_name: str = ""


@dataclass(slots=True)
class NameTable:
    """Lookup tables; ids beat aliases, those beat selectors, those qualified peer names, those bare ones (5.7)."""

    models: frozenset[str]
    aliases: Mapping[str, str]
    selectors: frozenset[str] = frozenset()
    qualified: dict[str, tuple[str, str]] = field(default_factory=dict)
    bare: dict[str, tuple[str, str] | None] = field(default_factory=dict)

    def add_peers(self, peers: Iterable[tuple[str, Iterable[str]]]) -> list[tuple[str, str, str]]:
        """Add peers' models; returns the ambiguous qualified names as (name, first peer, second peer)."""
        clashes: list[tuple[str, str, str]] = []
        for peer, models in peers:
            for model in dict.fromkeys(models):
                name = f"{peer}/{model}"
                if name in self.qualified and self.qualified[name] != (peer, model):
                    clashes.append((name, self.qualified[name][0], peer))
                self.qualified.setdefault(name, (peer, model))
                # A name that two peers offer is ambiguous and means nothing by itself.
                self.bare[model] = None if model in self.bare else (peer, model)
        return clashes

    def local(self, name: str) -> str | None:
        """The id of the local model that `name` or alias means."""
        return name if name in self.models else self.aliases.get(name)

    def resolve(self, name: str, selectors: bool = True) -> Resolved | None:
        """What `name` means, or None."""
        local = self.local(name)
        if local is not None:
            return Resolved("model", local, None, name)
        if selectors and name in self.selectors:
            return Resolved("selector", name, None, name)
        peer = self.qualified.get(name) or self.bare.get(name)
        return Resolved("peer", name, peer[0], peer[1]) if peer else None

    def all(self) -> list[str]:
        """Every name that means something, local ones first."""
        names = [*self.models, *self.aliases, *self.selectors, *self.qualified]
        return list(dict.fromkeys([*names, *(name for name, peer in self.bare.items() if peer)]))

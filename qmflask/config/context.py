"""What the checks share while a configuration is built: the sections, the tree with its places, and the problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qmflask.config.decode import is_secret
from qmflask.config.environment import is_masked
from qmflask.config.expand import Expanded
from qmflask.config.problems import Path, Problems
from qmflask.config.schema import RootSection
from qmflask.config.yaml12 import Map, Scalar, locate


@dataclass(slots=True)
class Context:
    """One configuration on its way from sections to `Config`."""

    file: RootSection
    expanded: Expanded
    problems: Problems
    #: Asks the file system why a file cannot be written; None skips the question (this layer does no I/O).
    path_fault: Callable[[str], str | None] | None = None

    @property
    def tree(self) -> Map:
        """The expanded tree."""
        return self.expanded.root

    def error(self, message: str, path: Path, **more: Any) -> None:
        """Note an error at `path` with the value that stands there, unless the place is known to be wrong already."""
        if not self.problems.failed_at(path):
            self.problems.error(message, locate(self.tree, path), path, **self._valued(path, more))

    def key_error(self, message: str, path: Path, **more: Any) -> None:
        """Note an error about the last key of `path`."""
        if not self.problems.failed_at(path):
            more.setdefault("value", None if is_secret(path[:-1]) else str(path[-1]))
            self.problems.error(message, locate(self.tree, path, key=True), path, **more)

    def warning(self, message: str, path: Path, code: str, **more: Any) -> None:
        """Note a warning at `path` with the value that stands there."""
        self.problems.warning(message, locate(self.tree, path), path, code=code, **self._valued(path, more))

    def _valued(self, path: Path, more: dict[str, Any]) -> dict[str, Any]:
        node: Any = self.tree
        for part in path:
            try:
                node = node.entries[str(part)] if isinstance(node, Map) else node.items[part]
            except (KeyError, IndexError, TypeError, AttributeError):
                return more
        if isinstance(node, Scalar) and node.value is not None and not is_secret(path) and not is_masked(node.text):
            more.setdefault("value", node.text)
        return more

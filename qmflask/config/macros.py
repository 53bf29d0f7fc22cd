"""Macros: their declaration, their substitution in declaration order, and what is left over (compatibility 1.6)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qmflask.config.problems import Mark, Path, Problems, shown
from qmflask.config.units import show_float
from qmflask.config.yaml12 import Map, Node, Scalar, Seq, Timestamp, YamlError, is_null

#: What a macro reference looks like; anything else between `${` and `}` is ordinary text.
REFERENCE = re.compile(r"\$\{([A-Za-z0-9_-]+)\}")
#: The same, and an environment reference that was not replaced.
LEFTOVER = re.compile(r"\$\{([A-Za-z0-9_-]+|env\.[A-Za-z_][A-Za-z0-9_]*)\}")

PORT, PID, MODEL_ID = "PORT", "PID", "MODEL_ID"

MAX_NAME = 63
#: A value may not grow beyond this through macros in macros.
MAX_EXPANDED = 128 * 1024
#: All values together may not grow beyond this.
MAX_TOTAL = 20_000_000

_NAME = re.compile(r"[A-Za-z0-9_-]+\Z")


def text_of(value: Any) -> str:
    """A scalar as text inside other text: `true`, `5`, `0.7`, `1.23456785e+07`; null is empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return show_float(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Macros:
    """Macro names and typed values in order; later ones may use earlier ones."""

    values: Mapping[str, Any]
    order: Mapping[str, int]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Macros:
        """Macros in the mapping's order."""
        return cls(values, {name: number for number, name in enumerate(values)})

    def with_model(self, model: str, own: Mapping[str, Any]) -> Macros:
        """MODEL_ID, then these, then `own`; an own macro with a known name takes that name's position."""
        return Macros.of({MODEL_ID: model, **self.values, **own})


def declare(node: Node | None, prefix: str, path: Path, problems: Problems) -> dict[str, Any]:
    """The valid macros of one `macros` block, in order; every bad one is noted."""
    found: dict[str, Any] = {}
    if node is None or is_null(node):
        return found
    if not isinstance(node, Map):
        problems.error(f"{prefix}macros must be a mapping of names to values", node.mark, path, allowed="a mapping")
        return found
    for name, value in node.entries.items():
        wrong = _wrong(name, value)
        if wrong:
            message, allowed = wrong
            mark = node.marks[name]
            written = value.text if isinstance(value, Scalar) else name
            text = f"{prefix}macro {shown(name)!r} {message}"
            problems.error(text, mark, (*path, name), value=written, allowed=allowed)
        elif isinstance(value, Scalar):
            found[name] = value.value
    return found


def _wrong(name: str, node: Node) -> tuple[str, str] | None:
    letters = "letters, digits, _ and -"
    if len(name) > MAX_NAME:
        return f"exceeds maximum length of {MAX_NAME} characters", f"at most {MAX_NAME} {letters}"
    if not _NAME.match(name):
        return "contains invalid characters", letters
    if name in (PORT, PID, MODEL_ID):
        return "is reserved: qmflask sets it itself", "any other name"
    value = node.value if isinstance(node, Scalar) else None
    if not isinstance(value, str | int | float | bool) or isinstance(value, Timestamp):
        return "must be a scalar type", "text, a number, true or false; quote a date"
    if isinstance(value, str) and f"${{{name}}}" in value:
        return "contains self-reference", "macros declared before this one"
    return None


# The declarations above name what is wrong as `macro 'x' ...`, which is how people search for it.


class Expander:
    """Replaces references in nodes, and bounds how much text that may make."""

    def __init__(self) -> None:
        self.total = 0

    def node(self, node: Node, macros: Macros) -> Node:
        """A copy of `node` with references in its values (never in its keys) replaced."""
        return map_scalars(node, lambda scalar: self._scalar(scalar, macros))

    def text(self, text: str, macros: Macros, mark: Mark) -> Any:
        """The value of `text`: typed when it is exactly one reference. Raises YamlError when it grows too long."""
        ceiling = len(macros.order)
        while "${" in text:
            names = {name for name in REFERENCE.findall(text) if macros.order.get(name, ceiling) < ceiling}
            if not names:
                break
            name = max(names, key=macros.order.__getitem__)
            ceiling = macros.order[name]
            value = macros.values[name]
            reference = f"${{{name}}}"
            if text == reference:
                if not isinstance(value, str):
                    return value
                text = value
                continue
            piece = text_of(value)
            self._grow(len(text) + text.count(reference) * len(piece), mark)
            text = text.replace(reference, piece)
        return text

    def _grow(self, size: int, mark: Mark) -> None:
        self.total += size
        if size > MAX_EXPANDED or self.total > MAX_TOTAL:
            raise YamlError("macros expand to far too much text here", mark.line, mark.column, mark.file)

    def _scalar(self, scalar: Scalar, macros: Macros) -> Scalar:
        value = self.text(scalar.value, macros, scalar.mark)
        if value is scalar.value:
            return scalar
        return Scalar(value, text_of(value), False, scalar.mark)


def map_scalars(node: Node, change: Callable[[Scalar], Scalar]) -> Node:
    """A copy of `node` with `change` applied to every scalar that holds text with a `${` in it."""
    if isinstance(node, Scalar):
        return change(node) if isinstance(node.value, str) and "${" in node.value else node
    if isinstance(node, Seq):
        return Seq([map_scalars(item, change) for item in node.items], node.mark)
    entries = {key: map_scalars(value, change) for key, value in node.entries.items()}
    return Map(entries, node.marks, node.mark)


def leftovers(node: Node, path: Path = ()) -> Iterator[tuple[Path, Scalar, str]]:
    """Every reference that survived: its path, its scalar, its name."""
    if isinstance(node, Scalar):
        if isinstance(node.value, str) and "${" in node.value:
            for name in dict.fromkeys(LEFTOVER.findall(node.value)):
                yield path, node, name
    elif isinstance(node, Seq):
        for number, item in enumerate(node.items):
            yield from leftovers(item, (*path, number))
    else:
        for key, value in node.entries.items():
            yield from leftovers(value, (*path, key))


def hint_for(name: str, macros: Macros, problems: Problems) -> str:
    """What to do about an unknown reference."""
    if name == PORT:
        return "PORT exists only in a model whose cmd contains ${PORT}"
    if name == PID:
        return "PID exists only in cmdStop"
    if name.startswith("env."):
        return "an environment value may refer to one more variable, not to a chain of them"
    if name in macros.order:
        return f"{name} is declared after the macro that uses it; move it up"
    close = problems.guess(name, macros.order)
    return f"did you mean ${{{close[0]}}}?" if close else "declare it under macros, before any macro that uses it"

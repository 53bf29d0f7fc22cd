"""From the expanded tree to the file's sections: type errors with their places, and keys nobody knows."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from qmflask.config.environment import is_masked
from qmflask.config.problems import Path, Problems, dotted, shown
from qmflask.config.scalars import kind_of
from qmflask.config.schema import RootSection, Section
from qmflask.config.yaml12 import Map, Node, Seq, locate, plain_data

#: Values under these keys are secrets and never shown.
_SECRET = frozenset({"apiKeys", "apiKey", "upstreamKey", "env", "key"})


def is_secret(path: Path) -> bool:
    """Whether the value at `path` must not appear in a message."""
    return any(part in _SECRET for part in path)


def decode(root: Map, problems: Problems) -> RootSection:
    """The sections of the tree. What does not fit is noted, left out, and the rest is returned all the same."""
    data = plain_data(root)
    for _attempt in range(5):
        try:
            return RootSection.model_validate(data)
        except ValidationError as error:
            details = error.errors(include_url=False)
        data = copy.deepcopy(data)
        for detail in details:
            path = _path(detail["loc"])
            _report(detail, path, root, problems)
            _leave_out(data, path)
    return RootSection()


def _path(loc: tuple[int | str, ...]) -> Path:
    return tuple(part for part in loc if part != "[key]")


def _report(detail: ErrorDetails, path: Path, root: Map, problems: Problems) -> None:
    value = detail["input"]
    context = detail.get("ctx", {})
    if problems.failed_at(path) or (isinstance(value, str) and is_masked(value)):
        return
    simple = isinstance(value, str | int | float)
    problems.error(
        context.get("said") or _sentence(detail, path),
        locate(root, path),
        path,
        value=None if is_secret(path) or not simple else value if isinstance(value, str) else repr(value),
        allowed=context.get("allowed") or _allowed(detail),
        hint=context.get("hint") or None,
        code="type",
    )


def _sentence(detail: ErrorDetails, path: Path) -> str:
    kind, value = detail["type"], detail["input"]
    if path[:1] == ("profiles",) and len(path) < 3 and isinstance(value, list):
        return f"{dotted(path)} uses the legacy list syntax of profiles; a profile is a mapping with pins now"
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        if path[-2:] == ("matrix", "sets"):
            return f"matrix: sets must be a mapping, not {kind_of(value)}"
        return f"expected a mapping, not {kind_of(value)}"
    if kind == "list_type":
        return f"expected a list, not {kind_of(value)}"
    if kind == "literal_error":
        return f"unknown value {shown(value)!r}" if isinstance(value, str) else f"unexpected {kind_of(value)}"
    if kind == "greater_than_equal":
        return f"must be >= {detail['ctx']['ge']}"
    return detail["msg"]


def _allowed(detail: ErrorDetails) -> str | None:
    kind = detail["type"]
    if kind == "literal_error":
        return str(detail["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")
    if kind == "list_type":
        return "a list: [a, b], or one `- item` per line"
    return "a mapping: one `key: value` per line" if kind in ("dict_type", "model_type") else None


def _leave_out(data: Any, path: Path) -> None:
    """Remove what stands at `path`; list items become empty so that the others keep their places."""
    for part in path[:-1]:
        if not isinstance(data, dict | list):
            return
        try:
            data = data[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return
    if path and isinstance(data, dict):
        data.pop(path[-1], None)
    elif path and isinstance(data, list) and isinstance(path[-1], int) and path[-1] < len(data):
        data[path[-1]] = ""


@cache
def section_keys(section: type[Section]) -> dict[str, Any]:
    """The keys of a section as written in the file, with their type annotations."""
    return {field.alias or name: field.annotation for name, field in section.model_fields.items()}


def inner_section(annotation: Any) -> tuple[type[Section] | None, str]:
    """The section inside an annotation and how it is held: `one`, `map` or `list`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return inner_section(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        found = [inner_section(arg) for arg in get_args(annotation)]
        return next((hit for hit in found if hit[0]), (None, ""))
    if origin in (dict, list):
        section, _how = inner_section(get_args(annotation)[-1])
        return section, "map" if origin is dict else "list"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, "one"
    return None, ""


def unknown_keys(
    node: Node, section: type[Section] = RootSection, path: Path = ()
) -> Iterator[tuple[Path, type[Section]]]:
    """Every key that its section does not have: (path, section). Top-level `x-` is free."""
    if not isinstance(node, Map):
        return
    keys = section_keys(section)
    for key, value in node.entries.items():
        if key not in keys:
            if path or not key.startswith("x-"):
                yield (*path, key), section
            continue
        inner, how = inner_section(keys[key])
        if inner is None:
            continue
        for child, child_path in _children(value, how, (*path, key)):
            yield from unknown_keys(child, inner, child_path)


def _children(node: Node, how: str, path: Path) -> Iterator[tuple[Node, Path]]:
    if how == "one":
        yield node, path
    elif how == "map" and isinstance(node, Map):
        yield from ((value, (*path, key)) for key, value in node.entries.items())
    elif how == "list" and isinstance(node, Seq):
        yield from ((item, (*path, number)) for number, item in enumerate(node.items))

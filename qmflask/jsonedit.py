"""Edits JSON texts in place: sets or deletes one value by its path and keeps every other byte.

Works on valid JSON only (callers parse first). With duplicate names the first is meant. Paths are tuples of
names; in an array a name of digits is an index and "-1" means append (set) or the last element (delete).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

Path = tuple[str, ...]

#: Elements up to which an array is padded with null.
MAX_INDEX = 10_000

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SCALAR = re.compile(rb"[^,\]}\s]+")
_SPACE = re.compile(rb"[ \t\r\n]*")
#: Inside a container only strings and brackets matter.
_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)


class EditError(ValueError):
    """Raised when a path cannot be set in a document."""


@dataclass(frozen=True)
class Item:
    """One member or element: its value is `text[start:end]`; `begin` is where its name (or value) starts."""

    name: str
    begin: int
    start: int
    end: int


def members(text: bytes, at: int = 0) -> Iterator[Item]:
    """The members of the object, or elements of the array, that starts at `at` (spaces skipped), in order."""
    position = _skip(text, at)
    is_object = text[position : position + 1] == b"{"
    if not is_object and text[position : position + 1] != b"[":
        return
    position = _skip(text, position + 1)
    index = 0
    while text[position : position + 1] not in (b"}", b"]", b""):
        begin = position
        name = str(index)
        if is_object:
            key_end = _value_end(text, position)
            name = _name(text[position:key_end])
            position = _skip(text, _skip(text, key_end) + 1)  # over the colon
        end = _value_end(text, position)
        yield Item(name, begin, position, end)
        index += 1
        position = _skip(text, end)
        if text[position : position + 1] == b",":
            position = _skip(text, position + 1)


def set_value(text: bytes, path: Path, value: bytes) -> bytes:
    """Put `value` (a JSON text) at `path`, making what is missing on the way. Raises EditError."""
    at = _skip(text, 0)
    for depth, name in enumerate(path):
        opening = text[at : at + 1]
        if opening not in (b"{", b"["):
            # A scalar stands where a container is needed: it gives way.
            return text[:at] + _nested(path[depth:], value) + text[_value_end(text, at) :]
        items = list(members(text, at))
        item = _find(items, name, opening == b"[", append=True)
        if item is None:
            return _insert(text, at, items, path[depth:], value)
        at = item.start
    return text[:at] + value + text[_value_end(text, at) :]


def delete(text: bytes, path: Path) -> bytes:
    """Remove the value at `path`; nothing happens if there is none."""
    at = _skip(text, 0)
    items: list[Item] = []
    item: Item | None = None
    for name in path:
        items = list(members(text, at))
        item = _find(items, name, text[at : at + 1] == b"[", append=False)
        if item is None:
            return text
        at = item.start
    if item is None:
        return text
    index = items.index(item)
    if index + 1 < len(items):  # with the comma and spaces up to the next
        return text[: item.begin] + text[items[index + 1].begin :]
    if index > 0:  # with the comma before it
        return text[: items[index - 1].end] + text[item.end :]
    return text[: item.begin] + text[item.end :]


def is_index(name: str) -> bool:
    """True if a path's name addresses an element of an array from its start."""
    return name.isascii() and name.isdigit() and len(name) < 10


def _find(items: list[Item], name: str, is_array: bool, *, append: bool) -> Item | None:
    if is_array and name == "-1":
        return items[-1] if items and not append else None
    if is_array:
        return items[int(name)] if is_index(name) and int(name) < len(items) else None
    return next((item for item in items if item.name == name), None)


def _insert(text: bytes, at: int, items: list[Item], path: Path, value: bytes) -> bytes:
    """Append a new member or element to the container at `at`, in the spacing its neighbours have."""
    inner = _nested(path[1:], value)
    if text[at : at + 1] == b"[":
        name = path[0]
        if name != "-1" and not is_index(name):
            raise EditError(f"{name!r} is not an index of an array")
        padding = int(name) - len(items) if name != "-1" else 0
        if padding > MAX_INDEX:
            raise EditError(f"index {name} is too far past the end of an array of {len(items)}")
        inner = b"null," * padding + inner
    else:
        inner = json.dumps(path[0], ensure_ascii=False).encode() + b":" + inner
    if not items:
        return text[: at + 1] + inner + text[at + 1 :]
    end = items[-1].end
    return text[:end] + b"," + inner + text[end:]


def _nested(path: Path, value: bytes) -> bytes:
    """`value` wrapped in the containers that `path` asks for; indexes make arrays."""
    for name in reversed(path):
        if name == "-1" or is_index(name):
            padding = int(name) if name != "-1" else 0
            if padding > MAX_INDEX:
                raise EditError(f"index {name} is too far past the end of a new array")
            value = b"[" + b"null," * padding + value + b"]"
        else:
            value = b"{" + json.dumps(name, ensure_ascii=False).encode() + b":" + value + b"}"
    return value


def _name(raw: bytes) -> str:
    return str(json.loads(raw)) if b"\\" in raw else raw[1:-1].decode("utf-8", "replace")


def _skip(text: bytes, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _value_end(text: bytes, position: int) -> int:
    """Where the value that starts at `position` ends."""
    opening = text[position : position + 1]
    if opening == b'"':
        match = _STRING.match(text, position)
    elif opening in (b"{", b"["):
        return _container_end(text, position)
    else:
        match = _SCALAR.match(text, position)
    if match is None:
        raise EditError(f"no JSON value at byte {position}")
    return match.end()


def _container_end(text: bytes, position: int) -> int:
    depth = 0
    for match in _STRUCTURE.finditer(text, position):
        token = match[0]
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return match.end()
    raise EditError(f"no end of the value at byte {position}")

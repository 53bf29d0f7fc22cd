"""Dataclasses as JSON and back, judged by their annotations: what one process writes and others read.

pydantic does this too, but costs each process that only reads 12 MB and a quarter of a second.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def dump(value: Any) -> bytes:
    """A dataclass, and those in it, as JSON. Infinity and NaN are written as Python does."""
    return json.dumps(value, default=_fields, ensure_ascii=False).encode("utf-8", "surrogatepass")


def load(kind: type[T], data: bytes) -> T:
    """What `dump` made of a `kind`. Raises ValueError on anything else; keys of another version are passed over."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ValueError(f"invalid JSON: {error}") from None
    return cast(T, _reader(cast(Any, kind))(value))


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What turns a JSON value into a `kind`."""
    arguments = get_args(kind)
    origin = get_origin(kind)
    if kind is Any:
        return lambda value: value
    if origin is Literal:
        return _one_of(arguments)
    if origin in (Union, UnionType):
        return _first_of([_reader(part) for part in arguments])
    if origin is tuple:
        return _tuple_of(arguments)
    if origin is dict:
        return _dict_of(_reader(arguments[1]))
    if dataclasses.is_dataclass(kind):
        return _dataclass(cast(type, kind))
    if issubclass(kind, tuple):
        return _named_tuple(kind)
    return _scalar(kind)


def _scalar(kind: type) -> Callable[[Any], Any]:
    kinds = (int, float) if kind is float else (kind,)

    def read(value: Any) -> Any:
        if type(value) not in kinds:
            raise ValueError(f"{value!r} is no {'null' if kind is NoneType else kind.__name__}")
        return float(value) if kind is float else value

    return read


def _one_of(known: tuple[Any, ...]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if value not in known:
            raise ValueError(f"{value!r} is none of {known}")
        return value

    return read


def _first_of(readers: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        for reader in readers[:-1]:
            try:
                return reader(value)
            except ValueError:
                continue
        return readers[-1](value)

    return read


def _tuple_of(parts: tuple[Any, ...]) -> Callable[[Any], Any]:
    readers = [_reader(part) for part in parts if part is not ...]
    repeated = ... in parts

    def read(value: Any) -> Any:
        if not isinstance(value, list) or not (repeated or len(value) == len(readers)):
            raise ValueError(f"{value!r} is no list of what is expected")
        if repeated:
            return tuple(map(readers[0], value))
        return tuple(reader(item) for reader, item in zip(readers, value, strict=True))

    return read


def _named_tuple(kind: type) -> Callable[[Any], Any]:
    read = _tuple_of(tuple(get_type_hints(kind).values()))
    return lambda value: kind(*read(value))


def _dict_of(reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is no object")
        return {key: reader(item) for key, item in value.items()}

    return read


def _dataclass(kind: type) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is no object")
        try:
            return kind(**{key: readers[key](item) for key, item in value.items() if key in readers})
        except TypeError as error:  # something that must be given is missing
            raise ValueError(f"{kind.__name__}: {error}") from None

    return read

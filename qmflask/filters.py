"""Applies a model's or peer's `filters` and `useModelName` to a JSON body, keeping every byte they do not name.

Order and rules: compatibility 1.5. Keys are paths (`a.b`, `list.0`, `list.-1`, `a\\.b` for a dot in a name).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from qmflask import jsonedit
from qmflask.errors import QmflaskError
from qmflask.jsonedit import EditError, Path

#: In a set key these make it a query of their language, which sets nothing.
_QUERY = frozenset("*?|#")


class FilterFailed(QmflaskError):
    """Raised when a filter cannot be applied: the configuration is at fault, not the request."""

    code = "filter_failed"


@dataclass(frozen=True)
class Filters:
    """The `filters` of a model or peer, as configured."""

    strip_params: str = ""
    set_params: Mapping[str, Any] = field(default_factory=dict)
    set_params_by_id: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def strip_keys(text: str) -> list[str]:
    """The keys of a `stripParams` list: sorted, without blanks, duplicates and anything that addresses `model`."""
    keys = {key.strip() for key in text.split(",")}
    return sorted(key for key in keys if key and not _addresses_model(key))


def apply(body: bytes, filters: Filters, requested: str, use_model_name: str = "") -> bytes:
    """The body with `useModelName`, then stripParams, setParams and setParamsByID applied.

    `body` is valid JSON; anything but an object stays as it is. `requested` is the name the client asked for.
    Raises FilterFailed.
    """
    if not _is_object(body):
        return body
    if use_model_name:
        body = jsonedit.set_value(body, ("model",), orjson.dumps(use_model_name))
    for key in strip_keys(filters.strip_params):
        body = _strip(body, key)
    body = _set_all(body, filters.set_params)
    return _set_all(body, filters.set_params_by_id.get(requested, {}))


def parse_path(key: str) -> Path:
    """A key's names: split at dots that no backslash escapes."""
    names, name, escaped = [], "", False
    for character in key:
        if escaped:
            name += character
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == ".":
            names.append(name)
            name = ""
        else:
            name += character
    return (*names, name)


def _set_all(body: bytes, values: Mapping[str, Any]) -> bytes:
    for key in sorted(values):
        if not _addresses_model(key):
            body = _set(body, key, values[key])
    return body


def _set(body: bytes, key: str, value: Any) -> bytes:
    if key.startswith("@") or _unescaped(key, _QUERY):
        return body
    if not key:
        raise FilterFailed("error setting parameter: the key in setParams is empty; name a member of the body.")
    try:
        return jsonedit.set_value(body, parse_path(key), orjson.dumps(value))
    except (EditError, orjson.JSONEncodeError) as error:
        raise FilterFailed(
            f"error setting parameter {key!r}: {error}; correct setParams in the configuration."
        ) from error


def _strip(body: bytes, key: str) -> bytes:
    if key.startswith("@") or _unescaped(key, _QUERY):
        raise FilterFailed(f"error stripping parameter {key!r}: patterns are not possible; list names in stripParams.")
    return jsonedit.delete(body, parse_path(key))


def _addresses_model(key: str) -> bool:
    """True for `model` and everything beneath it: the name that was routed by must reach the server."""
    return parse_path(key)[0] == "model"


def _unescaped(key: str, characters: frozenset[str]) -> bool:
    escaped = False
    for character in key:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character in characters:
            return True
    return False


def _is_object(body: bytes) -> bool:
    return body.lstrip(b" \t\r\n")[:1] == b"{"

"""Field types that take YAML values as compatibility 1.2 says: what each accepts, and how it says no."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from qmflask.config.macros import text_of
from qmflask.config.units import parse_duration, parse_size
from qmflask.config.yaml12 import Timestamp

_TRUE = frozenset({"y", "Y", "yes", "Yes", "YES", "on", "On", "ON"})
_FALSE = frozenset({"n", "N", "no", "No", "NO", "off", "Off", "OFF"})
_INT64 = 2**63


def wrong(message: str, allowed: str, hint: str = "") -> PydanticCustomError:
    """The error a field raises: a sentence, what is allowed, and perhaps the way out."""
    context = {"said": message, "allowed": allowed, "hint": hint}
    return PydanticCustomError("qmflask", "{said}", context)


def kind_of(value: Any) -> str:
    """What a value is, in words for people."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, Timestamp):
        return "a date"
    names = {str: "text", int: "a whole number", float: "a number", list: "a list", dict: "a mapping"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), type(value).__name__)


def _to_text(value: Any) -> str:
    if isinstance(value, str | int | float):
        return text_of(value)
    raise wrong(f"expected text, not {kind_of(value)}", "text")


def _to_item_text(value: Any) -> str:
    return "" if value is None else _to_text(value)


def _to_int(value: Any) -> int:
    if isinstance(value, float) and math.isfinite(value):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if -_INT64 <= value < _INT64:
            return value
        raise wrong("the number is too large", "a whole number of at most 64 bits")
    hint = "remove the quotes" if isinstance(value, str) and _is_number(value) else ""
    raise wrong(f"expected a whole number, not {kind_of(value)}", "a whole number", hint)


def _is_number(text: str) -> bool:
    return len(text) < 30 and text.strip().lstrip("+-").replace(".", "", 1).isdigit()


def _to_number(value: Any) -> float | int:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < 1e15:
        return value
    raise wrong(f"expected a number, not {kind_of(value)}", "a number")


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and (value in _TRUE or value in _FALSE):
        return value in _TRUE
    hint = "remove the quotes" if isinstance(value, str) and value.lower() in ("true", "false") else ""
    raise wrong(f"expected true or false, not {kind_of(value)}", "true, false, yes, no, on, off", hint)


def _to_go_duration(value: Any) -> float:
    allowed = "a duration with a unit: 5s, 1m30s, 6000ms"
    if not isinstance(value, str) or isinstance(value, Timestamp):
        raise wrong(f"expected a duration with a unit, not {kind_of(value)}", allowed)
    try:
        return parse_duration(value)
    except ValueError as error:
        raise wrong(str(error), allowed) from None


def _to_seconds(value: Any) -> float:
    if isinstance(value, str) and not isinstance(value, Timestamp):
        value = _to_go_duration(value)
    seconds = _to_number(value)
    if seconds < 0:
        raise wrong("must be >= 0", "seconds, or a duration such as 30s or 2m")
    return seconds


def _sized(up: bool) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        try:
            return parse_size(value, up)
        except ValueError as error:
            reason = str(error)
            if not isinstance(value, str | int | float):
                reason = f"expected a size, not {kind_of(value)}"
            raise wrong(reason, "a number of GiB >= 0, or text with a unit: 500MiB, 8GB") from None

    return convert


def _to_loading_state(value: Any) -> bool | str:
    if value == "comments":
        return "comments"
    try:
        return _to_bool(value)
    except PydanticCustomError:
        raise wrong("expected true, false or comments", "true, false, comments") from None


def _to_free(value: Any) -> Any:
    if isinstance(value, Timestamp):
        return str(value)
    if isinstance(value, list):
        return [_to_free(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_free(item) for key, item in value.items()}
    return value


def _schema(kind: Any, show: str, **more: Any) -> WithJsonSchema:
    """JSON Schema of a scalar; `x-type` is what the documentation shows as its type."""
    return WithJsonSchema({"type": kind, "x-type": show, **more})


_SIZE_PATTERN = r"^\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([kKmMgGtT]?[iI]?[bB]?)\s*$"
_DURATION_PATTERN = r"^[+-]?(0|(([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|ms|s|m|h))+)$"

Text = Annotated[str, BeforeValidator(_to_text), _schema(["string", "number", "boolean"], "text")]
ItemText = Annotated[str, BeforeValidator(_to_item_text), _schema(["string", "number", "boolean", "null"], "text")]
Int = Annotated[int, BeforeValidator(_to_int), _schema("number", "whole number")]
Bool = Annotated[
    bool,
    BeforeValidator(_to_bool),
    WithJsonSchema({"enum": [True, False, "yes", "no", "on", "off"], "x-type": "true or false"}),
]
Duration = Annotated[
    float, BeforeValidator(_to_go_duration), _schema("string", "duration with unit", pattern=_DURATION_PATTERN)
]
Seconds = Annotated[
    float,
    BeforeValidator(_to_seconds),
    _schema(["number", "string"], "seconds or duration", minimum=0, pattern=_DURATION_PATTERN),
]
Millis = Annotated[int, BeforeValidator(_to_int), Field(ge=0), _schema("integer", "milliseconds", minimum=0)]
Charge = Annotated[
    int, BeforeValidator(_sized(up=False)), _schema(["number", "string"], "size", minimum=0, pattern=_SIZE_PATTERN)
]
Budget = Annotated[
    int, BeforeValidator(_sized(up=True)), _schema(["number", "string"], "size", minimum=0, pattern=_SIZE_PATTERN)
]
Number = Annotated[float, BeforeValidator(_to_number), Field(ge=0), _schema("number", "number", minimum=0)]
Loading = Annotated[
    Any,
    BeforeValidator(_to_loading_state),
    WithJsonSchema({"enum": [True, False, "comments"], "x-type": "true, false or comments"}),
]
Free = Annotated[Any, BeforeValidator(_to_free), WithJsonSchema({"x-type": "any value"})]

"""Finds in a request's body or query which model it names and whether it wants a stream.

Bytes in, values out. Rules: compatibility 3.4. JSON must be valid, yet is only looked at: bodies go on byte for byte.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import quote_plus, unquote_plus

import orjson

from qmflask import jsonedit
from qmflask.errors import InvalidJSON

_WHITESPACE = b" \t\r\n"


@dataclass(frozen=True)
class Wanted:
    """What a request names. `model` is None if it names none."""

    model: str | None = None
    stream: bool = False


def looks_like_json(body: bytes) -> bool:
    """True if a body whose content type does not say so is a JSON object."""
    return body[:1] == b"{" or body[:256].lstrip(_WHITESPACE)[:1] == b"{"


def from_json(body: bytes) -> Wanted:
    """The top-level members `model` and `stream`; the first of duplicates counts. Raises InvalidJSON."""
    document = parse_json(body)
    if not isinstance(document, dict):
        return Wanted()
    model, stream = document.get("model"), document.get("stream")
    plain = body.count(b'"model"') <= 1 and body.count(b'"stream"') <= 1 and not _escapes_letters(body)
    if not plain or not (model is None or isinstance(model, str)):
        model, stream = _first_members(body)
    if model and not _is_text(model):
        raise InvalidJSON("The model's name holds half of a surrogate pair, which is no character.")
    return Wanted(model or None, _truthy(stream))


def parse_json(body: bytes) -> Any:
    """Parse a JSON text. Raises InvalidJSON with line, column and byte of the fault."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return _parse_leniently(body)


def from_form(body: bytes) -> Wanted:
    """The first `model` and `stream` of an urlencoded form."""
    return from_query(body.decode("latin-1"))


def from_query(query: str) -> Wanted:
    """The first `model` and `stream` of a query string, as WSGI gives it."""
    found: dict[str, str] = {}
    for piece in query.split("&"):
        name, _, value = piece.partition("=")
        name = unquote_plus(name) if "%" in name else name
        if name in ("model", "stream") and name not in found:
            found[name] = unquote_plus(value, errors="replace")
            if len(found) == 2:
                break
    return Wanted(found.get("model") or None, found.get("stream") == "true")


def rename_in_form(body: bytes, model: str) -> bytes:
    """An urlencoded form with its first `model` replaced and every other byte kept."""
    pieces = body.split(b"&")
    for index, piece in enumerate(pieces):
        name, equals, _ = piece.partition(b"=")
        if unquote_plus(name.decode("latin-1")) == "model":
            pieces[index] = name + (equals or b"=") + quote_plus(model).encode()
            break
    return b"&".join(pieces)


def rename_in_json(body: bytes, model: str) -> bytes:
    """A JSON body with its first top-level `model` replaced and every other byte kept."""
    return jsonedit.set_value(body, ("model",), orjson.dumps(model))


def _escapes_letters(body: bytes) -> bool:
    """True if a name may be spelled with escapes, so that counting its plain spelling proves nothing."""
    return b"\\u006" in body or b"\\u007" in body


def _is_text(name: str) -> bool:
    """False for what the grammar of JSON allows but no encoding: it would fail wherever the name is written."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _first_members(body: bytes) -> tuple[str | None, Any]:
    """`model` as text and `stream`, each the first of its name, by a scan of the top level."""
    found: dict[str, Any] = {}
    for member in jsonedit.members(body):
        if member.name in ("model", "stream") and member.name not in found:
            found[member.name] = body[member.start : member.end]
    raw, stream = found.get("model"), found.get("stream")
    return _as_text(raw), None if stream is None else _parse_leniently(stream)


def _as_text(raw: bytes | None) -> str | None:
    """A scalar as text: numbers and booleans in their own spelling; null and containers name nothing."""
    if raw is None or raw == b"null" or raw[:1] in (b"{", b"["):
        return None
    if raw[:1] == b'"':
        return str(_parse_leniently(raw))
    return raw.decode("ascii")


def _truthy(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("true", "1")
    return isinstance(value, (bool, int, float)) and bool(value)


def _parse_leniently(body: bytes) -> Any:
    """Parse what orjson refuses but the grammar allows (lone surrogates, deep nesting up to Python's limit)."""
    try:
        text = body.decode("utf-8")
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InvalidJSON(
            f"The body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno} "
            f"(byte {len(error.doc[: error.pos].encode('utf-8', 'surrogatepass'))} of {len(body)})."
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidJSON(f"The body is not valid JSON: byte {error.start} is not UTF-8.") from None
    except _Constant as error:
        raise InvalidJSON(f"The body is not valid JSON: {error} is no JSON number.") from None
    except RecursionError:
        raise InvalidJSON("The body is nested too deeply.") from None
    except ValueError as error:  # a number with more digits than Python converts
        raise InvalidJSON(f"The body is not valid JSON: {error}.") from None


class _Constant(Exception):
    pass


def _refuse_constant(name: str) -> NoReturn:
    raise _Constant(name)

"""Which headers pass, in either direction, and in what form: hop-by-hop rules, keys, forwarding, status lines.

Names and values are the latin-1 text that WSGI uses. Rules: field notes A26, compatibility 3.3 and 3.6.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any

Header = tuple[str, str]

#: Meaningful for one connection only; never passed on, nor is anything that Connection names.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "trailers",
        "transfer-encoding",
        "upgrade",
    }
)

#: Set by ourselves on the way up (Host is kept or replaced, lengths follow the body).
_OURS = frozenset({"host", "content-length", "expect", "http2-settings"})

_KEY_HEADERS = frozenset({"authorization", "x-api-key"})
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[ \t\x21-\x7e\x80-\xff]*")
_CODINGS = frozenset({"gzip", "deflate", "identity"})


def request_headers(
    environ: Mapping[str, Any],
    *,
    accepted_key: str | None = None,
    upstream_key: str | None = None,
    peer_host: str | None = None,
    readable: bool = False,
) -> list[Header]:
    """The headers to send upstream, without Content-Length, from a WSGI environ.

    `accepted_key`: the client's key for us, which is removed. `upstream_key`: sent instead, as Bearer and x-api-key.
    `peer_host`: for peers, whose Host it is and who are not told whom we serve. `readable`: accept only codings
    that the answer can be read in for its token counts.
    """
    named = _tokens(environ.get("HTTP_CONNECTION", ""))
    headers: list[Header] = [("Host", peer_host if peer_host is not None else _host(environ))]
    for key, value in environ.items():
        if key[:5] != "HTTP_":
            continue
        name, lower = _names(key)
        if lower in HOP_BY_HOP or lower in _OURS or lower in named:
            continue
        if lower in _KEY_HEADERS and (upstream_key or _carries(lower, value, accepted_key)):
            continue
        if lower == "x-forwarded-for" or (peer_host is not None and _tells_of_client(lower)):
            continue
        if readable and lower == "accept-encoding":
            value = readable_codings(value)
        headers.append((name, value))
    if environ.get("CONTENT_TYPE"):
        headers.append(("Content-Type", environ["CONTENT_TYPE"]))
    if upstream_key:
        headers += [("Authorization", f"Bearer {upstream_key}"), ("X-Api-Key", upstream_key)]
    if peer_host is None:
        headers += _forwarded_for(environ)
    return headers


def response_headers(
    headers: Iterable[Header], extra: Iterable[Header] = (), length: int | None = None
) -> list[Header]:
    """The upstream's headers that reach the client, then `extra`, which replace same-named ones, then the length.

    The upstream's own Content-Length never passes: it may be in a form that servers refuse, or contradict the
    framing. An event stream is marked so that a buffering nginx lets its events pass at once.
    """
    headers = list(headers)
    extra = list(extra)
    if is_event_stream(headers):
        extra.append(("X-Accel-Buffering", "no"))
    drop = HOP_BY_HOP | {"content-length", *(name.lower() for name, _ in extra)}
    for name, value in headers:
        if name.lower() == "connection":
            drop |= _tokens(value)
    passed = [(n, v) for n, v in headers if n.lower() not in drop]
    if length is not None:
        extra.append(("Content-Length", str(length)))
    return [(n, v) for n, v in passed + extra if valid_header(n, v)]


def valid_header(name: str, value: str) -> bool:
    """True if servers accept this header; others would make the whole response fail."""
    return _TOKEN.fullmatch(name) is not None and _VALUE.fullmatch(value) is not None


def asks_for_websocket(environ: Mapping[str, Any]) -> bool:
    """True for a request that begins a websocket (RFC 6455, 4.1)."""
    return (
        "websocket" in _tokens(environ.get("HTTP_UPGRADE", ""))
        and "upgrade" in _tokens(environ.get("HTTP_CONNECTION", ""))
        and environ["REQUEST_METHOD"] == "GET"
        and environ.get("SERVER_PROTOCOL") == "HTTP/1.1"
    )


def first(headers: Iterable[Header], name: str) -> str | None:
    """The first value of a header, given in lower case."""
    for key, value in headers:
        if key.lower() == name:
            return value
    return None


def is_event_stream(headers: Iterable[Header]) -> bool:
    """True for server-sent events."""
    return "text/event-stream" in (first(headers, "content-type") or "").lower()


def status_line(status: int, reason: str) -> str:
    """`200 OK` for WSGI: a reason that servers would refuse gives way to the standard phrase."""
    reason = reason.strip()
    if not reason or _VALUE.fullmatch(reason) is None:
        try:
            reason = HTTPStatus(status).phrase
        except ValueError:
            reason = "Unknown"
    return f"{status} {reason}"


def offered_key(environ: Mapping[str, Any]) -> str | None:
    """The one key a request offers: Basic's password, else Bearer, else x-api-key (compatibility 3.3)."""
    authorization = environ.get("HTTP_AUTHORIZATION", "")
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "basic":
        password = _basic_password(rest)
        if password is not None:
            return password
    elif scheme.lower() == "bearer":
        return str(rest)
    key = environ.get("HTTP_X_API_KEY")
    return str(key) if key is not None else None


def readable_codings(accept_encoding: str) -> str:
    """An Accept-Encoding value with only gzip, deflate and identity left; identity if none is."""
    kept = [part.strip() for part in accept_encoding.split(",") if _coding(part) in _CODINGS]
    return ", ".join(kept) or "identity"


@lru_cache(maxsize=512)
def _names(key: str) -> tuple[str, str]:
    """A WSGI key as a header's name, in the usual spelling and in lower case."""
    name = key[5:].replace("_", "-")
    return name.title(), name.lower()


def _coding(part: str) -> str:
    return part.partition(";")[0].strip().lower()


def _tokens(value: str) -> frozenset[str]:
    return frozenset(name.strip().lower() for name in value.split(",")) if value else frozenset()


def _host(environ: Mapping[str, Any]) -> str:
    host = environ.get("HTTP_HOST") or environ.get("SERVER_NAME") or "localhost"
    return str(host)


def _carries(name: str, value: str, key: str | None) -> bool:
    """True if this header holds the accepted key, in whichever of its forms."""
    if key is None:
        return False
    if name == "x-api-key":
        return value.strip() == key
    scheme, _, rest = value.partition(" ")
    if scheme.lower() == "basic":
        return _basic_password(rest) == key
    return rest.strip() == key.strip()


def _basic_password(encoded: str) -> str | None:
    try:
        _user, colon, password = base64.b64decode(encoded.strip(), validate=True).decode("utf-8").partition(":")
    except (binascii.Error, ValueError):
        return None
    return password if colon else None


def _tells_of_client(name: str) -> bool:
    return name == "forwarded" or name.startswith("x-forwarded-")


def _forwarded_for(environ: Mapping[str, Any]) -> list[Header]:
    """X-Forwarded-For with our client's address appended; AF_UNIX clients have none."""
    parts = [environ.get("HTTP_X_FORWARDED_FOR", ""), environ.get("REMOTE_ADDR", "")]
    value = ", ".join(part for part in parts if part)
    return [("X-Forwarded-For", value)] if value else []

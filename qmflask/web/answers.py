"""How values, errors, redirects and relayed answers become HTTP; the one place that renders the error body."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

import orjson
from flask import Response

from qmflask.errors import ConcurrencyLimit, QmflaskError
from qmflask.headers import Header, valid_header
from qmflask.relay import Relayed

#: Answered to browsers that ask no particular headers before a request from another site.
_CORS_HEADERS = "Content-Type, Authorization, Accept, X-Requested-With"
_CORS_METHODS = "GET, POST, PUT, PATCH, DELETE, OPTIONS"
#: What may stand in a Location as it is; quotes, spaces, control characters and the backslash are encoded.
_LOCATION = "/:@!$&'()*+,;=~-._%?"


class Passed(Response):
    """A relayed answer: its head and body go to the server untouched, past everything Response would add."""

    def __init__(self, relayed: Relayed) -> None:
        super().__init__(status=relayed.status)
        self._relayed = relayed

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        """Called by the WSGI server."""
        return pass_on(self._relayed, start_response)


def pass_on(relayed: Relayed, start_response: Any) -> Iterable[bytes]:
    """Give a relayed answer to the WSGI server."""
    try:
        start_response(relayed.status, relayed.headers)
    except BaseException:
        close = getattr(relayed.body, "close", None)  # the server closes only what it was given
        if close is not None:
            close()
        raise
    return relayed.body


def json_answer(value: Any, status: int = 200, headers: list[Header] | None = None) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(value), status, headers, mimetype="application/json")


def text_answer(text: str, status: int = 200, headers: list[Header] | None = None) -> Response:
    """A plain text response."""
    return Response(text, status, headers, mimetype="text/plain")


def error_answer(error: QmflaskError, accept: str, request_id: str | None = None) -> Response:
    """An error as the client can read it: plain text or a small page when it asks for that, else JSON."""
    headers = error.headers()
    if request_id is not None:
        headers.append(("X-QM-Request-Id", request_id))
    if isinstance(error, ConcurrencyLimit):
        accept = ""  # clients that retry read the code, whatever they accept
    if "text/plain" in accept:
        return text_answer(f"qmflask: {error.message}", error.status, headers)
    if "text/html" in accept:
        text = html.escape(error.message)
        page = f"<!doctype html><title>{error.status} {error.code}</title><h1>{error.status}</h1><p>{text}</p>"
        return Response(page, error.status, headers, mimetype="text/html")
    return json_answer(error.body(), error.status, headers)


def redirect(status: int, path: str, query: str = "", mount: str = "") -> Response:
    """A redirect to a path of our own below `mount` (SCRIPT_NAME), whose percent-encoding is kept."""
    path = mount + path
    # A second slash or a backslash at the start would lead browsers to another host.
    location = quote("/" + path.lstrip("/\\"), safe=_LOCATION) + (f"?{quote(query, safe=_LOCATION)}" if query else "")
    return Response(b"", status, [("Location", location)], mimetype="text/plain")


def preflight(asked: str | None) -> Response:
    """The answer to any OPTIONS request; `asked` is Access-Control-Request-Headers."""
    names = [name.strip() for name in (asked or "").split(",")]
    allowed = ", ".join(name for name in names if name and valid_header(name, "")) or _CORS_HEADERS
    headers = [
        ("Access-Control-Allow-Origin", "*"),
        ("Access-Control-Allow-Methods", _CORS_METHODS),
        ("Access-Control-Allow-Headers", allowed),
        ("Access-Control-Max-Age", "86400"),
    ]
    response = Response(status=204, headers=headers)
    response.headers.remove("Content-Type")
    return response

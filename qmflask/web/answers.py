"""How errors and values become HTTP answers; the one place that renders the error body."""

from __future__ import annotations

import html
from typing import Any

import orjson
from flask import Response

from qmflask.errors import QmflaskError


def json_answer(value: Any, status: int = 200, headers: list[tuple[str, str]] | None = None) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(value), status, headers, mimetype="application/json")


def error_answer(error: QmflaskError, accept: str) -> Response:
    """An error as the client can read it: plain text or a small page when it asks for that, else JSON."""
    headers = error.headers()
    if "text/plain" in accept:
        return Response(f"qmflask: {error.message}", error.status, headers, mimetype="text/plain")
    if "text/html" in accept:
        text = html.escape(error.message)
        page = f"<!doctype html><title>{error.status} {error.code}</title><h1>{error.status}</h1><p>{text}</p>"
        return Response(page, error.status, headers, mimetype="text/html")
    return json_answer(error.body(), error.status, headers)

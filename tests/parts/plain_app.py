"""A WSGI app without qmflask, for the worker's tests: `/stream?N` yields N events 50 ms apart, `/big?N` N bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    """The WSGI entry point."""
    if environ["PATH_INFO"] == "/stream":
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        return _events(int(environ["QUERY_STRING"]))
    if environ["PATH_INFO"] == "/big":
        size = int(environ["QUERY_STRING"])
        start_response("200 OK", [("Content-Length", str(size))])
        return [b"x" * size]
    start_response("200 OK", [("Content-Length", "3")])
    return [b"ok\n"]


def _events(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield b"data: %d\n\n" % number
        time.sleep(0.05)

"""Streams for open pages: their own bounded slots, and an end when the client leaves or the worker drains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from flask import Response, request

from qmflask.errors import Overloaded
from qmflask.hangup import Client, client_socket
from qmflask.router import Router

#: A page that is reloaded comes back before its old stream's end was noticed.
SLOT_WAIT = 0.2


class Viewer:
    """One open stream: knows when to end, and sleeps so that it notices at once."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._woken = threading.Event()
        self._client = Client()
        self._sock = client_socket(request.environ)
        self._client.attach(self._woken.set)
        if self._sock is not None:
            router.hangups.watch(self._sock, self._client)

    @property
    def ended(self) -> bool:
        """True when the client has left, or this worker drains."""
        return self._client.gone or self._router.ending

    def sleep(self, seconds: float) -> None:
        """Wait, but not for a client that has left."""
        self._woken.wait(seconds)

    def close(self) -> None:
        """Stop watching the client."""
        if self._sock is not None:
            self._router.hangups.unwatch(self._sock)


class _Body:
    """A stream's body; gives its slot back exactly once, in `close`, which every WSGI server calls."""

    def __init__(self, router: Router, viewer: Viewer, pieces: Iterator[bytes]) -> None:
        self._router = router
        self._viewer = viewer
        self._pieces = pieces
        self._open = True
        self._begun = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if not self._begun:
            self._begun = True
            return b""  # the headers go out at once
        return next(self._pieces)

    def close(self) -> None:
        """End the stream."""
        if self._open:
            self._open = False
            self._viewer.close()
            self._router.viewers.release()
            close = getattr(self._pieces, "close", None)
            if close is not None:
                close()


def stream_answer(router: Router, pieces: Callable[[Viewer], Iterator[bytes]], mimetype: str) -> Response:
    """Answer with an endless body. Raises Overloaded when all streams for pages of this worker are taken."""
    if not router.viewers.acquire(timeout=SLOT_WAIT):
        raise Overloaded("all streams for pages of this worker are taken; close a page or try again", retry_after=2)
    viewer = Viewer(router)
    headers = [("X-Content-Type-Options", "nosniff"), ("X-Accel-Buffering", "no"), ("Cache-Control", "no-cache")]
    body = _Body(router, viewer, pieces(viewer))
    return Response(body, headers=headers, content_type=f"{mimetype}; charset=utf-8", direct_passthrough=True)

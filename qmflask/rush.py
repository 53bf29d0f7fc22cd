"""Reads a connection, and in larger pieces while it is in a rush: more events than anybody could read one by one."""

from __future__ import annotations

import time

from qmflask.timedsocket import TimedSocket

#: Pieces that come within this time of one another, and so many of them in a row, are a rush.
GAP_NS, PIECES = 500_000, 3
#: What a read waits for then, and for how long at most.
SIZE, SECONDS = 16 * 1024, 0.002
#: Bytes of a gathered piece that is no rush any more.
FEW = 1024


class Rush:
    """Each piece costs the same, however small, and at full speed a stream has hundreds.

    A stream at the pace of a model, of any model, is read as it comes: a rush begins at 2000 events a second. The
    kernel does the waiting, so that the sender's writes wake nobody; see `TimedSocket.gather`.
    """

    def __init__(self, sock: TimedSocket) -> None:
        self._sock = sock
        self._close = 0  # pieces in a row that came close to the one before
        self._last = 0
        self._on = False

    def recv(self, size: int) -> bytes:
        """As the socket's."""
        if self._on:
            data = self._gathered(size)
            if data is not None:
                return data
        data = self._sock.recv(size)
        now = time.monotonic_ns()
        self._close = self._close + 1 if now - self._last < GAP_NS else 0
        self._last = now
        if data and self._close >= PIECES:
            self._on = True
            self._sock.gather(SIZE, SECONDS)
        return data

    def _gathered(self, size: int) -> bytes | None:
        """A large piece, or what came in vain hope of one; None if nothing came."""
        try:
            data = self._sock.recv(size)
        except TimeoutError:
            data = None
        if data is None or len(data) < FEW:
            self.end()
        return data

    def end(self) -> None:
        """Read piece by piece again."""
        if self._on:
            self._on, self._close = False, 0
            self._sock.gather_no_more()

"""Carries bytes both ways between two sockets until one side ends: what a connection is once it switched protocols.

It works in the request's thread and waits in one `poll`: no timer, and no byte is held back or copied that the other
side takes at once. What one side does not take stops the reading from the other.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable

from qmflask.bell import Bell
from qmflask.hangup import Client

#: Bytes read at once. More than a TLS record holds, so that none is left behind where poll does not see it.
BLOCK = 64 * 1024

_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class _Way:
    """One direction. `rest`: read and not taken yet. `ended`: the source gives nothing more. `refused`: the sink."""

    __slots__ = ("_moved", "ended", "refused", "rest", "sink", "source")

    def __init__(self, source: socket.socket, sink: socket.socket, rest: bytes, moved: Callable[[bytes], None]) -> None:
        self.source = source
        self.sink = sink
        self.rest: bytes | memoryview = rest
        self.ended = self.refused = False
        self._moved = moved

    def move(self) -> bool:
        """Read what has come unless something is left, and write what is taken; True if any was taken."""
        if not self.rest and not self.ended:
            self._read()
        return bool(self.rest) and self._write()

    def _read(self) -> None:
        try:
            data = self.source.recv(BLOCK)
        except _NOT_NOW:
            return
        except OSError:  # reset
            data = b""
        if data:
            self.rest = data
            self._moved(data)
        else:
            self.ended = True

    def _write(self) -> bool:
        rest = self.rest
        try:
            taken = self.sink.send(rest)
        except _NOT_NOW:
            return False
        except OSError:
            self.refused = self.ended = True
            self.rest = b""
            return False
        self.rest = memoryview(rest)[taken:] if taken < len(rest) else b""
        return taken > 0


class Pump:
    """Between `near`, the socket of `client`, and `far`, the server's. `run` once.

    `moved` sees the bytes that come from the server, and b"" whenever some come from the client. That the client has
    left is told by `client`, whose hang-up is watched elsewhere.
    """

    def __init__(self, client: Client, near: socket.socket, far: socket.socket, moved: Callable[[bytes], None]) -> None:
        self._client = client
        self._near = near
        self._far = far
        self._moved = moved
        self._poll = select.poll()
        self._masks: dict[int, int] = {}

    def run(self, to_near: bytes = b"", to_far: bytes = b"") -> bool:
        """Carry until the end, these bytes first; True if the server ended it and the client has all of its bytes."""
        wake = Bell()
        detach = self._client.attach(wake.ring)
        try:
            self._near.settimeout(0)
            self._far.settimeout(0)
            self._poll.register(wake, select.POLLIN)
            return self._carry(
                _Way(self._far, self._near, to_near, self._moved),
                _Way(self._near, self._far, to_far, lambda _: self._moved(b"")),
            )
        finally:
            detach()
            wake.close()

    def _carry(self, down: _Way, up: _Way) -> bool:
        near, far = self._near.fileno(), self._far.fileno()
        ready = {near, far}
        while True:
            if (far if not down.rest else near) in ready:
                down.move()
            if (near if not up.rest else far) in ready:
                up.move()
            if self._client.gone:
                return self._leave(up)
            if down.refused or (up.ended and not up.refused):
                return False  # the client has left; all that it sent before has been taken
            if down.ended:
                return True
            self._await(near, reads=not up.rest and not up.ended, writes=bool(down.rest))
            self._await(far, reads=not down.rest and not down.ended, writes=bool(up.rest))
            ready = {fd for fd, _ in self._poll.poll()}

    def _leave(self, up: _Way) -> bool:
        """The client has left or was told to: what it said last is passed on as far as it is taken at once."""
        while self._client.reason == "gone" and up.move():
            pass
        return False

    def _await(self, fd: int, *, reads: bool, writes: bool) -> None:
        # A descriptor nothing is wanted of is left out: poll would report its hang-up for ever.
        mask = (select.POLLIN if reads else 0) | (select.POLLOUT if writes else 0)
        if mask == self._masks.get(fd, 0):
            return
        self._masks[fd] = mask
        if mask:
            self._poll.register(fd, mask)
        else:
            self._poll.unregister(fd)

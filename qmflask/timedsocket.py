"""Sockets whose timeouts the kernel keeps: one system call per read or write, no switching between blocking modes.

Python keeps a timeout by making the socket non-blocking and asking `poll` before each call, which doubles the calls,
and each of them lets other threads take the interpreter. SO_RCVTIMEO and SO_SNDTIMEO (socket(7)) do the same for free.
"""

from __future__ import annotations

import errno
import functools
import socket
import struct
from typing import Any

#: How late a call is told of by the kernel.
_LATE = (errno.EAGAIN, errno.EINPROGRESS)


class TimedSocket(socket.socket):
    """A socket like any other: `settimeout` bounds each call that waits, which then raises TimeoutError.

    Other than Python's, the timeout belongs to the descriptor, and accepted TCP connections inherit a listener's.
    """

    #: Seconds, None for no limit, 0 for a call that never waits.
    _limit: float | None = None
    #: Whether the kernel watches for a peer whose host has vanished (`hangup.probe_peer`), or need not.
    probed = False

    def settimeout(self, value: float | None) -> None:
        """Bound reads, writes and `connect`; 0 makes them not wait at all."""
        if value == 0 or self._limit == 0:
            super().settimeout(0.0 if value == 0 else None)
        if value != 0:
            self.bound(socket.SO_RCVTIMEO, value)
            self.bound(socket.SO_SNDTIMEO, value)
        self._limit = value

    def gettimeout(self) -> float | None:
        """What `settimeout` was given."""
        return self._limit

    def setblocking(self, flag: bool) -> None:
        """As Python defines it: no limit, or no waiting."""
        self.settimeout(None if flag else 0.0)

    def bound(self, option: int, seconds: float | None) -> None:
        """Set one direction's limit, unknown to `gettimeout`."""
        self.setsockopt(socket.SOL_SOCKET, option, timeval(seconds))

    def presume(self, limit: float | None) -> None:
        """Take `limit` for set: the listener's, which this connection has inherited."""
        self._limit = limit

    def recv(self, *args: Any) -> bytes:
        """As socket's."""
        try:
            return super().recv(*args)
        except BlockingIOError as error:
            raise self._judged(error) from None

    def send(self, *args: Any) -> int:
        """As socket's."""
        try:
            return super().send(*args)
        except BlockingIOError as error:
            raise self._judged(error) from None

    def sendall(self, *args: Any) -> None:
        """As socket's; the limit is on each step that takes no byte, not on all of it."""
        try:
            super().sendall(*args)
        except BlockingIOError as error:
            raise self._judged(error) from None

    def connect(self, address: Any) -> None:
        """As socket's."""
        try:
            super().connect(address)
        except BlockingIOError as error:
            raise self._judged(error) from None

    def connect_within(self, address: Any, seconds: float | None) -> None:
        """Connect; raises TimeoutError after `seconds`. What `settimeout` was given stands afterwards."""
        self.bound(socket.SO_SNDTIMEO, seconds)
        self.connect(address)
        self.bound(socket.SO_SNDTIMEO, self._limit)

    def gather(self, size: int, seconds: float) -> None:
        """Have each read wait until `size` bytes are there, at most so long; what has come by then is given.

        With nothing it raises TimeoutError. The sender's writes wake nobody meanwhile (SO_RCVLOWAT).
        """
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
        self.bound(socket.SO_RCVTIMEO, seconds)

    def gather_no_more(self) -> None:
        """Have each read give whatever there is again, within what `settimeout` was given."""
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self.bound(socket.SO_RCVTIMEO, self._limit)

    def _judged(self, error: BlockingIOError) -> OSError:
        return error if self._limit == 0 or error.errno not in _LATE else TimeoutError("timed out")


def release(listener: Any) -> None:
    """Have a listening socket wait and its connections last as they like: servers that know no such limits take over.

    It does not block from here on, as those servers have it, so that nobody who accepts now is held by it for ever.
    """
    listener.setblocking(False)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        listener.setsockopt(socket.SOL_SOCKET, option, timeval(None))


@functools.lru_cache(maxsize=64)
def timeval(seconds: float | None) -> bytes:
    """A struct timeval; None is no limit, which the kernel spells zero."""
    if seconds is None:
        return struct.pack("ll", 0, 0)
    micros = max(1, round(seconds * 1_000_000))
    return struct.pack("ll", *divmod(micros, 1_000_000))

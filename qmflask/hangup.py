"""Notices within milliseconds that a client has left or stalls, and tells the request that serves it.

One epoll thread per process watches the sockets of requests in flight (field notes A10). It watches for the
peer's FIN alone, so pipelined bytes do not matter, and a client that half-closes counts as gone, as nginx has it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

Callback = Callable[[], None]

#: A client that takes none of the bytes ready for it for this long is gone (DESIGN, promise 3).
STALL_SECONDS = 60.0


class Client:
    """One request's view of its client: whether it is still there, and whom to tell when it is not.

    Thread-safe. `reason` is "gone" (hung up), "stalled" (takes no bytes) or whatever `cancel` was given.
    `writing_since` is the monotonic time in ns at which bytes were handed to the server, None while none are.
    """

    __slots__ = ("_callbacks", "_lock", "gone", "reason", "writing_since")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callback] = {}
        self.gone = False
        self.reason: str | None = None
        self.writing_since: int | None = None

    def cancel(self, reason: str = "gone") -> None:
        """Mark the client as gone and run the attached callbacks once; later calls change nothing."""
        with self._lock:
            if self.gone:
                return
            self.reason = reason
            self.gone = True
            callbacks = list(self._callbacks.values())
            self._callbacks.clear()
        for callback in callbacks:
            try:
                callback()
            except Exception:  # one bad callback must not keep the others from hearing it
                log.exception("a hang-up callback failed")

    def attach(self, callback: Callback) -> Callback:
        """Run `callback` when the client goes, at once if it has; returns the function that detaches it.

        After detaching the callback is not started any more, but a run that has begun may still be going on.
        """
        key = id(callback)
        with self._lock:
            gone = self.gone
            if not gone:
                while key in self._callbacks:
                    key += 1
                self._callbacks[key] = callback
        if gone:
            callback()

        def detach() -> None:
            with self._lock:
                self._callbacks.pop(key, None)

        return detach


class _Watched:
    """A socket under watch, with what the last look at its send queue found."""

    __slots__ = ("client", "fd", "moved_ns", "queued", "sock")

    def __init__(self, sock: socket.socket, client: Client) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.client = client
        self.queued = -1
        self.moved_ns = 0

    def stalled(self, now: int, limit_ns: int) -> bool:
        """True when bytes have waited in the send queue for `limit_ns` and not one was taken."""
        since = self.client.writing_since
        if since is None:
            self.queued = -1
            return False
        queued = _send_queue(self.fd)
        if queued != self.queued:
            self.queued, self.moved_ns = queued, now
            return False
        return queued > 0 and now - max(self.moved_ns, since) >= limit_ns


class HangupWatcher:
    """Owns the epoll thread. Make it after fork; `close()` ends the thread.

    `stall_seconds` bounds how long a client may take none of the bytes written to it; its socket is then shut
    down, which ends the blocked write. A write timeout on the socket would not do: it also cuts clients that
    are merely slow, because a socket becomes writable only after a third of its buffer has drained.
    """

    def __init__(self, stall_seconds: float = STALL_SECONDS) -> None:
        self._stall_ns = int(stall_seconds * 1e9)
        self._sweep = min(10.0, stall_seconds / 4)
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._closing = False
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="hangup", daemon=True)
        self._thread.start()

    def watch(self, sock: socket.socket, client: Client) -> None:
        """Tell `client` when the peer of `sock` closes. `unwatch` before the socket is closed."""
        watched = _Watched(sock, client)
        if watched.fd < 0:
            client.cancel()
            return
        if not getattr(sock, "probed", False):  # connections may inherit it from their listener
            probe_peer(sock)
        with self._lock:
            if self._closing:
                return
            known = watched.fd in self._watched
            self._watched[watched.fd] = watched
            arm = self._epoll.modify if known else self._epoll.register
            try:
                arm(watched.fd, select.EPOLLRDHUP | select.EPOLLONESHOT)
            except FileNotFoundError:  # the old socket of this number was closed while watched
                self._epoll.register(watched.fd, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def unwatch(self, sock: socket.socket) -> None:
        """Stop watching; a socket that is not watched is fine."""
        with self._lock:
            watched = self._find(sock)
            if watched is None:
                return
            del self._watched[watched.fd]
            if self._closing:
                return
            try:
                self._epoll.unregister(watched.fd)
            except OSError as error:  # closed before it was unwatched: the kernel has forgotten it
                if error.errno not in (errno.EBADF, errno.ENOENT):
                    raise

    def __len__(self) -> int:
        return len(self._watched)

    def close(self) -> None:
        """End the thread and release the descriptors; idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._watched.clear()
        self._epoll.close()
        os.close(self._wake)

    def _find(self, sock: socket.socket) -> _Watched | None:
        found = self._watched.get(sock.fileno())
        if found is not None and found.sock is sock:
            return found
        return next((w for w in self._watched.values() if w.sock is sock), None)

    def _run(self) -> None:
        next_sweep = time.monotonic() + self._sweep
        while not self._closing:
            for fd, _ in self._epoll.poll(max(0.0, next_sweep - time.monotonic())):
                if fd != self._wake:
                    self._closed(fd)
            if time.monotonic() >= next_sweep:
                self._find_stalled()
                next_sweep = time.monotonic() + self._sweep

    def _closed(self, fd: int) -> None:
        with self._lock:
            watched = self._watched.get(fd)
            # The number may have been given to a new connection since the event was read: look again.
            if watched is None or not _peer_closed(fd):
                return
        watched.client.cancel()

    def _find_stalled(self) -> None:
        now = time.monotonic_ns()
        with self._lock:
            stalled = [w for w in self._watched.values() if w.stalled(now, self._stall_ns)]
        for watched in stalled:
            watched.client.cancel("stalled")  # first, so that whoever wakes from the shut socket knows why
        with self._lock:
            for watched in stalled:
                if self._watched.get(watched.fd) is watched:  # else the number may be another socket's by now
                    _shut(watched.sock)


def probe_peer(sock: socket.socket) -> None:
    """Have the kernel notice within about a minute that a TCP peer's host is gone; for AF_UNIX there is no need."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def client_socket(environ: Mapping[str, Any]) -> socket.socket | None:
    """The client's socket where the WSGI server shows it (gunicorn, Werkzeug), else None."""
    for key in ("gunicorn.socket", "werkzeug.socket"):
        sock = environ.get(key)
        if isinstance(sock, socket.socket):
            return sock
    return None


def read_ahead(environ: Mapping[str, Any]) -> bytes:
    """Take what gunicorn has read from the client's socket beyond the request: its parser reads in blocks.

    b"" where there is nothing, or a server keeps it where we cannot see it.
    """
    reader = getattr(getattr(environ.get("wsgi.input"), "reader", None), "unreader", None)
    held = getattr(reader, "buf", None)
    # With bytes at hand its read() gives those, and does not touch the socket.
    return bytes(reader.read()) if reader is not None and held is not None and held.getvalue() else b""


def _peer_closed(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))


def _send_queue(fd: int) -> int:
    """Bytes the peer has not taken yet (SIOCOUTQ; TCP and AF_UNIX alike), 0 if that cannot be known."""
    try:
        answer: bytes = fcntl.ioctl(fd, termios.TIOCOUTQ, b"\0\0\0\0")
    except OSError:
        return 0
    return int(struct.unpack("i", answer)[0])


def _shut(sock: socket.socket) -> None:
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        pass  # it is down already, which is what was wanted

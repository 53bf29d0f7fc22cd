"""The threads of a worker: each accepts connections itself and serves them, so that none is handed over."""

from __future__ import annotations

import errno
import fcntl
import logging
import select
import socket
import termios
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from qmflask.hangup import probe_peer
from qmflask.timedsocket import TimedSocket, timeval

log = logging.getLogger(__name__)

#: Threads that wait at a door at most; the others sit idle. A connection wakes exactly one (accept(2) is exclusive).
SPARE = 4
#: How often one who waits looks whether the doors are being closed, in seconds. A draining worker accepts for so long.
LOOK_SECONDS = 0.2

#: From this share of busy threads on a client has so many seconds for its first bytes: connections made ahead, or to do
#: harm, must not keep those waiting who have something to say.
_CROWDED = 0.75
_HURRIED_SECONDS = 3.0
#: How often the log says that nothing can be accepted.
_QUIET_SECONDS = 10.0

#: How many looks at a client that takes nothing make up its time limit.
_LOOKS = 4
_send = socket.socket.send

#: Takes over a connection: (socket, client's address, listener's address).
Serve = Callable[["ClientSocket", Any, Any], None]


class ClientSocket(TimedSocket):
    """A client's connection. Whoever is silent for too long counts as gone, which servers take as nothing unusual."""

    #: By when all that is read now has to have come, in monotonic seconds.
    _due: float | None = None

    def setblocking(self, flag: bool) -> None:
        """gunicorn's own switching to and fro would only take the limits away."""

    def bound(self, option: int, seconds: float | None) -> None:
        """As TimedSocket's; a write returns sooner, see `sendall`."""
        super().bound(option, seconds / _LOOKS if seconds and option == socket.SO_SNDTIMEO else seconds)

    def hasten(self, seconds: float | None) -> None:
        """From now on all reads together may take so long; None ends that. Bytes that drip hold nobody for ever."""
        if seconds is not None:
            self._due = time.monotonic() + seconds
        elif self._due is not None:
            self._due = None
            self.bound(socket.SO_RCVTIMEO, self._limit)

    def recv(self, *args: Any) -> bytes:
        """As socket's."""
        if self._due is not None:
            left = self._due - time.monotonic()
            if left <= 0:
                raise ConnectionResetError(errno.ECONNRESET, "the client took too long")
            self.bound(socket.SO_RCVTIMEO, left if self._limit is None else min(left, self._limit))
        return super().recv(*args)

    def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
        """As socket's, until the client has taken no byte for the time limit.

        A write that waits returns when its time is over, with what it could place: as long as bytes move, some. So
        looking four times as often notices a stall half as late: at most two looks after the limit.
        """
        try:
            sent = _send(self, data, flags)
        except BlockingIOError:
            sent = 0
        if sent != len(data):
            self._send_rest(memoryview(data)[sent:], flags)

    def _send_rest(self, rest: memoryview, flags: int) -> None:
        looks = 0
        while rest:
            try:
                rest, looks = rest[_send(self, rest, flags) :], 0
            except BlockingIOError as error:
                looks += 1
                if looks == _LOOKS or self._limit == 0:
                    raise self._judged(error) from None

    def unread(self) -> bool:
        """Whether bytes have come that nobody has read: closing would then reset the connection."""
        try:
            return fcntl.ioctl(self.fileno(), termios.FIONREAD, b"\0\0\0\0") != b"\0\0\0\0"
        except (OSError, ValueError):  # closed
            return False

    def _judged(self, error: BlockingIOError) -> OSError:
        judged = super()._judged(error)
        if isinstance(judged, TimeoutError):
            return ConnectionResetError(errno.ECONNRESET, f"the client did nothing for {self.gettimeout():g} s")
        return judged


class Door:
    """A listening socket and how many threads wait at it.

    `first_seconds`: how long a client may take for its first bytes; `seconds`: for each read and write after them.
    """

    def __init__(self, listener: socket.socket, first_seconds: float, seconds: float) -> None:
        self._listener: Any = listener
        self._kind = (listener.family, listener.type, listener.proto)
        self._first_seconds = first_seconds
        self._seconds = seconds
        self.address = listener.getsockname()
        self.waiting = 0
        listener.setblocking(True)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(LOOK_SECONDS))
        # What connections inherit, which costs them nothing; AF_UNIX ones do not.
        self._inherited = listener.family in (socket.AF_INET, socket.AF_INET6)
        if self._inherited:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(seconds / _LOOKS))
            probe_peer(listener)

    def accept(self) -> tuple[ClientSocket, Any] | None:
        """The next connection; None when none has come for a while, or it has gone again.

        The listener's flags are those of all processes that have it: whoever makes it non-blocking, as gunicorn's own
        workers do, must not have us spin. Hence the poll.
        """
        begin = time.monotonic()
        try:
            fd, client = self._listener._accept()  # what accept() is made of; its socket would be one too many
        except ConnectionAbortedError:
            return None
        except BlockingIOError:
            if time.monotonic() - begin < LOOK_SECONDS / 2:
                poller = select.poll()
                poller.register(self._listener, select.POLLIN)
                poller.poll(LOOK_SECONDS * 1000)
            return None
        sock = ClientSocket(*self._kind, fileno=fd)
        if not self._inherited:
            sock.bound(socket.SO_SNDTIMEO, self._seconds)
        sock.bound(socket.SO_RCVTIMEO, self._first_seconds)
        sock.presume(self._seconds)
        sock.probed = True
        return sock, client


class Crew:
    """Up to `limit` threads; `open` has them serve, `close` ends that.

    While connections come one after another, the same few threads take turns, and no thread wakes another. When the
    last one that waited has got a connection, it calls the next to the door before it serves.
    """

    def __init__(self, limit: int, serve: Serve) -> None:
        self._limit = limit
        self._serve = serve
        self._doors: dict[Door, list[Door]] = {}  # each -> all in turn, the next one first and itself last
        self._idle: list[_Seat] = []
        self._count = 0
        self._busy = 0
        self._closed = False
        self._quiet_until = 0.0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    @property
    def busy(self) -> int:
        """Threads that serve a connection now."""
        return self._busy

    def open(self, doors: Sequence[Door]) -> None:
        """Begin to accept."""
        with self._changed:
            self._doors = {door: [*doors[at + 1 :], *doors[: at + 1]] for at, door in enumerate(doors)}
            for door in self._doors:
                self._summon(door)
            if not self._count:
                raise RuntimeError("not one thread can be started")

    def close(self) -> None:
        """Have nobody accept any more, from `LOOK_SECONDS` later on; connections under way are served to their end."""
        with self._changed:
            self._closed = True
            while self._idle:
                self._idle.pop().give(None)

    def shutdown(self, wait: bool = False) -> None:
        """What gunicorn calls in the handler of QUIT, where no lock may be taken. The threads end with the process."""

    def wait(self, seconds: float) -> bool:
        """After `close`: wait for nobody to be at the doors or busy, at most so long; True if that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy and not self._at_doors(), seconds)

    def wait_for_doors(self, seconds: float) -> bool:
        """After `close`: wait until nobody is at the doors any more."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._at_doors(), seconds)

    def _at_doors(self) -> int:
        return sum(door.waiting for door in self._doors)

    def _summon(self, door: Door) -> None:
        """Send somebody to a door; if all are busy, who is free next goes there."""
        if self._closed:
            return
        if self._idle:
            door.waiting += 1
            self._idle.pop().give(door)
        elif self._count < self._limit:
            # Daemons: a stopped worker's last threads must not keep its process alive.
            name = f"request-{self._count + 1}"
            try:
                threading.Thread(target=self._work, args=(door,), name=name, daemon=True).start()
            except (RuntimeError, MemoryError) as error:  # the system has no more: those that we have serve on
                self._complain("no further thread can be started: %s", error)
                return
            self._count += 1
            door.waiting += 1

    def _work(self, door: Door | None) -> None:
        seat = _Seat()
        while door is not None:
            accepted = self._accept(door)
            if accepted is not None:
                self._leave(door)
                self._run(*accepted, door.address)
            door = self._next(seat, door, served=accepted is not None)

    def _accept(self, door: Door) -> tuple[ClientSocket, Any] | None:
        try:
            return door.accept()
        except Exception as error:  # out of descriptors, say: it must not end the thread, nor fill the log
            if not self._closed:
                self._complain("no connection can be accepted: %s", error)
            time.sleep(LOOK_SECONDS)
            return None

    def _complain(self, message: str, error: BaseException) -> None:
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET_SECONDS
            log.error(message, error)

    def _run(self, sock: ClientSocket, client: Any, address: Any) -> None:
        if self._busy > self._limit * _CROWDED:
            sock.bound(socket.SO_RCVTIMEO, _HURRIED_SECONDS)
        try:
            self._serve(sock, client, address)
        except BaseException:  # SystemExit too: a thread that ended here would be missed for ever, and by the drain
            log.exception("A connection ended in an error that nobody caught.")

    def _leave(self, door: Door) -> None:
        with self._lock:
            door.waiting -= 1
            self._busy += 1
            if not door.waiting:
                self._summon(door)

    def _next(self, seat: _Seat, door: Door, *, served: bool) -> Door | None:
        """Where a thread goes that has served or has waited in vain."""
        with self._lock:
            if served:
                self._busy -= 1
            else:
                door.waiting -= 1
            if self._closed:
                self._changed.notify_all()
                return None
            # In turn where nobody waits, so that few threads see to many doors.
            door = min(self._doors[door], key=lambda door: door.waiting)
            if door.waiting < SPARE:
                door.waiting += 1
                return door
            self._idle.append(seat)
        return seat.take()


class _Seat:
    """Where an idle thread waits for a door to go to."""

    def __init__(self) -> None:
        self._door: Door | None = None
        self._full = threading.Lock()
        self._full.acquire()

    def give(self, door: Door | None) -> None:
        self._door = door
        self._full.release()

    def take(self) -> Door | None:
        self._full.acquire()
        return self._door

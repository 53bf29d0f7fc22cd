"""Is a model server up yet? Small HTTP exchanges by hand, each with one bound for all of it, that can be ended at once.

Written over sockets: `requests` bounds each read but not the whole, honours proxies and follows redirects, costs five
times the CPU, and cannot be ended from another thread before the connection stands.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from qmflask.http1 import Head, HeadReader, Malformed, body_of

log = logging.getLogger(__name__)

_MS = 1_000_000
_SECOND = 1_000_000_000

#: One probe never takes longer: a server that accepts and stalls gets another try (compatibility, "differently").
PROBE_BOUND_NS = 5 * _SECOND

#: After the status is known, the rest of the answer is awaited this long, so that the server's own write does not fail.
_DRAIN_NS = 10 * _MS

#: A failed warm-up request is not repeated sooner than this.
_WARM_UP_PAUSE_NS = 250 * _MS

#: From here on nobody counts milliseconds any more.
_LONG_NS = 3500 * _MS

_UP_BUT_LOCKED = frozenset({401, 403})


@dataclass(frozen=True)
class ProbeResult:
    """What one request brought: the HTTP status, or None and an error in words."""

    status: int | None
    error: str = ""
    #: Nobody listens: the server has seen nothing of this.
    refused: bool = False

    @property
    def ok(self) -> bool:
        """True if the server is up: exactly 200, or it asks for a key that we do not have."""
        return self.status == 200 or self.status in _UP_BUT_LOCKED

    @property
    def detail(self) -> str:
        """The result in words, for a log line or an error message; "" for a plain 200."""
        if self.error:
            return self.error
        if self.status in _UP_BUT_LOCKED:
            return f"the health check was answered with {self.status}; counted as up (does the server want a key?)"
        return "" if self.status == 200 else f"the health check was answered with {self.status}"


def interval_ns(elapsed_ns: int, expected_ns: int = 0) -> int:
    """Time from one probe to the next: 1 % of the time since the start, at least 10 ms, at most 250 ms.

    Around `expected_ns`, which the last load took (0: unknown), a sixth of that, at least 5 ms.
    """
    usual = min(max(elapsed_ns // 100, 10 * _MS), 250 * _MS)
    if expected_ns and abs(elapsed_ns - expected_ns) <= max(expected_ns // 8, 50 * _MS):
        return max(usual // 6, 5 * _MS)
    return usual


def knock_ns(elapsed_ns: int) -> int:
    """Time to the next try while nobody listens, which costs the server nothing: a fifth of the above.

    Half of it after 3.5 s: noticing late costs a quarter of a percent of such a load on average, and with a full house
    waiting behind it these tries are most of what we do.
    """
    return interval_ns(elapsed_ns) // (5 if elapsed_ns < _LONG_NS else 2)


class _Stopped(Exception):
    """Raised inside an exchange when its prober was told to stop."""


class _Failed(Exception):
    """Raised inside an exchange; the text is for people."""


class _Refused(_Failed):
    """Raised when all addresses refuse the connection."""


class _Target:
    """Where to send what: a URL taken apart, its addresses looked up once in a while."""

    _LOOKUP_NS = _SECOND

    def __init__(self, url: str, host_header: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http URL: {url!r}")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (
            "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~?[]") if parts.query else ""
        )
        self.host_header = host_header or parts.netloc.rpartition("@")[2]
        self._addresses: list[tuple[int, tuple[object, ...]]] = []
        self._looked_up_ns = 0

    def addresses(self) -> list[tuple[int, tuple[object, ...]]]:
        """(family, address) in order of preference. Raises _Failed."""
        now = time.monotonic_ns()
        if not self._addresses or now - self._looked_up_ns > self._LOOKUP_NS:
            try:
                found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            except OSError as error:
                raise _Failed(f"cannot look up {self.host!r}: {error.strerror or error}") from error
            self._addresses = [(family, address) for family, _, _, _, address in found]
            self._looked_up_ns = now
        return self._addresses

    def request(self, body: bytes | None) -> bytes:
        """The request as bytes: GET, or POST with a JSON body."""
        lines = [
            f"{'GET' if body is None else 'POST'} {self.path} HTTP/1.1",
            f"Host: {re.sub(r'[^!-~]', '', self.host_header)}",
            "User-Agent: qmflask",
            "Accept: */*",
            "Connection: close",
        ]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + (body or b"")


class _Door:
    """Whether anybody listens at a target yet, for two system calls a knock: a refused socket can try again."""

    def __init__(self, target: _Target) -> None:
        self._target = target
        self._refused: dict[tuple[object, ...], socket.socket] = {}

    def knock(self) -> socket.socket | None:
        """A connection; None where it takes more than a knock to get one. Raises _Refused when all addresses refuse."""
        for family, address in self._target.addresses():
            sock = self._refused.pop(address, None) or _nonblocking(family)
            code = sock.connect_ex(address)
            if code == errno.EINPROGRESS:  # asked again, the kernel says what has become of it
                code = sock.connect_ex(address)
            if code == errno.ECONNREFUSED:
                self._refused[address] = sock
            elif code == 0 and not is_self_connected(sock):
                return sock
            elif code == 0:
                reset(sock)
            else:
                sock.close()
                return None
        raise _Refused(f"connection refused at {self._target.host}:{self._target.port}")

    def close(self) -> None:
        """Close what was refused."""
        while self._refused:
            self._refused.popitem()[1].close()


def _nonblocking(family: int) -> socket.socket:
    return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


class _Exchange:
    """One request and its answer, on one connection, until one deadline; `stop_fd` readable ends it at once.

    `sock`: the connection, if there is one already; it is closed at the end.
    """

    def __init__(
        self, target: _Target, deadline_ns: int, stop_fd: int | None, sock: socket.socket | None = None
    ) -> None:
        self._target = target
        self._deadline_ns = deadline_ns
        self._stop_fd = stop_fd
        self._sock = sock

    def status(self, body: bytes | None = None, whole: bool = False) -> int:
        """The status of the answer; with `whole`, once all of it has come. Raises _Failed, _Stopped."""
        try:
            sock = self._connect()
            self._send(sock, self._target.request(body))
            return self._receive(sock, whole)
        finally:
            if self._sock is not None:
                self._sock.close()

    def _wait(self, sock: socket.socket, events: int) -> None:
        """Until the socket is ready. Raises TimeoutError at the deadline, _Stopped when told to stop."""
        poller = select.poll()
        poller.register(sock, events)
        if self._stop_fd is not None:
            poller.register(self._stop_fd, select.POLLIN)
        left = self._deadline_ns - time.monotonic_ns()
        ready = poller.poll(left / _MS) if left > 0 else []
        if any(fd == self._stop_fd for fd, _ in ready):
            raise _Stopped
        if not ready:
            raise TimeoutError

    def _connect(self) -> socket.socket:
        if self._sock is not None:
            return self._start_tls(self._sock)
        codes = []
        for family, address in self._target.addresses():
            code = self._connect_to(family, address)
            if code == 0 and self._sock is not None:
                return self._start_tls(self._sock)
            codes.append(code)
        where = f"{self._target.host}:{self._target.port}"
        if set(codes) == {errno.ECONNREFUSED}:
            raise _Refused(f"connection refused at {where}")
        raise _Failed(f"{os.strerror(codes[-1]) if codes else 'no address'} at {where}")

    def _connect_to(self, family: int, address: tuple[object, ...]) -> int:
        """errno of connecting, 0 for success; the socket is then in `self._sock`."""
        if self._sock is not None:
            self._sock.close()
        try:
            sock = self._sock = _nonblocking(family)
        except OSError as error:
            return error.errno or errno.EIO
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            self._wait(sock, select.POLLOUT)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code == 0 and is_self_connected(sock):
            reset(sock)
            return errno.ECONNREFUSED
        return code

    def _start_tls(self, sock: socket.socket) -> socket.socket:
        if self._target.tls is None:
            return sock
        wrapped = self._target.tls.wrap_socket(sock, server_hostname=self._target.host, do_handshake_on_connect=False)
        self._sock = wrapped
        self._again(wrapped, wrapped.do_handshake)
        return wrapped

    def _again(
        self, sock: socket.socket, step: Callable[[], int | bytes | None], events: int = select.POLLIN
    ) -> object:
        """Repeat a non-blocking step until it goes through."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                self._wait(sock, select.POLLIN)
            except (ssl.SSLWantWriteError, BlockingIOError) as error:
                self._wait(sock, select.POLLOUT if isinstance(error, ssl.SSLWantWriteError) else events)

    def _send(self, sock: socket.socket, data: bytes) -> None:
        while data:
            sent = self._again(sock, lambda: sock.send(data), select.POLLOUT)  # noqa: B023 - called at once
            assert isinstance(sent, int)
            data = data[sent:]

    def _receive(self, sock: socket.socket, whole: bool) -> int:
        head = self._receive_head(sock)
        if not whole:
            self._deadline_ns = min(self._deadline_ns, time.monotonic_ns() + _DRAIN_NS)
        try:
            body = body_of("GET", head)
            body.feed(head.rest)
            while not body.done:
                data = self._read(sock)
                if not data:
                    body.end()
                    break
                body.feed(data)
        except (OSError, Malformed):
            if whole:
                raise
        return head.status

    def _receive_head(self, sock: socket.socket) -> Head:
        reader = HeadReader()
        while True:
            data = self._read(sock)
            if not data:
                raise _Failed("the server closed the connection without an answer")
            head = reader.feed(data)
            if head is not None:
                return head

    def _read(self, sock: socket.socket) -> bytes:
        data = self._again(sock, lambda: sock.recv(65536))
        assert isinstance(data, bytes)
        return data


def is_self_connected(sock: socket.socket) -> bool:
    """True if a connection leads to itself: connecting to a free local port can pick that very port as the source."""
    return bool(sock.getsockname()[:2] == sock.getpeername()[:2])


def reset(sock: socket.socket) -> None:
    """Close without TIME_WAIT, which would keep the port from the server that is about to bind it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


def _ask(
    target: _Target,
    deadline_ns: int,
    stop_fd: int | None,
    body: bytes | None,
    whole: bool,
    door: _Door | None = None,
) -> ProbeResult:
    """One exchange, after a knock at the door if there is one; every failure is a result, only _Stopped is raised."""
    began = time.monotonic_ns()
    try:
        sock = door.knock() if door is not None else None
        return ProbeResult(_Exchange(target, deadline_ns, stop_fd, sock).status(body, whole))
    except TimeoutError:
        return ProbeResult(None, f"no answer within {(time.monotonic_ns() - began) / _SECOND:.2g} s")
    except Malformed as error:
        return ProbeResult(None, f"the server {error}")
    except (OSError, _Failed) as error:
        return ProbeResult(None, getattr(error, "strerror", None) or str(error), isinstance(error, _Refused))


def probe_once(url: str, timeout: float, host_header: str | None = None) -> ProbeResult:
    """One GET, all of it within `timeout` seconds. Never raises; knows no proxies, follows no redirect."""
    try:
        target = _Target(url, host_header)
    except ValueError as error:
        return ProbeResult(None, str(error))
    return _ask(target, time.monotonic_ns() + int(timeout * _SECOND), None, None, False)


def warm_up(url: str, body: bytes | None, timeout: float, host_header: str | None = None) -> ProbeResult:
    """A model's warm-up request: GET, or POST of a JSON body, whose whole answer must come in time. Never raises."""
    try:
        target = _Target(url, host_header)
    except ValueError as error:
        return ProbeResult(None, str(error))
    return _ask(target, time.monotonic_ns() + int(timeout * _SECOND), None, body, True)


@dataclass(frozen=True)
class WarmUp:
    """The request that must be answered with 2xx before a model is ready; `body` None means GET."""

    url: str
    body: bytes | None = None


class Prober:
    """One thread that probes one starting model: at once, then after each `interval_ns`, until its deadline.

    While nobody listens it tries more often (`knock_ns`): most servers bind their port when they are ready.

    Calls `on_result(model, ok, detail)` once, in its own thread: healthy, deadline passed, or stopped. Owns a thread,
    a wake-up descriptor and the socket of the moment; the descriptors are closed before that call is made.
    """

    def __init__(
        self,
        model: str,
        url: str,
        on_result: Callable[[str, bool, str], None],
        deadline_ns: int,
        started_ns: int | None = None,
        host_header: str | None = None,
        warmup: WarmUp | None = None,
        expected_ns: int = 0,
    ) -> None:
        """`deadline_ns`, `started_ns`: monotonic; the start is of the process, maybe under an earlier leader.

        A URL that cannot be used is a result like any other failure.
        """
        self.model = model
        self._url = url
        self._host_header = host_header
        self._warmup = warmup
        self._on_result = on_result
        self._deadline_ns = deadline_ns
        self._expected_ns = expected_ns
        self._started_ns = time.monotonic_ns() if started_ns is None else started_ns
        self._lock = threading.Lock()
        self._stop_fd: int | None = None
        self._stop_asked = False
        self._stopper = select.poll()
        self._thread = threading.Thread(target=self._run, name=f"probe-{model}", daemon=True)

    def start(self) -> Prober:
        """Begin probing."""
        self._stop_fd = os.eventfd(1 if self._stop_asked else 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopper.register(self._stop_fd, select.POLLIN)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End it at once, a hanging probe too; `on_result` is called unless it was. Does not wait; may be repeated."""
        with self._lock:
            if not self._stop_asked:
                self._stop_asked = True
                if self._stop_fd is not None:
                    os.eventfd_write(self._stop_fd, 1)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the thread has ended; False if it has not in time (or is the caller)."""
        if self._thread is threading.current_thread():
            return False
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            ok, detail = self._probe()
        except _Stopped:
            ok, detail = False, "stopped"
        except Exception as error:  # a bug here must not leave a model starting for ever
            log.exception("probing %s failed", self.model)
            ok, detail = False, f"probing failed: {error}"
        with self._lock:
            if self._stop_fd is not None:
                os.close(self._stop_fd)
                self._stop_fd = None
        self._on_result(self.model, ok, detail)

    def _probe(self) -> tuple[bool, str]:
        """(ok, detail) at the end of it all. Raises _Stopped."""
        try:
            target = _Target(self._url, self._host_header)
            warmup_target = _Target(self._warmup.url, self._host_header) if self._warmup else None
        except ValueError as error:
            return False, str(error)
        door = _Door(target)
        try:
            return self._probe_until_up(target, warmup_target, door)
        finally:
            door.close()

    def _probe_until_up(self, target: _Target, warmup_target: _Target | None, door: _Door) -> tuple[bool, str]:
        last = "it was never asked"
        while (began := time.monotonic_ns()) < self._deadline_ns:
            bound = min(self._deadline_ns, began + PROBE_BOUND_NS)
            result = _ask(target, bound, self._stop_fd, None, whole=False, door=door)
            last = result.detail
            elapsed = began - self._started_ns
            pause = knock_ns(elapsed) if result.refused else interval_ns(elapsed, self._expected_ns)
            if result.ok:
                failure = self._warm_up(warmup_target)
                if failure is None:
                    return True, result.detail
                last, began, pause = failure, time.monotonic_ns(), _WARM_UP_PAUSE_NS
            self._pause_until(min(began + pause, self._deadline_ns))
        return False, f"not healthy in time; last: {last}"

    def _warm_up(self, target: _Target | None) -> str | None:
        """None if there is no warm-up request or it went well."""
        if self._warmup is None or target is None:
            return None
        result = _ask(target, self._deadline_ns, self._stop_fd, self._warmup.body, whole=True)
        if result.status is not None and 200 <= result.status < 300:
            return None
        return f"the warm-up request failed: {result.error or result.status}"

    def _pause_until(self, until_ns: int) -> None:
        if self._stopper.poll(max(0, until_ns - time.monotonic_ns()) / _MS):
            raise _Stopped

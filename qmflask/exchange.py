"""One request on its way to a model server: its socket, which a hang-up cuts, and the head of its answer.

The request is written and the answer's head read here, on the socket: only so does the target keep its spelling, does
a deadline cover a head that drips, and can a hang-up cut at any moment, while connecting too.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlsplit

from qmflask import http1
from qmflask.errors import BadRequest, ClientGone, UpstreamTimeout, UpstreamUnreachable
from qmflask.forwardproxy import ForwardProxies
from qmflask.hangup import Client, probe_peer
from qmflask.headers import Header
from qmflask.timedsocket import TimedSocket

#: Bytes taken from the socket at once; also the longest body that leaves in one packet with its head.
BLOCK = 64 * 1024

_ORIGIN = re.compile(r"(https?)://([^/?#]+)", re.IGNORECASE)
_PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))


@dataclass(frozen=True)
class Timeouts:
    """Seconds; 0 means no limit. `response_header` runs from the sent request to the complete head."""

    connect: float = 30.0
    response_header: float = 0.0
    idle: float = 0.0


@dataclass(frozen=True)
class UpstreamRequest:
    """What to send. `url` keeps its exact spelling; `headers` without Content-Length.

    A `body` that is not bytes is sent piece by piece, with `body_length` as its Content-Length or, if None, chunked.
    `switch`: its headers ask for another protocol, and the answer may be 101.
    """

    method: str
    url: str
    headers: list[Header]
    body: bytes | Iterable[bytes] | None = None
    body_length: int | None = None
    timeouts: Timeouts = Timeouts()
    switch: bool = False
    #: What messages call the other side.
    name: str = "the model server"


class Stale(Exception):
    """Raised when a reused connection turns out to have been closed by the server."""


class Exchange:
    """Made for each attempt; `begin` before anything else, `close` at the end."""

    def __init__(self, request: UpstreamRequest, client: Client, proxies: ForwardProxies | None = None) -> None:
        match = _ORIGIN.match(request.url)
        if match is None:
            raise UpstreamUnreachable(f"{request.name} has no usable address: {request.url!r}")
        self.request = request
        self.client = client
        self.secure = match[1].lower() == "https"
        self.origin = f"{match[1].lower()}://{match[2]}/"
        self.target = _target(request.url[match.end() :])
        self.via = proxies.to(match[1].lower(), self.place[0]) if proxies else None
        self.sock: socket.socket | None = None
        self.head: http1.Head | None = None
        self.answer: Any = None  # what the pool took for the response
        self.fresh = False
        self.sent = False
        self._lock = threading.Lock()
        self._detach: Callable[[], None] | None = None

    def begin(self) -> None:
        """Listen for the client's hang-up."""
        self._detach = self.client.attach(self._cut)
        if self.client.gone:
            self.close()
            raise ClientGone(self.client.reason)

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of the server. Raises UpstreamUnreachable."""
        try:
            return _place(self.origin)
        except ValueError as error:
            raise UpstreamUnreachable(f"{self.request.name} has no usable address: {self.request.url!r}") from error

    def connect(self, host: str, port: int, options: Any) -> socket.socket:
        """A socket connected to the server, or by way of the proxy, known to the hang-up before it connects."""
        if self.via is None:
            return self._connect(host, port, options)
        sock = self._connect(self.via.host, self.via.port, options)
        if self.secure:
            try:
                self._tunnel(sock, self.via.connect_head(host, port))
            except BaseException as error:
                self._close_failed(sock)
                if isinstance(error, (OSError, http1.Malformed)):
                    raise self.failure(error, connecting=True) from error
                raise
        return sock

    def _tunnel(self, sock: socket.socket, head: bytes) -> None:
        sock.sendall(head)
        reader, answer = http1.HeadReader(), None
        while answer is None:
            data = sock.recv(BLOCK)
            if not data:
                raise OSError("the proxy closed the connection")
            answer = reader.feed(data)
        if not 200 <= answer.status < 300:
            raise OSError(f"the proxy answered {answer.status} {answer.reason}")

    def _connect(self, host: str, port: int, options: Any) -> socket.socket:
        self.fresh = True
        try:
            addresses = _addresses(host, port)
        except OSError as error:
            raise self.failure(error) from error
        problem: OSError | None = None
        for family, address in addresses:
            sock = TimedSocket(family, socket.SOCK_STREAM)
            try:
                for option in options or ():
                    sock.setsockopt(*option)
                self.hold(sock)
                limit = self.request.timeouts.connect or None
                if self.secure:
                    sock.settimeout(limit)  # for a proxy's word and the handshake, too
                sock.connect_within(address, limit)
                if not address[0].startswith("127."):
                    probe_peer(sock)  # a peer's host may vanish amid an answer without a word
                return sock
            except OSError as error:
                problem = error
                self._close_failed(sock)
                self.check_client()
            except BaseException:
                self._close_failed(sock)
                raise
        raise self.failure(problem or OSError(f"no address for {host}"), connecting=True) from problem

    def hold(self, sock: socket.socket) -> None:
        """Remember the socket that a hang-up has to cut. Raises ClientGone."""
        with self._lock:
            self.sock = sock
        self.check_client()

    def transmit(self, sock: socket.socket) -> None:
        """Write the request; a short body leaves in one packet with its head."""
        body = self.request.body
        head = self._head_bytes()
        limit = self.request.timeouts.response_header
        set_timeout(sock, limit or None)
        try:
            if isinstance(body, bytes) and len(body) <= BLOCK:
                sock.sendall(head + body)
            else:
                sock.sendall(head)
                for piece in self._pieces(body):
                    sock.sendall(piece)
        except TimeoutError as error:
            raise UpstreamTimeout(f"{self.where} did not take the request within {limit:g} s.") from error
        self.sent = True

    def read_head(self, sock: socket.socket) -> http1.Head:
        """Read the answer's head within the deadline, however slowly it drips."""
        limit = self.request.timeouts.response_header
        deadline = time.monotonic() + limit if limit > 0 else None
        reader = http1.HeadReader(self.request.switch)
        while self.head is None:
            left = None if deadline is None else deadline - time.monotonic()
            try:
                if left is not None and left <= 0:
                    raise TimeoutError
                set_timeout(sock, left)
                data = sock.recv(BLOCK)
            except TimeoutError as error:
                raise UpstreamTimeout(f"{self.where} sent no complete headers within {limit:g} s.") from error
            except OSError as error:
                self._check_stale(reader)
                raise self.failure(error) from error
            if not data:
                self.check_client()
                self._check_stale(reader)
                raise UpstreamUnreachable(f"{self.where} closed the connection before it answered.")
            self.head = reader.feed(data)
        return self.head

    @property
    def where(self) -> str:
        """How messages name the other side."""
        scheme, _, host = self.origin.rstrip("/").partition("://")
        way = f", through the proxy at {self.via.host}:{self.via.port}," if self.via is not None else ""
        return f"{self.request.name} at {scheme}://{host.rpartition('@')[2]}{way}"

    def check_client(self) -> None:
        """Raise ClientGone if the client has left."""
        if self.client.gone:
            raise ClientGone(self.client.reason)

    def failure(self, error: BaseException, *, idle: bool = False, connecting: bool = False) -> Exception:
        """The error a client sees for what went wrong on this side."""
        if self.client.gone:
            return ClientGone(self.client.reason)
        if isinstance(error, http1.Malformed):
            return UpstreamUnreachable(f"{self.where} {error}.")
        if isinstance(error, TimeoutError) and idle:
            return UpstreamTimeout(f"{self.where} sent nothing for {self.request.timeouts.idle:g} s.")
        if isinstance(error, TimeoutError) and connecting:
            seconds = self.request.timeouts.connect
            return UpstreamUnreachable(f"{self.where} did not accept a connection within {seconds:g} s.")
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return UpstreamUnreachable(f"{self.where} cannot be reached or broke off: {text}.")

    def close(self) -> None:
        """Forget the socket: from here on no hang-up touches it."""
        with self._lock:
            self.sock = None
        if self._detach is not None:
            self._detach()
            self._detach = None

    def _head_bytes(self) -> bytes:
        request = self.request
        lines = [f"{request.method} {self.target} HTTP/1.1"]
        if self.via is not None and not self.secure:
            host = self.origin.rpartition("@")[2].removeprefix("http://").rstrip("/")
            lines = [f"{request.method} http://{host}{self.target} HTTP/1.1", *self.via.headers]
        lines += [f"{name}: {value}" for name, value in request.headers]
        if isinstance(request.body, bytes):
            lines.append(f"Content-Length: {len(request.body)}")
        elif request.body is not None:
            chunked = request.body_length is None
            lines.append("Transfer-Encoding: chunked" if chunked else f"Content-Length: {request.body_length}")
        text = "\r\n".join(lines)
        if text.count("\r") != len(lines) - 1 or text.count("\n") != len(lines) - 1 or "\0" in text:
            raise BadRequest("A header of the request holds a line end, which no server can be sent.")
        try:
            return text.encode("latin-1") + b"\r\n\r\n"
        except UnicodeEncodeError:  # a configured key or host; what a client sent is latin-1
            return text.encode("utf-8") + b"\r\n\r\n"

    def _pieces(self, body: bytes | Iterable[bytes] | None) -> Iterator[bytes]:
        """The body as it goes on the wire."""
        if body is None:
            return
        if isinstance(body, bytes):
            yield body
            return
        if self.request.body_length is not None:
            yield from body
            return
        for piece in body:
            if piece:
                yield b"%x\r\n%b\r\n" % (len(piece), piece)
        yield b"0\r\n\r\n"

    def _cut(self) -> None:
        """Run by the thread that noticed: wakes whoever sends or reads. Closing here would break the reader."""
        with self._lock:
            if self.sock is None:
                return
            try:
                # Not SSLSocket's own shutdown: it would drop the TLS state under the reader.
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
            except OSError:
                pass  # not connected yet, or no longer

    def _close_failed(self, sock: socket.socket) -> None:
        with self._lock:
            self.sock = None
        sock.close()

    def _check_stale(self, reader: http1.HeadReader) -> None:
        if not self.fresh and not reader.begun and (self.request.body is None or isinstance(self.request.body, bytes)):
            raise Stale


def set_timeout(sock: socket.socket, seconds: float | None) -> None:
    """Set a socket's timeout where it differs: each call is a system call, and a chance for other threads."""
    if sock.gettimeout() != seconds:
        sock.settimeout(seconds)


@lru_cache(maxsize=256)
def _place(origin: str) -> tuple[str, int]:
    parts = urlsplit(origin)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _target(rest: str) -> str:
    """The request target in its own spelling; only what no request line can hold is percent-encoded."""
    rest = rest.partition("#")[0]
    if not rest.startswith("/"):
        rest = "/" + rest
    if rest.isascii() and rest.isprintable() and " " not in rest:
        return rest
    try:
        raw = rest.encode("latin-1")  # how WSGI hands on a path's bytes
    except UnicodeEncodeError:
        raw = rest.encode("utf-8")
    return quote(raw, safe=_PRINTABLE)


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """Where to connect; numeric IPv4 and `localhost`, the usual cases, without a resolver (RFC 6761, 6.3)."""
    if host == "localhost":
        return [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET6, ("::1", port))]
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        return [(info[0], info[4]) for info in found]
    return [(socket.AF_INET, (host, port))]

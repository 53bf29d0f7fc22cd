"""Sends one request to a model server or peer and reads its answer; the only home of requests and urllib3.

`requests`' adapter gives connections, TLS and the sending (used without Session: field notes A20, A24). Heads and
bodies are read by our own `http1` from the socket: only so can a deadline cover a head that drips, can any framing
be passed on without delay, and can a hang-up cut the connection at any moment. What this takes from urllib3 and
http.client beyond their documented interface is in `_Connection` and `_Answer`, pinned by test_upstream.py.
"""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util import SKIP_HEADER

from qmflask import http1
from qmflask.errors import ClientGone, UpstreamTimeout, UpstreamUnreachable
from qmflask.hangup import Client
from qmflask.headers import Header

#: Bytes taken from the socket at once; also the longest body that is read whole before it is passed on.
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
    """

    method: str
    url: str
    headers: list[Header]
    body: bytes | Iterable[bytes] | None = None
    body_length: int | None = None
    timeouts: Timeouts = Timeouts()
    #: What messages call the other side.
    name: str = "the model server"


class Upstream:
    """Owns the connection pools of one process. Make it after fork.

    `pool_size`: connections kept per server, at least the number of threads. `keepalive`: reuse connections; off by
    default, as a fresh one to a local server costs little and cannot be stale (field notes A21).
    """

    def __init__(self, pool_size: int = 128, *, keepalive: bool = False, verify: bool | str = True) -> None:
        self._adapter = _Adapter(pool_connections=256, pool_maxsize=pool_size)
        self._keepalive = keepalive
        self._verify = verify

    def send(self, request: UpstreamRequest, client: Client) -> UpstreamResponse:
        """Send and wait for the head. The caller closes the response.

        Raises UpstreamUnreachable, UpstreamTimeout, ClientGone, and what iterating over `request.body` raises.
        """
        try:
            return self._send(_Exchange(request, client))
        except _Stale:
            return self._send(_Exchange(request, client))

    def close(self) -> None:
        """Drop the idle connections."""
        self._adapter.close()

    def _send(self, exchange: _Exchange) -> UpstreamResponse:
        request = exchange.request
        exchange.begin()
        _current.exchange = exchange
        try:
            answer = self._adapter.send(
                _prepared(request, exchange.origin),
                stream=True,
                timeout=request.timeouts.connect or None,
                verify=self._verify,
            )
            return UpstreamResponse(exchange, answer.raw, self._keepalive)
        except BaseException as error:
            exchange.close()
            if isinstance(error, _FAILURES):
                raise exchange.failure(error) from error
            raise
        finally:
            _current.exchange = None


class UpstreamResponse:
    """An answer: `status`, `reason`, `headers` (repeated ones kept), and an iterator over the body's bytes.

    Iteration gives whatever has arrived, at once, for every framing, with the coding untouched. It raises
    UpstreamUnreachable when the body ends early, UpstreamTimeout after `timeouts.idle` without a byte, and
    ClientGone after the client was cancelled. `complete` is True once the whole body was read.
    """

    def __init__(self, exchange: _Exchange, raw: Any, keepalive: bool) -> None:
        head = exchange.head
        assert head is not None and exchange.sock is not None
        self.status = head.status
        self.reason = head.reason
        self.headers = head.headers
        self._head = head
        self._exchange = exchange
        self._raw = raw
        self._keepalive = keepalive
        self._recv = exchange.sock.recv
        self._closed = False
        try:
            self._body = http1.body_of(exchange.request.method, head)
            self._pending = self._body.feed(head.rest) if head.rest else b""
            exchange.sock.settimeout(exchange.request.timeouts.idle or None)
        except BaseException:
            raw.close()
            raw.release_conn()
            raise

    @property
    def complete(self) -> bool:
        """True once the end of the body was seen and all of it was handed out."""
        return self._body.done and not self._pending

    @property
    def length(self) -> int | None:
        """The length of the body where it was announced in a way that counts."""
        return self._body.length

    @property
    def at_hand(self) -> bool:
        """True if the next step of the iteration will not wait."""
        return bool(self._pending) or self._body.done

    def read_short(self, limit: int = BLOCK) -> bytes | None:
        """The whole body if it is known to be short or is at hand already, else None. Raises as iteration does."""
        length = self._body.length
        if not self._body.done and (length is None or length > limit):
            return None
        return b"".join(self)

    def __iter__(self) -> UpstreamResponse:
        return self

    def __next__(self) -> bytes:
        if self._pending:
            data, self._pending = self._pending, b""
            return data
        body = self._body
        while not body.done:
            data = self._receive()
            if not data:
                break
            try:
                payload = body.feed(data)
            except http1.Malformed as error:
                raise self._exchange.failure(error) from error
            if payload:
                return payload
        raise StopIteration

    def close(self) -> None:
        """Release the connection; the upstream's is cut if the body was not read to its end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._exchange.close()
        if not (self._keepalive and http1.keeps_alive(self._head, self._body)):
            self._raw.close()
        self._raw.release_conn()

    def _receive(self) -> bytes:
        """What has arrived, or b"" at the regular end of a body that ends with its connection."""
        try:
            data = self._recv(BLOCK)
            if not data:
                self._exchange.check_client()
                self._body.end()
        except (OSError, http1.Malformed) as error:
            raise self._exchange.failure(error, idle=True) from error
        return data


class _Stale(Exception):
    """Raised when a reused connection turns out to have been closed by the server."""


_FAILURES = (
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    http1.Malformed,
    OSError,
)


class _Exchange:
    """One request on its way: its socket, which a hang-up cuts, and the head of its answer."""

    def __init__(self, request: UpstreamRequest, client: Client) -> None:
        match = _ORIGIN.match(request.url)
        if match is None:
            raise UpstreamUnreachable(f"{request.name} has no usable address: {request.url!r}")
        self.request = request
        self.client = client
        self.origin = f"{match[1].lower()}://{match[2]}/"
        self.target = _target(request.url[match.end() :])
        self.sock: socket.socket | None = None
        self.head: http1.Head | None = None
        self.fresh = False
        self._lock = threading.Lock()
        self._detach: Callable[[], None] | None = None

    def begin(self) -> None:
        """Listen for the client's hang-up."""
        self._detach = self.client.attach(self._cut)
        if self.client.gone:
            self.close()
            raise ClientGone(self.client.reason)

    def connect(self, host: str, port: int, options: Any) -> socket.socket:
        """A connected socket, known to the hang-up before it connects."""
        self.fresh = True
        try:
            addresses = _addresses(host, port)
        except OSError as error:
            raise self.failure(error) from error
        problem: OSError | None = None
        for family, address in addresses:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(self.request.timeouts.connect or None)
                for option in options or ():
                    sock.setsockopt(*option)
                self.hold(sock)
                sock.connect(address)
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

    def read_head(self, sock: socket.socket) -> http1.Head:
        """Read the answer's head within the deadline, however slowly it drips."""
        limit = self.request.timeouts.response_header
        deadline = time.monotonic() + limit if limit > 0 else None
        reader = http1.HeadReader()
        while self.head is None:
            left = None if deadline is None else deadline - time.monotonic()
            try:
                if left is not None and left <= 0:
                    raise TimeoutError
                sock.settimeout(left)
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
        return f"{self.request.name} at {self.origin.rstrip('/')}"

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
            raise _Stale


class _Current(threading.local):
    """The exchange this thread is sending: urllib3 makes connections, and this tells them for whom."""

    exchange: _Exchange | None = None


_current = _Current()


class _Answer:
    """Stands in for http.client.HTTPResponse: has urllib3 believe in a response whose head `http1` has read."""

    will_close = False  # the connection is closed or kept by UpstreamResponse.close
    version = 11

    def __init__(self, sock: socket.socket, *_: Any, **__: Any) -> None:
        self._sock = sock
        self._closed = False
        self.msg = self.headers = http.client.HTTPMessage()  # empty: ours are in Head, repeated ones kept
        self.status = 0
        self.reason = ""

    def begin(self) -> None:
        """Called by http.client to read the head."""
        exchange = _current.exchange
        assert exchange is not None
        try:
            head = exchange.read_head(self._sock)
        except http1.Malformed as error:
            raise exchange.failure(error) from error
        self.status = head.status

    def read(self, *_: Any) -> bytes:
        """Never called; urllib3 takes an object for a body if it can be read."""
        raise NotImplementedError("the body is read by UpstreamResponse")

    def close(self) -> None:
        """Mark the response as over."""
        self._closed = True

    def isclosed(self) -> bool:
        """True once closed."""
        return self._closed


class _Watched(HTTPConnection):
    """A connection whose socket its exchange knows, and which sends the request target exactly as given."""

    response_class = _Answer  # type: ignore[assignment]
    _held: bytes | None = None

    def _new_conn(self) -> socket.socket:
        exchange = _current.exchange
        assert exchange is not None
        return exchange.connect(self._dns_host, self.port, self.socket_options)

    def connect(self) -> None:
        exchange = _current.exchange
        assert exchange is not None
        super().connect()
        exchange.hold(self.sock)
        self.sock.settimeout(exchange.request.timeouts.response_header or None)

    def request(self, method: str, url: str, body: Any = None, headers: Any = None, **options: Any) -> None:
        exchange = _current.exchange
        assert exchange is not None
        if self.sock is not None:
            exchange.hold(self.sock)
        self.timeout = exchange.request.timeouts.response_header or None
        # A short body leaves in one packet with its head.
        self._held = b"" if isinstance(body, bytes) and 0 < len(body) <= BLOCK else None
        super().request(method, exchange.target, body, headers, **options)

    def send(self, data: Any) -> None:
        if self._held == b"":
            self._held = data
            return
        if self._held is not None:
            data, self._held = self._held + data, None
        try:
            super().send(data)
        except TimeoutError as error:
            exchange = _current.exchange
            assert exchange is not None
            seconds = exchange.request.timeouts.response_header
            raise UpstreamTimeout(f"{exchange.where} did not take the request within {seconds:g} s.") from error


class _WatchedTLS(_Watched, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Watched


class _TLSPool(HTTPSConnectionPool):
    ConnectionCls = _WatchedTLS


class _Adapter(HTTPAdapter):
    """requests' adapter, with our connections and without cookies, which it would carry between clients."""

    def init_poolmanager(self, connections: int, maxsize: int, block: bool = False, **options: Any) -> None:
        """Called by requests' constructor."""
        super().init_poolmanager(connections, maxsize, block=block, blocksize=4 * BLOCK, **options)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TLSPool}

    def build_response(self, req: requests.PreparedRequest, resp: Any) -> requests.Response:
        """Only what we use of it: the raw response."""
        response = requests.Response()
        response.raw = resp
        return response


def _prepared(request: UpstreamRequest, origin: str) -> requests.PreparedRequest:
    """A request made by hand: preparing one in requests costs more than sending it."""
    prepared = requests.PreparedRequest()
    prepared.method = request.method
    prepared.url = origin
    headers: dict[str, str] = {}
    for name, value in request.headers:
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    names = {name.lower() for name in headers}
    for name in ("User-Agent", "Accept-Encoding"):
        if name.lower() not in names:
            headers[name] = SKIP_HEADER  # else urllib3 and http.client speak for themselves
    body = request.body
    if isinstance(body, bytes):
        headers["Content-Length"] = str(len(body))
    elif body is not None and request.body_length is not None:
        headers["Content-Length"] = str(request.body_length)
    prepared.headers = headers  # type: ignore[assignment]  # a dict does, at a tenth of the cost
    prepared.body = body  # type: ignore[assignment]
    return prepared


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
    """Where to connect; numeric IPv4, the usual case, without a resolver."""
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        return [(info[0], info[4]) for info in found]
    return [(socket.AF_INET, (host, port))]

"""Sends requests to model servers and peers, and reads the answers; the only home of requests and urllib3.

`requests`' adapter and urllib3's pools give connections, TLS and the mapping of failures (used without Session: field
notes A20, A24). `exchange` writes the request and reads the head, `http1` takes bodies apart, so that every framing
passes without delay. What this takes from the libraries beyond their documented interface is in `_Watched`, `_Answer`
and `_Adapter`; tests/integration/test_upstream.py pins it.
"""

from __future__ import annotations

import http.client
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from qmflask import http1
from qmflask.exchange import BLOCK, Exchange, Stale, Timeouts, UpstreamRequest, set_timeout
from qmflask.forwardproxy import ForwardProxies
from qmflask.hangup import Client

__all__ = ["Timeouts", "Upstream", "UpstreamRequest", "UpstreamResponse"]

#: Servers whose pools are remembered.
MAX_SERVERS = 256


class Upstream:
    """Owns the connection pools of one process. Make it after fork.

    `pool_size`: connections kept per server, at least the number of threads. `keepalive`: reuse connections. It is off
    by default: a fresh connection to a local server costs little and cannot be stale (field notes A21), while an idle
    one may occupy a thread of the server, as llama-server's does, and keep others waiting. `environ` names the proxies.
    """

    def __init__(
        self,
        pool_size: int = 128,
        *,
        keepalive: bool = False,
        verify: bool | str = True,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._proxies = ForwardProxies(environ)
        self._adapter = _Adapter(pool_size)
        self._keepalive = keepalive
        self._verify = verify

    def send(self, request: UpstreamRequest, client: Client) -> UpstreamResponse:
        """Send and wait for the head. The caller closes the response.

        Raises UpstreamUnreachable, UpstreamTimeout, ClientGone, and what iterating over `request.body` raises.
        """
        try:
            return self._send(Exchange(request, client, self._proxies))
        except Stale:
            return self._send(Exchange(request, client, self._proxies))

    def close(self) -> None:
        """Drop the idle connections."""
        self._adapter.close()

    def _send(self, exchange: Exchange) -> UpstreamResponse:
        exchange.begin()
        try:
            if self._keepalive or exchange.secure:
                self._send_pooled(exchange)
            else:
                _send_alone(exchange)
            return UpstreamResponse(exchange, self._keepalive)
        except BaseException as error:
            exchange.close()
            if isinstance(error, _FAILURES):
                raise exchange.failure(error) from error
            raise

    def _send_pooled(self, exchange: Exchange) -> None:
        _current.exchange = exchange
        try:
            self._adapter.send(_prepared(exchange), stream=True, verify=self._verify)
        finally:
            _current.exchange = None


class UpstreamResponse:
    """An answer: `status`, `reason`, `headers` (repeated ones kept), and an iterator over the body's bytes.

    Iteration gives whatever has arrived, at once, for every framing, with the coding untouched. It raises
    UpstreamUnreachable when the body ends early, UpstreamTimeout after `timeouts.idle` without a byte, and
    ClientGone after the client was cancelled. `complete` is True once the whole body was read.
    """

    def __init__(self, exchange: Exchange, keepalive: bool) -> None:
        head, answer = exchange.head, exchange.answer
        assert head is not None and answer is not None and exchange.sock is not None
        self.status = head.status
        self.reason = head.reason
        self.headers = head.headers
        self._head = head
        self._exchange = exchange
        self._answer = answer
        self._keepalive = keepalive
        self._recv = exchange.sock.recv
        self._closed = False
        try:
            self._body = http1.body_of(exchange.request.method, head)
            self._pending = self._body.feed(head.rest) if head.rest else b""
            set_timeout(exchange.sock, exchange.request.timeouts.idle or None)
        except BaseException:
            answer.end(keep=False)
            raise

    @property
    def complete(self) -> bool:
        """True once the end of the body was seen and all of it was handed out."""
        return self._body.done and not self._pending

    @property
    def length(self) -> int | None:
        """The length of the body where it was announced in a way that counts."""
        return self._body.length

    def take_over(self) -> tuple[socket.socket, bytes]:
        """After status 101: the connection, which no hang-up cuts any more, and the bytes that came behind the head.

        It is the caller's until `close`, which ends it.
        """
        sock, behind = self._exchange.sock, self._pending
        assert self.status == 101 and sock is not None
        self._pending = b""
        self._exchange.close()
        return sock, behind

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
        keep = self._keepalive and self._exchange.sent and http1.keeps_alive(self._head, self._body)
        self._answer.end(keep=keep)

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


_FAILURES = (
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    http1.Malformed,
    OSError,
)


class _Alone:
    """The connection of one plain exchange, which nobody else will use: it needs no pool."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def end(self, *, keep: bool) -> None:
        """Close it."""
        self._sock.close()


def _send_alone(exchange: Exchange) -> None:
    """What the adapter does for a plain connection that is not kept, without its cost (a tenth of a small request)."""
    sock = exchange.connect(*exchange.place, _NO_DELAY)
    try:
        exchange.transmit(sock)
        exchange.read_head(sock)
    except BaseException:
        exchange.close()  # first: a hang-up must not meet a descriptor that is somebody else's by then
        sock.close()
        raise
    exchange.answer = _Alone(sock)


_NO_DELAY = ((socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),)


class _Current(threading.local):
    """The exchange this thread is sending: urllib3 makes connections, and this tells them for whom."""

    exchange: Exchange | None = None


_current = _Current()


class _Answer:
    """What urllib3's pool takes for a response; the head is in the exchange, the body is ours to read."""

    version_string = "HTTP/1.1"
    length_remaining = None
    retries = None
    headers: dict[str, str] = {}  # noqa: RUF012 - the pool looks for Retry-After and must find nothing
    _pool: Any = None  # the pool sets both
    _connection: Any = None

    def __init__(self, status: int) -> None:
        self.status = status

    def end(self, *, keep: bool) -> None:
        """Give the connection back to its pool, closed unless it is to be kept."""
        if not keep:
            self._connection.close()
        self._pool._put_conn(self._connection)


class _Watched(HTTPConnection):
    """A connection whose socket its exchange knows, and which leaves writing and reading to it."""

    def _new_conn(self) -> socket.socket:
        return _exchange().connect(self._dns_host, self.port, self.socket_options)

    def request(self, *_: Any, **__: Any) -> None:
        """Called by the pool to send the request."""
        exchange = _exchange()
        if self.sock is None:
            self.connect()
        exchange.hold(self.sock)
        exchange.transmit(self.sock)

    def getresponse(self) -> Any:
        """Called by the pool to wait for the answer."""
        exchange = _exchange()
        try:
            head = exchange.read_head(self.sock)
        except http1.Malformed as error:
            raise exchange.failure(error) from error
        exchange.answer = _Answer(head.status)
        return exchange.answer


def _exchange() -> Exchange:
    assert _current.exchange is not None
    return _current.exchange


class _WatchedTLS(_Watched, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Watched


class _TLSPool(HTTPSConnectionPool):
    ConnectionCls = _WatchedTLS


class _Adapter(HTTPAdapter):
    """requests' adapter with our connections; it builds no response, so no cookies wander between clients."""

    def __init__(self, pool_size: int) -> None:
        self._pools: dict[str, Any] = {}
        super().__init__(pool_connections=MAX_SERVERS, pool_maxsize=pool_size)

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        """Called by requests' constructor."""
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TLSPool}

    def get_connection_with_tls_context(self, request: Any, *args: Any, **options: Any) -> Any:
        """The pool of a server; looked up once, as urllib3's own way costs a tenth of a small request."""
        pool = self._pools.get(request.url)
        if pool is None:
            pool = super().get_connection_with_tls_context(request, *args, **options)
            if len(self._pools) >= MAX_SERVERS:
                self._pools.clear()
            self._pools[request.url] = pool
        return pool

    def request_url(self, request: Any, proxies: Any) -> str:
        """Called by requests for the target, which the exchange knows; its own looks for proxies in vain."""
        return "/"

    def build_response(self, req: requests.PreparedRequest, resp: Any) -> Any:
        """Called by requests at the end of `send`."""
        return resp


def _prepared(exchange: Exchange) -> requests.PreparedRequest:
    """What the adapter needs to find the pool; the rest of the request is written by the exchange."""
    prepared = requests.PreparedRequest()
    prepared.method = exchange.request.method
    prepared.url = exchange.origin
    prepared.headers = {}  # type: ignore[assignment]
    return prepared

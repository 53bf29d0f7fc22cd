"""Connections to servers that are reached by TLS or kept; the only home of requests and urllib3.

`requests`' adapter and urllib3's pools give connections, TLS and the mapping of failures (used without Session: field
notes A20, A24). What this takes from the libraries beyond their documented interface is in `_Watched`, `_Answer` and
`_Adapter`; tests/integration/test_upstream.py pins it. Most processes never need it: `upstream` imports it late.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from qmflask import http1
from qmflask.exchange import Exchange

#: Servers whose pools are remembered.
MAX_SERVERS = 256


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


class Pools:
    """The connection pools of one process, by server. Thread-safe."""

    def __init__(self, size: int, verify: bool | str) -> None:
        self._adapter = _Adapter(size)
        self._verify = verify

    def send(self, exchange: Exchange) -> None:
        """Send and wait for the head: exchange.head and exchange.answer are set then."""
        _current.exchange = exchange
        try:
            self._adapter.send(_prepared(exchange), stream=True, verify=self._verify)
        except urllib3.exceptions.HTTPError as error:  # requests' own errors are OSErrors
            raise exchange.failure(error) from error
        finally:
            _current.exchange = None

    def close(self) -> None:
        """Drop the idle connections."""
        self._adapter.close()


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

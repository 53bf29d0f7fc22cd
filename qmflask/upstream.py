"""Sends requests to model servers and peers, and reads the answers.

`exchange` writes the request and reads the head, `http1` takes bodies apart, so that every framing passes at once.
Connections by TLS, and those that are kept, come from `pooled`.
"""

from __future__ import annotations

import http.client
import os
import socket
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from qmflask import http1
from qmflask.exchange import BLOCK, Exchange, Stale, Timeouts, UpstreamRequest, set_timeout
from qmflask.forwardproxy import ForwardProxies
from qmflask.hangup import Client
from qmflask.rush import Rush
from qmflask.timedsocket import TimedSocket

if TYPE_CHECKING:
    from qmflask.pooled import Pools

__all__ = ["Timeouts", "Upstream", "UpstreamRequest", "UpstreamResponse"]


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
        self._pool_size = pool_size
        self._keepalive = keepalive
        self._verify = verify
        self._lock = threading.Lock()
        self._pools: Pools | None = None

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
        if self._pools is not None:
            self._pools.close()

    def _send(self, exchange: Exchange) -> UpstreamResponse:
        exchange.begin()
        try:
            if self._keepalive or exchange.secure:
                self._pooled().send(exchange)
            else:
                _send_alone(exchange)
            return UpstreamResponse(exchange, self._keepalive)
        except BaseException as error:
            exchange.close()
            if isinstance(error, _FAILURES):
                raise exchange.failure(error) from error
            raise

    def _pooled(self) -> Pools:
        """The pools, made (and what they need imported, 5 MB) when the first connection asks for them."""
        with self._lock:
            if self._pools is None:
                from qmflask.pooled import Pools

                self._pools = Pools(self._pool_size, self._verify)
            return self._pools


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
        self._rush = Rush(exchange.sock) if isinstance(exchange.sock, TimedSocket) else None
        self._recv = exchange.sock.recv if self._rush is None else self._rush.recv
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
        if self._rush is not None and self._keepalive:
            self._rush.end()  # the connection may serve another exchange
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


_FAILURES = (http.client.HTTPException, http1.Malformed, OSError)


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

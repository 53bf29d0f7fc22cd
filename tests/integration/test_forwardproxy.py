"""Servers on other machines by way of the environment's proxy, which is a scripted one."""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qmflask.errors import UpstreamUnreachable
from qmflask.upstream import Upstream
from tests.integration.scripted import SHORT, Server, answering, fetch, read_request, request
from tests.integration.test_upstream_failures import certificate, over_tls

__all__ = ["certificate"]  # a fixture


@pytest.fixture
def through() -> Iterator[Callable[..., Upstream]]:
    """Upstreams whose environment names a proxy."""
    made: list[Upstream] = []

    def make(proxy: Server | str, **more: Any) -> Upstream:
        place = f"u%40x:p@127.0.0.1:{proxy.port}" if isinstance(proxy, Server) else proxy
        environ = {"http_proxy": place, "HTTPS_PROXY": f"http://{place}", "NO_PROXY": "direct.example,.local"}
        made.append(Upstream(environ=environ, **more))
        return made[-1]

    yield make
    for upstream in made:
        upstream.close()


AUTHORIZATION = b"Proxy-Authorization: Basic " + base64.b64encode(b"u@x:p")


def test_a_plain_server_through_a_proxy(through: Callable[..., Upstream]) -> None:
    heads: list[bytes] = []

    def proxy(sock: socket.socket) -> None:
        heads.append(read_request(sock)[0])
        sock.sendall(SHORT)

    with Server(proxy) as server:
        assert fetch(through(server), request("http://key@peer.example:81", "/a%2Fb?c")) == (200, b"hi")
    assert heads[0].startswith(b"POST http://peer.example:81/a%2Fb?c HTTP/1.1\r\n") and AUTHORIZATION in heads[0]


@pytest.mark.filterwarnings("ignore:Unverified HTTPS")
def test_a_secure_server_through_a_proxy(through: Callable[..., Upstream], certificate: Path) -> None:
    heads: list[bytes] = []

    def proxy(sock: socket.socket) -> None:
        heads.append(read_request(sock)[0])
        sock.sendall(b"HTTP/1.1 200 Established\r\n\r\n")
        over_tls(certificate, lambda inner: (heads.append(read_request(inner)[0]), inner.sendall(SHORT)))(sock)

    with Server(proxy) as server:
        assert fetch(through(server, verify=False), request("https://peer.example")) == (200, b"hi")
    assert heads[0].startswith(b"CONNECT peer.example:443 HTTP/1.1\r\n") and AUTHORIZATION in heads[0]
    assert heads[1].startswith(b"POST /v1/x HTTP/1.1\r\n") and b"Proxy-" not in heads[1]


@pytest.mark.parametrize(
    ("answer", "told"), [(b"HTTP/1.1 407 Who\r\n\r\n", "the proxy answered 407 Who"), (b"", "the proxy closed")]
)
def test_a_proxy_that_refuses(through: Callable[..., Upstream], answer: bytes, told: str) -> None:
    with Server(answering(answer)) as server, pytest.raises(UpstreamUnreachable, match=told) as caught:
        fetch(through(server), request("https://peer.example"))
    assert "at https://peer.example, through the proxy at 127.0.0.1" in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "direct.example", "a.local"])
def test_what_needs_no_proxy(through: Callable[..., Upstream], host: str) -> None:
    with Server(answering(SHORT)) as server:
        upstream = through("127.0.0.1:1")
        if host in ("127.0.0.1", "localhost"):
            assert fetch(upstream, request(f"http://{host}:{server.port}")) == (200, b"hi")
        else:  # there is no such machine
            with pytest.raises(UpstreamUnreachable) as caught:
                fetch(upstream, request(f"http://{host}"))
            assert "proxy" not in str(caught.value)


def test_a_proxy_of_another_kind_is_said_not_to_be_used(caplog: pytest.LogCaptureFixture) -> None:
    upstream = Upstream(environ={"https_proxy": "socks5://secret@h:1"})
    upstream.close()
    assert "the proxy of the environment is not used" in caplog.text and "secret" not in caplog.text

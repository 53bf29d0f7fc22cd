"""Requests to scripted model servers: exact bytes out, every framing back without delay, one connection each."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qmflask.errors import BadRequest
from qmflask.hangup import Client
from qmflask.upstream import Upstream
from tests.integration.scripted import (
    OK,
    SHORT,
    Server,
    answering,
    chunk,
    closed_by_peer,
    fetch,
    framed,
    read_request,
    request,
)

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

WAIT = 20


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    upstream = Upstream()
    yield upstream
    upstream.close()


# --- what goes out ----------------------------------------------------------------------------------------


def seen_by_server(upstream: Upstream, path: str = "/", **more: Any) -> tuple[bytes, bytes]:
    seen: list[tuple[bytes, bytes]] = []

    def handler(sock: socket.socket) -> None:
        seen.append(read_request(sock))
        sock.sendall(SHORT)

    with Server(handler) as server:
        assert fetch(upstream, request(server, path, **more)) == (200, b"hi")
    return seen[0]


def test_the_request_is_what_it_was_told_to_be(upstream: Upstream) -> None:
    head, body = seen_by_server(
        upstream, "/a%2fb/%7Ec//../d;x?q=%zz&r=[1]|%C3%A9", headers=[("Host", "box:80"), ("X-A", "caf\xe9")]
    )
    assert head.split(b"\r\n") == [
        b"POST /a%2fb/%7Ec//../d;x?q=%zz&r=[1]|%C3%A9 HTTP/1.1",
        b"Host: box:80",
        b"X-A: caf\xe9",
        b"Content-Length: 13",
    ]
    assert body == b'{"model":"m"}'


def test_clients_names_and_codings_pass_and_none_are_made_up(upstream: Upstream) -> None:
    sent = [("Host", "h"), ("User-Agent", "me"), ("Accept-Encoding", "br"), ("Authorization", "Bearer k")]
    head, _ = seen_by_server(upstream, headers=sent)
    assert b"User-Agent: me\r\nAccept-Encoding: br\r\nAuthorization: Bearer k" in head


@pytest.mark.parametrize(
    ("path", "target"),
    [("", b"/"), ("?q", b"/?q"), ("/a b\xe9", b"/a%20b%E9"), ("/a#b", b"/a"), ("/a\r\nX: y", b"/a%0D%0AX:%20y")],
)
def test_targets_that_no_request_line_can_hold(upstream: Upstream, path: str, target: bytes) -> None:
    head, _ = seen_by_server(upstream, path)
    assert head.startswith(b"POST " + target + b" HTTP/1.1\r\nHost: box\r\n")


@pytest.mark.parametrize("bad", [("X-A", "b\r\nX-C: d"), ("X-A", "b\nX"), ("X\r\nY", "b"), ("X-A", "b\0c")])
def test_a_header_cannot_smuggle_another(upstream: Upstream, bad: tuple[str, str]) -> None:
    with Server(answering(SHORT)) as server, pytest.raises(BadRequest):
        upstream.send(request(server, headers=[("Host", "h"), bad]), Client())


def test_bodies_of_every_kind(upstream: Upstream) -> None:
    assert seen_by_server(upstream, body=None, method="GET")[0].count(b"ength") == 0
    assert b"Content-Length: 0" in seen_by_server(upstream, body=b"")[0]
    head, body = seen_by_server(upstream, body=iter([b"abc", b"", b"de"]), body_length=5)
    assert b"Content-Length: 5" in head and b"chunked" not in head and body == b"abcde"
    head, body = seen_by_server(upstream, body=iter([b"abc", b"", b"de"]))
    assert b"Transfer-Encoding: chunked" in head and b"Content-Length" not in head
    assert body == chunk(b"abc") + chunk(b"de") + chunk(b"")
    big = bytes(range(256)) * 40_000
    assert seen_by_server(upstream, body=big)[1] == big


def test_a_body_that_breaks_ends_the_request(upstream: Upstream) -> None:
    def breaking() -> Iterator[bytes]:
        yield b"abc"
        raise BadRequest("the client sent less than it promised")

    got: list[bytes] = []
    cut = threading.Event()

    def handler(sock: socket.socket) -> None:
        while data := sock.recv(65536):
            got.append(data)
        cut.set()

    with Server(handler) as server:
        with pytest.raises(BadRequest):
            upstream.send(request(server, body=breaking(), body_length=10), Client())
        assert cut.wait(WAIT)
    assert b"".join(got).endswith(b"abc")


def test_an_early_answer_is_taken_even_if_the_server_reads_no_further(upstream: Upstream) -> None:
    def handler(sock: socket.socket) -> None:
        sock.recv(10)
        sock.sendall(b"HTTP/1.1 413 Too Big\r\nContent-Length: 3\r\n\r\nbig")
        sock.shutdown(socket.SHUT_WR)
        closed_by_peer(sock)

    with Server(handler) as server:
        assert fetch(upstream, request(server, body=b"x" * 100_000)) == (413, b"big")


def test_environment_and_netrc_change_nothing(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    head, _ = seen_by_server(upstream, headers=[("Host", "h"), ("Authorization", "Bearer client")])
    assert b"Authorization: Bearer client" in head and b"Basic" not in head


def test_cookies_of_one_answer_do_not_reach_the_next_request(upstream: Upstream) -> None:
    heads: list[bytes] = []

    def handler(sock: socket.socket) -> None:
        heads.append(read_request(sock)[0])
        sock.sendall(OK + b"Set-Cookie: secret=1; Path=/\r\nContent-Length: 0\r\n\r\n")

    with Server(handler) as server:
        for _ in range(2):
            fetch(upstream, request(server))
    assert b"ookie" not in heads[1]


# --- what comes back --------------------------------------------------------------------------------------


def test_status_reason_and_repeated_headers_come_back_as_sent(upstream: Upstream) -> None:
    sent = b"HTTP/1.1 418 I'm odd\r\nSet-Cookie: a\r\nX-B: caf\xe9\r\nset-cookie: b\r\nContent-Length: 0\r\n\r\n"
    with Server(answering(sent)) as server:
        response = upstream.send(request(server), Client())
        assert (response.status, response.reason) == (418, "I'm odd")
        assert response.headers == [
            ("Set-Cookie", "a"),
            ("X-B", "caf\xe9"),
            ("set-cookie", "b"),
            ("Content-Length", "0"),
        ]
        assert response.complete and response.read_short() == b""
        response.close()
        response.close()


@pytest.mark.parametrize("framing", ["chunked", "length", "close", "http/1.0"])
def test_nothing_is_held_back(upstream: Upstream, framing: str) -> None:
    """The server sends an event only when the client has the one before it: holding back would hang."""
    events = [b"data: %d\n\n" % number * 3 for number in range(20)]
    head, pieces = framed(framing, events)
    arrived: queue.Queue[bytes] = queue.Queue()

    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(head)
        assert arrived.get(timeout=WAIT) == b"head"
        for piece, event in zip(pieces, events, strict=True):
            sock.sendall(piece)
            assert arrived.get(timeout=WAIT) == event
        if framing == "chunked":
            sock.sendall(chunk(b""))

    with Server(handler) as server:
        response = upstream.send(request(server), Client())
        arrived.put(b"head")
        got = []
        for data in response:
            got.append(data)
            arrived.put(data)
        assert got == events and response.complete
        response.close()


@pytest.mark.parametrize("framing", ["chunked", "length", "close", "http/1.0"])
def test_what_is_at_hand_comes_in_few_pieces(upstream: Upstream, framing: str) -> None:
    events = [b"data: %d\n\n" % number for number in range(1000)]
    head, pieces = framed(framing, events)
    end = chunk(b"") if framing == "chunked" else b""
    with Server(answering(head + b"".join(pieces) + end)) as server:
        response = upstream.send(request(server), Client())
        got = list(response)
        response.close()
    assert b"".join(got) == b"".join(events)
    assert len(got) < 20


def test_bodies_of_many_megabytes_arrive_whole(upstream: Upstream) -> None:
    piece = bytes(range(256)) * 4096
    for framing in ("chunked", "length", "close"):
        head, pieces = framed(framing, [piece] * 20)
        with Server(answering(head + b"".join(pieces) + (chunk(b"") if framing == "chunked" else b""))) as server:
            assert fetch(upstream, request(server))[1] == piece * 20


def test_short_bodies_are_read_at_once_and_long_ones_are_not(upstream: Upstream) -> None:
    for size, short in ((0, True), (65_536, True), (65_537, False)):
        with Server(answering(OK + b"Content-Length: %d\r\n\r\n" % size + b"x" * size)) as server:
            response = upstream.send(request(server), Client())
            assert (response.read_short() is not None) == short
            response.close()


def test_compressed_bodies_are_not_touched(upstream: Upstream) -> None:
    with Server(answering(OK + b"Content-Encoding: gzip\r\nContent-Length: 7\r\n\r\nnotgzip")) as server:
        assert fetch(upstream, request(server)) == (200, b"notgzip")


@pytest.mark.parametrize(
    ("method", "sent", "status"),
    [
        ("HEAD", OK + b"Content-Length: 5\r\n\r\n", 200),
        ("HEAD", OK + b"Transfer-Encoding: chunked\r\n\r\n", 200),
        ("GET", b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", 204),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304),
    ],
)
def test_answers_without_a_body(upstream: Upstream, method: str, sent: bytes, status: int) -> None:
    with Server(lambda sock: (read_request(sock), sock.sendall(sent), closed_by_peer(sock))[0]) as server:  # type: ignore[arg-type,return-value]
        assert fetch(upstream, request(server, method=method, body=None)) == (status, b"")


def test_redirects_are_passed_through(upstream: Upstream) -> None:
    moved = b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    with Server(answering(moved)) as server:
        response = upstream.send(request(server), Client())
        assert response.status == 307 and ("Location", "http://127.0.0.1:1/") in response.headers
        response.close()
        assert server.connections == 1


def test_informational_answers_and_trailers_are_dropped(upstream: Upstream) -> None:
    sent = b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + OK + b"Transfer-Encoding: chunked\r\n\r\n"
    with Server(answering(sent + chunk(b"hi") + b"0\r\nX-Trailer: y\r\n\r\n")) as server:
        assert fetch(upstream, request(server)) == (200, b"hi")


# --- connections ------------------------------------------------------------------------------------------


def serving_many(sock: socket.socket) -> None:
    while read_request(sock)[0]:
        sock.sendall(SHORT)


def test_each_request_has_its_own_connection_unless_told_otherwise(upstream: Upstream) -> None:
    with Server(serving_many) as server:
        for _ in range(3):
            fetch(upstream, request(server))
        assert server.connections == 3
    keeping = Upstream(keepalive=True)
    with Server(serving_many) as server:
        responses = []  # kept, so that nothing happens only because an object went away
        for _ in range(3):
            responses.append(keeping.send(request(server), Client()))
            assert responses[-1].read_short() == b"hi"
            responses[-1].close()
        assert server.connections == 1
        keeping.close()


def test_a_kept_connection_that_the_server_drops_is_replaced_unseen() -> None:
    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(SHORT)
        read_request(sock)  # the next request comes, and is dropped without an answer

    with Server(handler) as server:
        keeping = Upstream(keepalive=True)
        for _ in range(3):
            assert fetch(keeping, request(server)) == (200, b"hi")
        assert server.connections == 3
        keeping.close()


def test_a_half_read_answer_is_not_kept() -> None:
    cut = threading.Event()

    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(OK + b"Content-Length: 10\r\n\r\nhello")
        assert closed_by_peer(sock)
        cut.set()

    keeping = Upstream(keepalive=True)
    with Server(handler) as server:
        response = keeping.send(request(server), Client())
        assert next(response) == b"hello"
        response.close()
        assert cut.wait(WAIT)
    keeping.close()


def test_what_we_rely_on_in_the_libraries() -> None:
    """Names beyond the documented interface: if one goes, this says so before anything odd happens."""
    import inspect

    from requests.adapters import HTTPAdapter
    from urllib3.connection import HTTPConnection
    from urllib3.connectionpool import HTTPConnectionPool
    from urllib3.poolmanager import PoolManager

    assert callable(HTTPConnection._new_conn)
    assert HTTPConnection("host")._dns_host == "host"
    assert HTTPConnectionPool.ConnectionCls is HTTPConnection
    assert callable(HTTPConnectionPool._put_conn)
    assert "http" in PoolManager().pool_classes_by_scheme
    used = inspect.getsource(HTTPAdapter.send)
    assert "self.get_connection_with_tls_context(" in used and "self.build_response(" in used
    making = inspect.getsource(HTTPConnectionPool._make_request)
    assert "conn.request(" in making and "conn.getresponse()" in making and "response._connection =" in making

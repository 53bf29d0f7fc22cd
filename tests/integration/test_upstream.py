"""Requests to scripted model servers: exact bytes out, every framing without delay, cuts, deadlines, liars."""

from __future__ import annotations

import queue
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qmflask.errors import BadRequest, ClientGone, UpstreamTimeout, UpstreamUnreachable
from qmflask.hangup import Client
from qmflask.upstream import Timeouts, Upstream, UpstreamRequest
from tests.integration.scripted import Server, answering, chunk, closed_by_peer, read_request

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

OK = b"HTTP/1.1 200 OK\r\n"
SHORT = OK + b"Content-Length: 2\r\n\r\nhi"
WAIT = 20


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    upstream = Upstream()
    yield upstream
    upstream.close()


def request(server: Server | str, path: str = "/v1/x", **more: Any) -> UpstreamRequest:
    url = server if isinstance(server, str) else server.url
    given = {"method": "POST", "headers": [("Host", "box")], "body": b'{"model":"m"}', **more}
    return UpstreamRequest(url=url + path, **given)


def fetch(upstream: Upstream, sent: UpstreamRequest, client: Client | None = None) -> tuple[int, bytes]:
    response = upstream.send(sent, client or Client())
    try:
        return response.status, b"".join(response)
    finally:
        response.close()


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


def framed(framing: str, pieces: list[bytes]) -> tuple[bytes, list[bytes]]:
    """(head, what to send for each piece) of a body in one of the framings."""
    if framing == "chunked":
        return OK + b"Transfer-Encoding: chunked\r\n\r\n", [chunk(p) for p in pieces]
    if framing == "length":
        return OK + b"Content-Length: %d\r\n\r\n" % sum(map(len, pieces)), pieces
    if framing == "http/1.0":
        return b"HTTP/1.0 200 OK\r\n\r\n", pieces
    return OK + b"Connection: close\r\n\r\n", pieces


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


# --- cuts -------------------------------------------------------------------------------------------------


def cancel_when(client: Client, event: threading.Event) -> threading.Thread:
    def run() -> None:
        assert event.wait(WAIT)
        client.cancel()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_client_that_is_gone_already_sends_nothing(upstream: Upstream) -> None:
    client = Client()
    client.cancel()
    with Server(answering(SHORT)) as server, pytest.raises(ClientGone):
        upstream.send(request(server), client)
    assert server.connections == 0


def test_a_hang_up_before_the_head_cuts_the_request(upstream: Upstream) -> None:
    client, asked, cut = Client(), threading.Event(), threading.Event()

    def handler(sock: socket.socket) -> None:
        read_request(sock)
        asked.set()
        assert closed_by_peer(sock)
        cut.set()

    with Server(handler) as server:
        canceller = cancel_when(client, asked)
        with pytest.raises(ClientGone):
            upstream.send(request(server), client)
        assert cut.wait(WAIT)
        canceller.join()


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_a_hang_up_amid_the_body_cuts_it_and_is_never_a_clean_end(upstream: Upstream, framing: str) -> None:
    client, asked, cut = Client(), threading.Event(), threading.Event()
    head, pieces = framed(framing, [b"some", b"more"])

    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(head + pieces[0])
        assert closed_by_peer(sock)
        cut.set()

    with Server(handler) as server:
        response = upstream.send(request(server), client)
        assert next(response) == b"some"
        canceller = cancel_when(client, asked)
        asked.set()
        with pytest.raises(ClientGone):
            next(response)
        assert cut.wait(WAIT)
        response.close()
        canceller.join()


def test_a_hang_up_while_the_server_takes_no_bytes_cuts_the_upload(upstream: Upstream) -> None:
    client, connected = Client(), threading.Event()

    def handler(sock: socket.socket) -> None:
        sock.recv(100)
        connected.set()
        closed_by_peer(sock)

    with Server(handler) as server:
        canceller = cancel_when(client, connected)
        with pytest.raises(ClientGone):
            upstream.send(request(server, body=b"x" * 50_000_000), client)
        canceller.join()


def full_listener() -> tuple[socket.socket, list[socket.socket]]:
    """A listener whose queue is full: the next connection attempt hangs."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(listener.getsockname())
        fillers.append(filler)
    return listener, fillers


def test_a_hang_up_while_connecting(upstream: Upstream) -> None:
    listener, fillers = full_listener()
    client, begun = Client(), threading.Event()
    canceller = cancel_when(client, begun)
    threading.Timer(0.2, begun.set).start()
    start = time.monotonic()
    try:
        with pytest.raises(ClientGone):
            upstream.send(request(f"http://127.0.0.1:{listener.getsockname()[1]}"), client)
        assert time.monotonic() - start < 15  # the connect timeout is 30
    finally:
        canceller.join()
        for sock in [listener, *fillers]:
            sock.close()


def test_a_hang_up_after_the_end_touches_nothing(upstream: Upstream) -> None:
    client = Client()
    with Server(answering(SHORT)) as server:
        response = upstream.send(request(server), client)
        assert response.read_short() == b"hi"
        response.close()
        client.cancel()
        assert fetch(upstream, request(server)) == (200, b"hi")


# --- deadlines and failures -------------------------------------------------------------------------------


def test_nobody_listens(upstream: Upstream) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UpstreamUnreachable, match=rf"127\.0\.0\.1:{port} .*refused"):
        upstream.send(request(f"http://127.0.0.1:{port}"), Client())


def test_nobody_accepts(upstream: Upstream) -> None:
    listener, fillers = full_listener()
    try:
        with pytest.raises(UpstreamUnreachable, match=r"did not accept a connection within 0\.2 s"):
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            upstream.send(request(url, timeouts=Timeouts(connect=0.2)), Client())
    finally:
        for sock in [listener, *fillers]:
            sock.close()


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "127.0.0.1:80", "http://", "http://no-such-host.invalid", "http://127.0.0.1:99999"]
)
def test_addresses_that_lead_nowhere(upstream: Upstream, url: str) -> None:
    with pytest.raises(UpstreamUnreachable):
        upstream.send(request(url, ""), Client())


def silent(sock: socket.socket) -> None:
    closed_by_peer(sock)


def test_a_silent_server(upstream: Upstream) -> None:
    limit = Timeouts(response_header=0.2)
    with Server(silent) as server, pytest.raises(UpstreamTimeout, match=r"within 0\.2 s"):
        upstream.send(request(server, timeouts=limit), Client())


@pytest.mark.parametrize("pause", [0.01, 0])
def test_a_head_that_drips_does_not_outlive_the_deadline(upstream: Upstream, pause: float) -> None:
    over = threading.Event()

    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(OK)
        while not over.is_set():
            sock.sendall(b"A")
            if pause:
                over.wait(pause)

    with Server(handler) as server:
        with pytest.raises(UpstreamTimeout):
            upstream.send(request(server, timeouts=Timeouts(response_header=0.1)), Client())
        over.set()


def test_a_server_that_takes_no_bytes(upstream: Upstream) -> None:
    over = threading.Event()
    limit = Timeouts(response_header=0.3)
    with Server(lambda sock: over.wait(WAIT) and None) as server:
        with pytest.raises(UpstreamTimeout, match="did not take the request"):
            upstream.send(request(server, body=b"x" * 50_000_000, timeouts=limit), Client())
        over.set()


def test_a_body_that_stops_is_cut_after_the_idle_time_only_if_there_is_one(upstream: Upstream) -> None:
    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(OK + b"Content-Length: 10\r\n\r\nhello")
        closed_by_peer(sock)

    with Server(handler) as server:
        response = upstream.send(request(server, timeouts=Timeouts(idle=0.2)), Client())
        assert next(response) == b"hello"
        with pytest.raises(UpstreamTimeout, match="sent nothing"):
            next(response)
        response.close()


def test_the_deadline_of_the_head_does_not_bind_the_body(upstream: Upstream) -> None:
    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(OK + b"Content-Length: 10\r\n\r\nhello")
        threading.Event().wait(0.7)
        sock.sendall(b"world")

    with Server(handler) as server:
        sent = request(server, timeouts=Timeouts(response_header=0.5))
        assert fetch(upstream, sent) == (200, b"helloworld")


RESET = b"reset"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        RESET,
        b"HTT",
        b"HTTP/1.1 200 OK\r\nA: ",
        b"garbage\r\n\r\n",
        b"<html>hello</html>",
        b"HTTP/1.1 banana\r\n\r\n",
        OK + b"A: b\r\n" * 50_000,
        OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        OK + b"Content-Length: -1\r\n\r\nhello",
        OK + b"Transfer-Encoding: gzip\r\n\r\nhello",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 100,
    ],
    ids=lambda sent: sent[:45].decode("latin-1").replace("\r\n", "|"),
)
def test_servers_that_die_or_lie_before_the_body(upstream: Upstream, sent: bytes) -> None:
    def handler(sock: socket.socket) -> None:
        read_request(sock)
        if sent == RESET:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        else:
            sock.sendall(sent)

    with Server(handler) as server, pytest.raises(UpstreamUnreachable) as caught:
        upstream.send(request(server), Client())
    assert "the model server at http://127.0.0.1" in caught.value.message


@pytest.mark.parametrize(
    "sent",
    [
        OK + b"Content-Length: 10\r\n\r\nhello",
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"hello"),
        OK + b"Transfer-Encoding: chunked\r\n\r\n9\r\nhello",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nxyz\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloworld\r\n",
    ],
    ids=lambda sent: sent[17:].decode("latin-1").replace("\r\n", "|"),
)
def test_bodies_that_break(upstream: Upstream, sent: bytes) -> None:
    with Server(answering(sent)) as server, pytest.raises(UpstreamUnreachable):
        fetch(upstream, request(server))


def test_more_than_announced_is_dropped(upstream: Upstream) -> None:
    with Server(answering(SHORT + b"HTTP/1.1 200 OK\r\n\r\nevil")) as server:
        assert fetch(upstream, request(server)) == (200, b"hi")


# --- TLS --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 with its key in one file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", str(path) + ".crt"]
    subprocess.run(made, check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


def over_tls(certificate: Path, handler: Any) -> Any:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def run(sock: socket.socket) -> None:
        try:
            with context.wrap_socket(sock, server_side=True) as wrapped:
                handler(wrapped)
        except ssl.SSLError:
            pass  # the client would not have it

    return run


def https(server: Server) -> UpstreamRequest:
    return request(server.url.replace("http:", "https:"))


def test_peers_over_tls_are_verified_and_streamed(certificate: Path) -> None:
    sent = OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * 200_000) + chunk(b"")
    trusting, doubting = Upstream(verify=f"{certificate}.crt"), Upstream()
    with Server(over_tls(certificate, answering(sent))) as server:
        assert fetch(trusting, https(server)) == (200, b"x" * 200_000)
        with pytest.raises(UpstreamUnreachable, match="certificate verify failed"):
            fetch(doubting, https(server))
    trusting.close()
    doubting.close()


@pytest.mark.parametrize("first", [b"", OK + b"Content-Length: 10\r\n\r\nhello"])
def test_a_hang_up_cuts_a_request_over_tls(certificate: Path, first: bytes) -> None:
    client, asked, cut = Client(), threading.Event(), threading.Event()

    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(first)
        asked.set()
        try:
            assert closed_by_peer(sock)
        finally:
            cut.set()

    trusting = Upstream(verify=f"{certificate}.crt")
    with Server(over_tls(certificate, handler)) as server:
        canceller = cancel_when(client, asked)
        with pytest.raises(ClientGone):
            fetch(trusting, https(server), client)
        assert cut.wait(WAIT)
        canceller.join()
    trusting.close()


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

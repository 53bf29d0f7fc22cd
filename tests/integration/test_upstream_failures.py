"""What ends a request to a model server early: hang-ups, deadlines, servers that die or lie, TLS."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qmflask.errors import ClientGone, UpstreamTimeout, UpstreamUnreachable
from qmflask.hangup import Client
from qmflask.upstream import Timeouts, Upstream, UpstreamRequest
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


def test_a_handshake_that_does_not_come_ends_with_the_time_to_connect() -> None:
    def mute(sock: socket.socket) -> None:
        assert closed_by_peer(sock)

    upstream = Upstream()
    with Server(mute) as server, pytest.raises(UpstreamUnreachable):
        fetch(upstream, request(server.url.replace("http:", "https:"), timeouts=Timeouts(connect=0.1)))
    upstream.close()


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

"""Probes against servers that answer, lie, stall, drip and hang up; each is one function that is given a socket."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qmflask import probes
from qmflask.probes import Prober, ProbeResult, WarmUp, interval_ns, probe_once, warm_up
from tests.service import PortBlock

Handler = Callable[[socket.socket], None]
MS, SECOND = 1_000_000, 1_000_000_000
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Accepts connections one after another and gives the n-th to the n-th handler, the last one for ever."""

    def __init__(self, *handlers: Handler, port: int = 0) -> None:
        self.socket = socket.create_server(("127.0.0.1", port))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/health"
        self.handlers = list(handlers)
        self.requests: list[bytes] = []
        self.accepted = threading.Semaphore(0)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        for number in range(1_000_000):
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(20)
                self.accepted.release()
                handler = self.handlers[min(number, len(self.handlers) - 1)]
                try:
                    handler(connection)
                except OSError:
                    continue

    def close(self) -> None:
        self.over.set()
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join()

    # handlers

    def answer(self, data: bytes) -> Handler:
        """Read the request, answer, close."""

        def handler(connection: socket.socket) -> None:
            self.requests.append(connection.recv(65536))
            connection.sendall(data)

        return handler

    def stall(self, connection: socket.socket) -> None:
        """Accept, say nothing, until the client leaves."""
        while connection.recv(65536):
            pass

    def drip(self, data: bytes) -> Handler:
        """A byte each 20 ms, for ever."""

        def handler(connection: socket.socket) -> None:
            while not self.over.wait(0.02):
                connection.sendall(data)

        return handler


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(*data: bytes, port: int = 0) -> Server:
        server = Server(port=port)
        server.handlers = [server.answer(one) for one in data] or [server.stall]
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def port() -> Iterator[int]:
    block = PortBlock()
    yield block.take()
    block.close()


Serve = Callable[..., Server]


# --- one probe --------------------------------------------------------------------------------------------


def status(code: int, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n%s\r\n" % (code, more)


@pytest.mark.parametrize(
    ("answer", "expected", "ok"),
    [
        (OK, 200, True),
        (b"HTTP/1.0 200 OK\r\n\r\nno length", 200, True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200, True),
        (b"HTTP/1.1 200\nContent-Length: 0\n\n", 200, True),
        (b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + OK, 200, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ncut short", 200, True),
        (status(401), 401, True),
        (status(403), 403, True),
        (status(204), 204, False),
        (status(301, b"Location: /other\r\n"), 301, False),
        (status(404), 404, False),
        (status(503), 503, False),
    ],
)
def test_only_200_is_up_and_a_locked_door_counts(serve: Serve, answer: bytes, expected: int, ok: bool) -> None:
    server = serve(answer)
    result = probe_once(server.url, 10)
    assert (result.status, result.ok, result.error) == (expected, ok, "")
    assert (result.detail == "") == (expected == 200)
    assert len(server.requests) == 1, "no redirect is followed"


@pytest.mark.parametrize(
    ("answer", "fragment"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n", "HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "HTTP"),
        (b"HTTP/1.1 abc\r\n\r\n", "status line"),
        (b"", "closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-", "closed the connection without an answer"),
    ],
)
def test_what_is_no_answer_is_an_error_in_words(serve: Serve, answer: bytes, fragment: str) -> None:
    result = probe_once(serve(answer).url, 10)
    assert result.status is None and not result.ok
    assert fragment in result.error


@pytest.mark.parametrize(
    ("url", "fragment"),
    [
        ("http://127.0.0.1:{port}/", "connection refused at 127.0.0.1:{port}"),
        ("http://localhost:{port}/", "connection refused at localhost:{port}"),
        ("http://no-such-host.invalid/", "cannot look up"),
        ("ftp://127.0.0.1/", "not an http URL"),
        ("localhost:8080/health", "not an http URL"),
        ("http:///health", "not an http URL"),
        ("http://127.0.0.1:99999/", "ort"),
        ("https://127.0.0.1:{port}/", "connection refused"),
    ],
)
def test_what_cannot_be_asked_is_an_error_in_words(url: str, fragment: str, port: int) -> None:
    result = probe_once(url.format(port=port), 10)
    assert result.status is None
    assert fragment.format(port=port) in result.error
    assert result.refused == ("refused" in fragment)


def test_the_request_is_what_it_should_be(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server = serve(OK)
    url = f"http://user@127.0.0.1:{server.port}/a b/%41?x=1&y=\u00e9 z\r\nInjected: yes"
    assert probe_once(url, 10).ok
    assert probe_once(f"http://127.0.0.1:{server.port}", 10, host_header="model.local").ok
    lines = server.requests[0].decode("ascii").split("\r\n")
    assert lines[0] == "GET /a%20b/%41?x=1&y=%C3%A9%20zInjected:%20yes HTTP/1.1"
    assert f"Host: 127.0.0.1:{server.port}" in lines and "Connection: close" in lines
    assert lines[-2:] == ["", ""]
    second = server.requests[1].decode("ascii").split("\r\n")
    assert second[0] == "GET / HTTP/1.1" and "Host: model.local" in second


def test_localhost_is_tried_on_each_of_its_addresses(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has only 127.0.0.1, whatever comes first for `localhost`."""
    port = serve(OK).port
    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
        assert probe_once(f"http://localhost:{port}/", 10) == ProbeResult(200)


@pytest.mark.parametrize("data", [None, b"HTTP/1.1 200 OK\r\nX: y\r\n"])
def test_the_bound_is_for_the_whole_of_it(serve: Serve, data: bytes | None) -> None:
    server = serve()
    if data is not None:
        server.handlers = [server.drip(data)]
    began = time.monotonic()
    result = probe_once(server.url, 0.2)
    assert 0.15 < time.monotonic() - began < 5
    assert result.status is None
    assert "no answer within 0.2" in result.error


def test_a_health_body_that_never_ends_does_not_hold_up_the_answer(serve: Serve) -> None:
    server = serve()

    def endless(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        server.drip(b"x")(connection)

    server.handlers = [endless]
    began = time.monotonic()
    assert probe_once(server.url, 20).ok
    assert time.monotonic() - began < 5


def bind_strictly(port: int) -> bool:
    """As a server without SO_REUSEADDR does, for which a connection in TIME_WAIT takes the port."""
    with socket.socket() as server:
        try:
            server.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_a_connection_to_itself_is_no_server() -> None:
    """What the kernel may do when it picks the port that is asked for as the source; and it leaves no TIME_WAIT."""
    port = next(port for port in range(20_000, 32_000) if bind_strictly(port))
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.connect(("127.0.0.1", port))
        assert probes.is_self_connected(sock)
        probes.reset(sock)
    assert bind_strictly(port)


def test_tls(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = serve()

    def handler(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as wrapped:
            wrapped.recv(65536)
            wrapped.sendall(OK)

    server.handlers = [handler]
    url = f"https://localhost:{server.port}/health"
    assert "certificate" in probe_once(url, 10).error.lower()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert probe_once(url, 10) == ProbeResult(200)
    server.handlers = [server.stall]
    assert "no answer" in probe_once(url, 0.2).error
    server.handlers = [server.answer(OK)]
    assert probe_once(url, 10).status is None  # plain HTTP where TLS was meant


# --- warm-up ----------------------------------------------------------------------------------------------


def test_a_warm_up_waits_for_the_whole_answer(serve: Serve) -> None:
    server = serve()
    rest = threading.Event()

    def slowly(connection: socket.socket) -> None:
        server.requests.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        assert rest.wait(20)
        connection.sendall(b"0\r\n\r\n")
        server.stall(connection)  # does not close: the end is the last chunk

    server.handlers = [slowly]
    threading.Timer(0.1, rest.set).start()
    assert warm_up(server.url, b'{"a":1}', 20).status == 200
    assert rest.is_set()
    assert server.requests[0].startswith(b"POST /health HTTP/1.1\r\n")
    assert server.requests[0].endswith(b'\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n{"a":1}')


def test_a_warm_up_that_fails(serve: Serve) -> None:
    assert warm_up(serve(status(500)).url, None, 10) == ProbeResult(500)
    assert warm_up(serve(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ncut").url, None, 10).error
    assert "no answer" in warm_up(serve().url, b"{}", 0.1).error
    assert warm_up("nonsense", None, 1).error


# --- the prober -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elapsed", "interval"),
    [(0, 10), (500, 10), (1000, 10), (1500, 15), (3000, 30), (24_999, 249), (25_000, 250), (600_000, 250)],
)
def test_noticing_costs_one_percent(elapsed: int, interval: int) -> None:
    assert interval_ns(elapsed * MS) // MS == interval
    assert probes.knock_ns(elapsed * MS) // MS == interval // (5 if elapsed <= 3000 else 2)


@pytest.mark.parametrize(
    ("elapsed", "expected", "interval"),
    [(20, 30, 5), (81, 30, 10), (3000, 3000, 5), (2600, 3000, 26), (3400, 3000, 34), (60_000, 58_000, 41)],
)
def test_probes_are_denser_when_the_last_load_would_be_done(elapsed: int, expected: int, interval: int) -> None:
    assert interval_ns(elapsed * MS, expected * MS) // MS == interval


def test_what_the_server_sees_is_no_more_than_its_share(serve: Serve, probe: Start) -> None:
    """Only while nobody listens are tries more frequent than the rule."""
    server = serve(status(503))
    _, outcome = probe(server.url, seconds=0.5)
    assert outcome.wait()[1] is False
    assert 2 < len(server.requests) <= 51


class Outcome:
    """Collects what a prober reports."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool, str]] = []
        self.thread: threading.Thread | None = None
        self.come = threading.Event()

    def __call__(self, model: str, ok: bool, detail: str) -> None:
        self.calls.append((model, ok, detail))
        self.thread = threading.current_thread()
        self.come.set()

    def wait(self, timeout: float = 20) -> tuple[str, bool, str]:
        assert self.come.wait(timeout), "no result"
        return self.calls[0]


Start = Callable[..., tuple[Prober, Outcome]]


@pytest.fixture
def probe() -> Iterator[Start]:
    probers: list[Prober] = []

    def start(url: str, seconds: float = 20, **more: object) -> tuple[Prober, Outcome]:
        outcome = Outcome()
        deadline = time.monotonic_ns() + int(seconds * SECOND)
        prober = Prober("m", url, outcome, deadline, **more)  # type: ignore[arg-type]
        probers.append(prober)
        return prober.start(), outcome

    yield start
    for prober in probers:
        prober.stop()
        assert prober.join(10)


def test_a_ready_server_is_seen_at_once(serve: Serve, probe: Start) -> None:
    prober, outcome = probe(serve(OK).url)
    assert outcome.wait() == ("m", True, "")
    assert prober.join(10)
    assert len(outcome.calls) == 1 and outcome.thread is not threading.current_thread()


def test_a_server_is_awaited_through_refusals_and_503(serve: Serve, probe: Start, port: int) -> None:
    _, outcome = probe(f"http://127.0.0.1:{port}/health")
    assert not outcome.come.wait(0.1)
    server = serve(status(503), status(503), b"", OK, port=port)
    assert outcome.wait() == ("m", True, "")
    assert len(server.requests) == 4


def test_knocking_costs_one_descriptor_and_ends_in_a_connection(serve: Serve, port: int) -> None:
    door, before = probes._Door(probes._Target(f"http://127.0.0.1:{port}/")), len(os.listdir("/proc/self/fd"))
    used = set()
    for _ in range(50):
        with pytest.raises(probes._Refused, match=f"refused at 127.0.0.1:{port}"):
            door.knock()
        used.update(door._refused.values())
    assert len(used) == 1
    used.clear()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    server = serve(port=port)
    sock = door.knock()
    assert sock is not None and sock.getpeername()[1] == port and server.accepted.acquire(timeout=20)
    sock.close()
    with pytest.raises(probes._Refused):
        probes._Door(probes._Target("http://127.0.0.1:1/")).knock()


def test_a_door_closes_what_was_refused(port: int) -> None:
    door, before = probes._Door(probes._Target(f"http://127.0.0.1:{port}/")), os.listdir("/proc/self/fd")
    with pytest.raises(probes._Refused):
        door.knock()
    door.close()
    assert os.listdir("/proc/self/fd") == before


def test_a_locked_door_is_up_with_a_warning(serve: Serve, probe: Start) -> None:
    _, outcome = probe(serve(status(401)).url)
    _, ok, detail = outcome.wait()
    assert ok and "401" in detail


def test_the_deadline_ends_it_with_the_last_answer(serve: Serve, probe: Start) -> None:
    _, outcome = probe(serve(status(503)).url, seconds=0.1)
    assert outcome.wait()[1] is False
    assert "503" in outcome.calls[0][2]
    _, outcome = probe("http://127.0.0.1:1/", seconds=-1)
    assert outcome.wait()[1] is False


def test_a_stalled_probe_is_bounded_by_the_deadline(serve: Serve, probe: Start) -> None:
    server = serve()
    _, outcome = probe(server.url, seconds=0.2)
    assert server.accepted.acquire(timeout=20)
    assert outcome.wait(4)[1] is False
    assert "no answer" in outcome.calls[0][2]


def test_a_stalled_probe_is_given_up_and_another_one_made(
    serve: Serve, probe: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "PROBE_BOUND_NS", 100 * MS)
    server = serve()
    server.handlers = [server.stall, server.answer(OK)]
    assert probe(server.url)[1].wait() == ("m", True, "")


@pytest.mark.parametrize("when", ["stalled", "pausing"])
def test_stop_ends_it_at_once(serve: Serve, probe: Start, when: str) -> None:
    server = serve() if when == "stalled" else serve(status(503))
    hour_ago = time.monotonic_ns() - 3600 * SECOND  # so it pauses for 250 ms
    prober, outcome = probe(server.url, seconds=3600, started_ns=hour_ago)
    assert server.accepted.acquire(timeout=20)
    began = time.monotonic()
    prober.stop()
    prober.stop()
    assert outcome.wait(4) == ("m", False, "stopped")
    assert time.monotonic() - began < 4
    assert prober.join(10)
    prober.stop()
    assert len(outcome.calls) == 1


def test_stop_before_start(probe: Start) -> None:
    outcome = Outcome()
    prober = Prober("m", "http://127.0.0.1:1/", outcome, time.monotonic_ns() + 3600 * SECOND)
    prober.stop()
    prober.start()
    assert outcome.wait() == ("m", False, "stopped")
    assert prober.join(10)


def test_a_prober_can_be_stopped_by_its_own_result(serve: Serve) -> None:
    done = threading.Event()

    def on_result(*_: object) -> None:
        prober.stop()
        assert not prober.join(10)
        done.set()

    prober = Prober("m", serve(OK).url, on_result, time.monotonic_ns() + 20 * SECOND)
    prober.start()
    assert done.wait(20)
    assert prober.join(10)


def test_a_url_that_cannot_be_used_is_a_result(probe: Start) -> None:
    _, outcome = probe("localhost:8080/health")
    assert outcome.wait()[1] is False and "not an http URL" in outcome.calls[0][2]


def test_the_warm_up_must_succeed_first(serve: Serve, probe: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_WARM_UP_PAUSE_NS", 10 * MS)
    cut_short = b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ncut"
    health, warm = serve(OK), serve(status(500), b"", cut_short, OK)
    _, outcome = probe(health.url, warmup=WarmUp(warm.url, b"{}"))
    assert outcome.wait() == ("m", True, "")
    assert len(warm.requests) == 4 and all(r.startswith(b"POST") for r in warm.requests)


def test_a_warm_up_that_never_succeeds(serve: Serve, probe: Start) -> None:
    warm = serve(status(418))
    _, outcome = probe(serve(OK).url, seconds=0.1, warmup=WarmUp(warm.url))
    assert outcome.wait()[1] is False
    assert "warm-up" in outcome.calls[0][2] and "418" in outcome.calls[0][2]
    assert warm.requests[0].startswith(b"GET")


def test_a_hanging_warm_up_is_stopped(serve: Serve, probe: Start) -> None:
    warm = serve()
    prober, outcome = probe(serve(OK).url, seconds=3600, warmup=WarmUp(warm.url))
    assert warm.accepted.acquire(timeout=20)
    prober.stop()
    assert outcome.wait(4) == ("m", False, "stopped")


def test_probing_a_closed_port_costs_little(probe: Start, port: int) -> None:
    """For a second of load: about a hundred probes, a few per cent of a core at the very most."""
    clock = time.CLOCK_PROCESS_CPUTIME_ID
    before = time.clock_gettime(clock)
    _, outcome = probe(f"http://127.0.0.1:{port}/", seconds=1.0)
    assert outcome.wait()[1] is False
    assert time.clock_gettime(clock) - before < 0.2


def test_out_of_descriptors_is_a_result(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    def full(*_: object, **__: object) -> socket.socket:
        raise OSError(24, os.strerror(24))

    url = serve(OK).url
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", full)
        result = probe_once(url, 5)
    assert result.status is None and os.strerror(24) in result.error

"""The relay under real gunicorn: hang-ups, cuts that the client can see, stalled readers, large uploads."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.scripted import Server, answering, chunk, closed_by_peer, read_request, wait_for

REPO = Path(__file__).parents[2]
WAIT = 20
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CONFIG = (
    "workers = 1\nworker_class = 'qmflask.worker.Worker'\nthreads = 16\nkeepalive = 0\ncontrol_socket_disable = True\n"
)


class Gunicorn:
    """One gunicorn with the relay app, on a unix socket, relaying to `target`."""

    def __init__(self, folder: Path, target: str, **environ: str) -> None:
        self._socket = str(folder / "g.sock")
        self._ledger = folder / "ledger"
        self._log = folder / "log"
        (folder / "conf.py").write_text(CONFIG)
        command = [sys.executable, "-m", "gunicorn", "-c", str(folder / "conf.py"), "-b", f"unix:{self._socket}"]
        given = {"RELAY_TARGET": target, "RELAY_LEDGER": str(self._ledger), **environ}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "tests.parts.relay_app:app"], cwd=REPO, env={**os.environ, **given}, stdout=log, stderr=log
            )
        wait_for(self._is_up, "gunicorn")

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(WAIT)
        sock.connect(self._socket)
        return sock

    def ask(self, body: bytes = b'{"model":"m"}', head: bytes = b"Content-Type: application/json\r\n") -> socket.socket:
        sock = self.connect()
        sock.sendall(b"POST /v1/x HTTP/1.1\r\nHost: h\r\n%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
        return sock

    def ends(self, count: int = 1) -> list[dict[str, Any]]:
        """What the relay told at the ends of requests, once there are `count` of them."""

        def rows() -> list[str]:
            return self._ledger.read_text().splitlines() if self._ledger.exists() else []

        wait_for(lambda: len(rows()) >= count, f"{count} ends")
        assert len(rows()) == count
        return [json.loads(row) for row in rows()]

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def worker(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        wait_for(lambda: bool(children.read_text()), "a worker")
        return int(children.read_text().split()[0])

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.worker}/fd"))

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(WAIT)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self.log
        try:
            self.connect().close()
        except OSError:
            return False
        return True


Start = Callable[..., Gunicorn]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Gunicorn] = []

    def run(server: Server, **environ: str) -> Gunicorn:
        started.append(Gunicorn(tmp_path, server.url, **environ))
        return started[-1]

    yield run
    for gunicorn in started:
        gunicorn.close()


def everything(sock: socket.socket) -> bytes:
    """All bytes until the peer closes."""
    data = b""
    with sock:
        try:
            while piece := sock.recv(65536):
                data += piece
        except ConnectionResetError:
            pass
    return data


def waiting(cut: threading.Event, first: bytes = b"") -> Callable[[socket.socket], None]:
    """A server that sends `first` and then waits to be cut."""

    def handler(sock: socket.socket) -> None:
        if not read_request(sock)[0]:
            return
        sock.sendall(first)
        if closed_by_peer(sock):
            cut.set()

    return handler


def test_a_hang_up_before_the_first_byte_cuts_the_upstream(start: Start) -> None:
    asked, cut = threading.Event(), threading.Event()

    def handler(sock: socket.socket) -> None:
        read_request(sock)
        asked.set()
        assert closed_by_peer(sock)
        cut.set()

    with Server(handler) as server:
        gunicorn = start(server)
        sock = gunicorn.ask()
        assert asked.wait(WAIT)
        sock.close()
        assert cut.wait(WAIT)
        (end,) = gunicorn.ends()
    assert (end["gone"], end["status"], end["complete"]) == ("gone", None, False)


def test_a_hang_up_amid_a_stream_cuts_the_upstream_in_silence(start: Start) -> None:
    cut = threading.Event()
    with Server(waiting(cut, SSE + chunk(b"data: 0\n\n"))) as server:
        gunicorn = start(server)
        sock = gunicorn.ask()
        seen = b""
        while b"data: 0\n\n" not in seen:
            seen += sock.recv(65536)
        sock.close()
        assert cut.wait(WAIT)
        (end,) = gunicorn.ends()
    assert (end["gone"], end["status"], end["bytes"], end["complete"]) == ("gone", 200, 9, False)
    assert "Traceback" not in gunicorn.log and "rror" not in gunicorn.log


def test_headers_leave_before_the_first_event(start: Start) -> None:
    cut = threading.Event()
    with Server(waiting(cut, SSE)) as server:
        sock = start(server).ask()
        seen = b""
        while b"\r\n\r\n" not in seen:
            seen += sock.recv(65536)
        assert b"X-Accel-Buffering: no" in seen and seen.endswith(b"\r\n\r\n")
        sock.close()
        assert cut.wait(WAIT)


def test_a_stream_that_ends_well_ends_well(start: Start) -> None:
    with Server(answering(SSE + chunk(b"data: 0\n\n") + chunk(b""))) as server:
        gunicorn = start(server)
        data = everything(gunicorn.ask())
        assert data.endswith(b"data: 0\n\n\r\n0\r\n\r\n")
        (end,) = gunicorn.ends()
    assert end["complete"] and not end["error"]


def test_an_event_stream_that_breaks_is_told_and_cut(start: Start) -> None:
    with Server(answering(SSE + chunk(b"data: 0\n\n"))) as server:
        gunicorn = start(server)
        data = everything(gunicorn.ask())
        (end,) = gunicorn.ends()
    assert b'event: error\ndata: {"src":"qmflask","error":{' in data
    assert not data.endswith(b"0\r\n\r\n")  # never a clean end
    assert end["error"] and not end["complete"] and end["gone"] is None
    assert "answer cut after 9 bytes" in gunicorn.log and "Traceback" not in gunicorn.log


@pytest.mark.parametrize("framing", ["chunked", "length"])
def test_other_bodies_that_break_are_cut(start: Start, framing: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\n"
    if framing == "chunked":
        sent = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"RIFF")
    else:
        sent = head + b"Content-Length: 100000\r\n\r\nRIFF"
    with Server(answering(sent)) as server:
        gunicorn = start(server)
        data = everything(gunicorn.ask())
        (end,) = gunicorn.ends()
    assert b"HTTP/1.1 200 OK" in data and b"RIFF" in data and not data.endswith(b"0\r\n\r\n")
    assert end["error"] and not end["complete"]


def test_a_server_that_dies_before_its_headers_is_a_json_error(start: Start) -> None:
    with Server(answering(b"")) as server:
        data = everything(start(server).ask())
    assert data.startswith(b"HTTP/1.1 502 ")
    assert json.loads(data.partition(b"\r\n\r\n")[2].split(b"\r\n")[1])["error"]["code"] == "upstream_unreachable"


def test_a_client_that_takes_nothing_is_cut_and_its_thread_comes_back(start: Start) -> None:
    cut = threading.Event()

    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(SSE)
        try:
            while True:
                sock.sendall(chunk(b"data: " + b"x" * 60_000 + b"\n\n"))
        except OSError:
            cut.set()

    with Server(handler) as server:
        gunicorn = start(server, RELAY_STALL="0.5")
        sock = gunicorn.ask()  # and reads nothing
        assert cut.wait(WAIT)
        (end,) = gunicorn.ends()
        sock.close()
    assert (end["gone"], end["complete"]) == ("stalled", False)


def test_a_body_shorter_than_promised_never_reaches_the_model(start: Start) -> None:
    with Server(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")) as server:
        sock = start(server).connect()
        sock.sendall(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{}")
        sock.shutdown(socket.SHUT_WR)
        data = everything(sock)
        assert server.connections == 0
    assert data == b"" or data.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("broken", [b"5\r\nhel", b"zz\r\n", b"5\r\nhelloworld\r\n0\r\n\r\n"])
def test_a_broken_chunked_body_is_a_bad_request(start: Start, broken: bytes) -> None:
    with Server(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")) as server:
        sock = start(server).connect()
        head = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        sock.sendall(head + broken)
        sock.shutdown(socket.SHUT_WR)
        data = everything(sock)
        assert server.connections == 0
    assert data == b"" or data.startswith(b"HTTP/1.1 400 ")


def resident_kb(pid: int) -> int:
    """Peak resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


@pytest.mark.parametrize("model", ["first", "last"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_large_upload_passes_whole_without_being_held(start: Start, model: str, framing: str) -> None:
    size = 120_000_000
    got: list[int] = []

    def handler(sock: socket.socket) -> None:
        tail = sock.recv(1 << 20)
        total = len(tail)
        end = b"--XYZ--\r\n" + (b"\r\n0\r\n\r\n" if b"Transfer-Encoding: chunked" in tail else b"")
        while not tail.endswith(end):
            piece = sock.recv(1 << 20)
            total += len(piece)
            tail = (tail[-40:] + piece)[-40:]
        got.append(total)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    field = b'--XYZ\r\nContent-Disposition: form-data; name="model"\r\n\r\nbird\r\n'
    file = b'--XYZ\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n', b"\r\n"
    block = b"\r\n--XY" * 100_000
    count = size // len(block)
    before, after = (field + file[0], file[1]) if model == "first" else (file[0], file[1] + field)
    pieces = [before, *[block] * count, after + b"--XYZ--\r\n"]
    length = sum(map(len, pieces))
    with Server(handler) as server:
        gunicorn = start(server)
        small = gunicorn.ask(field + b"--XYZ--\r\n", b"Content-Type: multipart/form-data; boundary=XYZ\r\n")
        assert everything(small).endswith(b"ok")
        base = resident_kb(gunicorn.worker)
        sock = gunicorn.connect()
        head = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Type: multipart/form-data; boundary=XYZ\r\n"
        if framing == "length":
            sock.sendall(head + b"Content-Length: %d\r\n\r\n" % length)
        else:
            sock.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            sock.sendall(piece if framing == "length" else chunk(piece))
        if framing == "chunked":
            sock.sendall(chunk(b""))
        assert everything(sock).endswith(b"ok")
        assert resident_kb(gunicorn.worker) - base < 40_000
    assert got[-1] > length


@pytest.mark.parametrize("framing", ["chunked", "length"])
def test_a_large_answer_passes_whole_without_being_held(start: Start, framing: str) -> None:
    piece, count = b"x" * 1_000_000, 120

    def handler(sock: socket.socket) -> None:
        read_request(sock)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\n"
        length = b"Transfer-Encoding: chunked" if framing == "chunked" else b"Content-Length: %d" % (len(piece) * count)
        sock.sendall(head + length + b"\r\n\r\n")
        for _ in range(count):
            sock.sendall(chunk(piece) if framing == "chunked" else piece)
        if framing == "chunked":
            sock.sendall(chunk(b""))

    with Server(handler) as server:
        gunicorn = start(server)
        with gunicorn.ask() as sock:
            sock.recv(1000)
        gunicorn.ends(1)
        base, total = resident_kb(gunicorn.worker), 0
        with gunicorn.ask() as sock:
            while data := sock.recv(1 << 20):
                total += len(data)
        end = gunicorn.ends(2)[1]
        assert resident_kb(gunicorn.worker) - base < 20_000
    assert end["complete"] and end["bytes"] == len(piece) * count and total > end["bytes"]


ODD = [
    b"HTTP/1.1 799 \xe9\xff\r\nContent-Length: 2, 2\r\n\r\nhi",
    b"HTTP/1.1 200\r\nContent-Length: 2\r\nContent-Length: 2\r\nX-A: \xe9\t\r\nServer: theirs\r\nDate: now\r\n\r\nhi",
    b"HTTP/1.1 200 OK\r\nConnection: upgrade\r\nUpgrade: websocket\r\nKeep-Alive: 5\r\n\r\nhi",
    b"HTTP/1.0 200 OK\r\nLocation: /x\r\nTransfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("sent", ODD, ids=["799", "bare 200", "upgrade", "both framings"])
def test_odd_answers_pass_and_never_fail_in_the_server(start: Start, sent: bytes) -> None:
    with Server(answering(sent)) as server:
        gunicorn = start(server)
        data = everything(gunicorn.ask())
        (end,) = gunicorn.ends()
    assert data.startswith(sent[:8].replace(b"1.0", b"1.1") + b" " + sent[9:12])
    assert b"hi" in data and end["complete"]
    assert "Traceback" not in gunicorn.log


def test_many_hang_ups_leave_nothing(start: Start) -> None:
    served = threading.Semaphore(0)

    def handler(sock: socket.socket) -> None:
        if read_request(sock)[0]:
            sock.sendall(SSE + chunk(b"data: 0\n\n"))
            served.release()
            closed_by_peer(sock)

    with Server(handler) as server:
        gunicorn = start(server)
        with gunicorn.ask() as sock:
            sock.recv(1000)
        gunicorn.ends(1)
        # Threads are made on demand; the first request has made what stays.
        before = gunicorn.descriptors()
        for number in range(60):
            with gunicorn.ask() as sock:
                if number % 2:
                    sock.recv(1000)
        # A client may be gone before its request was even read; then there is no end to tell.
        wait_for(lambda: gunicorn.descriptors() <= before, f"{before} descriptors", 30)
    assert "Traceback" not in gunicorn.log

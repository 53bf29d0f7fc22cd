"""Our gunicorn worker under a real master: who closes connections, what a drain does, keep-alive, a full worker."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.scripted import wait_for

REPO = Path(__file__).parents[2]
WAIT = 30
CONFIG = "workers = 1\nworker_class = 'qmflask.worker.Worker'\nthreads = 8\ncontrol_socket_disable = True\n"


class Master:
    """gunicorn with one worker and the plain app, on a port of its own."""

    def __init__(self, folder: Path, settings: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))  # bound here, handed over: nobody can take the port
        self.port = self._listener.getsockname()[1]
        self._log = folder / "log"
        conf = folder / "conf.py"
        conf.write_text(CONFIG + settings)
        fd = self._listener.fileno()
        command = [sys.executable, "-m", "gunicorn", "-c", str(conf), "-b", f"fd://{fd}", "tests.parts.plain_app:app"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=REPO, env=dict(os.environ), stdout=log, stderr=log, pass_fds=(fd,)
            )
        self._listener.close()
        wait_for(lambda: bool(self.workers()) and "Booting" in self.log, "a worker")

    @property
    def log(self) -> str:
        return self._log.read_text()

    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT)

    def ask(self, target: str = "/", more: str = "Connection: close\r\n") -> socket.socket:
        sock = self.connect()
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: h\r\n{more}\r\n".encode())
        return sock

    def answers(self) -> bool:
        with self.ask() as sock:
            return everything(sock).endswith(b"ok\n")

    def refuses(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) != 0

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(WAIT)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Master]]:
    started: list[Master] = []

    def run(settings: str = "keepalive = 0\nworker_connections = 8\n") -> Master:
        started.append(Master(tmp_path, settings))
        return started[-1]

    yield run
    for master in started:
        master.close()


def everything(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


def test_clients_that_keep_their_side_open_hold_up_nobody(start: Callable[..., Master]) -> None:
    master = start()
    lingering = [master.ask() for _ in range(5)]
    for sock in lingering:
        assert everything(sock).endswith(b"ok\n")  # our side stays open: the server lingers for 2 s
    begin = time.monotonic()
    assert master.answers()
    assert time.monotonic() - begin < 5, "gthread's main thread lingers five times 2 s first"
    for sock in lingering:
        sock.close()


def test_a_drain_closes_the_address_and_lasts_for_the_last_answer(start: Callable[..., Master]) -> None:
    master = start("keepalive = 0\nworker_connections = 8\ngraceful_timeout = 30\n")
    with master.ask("/stream?60") as sock:
        seen = sock.recv(65536)
        master.process.terminate()
        wait_for(master.refuses, "the address is closed")
        seen += everything(sock)
    assert b"data: 59\n\n" in seen and seen.endswith(b"0\r\n\r\n")
    master.process.wait(WAIT)
    assert "Traceback" not in master.log


def test_an_answer_outlives_a_reload_however_long_it_takes(start: Callable[..., Master]) -> None:
    master = start("keepalive = 0\nworker_connections = 8\ngraceful_timeout = 1\ntimeout = 2\n")
    (old,) = master.workers()
    with master.ask("/stream?80") as sock:  # 4 s: twice graceful_timeout and timeout together
        seen = sock.recv(65536)
        master.process.send_signal(signal.SIGHUP)
        wait_for(lambda: set(master.workers()) - {old} != set() and master.answers(), "a new worker answers")
        seen += everything(sock)
    assert b"data: 79\n\n" in seen and seen.endswith(b"0\r\n\r\n")
    wait_for(lambda: old not in master.workers(), "the old worker ends")
    assert "TIMEOUT" not in master.log


def test_kept_connections_serve_again(start: Callable[..., Master]) -> None:
    master = start("keepalive = 20\nworker_connections = 16\n")
    with master.ask(more="") as sock:
        for _ in range(3):
            seen = b""
            while not seen.endswith(b"ok\n"):
                seen += sock.recv(65536)
            sock.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")


def test_requests_that_came_together_are_all_answered(start: Callable[..., Master]) -> None:
    master = start("keepalive = 20\nworker_connections = 16\n")
    with master.ask(more="\r\nGET /stream?1 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n") as sock:
        begin = time.monotonic()
        seen = everything(sock)
    assert seen.count(b"HTTP/1.1 200") == 2 and b"data: 0\n\n" in seen
    assert time.monotonic() - begin < 15, "the second is not waited for, it is there"


def test_who_goes_on_talking_does_not_lose_the_end_of_the_answer(start: Callable[..., Master]) -> None:
    master = start()
    with master.ask("/big?8000000") as sock:
        seen = sock.recv(100)
        sock.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")  # nobody is going to read that
        assert len((seen + everything(sock)).partition(b"\r\n\r\n")[2]) == 8_000_000


def test_a_worker_is_renewed_after_so_many_requests(start: Callable[..., Master]) -> None:
    master = start("max_requests = 3\n")
    (old,) = master.workers()
    for _ in range(3):
        assert master.answers()
    wait_for(lambda: old not in master.workers() and master.answers(), "another worker answers")


def test_tls_and_unusual_requests_are_gunicorns(start: Callable[..., Master], tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            "/CN=h",
            "-keyout",
            key,
            "-out",
            f"{key}.crt",
        ],
        check=True,
        capture_output=True,
    )
    master = start(f"keyfile = {str(key)!r}\ncertfile = '{key}.crt'\n")
    context = ssl.create_default_context(cafile=f"{key}.crt")
    context.check_hostname = False
    for _ in range(2):
        with context.wrap_socket(master.connect(), server_hostname="h") as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
            assert everything(sock).endswith(b"ok\n")
    with master.ask() as sock, contextlib.suppress(ConnectionResetError):
        everything(sock)  # no TLS, no answer
    assert "nobody caught" not in master.log


def test_a_request_in_pieces_and_one_of_http_1_0_are_answered(start: Callable[..., Master]) -> None:
    master = start()
    with master.connect() as sock:
        for piece in (b"GET / HT", b"TP/1.1\r\nHo", b"st: h\r\nConnection: close\r\n\r", b"\n"):
            sock.sendall(piece)
            time.sleep(0.02)  # each its own packet; nothing depends on it
        assert everything(sock).endswith(b"ok\n")
    with master.connect() as sock:
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert everything(sock).endswith(b"ok\n")
    with master.connect() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n")
        assert everything(sock).startswith(b"HTTP/1.1 400 ")


def test_a_full_worker_leaves_newcomers_in_the_queue_until_there_is_room(start: Callable[..., Master]) -> None:
    master = start("keepalive = 0\nthreads = 2\nworker_connections = 2\n")
    streams = [master.ask("/stream?20") for _ in range(2)]
    firsts = [sock.recv(65536) for sock in streams]
    with master.ask() as third:
        assert everything(third).endswith(b"ok\n")
    for sock, first in zip(streams, firsts, strict=True):
        assert (first + everything(sock)).endswith(b"0\r\n\r\n")
        sock.close()
    assert master.answers()


def test_quit_ends_a_worker_at_once_with_answers_under_way(start: Callable[..., Master]) -> None:
    master = start("keepalive = 0\nworker_connections = 8\ngraceful_timeout = 25\n")
    with master.ask("/stream?400") as sock:  # 20 s
        sock.recv(65536)
        master.process.send_signal(signal.SIGQUIT)
        seen = b""
        try:
            seen = everything(sock)
        except ConnectionResetError:
            pass
    master.process.wait(WAIT)
    assert b"data: 399\n\n" not in seen

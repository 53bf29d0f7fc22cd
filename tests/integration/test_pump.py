"""Bytes between two sockets: nothing is lost, nothing waits for a timer, and every end is an end."""

from __future__ import annotations

import random
import select
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from qmflask import pump
from qmflask.hangup import Client
from tests.service import eventually

WAIT = 20
#: More than the kernel holds for a connection that nobody reads.
MUCH = 6_000_000


class Carrier:
    """A pump between two pairs of sockets, in a thread: `user` is the client's end, `server` the server's."""

    def __init__(self, pair: Callable[[], tuple[socket.socket, socket.socket]]) -> None:
        self.user, self.near = pair()
        self.server, self.far = pair()
        for sock in (self.user, self.server):
            sock.settimeout(WAIT)
        self.client = Client()
        self.moved: list[bytes] = []
        self.result: Future[bool] = Future()
        self.thread: threading.Thread | None = None

    def run(self, to_near: bytes = b"", to_far: bytes = b"") -> None:
        def work() -> None:
            try:
                carried = pump.Pump(self.client, self.near, self.far, self.moved.append).run(to_near, to_far)
                self.result.set_result(carried)
            except BaseException as error:
                self.result.set_exception(error)

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def close(self) -> None:
        self.client.cancel()
        if self.thread is not None:
            self.thread.join()
        for sock in (self.user, self.near, self.server, self.far):
            sock.close()


def tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


@pytest.fixture(params=[socket.socketpair, tcp], ids=["unix", "tcp"])
def carrier(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    carrier = Carrier(request.param)
    yield carrier
    carrier.close()


def read(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count and (piece := sock.recv(count - len(data))):
        data += piece
    return bytes(data)


def test_what_came_early_goes_first(carrier: Carrier) -> None:
    carrier.run(b"from the server", b"from the client")
    assert read(carrier.user, 15) == b"from the server"
    assert read(carrier.server, 15) == b"from the client"


def test_much_both_ways_at_once(carrier: Carrier) -> None:
    carrier.run()
    bytes_of = random.Random(5).randbytes
    sent = {"user": bytes_of(MUCH), "server": bytes_of(MUCH)}
    writers = [
        threading.Thread(target=sock.sendall, args=(sent[name],))
        for name, sock in (("user", carrier.user), ("server", carrier.server))
    ]
    for writer in writers:
        writer.start()
    assert read(carrier.server, MUCH) == sent["user"]
    assert read(carrier.user, MUCH) == sent["server"]
    for writer in writers:
        writer.join()
    assert sum(map(len, carrier.moved)) == MUCH, "the observer has seen what came from the server"
    assert b"" in carrier.moved, "and that something came from the client"


def test_the_server_ends_and_a_slow_client_gets_the_rest(carrier: Carrier) -> None:
    carrier.run()
    sent = random.Random(7).randbytes(MUCH)
    writer = threading.Thread(target=lambda: (carrier.server.sendall(sent), carrier.server.close()))
    writer.start()
    assert read(carrier.user, 100) == sent[:100]
    assert not carrier.result.done()
    assert read(carrier.user, MUCH - 100) == sent[100:]
    writer.join()
    assert carrier.result.result(WAIT) is True


def test_a_client_that_says_something_and_leaves(carrier: Carrier) -> None:
    carrier.run()
    carrier.user.sendall(b"bye")
    carrier.user.close()
    assert read(carrier.server, 3) == b"bye"
    assert carrier.result.result(WAIT) is False


def test_last_words_are_passed_on_when_the_hang_up_was_seen_first(carrier: Carrier) -> None:
    words = b"bye" * 40_000  # more than is read at once
    carrier.user.sendall(words)
    carrier.user.close()
    carrier.client.cancel("gone")
    carrier.run()
    assert carrier.result.result(WAIT) is False
    assert read(carrier.server, len(words)) == words


@pytest.mark.parametrize("reason", ["gone", "cancelled", "stalled"])
def test_an_end_from_elsewhere_while_nobody_takes_anything(carrier: Carrier, reason: str) -> None:
    """Both directions are stuck, and the wake-up is heard."""
    carrier.run()
    for sock in (carrier.user, carrier.server):
        sock.settimeout(0)
        stuck = 0
        while stuck < 3:  # full, and still full when the pump has had its turn
            try:
                sock.send(b"x" * 100_000)
                stuck = 0
            except BlockingIOError:
                stuck += 1
                select.select([], [sock], [], 0.05)
    assert not carrier.result.done()
    carrier.client.cancel(reason)
    assert carrier.result.result(WAIT) is False


def test_a_server_that_resets_while_the_client_reads_nothing(carrier: Carrier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hang-up is reported by every poll; the loop must not run hot over it."""
    looks: list[int] = []
    original = pump.Pump._await
    monkeypatch.setattr(pump.Pump, "_await", lambda *args, **more: (looks.append(1), original(*args, **more))[1])
    carrier.server.settimeout(0)
    carrier.run()
    while True:
        try:
            carrier.server.send(b"x" * 100_000)
        except BlockingIOError:
            if not select.select([], [carrier.server], [], 0.1)[1]:
                break
    carrier.server.close()
    before = len(looks)
    threading.Event().wait(0.2)  # that nothing happens has no event
    assert len(looks) - before < 10
    assert not carrier.result.done(), "the client has not had its bytes"
    carrier.result.add_done_callback(lambda _: carrier.near.shutdown(socket.SHUT_RDWR))
    taken = 0
    while piece := carrier.user.recv(1 << 20):
        taken += len(piece)
    assert carrier.result.result(WAIT) is True and taken > 100_000


def test_nothing_listens_to_the_client_afterwards(carrier: Carrier) -> None:
    carrier.run()
    carrier.server.close()
    assert carrier.result.result(WAIT) is True
    eventually(lambda: not carrier.client._callbacks, "nobody listens to the client any more")


def test_over_tls(tmp_path: Path) -> None:
    """Records that are larger than what poll sees, and wants that are no errors."""
    pem = tmp_path / "both.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*made, "-keyout", str(pem), "-out", str(tmp_path / "c")], check=True, capture_output=True)
    pem.write_text(pem.read_text() + (tmp_path / "c").read_text())
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.check_hostname, ours.verify_mode = False, ssl.CERT_NONE
    theirs.load_cert_chain(pem)
    carrier = Carrier(tcp)
    with ThreadPoolExecutor(2) as pool:
        server = pool.submit(theirs.wrap_socket, carrier.server, server_side=True)
        carrier.far = ours.wrap_socket(carrier.far)
        carrier.server = server.result()
        carrier.run()
        sent = random.Random(9).randbytes(3_000_000)
        try:
            for one, other in ((carrier.user, carrier.server), (carrier.server, carrier.user)):
                writing = pool.submit(one.sendall, sent)
                assert read(other, len(sent)) == sent
                writing.result()
        finally:
            carrier.close()

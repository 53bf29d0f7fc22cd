"""Timeouts that the kernel keeps: they end every call that waits, as Python's own do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from qmflask.timedsocket import TimedSocket, release, timeval

Pair = tuple[TimedSocket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with TimedSocket(fileno=ours.detach()) as sock, theirs:
        yield sock, theirs


def test_a_read_ends_and_the_socket_goes_on(pair: Pair) -> None:
    sock, theirs = pair
    sock.settimeout(0.02)
    with pytest.raises(TimeoutError):
        sock.recv(1)
    theirs.sendall(b"late")
    assert sock.recv(10) == b"late" and sock.gettimeout() == 0.02 and sock.getblocking()


def test_a_write_nobody_takes_ends(pair: Pair) -> None:
    sock, _ = pair
    sock.settimeout(0.02)
    with pytest.raises(TimeoutError):
        sock.sendall(b"x" * 10_000_000)
    with pytest.raises(TimeoutError):
        sock.send(b"x")


def test_a_connection_that_is_not_accepted_ends() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        with socket.create_connection(listener.getsockname()), TimedSocket() as sock:  # the first fills the queue
            sock.settimeout(0.05)
            with pytest.raises(TimeoutError):
                sock.connect(listener.getsockname())


def test_no_limit_is_waited_out(pair: Pair) -> None:
    sock, theirs = pair
    sock.settimeout(0.01)
    sock.settimeout(None)
    timer = threading.Timer(0.1, theirs.sendall, [b"x"])
    timer.start()
    assert sock.recv(1) == b"x"
    timer.join()


def test_zero_never_waits_and_is_told_apart(pair: Pair) -> None:
    sock, _ = pair
    sock.settimeout(0)
    assert not sock.getblocking()
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    sock.settimeout(0.01)
    assert sock.getblocking()
    with pytest.raises(TimeoutError):
        sock.recv(1)
    sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        sock.recv(1)


def test_whoever_takes_a_listener_over_inherits_no_limits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            listener.setsockopt(socket.SOL_SOCKET, option, timeval(0.2))
        release(listener)
        assert not listener.getblocking()
        with pytest.raises(BlockingIOError):
            listener.accept()
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    assert accepted.getsockopt(socket.SOL_SOCKET, option, 16) == timeval(None)


def test_the_shortest_limit_is_no_unlimited_one() -> None:
    assert timeval(None) == timeval(None) != timeval(1e-9)
    assert int.from_bytes(timeval(1.5)[:8], "little") == 1
    assert int.from_bytes(timeval(1.5)[8:], "little") == 500_000

"""The hang-up watcher on real sockets: who left, who only pipelines, who stalls."""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from qmflask.hangup import Client, HangupWatcher, client_socket
from tests.integration.scripted import wait_for

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def watcher() -> Iterator[HangupWatcher]:
    watcher = HangupWatcher(stall_seconds=0.4)
    yield watcher
    watcher.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """(server's end, client's end)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    return server, client


PAIRS = {"tcp": tcp_pair, "unix": socket.socketpair}
both = pytest.mark.parametrize("family", PAIRS)


def watched(watcher: HangupWatcher, sock: socket.socket) -> tuple[Client, threading.Event]:
    client, told = Client(), threading.Event()
    client.attach(told.set)
    watcher.watch(sock, client)
    return client, told


@both
def test_a_client_that_closes_is_gone(watcher: HangupWatcher, family: str) -> None:
    server, peer = PAIRS[family]()
    with server:
        client, told = watched(watcher, server)
        peer.close()
        assert told.wait(10)
        assert client.gone and client.reason == "gone"
        watcher.unwatch(server)


@both
def test_a_client_that_half_closes_or_resets_is_gone(watcher: HangupWatcher, family: str) -> None:
    for leave in ("half", "reset"):
        server, peer = PAIRS[family]()
        with server, peer:
            _, told = watched(watcher, server)
            if leave == "half":
                peer.shutdown(socket.SHUT_WR)
            else:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                peer.close()
            assert told.wait(10)
            watcher.unwatch(server)


@both
def test_a_client_that_left_before_it_was_watched_is_gone(watcher: HangupWatcher, family: str) -> None:
    server, peer = PAIRS[family]()
    with server:
        peer.close()
        _, told = watched(watcher, server)
        assert told.wait(10)
        watcher.unwatch(server)


@both
def test_pipelined_bytes_are_no_hang_up_and_do_not_hide_one(watcher: HangupWatcher, family: str) -> None:
    server, peer = PAIRS[family]()
    other, other_peer = PAIRS[family]()
    with server, peer, other:
        client, told = watched(watcher, server)
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        _, other_told = watched(watcher, other)
        other_peer.close()
        assert other_told.wait(10)  # the thread has been round since the bytes came
        assert not client.gone
        peer.close()
        assert told.wait(10)
        watcher.unwatch(server)
        watcher.unwatch(other)


def test_after_unwatching_nothing_is_told(watcher: HangupWatcher) -> None:
    server, peer = tcp_pair()
    other, other_peer = tcp_pair()
    with server, other:
        client, _ = watched(watcher, server)
        watcher.unwatch(server)
        watcher.unwatch(server)
        peer.close()
        _, told = watched(watcher, other)
        other_peer.close()
        assert told.wait(10)
        assert not client.gone
        watcher.unwatch(other)
        assert len(watcher) == 0


def test_a_new_connection_with_an_old_number_is_not_taken_for_the_old_one(watcher: HangupWatcher) -> None:
    for _ in range(200):
        server, peer = socket.socketpair()
        old, _ = watched(watcher, server)
        peer.close()
        watcher.unwatch(server)
        server.close()
        server, peer = socket.socketpair()
        new, _ = watched(watcher, server)
        with server, peer:
            assert not new.gone
            watcher.unwatch(server)
        del old


def test_an_event_that_is_late_does_not_hit_the_next_connection_of_that_number(watcher: HangupWatcher) -> None:
    server, peer = socket.socketpair()
    with server, peer:
        client, _ = watched(watcher, server)
        watcher._closed(server.fileno())  # read from epoll for the socket that had this number before
        assert not client.gone
        watcher.unwatch(server)


def test_a_socket_closed_while_watched_makes_room_for_its_number(watcher: HangupWatcher) -> None:
    first, peer = socket.socketpair()
    number = first.fileno()
    watched(watcher, first)
    first.close()
    second, second_peer = socket.socketpair()
    with peer, second, second_peer:
        assert second.fileno() == number
        _, told = watched(watcher, second)
        second_peer.close()
        assert told.wait(10)
        watcher.unwatch(second)
        watcher.unwatch(first)
    assert len(watcher) == 0


def test_a_closed_socket_cannot_be_watched(watcher: HangupWatcher) -> None:
    server, peer = socket.socketpair()
    server.close()
    peer.close()
    client, told = watched(watcher, server)
    assert client.gone and told.is_set()


@both
def test_a_client_that_takes_nothing_is_gone_and_the_blocked_write_ends(watcher: HangupWatcher, family: str) -> None:
    server, peer = PAIRS[family]()
    with server, peer:
        client, told = watched(watcher, server)
        client.writing_since = 1
        ended: list[OSError] = []

        def write() -> None:
            try:
                server.sendall(b"x" * 100_000_000)
            except OSError as error:
                ended.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        assert told.wait(20)
        writer.join(10)
        assert client.reason == "stalled"
        assert [error.errno for error in ended] in ([errno.EPIPE], [errno.ECONNRESET])
        watcher.unwatch(server)


def is_shut(sock: socket.socket) -> bool:
    """Whether a socket was shut down from our side."""
    poll = select.poll()
    poll.register(sock, 0)
    return bool(poll.poll(0))


def test_who_waits_hears_that_the_client_stalls_before_its_socket_is_shut(watcher: HangupWatcher) -> None:
    """Else the write that the shut socket ends, and the peer's end that it looks like, would name another reason."""
    server, peer = tcp_pair()
    with server, peer:
        client, told, seen = Client(), threading.Event(), []
        client.attach(lambda: (seen.append((client.reason, is_shut(server))), told.set()))
        watcher.watch(server, client)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                server.send(bytes(1 << 16))
        client.writing_since = time.monotonic_ns()
        assert told.wait(20)
        assert seen == [("stalled", False)]
        wait_for(lambda: is_shut(server), "the socket is shut")
        watcher.unwatch(server)


@both
def test_a_slow_client_is_not_taken_for_a_stalled_one(family: str) -> None:
    watcher = HangupWatcher(stall_seconds=1.5)
    server, peer = PAIRS[family]()
    stop = threading.Event()
    with server, peer:
        client, told = watched(watcher, server)

        def write() -> None:  # as the relay does
            while not stop.is_set():
                client.writing_since = time.monotonic_ns()
                try:
                    server.sendall(b"x" * 65536)
                except OSError:
                    return

        writer = threading.Thread(target=write)
        writer.start()
        begin = time.monotonic()
        while time.monotonic() - begin < 4:
            peer.recv(70_000)
            told.wait(0.1)
        assert not client.gone
        stop.set()
        server.shutdown(socket.SHUT_RDWR)
        writer.join()
        watcher.unwatch(server)
    watcher.close()


def test_a_client_with_nothing_to_take_does_not_stall(watcher: HangupWatcher) -> None:
    server, peer = tcp_pair()
    with server, peer:
        client, _ = watched(watcher, server)
        server.sendall(b"x" * 1000)
        threading.Event().wait(1.2)  # unread bytes, but nobody is writing: the model is thinking
        assert not client.gone
        watcher.unwatch(server)


def test_closing_twice_and_watching_after() -> None:
    watcher = HangupWatcher()
    server, peer = socket.socketpair()
    with server, peer:
        watcher.watch(server, Client())
        watcher.close()
        watcher.close()
        watcher.watch(server, Client())
        watcher.unwatch(server)


def test_many_come_and_go(watcher: HangupWatcher) -> None:
    def come_and_go() -> None:
        for number in range(100):
            server, peer = socket.socketpair()
            with server:
                _, told = watched(watcher, server)
                if number % 2:
                    peer.close()
                    assert told.wait(10)
                watcher.unwatch(server)
            peer.close()

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: len(watcher) == 0, "an empty watch list")


def test_callbacks_run_once_even_if_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    client, calls = Client(), []

    def bad() -> None:
        raise ValueError("bad callback")

    client.attach(bad)
    client.attach(lambda: calls.append("a"))
    detach = client.attach(lambda: calls.append("detached"))
    detach()
    client.cancel("unload")
    client.cancel("gone")
    assert calls == ["a"] and client.reason == "unload"
    client.attach(lambda: calls.append("late"))()
    assert calls == ["a", "late"]
    assert "bad callback" in caplog.text


def test_where_servers_show_the_socket() -> None:
    server, peer = socket.socketpair()
    with server, peer:
        assert client_socket({"gunicorn.socket": server}) is server
        assert client_socket({"werkzeug.socket": server}) is server
        assert client_socket({"gunicorn.socket": "none"}) is None
        assert client_socket({}) is None

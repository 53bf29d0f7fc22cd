"""Streams at full speed are read in larger pieces, all others as they come."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from qmflask import rush
from qmflask.rush import Rush
from qmflask.timedsocket import TimedSocket

Ends = tuple[Rush, TimedSocket, socket.socket]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """A reader for whom any two pieces come close together, its socket, and the sender's."""
    monkeypatch.setattr(rush, "GAP_NS", 10**12)
    with socket.create_server(("127.0.0.1", 0)) as listener, TimedSocket() as ours:
        ours.connect(listener.getsockname())
        theirs, _ = listener.accept()
        with theirs:
            theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Rush(ours), ours, theirs


def into_a_rush(reader: Rush, theirs: socket.socket) -> None:
    for _ in range(rush.PIECES + 1):
        theirs.sendall(b"event")
        assert reader.recv(100) == b"event"


def low_water(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def test_pieces_that_come_apart_are_given_as_they_come(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, ours, theirs = ends
    monkeypatch.setattr(rush, "GAP_NS", 0)
    for _ in range(20):
        theirs.sendall(b"event")
        assert reader.recv(100) == b"event"
    assert low_water(ours) == 1


def test_in_a_rush_reads_wait_for_more(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, ours, theirs = ends
    monkeypatch.setattr(rush, "SECONDS", 20)  # so that a slow machine does not end it
    into_a_rush(reader, theirs)
    assert low_water(ours) == rush.SIZE
    theirs.sendall(b"x" * 10)
    sender = threading.Timer(0.05, theirs.sendall, [b"y" * rush.SIZE])
    sender.start()
    assert reader.recv(65536).startswith(b"x" * 10 + b"y"), "the first ten bytes alone wake nobody"
    sender.join()


def test_a_rush_ends_with_next_to_nothing_and_no_byte_is_late_for_more_than_a_moment(ends: Ends) -> None:
    reader, ours, theirs = ends
    into_a_rush(reader, theirs)
    theirs.sendall(b"slow")
    assert reader.recv(65536) == b"slow"
    assert low_water(ours) == 1


def test_a_rush_that_nothing_follows_waits_as_long_as_any_read(ends: Ends) -> None:
    reader, ours, theirs = ends
    into_a_rush(reader, theirs)
    sender = threading.Timer(0.05, theirs.sendall, [b"late"])
    sender.start()
    assert reader.recv(65536) == b"late"
    sender.join()
    into_a_rush(reader, theirs)
    ours.settimeout(0.02)
    with pytest.raises(TimeoutError):
        reader.recv(65536)


def test_the_end_is_seen_in_a_rush(ends: Ends) -> None:
    reader, _, theirs = ends
    into_a_rush(reader, theirs)
    theirs.close()
    assert reader.recv(65536) == b""


def test_a_connection_is_given_back_as_it_was(ends: Ends) -> None:
    reader, ours, theirs = ends
    ours.settimeout(7)
    into_a_rush(reader, theirs)
    reader.end()
    assert low_water(ours) == 1
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)[0] == 7

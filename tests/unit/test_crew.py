"""The threads that accept and serve: how many, who goes where, and an end."""

from __future__ import annotations

import errno
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qmflask.crew import LOOK_SECONDS, SPARE, ClientSocket, Crew, Door
from qmflask.timedsocket import TimedSocket

WAIT = 20
ERRORS: dict[bytes, BaseException] = {b"bad": RuntimeError("bad"), b"exit": SystemExit(1)}


class Served:
    """Connections that wait, each in its thread, until they are told to go on."""

    def __init__(self) -> None:
        self.seen: queue.Queue[tuple[socket.socket, str]] = queue.Queue()
        self.gates: dict[int, threading.Event] = {}

    def serve(self, sock: TimedSocket, client: Any, address: Any) -> None:
        gate = self.gates[sock.fileno()] = threading.Event()
        self.seen.put((sock, threading.current_thread().name))
        assert gate.wait(WAIT)
        said = sock.recv(16)
        sock.close()
        if said in ERRORS:
            raise ERRORS[said]

    def next(self) -> tuple[Callable[[], None], str]:
        """(what has the next connection go on, the name of its thread)"""
        sock, name = self.seen.get(timeout=WAIT)
        return self.gates[sock.fileno()].set, name


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    for gate in served.gates.values():
        gate.set()


class Place:
    """A listening socket with a crew behind it."""

    def __init__(self, served: Served, limit: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.crew = Crew(limit, served.serve)
        self.door = Door(self.listener, 5.0, 60.0)
        self._clients: list[socket.socket] = []
        self.crew.open([self.door])

    def connect(self, data: bytes = b"x") -> socket.socket:
        client = socket.create_connection(self.listener.getsockname(), timeout=WAIT)
        client.sendall(data)
        self._clients.append(client)
        return client

    def close(self) -> None:
        self.crew.close()
        assert self.crew.wait(WAIT), "nobody is busy, nobody at the door"
        self.listener.close()
        for client in self._clients:
            client.close()


@pytest.fixture
def place(served: Served) -> Iterator[Callable[[int], Place]]:
    made: list[Place] = []

    def make(limit: int) -> Place:
        made.append(Place(served, limit))
        return made[-1]

    yield make
    for gate in served.gates.values():
        gate.set()
    for each in made:
        each.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.005)


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("request-")}


def test_one_connection_after_another_is_served_by_few_threads(served: Served, place: Callable[[int], Place]) -> None:
    ours = place(16)
    used = set()
    for _ in range(20):
        before = ours.door.waiting
        ours.connect()
        go, name = served.next()
        used.add(name)
        go()
        until(lambda before=before: ours.door.waiting >= max(1, before - 1))
    assert len(used) <= SPARE, "the others are not needed"


def test_never_more_threads_than_allowed_and_the_rest_waits_in_the_kernels_queue(
    served: Served, place: Callable[[int], Place]
) -> None:
    ours = place(2)
    for _ in range(4):
        ours.connect()
    first, second = served.next(), served.next()
    until(lambda: ours.crew.busy == 2)
    assert ours.door.waiting == 0 and served.seen.empty() and len(names()) == 2
    first[0]()
    third = served.next()
    assert third[1] == first[1], "who is free goes back to the door"
    for go, _ in (second, third):
        go()
    served.next()[0]()


def test_many_at_once_get_a_thread_each(served: Served, place: Callable[[int], Place]) -> None:
    ours = place(16)
    for _ in range(12):
        ours.connect()
    waiting = [served.next() for _ in range(12)]
    assert len({name for _, name in waiting}) == 12
    for go, _ in waiting:
        go()
    until(lambda: not ours.crew.busy and ours.door.waiting == SPARE)
    ours.connect()  # the spare ones and the idle ones serve on
    served.next()[0]()


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_ends_neither_the_thread_nor_the_crew(
    served: Served, place: Callable[[int], Place], caplog: pytest.LogCaptureFixture, error: bytes
) -> None:
    ours = place(1)
    ours.connect(error)
    go, name = served.next()
    go()
    ours.connect()
    go, again = served.next()
    go()
    assert again == name and "nobody caught" in caplog.text


def test_closing_ends_the_waiting_and_the_idle_and_lets_the_busy_finish(
    served: Served, place: Callable[[int], Place]
) -> None:
    ours = place(12)
    for _ in range(10):
        ours.connect()
    waiting = [served.next()[0] for _ in range(10)]
    for go in waiting[1:]:
        go()
    until(lambda: ours.crew.busy == 1)
    ours.crew.close()
    assert ours.crew.wait_for_doors(WAIT) and not ours.crew.wait(0)
    until(lambda: len(names()) == 1)
    waiting[0]()
    assert ours.crew.wait(WAIT)
    until(lambda: not names())


def test_a_connection_brings_its_limits_and_its_keepalive(served: Served, place: Callable[[int], Place]) -> None:
    ours = place(2)
    ours.connect()
    sock, _ = served.seen.get(timeout=WAIT)
    assert isinstance(sock, ClientSocket) and sock.gettimeout() == 60.0 and sock.getblocking()
    seconds = [
        sock.getsockopt(socket.SOL_SOCKET, option, 16)[:8] for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
    ]
    assert [int.from_bytes(value, "little") for value in seconds] == [5, 15]  # of writes a look, four make the limit
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
    served.gates[sock.fileno()].set()


def test_the_last_places_are_not_for_the_silent(served: Served, place: Callable[[int], Place]) -> None:
    ours, seconds = place(4), []
    for _ in range(4):
        ours.connect()
        sock, _ = served.seen.get(timeout=WAIT)
        seconds.append(sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)[0])
    assert seconds == [5, 5, 5, 3]


def test_a_unix_door_gives_the_same(tmp_path: Any) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "s"))
        accepted = Door(listener, 5.0, 60.0).accept()
        assert accepted is not None
        with accepted[0] as sock:
            value = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)
            assert int.from_bytes(value[:8], "little") == 15  # a look; four make the limit
    listener.close()


def test_a_listener_that_somebody_made_non_blocking_has_nobody_spin() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        door = Door(listener, 5.0, 60.0)
        listener.setblocking(False)  # as gunicorn's own workers do, whose flags are ours
        begin = time.monotonic()
        assert door.accept() is None
        assert time.monotonic() - begin >= LOOK_SECONDS / 2


def test_few_threads_see_to_many_doors(served: Served) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    crew = Crew(2, served.serve)
    crew.open([Door(listener, 5.0, 60.0) for listener in listeners])
    clients = []

    def connect(listener: socket.socket) -> Callable[[], None]:
        clients.append(socket.create_connection(listener.getsockname()))
        clients[-1].sendall(b"x")
        return served.next()[0]

    lasting = connect(listeners[0])  # from here on one thread is left for all
    for listener in [*listeners, *listeners]:
        connect(listener)()
    lasting()
    crew.close()
    assert crew.wait(WAIT)
    for sock in [*clients, *listeners]:
        sock.close()


def test_where_no_thread_can_be_started_the_others_serve_on(
    served: Served, place: Callable[[int], Place], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = place(8)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(3):
        ours.connect()
    assert len({name for go, name in (served.next() for _ in range(3)) if go() is None}) == 1
    assert caplog.text.count("no further thread") == 1
    until(lambda: not ours.crew.busy and ours.door.waiting == 1)


def test_without_a_single_thread_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(RuntimeError, match="not one thread"):
        Crew(8, lambda *_: None).open([Door(listener, 5.0, 60.0)])


def pair_of_ours() -> tuple[ClientSocket, socket.socket]:
    ours, theirs = socket.socketpair()
    return ClientSocket(fileno=ours.detach()), theirs


class Room:
    """In the place of `send`: how many bytes find room each time, 0 for none until the time was over."""

    def __init__(self, *rooms: int) -> None:
        self.rooms = list(rooms)

    def __call__(self, sock: socket.socket, data: bytes, flags: int) -> int:
        room = self.rooms.pop(0)
        if not room:
            raise BlockingIOError(errno.EAGAIN, "no room")
        return min(room, len(data))


def test_a_slow_client_is_not_cut_while_it_takes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 99)
    monkeypatch.setattr("qmflask.crew._send", room)
    sock, theirs = pair_of_ours()
    with sock, theirs:
        sock.settimeout(WAIT)
        sock.sendall(b"x" * 9)
    assert not room.rooms


def test_a_client_that_takes_nothing_for_four_looks_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(3, 0, 0, 0, 0, 99)
    sock, theirs = pair_of_ours()
    with sock, theirs:
        sock.settimeout(0.04)
        with monkeypatch.context() as patch, pytest.raises(ConnectionResetError, match="did nothing"):
            patch.setattr("qmflask.crew._send", room)
            sock.sendall(b"x" * 9)
        with pytest.raises(ConnectionResetError, match="did nothing"):
            sock.sendall(b"x" * 5_000_000)  # the kernel's word for it is the same
    assert room.rooms == [99]


def test_bytes_that_drip_come_to_an_end() -> None:
    sock, theirs = pair_of_ours()
    with sock, theirs:
        sock.settimeout(WAIT)
        sock.hasten(0.05)
        begin = time.monotonic()
        with pytest.raises(ConnectionResetError):
            while time.monotonic() - begin < WAIT:
                theirs.sendall(b"x")
                sock.recv(1)
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        sock.hasten(None)
        theirs.sendall(b"y")
        assert sock.recv(9).endswith(b"y")


def test_a_silent_client_counts_as_gone() -> None:
    ours, theirs = socket.socketpair()
    with ClientSocket(fileno=ours.detach()) as sock, theirs:
        sock.settimeout(0.02)
        sock.setblocking(True)  # gunicorn's own switching does not take the limit away
        with pytest.raises(ConnectionResetError, match="did nothing"):
            sock.recv(1)

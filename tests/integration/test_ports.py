"""Who listens on a port, and whether a server could bind it, with real sockets and real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qmflask import ports, processes
from qmflask.processes import Child, Identity, SpawnLock
from tests.service import PortBlock, eventually

TOKEN = f"ports-{os.getpid()}"

LISTEN = (
    "import socket, sys, time\n"
    "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
    "s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); print('ready', flush=True); time.sleep(100)\n"
)


@pytest.fixture
def port() -> Iterator[int]:
    block = PortBlock()
    yield block.take()
    block.close()


@pytest.fixture
def server(tmp_path: Path, port: int) -> Iterator[Child]:
    """A model behind `sh -c`, whose python child listens on the port."""
    child = start(tmp_path, ["sh", "-c", f'"{sys.executable}" -S -E -c "$0" {port} & wait', LISTEN])
    yield child
    stop(child)


def start(folder: Path, argv: list[str]) -> Child:
    with SpawnLock(folder / "lock") as lock:
        assert lock.try_acquire()
        child = processes.spawn(argv, dict(os.environ), TOKEN, folder / "log", lock.fd)
    eventually(lambda: "ready" in (folder / "log").read_text(), "it listens")
    return child


def stop(child: Child) -> None:
    eventually(lambda: not processes.signal_tree(child.pid, TOKEN, signal.SIGKILL, child.identity), "it is gone")
    child.popen.wait()


def test_a_member_of_the_tree_listens(server: Child, port: int) -> None:
    assert ports.listens(server.pid, TOKEN, port, server.identity) is True
    assert ports.listens(server.pid, "", port) is True
    (owner,) = ports.socket_owner(port)
    assert owner.pid != server.pid and processes.session_of(owner.pid) == server.pid
    assert ports.holder_of(port).endswith(f"(pid {owner.pid})")
    assert not ports.port_is_free(port)


def test_a_member_that_left_the_session_listens(tmp_path: Path, port: int) -> None:
    child = start(tmp_path, ["sh", "-c", f'setsid "{sys.executable}" -S -E -c "$0" {port} & exit 0', LISTEN])
    try:
        assert ports.listens(child.pid, TOKEN, port) is True
        assert ports.listens(child.pid, "another token", port) is False
    finally:
        stop(child)


def test_a_stranger_listens(server: Child, port: int) -> None:
    me = Identity.of(os.getpid())
    assert me is not None
    with socket.create_server(("127.0.0.1", 0)) as mine:
        other = mine.getsockname()[1]
        assert ports.listens(server.pid, TOKEN, other) is False
        assert ports.socket_owner(other) == [me]
        assert str(me.pid) in ports.holder_of(other)
    assert ports.listens(server.pid, TOKEN, other) is None
    assert ports.socket_owner(other) == []
    assert ports.holder_of(other) == ""


def test_a_forwarder_may_act_for_a_container(tmp_path: Path, port: int, server: Child) -> None:
    """Its command name is what tells; a python under that name stands in for it."""
    fake = tmp_path / "docker-proxy"
    fake.symlink_to(Path(sys.executable).resolve())
    with socket.create_server(("127.0.0.1", 0)) as given:
        other = given.getsockname()[1]
        code = "import time; time.sleep(100)"
        proxy = subprocess.Popen([fake, "-S", "-E", "-c", code], pass_fds=(given.fileno(),))
    try:
        assert ports.listens(server.pid, TOKEN, other) is None
        assert ports.holder_of(other) == f"docker-proxy (pid {proxy.pid})"
    finally:
        proxy.kill()
        proxy.wait()


def test_holders_we_may_not_look_into_are_named_by_user(
    server: Child, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(_: int) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(ports, "file_links", hidden)
    assert ports.holder_of(port).startswith("a process of user ")
    assert ports.listens(server.pid, TOKEN, port) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "127.0.0.2", "::1", "::"])
def test_a_listener_on_any_address_takes_the_port(address: str, port: int) -> None:
    assert ports.port_is_free(port)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family):
        assert not ports.port_is_free(port)
    assert ports.port_is_free(port)


def test_connections_in_time_wait_do_not_take_the_port(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        client = socket.create_connection(("127.0.0.1", port))
        connection, _ = server.accept()
        connection.shutdown(socket.SHUT_WR)  # who closes first waits
        assert client.recv(1) == b""
        client.close()
        assert connection.recv(1) == b""
        connection.close()
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    assert [row[3] for row in table if row[1].endswith(f":{port:04X}")] == ["06"], "in TIME_WAIT, or this tests nothing"
    assert ports.port_is_free(port)


@pytest.mark.parametrize("number", [-1, 0, 65536])
def test_numbers_that_are_no_ports(number: int) -> None:
    assert not ports.port_is_free(number)


def test_an_address_of_another_machine_is_no_obstacle(port: int) -> None:
    assert ports.port_is_free(port, "192.0.2.1")

"""What the kernel writes about processes and sockets, parsed: odd names, zombies, tables of two kinds."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from qmflask import ports, proctree
from qmflask.processes import child_environment
from qmflask.proctree import Identity, parse_stat

TAIL = b"1 1234 1234 0 -1 4194560 100 0 0 0 5 2 0 0 20 0 7 0 987654 1000000 250 18446744073709551615 1 1 0"


@pytest.mark.parametrize(
    "comm",
    ["llama-server", "a b", "x) S 1 2 3 (y", ")", "((", "", "tmux: server", "a)b) Z 0", "\n1 (z) R"],
)
def test_stat_finds_the_end_of_any_command_name(comm: str) -> None:
    stat = parse_stat(b"1234 (" + comm.encode() + b") S " + TAIL)
    assert stat == (1234, comm, "S", 1, 1234, 1234, 7, 987654)


def test_stat_of_a_name_that_is_not_utf8() -> None:
    assert parse_stat(b"9 (\xff\xfe) R " + TAIL).comm == "\ufffd\ufffd"


@pytest.mark.parametrize(
    ("state", "threads", "alive"),
    [
        *[("R", 1, True), ("S", 3, True), ("D", 1, True), ("T", 1, True), ("t", 1, True), ("I", 1, True)],
        *[("Z", 1, False), ("X", 1, False), ("x", 0, False), ("Z", 0, False), ("Z", 2, True)],
    ],
)
def test_a_zombie_is_dead_unless_other_threads_live(state: str, threads: int, alive: bool) -> None:
    line = b"5 (m) %s 1 5 5 0 -1 0 0 0 0 0 0 0 0 0 20 0 %d 0 77 0 0" % (state.encode(), threads)
    assert parse_stat(line).alive is alive


def test_stat_of_ourselves() -> None:
    stat = proctree.read_stat(os.getpid())
    assert stat is not None and stat.alive
    assert (stat.pid, stat.ppid, stat.session) == (os.getpid(), os.getppid(), os.getsid(0))


def test_identity_needs_pid_start_and_boot() -> None:
    me = Identity.of(os.getpid())
    assert me is not None and me.alive() and not me.stopped()
    assert not me._replace(start_ticks=me.start_ticks + 1).alive()
    assert not me._replace(boot_id="another boot").alive()
    assert not me._replace(pid=2**22 + 1).alive()


def test_running_out_of_descriptors_is_not_taken_for_death(monkeypatch: pytest.MonkeyPatch) -> None:
    me = Identity.of(os.getpid())
    assert me is not None

    def full(*_: object, **__: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Too many"):
        patch.setattr(os, "open", full)
        me.alive()


@pytest.mark.parametrize("pid", [-1, 0, 1])
def test_no_signal_to_everybody(pid: int) -> None:
    with pytest.raises(ValueError, match="refusing"):
        proctree.signal_tree(pid, "token", 0)
    with pytest.raises(ValueError, match="refusing"):
        proctree.send(Identity(pid, 0, proctree.boot_id()), 0)


def test_no_signal_to_our_own_session() -> None:
    with pytest.raises(ValueError, match="refusing"):
        proctree.signal_tree(os.getsid(0), "token", 0)


TCP = b"""\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:16A8 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4242 1 0000 100 0 0 10 0
   1: 00000000:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 43 1 0000000 100 0 0 10 0
   2: 0100007F:16A8 0100007F:D431 01 00000000:00000000 00:00000000 00000000  1000        0 4244 1 00000 20 4 30 10 -1
   3: 0100007F:D431 0100007F:16A8 01 00000000:00000000 00:00000000 00000000     0        0 4245 1 00000 20 4 30 10 -1
   4: 0100007F:16A8 0100007F:D432 06 00000000:00000000 03:00000000 00000000     0        0 0 3 0000000000000000
"""
TCP6 = b"""\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when \
retrnsmt   uid  timeout inode
   0: 00000000000000000000000001000000:16A8 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 \
00000000    33        0 5252 1 0000000000000000 100 0 0 10 0
"""


def test_listeners_in_the_text_tables() -> None:
    assert ports.parse_listeners(TCP, 5800) == [(4242, 1000)]
    assert ports.parse_listeners(TCP, 80) == [(43, 0)]
    assert ports.parse_listeners(TCP, 0xD431) == []  # a connection is no listener
    assert ports.parse_listeners(TCP6, 5800) == [(5252, 33)]
    assert ports.parse_listeners(b"", 5800) == []


def diag(port: int, uid: int, inode: int) -> bytes:
    """One socket as sock_diag(7) reports it: nlmsghdr, then inet_diag_msg."""
    body = struct.pack("=BBBB", 2, 10, 0, 0) + port.to_bytes(2, "big") + bytes(46)
    body += struct.pack("=IIIII", 0, 0, 0, uid, inode)
    return struct.pack("=IHHII", 16 + len(body), 20, 2, 1, 0) + body


def test_listeners_from_the_kernel() -> None:
    end = struct.pack("=IHHIIi", 20, 3, 2, 1, 0, 0)
    assert ports.parse_diag(diag(5800, 1000, 42) + diag(80, 0, 43) + diag(5800, 5, 44), 5800) == (
        [(42, 1000), (44, 5)],
        False,
    )
    assert ports.parse_diag(diag(5800, 1, 2) + end, 5800) == ([(2, 1)], True)
    with pytest.raises(OSError, match="does not list") as refused:
        ports.parse_diag(struct.pack("=IHHIIi", 36, 2, 0, 1, 0, -2) + bytes(16), 5800)
    assert refused.value.errno == 2


def test_both_ways_of_asking_agree() -> None:
    for family, address, table in ((socket.AF_INET, "127.0.0.1", "tcp"), (socket.AF_INET6, "::1", "tcp6")):
        with socket.socket(family) as server:
            server.bind((address, 0))
            port = server.getsockname()[1]
            assert ports._ask_kernel(family, port) == ports._read_table(table, port) == []
            server.listen()
            mine = [(os.fstat(server.fileno()).st_ino, os.getuid())]
            assert ports._ask_kernel(family, port) == ports._read_table(table, port) == mine


def test_the_text_tables_serve_where_the_kernel_is_not_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[ports.Listener]:
        raise PermissionError(1, "seccomp")

    monkeypatch.setattr(ports, "_ask_kernel", refuse)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert ports.holder_of(server.getsockname()[1]).endswith(f"(pid {os.getpid()})")


def test_environment_of_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUNICORN_CMD_ARGS", "--workers 2")
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("GUNICORN_PID", "7")
    given = {
        **os.environ,
        "GUNICORN_CMD_ARGS": "--threads 1",  # the model's own
        "QMFLASK_TOKEN": "of an outer qmflask",
        "KEEP": "",
    }
    env = child_environment(given, "abc")
    assert env["QMFLASK_TOKEN"] == "abc"
    assert env["SPT_NOENV"] == "1"
    assert env["GUNICORN_CMD_ARGS"] == "--threads 1"
    assert env["KEEP"] == ""
    assert not {"LISTEN_FDS", "GUNICORN_PID"} & set(env)
    assert "QMFLASK_TOKEN" not in child_environment(given, None)

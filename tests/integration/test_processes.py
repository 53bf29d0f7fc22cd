"""Real child processes: they outlive us, are found wherever they go, die when told, and are never mistaken."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qmflask import processes, proctree
from qmflask.processes import Child, Children, Identity, SpawnError, SpawnLock, is_held
from tests.service import eventually

TOKEN = f"test-{os.getpid()}"

#: A python child without its start-up costs.
PYTHON = [sys.executable, "-S", "-E", "-c"]


class Spawner:
    """Starts children and ends all that is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.children: list[Child] = []

    def __call__(self, *argv: str, token: str = TOKEN, **env: str) -> Child:
        """Start one; the first has the lock `lock`, the others `lock1`, `lock2` ..."""
        with SpawnLock(self.folder / f"lock{len(self.children) or ''}") as lock:
            assert lock.try_acquire()
            child = processes.spawn(argv, {**os.environ, **env}, token, self.log, lock.fd)
        self.children.append(child)
        return child

    def python(self, code: str) -> Child:
        return self(*PYTHON, code)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def wait_lines(self, count: int = 1) -> list[str]:
        return eventually(lambda: lines if len(lines := self.lines()) >= count else [], f"{count} lines in the log")

    def end(self, child: Child) -> None:
        def gone() -> bool:
            return not processes.signal_tree(child.pid, TOKEN, signal.SIGKILL, child.identity)

        eventually(gone, "the tree is gone")
        child.popen.wait()

    def close(self) -> None:
        for child in self.children:
            self.end(child)
        left = []

        def nothing_left() -> bool:
            left[:] = processes.token_members(TOKEN)
            return not left

        with contextlib.suppress(AssertionError):
            eventually(nothing_left, "the trees are gone", timeout=5)  # a killed process takes a moment to go
        assert not left, [(i.pid, Path(f"/proc/{i.pid}/cmdline").read_bytes()) for i in left]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawner]:
    spawner = Spawner(tmp_path)
    yield spawner
    spawner.close()


def wait_exit(identity: Identity, timeout: float = 10) -> None:
    """Until the process has ended, by its pidfd."""
    fd = processes.pidfd(identity)
    if fd is not None:
        try:
            assert select.select([fd], [], [], timeout)[0], f"{identity} did not end"
        finally:
            os.close(fd)
    assert not identity.alive()


# --- spawning ---------------------------------------------------------------------------------------------


def test_a_child_gets_its_own_session_and_only_what_it_needs(spawn: Spawner) -> None:
    stray = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(stray, True)
    try:
        child = spawn.python(
            "import os\n"
            "def link(fd): return os.readlink(f'/proc/self/fd/{fd}')\n"
            "more = [link(fd) for fd in range(3, 64) if os.path.lexists(f'/proc/self/fd/{fd}')]\n"
            "print(os.getsid(0), os.getpgrp(), os.environ['QMFLASK_TOKEN'], os.environ['SPT_NOENV'], link(0), *more)"
        )
    finally:
        os.close(stray)
    assert child.popen.wait() == 0
    sid, group, token, title, stdin, *others = spawn.lines()[0].split()
    assert int(sid) == int(group) == child.pid == child.identity.pid
    assert (token, title, stdin) == (TOKEN, "1", "/dev/null")
    assert others == [str(spawn.folder / "lock")]


def test_stdout_and_stderr_are_appended(spawn: Spawner) -> None:
    spawn.log.write_text("before\n")
    assert spawn("sh", "-c", "echo out; echo err >&2").popen.wait() == 0
    assert spawn.lines() == ["before", "out", "err"]


@pytest.mark.parametrize("kind", ["missing", "path", "plain", "folder", "interpreter", "binary", "empty", "nul", "log"])
def test_what_cannot_be_started_says_why(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n" if kind == "interpreter" else "rubbish")
    script.chmod(0o644 if kind == "plain" else 0o755)
    argv, fragment = {
        "missing": (["no-such-program-here"], "no such program in PATH"),
        "path": ([str(tmp_path / "nothing")], "no such file"),
        "plain": ([str(script)], "not executable"),
        "folder": ([str(tmp_path)], "not executable"),
        "interpreter": ([str(script)], "interpreter"),
        "binary": ([str(script)], "not a program"),
        "empty": ([], "empty command"),
        "nul": (["echo", "a\0b"], "null byte"),
        "log": (["true"], "log file"),
    }[kind]
    log = tmp_path / "no" / "folder" / "log" if kind == "log" else tmp_path / "log"
    with SpawnLock(tmp_path / "lock") as lock:
        assert lock.try_acquire()
        with pytest.raises(SpawnError, match=fragment):
            processes.spawn(argv, dict(os.environ), TOKEN, log, lock.fd)
    assert not is_held(tmp_path / "lock")


def test_a_missing_working_directory_is_named(tmp_path: Path) -> None:
    with SpawnLock(tmp_path / "lock") as lock:
        assert lock.try_acquire()
        with pytest.raises(SpawnError, match=r"working directory .*gone"):
            processes.spawn(["true"], dict(os.environ), TOKEN, tmp_path / "log", lock.fd, cwd=tmp_path / "gone")


def test_programs_are_found_in_our_path_and_then_in_the_childs(spawn: Spawner, tmp_path: Path) -> None:
    for name, text in (("sh", "wrong"), ("only-there", "right")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {text}\n")
        (tmp_path / name).chmod(0o755)
    assert spawn("only-there", PATH=str(tmp_path)).popen.wait() == 0
    assert spawn("sh", "-c", "echo ours", PATH=str(tmp_path)).popen.wait() == 0
    assert spawn.lines() == ["right", "ours"]


# --- the spawn lock ---------------------------------------------------------------------------------------


def test_the_lock_is_held_until_the_last_of_the_tree_ends(spawn: Spawner) -> None:
    path = spawn.folder / "lock"
    assert not is_held(path)
    # The grandchild leaves the session; the first process ends at once.
    child = spawn("sh", "-c", "setsid sh -c 'echo $$; exec sleep 100' & exit 0")
    assert child.popen.wait() == 0
    (grandchild,) = map(int, spawn.wait_lines())
    assert is_held(path)
    assert not SpawnLock(path).try_acquire()
    identity = Identity.of(grandchild)
    assert identity is not None
    assert processes.holders_of_file(str(path)) == [identity]
    assert processes.send(identity, signal.SIGKILL)
    eventually(lambda: not is_held(path), "the lock is free")


def test_the_lock_outlives_who_took_it(spawn: Spawner) -> None:
    """The leader is killed after its spawn: the child alone keeps the lock."""
    code = (
        "import os; from qmflask import processes as p; l = p.SpawnLock('lock'); assert l.try_acquire();"
        f"c = p.spawn(['sleep', '100'], os.environ, {TOKEN!r}, 'log', l.fd); print(c.pid, flush=True);"
        "os.kill(os.getpid(), 9)"
    )
    leader = subprocess.run([sys.executable, "-c", code], cwd=spawn.folder, stdout=subprocess.PIPE, text=True)
    assert leader.returncode == -signal.SIGKILL
    assert is_held(spawn.folder / "lock")
    (orphan,) = processes.token_members(TOKEN)
    assert orphan.pid == int(leader.stdout)
    fd = processes.pidfd(orphan)
    assert fd is not None
    try:
        assert not select.select([fd], [], [], 0)[0]
        assert processes.signal_tree(orphan.pid, TOKEN, signal.SIGTERM, orphan) == 1
        assert select.select([fd], [], [], 10)[0], "the exit of a process that is no child of ours wakes too"
    finally:
        os.close(fd)
    assert not processes.session_alive(orphan.pid, orphan)
    eventually(lambda: not is_held(spawn.folder / "lock"), "the lock is free")


def test_a_tree_that_closes_the_lock_is_still_found_by_its_session(spawn: Spawner) -> None:
    child = spawn.python("import os, time; os.closerange(3, 100); print('closed', flush=True); time.sleep(100)")
    spawn.wait_lines()
    assert not is_held(spawn.folder / "lock")
    assert processes.session_alive(child.pid, child.identity)


def test_an_unlinked_lock_does_not_count(tmp_path: Path) -> None:
    first, second = SpawnLock(tmp_path / "lock"), SpawnLock(tmp_path / "lock")
    with first, second:
        assert first.try_acquire() and first.try_acquire()
        assert not second.try_acquire()
        (tmp_path / "lock").unlink()
        assert not is_held(tmp_path / "lock")
        assert second.try_acquire()
    with pytest.raises(ValueError, match="not held"):
        _ = first.fd


def test_a_lock_unlinked_while_it_is_taken_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "lock", fcntl.flock

    def unlink_first(fd: int, how: int) -> None:
        monkeypatch.undo()
        path.unlink()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", unlink_first)
    with SpawnLock(path) as lock:
        assert lock.try_acquire()
        assert is_held(path)


def test_looking_at_the_lock_does_not_take_it(tmp_path: Path) -> None:
    with SpawnLock(tmp_path / "deeper" / "lock") as lock:
        assert lock.try_acquire()
    for _ in range(100):
        assert not is_held(lock.path)
        with SpawnLock(lock.path) as again:
            assert again.try_acquire()


# --- identity ---------------------------------------------------------------------------------------------


def test_a_zombie_is_dead(spawn: Spawner) -> None:
    child = spawn("true")
    wait_exit(child.identity)
    stat = proctree.read_stat(child.pid)
    assert stat is not None and stat.state == "Z", "not reaped yet, or this test tests nothing"
    assert Identity.of(child.pid) is None
    assert processes.pidfd(child.identity) is None
    assert not processes.send(child.identity, signal.SIGKILL)
    assert not processes.session_alive(child.pid)
    assert processes.session_members(child.pid) == []
    assert processes.session_members(child.pid, include_zombies=True) == [child.identity]
    assert processes.signal_tree(child.pid, TOKEN, signal.SIGTERM) == 0


def test_a_process_whose_first_thread_ended_lives(spawn: Spawner) -> None:
    child = spawn.python(
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(100,)).start()\n"
        "print('ready', flush=True)\n"
        "ctypes.CDLL(None).syscall(60, 0)\n"  # exit(2): this thread only
        if os.uname().machine == "x86_64"
        else "import time; print('ready', flush=True); time.sleep(100)"
    )
    spawn.wait_lines()
    if os.uname().machine == "x86_64":
        eventually(lambda: (s := proctree.read_stat(child.pid)) and s.state == "Z", "its first thread is gone")
    assert child.identity.alive()
    assert processes.session_alive(child.pid)
    assert processes.signal_tree(child.pid, TOKEN, signal.SIGKILL) == 1
    wait_exit(child.identity)


def test_a_pid_used_again_is_left_alone(spawn: Spawner) -> None:
    child = spawn("sleep", "100")
    earlier = child.identity._replace(start_ticks=child.identity.start_ticks - 1)
    assert processes.pidfd(earlier) is None
    assert not processes.send(earlier, signal.SIGKILL)
    assert not processes.session_alive(child.pid, earlier)
    assert processes.session_members(child.pid, root=earlier) == []
    assert processes.signal_tree(child.pid, "another token", signal.SIGKILL, earlier) == 0
    assert processes.signal_tree(child.pid, "another token", 0, child.identity._replace(boot_id="older")) == 0
    assert child.identity.alive()


def test_a_stopped_process_is_seen_and_continued_to_end(spawn: Spawner) -> None:
    child = spawn("sleep", "100")
    assert not child.identity.stopped()
    assert processes.send(child.identity, signal.SIGSTOP)
    eventually(child.identity.stopped, "it is stopped")
    assert child.identity.alive()
    assert processes.signal_tree(child.pid, TOKEN, signal.SIGTERM) == 1
    wait_exit(child.identity)


def test_without_pidfds_signals_still_go_to_the_right_process(spawn: Spawner, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    child = spawn("sleep", "100")
    monkeypatch.setattr(os, "pidfd_open", missing)
    assert processes.pidfd(child.identity) is None and child.identity.alive()
    assert not processes.send(child.identity._replace(start_ticks=1), signal.SIGKILL)
    assert processes.send(child.identity, signal.SIGKILL)
    assert child.popen.wait() == -signal.SIGKILL


# --- trees ------------------------------------------------------------------------------------------------

#: A process that counts TERMs in the log and goes on.
STUBBORN = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'term %d\\n' % os.getpid()))\n"
    "os.write(1, b'ready %d\\n' % os.getpid())\n"
    "while True: time.sleep(100)\n"
)


def test_a_wrapper_is_a_tree(spawn: Spawner) -> None:
    child = spawn("sh", "-c", "sleep 100 & sleep 100 & echo ready; wait")
    spawn.wait_lines()
    assert len(processes.session_members(child.pid)) == 3
    assert len(processes.tree(child.pid, TOKEN)) == 3
    assert processes.signal_tree(child.pid, TOKEN, signal.SIGTERM, child.identity) == 3
    eventually(lambda: not processes.session_alive(child.pid, child.identity), "all of them are gone")


def test_a_group_of_its_own_inside_the_session_belongs_to_it(spawn: Spawner) -> None:
    child = spawn.python(
        "import os, time\n"
        "if os.fork() == 0: os.setpgid(0, 0); os.write(1, b'%d\\n' % os.getpid()); time.sleep(100)\n"
        "time.sleep(100)"
    )
    other = int(spawn.wait_lines()[0])
    assert processes.send(child.identity, signal.SIGKILL)
    child.popen.wait()
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
    assert processes.session_alive(child.pid, child.identity)
    assert [m.pid for m in processes.session_members(child.pid)] == [other]
    assert processes.signal_tree(child.pid, "another token", signal.SIGTERM, child.identity) == 1
    eventually(lambda: not processes.session_alive(child.pid, child.identity), "it is gone")


def test_who_left_the_session_is_found_by_the_token(spawn: Spawner) -> None:
    child = spawn("sh", "-c", "setsid sh -c 'echo $$; exec sleep 100' & exit 0")
    child.popen.wait()
    daemon = int(spawn.wait_lines()[0])
    assert not processes.session_alive(child.pid, child.identity)
    assert [m.pid for m in processes.token_members(TOKEN)] == [daemon]
    assert [m.pid for m in processes.tree(child.pid, TOKEN)] == [daemon]
    assert processes.token_members(TOKEN[:-1]) == processes.token_members(TOKEN + "x") == []
    assert [(m.pid, t) for m, t in processes.tokens(TOKEN[:-1])] == [(daemon, TOKEN)]
    assert processes.session_of(daemon) == daemon
    assert processes.signal_tree(child.pid, TOKEN, signal.SIGTERM, child.identity) == 1
    eventually(lambda: not processes.token_members(TOKEN), "it is gone")


def test_who_is_in_the_middle_of_an_exec_is_found(spawn: Spawner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment is empty for a moment, also when its first one is back already (seen once in 200 spawns)."""
    child = spawn("sleep", "100")
    real, asked = proctree._read, 0

    def caught(path: str) -> bytes | None:
        nonlocal asked
        if path == f"/proc/{child.pid}/environ":
            asked += 1
            if asked % 2:
                return b""
        return real(path)

    monkeypatch.setattr(proctree, "_read", caught)
    assert processes.token_members(TOKEN) == [child.identity]
    asked = 0
    assert processes.tokens(TOKEN) == [(child.identity, TOKEN)]


def test_who_ignores_term_is_killed(spawn: Spawner) -> None:
    child = spawn.python(STUBBORN)
    spawn.wait_lines()
    assert processes.signal_tree(child.pid, TOKEN, signal.SIGTERM) == 1
    spawn.wait_lines(2)
    assert child.identity.alive()
    assert processes.signal_tree(child.pid, TOKEN, signal.SIGKILL) == 1
    wait_exit(child.identity)


def test_each_process_gets_one_term(spawn: Spawner) -> None:
    """Many servers take a second one for impatience and skip their clean-up."""
    strays = "for _ in range(2):\n if os.fork() == 0: break\nif os.fork() == 0: os.setsid()\n"
    child = spawn.python("import os\n" + strays + STUBBORN)
    eventually(lambda: len(spawn.lines()) >= 6, "six processes are ready")
    assert processes.signal_tree(child.pid, TOKEN, signal.SIGTERM) == 6
    eventually(lambda: sum(line.startswith("term") for line in spawn.lines()) >= 6, "six terms")
    terms = [line for line in spawn.lines() if line.startswith("term")]
    assert len(terms) == len(set(terms)) == 6


def test_what_a_term_handler_starts_may_finish(spawn: Spawner) -> None:
    child = spawn("sh", "-c", "trap 'sleep 0.2; echo cleaned; exit 0' TERM; echo ready; while :; do sleep 0.05; done")
    spawn.wait_lines()
    processes.signal_tree(child.pid, TOKEN, signal.SIGTERM)
    assert child.popen.wait() == 0
    assert "cleaned" in spawn.lines()


def between_the_scans(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Let something happen after the session was signalled, and before the rest of the tree is looked for."""
    real, calls = proctree._living, iter(range(100))

    def living(*args: Any) -> Any:
        if next(calls) == 1:
            happens()
        return real(*args)

    monkeypatch.setattr(proctree, "_living", living)


def test_what_was_forked_in_answer_to_a_term_gets_none(spawn: Spawner, monkeypatch: pytest.MonkeyPatch) -> None:
    child = spawn.python(
        "import os, signal, time\n"
        "def clean_up(*_):\n"
        "    if os.fork() == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "        os.write(1, b'%d\\n' % os.getpid())\n"
        "        time.sleep(100)\n"
        "        os._exit(0)\n"
        "signal.signal(signal.SIGTERM, clean_up)\n"
        "os.write(1, b'ready\\n')\n"
        "while True: time.sleep(100)\n"
    )
    spawn.wait_lines()
    between_the_scans(monkeypatch, lambda: spawn.wait_lines(2))
    assert processes.signal_tree(child.pid, TOKEN, signal.SIGTERM) == 1
    helper = Identity.of(int(spawn.lines()[1]))
    assert helper is not None and helper.alive(), "the clean-up goes on"


def test_who_is_born_while_the_rest_is_killed_dies_too(spawn: Spawner, monkeypatch: pytest.MonkeyPatch) -> None:
    child = spawn("sleep", "100")
    real, calls = proctree._living, iter(range(100))

    def living(*args: Any) -> Any:
        found = real(*args)
        if next(calls) == 1:  # after the last look of the first round
            spawn("sleep", "100")
        return found

    monkeypatch.setattr(proctree, "_living", living)
    assert processes.signal_tree(child.pid, TOKEN, signal.SIGKILL) == 2


def test_a_tree_that_keeps_forking_and_leaving_is_killed(spawn: Spawner) -> None:
    code = (
        "import os, time\n"
        "os.write(1, b'go\\n')\n"
        "while True:\n"
        "    time.sleep(0.002)\n"
        "    if os.fork():\n"
        "        os._exit(0)\n"  # the session's life goes on in the child, under another pid
        "    os.setsid()\n"
    )
    child = spawn.python(code)
    spawn.wait_lines()

    def gone() -> bool:
        # One look can miss a process that is between two pids; its spawn lock tells for sure.
        processes.signal_tree(child.pid, TOKEN, signal.SIGKILL, child.identity)
        return not processes.is_held(spawn.folder / "lock")

    eventually(gone, "none of it is left")
    assert not processes.token_members(TOKEN)


# --- reaping ----------------------------------------------------------------------------------------------


def test_children_are_reaped_with_their_codes(spawn: Spawner) -> None:
    children = Children()
    good, bad, shot = spawn("true"), spawn("sh", "-c", "exit 7"), spawn("sleep", "100")
    for child in (good, bad, shot):
        children.add(child)
    assert processes.send(shot.identity, signal.SIGKILL)
    for child in (good, bad, shot):
        wait_exit(child.identity)
    assert children.returncode(bad.pid) == 7
    assert sorted(children.reap()) == sorted([(good.pid, 0), (bad.pid, 7), (shot.pid, -9)])
    assert children.reap() == []
    assert [children.returncode(c.pid) for c in (good, bad, shot)] == [0, 7, -9]
    assert children.returncode(1) is None
    assert proctree.read_stat(good.pid) is None


def test_released_children_live_on(spawn: Spawner, recwarn: pytest.WarningsRecorder) -> None:
    child = spawn("sleep", "100")
    children = Children()
    children.add(child)
    children.release()
    assert children.reap() == [] and child.identity.alive()
    identity, pid = child.identity, child.pid
    spawn.children.clear()
    del child
    assert not [w for w in recwarn if issubclass(w.category, ResourceWarning)]
    assert processes.send(identity, signal.SIGKILL)
    assert os.waitpid(pid, 0)[0] == pid


# --- cmdStop ----------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def run_stop(code: str, log: Path, timeout: float = 20) -> processes.StopResult:
    return processes.run_stop_command(["sh", "-c", code], dict(os.environ), timeout, log, TOKEN)


def test_a_stop_command_runs_with_its_output_in_the_log(log: Path) -> None:
    result = run_stop("echo stopping $QMFLASK_TOKEN", log)
    assert result.ok and result.error == ""
    assert log.read_text() == f"stopping stop:{TOKEN}\n"


def test_a_stop_command_that_fails(log: Path) -> None:
    result = run_stop("exit 3", log)
    assert (result.ok, result.returncode) == (False, 3) and "code 3" in result.error
    result = processes.run_stop_command(["no-such-program-here"], dict(os.environ), 5, log)
    assert (result.ok, result.returncode) == (False, None) and "no such program" in result.error


def test_a_stop_command_that_hangs_is_killed_with_its_children(log: Path) -> None:
    result = run_stop("trap '' TERM; setsid sleep 100 & sleep 100", log, timeout=0.3)
    assert (result.ok, result.returncode) == (False, None) and "killed" in result.error
    eventually(lambda: not processes.token_members(f"stop:{TOKEN}"), "nothing of it is left")


def test_a_stop_command_is_no_member_of_the_tree_it_stops(spawn: Spawner) -> None:
    child = spawn("sleep", "100")
    command = processes.StopCommand(["sleep", "100"], dict(os.environ), spawn.log, TOKEN)
    try:
        assert command.poll() is None
        assert [m.pid for m in processes.tree(child.pid, TOKEN)] == [child.pid]
        assert command.pid in [m.pid for m in processes.token_members(f"stop:{TOKEN}")]
    finally:
        command.kill()
    command.kill()
    assert (result := command.poll()) is not None and result.returncode == -signal.SIGKILL


def test_the_end_of_a_stop_command_is_noticed_when_it_comes(log: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    command = processes.StopCommand(["sh", "-c", f"read x < {tmp_path / 'fifo'}"], dict(os.environ), log)
    assert command.wait(0) is None
    (tmp_path / "fifo").write_text("go\n")
    began = time.monotonic()
    assert command.wait(20) == processes.StopResult(0)
    assert time.monotonic() - began < 10


@pytest.fixture(autouse=True)
def no_stray_children() -> Iterator[None]:
    yield
    with contextlib.suppress(ChildProcessError):
        assert os.waitpid(-1, os.WNOHANG) == (0, 0), "an unreaped child is left"


def test_a_child_hears_signals_that_the_thread_blocks(tmp_path: Path) -> None:
    """As under uWSGI, whose threads block all of them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        with SpawnLock(tmp_path / "lock") as lock:
            assert lock.try_acquire()
            child = processes.spawn(["sleep", "60"], os.environ, "token", tmp_path / "log", lock.fd)
        assert {signal.SIGTERM, signal.SIGUSR1} <= signal.pthread_sigmask(signal.SIG_BLOCK, ()), "ours is as it was"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    child.popen.terminate()
    try:
        assert child.popen.wait(10) == -signal.SIGTERM
    finally:
        child.popen.kill()
        child.popen.wait()

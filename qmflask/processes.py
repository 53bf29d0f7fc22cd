"""Child processes: starting a model's command so that it outlives us, its spawn lock, reaping, and `cmdStop`.

What is known about processes that need not be our children is in `proctree`, about ports in `ports`; their names can be
imported from here.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qmflask.ports import holder_of, listens, port_is_free, socket_owner
from qmflask.proctree import (
    TOKEN_VARIABLE,
    Identity,
    boot_id,
    holders_of_file,
    members_of,
    pidfd,
    read_stat,
    send,
    session_alive,
    session_members,
    session_of,
    signal_tree,
    token_members,
    tokens,
    tree,
)

__all__ = [
    "TOKEN_VARIABLE",
    "Child",
    "Children",
    "Identity",
    "SpawnError",
    "SpawnLock",
    "StopCommand",
    "StopResult",
    "boot_id",
    "child_environment",
    "holder_of",
    "holders_of_file",
    "is_held",
    "listens",
    "members_of",
    "pidfd",
    "port_is_free",
    "run_stop_command",
    "send",
    "session_alive",
    "session_members",
    "session_of",
    "signal_tree",
    "socket_owner",
    "spawn",
    "token_members",
    "tokens",
    "tree",
]

log = logging.getLogger(__name__)

#: What the web server and systemd tell their own child, and a model server must not take for its own.
_NOT_INHERITED = ("GUNICORN_", "LISTEN_", "NOTIFY_SOCKET", "WATCHDOG_", "SERVER_SOFTWARE")

#: Exit codes kept for `Children.returncode`; the leader asks within a tick.
_REMEMBERED = 256


class SpawnError(Exception):
    """Raised when a command cannot be started; the text says what to do about it."""


def is_held(path: str | os.PathLike[str]) -> bool:
    """True if somebody (we ourselves, through another descriptor, too) holds the spawn lock at `path`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared: two who only look do not see each other.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class SpawnLock:
    """The lock of one model's process tree: taken by who spawns, inherited by the child, held to the end of the last.

    flock belongs to the open file, which parent and children share through their descriptors. So closing ours does not
    free it, and nobody ever unlocks it: it ends with its last holder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd: int | None = None

    @property
    def fd(self) -> int:
        """The locked descriptor, for `spawn`; ValueError if the lock is not ours."""
        if self._fd is None:
            raise ValueError(f"the spawn lock {self.path} is not held")
        return self._fd

    def try_acquire(self) -> bool:
        """Take the lock if it is free. A refusal may be the blink of somebody who looked, so it is tried thrice."""
        if self._fd is not None:
            return True
        for pause in (0.0, 0.0005, 0.0005):
            time.sleep(pause)
            if self._try_once():
                return True
        return False

    def _try_once(self) -> bool:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(self.path).st_ino:
                self._fd, fd = fd, -1
                return True
        except (BlockingIOError, FileNotFoundError):  # taken, or unlinked while we took it (field notes A17)
            pass
        finally:
            if fd >= 0:
                os.close(fd)
        return False

    def close(self) -> None:
        """Close our copy. With a child spawned the lock stays the child's; without one it is free."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> SpawnLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Child:
    """A process we started: its Popen (to reap it) and its identity (for everybody else)."""

    popen: subprocess.Popen[bytes]
    identity: Identity

    @property
    def pid(self) -> int:
        """The pid, which is also the session and group id."""
        return self.popen.pid


def child_environment(env: Mapping[str, str], token: str | None) -> dict[str, str]:
    """The environment of a child: `env`, less what only the web server was meant to see, plus the token.

    A variable is dropped only if it has the value that we inherited: what a model's `env` sets stays. SPT_NOENV keeps
    programs that change their title from overwriting the environment, where the token is looked for.
    """
    kept = {
        name: value
        for name, value in env.items()
        if not (name.startswith(_NOT_INHERITED) and os.environ.get(name) == value)
    }
    kept.pop(TOKEN_VARIABLE, None)
    if token is not None:
        kept[TOKEN_VARIABLE] = token
        kept["SPT_NOENV"] = "1"
    return kept


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    token: str,
    log_path: str | os.PathLike[str],
    lock_fd: int,
    cwd: str | os.PathLike[str] | None = None,
) -> Child:
    """Start a model's command in its own session, its output appended to its log file.

    A file and no pipe: the child must neither freeze nor die when nobody reads (field notes A18). No preexec_fn, so
    that Python uses vfork. Raises SpawnError.
    """
    popen = _popen(argv, child_environment(env, token), log_path, (lock_fd,), cwd)
    stat = read_stat(popen.pid)  # a zombie has one as well, and nobody but us reaps it
    if stat is None:
        raise SpawnError(f"the process of {argv[0]} (pid {popen.pid}) vanished at once: is /proc mounted?")
    return Child(popen, Identity(popen.pid, stat.start_ticks, boot_id()))


def _popen(
    argv: Sequence[str],
    env: Mapping[str, str],
    log_path: str | os.PathLike[str] | None,
    pass_fds: tuple[int, ...] = (),
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.Popen[bytes]:
    if not argv or not argv[0]:
        raise SpawnError("empty command: nothing to start")
    output = _open_log(log_path)
    try:
        executable = _executable(argv[0], env)
        with _no_signal_blocked():
            return subprocess.Popen(
                list(argv),
                executable=executable,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                close_fds=True,
                pass_fds=pass_fds,
            )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SpawnError(_explain(argv[0], error, cwd)) from error
    finally:
        os.close(output)


@contextmanager
def _no_signal_blocked() -> Iterator[None]:
    """A child inherits which signals its parent's thread blocks. uWSGI blocks them all in its threads, and with them in
    ours: such a child would never see a TERM."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if not blocked:
        yield
        return
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _open_log(path: str | os.PathLike[str] | None) -> int:
    """O_APPEND, so that the log can be shortened under the writer (see `logfiles`)."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path if path is not None else os.devnull, flags, 0o600)
    except OSError as error:
        raise SpawnError(f"cannot open the log file {path}: {error.strerror}") from error


def _executable(name: str, env: Mapping[str, str]) -> str:
    """Look a bare name up in our own PATH (compatibility 4.2), then in the child's; itself if neither has it."""
    if "/" in name:
        return name
    return shutil.which(name) or shutil.which(name, path=env.get("PATH", os.defpath)) or name


def _explain(name: str, error: Exception, cwd: str | os.PathLike[str] | None) -> str:
    """A sentence for each way in which starting a program fails."""
    if not isinstance(error, OSError):
        return f"cannot start {name!r}: {error}"
    if cwd is not None and not os.path.isdir(cwd):
        return f"cannot start {name!r}: the working directory {os.fspath(cwd)} does not exist"
    if error.errno == errno.ENOENT and "/" in name and os.path.exists(name):
        return f"cannot start {name!r}: the file exists, but the interpreter that its first line names does not"
    if error.errno == errno.ENOENT:
        where = "no such file" if "/" in name else "no such program in PATH"
        return f"cannot start {name!r}: {where}; check the model's `cmd`"
    if error.errno == errno.EACCES:
        return f"cannot start {name!r}: not executable (is it a directory, or is `chmod +x` missing?)"
    if error.errno == errno.ENOEXEC:
        return f"cannot start {name!r}: not a program for this machine, and no script with a #! line"
    return f"cannot start {name!r}: {error.strerror}"


class Children:
    """Owns the Popen objects of one process and reaps them, whoever leads (field notes A19). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: dict[int, int] = {}

    def add(self, child: Child) -> None:
        """Take charge of reaping this child."""
        with self._lock:
            self._running[child.pid] = child.popen
            self._ended.pop(child.pid, None)

    def reap(self) -> list[tuple[int, int]]:
        """(pid, returncode) of each child that ended since the last call; negative codes are signals."""
        with self._lock:
            ended = [(pid, code) for pid, popen in self._running.items() if (code := popen.poll()) is not None]
            for pid, code in ended:
                del self._running[pid]
                self._ended[pid] = code
            while len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
            return ended

    def returncode(self, pid: int) -> int | None:
        """Exit code of a child that has been reaped (now, if it just ended); None if it runs or was never ours."""
        with self._lock:
            popen = self._running.get(pid)
            return popen.poll() if popen is not None else self._ended.get(pid)

    def release(self) -> None:
        """Let go of those that still run, without waiting for them: they outlive this process."""
        with self._lock:
            for popen in self._running.values():
                if popen.poll() is None:
                    popen.returncode = 0  # keeps Popen from warning about, and holding on to, a running child
            self._running.clear()


@dataclass(frozen=True)
class StopResult:
    """How a `cmdStop` went. `returncode` is None if it was killed or could not be started; `error` says why."""

    returncode: int | None
    error: str = ""

    @property
    def ok(self) -> bool:
        """True if it ended by itself with code 0."""
        return self.returncode == 0


class StopCommand:
    """A running `cmdStop`: in its own session, its output in the model's log. The leader polls it, nobody waits.

    It carries a token of its own, `stop:<the model's token>`, so that it is no member of the tree that it stops, and
    that a successor finds it (`token_members("stop:" + token)`).

    Raises SpawnError.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: str | os.PathLike[str] | None = None,
        token: str = "",
    ) -> None:
        self._token = f"stop:{token or secrets.token_hex(16)}"
        self._popen = _popen(argv, child_environment(env, self._token), log_path)
        self.pid = self._popen.pid

    def poll(self) -> StopResult | None:
        """The result once it has ended."""
        code = self._popen.poll()
        if code is None:
            return None
        return StopResult(code, "" if code == 0 else f"cmdStop ended with code {code}")

    def wait(self, timeout: float) -> StopResult | None:
        """Wait until it ends, at most `timeout` seconds; woken by its exit, not by polling."""
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:  # reaped already, or no pidfds here
            return self._wait_by_polling(timeout)
        try:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            poller.poll(max(0, timeout) * 1000)
        finally:
            os.close(fd)
        return self.poll()

    def _wait_by_polling(self, timeout: float) -> StopResult | None:
        try:
            self._popen.wait(max(0, timeout))
        except subprocess.TimeoutExpired:
            return None
        return self.poll()

    def kill(self) -> None:
        """Kill it with all that it started, and reap it; nothing if it has ended."""
        if self._popen.poll() is None:  # not reaped, so its number is still its own
            signal_tree(self.pid, self._token, signal.SIGKILL)
            self._popen.wait()


def run_stop_command(
    argv: Sequence[str],
    env: Mapping[str, str],
    timeout: float,
    log_path: str | os.PathLike[str] | None = None,
    token: str = "",
) -> StopResult:
    """Run a `cmdStop` for at most `timeout` seconds, then kill it. Never raises: what went wrong is in the result."""
    try:
        command = StopCommand(argv, env, log_path, token)
    except SpawnError as error:
        return StopResult(None, str(error))
    result = command.wait(timeout)
    if result is None:
        command.kill()
        result = StopResult(None, f"cmdStop did not end within {timeout:g} s and was killed")
    return result

"""Who lives: processes, sessions and process trees as `/proc` shows them, and signals that cannot hit a stranger.

Nothing here needs to be the parent of what it looks at: a model is watched by whoever leads at the moment.
A zombie counts as dead everywhere (field notes A19): PID 1 of a container may never reap it.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

log = logging.getLogger(__name__)

#: Environment variable that marks every process of one start; its value is the token of that start.
TOKEN_VARIABLE = "QMFLASK_TOKEN"

#: Signals after which a stopped (state T) process must be continued, or it would never see them.
_NEEDS_CONT = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})

#: SIGKILL is repeated for processes that were forked while it was delivered; a fork bomb is not chased for ever.
_KILL_ROUNDS = 5

#: Seconds after which a process that was in the middle of an exec has its new environment.
_EXEC_PAUSE = 0.0005

_GONE = (FileNotFoundError, ProcessLookupError)


class Stat(NamedTuple):
    """The fields of `/proc/PID/stat` that matter here; `start_ticks` is field 22, in ticks since boot."""

    pid: int
    comm: str
    state: str
    ppid: int
    pgrp: int
    session: int
    threads: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        """False for a zombie. A process whose first thread alone has ended shows Z too, but still has threads."""
        return self.state not in "ZXx" or self.threads > 1


def parse_stat(data: bytes) -> Stat:
    """Parse one `/proc/PID/stat`. The command may hold spaces and brackets, so its end is the last ')'."""
    opening, closing = data.index(b"("), data.rindex(b")")
    rest = data[closing + 2 :].split()
    return Stat(
        pid=int(data[:opening]),
        comm=data[opening + 1 : closing].decode("utf-8", "replace"),
        state=rest[0].decode("ascii"),
        ppid=int(rest[1]),
        pgrp=int(rest[2]),
        session=int(rest[3]),
        threads=int(rest[17]),
        start_ticks=int(rest[19]),
    )


def read_stat(pid: int) -> Stat | None:
    """`/proc/PID/stat`, zombies included; None if there is no such process (or we may not see it)."""
    data = _read(f"/proc/{pid}/stat")
    return parse_stat(data) if data else None


def _read(path: str) -> bytes | None:
    """A whole file of `/proc`; None if its process is gone. Out of descriptors is not "gone": that is raised."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (*_GONE, PermissionError):
        return None
    try:
        data = os.read(fd, 65536)
        if len(data) < 4096:  # the usual case; a short read of /proc is the end of the file
            return data
        while chunk := os.read(fd, 1 << 20):
            data += chunk
        return data
    except (*_GONE, PermissionError):
        return None
    finally:
        os.close(fd)


@lru_cache(maxsize=1)
def boot_id() -> str:
    """The kernel's random id of this boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


class Identity(NamedTuple):
    """One process, for ever: a pid is used again, the pair with its start time in one boot is not."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """Identity of the process that has this pid now; None if there is none or it is a zombie."""
        stat = read_stat(pid)
        return cls(pid, stat.start_ticks, boot_id()) if stat and stat.alive else None

    def _stat(self) -> Stat | None:
        if self.boot_id != boot_id():
            return None
        stat = read_stat(self.pid)
        return stat if stat and stat.start_ticks == self.start_ticks else None

    def alive(self) -> bool:
        """True if exactly this process runs; False for a zombie, another boot, or a pid used again."""
        stat = self._stat()
        return stat is not None and stat.alive

    def stopped(self) -> bool:
        """True if it is stopped by a signal (state T)."""
        stat = self._stat()
        return stat is not None and stat.state == "T"


def pidfd(identity: Identity) -> int | None:
    """A descriptor that becomes readable when the process ends (child of ours or not); the caller closes it.

    None if it is dead already, or on a kernel without pidfds (ask `identity.alive()` to tell them apart).
    """
    if identity.boot_id != boot_id():
        return None
    try:
        fd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL):  # old kernel, seccomp, not a thread leader
            return None
        raise
    # Only now is the number pinned: what we look up next is what the descriptor means.
    if identity.alive():
        return fd
    os.close(fd)
    return None


def send(identity: Identity, sig: int) -> bool:
    """Send a signal to exactly this process; False if it is dead (or may not be signalled: logged)."""
    _check_signalable(identity.pid)
    try:
        fd = pidfd(identity)
        if fd is not None:
            try:
                signal.pidfd_send_signal(fd, sig)
            finally:
                os.close(fd)
            return True
        if identity.alive():  # no pidfds here: the check just done is the best there is
            os.kill(identity.pid, sig)
            return True
    except ProcessLookupError:
        pass
    except PermissionError:
        log.warning("may not send signal %d to pid %d: it runs as another user", sig, identity.pid)
    return False


def _check_signalable(pid: int) -> None:
    """Numbers below 2 mean "my own group" or "everybody" to kill(2)."""
    if pid < 2:
        raise ValueError(f"refusing to signal process or group {pid}")


def _pids() -> list[int]:
    """All processes but ourselves."""
    me = os.getpid()
    return [pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) != me]


def _in_session(pid: int, sid: int) -> bool:
    """One cheap system call instead of opening a file; true for zombies too."""
    try:
        return os.getsid(pid) == sid
    except ProcessLookupError:
        return False
    except PermissionError:
        stat = read_stat(pid)
        return stat is not None and stat.session == sid


_NEEDLE = os.fsencode(f"{TOKEN_VARIABLE}=")


def _needle(token: str) -> bytes:
    return os.fsencode(f"{TOKEN_VARIABLE}={token}")


def _environments() -> Iterator[tuple[int, bytes]]:
    """(pid, environment at its exec) of every other process that we may look into.

    For some microseconds of an exec the new environment is empty; who is caught there is asked again.
    """
    in_exec = []
    for pid in _pids():
        data = _read(f"/proc/{pid}/environ")
        if data:
            yield pid, data
        elif data is not None and _has_session(pid):
            in_exec.append(pid)
    in_exec = [pid for pid in in_exec if (stat := read_stat(pid)) and stat.alive]
    if in_exec:
        time.sleep(_EXEC_PAUSE)
    for pid in in_exec:
        data = _read(f"/proc/{pid}/environ")
        if data:
            yield pid, data


def _has_session(pid: int) -> bool:
    """False for the kernel's own threads, which have no environment either."""
    try:
        return os.getsid(pid) > 0
    except ProcessLookupError:
        return False
    except PermissionError:
        return True


def _session_is_ours(sid: int, root: Identity | None) -> bool:
    """False if the number `sid` now belongs to another process than the one that made our session."""
    if root is None:
        return True
    if root.boot_id != boot_id():
        return False
    stat = read_stat(sid)
    return stat is None or stat.start_ticks == root.start_ticks


def _scan(sid: int | None, token: str | None, root: Identity | None = None) -> Iterator[Stat]:
    """Every process of the session, zombies included, and every living one with the token; never ourselves.

    Membership is asked again after the identity was read, so that no stranger who got the number meanwhile is taken
    for a member.
    """
    found = set()
    if sid is not None and _session_is_ours(sid, root):
        for pid in _pids():
            if _in_session(pid, sid) and (stat := read_stat(pid)) and _in_session(pid, sid):
                found.add(pid)
                yield stat
    if not token:
        return
    needle = _needle(token)
    for pid, data in _environments():
        if pid not in found and needle in data and needle in data.split(b"\0"):
            stat = read_stat(pid)
            again = _read(f"/proc/{pid}/environ")
            if stat and again is not None and (not again or needle in again):  # empty: in its next exec
                yield stat


def _identities(stats: Iterator[Stat], include_zombies: bool = False) -> list[Identity]:
    boot = boot_id()
    return [Identity(s.pid, s.start_ticks, boot) for s in stats if include_zombies or s.alive]


def session_members(sid: int, include_zombies: bool = False, root: Identity | None = None) -> list[Identity]:
    """Processes of the session, whatever their group. `root`, its first process, guards against a reused id."""
    return _identities(_scan(sid, None, root), include_zombies)


def session_alive(sid: int, root: Identity | None = None) -> bool:
    """True if any process of the session lives. The usual answers cost some microseconds, the last one a scan."""
    if not _session_is_ours(sid, root):
        return False
    stat = read_stat(sid)
    if stat is not None and stat.alive and stat.session == sid:
        return True
    return any(member.alive for member in _scan(sid, None, root))


def token_members(token: str) -> list[Identity]:
    """Living processes whose environment carries the token, wherever they went (field notes A18, DESIGN section 3)."""
    return _identities(_scan(None, token))


def tokens(prefix: str) -> list[tuple[Identity, str]]:
    """Living processes whose token starts with `prefix`, with that token: trees that no row may know any more."""
    start = _needle(prefix)
    found = []
    for pid, data in _environments():
        for entry in data.split(b"\0") if start in data else ():
            identity = Identity.of(pid) if entry.startswith(start) else None
            if identity is not None:
                found.append((identity, os.fsdecode(entry.split(b"=", 1)[1])))
    return found


def session_of(pid: int) -> int | None:
    """Session id of a process, zombie or not; None if there is none."""
    stat = read_stat(pid)
    return stat.session if stat else None


def tree(sid: int, token: str, root: Identity | None = None) -> list[Identity]:
    """Living processes of the session, and those with the token that left it (double fork, setsid)."""
    return _identities(_scan(sid, token, root))


def members_of(trees: Mapping[str, tuple[Identity, str]]) -> dict[str, list[int]]:
    """Pids of several trees, each (first process, token), in one look at `/proc`: to measure them, never to signal."""
    sessions = {root.pid: name for name, (root, _) in trees.items() if _session_is_ours(root.pid, root)}
    marks = {_needle(token): name for name, (_, token) in trees.items() if token}
    found: dict[str, list[int]] = {name: [] for name in trees}
    for pid in _pids() if trees else ():
        try:
            name = sessions.get(os.getsid(pid))
        except (ProcessLookupError, PermissionError):
            name = None
        if name is None and _NEEDLE in (data := _read(f"/proc/{pid}/environ") or b""):
            name = next((marks[entry] for entry in data.split(b"\0") if entry in marks), None)
        if name is not None:
            found[name].append(pid)
    return found


def signal_tree(sid: int, token: str, sig: int, root: Identity | None = None) -> int:
    """Signal the whole tree: its group at once, then each member outside of it. Returns how many were reached.

    Stopped processes are continued after a polite signal, as they would not see it. What a process forks after a polite
    signal may be part of its clean-up, so only SIGKILL is repeated for newcomers. The session goes first: looking for
    the token reads the memory of every process, and one that hangs in the kernel may hold that up.
    """
    _check_signalable(sid)
    if sid == os.getsid(0):
        raise ValueError(f"refusing to signal our own session {sid}")
    reached: set[Identity] = set()
    for _ in range(_KILL_ROUNDS if sig == signal.SIGKILL else 1):
        before = len(reached)
        for by_sid, by_token in ((sid, None), (None, token)):
            members = {i: stat for i, stat in _living(by_sid, by_token, root).items() if i not in reached}
            if by_token and sig != signal.SIGKILL:
                members = {i: stat for i, stat in members.items() if stat.session != sid}
            reached.update(_signal_members(sid, sig, members))
            if sig in _NEEDS_CONT:
                _signal_members(sid, signal.SIGCONT, members)
        if len(reached) == before:
            break
    return len(reached)


def _living(sid: int | None, token: str | None, root: Identity | None) -> dict[Identity, Stat]:
    boot = boot_id()
    return {Identity(s.pid, s.start_ticks, boot): s for s in _scan(sid, token, root) if s.alive}


def _signal_members(sid: int, sig: int, members: dict[Identity, Stat]) -> list[Identity]:
    """The group `sid` by one killpg, which no fork can slip through; everybody else through a pidfd."""
    group = [identity for identity, stat in members.items() if stat.pgrp == sid]
    # A living member pins the number of its group, so this cannot be somebody else's.
    reached = group if group and _kill_group(sid, sig) else []
    return reached + [i for i, stat in members.items() if stat.pgrp != sid and send(i, sig)]


def _kill_group(pgrp: int, sig: int) -> bool:
    if pgrp == os.getpgrp():
        raise ValueError(f"refusing to signal our own process group {pgrp}")
    try:
        os.killpg(pgrp, sig)
    except ProcessLookupError:
        return False
    except PermissionError:
        log.warning("may not send signal %d to process group %d: it runs as another user", sig, pgrp)
        return False
    return True


def file_links(pid: int) -> list[str]:
    """Where its descriptors lead, such as `/a/file` or `socket:[123]`; [] if gone. Raises PermissionError if hidden."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except _GONE:
        return []
    links = []
    for name in names:
        try:
            links.append(os.readlink(f"{folder}/{name}"))
        except _GONE:  # closed meanwhile
            continue
    return links


def holders_of_file(path: str) -> list[Identity]:
    """Living processes, ourselves left out, that hold this file open: the last way to find the tree of a spawn lock.

    Looks at every descriptor of every process: some milliseconds, so nothing for the way of a request.
    """
    real = os.path.realpath(path)
    wanted = {real, f"{real} (deleted)"}
    found = []
    for pid in _pids():
        identity = Identity.of(pid)
        try:
            links = file_links(pid) if identity else []
        except PermissionError:
            continue
        if identity and not wanted.isdisjoint(links):
            found.append(identity)
    return found

"""Who holds the store's write lock, and whether he stands still with it: he is then ended like a leader that does."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path

from qmflask import processes
from qmflask.processes import Identity

log = logging.getLogger(__name__)

SECOND = 1_000_000_000
#: A holder in state T is ended after the first of these times, one that is merely silent after the second.
STOPPED = 5 * SECOND
SILENT = 20 * SECOND
#: SQLite's lock of who writes to the WAL: this byte of the `-shm` file (its file format, "WAL-Index locking").
_WRITE_BYTE = 120


def holder(database: Path) -> int | None:
    """The pid of the process that writes now, by the kernel's list; None when nobody does.

    Read from /proc/locks and not with F_GETLK: to open and close the file here would drop our own locks on it.
    """
    try:
        info = os.stat(f"{database}-shm")
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    inode = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    for line in lines:
        words = line.split()  # 1: POSIX ADVISORY WRITE pid major:minor:inode first last
        if words[1] != "POSIX" or words[3] != "WRITE" or words[5] != inode:
            continue  # waiting ones have "->" in the second place
        last = int(words[7]) if words[7] != "EOF" else _WRITE_BYTE
        if int(words[6]) <= _WRITE_BYTE <= last and int(words[4]) > 0:
            return int(words[4])
    return None


class WriteLockWatch:
    """Looked at twice a second by each worker; remembers since when the same process was found with the lock."""

    def __init__(self, database: Path, workers: Callable[[], Collection[int]]) -> None:
        """`workers` gives the pids of the registered workers: nobody else is ever ended."""
        self._database = database
        self._workers = workers
        self._found: Identity | None = None
        self._since = 0
        self._told = False

    def look(self, now: int) -> None:
        """One look; ends the holder when his time is over."""
        pid = holder(self._database)
        found = Identity.of(pid) if pid is not None and pid != os.getpid() else None
        if found is None or found != self._found:
            self._found, self._since, self._told = found, now, False
            return
        held = now - self._since
        if held < STOPPED or not (held >= SILENT or found.stopped()):
            return
        if found.pid in self._workers():
            log.error("worker %d stood still in a write of the store for %d s: killing it", found.pid, held // SECOND)
            processes.send(found, signal.SIGKILL)
        elif not self._told:
            log.error("process %d, no worker of ours, keeps the store locked: end it", found.pid)
            self._told = True

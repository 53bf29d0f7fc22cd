"""Who leads: one process holds `leader.lock` (flock); the lock ends with the process, whatever kills it."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout


class Candidacy:
    """One process's attempts at `leader.lock`. Build it after fork.

    filelock's defaults are changed where field notes A16 say so: any thread may release (`thread_local=False`), and no
    soft lock stands in for flock, because a soft lock survives its owner.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "leader.lock"
        self._inode: tuple[int, int] | None = None
        self._lock = FileLock(self.path, thread_local=False, fallback_to_soft=False, on_acquired=self._note)

    def try_win(self) -> bool:
        """Take the lock if nobody has it; never waits."""
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            return False
        return True

    def _note(self, descriptor: int) -> None:
        info = os.fstat(descriptor)
        self._inode = (info.st_dev, info.st_ino)

    @property
    def held(self) -> bool:
        """True while we hold the lock and its file is still the one at the path (unlinking lets a second leader in)."""
        return self._lock.is_locked and self._inode is not None and self._inode == self._on_disk()

    def resign(self) -> None:
        """Release the lock; harmless when it is not held. Any thread may call it."""
        self._lock.release(force=True)

    def _on_disk(self) -> tuple[int, int] | None:
        try:
            info = self.path.stat()
        except FileNotFoundError:
            return None
        return info.st_dev, info.st_ino

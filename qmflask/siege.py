"""Patience with whoever holds a spawn lock: a tree may show itself or end, a leader may go on; then it is ended."""

from __future__ import annotations

import logging
import signal
from collections.abc import Collection
from pathlib import Path

from qmflask import processes
from qmflask.processes import Identity

log = logging.getLogger(__name__)

SECOND = 1_000_000_000
#: A holder that is no worker of ours and shows no token is what is left of a tree: ended after this time.
UNKNOWN = 1 * SECOND
#: A worker that holds the lock stands just before its spawn. Stopped (state T) it is ended after the first of these
#: times, silent after the second: the rule by which leaders are judged.
STOPPED = 5 * SECOND
SILENT = 20 * SECOND
#: Looking for holders reads every descriptor of every process, so it is done this often at most.
EVERY = SECOND // 2


class Siege:
    """Remembers since when each spawn lock is waited for, and ends its holders when their time is over."""

    def __init__(self) -> None:
        self._since: dict[Path, int] = {}
        self._next: dict[Path, int] = {}

    def lift(self, lock: Path) -> None:
        """The lock is free, or its tree was found."""
        self._since.pop(lock, None)
        self._next.pop(lock, None)

    def press(self, lock: Path, workers: Collection[int], now: int) -> list[Identity]:
        """Whom to end now; `workers` are the pids of registered workers. Nobody while there is still time."""
        waited = now - self._since.setdefault(lock, now)
        if waited < UNKNOWN or now < self._next.get(lock, 0):
            return []
        self._next[lock] = now + EVERY
        return [who for who in processes.holders_of_file(str(lock)) if _time_is_over(who, who.pid in workers, waited)]


def _time_is_over(holder: Identity, worker: bool, waited: int) -> bool:
    if not worker:
        return True
    return waited >= SILENT or (waited >= STOPPED and holder.stopped())


def end(holders: Collection[Identity], why: str) -> None:
    """SIGKILL them, each by its identity."""
    for holder in holders:
        log.warning("killing process %d: %s", holder.pid, why)
        processes.send(holder, signal.SIGKILL)

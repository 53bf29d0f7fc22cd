"""A bounded number of places for requests or streams of one worker, and how many are taken."""

from __future__ import annotations

import threading


class Slots:
    """`total` places; a place is taken with `acquire` and given back with `release`, exactly once."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = threading.Semaphore(total)

    @property
    def taken(self) -> int:
        """How many are taken now."""
        return self.total - self._free._value

    def acquire(self, timeout: float) -> bool:
        """Take a place, waiting for one that long at most; False if there was none."""
        return self._free.acquire(timeout=timeout)

    def release(self) -> None:
        """Give a place back."""
        self._free.release()

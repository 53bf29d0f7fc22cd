"""Wakes a loop that waits on descriptors; any thread may ring, also after the end."""

from __future__ import annotations

import os
import threading


class Bell:
    """An eventfd with an end that is safe: once closed, its number may belong to a client's connection.

    A ring that came late was seen to write its eight bytes into somebody's answer; the lock is what forbids it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor to wait on for reading, -1 once it is closed."""
        return self._fd

    def ring(self) -> None:
        """Make the loop look; rings that are not answered yet count as one. Does nothing after the end."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def answer(self) -> None:
        """Take back all rings so far; that there is none is fine. For the loop itself, which also closes."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Give the descriptor back; may be repeated."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

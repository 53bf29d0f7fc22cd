"""Several logs read as one: qmflask's own, all models' or both, from any process, as they grow."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from qmflask.journal import ServiceLog
from qmflask.logfiles import Follower, ModelLog

#: Bytes of history before the live part (compatibility 3.9).
HISTORY = 100 * 1024
#: Bytes handed over at a time.
CHUNK = 128 * 1024


class Tail:
    """Follows a set of logs. Owns their descriptors; not thread-safe; `close` it."""

    def __init__(self, logs: Iterable[ModelLog], history: int) -> None:
        """`history` is how many bytes of what is there already come first; 0 for what comes from now on."""
        found = list(logs)
        each = history // max(1, len(found))
        self._followers: dict[Path, Follower] = {}
        # Oldest first, so that the last lines of the history are the newest.
        for log in sorted(found, key=lambda log: _changed(log.path)):
            self._add(log, max(0, log.end - each))

    def _add(self, log: ModelLog, position: int | None) -> None:
        if log.path not in self._followers:
            self._followers[log.path] = log.follow(position)

    def extend(self, logs: Iterable[ModelLog]) -> None:
        """Take up logs that were not there before (models of a changed configuration), from their beginning."""
        for log in logs:
            self._add(log, None)

    def read(self) -> bytes:
        """What has come since the last time, whole lines of one log after another; b"" if nothing has."""
        pieces: list[bytes] = []
        for follower in self._followers.values():
            skipped = follower.skipped
            data = follower.read(CHUNK)
            if follower.skipped > skipped:
                pieces.append(b"\n[%d bytes dropped]\n" % (follower.skipped - skipped))
            pieces.append(data)
        return b"".join(pieces)

    def close(self) -> None:
        """Close all descriptors."""
        for follower in self._followers.values():
            follower.close()


class Piece(NamedTuple):
    """Part of one log: its text, and the cursor that asks for what comes after it."""

    data: bytes
    cursor: str
    dropped: int


def read_after(log: ModelLog, cursor: str, history: int = HISTORY) -> Piece:
    """What a log has after `cursor` ("" = from its last `history` bytes); for readers that hold no connection.

    A cursor names the file, so that a new start's file is read from its beginning.
    """
    name = _inode(log.path)
    known, _, position = cursor.partition(":")
    if not cursor:
        start: int | None = max(0, log.end - history)
    elif known == name and position.isdecimal():
        start = int(position)
    else:
        start = None
    with log.follow(start) as follower:
        data = follower.read(CHUNK)
        return Piece(data, f"{name}:{follower.position or 0}", follower.skipped)


def service_log(folder: Path) -> ServiceLog:
    """qmflask's own log."""
    return ServiceLog(folder)


def _inode(path: Path) -> str:
    try:
        return str(os.stat(path).st_ino)
    except FileNotFoundError:
        return "none"


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0

"""Room kept free for the day when the disk is full: a file that is given up so that what runs can be written off."""

from __future__ import annotations

import errno
import logging
import math
import os
from pathlib import Path

log = logging.getLogger(__name__)

#: Twice what the WAL grows to between two checkpoints: enough to end every lease there is.
SIZE = 8 * 1024 * 1024
MIB = 1024 * 1024
#: Seconds between two lines about a full disk, of one worker.
TELL_EVERY = 60.0


class Ballast:
    """The file, shared by all workers of a state directory: while it is missing, the disk counts as full."""

    def __init__(self, directory: Path, size: int = SIZE) -> None:
        self.path = directory / "ballast"
        self._size = size
        self._told_at = -math.inf

    def missing(self) -> bool:
        """True while the disk is full: the room has been given up and could not be taken again."""
        return not self.path.exists()

    def give_up(self) -> None:
        """Free the room; whoever finds the disk full calls this."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            return
        log.error("the disk with %s is full: nothing new is admitted until there is room again", self.path.parent)

    def shortage(self, now: float) -> str:
        """Why a request is refused, with what is free and needed; once a minute at most the log has it too."""
        free, needed = self._free() / MIB, 2 * self._size / MIB
        text = (
            f"the disk with {self.path.parent} is full: {free:.1f} MiB are free, {needed:.0f} MiB are needed;"
            " free some space"
        )
        if now - self._told_at >= TELL_EVERY:
            self._told_at = now
            log.warning("requests are refused: %s", text)
        return text

    def _free(self) -> int:
        info = os.statvfs(self.path.parent)
        return info.f_bavail * info.f_frsize

    def take(self) -> bool:
        """Take the room again if it is missing and twice as much is free; whether it is there now."""
        if self.path.exists():
            return True
        if self._free() < 2 * self._size:
            return False
        # Under a name of its own until it is whole, so that others never see half of it.
        temporary = self.path.with_name(f"ballast.{os.getpid()}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self._size)
            finally:
                os.close(descriptor)
            os.replace(temporary, self.path)
            return True
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                log.warning("no room can be kept free in %s: %s", self.path.parent, error)
                return error.errno in (errno.EOPNOTSUPP, errno.EINVAL)
            return False

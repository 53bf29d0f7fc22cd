"""Log files of model servers: their names, their last lines, following them, and keeping them small under the writer.

The child writes with O_APPEND and is never asked to reopen anything, so a log is shortened in place, at its old end:
by collapsing the range (the file really becomes shorter; ext4, XFS), else by punching a hole (the old part costs no
disk any more), both of which are atomic against the child's writes and lose none of them. Only where the file system
has neither, the tail is copied and written back, which can lose what is written within some microseconds.

Positions handed out are counted from the first byte ever written to the file, so they stay right when it is shortened.
How much a collapse has cut off is kept in an extended attribute of the file itself.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

#: Size above which a log is shortened, to half of it.
DEFAULT_CAP = 10 * 1024 * 1024

_ATTRIBUTE = "user.qmflask.cut"

_KEEP_SIZE, _PUNCH_HOLE, _COLLAPSE_RANGE = 0x01, 0x02, 0x08

#: The file system, a security policy or the kernel says no to a way of shortening: the next one is tried.
_REFUSED = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.ENOSPC, errno.ENODEV}
)

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def log_name(model: str) -> str:
    """A file name for any model id: readable, unique, safe. Distinct ids never share one."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.")[:40] or "model"
    return f"{slug}-{hashlib.sha256(model.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}.log"


def _plain(line: str) -> str:
    """A line as a terminal would show it in the end: no escape sequences, what a carriage return overwrote is gone."""
    return _ANSI.sub("", line.rstrip("\r").rpartition("\r")[2]).replace("\0", "").rstrip()


class _Extent(NamedTuple):
    """Where the kept part of a log is, as positions since the first byte ever written."""

    cut: int
    start: int
    end: int


class ModelLog:
    """The log of one model: the current attempt, and the one before it under `.1`. Holds no descriptor."""

    def __init__(self, folder: str | os.PathLike[str], model: str, cap: int = DEFAULT_CAP) -> None:
        self.path = Path(folder) / log_name(model)
        self.previous = self.path.with_name(self.path.name + ".1")
        self.cap = cap

    def rotate(self) -> None:
        """Before a new start: the last attempt's log becomes `.1`. An empty one does not push out an older one."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            if self.path.stat().st_size > 0:
                os.replace(self.path, self.previous)
        except FileNotFoundError:
            pass

    @property
    def size(self) -> int:
        """Bytes kept; 0 if there is no log."""
        extent = self._extent()
        return extent.end - extent.start

    @property
    def end(self) -> int:
        """Bytes ever written to the current file: the position of the next one."""
        return self._extent().end

    def _extent(self) -> _Extent:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return _Extent(0, 0, 0)
        try:
            return _extent(fd)
        finally:
            os.close(fd)

    def tail_bytes(self, limit: int = 65536) -> bytes:
        """The last `limit` bytes at most, as they are."""
        with self.follow(max(0, self.end - limit)) as follower:
            return follower.read(limit)

    def tail(self, lines: int = 20) -> str:
        """The last lines as one text for a message; "" if there are none (see `last_lines`)."""
        return "\n".join(self.last_lines(lines))

    def last_lines(self, count: int = 20, limit: int = 65536) -> list[str]:
        """The last lines for a message: text without colours, progress bars at their last state, no empty ones."""
        data = self.tail_bytes(limit)
        lines = data.decode("utf-8", "replace").split("\n")
        if len(data) == limit and len(lines) > 1:
            del lines[0]  # begins somewhere
        return [line for line in map(_plain, lines) if line][-count:] if count > 0 else []

    def follow(self, position: int | None = None) -> Follower:
        """A reader from `position` (None: what is kept of the current file) onwards, over rotations."""
        return Follower(self.path, position)

    def trim(self) -> int:
        """Shorten the log to half its cap once it is above the cap; bytes dropped. Cheap while there is nothing to do.

        The work itself may have to write the log to disk first: milliseconds, more on a slow disk, so not on the
        leader's own thread.
        """
        try:
            if os.stat(self.path).st_size <= self.cap:
                return 0
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # one who shortens at a time; ends with the descriptor
            return _shorten(fd, self.cap)
        except BlockingIOError:
            return 0
        finally:
            os.close(fd)


class Follower:
    """Reads a log as it grows. Owns one descriptor; not thread-safe. Never blocks: `read` returns b"" at the end."""

    def __init__(self, path: Path, position: int | None = None) -> None:
        self._path = path
        self._fd: int | None = None
        self.position = position
        #: Bytes that were cut off before they were read.
        self.skipped = 0

    def read(self, limit: int = 65536) -> bytes:
        """The next bytes; a new start's file is taken up when the old one is read to its end."""
        if self._fd is None and not self._open():
            return b""
        data = self._read_current(limit)
        if data or not self._rotated():
            return data
        data = self._read_current(limit)  # its last words may have come since
        if not data:
            self._drop()
            self.position = 0
            data = self._read_current(limit) if self._open() else b""
        return data

    def _open(self) -> bool:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        return True

    def _rotated(self) -> bool:
        assert self._fd is not None
        mine = os.fstat(self._fd)
        try:
            now = os.stat(self._path)
        except FileNotFoundError:  # between two starts; the new file will come
            return False
        return (mine.st_ino, mine.st_dev) != (now.st_ino, now.st_dev)

    def _read_current(self, limit: int) -> bytes:
        """Read at our position; again if the file was cut meanwhile, as the bytes were then elsewhere."""
        assert self._fd is not None
        while True:
            extent = _extent(self._fd)
            position = extent.start if self.position is None else self.position
            if position > extent.end:  # somebody truncated it: what is there now is new
                position = extent.start
            lost = max(0, extent.start - position)
            data = os.pread(self._fd, max(0, min(limit, extent.end - position - lost)), position + lost - extent.cut)
            after = _extent(self._fd)
            if after.cut == extent.cut and (after.start <= position + lost or not data):
                self.skipped += lost
                self.position = position + lost + len(data)
                return data

    def _drop(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        """Close the descriptor."""
        self._drop()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _extent(fd: int) -> _Extent:
    """What is kept, consistent even while somebody cuts."""
    while True:
        cut = _cut(fd)
        size = os.fstat(fd).st_size
        try:
            first = os.lseek(fd, 0, os.SEEK_DATA) if size else 0
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.EINVAL):  # all hole; no such call here
                raise
            first = size if error.errno == errno.ENXIO else 0
        if _cut(fd) == cut:
            return _Extent(cut, cut + first, cut + max(size, first))


def _cut(fd: int) -> int:
    """Bytes that collapses have taken off the front. While one is under way ("100+50") it waits a few milliseconds.

    One that stays under way was killed there; then the cut is taken as done.
    """
    pending = 0
    for _ in range(50):
        try:
            done, _, pending_text = os.getxattr(fd, _ATTRIBUTE).partition(b"+")
        except OSError as error:
            if error.errno in (errno.ENODATA, *_REFUSED):
                return 0
            raise
        if not pending_text:
            return int(done)
        pending = int(done) + int(pending_text)
        time.sleep(0.001)
    return pending


def _shorten(fd: int, cap: int) -> int:
    """Drop the older part, down to half of `cap`, in the first way that works here; bytes dropped."""
    extent = _extent(fd)
    if extent.end - extent.start <= cap:
        return 0
    block = os.fstatvfs(fd).f_bsize
    upto = (extent.end - extent.cut - cap // 2) // block * block
    if upto <= extent.start - extent.cut:
        return 0
    for way in _WAYS:
        if way(fd, upto):
            return upto - (extent.start - extent.cut)
    return 0


def _collapse(fd: int, upto: int) -> bool:
    """Take the first `upto` bytes out of the file. The attribute says so before, and what came of it after."""
    cut = _cut(fd)
    try:
        os.setxattr(fd, _ATTRIBUTE, b"%d+%d" % (cut, upto))
    except OSError as error:
        if error.errno in _REFUSED:
            return False
        raise
    done = False
    try:
        done = _fallocate(fd, _COLLAPSE_RANGE, upto)
    finally:
        os.setxattr(fd, _ATTRIBUTE, b"%d" % (cut + upto if done else cut))
    return done


def _punch(fd: int, upto: int) -> bool:
    """Give the disk space of the first `upto` bytes back; positions stay."""
    return _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, upto)


def _rewrite(fd: int, upto: int) -> bool:
    """Copy the newer part, truncate, and append it again. What is written between the last read and the cut is lost."""
    newer = bytearray()
    while chunk := os.pread(fd, 1 << 20, upto + len(newer)):
        newer += chunk
    os.ftruncate(fd, 0)
    view = memoryview(newer)
    while view:
        view = view[os.write(fd, view) :]
    return True


#: Best first; each says False where it cannot work.
_WAYS: tuple[Callable[[int, int], bool], ...] = (_collapse, _punch, _rewrite)


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _fallocate(fd: int, mode: int, length: int) -> bool:
    """fallocate(2) from the start of the file; False if it cannot be done here."""
    libc = _libc()
    call = getattr(libc, "fallocate64", None) or libc.fallocate
    code = errno.EINTR
    while code == errno.EINTR:
        if call(fd, mode, ctypes.c_int64(0), ctypes.c_int64(length)) == 0:
            return True
        code = ctypes.get_errno()
    if code in _REFUSED:
        return False
    raise OSError(code, os.strerror(code))

"""Logs that grow while they are read, shortened and rotated: nothing of what a child writes is lost."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from qmflask import logfiles
from qmflask.logfiles import ModelLog, log_name

#: Line n is at position 16 * n, so any piece of a log can be checked by itself.
LINE = 16

#: Writes `count` lines in odd pieces through a descriptor opened for appending, as a model's stdout is.
FLOOD = (
    "import os, sys\n"
    "count, piece = int(sys.argv[1]), 1234\n"
    "data = b''.join(b'line %010d\\n' % n for n in range(count))\n"
    "while data:\n"
    "    data = data[os.write(1, data[:piece]):]\n"
)


def expected(position: int, length: int) -> bytes:
    first, last = position // LINE, (position + length) // LINE + 1
    data = b"".join(b"line %010d\n" % n for n in range(first, last))
    return data[position - first * LINE :][:length]


def write(log: ModelLog, data: bytes) -> None:
    fd = os.open(log.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


def flood(log: ModelLog, count: int) -> subprocess.Popen[bytes]:
    fd = os.open(log.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        return subprocess.Popen([sys.executable, "-S", "-E", "-c", FLOOD, str(count)], stdout=fd)
    finally:
        os.close(fd)


def on_disk(log: ModelLog) -> int:
    return os.stat(log.path).st_blocks * 512


@pytest.fixture
def log(tmp_path: Path) -> ModelLog:
    log = ModelLog(tmp_path / "logs", "org/Model: 7B", cap=64 * 1024)
    log.rotate()
    return log


Ways = tuple[Callable[[int, int], bool], ...]
LOSSLESS = {"collapse": (logfiles._collapse,), "punch": (logfiles._punch,)}
ALL = {**LOSSLESS, "rewrite": (logfiles._rewrite,)}


def works(ways: Ways, folder: Path) -> bool:
    """Whether the file system of the tests can do it."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(65536))
        file.flush()
        return ways[0](file.fileno(), 4096)


@pytest.fixture(params=LOSSLESS)
def lossless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    if not works(LOSSLESS[request.param], tmp_path):
        pytest.skip(f"this file system cannot {request.param}")
    monkeypatch.setattr(logfiles, "_WAYS", LOSSLESS[request.param])
    return str(request.param)


@pytest.fixture(params=ALL)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    if not works(ALL[request.param], tmp_path):
        pytest.skip(f"this file system cannot {request.param}")
    monkeypatch.setattr(logfiles, "_WAYS", ALL[request.param])
    return str(request.param)


# --- names and rotation -----------------------------------------------------------------------------------


def test_names_are_safe_readable_and_never_shared() -> None:
    ids = ["a/b", "a:b", "a b", "A/b", "", ".", "..", "../../etc/passwd", "x" * 500, "ü", "a\nb", "-rf", "\udcff"]
    names = [log_name(model) for model in ids]
    assert len({name.lower() for name in names}) == len(ids)
    for name in names:
        assert name.endswith(".log") and len(name) < 80 and name.isascii()
        assert not set(name) & set("/\n: ") and name[0] not in ".-"
    assert log_name("llama-3.1_8b").startswith("llama-3.1_8b-")


def test_the_last_attempt_is_kept(log: ModelLog) -> None:
    assert (log.size, log.tail(), log.tail_bytes(), log.trim()) == (0, "", b"", 0)
    write(log, b"first\n")
    log.rotate()
    write(log, b"second\n")
    log.rotate()
    assert not log.path.exists() and log.previous.read_text() == "second\n"
    write(log, b"")
    log.rotate()
    assert log.previous.read_text() == "second\n", "an attempt that said nothing pushes nothing out"


# --- the last lines ---------------------------------------------------------------------------------------


def test_last_lines_are_fit_for_a_message(log: ModelLog) -> None:
    write(log, b"one\n\n\x1b[31mred\x1b[0m and \x1b]0;title\x07plain\r\n 1%\r 50%\r100% done\n\xff bad\nno end")
    assert log.last_lines() == ["one", "red and plain", "100% done", "\ufffd bad", "no end"]
    assert log.last_lines(2) == ["\ufffd bad", "no end"]
    assert log.last_lines(0) == []
    assert log.tail(1) == "no end"
    assert log.last_lines(9, limit=8) == ["no end"], "a line that begins before the limit is left out"
    assert log.tail_bytes(6) == b"no end"


# --- following --------------------------------------------------------------------------------------------


def test_following_over_growth_and_rotation(log: ModelLog) -> None:
    with log.follow() as follower:
        assert follower.read() == b""  # no file yet
        write(log, b"abc")
        assert (follower.read(2), follower.read(2), follower.read(2)) == (b"ab", b"c", b"")
        old = os.open(log.path, os.O_WRONLY | os.O_APPEND)
        log.rotate()
        assert follower.read() == b""
        write(log, b"new")
        os.write(old, b"last words")
        os.close(old)
        assert follower.read() == b"last words"
        assert follower.read() == b"new"
        assert follower.position == 3
    with log.follow(1) as follower:
        assert follower.read() == b"ew"


def test_last_words_before_the_rotation_was_seen(log: ModelLog, monkeypatch: pytest.MonkeyPatch) -> None:
    write(log, b"first")
    with log.follow() as follower:
        assert follower.read() == b"first"
        real = follower._rotated

        def late() -> bool:
            with open(log.path, "ab") as old:
                log.rotate()
                write(log, b"new")
                old.write(b"last words")
            return real()

        monkeypatch.setattr(follower, "_rotated", late)
        assert follower.read() == b"last words"
        monkeypatch.undo()
        assert follower.read() == b"new"


def test_a_child_that_truncates_its_own_log(log: ModelLog) -> None:
    """`> /dev/stdout` in a script does."""
    write(log, b"long before\n")
    with log.follow() as follower:
        assert follower.read() == b"long before\n"
        log.path.write_bytes(b"new\n")
        assert follower.read() == b"new\n"


# --- the cap ----------------------------------------------------------------------------------------------


def test_a_log_below_its_cap_is_left_alone(log: ModelLog, way: str) -> None:
    write(log, expected(0, log.cap))
    assert log.trim() == 0
    assert (log.size, log.end) == (log.cap, log.cap)


def test_the_newest_part_is_kept(log: ModelLog, way: str) -> None:
    total = 3 * log.cap + 777
    write(log, expected(0, total))
    before = log.path.stat().st_ino
    dropped = log.trim()
    assert log.path.stat().st_ino == before, "the child goes on writing to the same file"
    assert total - dropped == log.size
    assert log.cap // 2 <= log.size < log.cap // 2 + 4096
    assert on_disk(log) <= log.cap
    assert log.tail_bytes(100) == expected(total - 100, 100)
    assert log.trim() == 0
    if way != "rewrite":
        assert log.end == total
        write(log, expected(total, log.cap))
        assert log.trim() > 0 and log.end == total + log.cap
        with log.follow() as follower:
            data = follower.read(1 << 20)
        assert data == expected(log.end - log.size, log.size)
        assert log.path.stat().st_size == (log.size if way == "collapse" else log.end)


def test_a_reader_behind_the_cut_is_told(log: ModelLog, lossless: str) -> None:
    write(log, expected(0, 3 * log.cap))
    with log.follow() as follower:
        assert follower.read(1000) == expected(0, 1000)
        dropped = log.trim()
        assert follower.read(1000) == expected(dropped, 1000)
        assert follower.skipped == dropped - 1000
    with log.follow(dropped + 5) as follower:
        assert follower.read(10) == expected(dropped + 5, 10)
        assert follower.skipped == 0


def test_a_cut_in_the_middle_of_a_read_is_noticed(
    log: ModelLog, lossless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(log, expected(0, 3 * log.cap))
    real = os.pread

    def cut_first(fd: int, length: int, position: int) -> bytes:
        log.trim()
        return real(fd, length, position)

    with log.follow(100) as follower, monkeypatch.context() as patch:
        patch.setattr(os, "pread", cut_first)
        data = follower.read(1000)
        assert follower.position is not None and follower.skipped > 0
        assert data == expected(follower.position - 1000, 1000)


def test_a_flooding_child_loses_nothing(log: ModelLog, lossless: str) -> None:
    """Shortened as fast as can be while it writes; and a reader gets right bytes for every position."""
    count = 200_000
    wrong: list[tuple[int, bytes]] = []
    seen = 0
    over = threading.Event()

    def read() -> None:
        nonlocal seen
        with log.follow(0) as follower:
            while not wrong:
                finished = over.is_set()
                data = follower.read(8192)
                assert follower.position is not None
                begin = follower.position - len(data)
                if data != expected(begin, len(data)):
                    wrong.append((begin, data))
                seen += len(data) + follower.skipped
                follower.skipped = 0
                if finished and not data:
                    return

    reader = threading.Thread(target=read)
    reader.start()
    child = flood(log, count)
    cuts = 0
    try:
        while child.poll() is None:
            cuts += log.trim() > 0
        assert child.wait() == 0
    finally:
        child.kill()
        child.wait()
        over.set()
        reader.join()
    assert cuts >= 3, "or this tests little"
    assert not wrong, wrong[0][0]
    assert seen == count * LINE
    assert log.end == count * LINE
    with log.follow() as follower:
        kept = follower.read(1 << 24)
    assert kept == expected(count * LINE - len(kept), len(kept))
    log.trim()
    assert log.size <= log.cap and on_disk(log) <= log.cap + 65536


def test_where_only_rewriting_works_order_and_end_are_right(log: ModelLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfiles, "_WAYS", ALL["rewrite"])
    child = flood(log, 50_000)
    while child.poll() is None:
        log.trim()
    assert child.wait() == 0
    log.trim()
    assert log.size <= log.cap
    # Rewriting is the one way with a window in which a write can be lost; what is kept is in order all the same.
    kept = [line for line in log.last_lines(1000) if len(line) == len("line 0000049999")]
    assert kept == sorted(kept) and kept


def test_refusals_fall_through_to_the_next_way(log: ModelLog, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refuse(fd: int, upto: int) -> bool:
        tried.append(upto)
        return False

    monkeypatch.setattr(logfiles, "_WAYS", (refuse, refuse, logfiles._rewrite))
    write(log, expected(0, 2 * log.cap))
    assert log.trim() == tried[0] == tried[1]


def test_without_attributes_a_log_is_not_collapsed(log: ModelLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", unsupported)
    monkeypatch.setattr(os, "getxattr", unsupported)
    write(log, expected(0, 2 * log.cap))
    assert log.trim() > 0
    assert log.end == 2 * log.cap == log.path.stat().st_size
    assert log.tail_bytes(50) == expected(2 * log.cap - 50, 50)


def test_a_cut_that_was_killed_half_way_counts_as_done(log: ModelLog) -> None:
    write(log, expected(0, 100))
    os.setxattr(log.path, logfiles._ATTRIBUTE, b"4096+8192")
    assert log.end == 4096 + 8192 + 100


def test_two_who_shorten_do_it_once(log: ModelLog) -> None:
    write(log, expected(0, 4 * log.cap))
    cut: list[int] = []
    threads = [threading.Thread(target=lambda: cut.append(log.trim())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(cut)[:-1] == [0] * 7
    assert log.size == 4 * log.cap - max(cut)
    assert log.tail_bytes(64) == expected(4 * log.cap - 64, 64)
    write(log, expected(0, 2 * log.cap))
    with open(log.path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert log.trim() == 0
    assert log.trim() > 0

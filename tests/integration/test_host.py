"""What process trees hold of system memory, measured on real processes, and the host's figures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qmflask.host import Host
from qmflask.memory.samples import MIB

HOLDER = """
import mmap, sys
anonymous = bytearray(b"x") * (int(sys.argv[1]) << 20)
with open(sys.argv[2], "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sum(pages[place] for place in range(0, len(pages), 4096))
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(anonymous: int, file: Path) -> Iterator[int]:
    """A process that holds `anonymous` MiB and has the whole file mapped."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(anonymous), str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin and process.stdout
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.write_bytes(os.urandom(48 * MIB))
    return path


def test_a_process_holds_its_anonymous_memory_and_its_share_of_files(model_file: Path) -> None:
    with holding(64, model_file) as pid:
        found = Host().tree([pid])
    assert found is not None
    assert 64 * MIB <= found.anonymous < 80 * MIB
    assert 48 * MIB <= found.file < 64 * MIB
    assert found.held == found.anonymous + found.file + found.shared + found.swapped
    assert found.returns < 80 * MIB, "mapped pages are available to others while they are mapped"


def test_two_that_map_the_same_file_share_it(model_file: Path) -> None:
    with holding(8, model_file) as first, holding(8, model_file) as second:
        one, both = Host().tree([first]), Host().tree([first, second])
    assert one is not None and both is not None
    assert 24 * MIB <= one.file < 40 * MIB
    assert 48 * MIB <= both.file < 64 * MIB


def test_forked_workers_share_what_they_have_not_written() -> None:
    script = (
        "import os, sys\n"
        "held = bytearray(b'x') * (64 << 20)\n"
        "pid = os.fork()\n"
        "if pid == 0: sys.stdin.read(); os._exit(0)\n"
        "print(pid, flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    try:
        child = int(process.stdout.readline())
        found = Host().tree([process.pid, child])
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()
    assert found is not None
    assert 64 * MIB <= found.anonymous < 90 * MIB, "not twice"


def test_processes_that_are_gone_count_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    host = Host()
    assert host.tree([process.pid]) is None
    assert host.tree([]) is None
    assert host.name_of(process.pid) is None
    mixed = host.tree([process.pid, os.getpid()])
    assert mixed is not None and mixed.held > MIB


def test_without_the_kernels_sum_the_status_file_will_do(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text(
        "Name:\tserver\nRssAnon:\t    2048 kB\nRssFile:\t 1024 kB\nRssShmem:\t   0 kB\nVmSwap:\t 512 kB\nThreads:\t3\n"
    )
    found = Host(tmp_path).tree([7, 8])
    assert found is not None
    assert (found.anonymous, found.file, found.swapped) == (2 * MIB, MIB, MIB // 2)


def test_kernel_kills(tmp_path: Path) -> None:
    assert Host(tmp_path).oom_kills() is None
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 3\n")
    assert Host(tmp_path).oom_kills() == 3


def test_host_memory_and_performance() -> None:
    host = Host()
    memory = host.memory()
    assert 0 < memory.available <= memory.total
    assert memory.used == memory.total - memory.available
    assert host.performance().cores == (), "nothing to compare with yet"
    seen = host.performance()
    assert len(seen.cores) == os.cpu_count()
    assert all(0 <= core <= 100 for core in seen.cores)
    assert len(seen.load) == 3
    assert any(interface.name == "lo" for interface in seen.network)
    assert host.name_of(os.getpid())


def test_who_holds_most_of_system_memory() -> None:
    host = Host()
    found = host.largest(set(), 3)
    assert len(found) == 3 and [size for _, size in found] == sorted((size for _, size in found), reverse=True)
    assert os.getpid() in [pid for pid, _ in host.largest(set(), 1 << 20)]
    assert os.getpid() not in [pid for pid, _ in host.largest({os.getpid()}, 1 << 20)]

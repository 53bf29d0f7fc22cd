"""What the host tells: system memory, what a process tree holds of it, processors, load and network."""

from __future__ import annotations

import heapq
import logging
import os
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from qmflask.memory.samples import HostMemory, TreeMemory

log = logging.getLogger(__name__)

KIB = 1024


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface and its bytes since boot."""

    name: str
    received: int
    sent: int


@dataclass(frozen=True, slots=True)
class Performance:
    """One line of the performance page. `cores` is per cent busy since the last look, empty at the first."""

    memory: HostMemory
    cores: tuple[float, ...]
    load: tuple[float, float, float]
    network: tuple[Interface, ...]


class Host:
    """Reads the host; holds nothing but the processor times of the last look. `proc` stands for `/proc` (tests)."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._times: list[tuple[float, float]] = []

    def memory(self) -> HostMemory:
        """System memory now."""
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        return HostMemory(int(memory.total), int(memory.available), int(swap.total), int(swap.used))

    def tree(self, pids: Iterable[int]) -> TreeMemory | None:
        """System memory of these processes together; None if none of them can be read.

        Reading costs about a millisecond per gigabyte mapped: on a sampling thread, never in a request.
        """
        found: TreeMemory | None = None
        for pid in pids:
            one = self._process(pid)
            if one is not None:
                found = one if found is None else found + one
        return found

    def performance(self) -> Performance:
        """Memory, processors, load and network."""
        network = psutil.net_io_counters(pernic=True)
        return Performance(
            memory=self.memory(),
            cores=self._cores(),
            load=psutil.getloadavg(),
            network=tuple(
                Interface(name, int(count.bytes_recv), int(count.bytes_sent)) for name, count in sorted(network.items())
            ),
        )

    def oom_kills(self) -> int | None:
        """How many processes the kernel has killed for lack of memory since boot; None where it does not tell."""
        for line in _lines(self._proc / "vmstat"):
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
        return None

    def largest(self, skip: Set[int], count: int) -> list[tuple[int, int]]:
        """Pid and resident bytes of the processes that hold most, largest first, without those of `skip`."""
        found = []
        for process in psutil.process_iter(["memory_info"]):
            memory = process.info["memory_info"]
            if memory is not None and memory.rss and process.pid not in skip:
                found.append((process.pid, int(memory.rss)))
        return heapq.nlargest(count, found, key=lambda item: item[1])

    def name_of(self, pid: int) -> str | None:
        """The process's name, for people; None when it is gone."""
        try:
            return psutil.Process(pid).name()
        except psutil.Error:
            return None

    def _process(self, pid: int) -> TreeMemory | None:
        """One process: the kernel's own sum over its mappings, shared pages divided among their users."""
        sums = _fields(self._proc / str(pid) / "smaps_rollup")
        if "Pss_Anon" in sums:
            return TreeMemory(
                anonymous=sums["Pss_Anon"] + sums.get("Private_Hugetlb", 0),
                file=sums.get("Pss_File", 0),
                shared=sums.get("Pss_Shmem", 0),
                swapped=sums.get("SwapPss", 0),
            )
        # Another user's process, or an old kernel: without shares, so shared pages count in full.
        status = _fields(self._proc / str(pid) / "status")
        if "RssAnon" not in status:
            return None
        return TreeMemory(
            status["RssAnon"], status.get("RssFile", 0), status.get("RssShmem", 0), status.get("VmSwap", 0)
        )

    def _cores(self) -> tuple[float, ...]:
        now = [_busy(times) for times in psutil.cpu_times(percpu=True)]
        before, self._times = self._times, now
        if len(before) != len(now):
            return ()
        return tuple(
            round(100 * (busy - busy_before) / (total - total_before), 1) if total > total_before else 0.0
            for (busy, total), (busy_before, total_before) in zip(now, before, strict=True)
        )


def _busy(times: Any) -> tuple[float, float]:
    """Seconds (busy, all) of one core; guests are in the user's time already."""
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - times.idle - getattr(times, "iowait", 0.0), total


def _fields(path: Path) -> dict[str, int]:
    """`Name:  123 kB` lines as bytes; empty when the process is gone or belongs to somebody else."""
    found = {}
    for line in _lines(path):
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdecimal():
            found[name] = int(words[0]) * KIB
    return found


def machine(proc: Path = Path("/proc")) -> dict[str, dict[str, Any]]:
    """What does not change while the machine is up: its system and its processors."""
    names = os.uname()
    models = (line.partition(":")[2].strip() for line in _lines(proc / "cpuinfo") if line.startswith("model name"))
    return {
        "system": {"name": names.nodename, "os": names.sysname, "release": names.release, "machine": names.machine},
        "cpu": {"name": next(models, ""), "cores": psutil.cpu_count(logical=False), "threads": psutil.cpu_count()},
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []

"""Asks a llama-server what it allocates: starts it, reads the buffer lines of its log, ends it."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from qmflask.endings import exit_words
from qmflask.memory.estimate import Row
from qmflask.memory.samples import MIB
from qmflask.processes import Child, SpawnError, SpawnLock, signal_tree, spawn

_LINE = re.compile(r"(\S+) +(model|KV|RS|output|compute) buffer size = +([\d.]+) MiB")
_NAMES = {
    "model": "weights",
    "KV": "cache",
    "RS": "recurrent state",
    "output": "output buffer",
    "compute": "compute buffer",
}
#: A projector loads apart; what it takes with its scratch memory is told before, and where just then.
_PROJECTOR = re.compile(r"worst-case memory usage of mmproj is ([\d.]+) MiB")
_PROJECTOR_AT = re.compile(r"CLIP using (\S+) backend")
#: Buffers of these devices are system memory; so is what pins host memory for a card (CUDA_Host).
_HOST = ("CPU", "AMX", "BLAS", "ACCEL")
_UP = re.compile(r"listening on|all slots are idle")
#: Shows the buffer lines, which the default does not.
VERBOSE = ("--log-verbosity", "4")


class AskError(Exception):
    """Raised when a server could not be asked; the message has the end of its log."""


def ask(argv: Sequence[str], env: Mapping[str, str], timeout: float) -> list[Row]:
    """Start the command (with `VERBOSE` added), wait until it has loaded, end it, and sum up its buffers.

    This takes as long as a load, and as much memory. Raises AskError.
    """
    with tempfile.TemporaryDirectory(prefix="qmflask-ask-") as folder:
        log_file = Path(folder) / "log"
        token = f"ask-{secrets.token_hex(8)}"
        with SpawnLock(Path(folder) / "lock") as lock:
            if not lock.try_acquire():
                raise AskError("the lock file in a new folder is taken")
            try:
                child = spawn([*argv, *VERBOSE], {**os.environ, **env}, token, log_file, lock.fd)
            except SpawnError as error:
                raise AskError(str(error)) from None
        try:
            return _watch(child, log_file, timeout)
        finally:
            signal_tree(child.pid, token, signal.SIGKILL)
            child.popen.wait()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def buffer_rows(log: str) -> list[Row]:
    """The table of a llama-server's log: what it allocated, by kind."""
    vram: dict[str, int] = {}
    ram: dict[str, int] = {}
    for device, kind, size in _LINE.findall(log):
        sums = ram if _is_host(device) else vram
        sums[kind] = sums.get(kind, 0) + round(float(size) * MIB)
    rows = [Row(name, vram.get(kind, 0), ram.get(kind, 0)) for kind, name in _NAMES.items() if kind in vram | ram]
    if (told := _PROJECTOR.search(log)) is not None and (place := _PROJECTOR_AT.search(log)) is not None:
        size = round(float(told[1]) * MIB)
        rows.append(Row("projector", 0, size) if _is_host(place[1]) else Row("projector", size, 0))
    return rows


def _is_host(device: str) -> bool:
    return device.startswith(_HOST) or device.endswith("_Host")


def _watch(child: Child, log_file: Path, timeout: float) -> list[Row]:
    deadline = time.monotonic() + timeout
    while True:
        ended = child.popen.poll() is not None
        log = log_file.read_text(encoding="utf-8", errors="replace")
        if _UP.search(log):
            rows = buffer_rows(log)
            if rows:
                return rows
            raise AskError("the server says nothing about its buffers; is it a llama-server?")
        if ended or time.monotonic() > deadline:
            tail = "\n".join(log.splitlines()[-5:])
            what = f"ended with {exit_words(child.popen.returncode)}" if ended else "was not up in time"
            raise AskError(f"the server {what}:\n{tail}")
        time.sleep(0.02)

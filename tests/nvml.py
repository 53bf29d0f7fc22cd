"""The stand-in NVIDIA driver for a whole service: built once, and fed from the scripted servers' memory ledger."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

SOURCE = Path(__file__).parent / "parts" / "fake_nvml.c"
#: How often the mirror looks at the ledger; a driver is slower.
EVERY = 0.004


def build(folder: Path) -> Path:
    """Compile the stand-in into `folder`; returns the folder for LD_LIBRARY_PATH."""
    library = folder / "libnvidia-ml.so.1"
    command = ["gcc", "-O2", "-Wall", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    return folder


class FakeCard:
    """One card of `total_mb` that uses what the ledger has booked plus `foreign` (pid -> MiB); a thread mirrors it."""

    def __init__(self, folder: Path, library: Path, total_mb: int) -> None:
        self.ledger = folder / "ledger.json"
        self.state = folder / "nvml.txt"
        self.total_mb = total_mb
        self.foreign: dict[int, int] = {}
        self.extra: list[str] = []
        self._library = library
        self._stop = threading.Event()
        self._writing = threading.Lock()
        self.write()
        self._thread = threading.Thread(target=self._mirror, name="fake card")
        self._thread.start()

    def environment(self) -> dict[str, str]:
        """For the service."""
        return {"LD_LIBRARY_PATH": str(self._library), "FAKE_NVML": str(self.state)}

    def write(self) -> None:
        """What the driver reports from now on. Memory of the dead is used by nobody until it is released."""
        try:
            entries = json.loads(self.ledger.read_text())
        except FileNotFoundError:
            entries = {}
        booked = {int(pid): int(entry["mb"]) for pid, entry in entries.items()}
        used = sum(booked.values()) + sum(self.foreign.values())
        lines = [f"gpu 0 total={self.total_mb} used={used} uuid=GPU-fake-0 name=Fake"]
        living = {pid: mb for pid, mb in booked.items() if os.path.exists(f"/proc/{pid}")}
        for pid, mb in {**living, **self.foreign}.items():
            lines.append(f"proc 0 pid={pid} used={mb}")
        with self._writing:  # the mirror and a test may both want to
            draft = self.state.with_suffix(".new")
            draft.write_text("\n".join([*lines, *self.extra]) + "\n")
            os.replace(draft, self.state)

    def _mirror(self) -> None:
        while not self._stop.wait(EVERY):
            self.write()

    def close(self) -> None:
        """End the mirror."""
        self._stop.set()
        self._thread.join()

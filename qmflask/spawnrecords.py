"""What is known of each live process tree, in a file beside its spawn lock: for the day when the store is lost."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from qmflask.processes import Identity

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpawnRecord:
    """One tree, as its row in the store was when it was spawned, and again when it became ready."""

    model: str
    ready: bool
    boot_id: str
    token: str
    pid: int
    start_ticks: int
    port: int | None
    proxy: str | None
    launch_hash: str | None
    cmd: str | None
    cmd_stop: str | None
    unload_timeout: float
    started_at: int
    deadline: int
    load_ms: float | None

    @property
    def identity(self) -> Identity:
        """Its first process."""
        return Identity(self.pid, self.start_ticks, self.boot_id)


def write(path: Path, record: SpawnRecord) -> None:
    """Replace the record; a disk that takes none costs only what it is for."""
    temporary = path.with_suffix(".new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(record), file)
        os.replace(temporary, path)
    except OSError as error:
        log.warning("model %s: its spawn record cannot be written: %s", record.model, error)


def living(folder: Path) -> list[SpawnRecord]:
    """The records whose first process lives; what cannot be read is passed over, its tree is then nobody's."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = SpawnRecord(**json.loads(path.read_text(encoding="utf-8")))
            alive = record.identity.alive()
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s cannot be read: %s", path, error)
            continue
        if alive:
            found.append(record)
    return found

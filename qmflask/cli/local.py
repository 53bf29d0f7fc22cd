"""What can be known without a running service: the state directory's rows and logs, and the configuration's names."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from qmflask import processes
from qmflask.config import Config, ConfigError
from qmflask.configfiles import load_path, read_resolved
from qmflask.names import Names
from qmflask.overview import overview
from qmflask.places import is_there, source_path, state_path
from qmflask.policy.rules import make_rules
from qmflask.processes import Identity
from qmflask.states import DOWN
from qmflask.store import Store, StoreError, reading
from qmflask.store.reading import Status


def state_directory() -> Path:
    """Where the service that these variables would start keeps its state."""
    return state_path(source_path())


@contextmanager
def opened() -> Iterator[Store]:
    """The store of the state directory. Raises ClickException where there is none, or it cannot be read."""
    folder = state_directory()
    if not is_there(folder / "state.db"):
        raise click.ClickException(f"and there is no state in {folder}; --state names another directory")
    try:
        store = Store(folder, processes.boot_id())
    except (StoreError, OSError) as error:
        raise click.ClickException(f"the state in {folder} cannot be read: {error}") from None
    try:
        yield store
    finally:
        store.close()


def look() -> dict[str, Any]:
    """What `/api/status` would say, from the rows; models whose process has ended are shown as stopped."""
    with opened() as store, store.read() as tx:
        status = reading.status(tx)
    config = _config_of(status)
    charges = make_rules(config, status.sizes).charges
    body = overview(_without_the_dead(status), config, charges, time.monotonic_ns(), time.time())
    body["service"]["leader"] = None
    return body


def survivors() -> dict[str, int]:
    """Models whose processes run although nobody serves: model -> pid. Empty where there is no state."""
    if not is_there(state_directory() / "state.db"):
        return {}
    with opened() as store, store.read() as tx:
        rows = reading.processes(tx).values()
    return {
        row.model: row.pid for row in rows if row.pid and row.state not in DOWN and _lives(row.pid, row.start_ticks)
    }


def config_in_force() -> Config | None:
    """The configuration that the variables name; None when it cannot be loaded."""
    try:
        return load_path(source_path(), os.environ).config
    except ConfigError:
        return None


def model_id(name: str) -> str:
    """The id of the model that a name means, by the configuration's file; the name itself if nothing is known of it."""
    config = config_in_force()
    meaning = Names(config).resolve(name) if config else None
    return meaning.id if meaning is not None and meaning.kind == "model" else name


def _config_of(status: Status) -> Config:
    generation = status.scheduler.config_generation
    try:
        return read_resolved(state_directory(), generation) if generation else Config()
    except (OSError, ValueError):
        return Config()


def _without_the_dead(status: Status) -> Status:
    for name, row in list(status.processes.items()):
        if row.state not in DOWN and not _lives(row.pid, row.start_ticks):
            del status.processes[name]
    status.requests.clear()  # their workers are gone
    status.swaps.clear()
    return status


def _lives(pid: int | None, start_ticks: int | None) -> bool:
    return pid is not None and (found := Identity.of(pid)) is not None and found.start_ticks == start_ticks

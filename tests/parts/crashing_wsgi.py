"""qmflask whose processes strike themselves where the file `CRASH_PLAN` says: `point times signal`.

The signal HANG is none: the thread stands still for a while.

Points are reached right after the commit of a phase of a swap (`draining`, `stopping`, `reclaim`, `probing`, `ready`),
after the row says `starting` but before the spawn (`before-spawn`), after the spawn but before its pid is committed
(`after-spawn`), or inside a write transaction of a worker that does not lead (`in-transaction`). Each blow is a line
in `CRASH_PLAN`.struck: who.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qmflask import processes
from qmflask.app import app
from qmflask.states import Phase, State
from qmflask.store import Store, scheduling

PLAN = Path(os.environ["CRASH_PLAN"])
#: Longer than a leader may hang, in seconds.
HANG = 5.0

_due: set[str] = set()


def strike(point: str) -> None:
    """Send ourselves the planned signal if this is the planned point and it has not been done often enough."""
    try:
        at, times, name = PLAN.read_text().split()
    except FileNotFoundError:
        return
    struck = PLAN.with_suffix(".struck")
    if point != at or (struck.exists() and len(struck.read_text().splitlines()) >= int(times)):
        return
    with struck.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if name == "HANG":
        time.sleep(HANG)
        return
    os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
    time.sleep(0.5)  # another thread may have taken the signal: we must not run on before it reaches us


def _mark(point: str) -> None:
    _due.add(point)


def _leads(tx: sqlite3.Connection) -> bool:
    leader = tx.execute("SELECT leader FROM scheduler").fetchone()[0] or ""
    return bool(leader.startswith(f"{os.getpid()}-"))


def _install() -> None:
    set_phase, set_state = scheduling.set_phase, scheduling.set_state
    write, spawn = Store.write, processes.spawn

    def phase(tx: sqlite3.Connection, swap: int, new: Phase, **columns: Any) -> None:
        set_phase(tx, swap, new, **columns)
        _mark(new.value)

    def state(tx: sqlite3.Connection, model: str, new: State, *args: Any, **columns: Any) -> None:
        set_state(tx, model, new, *args, **columns)
        _mark("before-spawn" if new is State.STARTING else new.value)

    @contextmanager
    def committing(self: Store, generation: int | None = None) -> Iterator[sqlite3.Connection]:
        with write(self, generation) as tx:
            yield tx
            if generation is None and not _leads(tx):
                strike("in-transaction")
        if _due and generation is not None:
            points = sorted(_due)
            _due.clear()
            for point in points:
                strike(point)

    def spawned(*args: Any, **more: Any) -> processes.Child:
        child = spawn(*args, **more)
        strike("after-spawn")
        return child

    scheduling.set_phase, scheduling.set_state = phase, state
    Store.write, processes.spawn = committing, spawned  # type: ignore[method-assign]


_install()
application = app

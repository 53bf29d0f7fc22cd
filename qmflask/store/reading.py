"""Reading the store: snapshots for decisions and rows for status pages; writes nothing."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any

from qmflask.policy.rules import Rules
from qmflask.policy.schedule import RequestView, Snapshot
from qmflask.states import DOWN, State
from qmflask.store.rows import ProcessRow, RequestRow, SchedulerRow, SwapRow, WorkerRow


def scheduler(tx: sqlite3.Connection) -> SchedulerRow:
    """The one row of `scheduler`."""
    return SchedulerRow.of(tx.execute("SELECT * FROM scheduler").fetchone())


def processes(tx: sqlite3.Connection) -> dict[str, ProcessRow]:
    """All process rows by model."""
    return {row["model"]: ProcessRow.of(row) for row in tx.execute("SELECT * FROM processes")}


def process(tx: sqlite3.Connection, model: str) -> ProcessRow | None:
    """One process row, None for a model that was never started."""
    row = tx.execute("SELECT * FROM processes WHERE model = ?", (model,)).fetchone()
    return ProcessRow.of(row) if row else None


def proxies(tx: sqlite3.Connection) -> dict[str, str | None]:
    """Where models listen, or last did."""
    return dict(tx.execute("SELECT model, proxy FROM processes").fetchall())


def swaps(tx: sqlite3.Connection) -> list[SwapRow]:
    """Open swaps, oldest first."""
    return [SwapRow.of(row) for row in tx.execute("SELECT * FROM swaps ORDER BY id")]


def requests(tx: sqlite3.Connection, *states: str) -> list[RequestRow]:
    """Requests in the given states, in arrival order."""
    marks = ",".join("?" * len(states))
    query = f"SELECT * FROM requests WHERE state IN ({marks}) ORDER BY arrival, id"
    return [RequestRow.of(row) for row in tx.execute(query, states)]


def workers(tx: sqlite3.Connection) -> list[WorkerRow]:
    """Registered workers, alive or not."""
    return [WorkerRow.of(row) for row in tx.execute("SELECT * FROM workers ORDER BY started_wall, id")]


def sample(tx: sqlite3.Connection) -> dict[str, Any]:
    """The newest memory sample; empty before the first."""
    row = tx.execute("SELECT at, body FROM samples").fetchone()
    return {"at": row["at"], **json.loads(row["body"])} if row else {}


def answered(tx: sqlite3.Connection) -> set[tuple[str, int]]:
    """(model, when it was started) of every start that has answered a request: from then on its size counts."""
    rows = tx.execute("SELECT model, started_at FROM processes WHERE answered AND state IN ('ready', 'draining')")
    return {(row["model"], row["started_at"]) for row in rows}


def learned_sizes(tx: sqlite3.Connection) -> dict[str, tuple[int, int]]:
    """Learned peaks (vram, ram) in bytes by launch hash."""
    return {row["launch_hash"]: (row["vram"], row["ram"]) for row in tx.execute("SELECT * FROM sizes")}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a waiting request stands: its place in the queue (1 is next), its model's state, and since when that
    state is `starting` (monotonic ns, 0 if it is not)."""

    position: int
    state: State
    starting_since: int


def place(tx: sqlite3.Connection, request: int, model: str) -> Place:
    """Where one waiting request stands."""
    query = "SELECT COUNT(*) FROM requests WHERE state = 'queued' AND kind <> 'unload' AND id <= ?"
    position = tx.execute(query, (request,)).fetchone()[0]
    row = tx.execute("SELECT state, started_at FROM processes WHERE model = ?", (model,)).fetchone()
    state = State(row["state"]) if row else State.STOPPED
    return Place(position, state, row["started_at"] if row and state is State.STARTING else 0)


@dataclass(frozen=True, slots=True)
class SelectorLoad:
    """What a selector looks at: states of the models that are not down, and its requests at other workers by model."""

    states: dict[str, State]
    others: dict[str, int]


def selector_load(tx: sqlite3.Connection, selector: str, worker: str) -> SelectorLoad:
    """What to choose a target by, for `worker`, which knows its own requests."""
    states = {row["model"]: State(row["state"]) for row in tx.execute("SELECT model, state FROM processes")}
    query = (
        "SELECT model, COUNT(*) AS n FROM requests WHERE kind IN ('infer', 'peer') AND worker <> ?"
        " AND json_extract(detail, '$.selector') = ? GROUP BY model"
    )
    others = {row["model"]: row["n"] for row in tx.execute(query, (worker, selector))}
    return SelectorLoad({model: state for model, state in states.items() if state not in DOWN}, others)


def leases(tx: sqlite3.Connection) -> dict[str, int]:
    """Granted requests by model."""
    return {model: count for model, (count, _) in _granted(tx).items()}


def _granted(tx: sqlite3.Connection) -> dict[str, tuple[int, int]]:
    """How many requests of a model are granted, and when the newest was."""
    query = "SELECT model, COUNT(*), MAX(granted_at) FROM requests WHERE state = 'granted' GROUP BY model"
    return {model: (count, newest) for model, count, newest in tx.execute(query)}


def snapshot(tx: sqlite3.Connection, rules: Rules, *, whole: bool) -> Snapshot:
    """What a decision looks at. `whole` adds queue and lease counts; without them it may be cached by schedule_version,
    because nothing else in it changes without a bump."""
    granted = _granted(tx) if whole else {}
    views = {
        row.model: row.view(*granted.get(row.model, (0, 0)), rules.launch_hashes.get(row.model))
        for row in processes(tx).values()
        if row.state is not State.STOPPED or row.failure_code is not None
    }
    queue: list[RequestView] = []
    in_system = {model: count for model, (count, _) in granted.items()}
    if whole:
        for request in requests(tx, "queued"):
            if request.kind not in ("infer", "load", "preload"):
                continue
            queue.append(request.view())
            if request.kind == "infer":
                in_system[request.model] = in_system.get(request.model, 0) + 1
    memory = sample(tx)
    return Snapshot(
        models=rules.models,
        policy=rules.policy,
        processes=views,
        queue=queue,
        swaps=[row.view() for row in swaps(tx)],
        in_system=in_system,
        vram_ceiling=memory.get("vram_ceiling"),
        ram_ceiling=memory.get("ram_ceiling"),
    )


@dataclass(frozen=True, slots=True)
class Status:
    """Everything status pages show, from one read."""

    scheduler: SchedulerRow
    processes: dict[str, ProcessRow]
    swaps: list[SwapRow]
    requests: list[RequestRow]
    workers: list[WorkerRow]
    sample: dict[str, Any]
    sizes: dict[str, tuple[int, int]]


def status(tx: sqlite3.Connection) -> Status:
    """The whole state in one consistent read."""
    return Status(
        scheduler=scheduler(tx),
        processes=processes(tx),
        swaps=swaps(tx),
        requests=requests(tx, "queued", "granted", "pending"),
        workers=workers(tx),
        sample=sample(tx),
        sizes=learned_sizes(tx),
    )

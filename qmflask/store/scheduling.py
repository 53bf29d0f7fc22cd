"""The leader's side of the store: terms, states, swaps and grants. Each function runs inside a leader's transaction."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from qmflask.errors import QmflaskError
from qmflask.states import Phase, State, check_transition
from qmflask.store import counters, reading
from qmflask.store.database import Store
from qmflask.store.rows import ProcessRow
from qmflask.store.schema import NEW_ID

log = logging.getLogger(__name__)


def take_office(store: Store, worker: str, now: int) -> int:
    """Begin a new term for `worker`; returns its generation, on which every later write is conditional."""
    with store.write() as tx:
        row = tx.execute(
            "UPDATE scheduler SET generation = generation + 1, leader = ?, heartbeat = ?,"
            " schedule_version = schedule_version + 1 RETURNING generation",
            (worker, now),
        ).fetchone()
        counters.count(tx, "leader_changes")
        return int(row["generation"])


def leave_office(store: Store, generation: int) -> None:
    """Write that nobody leads, if the term is still this one."""
    with store.write() as tx:
        tx.execute("UPDATE scheduler SET leader = NULL, heartbeat = 0 WHERE generation = ?", (generation,))


def beat(tx: sqlite3.Connection, now: int) -> None:
    """The leader lives."""
    tx.execute("UPDATE scheduler SET heartbeat = ?", (now,))


def bump(tx: sqlite3.Connection) -> None:
    """Tell every cached snapshot that it is old."""
    tx.execute("UPDATE scheduler SET schedule_version = schedule_version + 1")


def set_state(tx: sqlite3.Connection, model: str, new: State, reason: str | None, **columns: Any) -> None:
    """The one writer of a process's state: checks the table, stores term, reason and time, bumps the version.

    `columns` are further columns of `processes` to set. Raises ValueError for a transition that the table lacks.
    """
    row = tx.execute("SELECT state FROM processes WHERE model = ?", (model,)).fetchone()
    if row is None:
        tx.execute("INSERT INTO processes (model) VALUES (?)", (model,))
    check_transition(State(row["state"]) if row else State.STOPPED, new)
    if new is State.STOPPING:
        columns = {"stop_reason": reason, **columns}
    columns = {"state": new.value, "reason": reason, "changed_wall": time.time(), **columns}
    update_process(tx, model, **columns)
    tx.execute("UPDATE processes SET generation = (SELECT generation FROM scheduler) WHERE model = ?", (model,))
    _count(tx, model, new, reason, columns)
    bump(tx)


def restore(tx: sqlite3.Connection, model: str, state: State, reason: str, **columns: Any) -> None:
    """Enter a process that lives but has no row: the one state that no transition leads to. Its idle time begins."""
    tx.execute("INSERT OR IGNORE INTO processes (model) VALUES (?)", (model,))
    columns = {"state": state.value, "reason": reason, "changed_wall": time.time(), **columns}
    update_process(tx, model, idle_since=time.monotonic_ns(), **columns)
    tx.execute("UPDATE processes SET generation = (SELECT generation FROM scheduler) WHERE model = ?", (model,))
    bump(tx)


def _count(tx: sqlite3.Connection, model: str, new: State, reason: str | None, columns: Mapping[str, Any]) -> None:
    """What operators count of states: starts, loads with their time, stops by cause, failed starts by code."""
    tally = counters.Tally()
    if new is State.STARTING:
        tally.add("model_starts", (model,))
    elif new is State.READY and columns.get("load_ms") is not None:
        tally.observe("model_load_seconds", (model,), columns["load_ms"] / 1000)
    elif new is State.STOPPING:
        tally.add("model_stops", (model, stop_cause(reason)))
        if columns.get("failure_code"):
            tally.add("model_start_failures", (model, str(columns["failure_code"])))
    counters.write(tx, tally)


def stop_cause(reason: str | None) -> str:
    """The kind of a stop, from its reason for people: few words, fit for a label."""
    text = (reason or "").lower()
    return next((cause for mark, cause in _CAUSES if mark in text), "other")


#: Looked for in this order: a reason may name the model it was stopped for.
_CAUSES = (
    ("evicted for", "evicted"),
    ("exited by itself", "crash"),
    ("out of memory", "out_of_memory"),
    ("start failed", "start_failed"),
    ("aborted", "aborted"),
    ("pressure", "pressure"),
    ("ttl", "ttl"),
    ("unload", "unload"),
    ("service stopped", "shutdown"),
    ("configuration", "reload"),
    ("changed", "reload"),
)


def update_process(tx: sqlite3.Connection, model: str, **columns: Any) -> None:
    """Set columns of a process row other than its state."""
    names = ", ".join(f"{name} = ?" for name in columns)
    tx.execute(f"UPDATE processes SET {names} WHERE model = ?", (*columns.values(), model))


def forget_failure(tx: sqlite3.Connection, model: str) -> None:
    """End a back-off: success, a changed configuration or an explicit load."""
    update_process(tx, model, failure_code=None, failure_message=None, retry_at=0, attempts=0)
    bump(tx)


def idle(tx: sqlite3.Connection, model: str) -> bool:
    """True when nobody holds a lease on the model; the check that stands beside every stop for others' sake."""
    query = "SELECT NOT EXISTS (SELECT 1 FROM requests WHERE model = ? AND state = 'granted')"
    return bool(tx.execute(query, (model,)).fetchone()[0])


def open_swap(
    tx: sqlite3.Connection,
    target: str,
    victims: Sequence[str],
    blockers: Sequence[str],
    reason: str,
    now: int,
) -> int:
    """Record a swap in its first phase; returns its id. The target is stamped as used."""
    tx.execute("INSERT OR IGNORE INTO processes (model) VALUES (?)", (target,))
    update_process(tx, target, used_at=now)
    cursor = tx.execute(
        "INSERT INTO swaps (target, victims, blockers, reason, phase, created_at, generation)"
        " VALUES (?, ?, ?, ?, ?, ?, (SELECT generation FROM scheduler))",
        (target, json.dumps(list(victims)), json.dumps(list(blockers)), reason, Phase.DRAINING.value, now),
    )
    counters.count(tx, "swaps", target)
    bump(tx)
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def set_phase(tx: sqlite3.Connection, swap: int, phase: Phase, **columns: Any) -> None:
    """Write the phase before its work is done."""
    columns = {"phase": phase.value, **columns}
    names = ", ".join(f"{name} = ?" for name in columns)
    tx.execute(f"UPDATE swaps SET {names} WHERE id = ?", (*columns.values(), swap))
    bump(tx)


def close_swap(tx: sqlite3.Connection, swap: int) -> None:
    """The swap is over, whatever came of it."""
    tx.execute("DELETE FROM swaps WHERE id = ?", (swap,))
    bump(tx)


def grant(tx: sqlite3.Connection, ids: Iterable[int], model: str, now: int, *, paid: bool) -> set[str]:
    """Grant queued requests their leases; returns the workers to wake. Rows that have left meanwhile are passed over.

    Loads and preloads want no lease: they are done.
    """
    update_process(tx, model, used_at=now)
    woken: set[str] = set()
    for request in ids:
        row = tx.execute(
            "UPDATE requests SET state = CASE kind WHEN 'infer' THEN 'granted' ELSE 'done' END, granted_at = ?,"
            " paid = ? WHERE id = ? AND state = 'queued' RETURNING worker",
            (now, int(paid), request),
        ).fetchone()
        if row is not None and row["worker"]:
            woken.add(row["worker"])
    tx.execute("DELETE FROM requests WHERE worker IS NULL AND state = 'done'")
    return woken


def waiting_for(tx: sqlite3.Connection, model: str) -> list[int]:
    """Ids of the queued requests (and loads) for a model, in arrival order."""
    query = "SELECT id FROM requests WHERE model = ? AND state = 'queued' AND kind <> 'unload' ORDER BY arrival, id"
    return [row["id"] for row in tx.execute(query, (model,))]


def wanted(tx: sqlite3.Connection, model: str) -> bool:
    """Whether anybody waits for a model for whom others may be stopped: the default model comes at nobody's cost."""
    query = (
        "SELECT EXISTS (SELECT 1 FROM requests WHERE model = ? AND state = 'queued' AND kind <> 'unload'"
        " AND NOT (kind = 'preload' AND public_id = 'default'))"
    )
    return bool(tx.execute(query, (model,)).fetchone()[0])


def fail(tx: sqlite3.Connection, ids: Iterable[int], error: QmflaskError) -> set[str]:
    """Answer waiting requests with an error; returns the workers to wake."""
    woken: set[str] = set()
    for request in ids:
        row = tx.execute(
            "UPDATE requests SET state = 'failed', error_code = ?, error_message = ?, retry_after = ?"
            " WHERE id = ? AND state IN ('queued', 'pending') RETURNING worker",
            (error.code, error.message, error.retry_after, request),
        ).fetchone()
        if row is not None and row["worker"]:
            woken.add(row["worker"])
    for row in tx.execute("DELETE FROM requests WHERE worker IS NULL AND state = 'failed' RETURNING *").fetchall():
        log.warning("%s is not loaded for the %s: %s", row["model"], _own_load(row), row["error_message"])
    return woken


def _own_load(row: sqlite3.Row) -> str:
    """Why the leader itself wanted a model loaded, in words."""
    kind = str(row["public_id"]).partition("-")[0]
    return {"profile": "profile", "default": "idle box (defaultModel)"}.get(kind, "start (preload)")


def finish(tx: sqlite3.Connection, ids: Iterable[int]) -> set[str]:
    """A command row (load, unload, reload) is done; returns the workers to wake."""
    woken: set[str] = set()
    for request in ids:
        row = tx.execute("UPDATE requests SET state = 'done' WHERE id = ? RETURNING worker", (request,)).fetchone()
        if row is not None and row["worker"]:
            woken.add(row["worker"])
    tx.execute("DELETE FROM requests WHERE worker IS NULL AND state = 'done'")
    return woken


def mark_queued(tx: sqlite3.Connection, request: int) -> None:
    """A pending command becomes a waiter like any other."""
    tx.execute("UPDATE requests SET state = 'queued' WHERE id = ? AND state = 'pending'", (request,))


def drop_dead_workers(tx: sqlite3.Connection, dead: Collection[str]) -> int:
    """Remove workers and all their rows: leases, queued requests, commands; returns how many rows went."""
    gone = 0
    for worker in dead:
        gone += tx.execute("DELETE FROM requests WHERE worker = ?", (worker,)).rowcount
        tx.execute("DELETE FROM workers WHERE id = ?", (worker,))
    if dead:
        bump(tx)
    return gone


def drop_strangers(tx: sqlite3.Connection) -> None:
    """Remove rows of workers that are not registered (their registration was removed with them)."""
    tx.execute("DELETE FROM requests WHERE worker IS NOT NULL AND worker NOT IN (SELECT id FROM workers)")


def queue_preload(tx: sqlite3.Connection, models: Sequence[str], master: str, now: int, patience_at: int) -> bool:
    """Queue the preload list once for this master; True if it was queued now."""
    done = tx.execute("UPDATE scheduler SET preloaded_for = ? WHERE preloaded_for <> ?", (master, master)).rowcount
    for offset, model in enumerate(models if done else ()):
        tx.execute(
            "INSERT INTO requests (id, public_id, worker, kind, model, state, arrival, arrival_wall, patience_at)"
            f" VALUES ({NEW_ID}, ?, NULL, 'preload', ?, 'pending', ?, ?, ?)",
            (now, f"preload-{offset}", model, now + offset, time.time(), patience_at),
        )
    return bool(done)


def activate_profile(
    tx: sqlite3.Connection, name: str | None, preload: Sequence[str], now: int, patience_at: int
) -> None:
    """Make a profile active and queue what it preloads, in place of what the one before it still waits for."""
    tx.execute("UPDATE scheduler SET active_profile = ?", (name,))
    tx.execute("DELETE FROM requests WHERE kind = 'preload' AND public_id LIKE 'profile-%'")
    for offset, model in enumerate(preload):
        tx.execute(
            "INSERT INTO requests (id, public_id, worker, kind, model, state, arrival, arrival_wall, patience_at)"
            f" VALUES ({NEW_ID}, ?, NULL, 'preload', ?, 'pending', ?, ?, ?)",
            (now, f"profile-{offset}", model, now + offset, time.time(), patience_at),
        )


def queue_load(tx: sqlite3.Connection, model: str, now: int) -> None:
    """Queue one load of the default model; its end is nobody's answer."""
    tx.execute(
        "INSERT INTO requests (id, public_id, worker, kind, model, state, arrival, arrival_wall)"
        f" VALUES ({NEW_ID}, 'default', NULL, 'preload', ?, 'pending', ?, ?)",
        (now, model, now, time.time()),
    )


def forget_waiting_default(tx: sqlite3.Connection) -> None:
    """Once its start is under way nobody waits for the default model: who needs the room may have its load dropped."""
    tx.execute(
        "DELETE FROM requests WHERE kind = 'preload' AND public_id = 'default' AND model IN"
        " (SELECT target FROM swaps WHERE phase IN (?, ?))",
        (Phase.STARTING.value, Phase.PROBING.value),
    )


def floors(tx: sqlite3.Connection, boot_id: str) -> dict[str, int]:
    """Lowest trusted foreign use in bytes by card uuid, of this boot."""
    return {row["device"]: row["floor"] for row in tx.execute("SELECT * FROM floors WHERE boot_id = ?", (boot_id,))}


def write_floors(tx: sqlite3.Connection, boot_id: str, values: Mapping[str, int]) -> None:
    """Replace the floors; those of other boots go."""
    tx.execute("DELETE FROM floors")
    tx.executemany(
        "INSERT INTO floors (device, boot_id, floor) VALUES (?, ?, ?)",
        [(device, boot_id, floor) for device, floor in values.items()],
    )


def write_sample(tx: sqlite3.Connection, at: int, body: dict[str, Any]) -> None:
    """Store the newest memory sample; bumps only when a ceiling changed."""
    before = reading.sample(tx)
    tx.execute("INSERT OR REPLACE INTO samples (id, at, body) VALUES (1, ?, ?)", (at, json.dumps(body)))
    if any(before.get(key) != body.get(key) for key in ("vram_ceiling", "ram_ceiling")):
        bump(tx)


def learn_size(tx: sqlite3.Connection, launch_hash: str, model: str, vram: int, ram: int) -> bool:
    """Raise the learned peak of a launch hash; True if it rose."""
    row = tx.execute("SELECT vram, ram FROM sizes WHERE launch_hash = ?", (launch_hash,)).fetchone()
    if row is not None and row["vram"] >= vram and row["ram"] >= ram:
        return False
    peak = (max(vram, row["vram"]), max(ram, row["ram"])) if row else (vram, ram)
    tx.execute(
        "INSERT OR REPLACE INTO sizes (launch_hash, model, vram, ram, seen_wall) VALUES (?, ?, ?, ?, ?)",
        (launch_hash, model, *peak, time.time()),
    )
    bump(tx)
    return True


def live_ports(rows: Iterable[ProcessRow]) -> set[int]:
    """Ports that rows of models which are not down own."""
    return {row.port for row in rows if row.port is not None and row.state not in (State.STOPPED, State.FAILED)}


def set_config_error(tx: sqlite3.Connection, error: str | None) -> None:
    """Remember why the newest configuration was not taken, for `/api/config` and `/running`."""
    tx.execute("UPDATE scheduler SET config_error = ?", (error,))

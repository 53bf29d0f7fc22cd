"""The request's side of the store: arrive, be granted, end, be cancelled. Each function is one short transaction."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from qmflask.policy.rules import Rules
from qmflask.policy.schedule import Action, Reject, RequestView, Serve, Snapshot, admit
from qmflask.store import reading
from qmflask.store.database import Store
from qmflask.store.schema import NEW_ID


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it arrives. Times are monotonic nanoseconds; `detail` is JSON for people."""

    public_id: str
    worker: str
    kind: str
    model: str
    arrival: int
    arrival_wall: float
    priority: int = 0
    patience_at: int = 0
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class Stale:
    """The worker's configuration is older than the store's; take up `generation` and ask again."""

    generation: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease is in the store."""

    id: int
    proxy: str


@dataclass(frozen=True, slots=True)
class Queued:
    """The row waits for the leader."""

    id: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of a waiting request: granted (with the model server's address), done or failed."""

    id: int
    state: str
    paid: bool
    proxy: str | None
    error_code: str | None
    error_message: str | None
    retry_after: int | None


@dataclass(frozen=True, slots=True)
class _Cached:
    """What is true while `key` is: (schedule_version, configuration's generation, id of its rules)."""

    key: tuple[int, int, int]
    snapshot: Snapshot
    proxies: dict[str, str | None]


class Admissions:
    """The fast path: decides with a snapshot cached by schedule_version, and grants if that is still the version."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: _Cached | None = None

    def admit(self, rules: Rules, generation: int, arrival: Arrival, now: int) -> Granted | Queued | Reject | Stale:
        """Grant at once, queue or refuse `arrival`; `generation` is the configuration that `rules` are made of."""
        granted = self._grant_at_once(rules, generation, arrival, now)
        if granted is not None:
            return granted
        with self._store.write() as tx:
            row = tx.execute("SELECT schedule_version, config_generation FROM scheduler").fetchone()
            if row["config_generation"] != generation:
                return Stale(row["config_generation"])
            action = self._decide(tx, rules, row["schedule_version"], generation, arrival, now)
            if isinstance(action, Reject):
                return action
            if isinstance(action, Serve):
                request = _insert(tx, arrival, "granted", now, now)
                return Granted(request, self._proxy(arrival.model))
            return Queued(_insert(tx, arrival, "queued", now))

    def _grant_at_once(self, rules: Rules, generation: int, arrival: Arrival, now: int) -> Granted | None:
        """A lease in one statement, if the cached snapshot gives one and is still that of the store."""
        if self._cache is None:
            return None
        (version, *of), snapshot = self._cache.key, self._cache.snapshot
        if of != [generation, id(rules)] or _limit(snapshot, arrival.model):
            return None
        if not isinstance(admit(snapshot, _view(arrival), now), Serve):
            return None
        request = self._store.insert(_GRANT, (*_values(arrival, "granted", now, now), version, generation))
        return None if request is None else Granted(request, self._proxy(arrival.model))

    def _proxy(self, model: str) -> str:
        """Where a model listens that the cached snapshot knows as ready."""
        proxy = self._cache.proxies.get(model) if self._cache is not None else None
        assert proxy is not None
        return proxy

    def _decide(
        self, tx: sqlite3.Connection, rules: Rules, version: int, generation: int, arrival: Arrival, now: int
    ) -> Action:
        key = (version, generation, id(rules))
        if self._cache is None or self._cache.key != key:
            self._cache = _Cached(key, reading.snapshot(tx, rules, whole=False), reading.proxies(tx))
        snapshot = self._cache.snapshot
        if _limit(snapshot, arrival.model):
            query = "SELECT COUNT(*) FROM requests WHERE model = ? AND kind = 'infer'"
            count = tx.execute(query, (arrival.model,)).fetchone()[0]
            snapshot = dataclasses.replace(snapshot, in_system={arrival.model: count})
        return admit(snapshot, _view(arrival), now)


def _limit(snapshot: Snapshot, model: str) -> int:
    rule = snapshot.models.get(model)
    return rule.concurrency_limit if rule is not None else 0


def _view(arrival: Arrival) -> RequestView:
    return RequestView(0, arrival.model, arrival.arrival, arrival.priority, arrival.patience_at)


_INSERT = (
    "INSERT INTO requests (id, public_id, worker, kind, model, state, arrival, arrival_wall, priority, patience_at,"
    f" granted_at, detail) SELECT {NEW_ID}, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ? FROM scheduler"
)
_GRANT = f"{_INSERT} WHERE schedule_version = ? AND config_generation = ?"
#: The trigger `lease_ended` stamps the model, and removes the row.
_END = (
    "UPDATE requests SET ended_at = ?, answered = ? WHERE id = ?"
    " RETURNING EXISTS (SELECT 1 FROM requests WHERE state <> 'granted'),"
    " (SELECT state = 'draining' OR answered < requests.answered FROM processes WHERE model = requests.model)"
)


def _insert(tx: sqlite3.Connection, arrival: Arrival, state: str, now: int, granted_at: int | None = None) -> int:
    request = tx.execute(_INSERT, _values(arrival, state, now, granted_at)).lastrowid
    assert request is not None
    return request


def _values(arrival: Arrival, state: str, now: int, granted_at: int | None) -> tuple[Any, ...]:
    return (
        now,
        arrival.public_id,
        arrival.worker,
        arrival.kind,
        arrival.model,
        state,
        arrival.arrival,
        arrival.arrival_wall,
        arrival.priority,
        arrival.patience_at,
        granted_at,
        arrival.detail,
    )


def enqueue(store: Store, arrival: Arrival, state: str = "pending") -> int:
    """Queue a command for the leader (load, unload, reload) without deciding; returns the row's id."""
    with store.write() as tx:
        return _insert(tx, arrival, state, time.monotonic_ns())


def release(store: Store, request: int, model: str, now: int, hold_until: int | None, answered: bool = True) -> bool:
    """End a lease; True when the leader should look: somebody waits, the model drains, or its size is to be learned.

    `hold_until` None leaves the hold as it is, 0 ends it; `answered`: the model has shown that it is loaded.
    """
    if hold_until is None:
        rows = store.statement(_END, (now, int(answered), request))
    else:
        with store.write() as tx:
            query = "UPDATE processes SET hold_until = ? WHERE model = ? AND hold_until <> ?"
            if tx.execute(query, (hold_until, model, hold_until)).rowcount:
                tx.execute("UPDATE scheduler SET schedule_version = schedule_version + 1")
            rows = tx.execute(_END, (now, int(answered), request)).fetchall()
    return any(waiting or wanted for waiting, wanted in rows)


def end_hold(store: Store, model: str, now: int) -> bool:
    """End a model's hold before its time; True if it was held."""
    with store.write() as tx:
        query = "UPDATE processes SET hold_until = 0 WHERE model = ? AND hold_until > ?"
        held = tx.execute(query, (model, now)).rowcount > 0
        if held:
            tx.execute("UPDATE scheduler SET schedule_version = schedule_version + 1")
    return held


def withdraw(store: Store, request: int) -> bool:
    """Remove a waiting row whose client left; True if there was one."""
    with store.write() as tx:
        return tx.execute("DELETE FROM requests WHERE id = ?", (request,)).rowcount > 0


def outcomes(store: Store, waiting: Collection[int]) -> list[Ended]:
    """What became of the waiting requests with these ids; those still waiting are left out."""
    with store.read() as tx:
        rows = tx.execute(
            "SELECT r.id, r.state, r.paid, p.proxy, r.error_code, r.error_message, r.retry_after FROM requests r"
            " LEFT JOIN processes p ON p.model = r.model"
            " WHERE r.id IN (SELECT value FROM json_each(?)) AND r.state NOT IN ('queued', 'pending')",
            (json.dumps(list(waiting)),),
        ).fetchall()
    return [Ended(**{**dict(row), "paid": bool(row["paid"])}) for row in rows]


def missing(store: Store, ids: Collection[int]) -> set[int]:
    """Which of these ids have no row any more (the store was replaced, or somebody thought the worker dead)."""
    with store.read() as tx:
        rows = tx.execute(
            "SELECT id FROM requests WHERE id IN (SELECT value FROM json_each(?))", (json.dumps(list(ids)),)
        )
        found = {row["id"] for row in rows}
    return set(ids) - found


def own_rows(store: Store, worker: str) -> set[int]:
    """Ids of all rows of one worker."""
    with store.read() as tx:
        return {row["id"] for row in tx.execute("SELECT id FROM requests WHERE worker = ?", (worker,))}


def drop_rows(store: Store, ids: Sequence[int]) -> None:
    """Delete rows of this worker that its memory does not know (a release that failed)."""
    with store.write() as tx:
        tx.executemany("DELETE FROM requests WHERE id = ?", [(row,) for row in ids])


def reinsert(store: Store, arrival: Arrival, now: int) -> int:
    """Insert a lease again that the store lost; returns its new id."""
    with store.write() as tx:
        return _insert(tx, arrival, "granted", now, now)


def cancel(store: Store, public_id: str) -> list[str]:
    """Mark a request as cancelled; returns the workers to wake (empty: no such request)."""
    with store.write() as tx:
        rows = tx.execute(
            "UPDATE requests SET cancelled = 1 WHERE public_id = ? AND kind IN ('infer', 'peer') RETURNING worker",
            (public_id,),
        ).fetchall()
        return [row["worker"] for row in rows if row["worker"]]


def cancelled(store: Store, worker: str) -> list[int]:
    """Ids of this worker's requests that somebody cancelled."""
    with store.read() as tx:
        rows = tx.execute("SELECT id FROM requests WHERE worker = ? AND cancelled = 1", (worker,))
        return [row["id"] for row in rows]


def register_worker(store: Store, worker: str, pid: int, start_ticks: int, master: str) -> None:
    """Enter a worker that has just been forked."""
    with store.write() as tx:
        tx.execute(
            "INSERT OR REPLACE INTO workers (id, pid, start_ticks, master, draining, started_wall)"
            " VALUES (?, ?, ?, ?, 0, ?)",
            (worker, pid, start_ticks, master, time.time()),
        )


def remove_worker(store: Store, worker: str) -> list[tuple[int, int]]:
    """Take a worker that ends out of the list; (pid, start ticks) of those still in it, dead ones included.

    One transaction, so that of workers that end together exactly one finds nobody left.
    """
    with store.write() as tx:
        tx.execute("DELETE FROM workers WHERE id = ?", (worker,))
        return [(row["pid"], row["start_ticks"]) for row in tx.execute("SELECT pid, start_ticks FROM workers")]


def set_draining(store: Store, worker: str) -> None:
    """Mark a worker that takes no new requests."""
    with store.write() as tx:
        tx.execute("UPDATE workers SET draining = 1 WHERE id = ?", (worker,))


def publish_configuration(
    store: Store,
    expected: int,
    fingerprint: str,
    master: str | None,
    source: str,
    generation: int | None = None,
) -> int | None:
    """Make `generation` (`expected` + 1 if not given) the one in force; None when somebody else was faster.

    Call it after the resolved file of that generation is on disk. `source` is the file or folder it was read from.
    """
    generation = expected + 1 if generation is None else generation
    with store.write() as tx:
        done = tx.execute(
            "UPDATE scheduler SET config_generation = ?, config_fingerprint = ?, config_error = NULL, config_wall = ?,"
            " config_source = ?, master = COALESCE(?, master), schedule_version = schedule_version + 1"
            " WHERE config_generation = ?",
            (generation, fingerprint, time.time(), source, master, expected),
        ).rowcount
        return generation if done else None

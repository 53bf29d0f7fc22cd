"""Rows of the store as values, and how the scheduler's views are made of them."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass

from qmflask.policy.schedule import Failure, ProcessView, RequestView, SwapView
from qmflask.states import Phase, State


@dataclass(frozen=True, slots=True)
class StopCall:
    """A model's `cmdStop`, `${PID}` still in it, and the model's own variables: the row must do without the
    configuration, which may have changed since the start."""

    argv: tuple[str, ...]
    env: dict[str, str]

    def text(self) -> str:
        """As it is stored."""
        return json.dumps({"argv": self.argv, "env": self.env})

    @classmethod
    def parse(cls, text: str) -> StopCall:
        """What `text` gave; a bare list is one without variables."""
        value = json.loads(text)
        return cls(tuple(value), {}) if isinstance(value, list) else cls(tuple(value["argv"]), dict(value["env"]))


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One row of `processes` (see the schema for units)."""

    model: str
    state: State
    generation: int
    changed_wall: float
    reason: str | None
    used_at: int
    hold_until: int
    idle_since: int
    asked_since: int
    token: str | None
    pid: int | None
    start_ticks: int | None
    port: int | None
    proxy: str | None
    launch_hash: str | None
    cmd: str | None
    cmd_stop: StopCall | None
    unload_timeout: float
    started_at: int
    deadline: int
    load_ms: float | None
    stop_reason: str | None
    stop_wall: float | None
    exit_code: int | None
    answered: int
    failure_pool: str | None
    failure_free: int | None
    failure_code: str | None
    failure_message: str | None
    retry_at: int
    attempts: int

    @classmethod
    def of(cls, row: sqlite3.Row) -> ProcessRow:
        """From a `SELECT *` row."""
        values = dict(row)
        values["state"] = State(values["state"])
        values["cmd_stop"] = StopCall.parse(values["cmd_stop"]) if values["cmd_stop"] else None
        return cls(**values)

    def view(self, leases: int, granted_at: int, launch_hash: str | None) -> ProcessView:
        """The scheduler's view. `granted_at`: its newest running lease; `launch_hash`: the one in the configuration,
        None where the model is gone."""
        failure = None
        if self.failure_code is not None:
            failure = Failure(self.failure_code, self.failure_message or "", self.retry_at)
        return ProcessView(
            model=self.model,
            state=self.state,
            leases=leases,
            tick=max(self.used_at, granted_at),
            hold_until=self.hold_until,
            idle_since=self.idle_since,
            changed=self.launch_hash != launch_hash,
            changed_since=self.asked_since,
            failure=failure,
            stop_reason=self.reason if self.state in (State.DRAINING, State.STOPPING) else None,
        )


@dataclass(frozen=True, slots=True)
class SwapRow:
    """One row of `swaps`."""

    id: int
    target: str
    victims: tuple[str, ...]
    blockers: tuple[str, ...]
    reason: str
    phase: Phase
    signalled: bool
    retried: bool
    created_at: int
    deadline: int
    reclaim: str | None

    @classmethod
    def of(cls, row: sqlite3.Row) -> SwapRow:
        """From a `SELECT *` row."""
        return cls(
            id=row["id"],
            target=row["target"],
            victims=tuple(json.loads(row["victims"])),
            blockers=tuple(json.loads(row["blockers"])),
            reason=row["reason"],
            phase=Phase(row["phase"]),
            signalled=bool(row["signalled"]),
            retried=bool(row["retried"]),
            created_at=row["created_at"],
            deadline=row["deadline"],
            reclaim=row["reclaim"],
        )

    def view(self) -> SwapView:
        """The scheduler's view."""
        return SwapView(self.id, self.target, self.victims, self.phase, self.blockers, self.signalled)


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One row of `requests`, without the columns only its own worker reads."""

    id: int
    public_id: str
    worker: str | None
    kind: str
    model: str
    state: str
    arrival: int
    arrival_wall: float
    priority: int
    patience_at: int
    granted_at: int | None
    paid: bool
    detail: str | None

    @classmethod
    def of(cls, row: sqlite3.Row) -> RequestRow:
        """From a `SELECT *` row."""
        return cls(**{name: row[name] for name in cls.__slots__ if name != "paid"}, paid=bool(row["paid"]))

    def view(self) -> RequestView:
        """The scheduler's view."""
        return RequestView(
            self.id, self.model, self.arrival, self.priority, self.patience_at, owned=self.kind != "infer"
        )


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One row of `workers`."""

    id: str
    pid: int
    start_ticks: int
    master: str
    draining: bool
    started_wall: float

    @classmethod
    def of(cls, row: sqlite3.Row) -> WorkerRow:
        """From a `SELECT *` row."""
        values = dict(row)
        values["draining"] = bool(values["draining"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class SchedulerRow:
    """The one row of `scheduler`."""

    schedule_version: int
    config_generation: int
    config_fingerprint: str
    config_source: str
    config_error: str | None
    config_wall: float
    master: str
    preloaded_for: str
    generation: int
    leader: str | None
    heartbeat: int
    active_profile: str | None

    @classmethod
    def of(cls, row: sqlite3.Row) -> SchedulerRow:
        """From a `SELECT *` row."""
        return cls(**{name: row[name] for name in cls.__slots__})

"""Commands that workers leave for the leader as rows: unload, load, preload; none of them ever blocks its tick."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from qmflask import errors
from qmflask.config import Config
from qmflask.inforce import InForce
from qmflask.states import DOWN, Phase, State
from qmflask.store import Store, Transaction, reading, scheduling
from qmflask.store.rows import ProcessRow, RequestRow, SwapRow

log = logging.getLogger(__name__)

SECOND = 1_000_000_000
#: Stands for every model in a command's row.
ALL = "*"
#: The deadline of a drain that lasts until the last answer has ended by itself.
NEVER = 1 << 62


class Stopper(Protocol):
    """What commands need of the process trees."""

    def signal_stop(self, row: ProcessRow) -> None:
        """Begin to stop a tree whose row says `stopping`."""


class Commands:
    """Works off the command rows of one term."""

    def __init__(
        self, store: Store, generation: int, trees: Stopper, forget_floors: Callable[[], None], in_force: InForce
    ) -> None:
        self._store = store
        self._generation = generation
        self._trees = trees
        self._forget_floors = forget_floors
        self._in_force = in_force

    def run(self, generation: int, config: Config, now: int) -> set[str]:
        """One look at all command rows, by the configuration of that generation; returns the workers to wake."""
        with self._store.read() as tx:
            rows = [row for row in reading.requests(tx, "pending", "queued") if row.kind != "infer"]
            processes = reading.processes(tx)
        woken: set[str] = set()
        preloading = any(row.kind == "preload" and row.state == "queued" for row in rows)
        for row in rows:
            if row.kind == "unload":
                woken |= self._unload(row, processes, now)
            elif row.kind == "relearn":
                woken |= self._relearn(row)
            elif row.kind == "load" and row.state == "pending":
                woken |= self._load(row, generation, config)
            elif row.kind == "preload" and row.state == "pending" and not preloading:
                preloading = True  # in list order, each when the one before it is healthy
                woken |= self._load(row, generation, config)
        return woken | self._drain_overdue(processes, now)

    def _relearn(self, row: RequestRow) -> set[str]:
        """Forget the lowest foreign use; the next trusted reading sets it anew."""
        self._forget_floors()
        with self._store.write(self._generation) as tx:
            return scheduling.finish(tx, [row.id])

    def reconcile(self, config: Config) -> set[str]:
        """After a new configuration: models that vanished drain and stop, those whose command changed start afresh.

        Nothing else is touched; a running model whose launch settings changed is the policy's business.
        """
        woken: set[str] = set()
        aborted: list[ProcessRow] = []
        with self._store.write(self._generation) as tx:
            for swap in reading.swaps(tx):
                if swap.target not in config.models:
                    aborted += self._abandon(tx, swap)
                    gone = errors.ModelNotFound(f"model {swap.target} was removed from the configuration")
                    woken |= scheduling.fail(tx, scheduling.waiting_for(tx, swap.target), gone)
            for row in reading.processes(tx).values():
                model = config.models.get(row.model)
                if model is None and row.state is State.READY:  # ready -> draining
                    scheduling.set_state(
                        tx, row.model, State.DRAINING, "removed from the configuration", deadline=NEVER
                    )
                elif model is not None and row.failure_code and row.launch_hash != model.launch_hash:
                    scheduling.forget_failure(tx, row.model)
            scheduling.bump(tx)
        for row in aborted:
            self._trees.signal_stop(row)
        return woken

    def _abandon(self, tx: Transaction, swap: SwapRow) -> list[ProcessRow]:
        """Drop a swap whose target must not start: starting -> stopping, draining victims are ready again."""
        _revive_victims(tx, swap.victims)
        scheduling.close_swap(tx, swap.id)
        row = reading.process(tx, swap.target)
        if row is None or row.state is not State.STARTING:
            return []
        reason = "removed from the configuration"
        deadline = time.monotonic_ns() + int(row.unload_timeout * SECOND)
        scheduling.set_state(tx, row.model, State.STOPPING, reason, deadline=deadline)
        return [_must(reading.process(tx, swap.target))]

    def _load(self, row: RequestRow, generation: int, config: Config) -> set[str]:
        """An explicit load starts anew after a failure; from here on it waits like a request."""
        with self._store.write(self._generation) as tx:
            if self._in_force.behind(tx, generation):
                return set()  # it stays pending until we have caught up
            if row.model not in config.models:
                error = self._in_force.not_found(f"model {row.model} is not configured")
                return scheduling.fail(tx, [row.id], error)
            scheduling.forget_failure(tx, row.model)
            scheduling.mark_queued(tx, row.id)
        return set()

    def _unload(self, row: RequestRow, processes: dict[str, ProcessRow], now: int) -> set[str]:
        """First look: begin. Later looks: done when every process group is gone.

        It never waits here, so it holds nobody up.
        """
        if row.state == "pending":
            stopping: list[ProcessRow] = []
            with self._store.write(self._generation) as tx:
                models = list(processes) if row.model == ALL else [row.model]
                woken = self._refuse_waiting(tx, row)
                for model in models:
                    stopping += self._begin_unload(tx, model, now)
                scheduling.mark_queued(tx, row.id)
            for process in stopping:
                self._trees.signal_stop(process)
            return woken
        left = [p for p in processes.values() if row.model in (ALL, p.model) and p.state not in DOWN]
        if any(p.state is not State.READY and not _is_new_start(p, row) for p in left):
            return set()
        with self._store.write(self._generation) as tx:
            return scheduling.finish(tx, [row.id])

    def _refuse_waiting(self, tx: Transaction, row: RequestRow) -> set[str]:
        """Whoever waits for an unloaded model gets 503 at once; what came after the unload is not touched."""
        waiting = [
            request.id
            for request in reading.requests(tx, "queued")
            if request.kind != "unload" and row.model in (ALL, request.model) and request.arrival < row.arrival
        ]
        name = "all models were" if row.model == ALL else f"model {row.model} was"
        message = f"model unloaded: {name} unloaded while the request waited; ask again to load it"
        error = errors.ModelUnloaded(message, retry_after=1)
        return scheduling.fail(tx, waiting, error)

    def _begin_unload(self, tx: Transaction, model: str, now: int) -> list[ProcessRow]:
        """ready -> draining (stopping when idle), starting -> stopping; returns the rows to signal."""
        row = reading.process(tx, model)
        for swap in reading.swaps(tx):
            before_spawn = row is None or row.state is not State.STARTING
            if swap.target == model and (swap.phase is Phase.DRAINING or not before_spawn):
                _revive_victims(tx, swap.victims)
                scheduling.close_swap(tx, swap.id)
            elif swap.target == model:
                scheduling.close_swap(tx, swap.id)
        if row is None or row.state in DOWN or row.state is State.STOPPING:
            return []
        deadline = now + int(row.unload_timeout * SECOND)
        scheduling.update_process(tx, model, hold_until=0)
        if row.state is State.STARTING or scheduling.idle(tx, model):
            scheduling.set_state(tx, model, State.STOPPING, "unload", deadline=deadline)
            return [_must(reading.process(tx, model))]
        if row.state is State.READY:
            scheduling.set_state(tx, model, State.DRAINING, "unload", deadline=deadline)
        else:
            scheduling.update_process(tx, model, deadline=deadline, reason="unload")
        return []

    def _drain_overdue(self, processes: dict[str, ProcessRow], now: int) -> set[str]:
        """Draining for an unload ends when the last answer has ended, or at its deadline, whatever still runs."""
        for row in processes.values():
            if row.state is not State.DRAINING or row.deadline == 0:
                continue
            with self._store.write(self._generation) as tx:
                latest = _must(reading.process(tx, row.model))  # a command of this very look may have changed it
                if latest.state is not State.DRAINING or (now < latest.deadline and not scheduling.idle(tx, row.model)):
                    continue
                deadline = now + int(row.unload_timeout * SECOND)
                # draining -> stopping
                scheduling.set_state(tx, row.model, State.STOPPING, latest.reason, deadline=deadline)
                stopping = _must(reading.process(tx, row.model))
            self._trees.signal_stop(stopping)
        return set()


def next_deadline(processes: dict[str, ProcessRow]) -> int | None:
    """When `run` must look again though nothing happens: the earliest end of a drain (monotonic ns)."""
    return min(
        (row.deadline for row in processes.values() if row.state is State.DRAINING and row.deadline), default=None
    )


def _revive_victims(tx: Transaction, victims: tuple[str, ...]) -> None:
    for name in victims:
        row = reading.process(tx, name)
        if row is not None and row.state is State.DRAINING and row.deadline == 0:
            scheduling.set_state(tx, name, State.READY, "the swap was dropped")  # draining -> ready


def _is_new_start(process: ProcessRow, row: RequestRow) -> bool:
    """A start that began after the unload was asked is not what was to be unloaded."""
    return process.started_at > row.arrival


def _must(row: ProcessRow | None) -> ProcessRow:
    assert row is not None
    return row

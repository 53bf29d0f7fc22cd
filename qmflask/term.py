"""One term of office: the scheduler's tick. Decisions come from `policy.schedule`; here they are carried out."""

from __future__ import annotations

import logging
import os
import selectors
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qmflask import errors, processes
from qmflask.commands import Commands
from qmflask.config import Config
from qmflask.policy import schedule
from qmflask.policy.rules import Rules
from qmflask.policy.schedule import AbortSwap, Action, Reject, Serve, Snapshot, StartSwap, Stop
from qmflask.processes import Children, Identity
from qmflask.states import DOWN, Phase, State
from qmflask.store import Deposed, Store, reading, scheduling
from qmflask.store.rows import ProcessRow, SwapRow
from qmflask.trees import MILLISECOND, SECOND, Trees

log = logging.getLogger(__name__)

HEARTBEAT = SECOND // 2
#: Decisions made outside the transaction before one is made inside (DESIGN section 1).
OPTIMISTIC_TRIES = 2


@dataclass
class Conflict(Exception):
    """Raised inside an apply when the store has moved on since the decision; decide again."""

    why: str


class Term:
    """Carries out the scheduler's decisions while `generation` is the store's. `run` returns when the term is over."""

    def __init__(
        self,
        store: Store,
        generation: int,
        worker: str,
        children: Children,
        configuration: Callable[[], tuple[int, Config, Rules]],
        send: Callable[[str, bytes], None],
        on_tick: Callable[[int], None],
    ) -> None:
        self._store = store
        self._generation = generation
        self._worker = worker
        self._configuration = configuration
        self._send = send
        self._on_tick = on_tick
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._trees = Trees(store, generation, children, self.ring, self._watch_tree, self._selector_remove)
        self._workers: dict[str, int] = {}
        self._config_generation = 0
        self._next_beat = 0
        self._next_deadline: int | None = None
        self._woken: set[str] = set()
        self._commands = Commands(store, generation, self._trees)

    # -- the loop ---------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Make the loop turn now; any thread may call it, also after the end."""
        try:
            os.eventfd_write(self._bell, 1)
        except (BlockingIOError, OSError):
            return

    def run(self, keep_on: Callable[[], bool]) -> None:
        """Lead until `keep_on` says no. Raises Deposed when another term has begun."""
        try:
            self._begin()
            while keep_on():
                self._turn(self._wait())
        finally:
            self.close()

    def _begin(self) -> None:
        """Take up what an earlier leader left, each swap at its phase."""
        now = time.monotonic_ns()
        generation, config, _ = self._configuration()
        self._watch_workers()
        with self._store.read() as tx:
            rows = reading.processes(tx)
        self._trees.adopt(rows, config.models, now)
        log.info("leading: term %d, configuration %d", self._generation, generation)
        self._turn(set())

    def _wait(self) -> set[tuple[str, str]]:
        """Sleep until something happens or is due; returns ("tree", model) and ("worker", id) whose process ended."""
        now = time.monotonic_ns()
        due = [self._next_beat, self._trees.next_look(), self._next_deadline]
        timeout = max(0, min(moment for moment in due if moment is not None) - now) / SECOND
        ended: set[tuple[str, str]] = set()
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                try:
                    os.eventfd_read(self._bell)
                except BlockingIOError:
                    continue
            else:
                ended.add(key.data)
        return ended

    def _turn(self, ended: set[tuple[str, str]]) -> None:
        """One tick: events first, then decisions, until nothing moves any more."""
        now = time.monotonic_ns()
        self._on_tick(now)
        if now >= self._next_beat:
            self._watch_workers()
            with self._store.write(self._generation) as tx:
                scheduling.beat(tx, now)
            self._next_beat = now + HEARTBEAT
        if dead := {name for kind, name in ended if kind == "worker"}:
            self._bury_workers(dead)
        exited = {name for kind, name in ended if kind == "tree"}
        for _ in range(100):  # a bound, so that a bug cannot spin here with the heartbeat standing still
            now = time.monotonic_ns()
            generation, config, rules = self._configuration()
            self._woken |= self._trees.poll(exited, now)
            exited = set()
            if generation != self._config_generation:
                self._woken |= self._commands.reconcile(config)
                self._config_generation = generation
            self._woken |= self._commands.run(config, now)
            moved = self._decide(rules, now)
            moved |= self._advance_swaps(config, now)
            self._wake_workers()
            if not moved:
                return
        log.error("the scheduler did not come to rest in one tick; going on in the next")

    def _wake_workers(self) -> None:
        for worker in self._woken:
            self._send(worker, b"r")
        self._woken.clear()

    # -- workers ----------------------------------------------------------------------------------------------

    def _watch_workers(self) -> None:
        """Open a pidfd for each new worker; drop the rows of those that are gone already."""
        with self._store.read() as tx:
            rows = reading.workers(tx)
        dead = set()
        for row in rows:
            if row.id in self._workers:
                continue
            descriptor = processes.pidfd(Identity(row.pid, row.start_ticks, self._store.boot_id))
            if descriptor is None:
                dead.add(row.id)
            else:
                self._workers[row.id] = descriptor
                self._selector.register(descriptor, selectors.EVENT_READ, ("worker", row.id))
        if dead:
            self._bury_workers(dead)

    def _bury_workers(self, dead: Iterable[str]) -> None:
        dead = set(dead)
        with self._store.write(self._generation) as tx:
            gone = scheduling.drop_dead_workers(tx, dead)
        for name in dead:
            log.warning("worker %s is gone", name)
            if (descriptor := self._workers.pop(name, None)) is not None:
                self._selector_remove(descriptor)
                os.close(descriptor)
        if gone:
            log.info("%d rows of dead workers dropped", gone)

    def _watch_tree(self, descriptor: int, model: str) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, ("tree", model))

    def _selector_remove(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    # -- deciding ---------------------------------------------------------------------------------------------

    def _decide(self, rules: Rules, now: int) -> bool:
        """Decide and apply; True when something changed. The last try decides inside the transaction."""
        for _ in range(OPTIMISTIC_TRIES):
            with self._store.read() as tx:
                version = reading.scheduler(tx).schedule_version
                snapshot = reading.snapshot(tx, rules, whole=True)
            if self._note_asked(snapshot, now):
                continue
            actions = schedule.decide(snapshot, now)
            self._next_deadline = schedule.next_deadline(snapshot, now)
            if not any(_changes(action) for action in actions):
                return False
            try:
                with self._store.write(self._generation) as tx:
                    if reading.scheduler(tx).schedule_version != version:
                        raise Conflict("the schedule has changed")
                    stopping = self._apply(tx, actions, now)
            except Conflict:
                continue
            self._signal(stopping)
            return True
        with self._store.write(self._generation) as tx:
            actions = schedule.decide(reading.snapshot(tx, rules, whole=True), now)
            stopping = self._apply(tx, actions, now)
        self._signal(stopping)
        return any(_changes(action) for action in actions)

    def _note_asked(self, snapshot: Snapshot, now: int) -> bool:
        """Stamp the first request for a model whose launch settings have changed: it may serve on for one patience."""
        asked = {request.model for request in snapshot.queue}
        changed = [
            view.model
            for view in snapshot.processes.values()
            if view.changed and view.state is State.READY and not view.changed_since and view.model in asked
        ]
        if changed:
            with self._store.write(self._generation) as tx:
                for model in changed:
                    scheduling.update_process(tx, model, asked_since=now)
                scheduling.bump(tx)
        return bool(changed)

    def _apply(self, tx: sqlite3.Connection, actions: list[Action], now: int) -> list[str]:
        """Write what was decided; returns the models that are to be signalled after the commit."""
        stopping: list[str] = []
        for action in actions:
            if isinstance(action, Serve):
                self._woken |= scheduling.grant(tx, [action.request], action.model, now, paid=False)
            elif isinstance(action, Reject):
                error = errors.from_code(action.code, action.message, retry_after=action.retry_after)
                self._woken |= scheduling.fail(tx, [action.request], error)
            elif isinstance(action, StartSwap):
                stopping += self._open_swap(tx, action, now)
            elif isinstance(action, AbortSwap):
                stopping += self._abort_swap(tx, action.swap, now)
            elif isinstance(action, Stop):
                stopping += self._stop_idle(tx, [action.model], action.reason, now)
        return stopping

    def _open_swap(self, tx: sqlite3.Connection, action: StartSwap, now: int) -> list[str]:
        reason = f"making room for {action.target}"
        swap = scheduling.open_swap(tx, action.target, action.victims, action.blockers, f"requested ({reason})", now)
        rows = reading.processes(tx)
        names = " ".join(action.victims) or "nothing"
        log.info("swap %d: start %s, stop %s%s", swap, action.target, names, ", draining" if action.fixed else "")
        ready = [name for name in action.victims if name in rows and rows[name].state is State.READY]
        if all(scheduling.idle(tx, name) for name in (*ready, *action.blockers)):
            scheduling.set_phase(tx, swap, Phase.STOPPING, signalled=1)
            return self._stop_idle(tx, ready, f"evicted for {action.target}", now)
        if not action.fixed and not action.blockers:
            raise Conflict("a victim is in use again")
        for name in ready:
            scheduling.set_state(tx, name, State.DRAINING, f"evicted for {action.target}")  # ready -> draining
        return []

    def _stop_idle(self, tx: sqlite3.Connection, models: Iterable[str], reason: str, now: int) -> list[str]:
        """ready, draining -> stopping, for models that nobody uses; raises Conflict when somebody does."""
        stopped = []
        for name in models:
            row = reading.process(tx, name)
            if row is None or row.state not in (State.READY, State.DRAINING):
                continue
            if not scheduling.idle(tx, name):
                raise Conflict(f"{name} is in use again")
            deadline = now + int(row.unload_timeout * SECOND)
            scheduling.set_state(tx, name, State.STOPPING, reason, deadline=deadline)
            stopped.append(name)
        return stopped

    def _abort_swap(self, tx: sqlite3.Connection, swap_id: int, now: int) -> list[str]:
        """Nobody waits any more: draining victims are ready again, a starting target stops."""
        swap = next((swap for swap in reading.swaps(tx) if swap.id == swap_id), None)
        if swap is None:
            return []
        scheduling.close_swap(tx, swap.id)
        rows = reading.processes(tx)
        for name in swap.victims:
            if name in rows and rows[name].state is State.DRAINING and rows[name].deadline == 0:
                scheduling.set_state(tx, name, State.READY, "the swap was dropped")  # draining -> ready
        target = rows.get(swap.target)
        if target is None or target.state is not State.STARTING:
            return []
        deadline = now + int(target.unload_timeout * SECOND)
        scheduling.set_state(tx, swap.target, State.STOPPING, "its load was aborted", deadline=deadline)
        return [swap.target]

    def _signal(self, models: Iterable[str]) -> None:
        for name in models:
            with self._store.read() as tx:
                row = reading.process(tx, name)
            if row is not None and row.state is State.STOPPING:
                self._trees.signal_stop(row)

    # -- swaps ------------------------------------------------------------------------------------------------

    def _advance_swaps(self, config: Config, now: int) -> bool:
        """Move each open swap to its next phase where that is possible; True when one moved."""
        with self._store.read() as tx:
            rows = reading.processes(tx)
            swaps = reading.swaps(tx)
        moved = False
        for swap in swaps:
            if swap.phase is Phase.DRAINING:
                moved |= self._advance_draining(swap, rows, now)
            elif swap.phase in (Phase.STOPPING, Phase.RECLAIM, Phase.STARTING):
                moved |= self._advance_stopping(swap, rows, config, now)
        return moved

    def _advance_draining(self, swap: SwapRow, rows: dict[str, ProcessRow], now: int) -> bool:
        with self._store.read() as tx:
            if not all(scheduling.idle(tx, name) for name in (*swap.victims, *swap.blockers)):
                return False
        try:
            with self._store.write(self._generation) as tx:
                scheduling.set_phase(tx, swap.id, Phase.STOPPING, signalled=1)
                stopping = self._stop_idle(tx, swap.victims, f"evicted for {swap.target}", now)
        except Conflict:
            return False
        self._signal(stopping)
        return True

    def _advance_stopping(self, swap: SwapRow, rows: dict[str, ProcessRow], config: Config, now: int) -> bool:
        """stopping -> reclaim -> starting, when the groups of the victims (and of the target) are gone."""
        if not all(_is_down(rows.get(name)) for name in swap.victims):
            return False
        target = rows.get(swap.target)
        if target is not None and target.state is State.READY:
            self._serve_ready(swap, now)
            return True
        if not _is_down(target):
            return False
        model = config.models.get(swap.target)
        if model is None:
            self._drop_swap(swap, errors.ModelNotFound(f"model {swap.target} was removed from the configuration"))
            return True
        if not self._trees.start(swap, model, rows, now):
            self._next_deadline = min(self._next_deadline or now + SECOND, now + 20 * MILLISECOND)
            return False
        return True

    def _serve_ready(self, swap: SwapRow, now: int) -> None:
        """The target was ready all along and only had victims: their end is the end of the swap."""
        with self._store.write(self._generation) as tx:
            scheduling.close_swap(tx, swap.id)
            waiting = scheduling.waiting_for(tx, swap.target)
            self._woken |= scheduling.grant(tx, waiting, swap.target, now, paid=False)

    def _drop_swap(self, swap: SwapRow, error: errors.QmflaskError) -> None:
        with self._store.write(self._generation) as tx:
            scheduling.close_swap(tx, swap.id)
            self._woken |= scheduling.fail(tx, scheduling.waiting_for(tx, swap.target), error)

    def close(self) -> None:
        """End what the term owns in this process: watched descriptors, probers, the selector. The trees live on."""
        self._trees.close()
        for descriptor in self._workers.values():
            os.close(descriptor)
        self._workers.clear()
        self._selector.close()
        os.close(self._bell)


def _changes(action: Action) -> bool:
    return isinstance(action, Serve | Reject | StartSwap | AbortSwap | Stop)


def _is_down(row: ProcessRow | None) -> bool:
    return row is None or row.state in DOWN


__all__ = ["Deposed", "Term"]

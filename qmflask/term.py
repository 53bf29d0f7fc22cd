"""One term of office: the scheduler's tick. Decisions come from `policy.schedule`; here they are carried out."""

from __future__ import annotations

import json
import logging
import os
import selectors
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qmflask import errors, processes
from qmflask.accounts import Accounts
from qmflask.commands import Commands
from qmflask.config import Config
from qmflask.memory.oom import OutOfMemory
from qmflask.memory.reclaim import Look
from qmflask.memory.samples import GIB
from qmflask.memory.watchdog import Shed
from qmflask.meter import Meter, TreeRef
from qmflask.policy import schedule
from qmflask.policy.board import Board
from qmflask.policy.plan import sentence
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
#: When cards that were asked have not answered, they are asked again after this time.
LOOK_AGAIN = 50 * MILLISECOND
#: Cards that have not answered for this long tell a swap in reclaim nothing any more.
UNREADABLE = 3 * SECOND


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
        self._next_look = 0
        self._looked_at = 0
        self._woken: set[str] = set()
        self._meter = Meter(configuration()[1].performance.every, self._tree_refs, self.ring)
        self._accounts = Accounts(store, generation, self._meter)
        self._commands = Commands(store, generation, self._trees, self._accounts.relearn)
        self._trees.on_out_of_memory = self._retry_with_more_room
        self._trees.free_now = self._accounts.free_now

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
        self._meter.start()
        self._watch_workers()
        with self._store.read() as tx:
            rows = reading.processes(tx)
        self._trees.adopt(rows, config.models, now)
        log.info("leading: term %d, configuration %d", self._generation, generation)
        self._turn(set())

    def _wait(self) -> set[tuple[str, str]]:
        """Sleep until something happens or is due; returns ("tree", model) and ("worker", id) whose process ended."""
        now = time.monotonic_ns()
        due = [self._next_beat, self._trees.next_look(), self._next_deadline, self._next_look or None]
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
            self._shed(self._accounts.update(config, rules, now), now)
            moved = self._decide(config, rules, now)
            moved |= self._advance_swaps(config, rules, now)
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

    def _decide(self, config: Config, rules: Rules, now: int) -> bool:
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
            if self._look_at_cards_first(config, rules, actions, now):
                continue
            self._explain(rules, snapshot, actions, now)
            try:
                with self._store.write(self._generation) as tx:
                    if reading.scheduler(tx).schedule_version != version:
                        raise Conflict("the schedule has changed")
                    stopping = self._apply(tx, actions, config, rules, now)
            except Conflict:
                continue
            self._signal(stopping)
            return True
        with self._store.write(self._generation) as tx:
            actions = schedule.decide(reading.snapshot(tx, rules, whole=True), now)
            stopping = self._apply(tx, actions, config, rules, now)
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

    def _apply(
        self, tx: sqlite3.Connection, actions: list[Action], config: Config, rules: Rules, now: int
    ) -> list[str]:
        """Write what was decided; returns the models that are to be signalled after the commit."""
        stopping: list[str] = []
        for action in actions:
            if isinstance(action, Serve):
                self._woken |= scheduling.grant(tx, [action.request], action.model, now, paid=False)
            elif isinstance(action, Reject):
                error = errors.from_code(action.code, action.message, retry_after=action.retry_after)
                self._woken |= scheduling.fail(tx, [action.request], error)
            elif isinstance(action, StartSwap):
                stopping += self._open_swap(tx, action, config, rules, now)
            elif isinstance(action, AbortSwap):
                stopping += self._abort_swap(tx, action.swap, now)
            elif isinstance(action, Stop):
                stopping += self._stop_idle(tx, [action.model], action.reason, now)
        return stopping

    def _open_swap(
        self, tx: sqlite3.Connection, action: StartSwap, config: Config, rules: Rules, now: int
    ) -> list[str]:
        reason = f"making room for {action.target}"
        swap = scheduling.open_swap(tx, action.target, action.victims, action.blockers, f"requested ({reason})", now)
        rows = reading.processes(tx)
        names = " ".join(action.victims) or "nothing"
        log.info("swap %d: start %s, stop %s%s", swap, action.target, names, ", draining" if action.fixed else "")
        ready = [name for name in action.victims if name in rows and rows[name].state is State.READY]
        if all(scheduling.idle(tx, name) for name in (*ready, *action.blockers)):
            self._enter_stopping(tx, swap, config, rules, now)
            return self._stop_idle(tx, ready, f"evicted for {action.target}", now)
        if not action.fixed and not action.blockers:
            raise Conflict("a victim is in use again")
        for name in ready:
            scheduling.set_state(tx, name, State.DRAINING, f"evicted for {action.target}")  # ready -> draining
        return []

    def _enter_stopping(self, tx: sqlite3.Connection, swap_id: int, config: Config, rules: Rules, now: int) -> None:
        """draining -> stopping; what the victims hold now is what must be seen free later."""
        rows = reading.swaps(tx)
        swap = next(row for row in rows if row.id == swap_id)
        earlier = [row for row in rows if row.id < swap_id and row.reclaim]
        gates = self._accounts.open_gates(swap, config, rules, now, earlier)
        scheduling.set_phase(tx, swap_id, Phase.STOPPING, signalled=1, reclaim=gates)

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

    # -- memory -----------------------------------------------------------------------------------------------

    def _tree_refs(self) -> list[TreeRef]:
        """The trees to measure; called on the meter's thread."""
        models = self._configuration()[1].models
        with self._store.read() as tx:
            rows = reading.processes(tx).values()
        return [
            TreeRef(
                row.model,
                row.state,
                models[row.model].pool if row.model in models else "vram",
                row.token or "",
                Identity(row.pid, row.start_ticks, self._store.boot_id) if row.pid and row.start_ticks else None,
            )
            for row in rows
            if row.state not in DOWN
        ]

    def _look_at_cards_first(self, config: Config, rules: Rules, actions: list[Action], now: int) -> bool:
        """Before an eviction by a budget: one fresh look at the cards; True if it moved the ceiling."""
        evicting = any(isinstance(action, StartSwap) and action.victims for action in actions)
        if not evicting or not config.vram_budget or not self._meter.has_cards():
            return False
        before = self._accounts.ceiling
        self._meter.measure_now()
        self._shed(self._accounts.update(config, rules, now), now)
        return self._accounts.ceiling != before

    def _explain(self, rules: Rules, snapshot: Snapshot, actions: list[Action], now: int) -> None:
        """One line per swap with its arithmetic."""
        for action in actions:
            if isinstance(action, StartSwap):
                running = Board(snapshot, now).running(False)
                log.info("%s", sentence(rules, action, running, snapshot))

    def _shed(self, shed: Shed | None, now: int) -> None:
        """Memory pressure: unload what the watchdog names, as far as it is still idle."""
        if shed is None:
            return
        log.warning(
            "memory pressure: residents %.2f GiB over the line of %.2f GiB, unloading %s",
            shed.resident / GIB,
            shed.line / GIB,
            " ".join(shed.models),
        )
        for name in shed.models:
            try:
                with self._store.write(self._generation) as tx:
                    stopping = self._stop_idle(tx, [name], "memory pressure", now)
            except Conflict:
                continue
            self._signal(stopping)

    def _retry_with_more_room(self, model: str, found: OutOfMemory, now: int) -> bool:
        """A start ran out of memory: once per swap, stop the idle models of that pool and try again."""
        _, config, rules = self._configuration()
        with self._store.write(self._generation) as tx:
            swap = next((swap for swap in reading.swaps(tx) if swap.target == model), None)
            rows = sorted(reading.processes(tx).values(), key=lambda row: (row.tick, row.model))
            room = [row.model for row in rows if self._may_go(tx, config, row, found.pool, model, now)]
            if swap is None or swap.retried or not room:
                return False
            target = next(row for row in rows if row.model == model)
            log.warning("model %s ran out of memory (%s): stopping %s, trying once more", model, found.who, room)
            victims = json.dumps([*swap.victims, *room])
            scheduling.set_phase(tx, swap.id, Phase.STOPPING, victims=victims, retried=1, signalled=1)
            deadline = now + int(target.unload_timeout * SECOND)
            scheduling.set_state(tx, model, State.STOPPING, "out of memory, trying once more", deadline=deadline)
            stopping = self._stop_idle(tx, room, f"evicted for {model}, which ran out of memory", now)
            self._enter_stopping(tx, swap.id, config, rules, now)
        self._signal([model, *stopping])
        return True

    @staticmethod
    def _may_go(tx: sqlite3.Connection, config: Config, row: ProcessRow, pool: str, target: str, now: int) -> bool:
        model = config.models.get(row.model)
        if model is None or row.model == target or row.state is not State.READY or model.pool != pool:
            return False
        protected = config.groups[model.group].persistent or not model.displace
        return not protected and row.hold_until <= now and scheduling.idle(tx, row.model)

    # -- swaps ------------------------------------------------------------------------------------------------

    def _advance_swaps(self, config: Config, rules: Rules, now: int) -> bool:
        """Move each open swap to its next phase where that is possible; True when one moved."""
        with self._store.read() as tx:
            rows = reading.processes(tx)
            swaps = reading.swaps(tx)
        moved = False
        for swap in swaps:
            if swap.phase is Phase.DRAINING:
                moved |= self._advance_draining(swap, config, rules, now)
            elif swap.phase in (Phase.STOPPING, Phase.STARTING):
                moved |= self._advance_stopping(swap, rows, config, now)
        return self._advance_reclaim(config, rules, now) or moved

    def _advance_draining(self, swap: SwapRow, config: Config, rules: Rules, now: int) -> bool:
        with self._store.read() as tx:
            if not all(scheduling.idle(tx, name) for name in (*swap.victims, *swap.blockers)):
                return False
        try:
            with self._store.write(self._generation) as tx:
                self._enter_stopping(tx, swap.id, config, rules, now)
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
        if swap.phase is Phase.STOPPING and swap.reclaim:
            with self._store.write(self._generation) as tx:
                scheduling.set_phase(tx, swap.id, Phase.RECLAIM)
            sample = self._meter.gpu.latest()
            self._looked_at = sample.at if sample is not None else 0
            self._next_look = 0
            return True
        return self._start(swap, rows, config, now)

    def _start(self, swap: SwapRow, rows: dict[str, ProcessRow], config: Config, now: int) -> bool:
        """reclaim -> starting -> probing, unless the target's spawn lock is still taken."""
        model = config.models.get(swap.target)
        if model is None:
            self._drop_swap(swap, errors.ModelNotFound(f"model {swap.target} was removed from the configuration"))
            return True
        if not self._trees.start(swap, model, rows, now):
            self._next_deadline = min(self._next_deadline or now + SECOND, now + 20 * MILLISECOND)
            return False
        self._meter.ask()
        return True

    def _advance_reclaim(self, config: Config, rules: Rules, now: int) -> bool:
        """Look at the gates of all swaps in reclaim, in their order; pass, wait on or give up."""
        with self._store.read() as tx:
            rows = reading.processes(tx)
            waiting = [swap for swap in reading.swaps(tx) if swap.phase is Phase.RECLAIM]
        if not waiting or not self._due_for_look(now):
            return False
        self._next_look = 0
        moved = False
        for swap in waiting:
            looks = self._accounts.look(waiting, config, rules, now)[swap.id]
            failed = next((look for look in looks if look.failed), None)
            if failed is not None:
                self._drop_swap(swap, self._not_given_back(swap, failed))
                moved = True
            elif all(look.passed for look in looks):
                moved |= self._start(swap, rows, config, now)
            else:
                self._wait_for_memory(swap, looks)
        return moved

    def _due_for_look(self, now: int) -> bool:
        """Whether there is something new to see: a card sample that no look has used, or else the pause is over."""
        sample = self._meter.gpu.latest()
        if sample is None or not sample.total:
            return now >= self._next_look
        if sample.at != self._looked_at:
            self._looked_at = sample.at
            return True
        if now >= self._next_look:  # the pause is over: have the cards read again, and come back when they answer
            self._meter.gpu.ask()
            self._next_look = now + LOOK_AGAIN
        return now - sample.at > UNREADABLE

    def _wait_for_memory(self, swap: SwapRow, looks: list[Look]) -> None:
        """Remember how often was looked, ask the cards again, and come back when they answer or after the pause."""
        with self._store.write(self._generation) as tx:
            gates = json.dumps([look.gate.to_json() for look in looks])
            scheduling.set_phase(tx, swap.id, Phase.RECLAIM, reclaim=gates)
        due = min(look.next_look for look in looks if not look.passed)
        self._next_look = due if not self._next_look else min(self._next_look, due)

    def _not_given_back(self, swap: SwapRow, look: Look) -> errors.InsufficientMemory:
        holders = self._accounts.holders()
        message = f"model {swap.target} was not started: {look.why}"
        if holders:
            message += f"; held by {holders}"
        return errors.InsufficientMemory(message, retry_after=5)

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
        self._meter.close()
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

"""One term of office: the scheduler's tick. Decisions come from `policy.schedule`; here they are carried out."""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections.abc import Callable, Iterable

from qmflask import errors, processes
from qmflask.accounts import Accounts
from qmflask.bell import Bell
from qmflask.commands import Commands
from qmflask.config import Config
from qmflask.inforce import InForce
from qmflask.memory.samples import GIB
from qmflask.memory.watchdog import Shed
from qmflask.meter import Meter, TreeRef
from qmflask.policy import schedule
from qmflask.policy.board import Board
from qmflask.policy.plan import on_swap_start, sentence
from qmflask.policy.returning import Quiet, returns
from qmflask.policy.rules import Rules
from qmflask.policy.schedule import AbortSwap, Action, Reject, Serve, Snapshot, StartSwap, Stop
from qmflask.processes import Children, Identity
from qmflask.sampling import Sampler
from qmflask.states import DOWN, State
from qmflask.store import Store, Transaction, reading, scheduling
from qmflask.swaps import Conflict, Swaps
from qmflask.trees import SECOND, Trees

log = logging.getLogger(__name__)

HEARTBEAT = SECOND // 2
#: How often the logs of live models are kept below their cap, in seconds; on a thread of its own, as it may wait for
#: the disk.
TRIM_EVERY = 0.5
#: Decisions made outside the transaction before one is made inside (DESIGN section 1).
OPTIMISTIC_TRIES = 2


class Term:
    """Carries out the scheduler's decisions while `generation` is the store's. `run` returns when the term is over."""

    def __init__(
        self,
        store: Store,
        generation: int,
        worker: str,
        children: Children,
        configuration: Callable[[], tuple[int, Config, Rules]],
        refresh: Callable[[], bool],
        send: Callable[[str, bytes], None],
        on_tick: Callable[[int], None],
        on_learned: Callable[[], None],
    ) -> None:
        self._store = store
        self._generation = generation
        self._worker = worker
        self._configuration = configuration
        self._in_force = InForce(store, lambda: configuration()[0], refresh)
        self._send = send
        self._on_tick = on_tick
        self._selector = selectors.DefaultSelector()
        self._bell = Bell()
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._trees = Trees(store, generation, children, self.ring, self._watch_tree, self._selector_remove)
        self._workers: dict[str, int] = {}
        self._reconciled = 0
        self._next_beat = 0
        self._quiet = Quiet(time.monotonic_ns())
        self._next_deadline: int | None = None
        self._beats = 0
        self._unmoved: tuple[object, ...] = ()  # the `_sight` that moved nothing at the last look
        self._woken: set[str] = set()
        self._meter = Meter(configuration()[1].performance.every, self._tree_refs, self.ring)
        self._accounts = Accounts(store, generation, self._meter, on_learned)
        self._swaps = Swaps(store, generation, self._trees, self._accounts, configuration, self._in_force)
        self._commands = Commands(store, generation, self._trees, self._accounts.relearn, self._in_force)
        self._trees.on_out_of_memory = self._swaps.retry_with_more_room
        self._trees.free_now = self._accounts.free_now
        self._trees.on_down = self._meter.ask
        self._trimmer = Sampler("logs", self._trees.trim_logs, TRIM_EVERY)

    # -- the loop ---------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Make the loop turn now; any thread may call it, also after the end."""
        self._bell.ring()

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
        self._in_force.catch_up()
        generation, config, _ = self._configuration()
        self._meter.start()
        self._trimmer.start()
        self._watch_workers()
        with self._store.read() as tx:
            rows = reading.processes(tx)
        self._trees.adopt(rows, config.models, now)
        log.info("leading: term %d, configuration %d", self._generation, generation)
        self._turn(set())

    def _wait(self) -> set[tuple[str, str]]:
        """Sleep until something happens or is due; returns ("tree", model) and ("worker", id) whose process ended."""
        now = time.monotonic_ns()
        due = [self._next_beat, self._trees.next_look(), self._next_deadline, self._swaps.next_look or None]
        timeout = max(0, min(moment for moment in due if moment is not None) - now) / SECOND
        ended: set[tuple[str, str]] = set()
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._bell.answer()
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
            self._beats += 1
            self._next_beat = now + HEARTBEAT
            _, config, rules = self._configuration()
            self._bring_default_back(config, rules, now)
        if dead := {name for kind, name in ended if kind == "worker"}:
            self._bury_workers(dead)
        exited = {name for kind, name in ended if kind == "tree"}
        for _ in range(100):  # a bound, so that a bug cannot spin here with the heartbeat standing still
            now = time.monotonic_ns()
            self._in_force.catch_up()
            generation, config, rules = self._configuration()
            self._woken |= self._trees.poll(exited, now)
            exited = set()
            self._wake_workers()  # who waits for what is ready now need not wait for what follows
            self._trees.record_ready()
            if generation != self._reconciled and self._in_force.certain:
                self._woken |= self._commands.reconcile(config)
                self._reconciled = generation
            self._woken |= self._commands.run(generation, config, now)
            self._shed(self._accounts.update(config, rules, now), now)
            moved = self._decide(now)
            moved |= self._swaps.advance(config, rules, now)
            self._wake_workers()
            if not moved:
                return
        log.error("the scheduler did not come to rest in one tick; going on in the next")

    def _wake_workers(self) -> None:
        self._woken |= self._swaps.woken
        self._swaps.woken.clear()
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
            unasked = {row.id for row in reading.workers(tx) if not row.draining}  # who ends in order has left the list
            gone = scheduling.drop_dead_workers(tx, dead)
        for name in dead:
            log.log(logging.WARNING if name in unasked else logging.INFO, "worker %s is gone", name)
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

    def _decide(self, now: int) -> bool:
        """Decide and apply; True when something changed, or is to be looked at by a newer configuration first.

        The last try decides inside the transaction.
        """
        measured = False
        for _ in range(OPTIMISTIC_TRIES):
            # a look at memory may have changed what models are charged
            generation, config, rules = self._configuration()
            with self._store.read() as tx:
                if self._in_force.behind(tx, generation):
                    return True
                sight = self._sight(tx, rules)
                if sight == self._unmoved and (self._next_deadline is None or now < self._next_deadline):
                    return False
                version = reading.scheduler(tx).schedule_version
                snapshot = reading.snapshot(tx, rules, whole=True)
            if self._note_asked(snapshot, now):
                continue
            actions = schedule.decide(snapshot, now)
            self._next_deadline = schedule.next_deadline(snapshot, now)
            if not any(_changes(action) for action in actions):
                self._unmoved = sight
                return False
            if not measured and _evicts(actions) and (self._meter.has_cards() or config.ram_budget):
                measured = True
                if self._look_at_memory_first(now):
                    continue
            self._explain(rules, snapshot, actions, now)
            try:
                with self._store.write(self._generation) as tx:
                    if reading.scheduler(tx).schedule_version != version:
                        raise Conflict("the schedule has changed")
                    stopping = self._apply(tx, actions, config, rules, now)
            except Conflict:
                continue
            self._swaps.signal(stopping)
            return True
        generation, config, rules = self._configuration()
        with self._store.write(self._generation) as tx:
            if self._in_force.behind(tx, generation):
                return True
            actions = schedule.decide(reading.snapshot(tx, rules, whole=True), now)
            stopping = self._apply(tx, actions, config, rules, now)
        self._swaps.signal(stopping)
        return any(_changes(action) for action in actions)

    def _sight(self, tx: Transaction, rules: Rules) -> tuple[object, ...]:
        """What changes with anything a decision could look at: commits of others, rows of our own, and the rules.

        Our heartbeat is left out: else a leader whose house is full, and where nothing happens, would read the whole
        queue with each.
        """
        return (tx.execute("PRAGMA data_version").fetchone()[0], tx.total_changes - self._beats, rules)

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

    def _apply(self, tx: Transaction, actions: list[Action], config: Config, rules: Rules, now: int) -> list[str]:
        """Write what was decided; returns the models that are to be signalled after the commit."""
        stopping: list[str] = []
        for action in actions:
            if isinstance(action, Serve):
                self._woken |= scheduling.grant(tx, [action.request], action.model, now, paid=False)
            elif isinstance(action, Reject):
                error = errors.from_code(action.code, action.message, retry_after=action.retry_after)
                if isinstance(error, errors.ModelNotFound):
                    error = self._in_force.not_found(action.message)
                self._woken |= scheduling.fail(tx, [action.request], error)
            elif isinstance(action, StartSwap):
                stopping += self._swaps.open(tx, action, config, rules, now)
            elif isinstance(action, AbortSwap):
                stopping += self._swaps.abort(tx, action.swap, now)
            elif isinstance(action, Stop):
                stopping += self._swaps.stop_idle(tx, [action.model], action.reason, now)
        return stopping

    def _bring_default_back(self, config: Config, rules: Rules, now: int) -> None:
        """Queue the default model when the box has been idle for `returnAfter`: no answer, no load, no stop."""
        with self._store.read() as tx:
            row = reading.scheduler(tx)
            profile = config.profiles.get(row.active_profile or "")
            model = (profile.default_model if profile else "") or config.default_model
            if not model:
                return
            snapshot = reading.snapshot(tx, rules, whole=True)
        back = returns(snapshot, model, self._quiet.look(snapshot, now), int(config.return_after * SECOND), now)
        if not back and not any(request.model == model and request.owned for request in snapshot.queue):
            return
        with self._store.write(self._generation) as tx:
            if back:
                log.info("idle for %.0f s: the default model %s is loaded again", config.return_after, model)
                scheduling.queue_load(tx, model, now)
            else:
                scheduling.forget_waiting_default(tx)

    # -- memory -----------------------------------------------------------------------------------------------

    def _tree_refs(self) -> tuple[int, list[TreeRef]]:
        """The schedule's version and the trees to measure; called on the meter's thread."""
        models = self._configuration()[1].models
        with self._store.read() as tx:
            version = reading.scheduler(tx).schedule_version
            rows = reading.processes(tx).values()
        return version, [
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

    def _look_at_memory_first(self, now: int) -> bool:
        """Before an eviction: one fresh look at cards and host; True if a ceiling or a size moved: decide anew."""
        _, config, rules = self._configuration()
        before = self._accounts.ceilings
        self._meter.measure_now()
        self._shed(self._accounts.update(config, rules, now), now)
        return self._accounts.ceilings != before or self._configuration()[2] is not rules

    def _explain(self, rules: Rules, snapshot: Snapshot, actions: list[Action], now: int) -> None:
        """One line per swap with its arithmetic; at debug level one more, without the victims."""
        for action in actions:
            if isinstance(action, StartSwap):
                running = Board(snapshot, now).running(False)
                log.info("%s", sentence(rules, action, running, snapshot))
                if line := on_swap_start(rules, action, running, snapshot):
                    log.debug("%s", line)

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
                    stopping = self._swaps.stop_idle(tx, [name], "memory pressure", now)
            except Conflict:
                continue
            self._swaps.signal(stopping)

    def close(self) -> None:
        """End what the term owns in this process: watched descriptors, probers, the selector. The trees live on."""
        self._meter.close()
        self._trimmer.close()
        self._trees.close()
        for descriptor in self._workers.values():
            os.close(descriptor)
        self._workers.clear()
        self._selector.close()
        self._bell.close()


def _evicts(actions: Iterable[Action]) -> bool:
    return any(isinstance(action, StartSwap) and action.victims for action in actions)


def _changes(action: Action) -> bool:
    return isinstance(action, Serve | Reject | StartSwap | AbortSwap | Stop)

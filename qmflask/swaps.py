"""Swaps of one term: victims drain and stop, their memory is seen free, the target starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable

from qmflask import errors
from qmflask.accounts import UNREADABLE, Accounts
from qmflask.config import Config
from qmflask.inforce import InForce
from qmflask.memory.oom import OutOfMemory
from qmflask.memory.reclaim import Look
from qmflask.meter import Meter
from qmflask.policy.actions import StartSwap
from qmflask.policy.rules import Rules
from qmflask.states import DOWN, Phase, State
from qmflask.store import Store, Transaction, reading, scheduling
from qmflask.store.rows import ProcessRow, SwapRow
from qmflask.trees import MILLISECOND, SECOND, Trees

log = logging.getLogger(__name__)

#: When cards that were asked have not answered, they are asked again after this time.
LOOK_AGAIN = 50 * MILLISECOND
#: A spawn lock that is taken is tried again after this time.
LOCK_AGAIN = 20 * MILLISECOND


class Conflict(Exception):
    """Raised inside a transaction when the store has moved on since the decision; decide again."""


class Swaps:
    """Opens, moves on and drops swaps. `woken` collects the workers that have an answer."""

    def __init__(
        self,
        store: Store,
        generation: int,
        trees: Trees,
        accounts: Accounts,
        configuration: Callable[[], tuple[int, Config, Rules]],
        in_force: InForce,
    ) -> None:
        self._store = store
        self._generation = generation
        self._trees = trees
        self._accounts = accounts
        self._meter: Meter = accounts.meter
        self._configuration = configuration
        self._in_force = in_force
        self.woken: set[str] = set()
        #: When `advance` must run again though nothing happens (monotonic ns), 0: no need.
        self.next_look = 0
        self._reclaim_due = 0
        self._looked_at = 0

    def open(self, tx: Transaction, action: StartSwap, config: Config, rules: Rules, now: int) -> list[str]:
        reason = f"making room for {action.target}"
        swap = scheduling.open_swap(tx, action.target, action.victims, action.blockers, f"requested ({reason})", now)
        rows = reading.processes(tx)
        names = " ".join(action.victims) or "nothing"
        log.info("swap %d: start %s, stop %s%s", swap, action.target, names, ", draining" if action.fixed else "")
        ready = [name for name in action.victims if name in rows and rows[name].state is State.READY]
        idle = all(scheduling.idle(tx, name) for name in ready)
        if idle and all(scheduling.idle(tx, name) for name in action.blockers):
            self._enter_stopping(tx, swap, config, rules, now)
            return self._stop_victims(tx, ready, action.target, now)
        if not action.fixed and not idle:  # only patience that is over drains victims; a render may just be waited for
            raise Conflict("a victim is in use again")
        for name in ready:
            scheduling.set_state(tx, name, State.DRAINING, _evicted(name, action.target))  # ready -> draining
        return []

    def _enter_stopping(self, tx: Transaction, swap_id: int, config: Config, rules: Rules, now: int) -> None:
        """draining -> stopping; what the victims hold now is what must be seen free later."""
        rows = reading.swaps(tx)
        swap = next(row for row in rows if row.id == swap_id)
        waiting = (Phase.STOPPING, Phase.RECLAIM)  # a swap past its gate has nothing outstanding
        earlier = [row for row in rows if row.id != swap_id and row.reclaim and row.phase in waiting]
        gates = self._accounts.open_gates(swap, reading.processes(tx), config, rules, now, earlier)
        scheduling.set_phase(tx, swap_id, Phase.STOPPING, signalled=1, reclaim=gates)

    def stop_idle(self, tx: Transaction, models: Iterable[str], reason: str, now: int) -> list[str]:
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

    def _stop_victims(self, tx: Transaction, victims: Iterable[str], target: str, now: int) -> list[str]:
        return [name for victim in victims for name in self.stop_idle(tx, [victim], _evicted(victim, target), now)]

    def abort(self, tx: Transaction, swap_id: int, now: int) -> list[str]:
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

    def signal(self, models: Iterable[str]) -> None:
        for name in models:
            with self._store.read() as tx:
                row = reading.process(tx, name)
            if row is not None and row.state is State.STOPPING:
                self._trees.signal_stop(row)

    def retry_with_more_room(self, model: str, found: OutOfMemory, now: int) -> bool:
        """A start ran out of memory: once per swap, stop the idle models of that pool and try again."""
        _, config, rules = self._configuration()
        with self._store.write(self._generation) as tx:
            swap = next((swap for swap in reading.swaps(tx) if swap.target == model), None)
            rows = sorted(reading.processes(tx).values(), key=lambda row: (row.used_at, row.model))
            room = [row.model for row in rows if self._may_go(tx, config, row, found.pool, model, now)]
            if swap is None or swap.retried or not room or not scheduling.wanted(tx, model):
                return False
            target = next(row for row in rows if row.model == model)
            log.warning("model %s ran out of memory (%s): stopping %s, trying once more", model, found.who, room)
            victims = json.dumps([*swap.victims, *room])
            scheduling.set_phase(tx, swap.id, Phase.STOPPING, victims=victims, retried=1, signalled=1)
            deadline = now + int(target.unload_timeout * SECOND)
            scheduling.set_state(tx, model, State.STOPPING, "out of memory, trying once more", deadline=deadline)
            stopping = self.stop_idle(tx, room, f"evicted for {model}, which ran out of memory", now)
            self._enter_stopping(tx, swap.id, config, rules, now)
        self.signal([model, *stopping])
        return True

    @staticmethod
    def _may_go(tx: Transaction, config: Config, row: ProcessRow, pool: str, target: str, now: int) -> bool:
        model = config.models.get(row.model)
        if model is None or row.model == target or row.state is not State.READY or model.pool != pool:
            return False
        group = config.groups.get(model.group)  # the matrix has none
        protected = not model.displace or (group is not None and group.persistent)
        return not protected and row.hold_until <= now and scheduling.idle(tx, row.model)

    def advance(self, config: Config, rules: Rules, now: int) -> bool:
        """Move each open swap to its next phase where that is possible; True when one moved."""
        with self._store.read() as tx:
            rows = reading.processes(tx)
            swaps = reading.swaps(tx)
        self.next_look = 0
        moved = False
        for swap in swaps:
            if swap.phase is Phase.DRAINING:
                moved |= self._advance_draining(swap, config, rules, now)
            elif swap.phase in (Phase.STOPPING, Phase.STARTING):
                moved |= self._advance_stopping(swap, rows, config, now)
        moved |= self._advance_reclaim(config, rules, now)
        if self._reclaim_due:
            self.next_look = min(self.next_look or self._reclaim_due, self._reclaim_due)
        return moved

    def _advance_draining(self, swap: SwapRow, config: Config, rules: Rules, now: int) -> bool:
        with self._store.read() as tx:
            if not all(scheduling.idle(tx, name) for name in (*swap.victims, *swap.blockers)):
                return False
        if self._meter.has_cards():
            self._meter.measure_now()
        try:
            with self._store.write(self._generation) as tx:
                self._enter_stopping(tx, swap.id, config, rules, now)
                stopping = self._stop_victims(tx, swap.victims, swap.target, now)
        except Conflict:
            return False
        self.signal(stopping)
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
            self._reclaim_due = 0
            return True
        return self._start(swap, rows, config, now)

    def _start(self, swap: SwapRow, rows: dict[str, ProcessRow], config: Config, now: int) -> bool:
        """reclaim -> starting -> probing, unless the target's spawn lock is still taken."""
        model = config.models.get(swap.target)
        if model is None:
            gone = f"model {swap.target} was removed from the configuration"
            self._drop_swap(swap, self._in_force.not_found(gone))
            return True
        if not self._trees.start(swap, model, rows, now):
            self.next_look = now + LOCK_AGAIN
            return False
        self._meter.ask()
        return True

    def _advance_reclaim(self, config: Config, rules: Rules, now: int) -> bool:
        """Look at the gates of all swaps in reclaim, in their order; pass, wait on or give up."""
        with self._store.read() as tx:
            rows = reading.processes(tx)
            waiting = [swap for swap in reading.swaps(tx) if swap.phase is Phase.RECLAIM]
        if not waiting:
            self._reclaim_due = 0
            return False
        if not self._due_for_look(now):
            return False
        self._reclaim_due = 0
        moved = False
        for swap in waiting:
            looks = self._accounts.look(waiting, rows, config, rules, now)[swap.id]
            failed = next((look for look in looks if look.failed), None)
            if failed is not None:
                self._drop_swap(swap, self._not_given_back(swap, failed))
                moved = True
            elif all(look.passed for look in looks):
                if waited := max((look.gate.looks for look in looks), default=0):
                    log.info("swap %d: memory was seen free after %d looks", swap.id, waited + 1)
                moved |= self._start(swap, rows, config, now)
            else:
                self._wait_for_memory(swap, looks)
        return moved

    def _due_for_look(self, now: int) -> bool:
        """Whether there is something new to see: a card sample that no look has used, or else the pause is over."""
        sample = self._meter.gpu.latest()
        if sample is None or not sample.total:
            return now >= self._reclaim_due
        if sample.at != self._looked_at:
            self._looked_at = sample.at
            return True
        if now >= self._reclaim_due:  # the pause is over: have the cards read again, and come back when they answer
            self._meter.gpu.ask()  # at once; and trees, as a model that started meanwhile is not memory not given back
            self._meter.ask()
            self._reclaim_due = now + LOOK_AGAIN
        return now - sample.at > UNREADABLE

    def _wait_for_memory(self, swap: SwapRow, looks: list[Look]) -> None:
        """Remember how often was looked, ask the cards again, and come back when they answer or after the pause."""
        with self._store.write(self._generation) as tx:
            gates = json.dumps([look.gate.to_json() for look in looks])
            scheduling.set_phase(tx, swap.id, Phase.RECLAIM, reclaim=gates)
        due = min(look.next_look for look in looks if not look.passed)
        self._reclaim_due = due if not self._reclaim_due else min(self._reclaim_due, due)

    def _not_given_back(self, swap: SwapRow, look: Look) -> errors.InsufficientMemory:
        holders = self._accounts.holders(look.gate.pool)
        message = f"model {swap.target} was not started: {look.why}"
        if holders:
            message += f"; others hold {holders}"
        return errors.InsufficientMemory(message, retry_after=5)

    def _serve_ready(self, swap: SwapRow, now: int) -> None:
        """The target was ready all along and only had victims: their end is the end of the swap."""
        with self._store.write(self._generation) as tx:
            scheduling.close_swap(tx, swap.id)
            waiting = scheduling.waiting_for(tx, swap.target)
            self.woken |= scheduling.grant(tx, waiting, swap.target, now, paid=False)

    def _drop_swap(self, swap: SwapRow, error: errors.QmflaskError) -> None:
        with self._store.write(self._generation) as tx:
            scheduling.close_swap(tx, swap.id)
            self.woken |= scheduling.fail(tx, scheduling.waiting_for(tx, swap.target), error)


def _is_down(row: ProcessRow | None) -> bool:
    return row is None or row.state in DOWN


def _evicted(victim: str, target: str) -> str:
    """Why a victim stops, for people: one that was changed makes way for itself."""
    return "its configuration changed" if victim == target else f"evicted for {target}"

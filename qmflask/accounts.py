"""The leader's memory accounts: ceilings, learned sizes, reclaim gates and the watchdog, over what is measured."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from qmflask.config import Config
from qmflask.memory import oom
from qmflask.memory.ceiling import (
    Ceiling,
    ModelView,
    foreign_processes,
    fresh,
    holdings,
    news,
    ram_ceiling,
    relearn,
    step,
    unlisted,
)
from qmflask.memory.charges import charge
from qmflask.memory.reclaim import Gate, Look, PoolState, look_all, open_gate
from qmflask.memory.samples import GIB, GpuSample
from qmflask.memory.watchdog import ResidentView, Shed, Watch, watch
from qmflask.meter import Measured, Meter
from qmflask.policy.rules import Rules
from qmflask.processes import Identity
from qmflask.states import DOWN, Phase, State
from qmflask.store import Store, Transaction, reading, scheduling
from qmflask.store.rows import ProcessRow, SwapRow

log = logging.getLogger(__name__)

SECOND = 1_000_000_000
#: A card sample older than this tells nothing: its driver hangs.
STALE_INTERVALS = 4
#: Cards that have not answered for this long tell a swap in reclaim nothing any more.
UNREADABLE = 3 * SECOND
#: How long after a stop what the cards show may still be that model's.
LATE_RELEASE = 2 * SECOND
#: So many programs of others are named where memory is missing.
NAMED = 3
#: How long the pids of a tree that has ended are remembered.
FORGET_PIDS = 120 * SECOND


class Accounts:
    """Keeps one term's view of memory; every decision is pure (`qmflask.memory`), this only feeds and stores."""

    def __init__(
        self, store: Store, generation: int, meter: Meter, on_learned: Callable[[], None] = lambda: None
    ) -> None:
        """`on_learned` is called when a size has risen, so that the rules can be made anew."""
        self._store = store
        self._generation = generation
        self.meter = meter
        self._on_learned = on_learned
        with store.read() as tx:
            self._ceiling = Ceiling(floors=scheduling.floors(tx, store.boot_id))
        self._ram_ceiling: int | None = None
        self._watch = Watch()
        self._taken = 0
        #: Bytes on the cards that no process holds when nothing of ours moves; None before the first sample.
        self._overhead: int | None = None
        self._our_pids: dict[int, int] = {}  # pid -> when it was last seen in a tree of ours
        self._answered: set[tuple[str, int]] = set()
        self._listed = False  # the driver has listed a process of ours
        self._down: set[str] = set()
        self._settles_at = 0
        self._relearned = 0
        self._warned: set[tuple[str, str, int]] = set()

    # -- samples ----------------------------------------------------------------------------------------------

    def update(self, config: Config, rules: Rules, now: int) -> Shed | None:
        """Take the newest round into the store, if there is one; returns what the watchdog wants unloaded."""
        measured = self.meter.latest()
        with self._store.read() as tx:
            answered = reading.answered(tx)
            if not answered <= self._answered:
                self.meter.ask()  # a size is learned from the first answer on
            self._answered = answered
            if measured is None or measured.at == self._taken:
                return None
            self._taken = measured.at
            rows = reading.processes(tx)
            moved = reading.scheduler(tx).schedule_version != measured.version
            reclaiming = any(swap.phase is Phase.RECLAIM for swap in reading.swaps(tx))
        # A sample that began before something of ours moved shows memory that no row explains any more.
        sample = fresh(measured.gpu, now, self._limit(config))
        late = self._just_stopped(rows, now) and not self._all_back(measured, sample)
        unsettled = moved or reclaiming or late
        views = _current(measured.models, rows)
        before, budget = self._ceiling, config.vram_budget
        self._ceiling = step(before, sample, views, budget, config.vram_reserve, unsettled)
        if sample is not None and sample.total and (line := news(before, self._ceiling)):
            log.info("%s", line)
        self._note_overhead(measured, sample, views, settled=not unsettled and self._ceiling.trusted)
        held = holdings(sample, views)
        self._write(measured, config, rules, rows, held)
        self._learn(config, rows, held, measured)
        return self._watchdog(config, rules, rows, now)

    def _note_overhead(
        self, measured: Measured, sample: GpuSample | None, views: Sequence[ModelView], settled: bool
    ) -> None:
        """What a driver holds for nobody is known for sure while nothing moves; until then the least seen is it."""
        found = unlisted(sample, self._dead(measured)) if sample is not None else None
        if sample is None or found is None:
            return
        self._overhead = found if settled or self._overhead is None else min(self._overhead, found)
        self._listed = self._listed or bool(holdings(sample, views))

    def _dead(self, measured: Measured) -> set[int]:
        """Pids that were ours and have ended: a sample that began before their end still lists them."""
        now = time.monotonic_ns()
        self._our_pids.update({pid: now for view in measured.models for pid in view.pids})
        self._our_pids = {pid: seen for pid, seen in self._our_pids.items() if now - seen < FORGET_PIDS}
        return {pid for pid in self._our_pids if Identity.of(pid) is None}

    def _just_stopped(self, rows: Mapping[str, ProcessRow], now: int) -> bool:
        """Whether a model went down lately: a driver may free its memory a moment later."""
        down = {row.model for row in rows.values() if row.state in DOWN}
        if not down <= self._down:
            self._settles_at = now + LATE_RELEASE
        self._down = down
        return now < self._settles_at

    def _all_back(self, measured: Measured, sample: GpuSample | None) -> bool:
        """Whether the driver shows that it holds nothing of the dead any more: then nobody has to wait for it."""
        beyond = unlisted(sample, self._dead(measured)) if sample is not None and self._listed else None
        return beyond is not None and self._overhead is not None and beyond <= self._overhead

    def _limit(self, config: Config) -> int:
        return int(STALE_INTERVALS * config.performance.every * SECOND)

    def _write(
        self,
        measured: Measured,
        config: Config,
        rules: Rules,
        rows: Mapping[str, ProcessRow],
        held: Mapping[str, int],
    ) -> None:
        ram_held = sum(_counted(view, measured, rules) for view in measured.models if view.model in measured.ram)
        self._ram_ceiling = ram_ceiling(config.ram_budget, measured.host.available, ram_held)
        body = {
            "wall": time.time(),
            "vram_ceiling": self._ceiling.ceiling,
            "ram_ceiling": self._ram_ceiling,
            "vram_budget": config.vram_budget,
            "ram_budget": config.ram_budget,
            "foreign": self._ceiling.foreign,
            "floor": self._ceiling.floor,
            "excess": self._ceiling.excess,
            "trusted": self._ceiling.trusted,
            "why": self._ceiling.why,
            "cards": [_card(card) for card in measured.gpu.cards] if measured.gpu else [],
            "host": asdict(measured.host),
            "models": {
                view.model: {
                    "vram": held.get(view.model),
                    "ram": measured.ram[view.model].held if view.model in measured.ram else None,
                    "pids": sorted(view.pids),
                }
                for view in measured.models
            },
            "foreign_processes": [
                {"pid": pid, "name": self.meter.host.name_of(pid) or "?", "bytes": size}
                for pid, size in list(foreign_processes(measured.gpu, measured.models).items())[:8]
            ],
        }
        with self._store.write(self._generation) as tx:
            scheduling.write_sample(tx, measured.at, body)
            if self._ceiling.floors != scheduling.floors(tx, self._store.boot_id):
                scheduling.write_floors(tx, self._store.boot_id, self._ceiling.floors)
            self._retry_early(tx, rows, measured)

    def _retry_early(self, tx: Transaction, rows: Mapping[str, ProcessRow], measured: Measured) -> None:
        """A start that ran out of memory may be tried again as soon as 5 % more is free."""
        free = self._free(measured)
        for row in rows.values():
            if row.state is State.FAILED and row.failure_pool and row.retry_at > measured.at:
                failed_at = row.retry_at - oom.PAUSE
                if oom.may_retry(failed_at, row.failure_free, measured.at, free.get(row.failure_pool)):
                    scheduling.update_process(tx, row.model, retry_at=measured.at)
                    scheduling.bump(tx)

    @staticmethod
    def _free(measured: Measured) -> dict[str, int]:
        free = {"ram": measured.host.available}
        if measured.gpu is not None and measured.gpu.total:
            free["vram"] = measured.gpu.total - measured.gpu.used
        return free

    def free_now(self, pool: str) -> int | None:
        """Free bytes of a pool at the newest round, for the row of a start that ran out of memory."""
        measured = self.meter.latest()
        return self._free(measured).get(pool) if measured is not None else None

    @property
    def ceilings(self) -> tuple[int | None, int | None]:
        """The live ceilings of VRAM and RAM in bytes, None where the budget stands alone."""
        return self._ceiling.ceiling, self._ram_ceiling

    def holders(self, pool: str) -> str:
        """Who holds a pool's memory, in words: our models, then the largest others; empty when nobody is known."""
        measured = self.meter.latest()
        if measured is None:
            return ""
        pids = {pid for view in measured.models for pid in view.pids}
        if pool == "ram":
            ours = {model: memory.held for model, memory in measured.ram.items()}
            others = self.meter.host.largest(pids, NAMED)
        else:
            ours = holdings(measured.gpu, measured.models)
            others = list(foreign_processes(measured.gpu, measured.models).items())[:NAMED]
        found = [(model, size) for model, size in sorted(ours.items(), key=lambda item: -item[1]) if size]
        found += [(f"{self.meter.host.name_of(pid) or '?'} (pid {pid})", size) for pid, size in others]
        return ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in found)

    def relearn(self) -> None:
        """Forget the floors; the next trusted reading sets them."""
        self._ceiling = relearn(self._ceiling)
        self.meter.ask()

    # -- sizes ------------------------------------------------------------------------------------------------

    def _learn(
        self, config: Config, rows: Mapping[str, ProcessRow], held: Mapping[str, int], measured: Measured
    ) -> None:
        if not config.learn_sizes:
            return
        rose = False
        for view in measured.models:
            row, model = rows.get(view.model), config.models.get(view.model)
            if row is None or model is None or not row.answered or row.launch_hash is None:
                continue
            if row.state not in (State.READY, State.DRAINING) or row.launch_hash != model.launch_hash:
                continue
            vram = held.get(view.model, 0) if view.pool != "ram" else 0
            ram = measured.ram[view.model].held if view.model in measured.ram else 0
            with self._store.write(self._generation) as tx:
                if scheduling.learn_size(tx, row.launch_hash, view.model, vram, ram):
                    rose = True
                    self._warn(view.model, "estVramGB", model.est_vram, vram)
                    self._warn(view.model, "estRamGB", model.est_ram, ram)

        if rose:
            self._on_learned()

    def _warn(self, model: str, key: str, configured: int, learned: int) -> None:
        warning = charge(configured, learned).warning(model, key)
        if warning and (model, key, learned >> 28) not in self._warned:
            self._warned.add((model, key, learned >> 28))
            log.warning("%s", warning)

    # -- watchdog ---------------------------------------------------------------------------------------------

    def _watchdog(self, config: Config, rules: Rules, rows: Mapping[str, ProcessRow], now: int) -> Shed | None:
        if not config.pressure_evict:
            return None
        with self._store.read() as tx:
            leases = reading.leases(tx)
        residents = [
            ResidentView(row.model, rules.charges[row.model].vram, _free_to_go(config, row, leases, now))
            for row in rows.values()
            if row.state in (State.READY, State.DRAINING, State.STARTING)
            and row.model in config.models
            and config.models[row.model].pool != "ram"
        ]
        grace = int(config.pressure_grace * SECOND)
        # Without trust nothing is known of others, but learned sizes may have raised our own sum over the budget.
        excess = self._ceiling.excess if self._ceiling.trusted else 0
        self._watch, shed = watch(self._watch, residents, config.vram_budget, excess, grace, now)
        return shed

    # -- reclaim gates ----------------------------------------------------------------------------------------

    def open_gates(
        self,
        swap: SwapRow,
        rows: Mapping[str, ProcessRow],
        config: Config,
        rules: Rules,
        now: int,
        earlier: Sequence[SwapRow],
    ) -> str | None:
        """The gates of a swap whose victims are about to be signalled, as JSON for its row; None if it needs none."""
        measured = self.meter.latest()
        if measured is None:
            return None
        need = rules.charges.get(swap.target)
        deadline = now + int(config.reclaim_timeout * SECOND)
        gates = []
        for pool in self._pools(config):
            state = self._state(pool, rules, rows, self._limit(config))
            if state is None:
                continue
            victims = {name: state.holds.get(name, 0) for name in swap.victims}
            charged = getattr(need, pool) if need is not None else 0
            others = [gate for row in earlier for gate in gates_of(row) if gate.pool == pool]
            gate = open_gate(swap.id, pool, state, victims, charged, deadline, others)
            gates += [gate] if gate.waits else []
        return json.dumps([gate.to_json() for gate in gates]) if gates else None

    def _pools(self, config: Config) -> list[str]:
        pools = ["vram"] if self.meter.has_cards() else []
        return [*pools, "ram"] if config.ram_budget else pools

    def look(
        self, waiting: Sequence[SwapRow], rows: Mapping[str, ProcessRow], config: Config, rules: Rules, now: int
    ) -> dict[int, list[Look]]:
        """One look at all gates that wait, pool by pool in the order of swaps."""
        found: dict[int, list[Look]] = {row.id: [] for row in waiting}
        for pool in ("vram", "ram"):
            gates = [gate for row in waiting for gate in gates_of(row) if gate.pool == pool]
            if gates:
                state = self._state(pool, rules, rows, UNREADABLE) if pool in self._pools(config) else None
                for result in look_all(gates, state, now):
                    found[result.gate.swap].append(result)
        return found

    def _state(self, pool: str, rules: Rules, rows: Mapping[str, ProcessRow], limit: int) -> PoolState | None:
        """One pool now: from the cards' own thread, or from the kernel; sizes of our trees as last measured."""
        measured = self.meter.latest()
        if measured is None:
            return None
        starting = {
            row.model: getattr(rules.charges[row.model], pool)
            for row in rows.values()
            if row.state is State.STARTING and row.model in rules.charges
        }
        if pool == "ram":
            host = self.meter.host.memory()
            ram = {model: memory.returns for model, memory in measured.ram.items()}
            return PoolState(host.used, host.available, ram, starting)
        sample = fresh(self.meter.gpu.latest(), time.monotonic_ns(), limit)
        if sample is None:
            return None
        beyond = unlisted(sample, self._dead(measured)) if self._listed else None
        unexplained = None if beyond is None or self._overhead is None else max(0, beyond - self._overhead)
        holds = holdings(sample, measured.models)
        return PoolState(sample.used, sample.total - sample.used, holds, starting, unexplained)


def gates_of(swap: SwapRow) -> list[Gate]:
    """The gates in a swap's row."""
    return [Gate.from_json(body) for body in json.loads(swap.reclaim)] if swap.reclaim else []


def _current(models: Sequence[ModelView], rows: Mapping[str, ProcessRow]) -> list[ModelView]:
    """The measured trees with the states of now: a start or stop since then makes a sample unsettled."""
    known = {view.model: view for view in models}
    return [
        ModelView(row.model, row.state, known[row.model].pool, known[row.model].pids)
        if row.model in known
        else ModelView(row.model, State.STARTING)
        for row in rows.values()
        if row.state not in (State.STOPPED, State.FAILED)
    ]


def _free_to_go(config: Config, row: ProcessRow, leases: Mapping[str, int], now: int) -> bool:
    group = config.groups.get(config.models[row.model].group)  # the matrix has none
    kept = group is not None and group.persistent
    return row.state is State.READY and not leases.get(row.model) and row.hold_until <= now and not kept


def _counted(view: ModelView, measured: Measured, rules: Rules) -> int:
    """What a model holds of the system memory that the RAM rule counts, so that it is not counted twice.

    That rule charges a GPU model its offloaded share, so as much of that as it holds already is not missing either.
    """
    returns = measured.ram[view.model].returns
    if view.pool == "ram":
        return returns
    return min(returns, rules.charges[view.model].ram) if view.model in rules.charges else 0


def _card(card: Any) -> dict[str, Any]:
    body = asdict(card)
    body["processes"] = None if card.processes is None else {str(pid): size for pid, size in card.processes.items()}
    return body

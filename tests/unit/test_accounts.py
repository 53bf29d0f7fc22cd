"""The leader's memory accounts over a real store: what they make of measurements, without a card or a process."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qmflask.accounts import Accounts
from qmflask.config import Config, Model
from qmflask.config.resolved import Group
from qmflask.memory.ceiling import ModelView
from qmflask.memory.reclaim import Look
from qmflask.memory.samples import GIB, Card, GpuSample, HostMemory, TreeMemory
from qmflask.meter import Measured
from qmflask.policy.rules import make_rules
from qmflask.states import Phase, State
from qmflask.store import Store, prepare_state_directory, reading, scheduling

NOW = time.monotonic_ns()
#: Pids of processes that live; only their numbers are used.
LIVING = (os.getpid(), os.getppid(), 1)


@dataclass
class Meter:
    """Measures what a test has put into it: GiB by model on a card and in system memory."""

    card: dict[str, float] = field(default_factory=dict)
    ram: dict[str, float] = field(default_factory=dict)
    foreign: Mapping[int, float] = field(default_factory=dict)
    late: float = 0  # GiB that the driver has not given back of the dead
    available: float = 100
    cards: bool = True
    views: tuple[ModelView, ...] = ()
    version: int = 0
    rounds: int = 0

    def latest(self) -> Measured:
        self.rounds += 1
        memory = {model: TreeMemory(anonymous=int(size * GIB)) for model, size in self.ram.items()}
        return Measured(NOW + self.rounds, self.version, self.sample(), self.host.memory(), self.views, memory)

    def sample(self) -> GpuSample | None:
        if not self.cards:
            return GpuSample(time.monotonic_ns(), ())
        pids = {pid: int(self.card[v.model] * GIB) for v in self.views if v.model in self.card for pid in v.pids}
        pids |= {pid: int(size * GIB) for pid, size in self.foreign.items()}
        used = sum(pids.values()) + int(self.late * GIB)
        return GpuSample(time.monotonic_ns(), (Card("GPU-0", 24 * GIB, used, pids),))

    @property
    def gpu(self) -> Any:
        return SimpleNamespace(latest=self.sample)

    @property
    def host(self) -> Any:
        return SimpleNamespace(
            memory=lambda: HostMemory(128 * GIB, int(self.available * GIB)),
            name_of=lambda pid: {7: "game", 8: "compiler"}.get(pid),
            largest=lambda skip, count: [(8, 30 * GIB)],
        )

    def has_cards(self) -> bool:
        return self.cards

    def ask(self) -> None:
        pass


class Box:
    """A store with a term, accounts over a meter, and models by `name=(pool, estVram, estRam)` in GiB."""

    def __init__(self, store: Store, meter: Meter, vram_budget: float, ram_budget: float, **models: Any) -> None:
        self.store, self.meter = store, meter
        self.term = scheduling.take_office(store, "w1", NOW)
        self.accounts = Accounts(store, self.term, meter)  # type: ignore[arg-type]
        self.config = Config(
            vram_budget=int(vram_budget * GIB),
            ram_budget=int(ram_budget * GIB),
            models={
                name: Model(
                    id=name,
                    cmd=name,
                    est_vram=int(vram * GIB),
                    est_ram=int(ram * GIB),
                    pool=pool,
                    group="cpu" if pool == "ram" else "gpu",
                )
                for name, (pool, vram, ram) in models.items()
            },
            groups={"cpu": Group(pool="ram"), "gpu": Group()},
        )
        self.rules = make_rules(self.config, {})

    def up(self, *names: str, answered: int = 1) -> None:
        """These models are ready, and their processes are measured."""
        with self.store.write(self.term) as tx:
            for name in names:
                model = self.config.models[name]
                scheduling.set_state(tx, name, State.STARTING, "asked", launch_hash=model.launch_hash, token=name)
                scheduling.set_state(tx, name, State.READY, "loaded", answered=answered)
        self.see()

    def down(self, *names: str) -> None:
        with self.store.write(self.term) as tx:
            for name in names:
                scheduling.set_state(tx, name, State.STOPPING, "evicted")
                scheduling.set_state(tx, name, State.STOPPED, "evicted")

    def see(self) -> None:
        """The meter finds the trees of what the store says is up (three at most)."""
        self.meter.views = tuple(
            ModelView(row.model, row.state, self.config.models[row.model].pool, frozenset({pid}))
            for pid, row in zip(LIVING, self.rows().values(), strict=False)
            if row.state not in (State.STOPPED, State.FAILED)
        )
        with self.store.read() as tx:
            self.meter.version = reading.scheduler(tx).schedule_version
        self.accounts.update(self.config, self.rules, NOW)

    def rows(self) -> Any:
        with self.store.read() as tx:
            return reading.processes(tx)

    def sample(self) -> Mapping[str, Any]:
        with self.store.read() as tx:
            return reading.status(tx).sample

    def learned(self, name: str) -> tuple[int, int]:
        with self.store.read() as tx:
            return reading.learned_sizes(tx).get(self.config.models[name].launch_hash, (0, 0))

    def swap(self, target: str, *victims: str) -> int:
        """Open a swap with its gates; returns its id."""
        with self.store.write(self.term) as tx:
            swap = scheduling.open_swap(tx, target, victims, [], "asked", NOW)
            row = next(row for row in reading.swaps(tx) if row.id == swap)
            earlier = [row for row in reading.swaps(tx) if row.id != swap]
            gates = self.accounts.open_gates(row, reading.processes(tx), self.config, self.rules, NOW, earlier)
            scheduling.set_phase(tx, swap, Phase.RECLAIM, reclaim=gates)
        return swap

    def gates(self, swap: int) -> list[str]:
        with self.store.read() as tx:
            row = next(row for row in reading.swaps(tx) if row.id == swap)
        return [gate["pool"] for gate in json.loads(row.reclaim or "[]")]

    def look(self, now: int = NOW) -> list[list[Look]]:
        with self.store.read() as tx:
            waiting = reading.swaps(tx)
        looks = self.accounts.look(waiting, self.rows(), self.config, self.rules, now)
        return [looks[row.id] for row in waiting]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    prepare_state_directory(tmp_path)
    opened = Store(tmp_path, "boot-1")
    yield opened
    opened.close()


# --- system memory ------------------------------------------------------------------------------------------------


def test_an_offloaded_share_is_not_counted_twice(store: Store) -> None:
    """128 GiB, 60 of them held by a GPU model's experts, 63 free: a CPU model of 10 fits, beside the 60 charged."""
    box = Box(store, Meter(ram={"moe": 60}, available=63), 24, 110, moe=("vram", 12, 60), small=("ram", 0, 10))
    box.up("moe")
    ceiling = box.sample()["ram_ceiling"]
    assert ceiling == 110 * GIB
    assert box.rules.policy.misfit("small", ["moe"], None, ceiling) is None


def test_what_a_model_holds_beyond_its_charge_is_no_room_for_others(store: Store) -> None:
    box = Box(
        store, Meter(ram={"moe": 60, "blank": 5}, available=40), 24, 110, moe=("vram", 12, 20), blank=("vram", 8, 0)
    )
    box.up("moe", "blank")
    assert box.sample()["ram_ceiling"] == (40 + 20 - 1) * GIB


def test_what_cpu_models_hold_comes_back_when_they_stop(store: Store) -> None:
    box = Box(store, Meter(ram={"a": 8, "b": 5}, available=10), 0, 110, a=("ram", 0, 8), b=("ram", 0, 0))
    box.up("a", "b")
    assert box.sample()["ram_ceiling"] == (10 + 8 + 5 - 1) * GIB


def test_a_swap_of_cpu_models_waits_for_free_memory_alone(store: Store) -> None:
    meter = Meter(ram={"a": 8}, available=10, cards=False)
    box = Box(store, meter, 0, 100, a=("ram", 0, 8), b=("ram", 0, 12))
    box.up("a")
    swap = box.swap("b", "a")
    assert box.gates(swap) == ["ram"]
    box.down("a")
    meter.ram = {}
    assert not box.look()[0][0].passed, "10 GiB are free for 12"
    meter.available = 12
    assert box.look()[0][0].passed, "the compiler has 6 of the 8 that came back: it is none of this swap's business"


def test_a_cpu_model_of_unknown_size_waits_for_nothing(store: Store) -> None:
    box = Box(store, Meter(ram={"a": 8}, available=1, cards=False), 0, 100, a=("ram", 0, 8), b=("ram", 0, 0))
    box.up("a")
    assert box.gates(box.swap("b", "a")) == []


def test_without_a_ram_budget_system_memory_is_not_watched(store: Store) -> None:
    box = Box(store, Meter(available=1, cards=False), 0, 0, a=("ram", 0, 8), b=("ram", 0, 8))
    box.up("a")
    assert box.gates(box.swap("b", "a")) == []


# --- cards --------------------------------------------------------------------------------------------------------


def test_memory_that_is_back_at_once_passes_at_the_first_look(store: Store) -> None:
    meter = Meter(card={"a": 9})
    box = Box(store, meter, 16, 0, a=("vram", 9, 0), b=("vram", 9, 0))
    box.up("a")
    box.swap("b", "a")
    box.down("a")
    meter.card = {}
    box.see()
    (found,) = box.look()[0]
    assert (found.passed, found.gate.looks) == (True, 0)


def test_memory_that_comes_back_in_part(store: Store) -> None:
    meter = Meter(card={"a": 9})
    box = Box(store, meter, 16, 0, a=("vram", 9, 0), b=("vram", 9, 0))
    box.up("a")
    box.swap("b", "a")
    box.down("a")
    meter.card, meter.late = {}, 9
    assert box.look()[0][0].missing == 9 * GIB - int(0.45 * GIB)
    meter.late = 4
    found = box.look()[0][0]
    assert (found.passed, found.missing) == (False, 4 * GIB - int(0.45 * GIB))
    failed = box.look(found.gate.deadline)[0][0]
    assert failed.failed and "4.00 GiB of VRAM were not given back after a stopped" in failed.why
    meter.late = 0.4
    assert box.look()[0][0].passed, "95 % will do"


def test_two_swaps_of_which_the_first_ones_memory_comes_late(store: Store) -> None:
    meter = Meter(card={"a": 6, "b": 6})
    box = Box(store, meter, 12, 0, a=("vram", 6, 0), b=("vram", 6, 0), c=("vram", 6, 0), d=("vram", 6, 0))
    box.up("a", "b")
    box.swap("c", "a")
    box.swap("d", "b")
    box.down("a", "b")
    meter.card, meter.late = {}, 12
    assert [look[0].passed for look in box.look()] == [False, False]
    meter.late = 6
    assert [look[0].passed for look in box.look()] == [False, True], "one half is enough for one of the two"
    meter.late = 0
    assert [look[0].passed for look in box.look()] == [True, True]


def test_a_game_is_seen_as_soon_as_a_stopped_models_memory_is_back(store: Store) -> None:
    meter = Meter(card={"a": 6, "b": 6}, foreign={7: 1})
    box = Box(store, meter, 20, 0, a=("vram", 6, 0), b=("vram", 6, 0))
    box.up("a", "b")
    assert box.sample()["vram_ceiling"] == 20 * GIB
    box.down("b")
    meter.card, meter.late, meter.foreign = {"a": 6}, 2, {7: 9}
    box.see()
    assert box.sample()["vram_ceiling"] == 20 * GIB, "2 GiB of the dead could be anybody's: wait for them"
    meter.late = 0
    box.see()
    assert box.sample()["excess"] == 8 * GIB, "two seconds are not waited for in vain"


def test_who_holds_what_is_told(store: Store) -> None:
    meter = Meter(card={"a": 6}, ram={"a": 2, "b": 9}, foreign={7: 5})
    box = Box(store, meter, 16, 100, a=("vram", 6, 2), b=("ram", 0, 9))
    box.up("a", "b")
    assert box.accounts.holders("vram") == "a 6.00 GiB, game (pid 7) 5.00 GiB"
    assert box.accounts.holders("ram") == "b 9.00 GiB, a 2.00 GiB, compiler (pid 8) 30.00 GiB"


# --- sizes --------------------------------------------------------------------------------------------------------


def test_a_size_is_learned_from_the_first_answer_on(store: Store) -> None:
    box = Box(store, Meter(card={"a": 5}, ram={"a": 1}), 16, 0, a=("vram", 0, 0))
    box.up("a", answered=0)
    assert box.learned("a") == (0, 0)
    with store.write(box.term) as tx:
        scheduling.update_process(tx, "a", answered=1)
    box.see()
    assert box.learned("a") == (5 * GIB, GIB)


def test_a_measurement_that_overrules_an_estimate_is_told_in_both_pools(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    box = Box(store, Meter(card={"a": 9}, ram={"a": 6}), 16, 64, a=("vram", 8, 2))
    with caplog.at_level(logging.WARNING):
        box.up("a")
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if "9.00 GiB, more than its estVramGB of 8.00" in line]
    assert [line for line in told if "6.00 GiB, more than its estRamGB of 2.00" in line]

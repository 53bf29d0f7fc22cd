"""A simulated week of memory: random requests, foreign programs, late releases and crashes; no clock, no processes.

Policy, ceiling, gate and watchdog together, on a card whose true use is known. The scheduler has its own simulator.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from qmflask.memory import ceiling as live
from qmflask.memory.ceiling import Ceiling, ModelView
from qmflask.memory.reclaim import Gate, PoolState, look_all, open_gate
from qmflask.memory.samples import GIB, Card, GpuSample
from qmflask.memory.watchdog import ResidentView, Watch, watch
from qmflask.policy.eviction import GroupPolicy, GroupRule, Sizes
from qmflask.states import State

SECOND = 1_000_000_000
CARD, BUDGET, RESERVE, IDLE_USE = 32 * GIB, 24 * GIB, GIB, GIB // 2
SIZES = {f"m{n}": Sizes(vram=(2 + 2 * (n % 7)) * GIB + n) for n in range(10)} | {
    "pin": Sizes(3 * GIB),
    "blank": Sizes(),
}
GROUPS = [GroupRule("keep", swap=False, exclusive=False, persistent=True, members=("pin",))]


@dataclass
class Swap:
    """A target that waits for its victims' memory, then loads."""

    target: str
    gate: Gate
    loading: int = 0  # steps until it is ready; 0: the gate is not passed yet


@dataclass
class World:
    """The card and what we know of it."""

    dice: random.Random
    now: int = 0
    foreign: int = IDLE_USE
    resident: dict[str, int] = field(default_factory=dict)  # ready models, coldest first -> busy until this step
    releasing: list[tuple[int, int]] = field(default_factory=list)  # (step, bytes)
    swaps: list[Swap] = field(default_factory=list)
    state: Ceiling = field(default_factory=Ceiling)
    watch: Watch = field(default_factory=Watch)
    starts: int = 0
    refused: int = 0
    shed: int = 0
    policy: GroupPolicy = field(default_factory=lambda: GroupPolicy(SIZES, GROUPS, BUDGET))

    def actual(self, model: str) -> int:
        """What it takes on the card; the model of unknown size takes something too."""
        return SIZES[model].vram or 2 * GIB

    @property
    def loading(self) -> list[str]:
        return [swap.target for swap in self.swaps if swap.loading]

    @property
    def used(self) -> int:
        held = sum(map(self.actual, [*self.resident, *self.loading]))
        return self.foreign + held + sum(size for _, size in self.releasing)

    def pool(self) -> PoolState:
        holds = {model: self.actual(model) for model in (*self.resident, *self.loading)}
        used = self.used
        return PoolState(used, max(0, CARD - used), holds, {model: SIZES[model].vram for model in self.loading})

    def busy(self, model: str) -> bool:
        return self.resident[model] > self.now

    def step(self) -> None:
        self.now += 1
        self.releasing = [(until, size) for until, size in self.releasing if until > self.now]
        self.happen()
        self.advance()
        self.sample()
        self.guard()

    def happen(self) -> None:
        dice = self.dice.random()
        if dice < 0.15:
            self.request(self.dice.choice(list(SIZES)))
        elif dice < 0.17:
            self.foreign = max(IDLE_USE, min(20 * GIB, self.foreign + self.dice.randint(-9, 9) * GIB))
        elif dice < 0.175 and self.resident:
            self.stop(self.dice.choice(list(self.resident)))  # a crash

    def request(self, model: str) -> None:
        if model in self.resident:
            self.resident[model] = self.now + self.dice.randint(1, 8)
            self.resident[model] = self.resident.pop(model)  # now the warmest
            return
        if any(swap.target == model for swap in self.swaps):
            return
        idle_first = sorted(self.resident, key=self.busy)
        running = [*idle_first, *(swap.target for swap in self.swaps)]
        cap = BUDGET if self.state.ceiling is None else self.state.ceiling
        misfit = self.policy.misfit(model, running, self.state.ceiling)
        if misfit is not None:
            assert SIZES[model].vram + (SIZES["pin"].vram if "pin" in running else 0) > cap
            self.refused += 1
            return
        victims = self.policy.eviction_for(model, running, self.state.ceiling)
        if any(victim not in self.resident or self.busy(victim) for victim in victims):
            return  # it would queue
        self.swap(model, victims, cap)

    def swap(self, model: str, victims: list[str], cap: int) -> None:
        assert "pin" not in victims, "persistent"
        before = self.pool()
        sizes = {victim: self.actual(victim) for victim in victims}
        for victim in victims:
            assert not self.busy(victim), "in flight"
            self.stop(victim)
        if SIZES[model].vram:
            stays = [*self.resident, *(swap.target for swap in self.swaps)]
            assert SIZES[model].vram + sum(SIZES[other].vram for other in stays) <= cap, "promise 2"
        waiting = [swap.gate for swap in self.swaps if not swap.loading]
        gate = open_gate(self.now, "vram", before, sizes, SIZES[model].vram, (self.now + 60) * SECOND, waiting)
        self.swaps.append(Swap(model, gate))

    def stop(self, model: str) -> None:
        """Its memory comes back at once, late, or in two parts."""
        del self.resident[model]
        size = self.actual(model)
        late = self.dice.choice([0, 0, 0, 1, 2, 5])
        self.releasing += [(self.now + late, size // 2), (self.now + late // 2, size - size // 2)]
        self.releasing = [(until, part) for until, part in self.releasing if until > self.now]

    def advance(self) -> None:
        for swap in [swap for swap in self.swaps if swap.loading]:
            swap.loading -= 1
            if not swap.loading:
                self.swaps.remove(swap)
                self.resident[swap.target] = self.now + self.dice.randint(1, 8)
        waiting = [swap for swap in self.swaps if not swap.loading]
        for swap, look in zip(
            waiting, look_all([s.gate for s in waiting], self.pool(), self.now * SECOND), strict=True
        ):
            swap.gate = look.gate
            if look.failed:
                self.swaps.remove(swap)
            elif look.passed:
                assert not SIZES[swap.target].vram or self.used + SIZES[swap.target].vram <= CARD, "seen free"
                swap.loading = self.dice.randint(1, 3)
                self.starts += 1

    def sample(self) -> None:
        models = [*self.resident, *self.loading]
        pids = {model: 100 + place for place, model in enumerate(SIZES)}
        views = [ModelView(model, State.READY, "vram", frozenset({pids[model]})) for model in self.resident]
        views += [ModelView(model, State.STARTING, "vram", frozenset({pids[model]})) for model in self.loading]
        listed = None if self.dice.random() < 0.02 else {pids[model]: self.actual(model) for model in models}
        card = GpuSample(self.now, (Card("c", CARD, self.used, listed),))
        moving = bool(self.releasing) or bool(self.swaps)
        before = self.state
        self.state = live.step(before, card, views, BUDGET, RESERVE, moving)
        if not moving and self.state.trusted:
            assert self.state.foreign == self.foreign, "what lingers of ours is never taken for somebody else's"
            assert self.state.floor <= before.floor or not before.floors

    def guard(self) -> None:
        views = [
            ResidentView(model, SIZES[model].vram, not self.busy(model) and model != "pin") for model in self.resident
        ]
        self.watch, shed = watch(self.watch, views, BUDGET, self.state.excess, 30 * SECOND, self.now * SECOND)
        for model in shed.models if shed else ():
            assert not self.busy(model) and model != "pin"
            self.stop(model)
            self.shed += 1


@pytest.mark.parametrize(
    ("seed", "steps"), [(0, 20_000), (1, 20_000), (2, 20_000), pytest.param(3, 2_000_000, marks=pytest.mark.heavy)]
)
def test_a_week(seed: int, steps: int) -> None:
    """One request in seven steps; the heavy one has about 300 000."""
    world = World(random.Random(seed))
    for _ in range(steps):
        world.step()
    assert world.starts > 1000 and world.refused > 50 and world.shed > 5, "the week was eventful"
    world.foreign = IDLE_USE
    world.dice = random.Random("quiet")
    for _ in range(100):
        world.now += 1
        world.releasing = [(until, size) for until, size in world.releasing if until > world.now]
        world.advance()
        world.sample()
    assert not world.swaps, "nothing is stuck"
    assert not world.releasing
    trusted = live.step(world.state, GpuSample(0, (Card("c", CARD, IDLE_USE, {}),)), [], BUDGET, RESERVE)
    assert (trusted.ceiling, trusted.floor) == (BUDGET, IDLE_USE)

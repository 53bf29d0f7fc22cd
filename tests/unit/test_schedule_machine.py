"""Random worlds against promises 1 to 4 and 8: the simulator raises on what they forbid, this file drives it.

`QMFLASK_STEPS=2000000 pytest tests/unit/test_schedule_machine.py` runs that many steps instead of a few thousand.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from qmflask.policy.eviction import GroupPolicy, GroupRule, Sizes
from qmflask.policy.matrix import MatrixPolicy, compile_sets
from qmflask.policy.schedule import EvictionPolicy, ModelRule
from qmflask.states import DOWN
from tests.unit.simulator import MS, SECOND, BrokenPromise, Client, Simulator

STEPS = int(os.environ.get("QMFLASK_STEPS", "6000"))
MODELS = ("ant", "bee", "cat", "dog", "eel")
PATIENCE, LONGEST, STOP, LOAD = 10 * SECOND, 4 * SECOND, SECOND // 2, 2 * SECOND
GIB = 1 << 30

GROUPS: dict[str, tuple[GroupRule, ...]] = {
    "default": (),
    "persistent": (GroupRule("keep", persistent=True, members=("eel",)),),
    "side": (GroupRule("side", swap=False, exclusive=False, persistent=True, members=("dog", "eel")),),
    "pairs": (
        GroupRule("one", swap=False, exclusive=True, members=("ant", "bee")),
        GroupRule("two", swap=True, exclusive=False, members=("cat", "dog")),
    ),
    "cpu": (GroupRule("cpu", swap=False, exclusive=False, pool="ram", members=("dog", "eel")),),
}

SETS = compile_sets(
    [("small", "ant & (bee | cat)"), ("mixed", "dog & bee & ant | dog & cat"), ("pair", "cat & eel")],
    {model: model for model in MODELS},
)


@dataclass
class Plan:
    """What one random world is made of."""

    groups: str
    vram: Sequence[int]
    ram: Sequence[int]
    budget: int
    ram_budget: int
    priorities: Sequence[int]
    renders: Sequence[bool]
    protected: Sequence[bool]
    ttl: int
    hold: int
    limit: int
    eager: bool


class World:
    """One simulated machine with what both drivers do to it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sizes = {m: Sizes(plan.vram[n] * GIB, plan.ram[n] * GIB) for n, m in enumerate(MODELS)}
        rules = {
            model: ModelRule(
                model,
                concurrency_limit=plan.limit,
                priority=plan.priorities[n],
                renders=plan.renders[n],
                ttl=plan.ttl,
                displace=not plan.protected[n],
                patience=PATIENCE,
            )
            for n, model in enumerate(MODELS)
        }
        self.sim = Simulator(
            rules,
            self._policy(),
            load=LOAD,
            stop=STOP,
            patience=PATIENCE,
            hold=plan.hold,
            unload_timeout=LONGEST,
            sizes=self.sizes,
            vram_budget=plan.budget * GIB,
            ram_budget=0 if plan.groups == "matrix" else plan.ram_budget * GIB,
            cpu=[m for g in GROUPS.get(plan.groups, ()) if g.pool == "ram" for m in g.members],
            eager_stop=plan.eager,
        )
        self.count = 0
        self.trouble: list[int] = []  # when something happened that promise 8 does not reckon with

    def _policy(self) -> EvictionPolicy:
        budgets = (self.plan.budget * GIB, self.plan.ram_budget * GIB)
        if self.plan.groups == "matrix":
            protected = [model for n, model in enumerate(MODELS) if self.plan.protected[n]]
            return MatrixPolicy(self.sizes, SETS, {"bee": 3}, *budgets, protected=protected)
        return GroupPolicy(self.sizes, GROUPS[self.plan.groups], *budgets)

    def arrive(self, model: str, length: int, tool: bool) -> None:
        """A request whose answer takes `length` nanoseconds."""
        self.count += 1
        self.sim.req(f"r{self.count}", model, length=length, tool=tool)

    def advance(self, nanoseconds: int) -> None:
        """Time passes; nobody may have waited longer than promised."""
        self.sim.advance(nanoseconds)
        for client in self.sim.waiting.values():
            bound = self.bound(client)
            if self.sim.now - client.arrival > bound:
                raise BrokenPromise(
                    f"{client} waits {(self.sim.now - client.arrival) / SECOND} s, bound {bound / SECOND}"
                )

    def bound(self, client: Client) -> int:
        """Promise 8: patience, then one turn for itself, one for the swap it found under way, and one for each other
        request whose patience ended earlier; and one for each event that nobody could foresee."""
        earlier = sum(
            other.arrival <= client.arrival and other.ended_waiting >= other.patience_at
            for other in self.sim.clients.values()
            if other is not client
        )
        unforeseen = sum(at >= client.arrival for at in self.trouble)
        return PATIENCE + (2 + earlier + unforeseen) * (LONGEST + STOP + LOAD)

    def hang_up(self, pick: int) -> None:
        """One client, waiting or served, leaves."""
        present = [*self.sim.waiting.values(), *self.sim.leases.values()]
        if present:
            self.sim.gone(present[pick % len(present)].name)

    def crash(self, model: str) -> None:
        """A process dies."""
        self.trouble.append(self.sim.now)
        self.sim.crash(model)

    def unload(self, model: str) -> None:
        """Somebody unloads a model."""
        self.trouble.append(self.sim.now)
        self.sim.unload([model])

    def change(self, model: str) -> None:
        """A reload with other launch settings for one model."""
        self.trouble.append(self.sim.now)
        self.sim.reload(self.sim.rules, self.sim.policy, changed=[model])

    def remove_and_restore(self, model: str) -> None:
        """A reload without one model, and soon another with it."""
        self.trouble.append(self.sim.now)
        rules = self.sim.rules
        self.sim.reload({name: rule for name, rule in rules.items() if name != model}, self.sim.policy)
        self.sim.reload(rules, self.sim.policy)

    def ceiling(self, gib: int) -> None:
        """The live ceiling moves; a low one never stops anything by itself."""
        self.trouble.append(self.sim.now)
        before = self.sim.running()
        self.sim.vram_ceiling = gib * GIB if gib else None
        self.sim.settle()
        started = {swap.target for swap in self.sim.swaps.values()}
        if not started and set(before) - set(self.sim.running()) and not self.plan.ttl:
            raise BrokenPromise(f"a ceiling of {gib} stopped {set(before) - set(self.sim.running())}")
        self.sim.take_events()

    def settle_down(self) -> None:
        """Without new arrivals everything comes to an end."""
        self.sim.vram_ceiling = None
        for _ in range(4 + 2 * len(self.sim.waiting)):
            self.sim.advance(PATIENCE + LONGEST + STOP + LOAD)
        if self.sim.waiting or self.sim.leases or self.sim.swaps:
            raise BrokenPromise(f"left over: {self.sim.waiting} {self.sim.leases} {self.sim.swaps}")
        stuck = {m: v.state for m, v in self.sim.processes.items() if v.state not in DOWN and v.state != "ready"}
        if stuck:
            raise BrokenPromise(f"left over: {stuck}")


plans = st.builds(
    Plan,
    groups=st.sampled_from([*sorted(GROUPS), "matrix"]),
    vram=st.lists(st.integers(0, 8), min_size=5, max_size=5),
    ram=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    budget=st.sampled_from([0, 6, 8, 12, 16]),
    ram_budget=st.sampled_from([0, 0, 4, 8]),
    priorities=st.lists(st.integers(-1, 2), min_size=5, max_size=5),
    renders=st.lists(st.sampled_from([False, False, False, True]), min_size=5, max_size=5),
    protected=st.lists(st.sampled_from([False] * 7 + [True]), min_size=5, max_size=5),
    ttl=st.sampled_from([0, 0, 3 * SECOND]),
    hold=st.sampled_from([0, 2 * SECOND]),
    limit=st.sampled_from([0, 0, 3]),
    eager=st.booleans(),
)
models = st.sampled_from(MODELS)


class SchedulerMachine(RuleBasedStateMachine):
    """Everything that can happen to a scheduler, in any order."""

    world: World

    @initialize(plan=plans)
    def build(self, plan: Plan) -> None:
        self.world = World(plan)

    @rule(model=models, length=st.integers(1, LONGEST // MS), tool=st.booleans())
    def arrive(self, model: str, length: int, tool: bool) -> None:
        self.world.arrive(model, length * MS, tool)

    @rule(wanted=st.lists(models, min_size=2, max_size=8))
    def burst(self, wanted: list[str]) -> None:
        for model in wanted:
            self.world.arrive(model, SECOND, False)

    @rule(milliseconds=st.integers(1, 6000))
    def advance(self, milliseconds: int) -> None:
        self.world.advance(milliseconds * MS)

    @rule(pick=st.integers(0, 50))
    def hang_up(self, pick: int) -> None:
        self.world.hang_up(pick)

    @precondition(lambda self: self.world.count > 3)
    @rule(model=models, what=st.sampled_from(["crash", "unload", "change", "remove_and_restore"]))
    def trouble(self, model: str, what: str) -> None:
        getattr(self.world, what)(model)

    @rule(gib=st.sampled_from([0, 0, 2, 4, 10]))
    def ceiling(self, gib: int) -> None:
        self.world.ceiling(gib)

    @rule()
    def new_leader(self) -> None:
        assert self.world.sim.leader_change() == []

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle_down()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=max(10, STEPS // 100),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def random_plan(dice: random.Random) -> Plan:
    """A world of the same kinds as `plans` makes."""
    return Plan(
        groups=dice.choice([*sorted(GROUPS), "matrix"]),
        vram=[dice.randint(0, 8) for _ in MODELS],
        ram=[dice.randint(0, 4) for _ in MODELS],
        budget=dice.choice([0, 6, 8, 12, 16]),
        ram_budget=dice.choice([0, 0, 4, 8]),
        priorities=[dice.randint(-1, 2) for _ in MODELS],
        renders=[dice.random() < 0.25 for _ in MODELS],
        protected=[dice.random() < 0.1 for _ in MODELS],
        ttl=dice.choice([0, 0, 3 * SECOND]),
        hold=dice.choice([0, 2 * SECOND]),
        limit=dice.choice([0, 0, 3]),
        eager=dice.random() < 0.5,
    )


def play(seed: int, steps: int) -> None:
    """One long life under steady load, far longer than what hypothesis would try."""
    dice = random.Random(seed)
    world = World(replace(random_plan(dice), limit=0))
    pressure = dice.choice([0.3, 0.5, 0.7])
    chaos = dice.choice([0.0, 0.0, 0.02])
    for _ in range(steps):
        if dice.random() < chaos:
            what = dice.choice([world.crash, world.unload, world.change, world.remove_and_restore])
            what(dice.choice(MODELS))
        elif dice.random() < 0.05:
            world.hang_up(dice.randrange(50))
        elif dice.random() < pressure:
            world.arrive(dice.choice(MODELS), dice.randint(1, LONGEST // MS) * MS, dice.random() < 0.3)
        else:
            world.advance(dice.randint(1, 3000) * MS)
    world.settle_down()


@pytest.mark.timeout(0 if STEPS > 100_000 else 120)
def test_long_lives_keep_the_promises() -> None:
    steps = 300
    for seed in range(max(10, STEPS // (2 * steps))):
        try:
            play(seed, steps)
        except BrokenPromise as err:
            raise AssertionError(f"play({seed}, {steps}): {err}") from err

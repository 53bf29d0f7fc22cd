"""Which running models stop so that a target can load: groups and memory budgets, as one pure function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

#: The memory pools that exist. The name is free in the code, so that one pool a card can follow.
POOLS = ("vram", "ram")
#: The group of every model that no group names: swap, exclusive, not persistent, VRAM.
DEFAULT_GROUP = "(default)"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one model is charged, in bytes; 0 means unknown, not free."""

    vram: int = 0
    ram: int = 0


@dataclass(frozen=True, slots=True)
class GroupRule:
    """One group of the configuration; `pool` is the memory its members are admitted against."""

    name: str
    swap: bool = True
    exclusive: bool = True
    persistent: bool = False
    pool: str = "vram"
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a target cannot fit whatever is stopped for it; all figures are bytes.

    `need` is the target's charge plus what `holders` (models that cannot be stopped for it) hold. `only_now`: it
    exceeds the live ceiling alone, so asking later may help; `budget` is then that ceiling.
    """

    pool: str
    need: int
    budget: int
    holders: tuple[tuple[str, int], ...]
    only_now: bool


@dataclass(frozen=True, slots=True)
class ResidentPlan:
    """One resident in a plan: its charge in bytes and what becomes of it and why."""

    model: str
    charge: int
    stops: bool
    why: str


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One step of a decision. `total` is the sum before anything stops, `after` the sum once the victims are gone."""

    pool: str
    rule: str  # "memory" or "static"
    budget: int
    cap: int
    charge: int
    total: int
    after: int
    residents: tuple[ResidentPlan, ...]

    @property
    def victims(self) -> tuple[str, ...]:
        """The residents that stop, in the order of `residents`."""
        return tuple(line.model for line in self.residents if line.stops)


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that the plan shows of one decision; `victims` is exactly what `eviction_for` answers."""

    target: str
    victims: tuple[str, ...]
    steps: tuple[PoolPlan, ...]
    notes: tuple[str, ...] = field(default=())


class _Facts(NamedTuple):
    """What the rules look at, of one model; flat, because this is read on every request."""

    model: str
    vram: int
    ram: int
    group: str
    swap: bool
    exclusive: bool
    persistent: bool
    cpu: bool  # admitted against system memory: holds no VRAM


_Size = Callable[[_Facts], int]


class _Walk(NamedTuple):
    """One memory rule before it takes anybody: the sum, who goes at once, who may go (coldest first)."""

    total: int
    at_once: list[_Facts]
    candidates: list[_Facts]


class GroupPolicy:
    """The eviction policy of groups and budgets (spec/eviction.md); pure, built once per configuration and sizes.

    Budgets and sizes are bytes; whoever converts GB rounds budgets up and charges down, so that figures that add
    up exactly on paper fit. A budget of 0 is off. Raises ValueError for a pool that does not exist, a negative
    figure, and a model in two groups.
    """

    def __init__(
        self,
        sizes: Mapping[str, Sizes],
        groups: Sequence[GroupRule],
        vram_budget: int = 0,
        ram_budget: int = 0,
        oversize_evict: bool = False,
    ) -> None:
        if vram_budget < 0 or ram_budget < 0:
            raise ValueError("memory budgets must not be negative")
        self.vram_budget = vram_budget
        self.ram_budget = ram_budget
        self.oversize_evict = oversize_evict
        owner = _owners(groups)
        default = next((group for group in groups if group.name == DEFAULT_GROUP), GroupRule(DEFAULT_GROUP))
        self._default = default
        self._facts = {
            model: _facts(model, sizes.get(model, Sizes()), owner.get(model, default)) for model in {*sizes, *owner}
        }

    def eviction_for(
        self,
        target: str,
        running: Sequence[str],
        vram_ceiling: int | None = None,
        ram_ceiling: int | None = None,
    ) -> list[str]:
        """Models to stop, in order, so that `target` can load.

        `running` is every model that is not stopped, coldest first; the target and repeats in it are skipped. A
        ceiling tightens its budget and never raises it; None is no trusted reading.
        """
        aim = self._of(target)
        residents = self._residents(target, running)
        ram_cap = _cap(self.ram_budget, ram_ceiling)
        if aim.cpu:
            if self._ram_decides(aim):
                return _names(_take(_walk_ram(aim, residents, ()), ram_cap, _ram_of))
            return _names(_static(aim, [other for other in residents if other.cpu]))
        first = self._step_one(aim, residents, vram_ceiling)
        if self._ram_decides(aim):
            stopped = frozenset(other.model for other in first)
            first = first + _take(_walk_ram(aim, residents, stopped), ram_cap, _ram_of)
        return _names(first)

    def memory_decides(self, target: str) -> bool:
        """Whether a memory rule, not the static one, decides in the target's own pool."""
        aim = self._of(target)
        return self._ram_decides(aim) if aim.cpu else self._vram_decides(aim)

    def ready_victims(self, target: str, running: Sequence[str]) -> list[str]:
        """Models to stop for a target that is ready or starting.

        None where a memory rule decides, because its memory is taken already; else what the static rule says
        (spec/eviction.md, admission 2).
        """
        if self.memory_decides(target):
            return []
        aim = self._of(target)
        same_pool = [other for other in self._residents(target, running) if other.cpu == aim.cpu]
        return _names(_static(aim, same_pool))

    def misfit(
        self,
        target: str,
        running: Sequence[str],
        vram_ceiling: int | None = None,
        ram_ceiling: int | None = None,
    ) -> Misfit | None:
        """Why the target cannot fit even after everything stoppable has stopped, or None (admission 3).

        What never fits the configured budget is told before what only does not fit now. With `oversize_evict`
        nothing is refused.
        """
        if self.oversize_evict:
            return None
        aim = self._of(target)
        residents = self._residents(target, running)
        found: list[Misfit | None] = []
        if not aim.cpu and self._vram_decides(aim):
            fixed = [(other.model, other.vram) for other in residents if other.persistent and not other.cpu]
            found.append(_misfit("vram", aim.vram, fixed, self.vram_budget, vram_ceiling))
        if self._ram_decides(aim):
            first = () if aim.cpu else self._step_one(aim, residents, vram_ceiling)
            gone = {other.model for other in first}
            fixed = [(o.model, o.ram) for o in residents if o.model not in gone and (o.persistent or not o.cpu)]
            found.append(_misfit("ram", aim.ram, fixed, self.ram_budget, ram_ceiling))
        misfits = [misfit for misfit in found if misfit is not None]
        return min(misfits, key=lambda misfit: misfit.only_now, default=None)

    def explain(
        self,
        target: str,
        running: Sequence[str],
        vram_ceiling: int | None = None,
        ram_ceiling: int | None = None,
    ) -> Explanation:
        """The same decision with its arithmetic, for `plan` and for the leader's one line per swap."""
        aim = self._of(target)
        residents = self._residents(target, running)
        steps = [] if aim.cpu and self._ram_decides(aim) else [self._plan_one(aim, residents, vram_ceiling)]
        if self._ram_decides(aim):
            gone = frozenset(model for step in steps for model in step.victims)
            walk = _walk_ram(aim, residents, gone)
            cap = _cap(self.ram_budget, ram_ceiling)
            others = [other for other in residents if other.model not in gone]
            steps.append(_plan("ram", self.ram_budget, cap, aim.ram, others, walk, _ram_of))
        return Explanation(target, tuple(self.eviction_for(target, running, vram_ceiling, ram_ceiling)), tuple(steps))

    def on_swap_start(self, target: str, running: Sequence[str], vram_ceiling: int | None = None) -> str | None:
        """The debug line of one real swap, for the leader to log; None without a VRAM budget."""
        if not self.vram_budget:
            return None
        cap = _cap(self.vram_budget, vram_ceiling)
        resident = sum(other.vram for other in self._residents(target, running) if not other.cpu)
        line = (
            f"swap to {target}: estimate {gib(self._of(target).vram)}, "
            f"residents {gib(resident)}, budget in force {gib(cap)}"
        )
        return line if cap == self.vram_budget else f"{line} (configured {gib(self.vram_budget)})"

    def _of(self, model: str) -> _Facts:
        """Facts of a model; one that no configuration knows (removed, still draining) is of the default group."""
        return self._facts.get(model) or _facts(model, Sizes(), self._default)

    def _residents(self, target: str, running: Sequence[str]) -> list[_Facts]:
        """Facts in running order, without the target and repeats."""
        known = self._facts
        return [known.get(model) or self._of(model) for model in dict.fromkeys(running) if model != target]

    def _vram_decides(self, aim: _Facts) -> bool:
        """Whether the VRAM rule applies: a target of unknown size against a budget is how cards run out."""
        return self.vram_budget > 0 and aim.vram > 0

    def _ram_decides(self, aim: _Facts) -> bool:
        """Whether the RAM rule applies; a GPU target without an offloaded share counts 0 in it."""
        return self.ram_budget > 0 and (aim.ram > 0 or not aim.cpu)

    def _step_one(self, aim: _Facts, residents: list[_Facts], ceiling: int | None) -> list[_Facts]:
        """Victims of a VRAM target among the VRAM residents: the VRAM rule, else the static one."""
        gpu = [other for other in residents if not other.cpu]
        if self._vram_decides(aim):
            return _take(_walk_vram(aim, gpu), _cap(self.vram_budget, ceiling), _vram_of)
        return _static(aim, gpu)

    def _plan_one(self, aim: _Facts, residents: list[_Facts], ceiling: int | None) -> PoolPlan:
        """Step 1 as the plan shows it, in the target's own pool."""
        own = [other for other in residents if other.cpu == aim.cpu]
        pool, budget, size = ("ram", self.ram_budget, _ram_of) if aim.cpu else ("vram", self.vram_budget, _vram_of)
        cap = _cap(budget, ceiling) if pool == "vram" else budget
        if not aim.cpu and self._vram_decides(aim):
            return _plan(pool, budget, cap, aim.vram, own, _walk_vram(aim, own), _vram_of)
        goes = set(_names(_static(aim, own)))
        lines = tuple(ResidentPlan(o.model, size(o), o.model in goes, _static_reason(aim, o)) for o in own)
        total = size(aim) + sum(line.charge for line in lines)
        after = size(aim) + sum(line.charge for line in lines if not line.stops)
        return PoolPlan(pool, "static", budget, cap, size(aim), total, after, lines)


def gib(size: int) -> str:
    """Bytes as people read them: `9.5 GiB`."""
    return f"{size / 2**30:.2f}".rstrip("0").rstrip(".") + " GiB"


def _owners(groups: Sequence[GroupRule]) -> dict[str, GroupRule]:
    """The group of each member; raises ValueError for an unknown pool and for a model that is listed twice."""
    owner: dict[str, GroupRule] = {}
    for group in groups:
        if group.pool not in POOLS:
            raise ValueError(f'group "{group.name}": unknown pool "{group.pool}" (known: {", ".join(POOLS)})')
        for model in group.members:
            if model in owner:
                raise ValueError(f'model "{model}" is in multiple groups: "{owner[model].name}" and "{group.name}"')
            owner[model] = group
    return owner


def _facts(model: str, sizes: Sizes, group: GroupRule) -> _Facts:
    if sizes.vram < 0 or sizes.ram < 0:
        raise ValueError(f'model "{model}": sizes must not be negative')
    return _Facts(
        model,
        sizes.vram,
        sizes.ram,
        group.name,
        group.swap,
        group.exclusive,
        group.persistent,
        group.pool == "ram",
    )


def _vram_of(facts: _Facts) -> int:
    return facts.vram


def _ram_of(facts: _Facts) -> int:
    return facts.ram


def _cap(budget: int, ceiling: int | None) -> int:
    """The budget in force; 0 is a real ceiling, None is none."""
    return budget if ceiling is None else max(0, min(budget, ceiling))


def _names(models: Iterable[_Facts]) -> list[str]:
    return [facts.model for facts in models]


def _walk_vram(aim: _Facts, gpu: list[_Facts]) -> _Walk:
    """Charge each VRAM resident once; persistent ones stay, those of unknown size go at once."""
    total = aim.vram
    at_once: list[_Facts] = []
    candidates: list[_Facts] = []
    for other in gpu:
        if other.persistent:
            total += other.vram
        elif other.vram == 0:
            at_once.append(other)
        else:
            total += other.vram
            candidates.append(other)
    return _Walk(total, at_once, candidates)


def _walk_ram(aim: _Facts, residents: list[_Facts], stopped: Set[str] | Sequence[str]) -> _Walk:
    """Charge every resident's system memory; only CPU models outside persistent groups can go."""
    total = aim.ram
    at_once: list[_Facts] = []
    candidates: list[_Facts] = []
    for other in residents:
        if other.model in stopped:
            continue
        if not other.cpu or other.persistent:
            total += other.ram
        elif other.ram > 0:
            total += other.ram
            candidates.append(other)
        elif aim.cpu:
            at_once.append(other)
    return _Walk(total, at_once, candidates)


def _take(walk: _Walk, cap: int, size: _Size) -> list[_Facts]:
    """Who goes: at once, then candidates from the cold end while the sum is above the cap (greedy, equality fits)."""
    victims = list(walk.at_once)
    total = walk.total
    for other in walk.candidates:
        if total <= cap:
            break
        total -= size(other)
        victims.append(other)
    return victims


def _static(aim: _Facts, others: list[_Facts]) -> list[_Facts]:
    """Victims by swap and exclusive alone (spec/eviction.md, static rule)."""
    if not aim.exclusive:
        return [other for other in others if aim.swap and other.group == aim.group]
    return [
        other for other in others if (aim.swap if other.group == aim.group else not (other.cpu or other.persistent))
    ]


def _static_reason(aim: _Facts, other: _Facts) -> str:
    """The row of the static rule that decides, in words."""
    if other.group == aim.group:
        return f"group {aim.group} {'swaps' if aim.swap else 'keeps its members together'}"
    if not aim.exclusive:
        return f"group {aim.group} is not exclusive"
    if other.persistent:
        return f"group {other.group} is persistent"
    return "holds no VRAM" if other.cpu else f"group {aim.group} is exclusive"


def _plan(pool: str, budget: int, cap: int, charge: int, others: list[_Facts], walk: _Walk, size: _Size) -> PoolPlan:
    """A memory rule's step as data, its residents in the order in which they would go, then those that stay."""
    goes = _names(_take(walk, cap, size))
    order = {model: place for place, model in enumerate(goes)}
    unknown = set(_names(walk.at_once))
    candidates = set(_names(walk.candidates))

    def line(other: _Facts) -> ResidentPlan:
        if other.model in unknown:
            return ResidentPlan(other.model, 0, True, "its size is unknown")
        if other.model in order:
            return ResidentPlan(other.model, size(other), True, "makes room, coldest first")
        if other.model in candidates:
            return ResidentPlan(other.model, size(other), False, "fits")
        why = "is persistent" if other.persistent else "is not stopped for system memory"
        return ResidentPlan(other.model, size(other), False, why)

    lines = sorted(map(line, others), key=lambda line: order.get(line.model, len(order)))
    after = walk.total - sum(line.charge for line in lines if line.stops)
    return PoolPlan(pool, "memory", budget, cap, charge, walk.total, after, tuple(lines))


def _misfit(pool: str, charge: int, fixed: list[tuple[str, int]], budget: int, ceiling: int | None) -> Misfit | None:
    """Compare what must be held with the budget, then with the live ceiling."""
    holders = tuple((model, size) for model, size in fixed if size)
    need = charge + sum(size for _, size in holders)
    cap = _cap(budget, ceiling)
    if need > budget:
        return Misfit(pool, need, budget, holders, only_now=False)
    if need > cap:
        return Misfit(pool, need, cap, holders, only_now=True)
    return None

"""Which running models stop where the configuration lists what may run together: sets, costs and budgets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from qmflask.policy.alternatives import Query, bits_of, expansions
from qmflask.policy.eviction import Explanation, Misfit, PoolPlan, ResidentPlan, Sizes, gib
from qmflask.policy.expression import ExpressionError, Node, link, parse, references


class MatrixError(ValueError):
    """Raised when the sets cannot be compiled; the message begins with the set's name."""


class CompiledMatrix:
    """Sets as linked trees, in compiled order: referenced sets before the sets that refer to them."""

    def __init__(self, trees: Mapping[str, Node], bits: Mapping[str, int]) -> None:
        self.bits = bits
        self.order = tuple(trees)
        self._trees = dict(trees)
        self._models = {bit: model for model, bit in bits.items()}
        by_bit: dict[int, list[tuple[str, Node]]] = {bit: [] for bit in bits.values()}
        for name, tree in trees.items():
            for bit in bits_of(tree.mask):
                by_bit[bit].append((name, tree))
        self._by_bit = by_bit

    def sets_with(self, model: str) -> Sequence[tuple[str, Node]]:
        """(name, tree) of every set that mentions the model, in compiled order."""
        return self._by_bit.get(self.bits.get(model, 0), ())

    def models_of(self, mask: int) -> set[str]:
        """Model ids of a bit mask."""
        return {self._models[bit] for bit in bits_of(mask)}

    def permits(self, models: Collection[str]) -> bool:
        """Whether some set allows all these models at once (a set permits all its subsets)."""
        wanted = {self.bits.get(model, 0) for model in models}
        if not wanted or 0 in wanted:
            return not wanted
        mask = sum(wanted)
        query = Query(mask, dict.fromkeys(wanted, (1, 0, 0)))
        trees = [tree for tree in self._trees.values() if mask & tree.mask == mask]
        return any(option.kept == mask for tree in trees for option in query.options(tree))

    def expand(self, name: str, limit: int = 10_000) -> list[tuple[str, ...]]:
        """The alternatives of one set in written order, each sorted, repeats collapsed; at most `limit` of them.

        For people and tests: nothing that decides expands a set.
        """
        found: dict[int, None] = {}
        for mask in expansions(self._trees[name]):
            found[mask] = None
            if len(found) >= limit:
                break
        return [tuple(sorted(self.models_of(mask))) for mask in found]


def compile_sets(sets: Sequence[tuple[str, str]], names: Mapping[str, str]) -> CompiledMatrix:
    """Compile (set name, expression) pairs, in definition order.

    `names` maps every var and model id to its model id. Raises MatrixError with the fragments of compatibility 5.5.
    """
    if not sets:
        raise MatrixError("at least one set is needed")
    bits = {model: 1 << place for place, model in enumerate(dict.fromkeys(names.values()))}
    parsed: dict[str, Node] = {}
    for name, text in sets:
        if name in parsed:
            raise MatrixError(f'set "{name}": defined twice')
        try:
            parsed[name] = parse(text, names, bits)
        except ExpressionError as error:
            raise MatrixError(f'set "{name}": {error}') from error
    return CompiledMatrix(_linked(parsed), bits)


def _linked(parsed: Mapping[str, Node]) -> dict[str, Node]:
    """Replace references by the trees they name, depth first, so that referenced sets come first."""
    refs = {name: tuple(dict.fromkeys(references(tree))) for name, tree in parsed.items()}
    for name, wanted in refs.items():
        for other in wanted:
            if other not in parsed:
                raise MatrixError(f'set "{name}": references undefined set "{other}"')
    done: dict[str, Node] = {}
    for start in parsed:
        path = {start: iter(refs[start])}
        while path:
            name = next(reversed(path))
            other = next(path[name], "")
            if not other:
                path.popitem()
                if name not in done:
                    done[name] = _link(name, parsed[name], done)
            elif other in path:
                raise MatrixError(f'set "{name}": circular reference detected involving set "{other}"')
            elif other not in done:
                path[other] = iter(refs[other])
    return done


def _link(name: str, tree: Node, done: Mapping[str, Node]) -> Node:
    try:
        return link(tree, done)
    except ExpressionError as error:
        raise MatrixError(f'set "{name}": {error}') from error


class Solution(NamedTuple):
    """What one decision chose. `chosen_set` is empty when the target is running or in no set."""

    evict: list[str]
    chosen_set: str
    total_cost: int
    trimmed: tuple[str, ...] = ()  # stopped although the set has them: it does not fit as a whole


#: What a protected model weighs on top of its cost: any choice that keeps it loaded is cheaper than one that does not.
_PROTECTED = 1 << 80

#: Bytes left beside the target in VRAM and system memory; None where no budget decides.
_Room = tuple[int | None, int | None]


def _pools(room: _Room) -> tuple[tuple[str, int | None, Callable[[Sizes], int]], ...]:
    return (("vram", room[0], lambda sizes: sizes.vram), ("ram", room[1], lambda sizes: sizes.ram))


class MatrixPolicy:
    """The eviction policy of the matrix (compatibility 5.6), with memory budgets; pure.

    `costs` are evict costs by model id (default 1), budgets and sizes are bytes. Where a budget is set and the
    target's size is known, what stays beside the target must fit: a set that does not fit as a whole counts with
    the price of what must also go, coldest first, because a set permits all its subsets. Models of unknown size
    count nothing here: the sets vouch for them. `protected` models (`displace: false`) are named only where no
    choice keeps them.
    """

    def __init__(
        self,
        sizes: Mapping[str, Sizes],
        matrix: CompiledMatrix,
        costs: Mapping[str, int] | None = None,
        vram_budget: int = 0,
        ram_budget: int = 0,
        oversize_evict: bool = False,
        protected: Collection[str] = (),
    ) -> None:
        self.vram_budget = vram_budget
        self.ram_budget = ram_budget
        self.oversize_evict = oversize_evict
        self._sizes = sizes
        self._matrix = matrix
        self._costs = dict(costs or {})
        self._protected = frozenset(protected)

    def eviction_for(
        self,
        target: str,
        running: Sequence[str],
        vram_ceiling: int | None = None,
        ram_ceiling: int | None = None,
    ) -> list[str]:
        """Models to stop, in running order, so that `target` can load; none if it runs already."""
        return self.solve(target, running, vram_ceiling, ram_ceiling).evict

    def memory_decides(self, target: str) -> bool:
        """Whether budgets take part in the decision for this target."""
        size = self._size(target)
        return (self.vram_budget > 0 and size.vram > 0) or (self.ram_budget > 0 and size.ram > 0)

    def ready_victims(self, target: str, running: Sequence[str]) -> list[str]:
        """Nobody: what runs already stops nothing, even where the mix fits no set."""
        return []

    def misfit(
        self,
        target: str,
        running: Sequence[str],
        vram_ceiling: int | None = None,
        ram_ceiling: int | None = None,
    ) -> Misfit | None:
        """Why the target cannot fit alone; in the matrix everything else can be stopped for it."""
        if self.oversize_evict:
            return None
        size = self._size(target)
        found = []
        for pool, need, budget, ceiling in (
            ("vram", size.vram, self.vram_budget, vram_ceiling),
            ("ram", size.ram, self.ram_budget, ram_ceiling),
        ):
            if budget and need > budget:
                found.append(Misfit(pool, need, budget, (), only_now=False))
            elif budget and ceiling is not None and need > max(0, ceiling):
                found.append(Misfit(pool, need, max(0, ceiling), (), only_now=True))
        return min(found, key=lambda misfit: misfit.only_now, default=None)

    def solve(
        self,
        target: str,
        running: Sequence[str],
        vram_ceiling: int | None = None,
        ram_ceiling: int | None = None,
    ) -> Solution:
        """The cheapest set that has the target: the first of equals in compiled and written order."""
        residents = list(dict.fromkeys(running))
        if target in residents:
            return Solution([], "", 0)
        sets = self._matrix.sets_with(target)
        if not sets:
            return Solution(residents, "", 0)
        room = self._room(target, vram_ceiling, ram_ceiling)
        return self._best(target, residents, sets, room)

    def explain(
        self,
        target: str,
        running: Sequence[str],
        vram_ceiling: int | None = None,
        ram_ceiling: int | None = None,
    ) -> Explanation:
        """The same decision with its arithmetic, for `plan` and for the leader's one line per swap."""
        found = self.solve(target, running, vram_ceiling, ram_ceiling)
        residents = [model for model in dict.fromkeys(running) if model != target]
        room = self._room(target, vram_ceiling, ram_ceiling)
        why = f'is not in set "{found.chosen_set}"' if found.chosen_set else "no set has the target"
        lines = []
        for model in residents:
            stops = model in found.evict
            if not stops:
                reason = f'is in set "{found.chosen_set}"' if found.chosen_set else "the target is running"
            else:
                reason = "makes room, coldest first" if model in found.trimmed else why
            lines.append(ResidentPlan(model, self._size(model).vram, stops, reason))
        charge = self._size(target).vram
        cap = self.vram_budget if vram_ceiling is None else max(0, min(self.vram_budget, vram_ceiling))
        total = charge + sum(line.charge for line in lines)
        after = charge + sum(line.charge for line in lines if not line.stops)
        step = PoolPlan("vram", "matrix", self.vram_budget, cap, charge, total, after, tuple(lines))
        return Explanation(target, tuple(found.evict), (step,), self._notes(target, residents, found, room))

    def on_swap_start(self, target: str, running: Sequence[str], vram_ceiling: int | None = None) -> str | None:
        """The debug line of one real swap, for the leader to log; None without a VRAM budget."""
        if not self.vram_budget:
            return None
        resident = sum(self._size(model).vram for model in dict.fromkeys(running) if model != target)
        cap = self.vram_budget if vram_ceiling is None else max(0, min(self.vram_budget, vram_ceiling))
        line = (
            f"swap to {target}: estimate {gib(self._size(target).vram)}, "
            f"residents {gib(resident)}, budget in force {gib(cap)}"
        )
        return line if cap == self.vram_budget else f"{line} (configured {gib(self.vram_budget)})"

    def _notes(self, target: str, residents: list[str], found: Solution, room: _Room) -> tuple[str, ...]:
        if not found.chosen_set:
            return ()
        notes = [f'set "{found.chosen_set}" is the cheapest that has the target, at cost {found.total_cost}']
        # Without memory in the way, what would have been chosen?
        free = self._best(target, residents, self._matrix.sets_with(target), (None, None))
        if (free.chosen_set, free.total_cost) != (found.chosen_set, found.total_cost):
            over = self._over(target, [model for model in residents if model not in free.evict], room)
            notes.append(f'set "{free.chosen_set}" would cost {free.total_cost}, but does not fit: {over}')
        if found.trimmed:
            notes.append(f'set "{found.chosen_set}" does not fit the budget with {", ".join(found.trimmed)}')
        return tuple(notes)

    def _over(self, target: str, stays: Sequence[str], room: _Room) -> str:
        """Which pool is too small for these models beside the target, and by what figures."""
        for pool, left, size in _pools(room):
            total = sum(size(self._size(model)) for model in stays)
            if left is not None and total > left:
                charge = size(self._size(target))
                names = ", ".join(model for model in stays if size(self._size(model)))
                limit = gib(max(0, left + charge))
                return f"{target} with {names} takes {gib(total + charge)} of {pool.upper()}, {limit} are allowed"
        return "memory is too small for it"

    def _size(self, model: str) -> Sizes:
        return self._sizes.get(model) or Sizes()

    def _cost(self, model: str) -> int:
        return self._costs.get(model, 1)

    def _weight(self, model: str) -> int:
        return self._cost(model) + _PROTECTED * (model in self._protected)

    def _rank(self, found: Solution) -> tuple[int, bool]:
        """Cheapest first; of equals, sets that fit as they stand come before those that do not."""
        return sum(map(self._weight, found.evict)), bool(found.trimmed)

    def _room(self, target: str, vram_ceiling: int | None, ram_ceiling: int | None) -> _Room:
        """Bytes left beside the target in either pool; None where no budget decides."""
        size = self._size(target)

        def left(charge: int, budget: int, ceiling: int | None) -> int | None:
            if not budget or not charge:
                return None
            return (budget if ceiling is None else max(0, min(budget, ceiling))) - charge

        return (
            left(size.vram, self.vram_budget, vram_ceiling),
            left(size.ram, self.ram_budget, ram_ceiling),
        )

    def _best(self, target: str, residents: list[str], sets: Sequence[tuple[str, Node]], room: _Room) -> Solution:
        bits = self._matrix.bits
        bit = bits[target]
        everything = sum(map(self._weight, residents))
        # Worth more than all the others, so that alternatives with the target win over those without.
        weights = {bit: (everything + 1, 0, 0)}
        for model in residents:
            if model in bits:
                size = self._size(model)
                vram = size.vram if room[0] is not None else 0
                ram = size.ram if room[1] is not None else 0
                weights[bits[model]] = (self._weight(model), vram, ram)
        relevant = sum(weights)
        query = Query(relevant, weights)
        best: Solution | None = None
        rank = (0, False)
        for name, tree in sets:
            at_least = everything - sum(weights[each][0] for each in bits_of(relevant & tree.mask & ~bit))
            if best and (at_least, False) >= rank:
                continue  # not even with all that it names would it be cheaper
            for option in query.options(tree):
                lost = everything - (option.gain - everything - 1)
                if not option.kept & bit or (best and lost > rank[0]):
                    continue
                found = self._solution(name, residents, option.kept, room)
                if best is None or self._rank(found) < rank:
                    best, rank = found, self._rank(found)
        if best is None:
            raise AssertionError(f"no alternative of {[name for name, _ in sets]} has {target}")
        return best

    def _solution(self, name: str, residents: list[str], kept: int, room: _Room) -> Solution:
        """What stops if this alternative is taken: what it does not have, and what does not fit."""
        bits = self._matrix.bits
        stays = [model for model in residents if bits.get(model, 0) & kept]
        trimmed = self._trim(stays, room)
        gone = set(residents).difference(stays).union(trimmed)
        evict = [model for model in residents if model in gone]
        return Solution(evict, name, sum(map(self._cost, evict)), tuple(trimmed))

    def _trim(self, stays: list[str], room: _Room) -> list[str]:
        """The coldest of those that must also go, until the rest fits."""
        gone: list[str] = []
        for _pool, left, size in _pools(room):
            if left is None:
                continue
            total = sum(size(self._size(model)) for model in stays if model not in gone)
            for model in stays:
                if total <= left:
                    break
                charge = size(self._size(model))
                if charge and model not in gone:
                    gone.append(model)
                    total -= charge
        return gone

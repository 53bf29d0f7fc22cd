"""Foreign use of the cards, and the live ceiling it puts on the VRAM budget (spec/memory.md); pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from qmflask.memory.samples import GIB, GpuSample
from qmflask.states import State

#: System memory that is never promised to models.
RAM_RESERVE = GIB
#: A model in these states has all its memory, so that its tree must be on a card.
_LOADED = frozenset({State.READY, State.DRAINING})
#: While a model is in these, what a card shows is on its way to something else.
_MOVING = frozenset({State.STARTING, State.STOPPING})


@dataclass(frozen=True, slots=True)
class ModelView:
    """One of our models that is not down: its state, its pool and the pids of its whole process tree."""

    model: str
    state: State
    pool: str = "vram"
    pids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Reading:
    """What one sample says of foreign use. `foreign` is bytes by card uuid; `why` is empty when it can be trusted."""

    foreign: Mapping[str, int]
    why: str = ""

    @property
    def trusted(self) -> bool:
        """Whether a ceiling may be drawn from it."""
        return not self.why

    @property
    def total(self) -> int:
        """Foreign bytes on all cards."""
        return sum(self.foreign.values())


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The state between samples. `ceiling` is bytes, None where no trusted reading tightens or confirms the budget.

    `floors` is the lowest trusted foreign use by card uuid; the owner keeps it in the store under the boot id.
    """

    floors: Mapping[str, int] = field(default_factory=dict)
    ceiling: int | None = None
    foreign: int | None = None
    excess: int = 0
    trusted: bool = False
    why: str = "no sample was taken yet"

    @property
    def floor(self) -> int:
        """Foreign bytes on all cards that are taken for granted."""
        return sum(self.floors.values())


def read_foreign(sample: GpuSample | None, models: Sequence[ModelView]) -> Reading:
    """Foreign use: what is used on the cards less what our trees hold there, and whether to trust it."""
    if sample is None or not sample.total:
        return Reading({}, "no card tells how much memory it has")
    ours = {pid for view in models for pid in view.pids}
    foreign = {
        card.uuid: max(0, card.used - sum(size or 0 for pid, size in (card.processes or {}).items() if pid in ours))
        for card in sample.cards
    }
    gpu = [view for view in models if view.pool != "ram"]
    if gpu and all(card.processes is None for card in sample.cards) and any(v.state in _LOADED for v in gpu):
        return Reading(foreign, "the driver does not tell the memory of single processes")
    for view in gpu:
        if view.state in _LOADED and sample.held_by(view.pids) is None:
            return Reading(foreign, f'the driver does not list the processes of "{view.model}"')
    return Reading(foreign)


def fresh(sample: GpuSample | None, now: int, limit: int) -> GpuSample | None:
    """The sample, or None when it is older than `limit` nanoseconds (a driver that hangs tells nothing)."""
    return sample if sample is not None and now - sample.at <= limit else None


def settled(models: Sequence[ModelView], reclaiming: bool = False) -> bool:
    """Whether no model of ours is starting, stopping or in reclaim: a late release is not foreign use."""
    return not reclaiming and not any(view.state in _MOVING for view in models)


def step(
    before: Ceiling,
    sample: GpuSample | None,
    models: Sequence[ModelView],
    budget: int,
    reserve: int,
    reclaiming: bool = False,
) -> Ceiling:
    """The state after one sample. `budget` and `reserve` are bytes; a budget of 0 has no ceiling.

    While our models move, the last settled state stays as it is.
    """
    if not settled(models, reclaiming):
        return before
    reading = read_foreign(sample, models)
    if not reading.trusted:
        return replace(before, ceiling=None, excess=0, trusted=False, foreign=None, why=reading.why)
    floors = {
        **before.floors,
        **{uuid: min(use, before.floors.get(uuid, use)) for uuid, use in reading.foreign.items()},
    }
    excess = max(0, reading.total - sum(floors[uuid] for uuid in reading.foreign))
    return Ceiling(
        floors=floors,
        ceiling=limit_of(budget, excess, reserve) if budget else None,
        foreign=reading.total,
        excess=excess,
        trusted=True,
        why="",
    )


def limit_of(budget: int, excess: int, reserve: int) -> int:
    """The ceiling: the whole budget while nothing grew over the floor, else what growth and reserve leave of it."""
    return max(0, budget - excess - reserve) if excess else budget


def relearn(before: Ceiling) -> Ceiling:
    """Forget the floors; the next trusted reading sets them. The only way for a floor to rise."""
    return replace(before, floors={}, ceiling=None, excess=0, trusted=False, why="the floor is learned anew")


def news(before: Ceiling, after: Ceiling) -> str | None:
    """The one log line when readings stop or begin to be trusted; None when nothing changed."""
    if after.trusted == before.trusted:
        return None if after.trusted or after.why == before.why else _distrust(after)
    return "foreign VRAM use can be told again; the live ceiling is back" if after.trusted else _distrust(after)


def _distrust(after: Ceiling) -> str:
    return f"foreign VRAM use cannot be told ({after.why}); the configured budget stays in force"


def holdings(sample: GpuSample | None, models: Sequence[ModelView]) -> dict[str, int]:
    """VRAM bytes by model, for those whose trees are listed."""
    if sample is None:
        return {}
    held = ((view.model, sample.held_by(view.pids)) for view in models)
    return {model: size for model, size in held if size is not None}


def unlisted(sample: GpuSample, dead: Set[int] = frozenset()) -> int | None:
    """Bytes in use that no living process holds: the driver's own, and what it has not given back of the dead.

    `dead` are pids that the sample may still list. None when no card lists processes.
    """
    cards = [card for card in sample.cards if card.processes is not None]
    if not cards:
        return None
    listed = [sum(size or 0 for pid, size in (card.processes or {}).items() if pid not in dead) for card in cards]
    return sum(max(0, card.used - size) for card, size in zip(cards, listed, strict=True))


def foreign_processes(sample: GpuSample | None, models: Sequence[ModelView]) -> dict[int, int]:
    """VRAM bytes by pid of processes that are not ours, largest first, as far as the driver tells."""
    ours = {pid for view in models for pid in view.pids}
    found: dict[int, int] = {}
    for card in sample.cards if sample is not None else ():
        for pid, size in (card.processes or {}).items():
            if pid not in ours and size:
                found[pid] = found.get(pid, 0) + size
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def ram_ceiling(budget: int, available: int | None, held: int) -> int | None:
    """The RAM rule's live side: min(budget, MemAvailable + what our models hold of it - 1 GiB), in bytes.

    None without a budget or a reading (spec/eviction.md, admission 6).
    """
    if not budget or available is None:
        return None
    return max(0, min(budget, available + held - RAM_RESERVE))

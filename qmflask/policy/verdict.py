"""The decision order for one model (DESIGN section 4, steps 1 to 8), on the working copy of one walk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from qmflask.policy.board import Board
from qmflask.policy.eviction import gib
from qmflask.policy.snapshot import SECOND, MisfitView, ProcessView, SwapView
from qmflask.states import State

#: Seconds after which a request that only the live ceiling refuses may ask again.
ASK_AGAIN = 5


class Kind(Enum):
    """What can come out of one assessment."""

    SERVE = "serve"
    START = "start"
    WAIT = "wait"
    ABORT = "abort"  # drop `swap` first, then assess again
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for every request of one model at this point of the walk."""

    kind: Kind
    victims: tuple[str, ...] = ()
    blockers: tuple[str, ...] = ()
    why: str = ""
    fixed: bool = False
    swap: SwapView | None = None
    code: str = ""
    retry_after: int | None = None


_SERVE = Verdict(Kind.SERVE)


def assess(board: Board, model: str, overdue: bool) -> Verdict:
    """Decide for a model that no open swap loads; `overdue` means that the request's patience is over."""
    if model not in board.models:
        return Verdict(Kind.REJECT, code="model_not_found", why=f'model "{model}" is not configured')
    view = board.processes.get(model)
    if view is None or view.state in (State.FAILED, State.STOPPING):
        return _back_off(board, model) or _assess_down(board, model, overdue)
    if view.state is State.STARTING:
        return _wait(f"{model} is loading", (model,))
    if view.state is State.DRAINING:
        return _assess_draining(board, view, overdue)
    if view.changed:
        return _assess_changed(board, view)
    return _assess_ready(board, model, overdue)


def _wait(why: str, blockers: Iterable[str], victims: tuple[str, ...] = ()) -> Verdict:
    return Verdict(Kind.WAIT, why=why, blockers=tuple(blockers), victims=victims)


def _yield_to(board: Board, swap: SwapView, why: str) -> Verdict:
    """Wait for a swap, or have it dropped first if nobody waits for it any more."""
    if board.awaited(swap):
        return _wait(why, (swap.target,))
    return Verdict(Kind.ABORT, swap=swap)


def _back_off(board: Board, model: str) -> Verdict | None:
    failure = board.failures.get(model)
    if failure is None:
        return None
    seconds = max(1, -((board.now - failure.retry_at) // SECOND))
    return Verdict(Kind.REJECT, code=failure.code, why=failure.message, retry_after=seconds)


def _assess_draining(board: Board, view: ProcessView, overdue: bool) -> Verdict:
    """It gives way to a swap (queue behind it), or it is being unloaded (start it again afterwards)."""
    swap = board.victim_of.get(view.model)
    if swap is not None:
        return _yield_to(board, swap, f"{view.model} gives way to {swap.target}")
    if view.leases:
        return _wait(f"{view.model} is being stopped and answers {_requests(view.leases)} before that", (view.model,))
    return _assess_down(board, view.model, overdue)


def _assess_ready(board: Board, model: str, overdue: bool) -> Verdict:
    swap = board.victim_of.get(model)
    if swap is not None:
        return _yield_to(board, swap, f"{model} gives way to {swap.target}")
    for swap in board.swaps.values():
        if model in swap.blockers and not swap.spawned:
            return _yield_to(board, swap, f"{swap.target} is about to start, and {model} renders only after that")
    if board.policy.memory_decides(model):
        return _SERVE
    # Its memory is taken already: where only protected models should go for it, both stay.
    victims = tuple(v for v in board.policy.ready_victims(model, board.running(overdue)) if not board.protected(v))
    return _assess_swap(board, model, victims, overdue, spawn=False) if victims else _SERVE


def _assess_changed(board: Board, view: ProcessView) -> Verdict:
    """Idle: it is its own victim. While it, or what must stop with it, is busy it serves on, at most its patience."""
    model = view.model
    late = 0 < view.changed_since <= board.now - board.rule(model).patience
    restart = _assess_down(board, model, late, own=(model,))
    if restart.kind is Kind.WAIT and not late:
        return _assess_ready(board, model, overdue=False)
    return restart


def _assess_down(board: Board, model: str, overdue: bool, own: tuple[str, ...] = ()) -> Verdict:
    running = board.running(overdue)
    misfit = board.policy.misfit(model, running, board.vram_ceiling, board.ram_ceiling)
    if misfit is not None:
        return _refuse(model, misfit)
    victims = board.policy.eviction_for(model, running, board.vram_ceiling, board.ram_ceiling)
    return _assess_swap(board, model, own + tuple(victims), overdue, spawn=True)


def _refuse(model: str, misfit: MisfitView) -> Verdict:
    held = ", ".join(f"{holder} holds {gib(size)}" for holder, size in misfit.holders)
    limit = "free now" if misfit.only_now else "the budget"
    why = (
        f'model "{model}" does not fit: {gib(misfit.need)} of {misfit.pool.upper()} are needed'
        f"{f' ({held} and cannot be stopped for it)' if held else ''}, {gib(misfit.budget)} are {limit}"
    )
    advice = "; try again later" if misfit.only_now else f"; raise {misfit.pool}BudgetGB or make the model smaller"
    return Verdict(
        Kind.REJECT,
        code="insufficient_memory",
        why=why + advice,
        retry_after=ASK_AGAIN if misfit.only_now else None,
    )


def _assess_swap(board: Board, model: str, victims: tuple[str, ...], overdue: bool, *, spawn: bool) -> Verdict:
    """Steps 5 to 8 once the victims are known; `spawn` tells that a process will be started."""
    for victim in victims:
        if victim != model and board.protected(victim):
            return _protected(model, victim)
    obstacles = _collisions(board, model, victims)
    if spawn:
        obstacles += [swap for swap in _spawn_conflicts(board, model) if swap not in obstacles]
    for swap in obstacles:
        if board.awaited(swap):
            return _wait(_in_the_way(model, swap), (swap.target,), victims)
    blockers = board.renderers(model, victims) if spawn else ()
    for victim in victims:
        if board.state(victim) is State.STARTING and victim not in board.swaps:
            return _wait(f"{victim} is loading", (victim,), victims)
    if not overdue:
        waits = _occupied(board, model, victims, blockers)
        if waits:
            return _wait(*_reason(board, waits), victims)
    if obstacles:
        return Verdict(Kind.ABORT, swap=obstacles[0])
    return Verdict(Kind.START, victims, blockers, fixed=overdue)


def _collisions(board: Board, model: str, victims: tuple[str, ...]) -> list[SwapView]:
    """Open swaps whose target would be stopped, that stop this model, or that share a victim with it."""
    found: dict[str, SwapView] = {}
    for name in (model, *victims):
        for swap in (board.swaps.get(name), board.victim_of.get(name)):
            if swap is not None:
                found[swap.target] = swap
    return list(found.values())


def _in_the_way(model: str, swap: SwapView) -> str:
    if model in swap.victims:
        return f"{model} gives way to {swap.target}"
    return f"{swap.target} is loading"


def _spawn_conflicts(board: Board, model: str) -> list[SwapView]:
    """Swaps that must go first, because no model is spawned while another one renders.

    A model that renders and is loading will render at once for those who wait for it; and one that is asked for now
    could be ready, and render, before a swap that is still making room has spawned its target.
    """
    renders = board.rule(model).renders
    return [
        swap for swap in board.swaps.values() if board.rule(swap.target).renders or (renders and board.spawns(swap))
    ]


def _occupied(board: Board, model: str, victims: tuple[str, ...], blockers: tuple[str, ...]) -> list[str]:
    """Victims in flight or held, and models that render now."""
    waits = [name for name in victims if board.busy(name) or (name != model and board.held(name))]
    waits += [name for name in blockers if board.leases(name)]
    return waits


def _reason(board: Board, waits: list[str]) -> tuple[str, list[str]]:
    first = waits[0]
    leases = board.leases(first)
    if leases:
        why = f"{first} is answering {_requests(leases)}"
    elif board.held(first):
        why = f"{first} is held for the next round of its agent"
    else:
        why = f"{first} is loading"
    return (f"{why}, and {len(waits) - 1} more" if len(waits) > 1 else why), waits


def _protected(model: str, victim: str) -> Verdict:
    why = (
        f'model "{victim}" is loaded and protected (displace: false), and "{model}" does not fit beside it;'
        f' unload "{victim}" first'
    )
    return Verdict(Kind.REJECT, code="model_protected", why=why, blockers=(victim,))


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def abandoned(swap: SwapView) -> bool:
    """Whether a swap that nobody waits for is dropped at once: nothing was lost for it, or its load never began.

    A load that has begun finishes, unless a queued request needs its room.
    """
    return not swap.loading

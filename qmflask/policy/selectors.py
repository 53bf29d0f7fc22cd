"""Which target a selector sends one request to: pin, warm or spillover (compatibility 5.8); pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qmflask.states import State

#: The message of the 503 when every target of a spillover selector is on its way out.
NO_TARGET = "no available spillover targets"

_ACTIVE = frozenset({State.READY, State.STARTING})
#: These take nothing new, so a request sent there would wait for a stop and a start.
_LEAVING = frozenset({State.STOPPING, State.DRAINING})


@dataclass(frozen=True, slots=True)
class Target:
    """One target as configured (`name`), resolved to the model it means; a peer's model is not `local`."""

    name: str
    model: str
    local: bool = True


def choose(
    strategy: str,
    targets: Sequence[Target],
    states: Mapping[str, State],
    reserved: Mapping[str, int] | None = None,
    spillover: int = 1,
    counter: int = 0,
) -> Target | None:
    """The target for one request; None when a spillover selector has none that takes requests.

    `states` has the local models that are not stopped; `reserved` counts, by model, the requests that this selector
    has sent and that have not ended; `counter` is how often it has chosen so far. Raises ValueError for a strategy
    that does not exist or no targets.
    """
    if not targets:
        raise ValueError("a selector needs targets")
    if strategy == "pin":
        return targets[0]
    if strategy == "warm":
        return _warm(targets, states)
    if strategy == "spillover":
        return _spillover(targets, states, reserved or {}, spillover, counter)
    raise ValueError(f'unknown strategy "{strategy}"')


def _warm(targets: Sequence[Target], states: Mapping[str, State]) -> Target:
    """The first that is ready, else the first that is loading, else the first."""
    for state in (State.READY, State.STARTING):
        for target in targets:
            if target.local and states.get(target.model) is state:
                return target
    return targets[0]


def _spillover(
    targets: Sequence[Target],
    states: Mapping[str, State],
    reserved: Mapping[str, int],
    spillover: int,
    counter: int,
) -> Target | None:
    """Fill what is loaded up to `spillover` requests each before loading the next one."""
    active: list[Target] = []
    cold: list[Target] = []
    for target in targets:
        state = states.get(target.model) if target.local else None
        if state in _LEAVING:
            continue
        (active if state in _ACTIVE or reserved.get(target.model, 0) > 0 else cold).append(target)
    if not active:
        return cold[0] if cold else None
    least = min(reserved.get(target.model, 0) for target in active)
    if least >= spillover and cold:
        return cold[0]
    tied = [target for target in active if reserved.get(target.model, 0) == least]
    return tied[counter % len(tied)]

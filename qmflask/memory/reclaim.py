"""The reclaim gate: a target starts only once its victims' memory was seen free (DESIGN section 3); pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from qmflask.memory.samples import GIB, MIB

#: Share of the victims' memory that must be seen free, in per cent.
SHARE = 95
#: Memory of the dead up to this much is a driver's rounding.
SLACK = 64 * MIB
MILLISECOND = 1_000_000
#: The longest pause between two looks, in milliseconds; the first look is at once, then after 1, 2, 4 ...
LONGEST_PAUSE = 50


@dataclass(frozen=True, slots=True)
class PoolState:
    """One pool now. `holds` is bytes by model of ours; `starting` maps models that are starting to their charge.

    `unexplained` is what is in use beyond what living processes and the usual overhead explain: memory of the dead
    that the driver has not given back. None where the source does not tell whose memory it is.
    """

    used: int
    free: int
    holds: Mapping[str, int] = field(default_factory=dict)
    starting: Mapping[str, int] = field(default_factory=dict)
    unexplained: int | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """What one swap waits for in one pool. Bytes; times are monotonic nanoseconds.

    `held` is what the victims' trees held at their last sample; `ahead` (swap, bytes) what earlier gates still waited
    for when this one opened, and so may not count as this one's; `others` what models that are not victims held then.
    """

    swap: int
    pool: str
    used_before: int
    held: int
    need: int
    deadline: int
    victims: tuple[str, ...] = ()
    ahead: tuple[tuple[int, int], ...] = ()
    others: Mapping[str, int] = field(default_factory=dict)
    looks: int = 0

    @property
    def waits(self) -> bool:
        """Whether there is anything to be seen at all."""
        return bool(self.need or self.victims)

    def to_json(self) -> dict[str, Any]:
        """For the swap's row."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Gate:
        """From the swap's row; the reverse of `to_json`."""
        ahead = tuple((swap, size) for swap, size in body["ahead"])
        return cls(**{**body, "victims": tuple(body["victims"]), "ahead": ahead})


@dataclass(frozen=True, slots=True)
class Look:
    """The outcome of one look. Exactly one of `passed`, `failed` and a later `next_look` holds."""

    gate: Gate
    passed: bool
    failed: bool
    next_look: int
    missing: int  # bytes that have not been seen free
    why: str


def open_gate(
    swap: int,
    pool: str,
    before: PoolState,
    victims: Mapping[str, int],
    need: int,
    deadline: int,
    earlier: Sequence[Gate] = (),
) -> Gate:
    """A gate on the state sampled before anybody was signalled.

    `victims` maps them to the bytes of their trees at that sample, `need` is the target's charge (0: unknown),
    `earlier` are this pool's gates that still wait. A driver may free late, so cards are watched. System memory is back
    when a process is gone, and what all others do with it meanwhile must not be held against the swap: there only what
    is free counts.
    """
    if pool == "ram":
        victims = {}
    others = {model: size for model, size in before.holds.items() if model not in victims}
    ahead = tuple((gate.swap, outstanding(gate, before)) for gate in earlier)
    return Gate(swap, pool, before.used, sum(victims.values()), need, deadline, tuple(victims), ahead, others)


def outstanding(gate: Gate, state: PoolState) -> int:
    """Bytes that the gate has not seen come back yet, at least 0."""
    return min(gate.held, max(0, _wanted(gate) - _fallen(gate, state)))


def look_all(gates: Sequence[Gate], state: PoolState | None, now: int) -> list[Look]:
    """Look at one pool's gates in the order of their swaps; None: nothing measures this pool, so all pass.

    The caller has seen that the victims' processes are gone. Nobody claims what a gate that fails has waited for, so
    those behind it need not leave it alone any more. A target that passes is not among the starting models of this
    look, so what it needs is set aside.
    """
    looks: list[Look] = []
    failed: set[int] = set()
    promised = 0
    waiting = 0
    for gate in gates:
        if state is None:
            looks.append(Look(gate, True, False, now, 0, "nothing measures this memory"))
            continue
        ahead = tuple(pair for pair in gate.ahead if pair[0] not in failed)
        found = _look(replace(gate, ahead=ahead), state, now, promised, waiting)
        looks.append(found)
        if found.failed:
            failed.add(gate.swap)
        elif found.passed:
            promised += gate.need
        else:
            # What an earlier swap waits for may stay unexplained: its target, which is not there yet, has the room.
            waiting += min(gate.held, gate.need)
    return looks


def _look(gate: Gate, state: PoolState, now: int, promised: int, waiting: int) -> Look:
    allowed = gate.held * (100 - SHARE) // 100
    if state.unexplained is None:
        owed = _wanted(gate) - _fallen(gate, state) + allowed
    else:
        owed, allowed = state.unexplained - waiting, max(SLACK, allowed)
    returned = owed - allowed
    short = gate.need + promised + _pending(gate, state) - state.free if gate.need else 0
    missing = max(0, returned, short)
    if not missing:
        return Look(gate, True, False, now, 0, "")
    pool = gate.pool.upper()
    if returned >= short:
        why = f"{_gib(owed)} of {pool} were not given back after {', '.join(gate.victims) or 'others'} stopped"
    else:
        why = f"{_gib(missing)} of {pool} are missing: {_gib(state.free)} are free, {_gib(gate.need)} are needed"
    if now >= gate.deadline:
        return Look(gate, False, True, now, missing, why)
    pause = min(1 << min(gate.looks, 10), LONGEST_PAUSE) * MILLISECOND
    again = min(now + pause, max(gate.deadline, now + MILLISECOND))
    return Look(replace(gate, looks=gate.looks + 1), False, False, again, missing, why)


def _wanted(gate: Gate) -> int:
    """Bytes by which use must fall since the gate opened; nothing if nothing is known of the victims."""
    if not gate.held:
        return 0
    return gate.held * SHARE // 100 + sum(size for _, size in gate.ahead)


def _fallen(gate: Gate, state: PoolState) -> int:
    """Bytes by which use has fallen, apart from what our other models took meanwhile.

    A starting model counts with what it is seen holding, never with its charge: it may not have taken it yet, and the
    victims' memory would then pass for its own.
    """
    if not gate.held:
        return 0
    taken = sum(
        max(0, size - gate.others.get(model, 0)) for model, size in state.holds.items() if model not in gate.victims
    )
    return gate.used_before - state.used + taken


def _pending(gate: Gate, state: PoolState) -> int:
    """Bytes that starting models will still take."""
    return sum(max(0, charge - state.holds.get(model, 0)) for model, charge in state.starting.items())


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"

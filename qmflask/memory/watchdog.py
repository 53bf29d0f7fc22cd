"""Which idle models are unloaded when the cards fill up after models were loaded (spec/memory.md, watchdog); pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qmflask.memory.samples import GIB

#: How far above the line the residents may be before it counts.
SLACK = GIB // 2
#: The shortest silence after something was unloaded, in nanoseconds.
QUIET = 60 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class ResidentView:
    """One VRAM resident: its charge in bytes. `free_to_go`: ready, idle, not held, not in a persistent group."""

    model: str
    charge: int
    free_to_go: bool


@dataclass(frozen=True, slots=True)
class Watch:
    """The state between looks: since when the residents are over the line, and until when nothing is unloaded."""

    over_since: int | None = None
    quiet_until: int = 0


@dataclass(frozen=True, slots=True)
class Shed:
    """Models to unload, largest first, with the sum and the line that made it necessary."""

    models: tuple[str, ...]
    resident: int
    line: int


def watch(
    before: Watch, residents: Sequence[ResidentView], budget: int, excess: int, grace: int, now: int
) -> tuple[Watch, Shed | None]:
    """One look. `excess` is the trusted growth of foreign use (0 without trust), `grace` nanoseconds.

    Over the line (budget less growth, half a GiB of slack, no reserve) for the whole grace period: unload what is
    free to go until the rest is under it. If nobody is free to go, the next look tries again.
    """
    resident = sum(view.charge for view in residents)
    line = budget - excess + SLACK
    if not budget or resident <= line:
        return replace(before, over_since=None), None
    over = replace(before, over_since=now if before.over_since is None else before.over_since)
    if now < before.quiet_until or now - (over.over_since or 0) < grace:
        return over, None
    models: list[str] = []
    left = resident
    for view in sorted(residents, key=lambda view: (-view.charge, view.model)):
        if left <= line:
            break
        if view.free_to_go and view.charge:
            models.append(view.model)
            left -= view.charge
    if not models:
        return over, None
    return Watch(None, now + max(QUIET, 2 * grace)), Shed(tuple(models), resident, line)

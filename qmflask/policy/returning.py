"""When the default model comes back: the box has been idle for a while, and it fits without stopping anything."""

from __future__ import annotations

from dataclasses import dataclass

from qmflask.policy.board import Board
from qmflask.policy.snapshot import Snapshot
from qmflask.states import DOWN


@dataclass
class Quiet:
    """Since when the box has been idle: no answer has ended, and nothing was loaded or stopped (`since`, in ns)."""

    since: int
    _up: frozenset[str] | None = None

    def look(self, snapshot: Snapshot, now: int) -> int:
        """The same at this moment; to be asked once or twice a second, or what comes and goes is missed."""
        up = frozenset(name for name, view in snapshot.processes.items() if view.state not in DOWN)
        if self._up not in (None, up):
            self.since = now
        self._up = up
        return max([self.since, *(view.idle_since for view in snapshot.processes.values())])


def returns(snapshot: Snapshot, model: str, quiet_since: int, return_after: int, now: int) -> bool:
    """Whether `model`, the default one, should be loaded now; no request came for `return_after` nanoseconds.

    `quiet_since` is what `Quiet` says. Nothing is evicted for it, nothing waits for it:
    an open swap, a request anywhere or a stored failure keeps it away.
    """
    if model not in snapshot.models or now - quiet_since < return_after:
        return False
    if snapshot.queue or snapshot.swaps or any(view.leases for view in snapshot.processes.values()):
        return False
    view = snapshot.processes.get(model)
    if view is not None and (view.state not in DOWN or (view.failure is not None and now < view.failure.retry_at)):
        return False
    running = Board(snapshot, now).running(False)
    ceilings = (snapshot.vram_ceiling, snapshot.ram_ceiling)
    if snapshot.policy.misfit(model, running, *ceilings) is not None:
        return False
    return not snapshot.policy.eviction_for(model, running, *ceilings)

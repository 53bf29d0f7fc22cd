"""The working copy of a snapshot during one walk: who is busy, who goes first, and the effects of what was decided."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import replace

from qmflask.policy.snapshot import EVICTED, ModelRule, ProcessView, Snapshot, SwapView
from qmflask.states import DOWN, State

#: Above every counter that the store hands out: a target that is not running yet is the hottest.
_HOTTEST = 1 << 62

#: Classes of the running order, coldest class first.
_GOING, _IDLE, _HELD, _BUSY, _PROTECTED = range(5)

#: Class, tick, id: what the running order is sorted by.
_Place = tuple[int, int, str]


class _Order:
    """One running order, kept sorted while single models move in it."""

    def __init__(self) -> None:
        self.places: dict[str, _Place | None] = {}
        self.line: list[_Place] = []

    def move(self, model: str, place: _Place | None) -> None:
        """Give one model another place."""
        old = self.places.get(model)
        if old == place:
            return
        if old is not None:
            del self.line[bisect_left(self.line, old)]
        if place is not None:
            insort(self.line, place)
        self.places[model] = place


class Board:
    """Mutable state of one walk over the queue; built from a snapshot, which it never changes."""

    def __init__(self, snapshot: Snapshot, now: int) -> None:
        self.now = now
        self.models = snapshot.models
        self.policy = snapshot.policy
        self.vram_ceiling = snapshot.vram_ceiling
        self.ram_ceiling = snapshot.ram_ceiling
        self.processes = {model: view for model, view in snapshot.processes.items() if view.state is not State.STOPPED}
        self.failures = {
            model: view.failure
            for model, view in snapshot.processes.items()
            if view.failure is not None and now < view.failure.retry_at
        }
        self.swaps = {swap.target: swap for swap in snapshot.swaps}
        self.victim_of = {victim: swap for swap in snapshot.swaps for victim in swap.victims}
        self.waiters = Counter(request.model for request in snapshot.queue)
        self._tick = max((view.tick for view in self.processes.values()), default=0)
        self._renderers = [rule.id for rule in snapshot.models.values() if rule.renders]
        self._orders: dict[bool, _Order] = {}
        self._granted: set[str] = set()

    def rule(self, model: str) -> ModelRule:
        """The model's rule; one that the configuration no longer names has the default one."""
        return self.models.get(model) or ModelRule(model)

    def state(self, model: str) -> State:
        """Its state; a model without a process is stopped."""
        view = self.processes.get(model)
        return view.state if view is not None else State.STOPPED

    def leases(self, model: str) -> int:
        """Requests in flight on the model."""
        view = self.processes.get(model)
        return view.leases if view is not None else 0

    def awaited(self, swap: SwapView) -> bool:
        """Whether anybody still waits for the swap's target."""
        return self.waiters[swap.target] > 0

    def busy(self, model: str) -> bool:
        """In flight, or starting with waiters; what is stopping already is not: nobody waits for its leases."""
        swap = self.swaps.get(model)
        if swap is not None and self.awaited(swap):
            return True
        view = self.processes.get(model)
        if view is None or view.state is State.STOPPING:
            return False
        return view.leases > 0 or (view.state is State.STARTING and swap is None)

    def held(self, model: str) -> bool:
        """Idle, but its last answer ended in a tool call a moment ago."""
        view = self.processes.get(model)
        return view is not None and view.state is State.READY and view.hold_until > self.now

    def protected(self, model: str) -> bool:
        """Loaded (or loading) and configured never to be evicted for another model."""
        if self.rule(model).displace:
            return False
        return model in self.swaps or self.state(model) not in (*DOWN, State.STOPPING)

    def running(self, overdue: bool) -> list[str]:
        """All that is not stopped plus the targets of open swaps, in the order given to the eviction policy.

        What is going anyway comes first, then idle models, then those in flight or held, each coldest first, ties by
        id. For a request whose patience is over a hold protects nothing, so held models come before those in flight.
        Protected models come last, so that they are named only where nothing else makes the room.
        """
        order = self._orders.get(overdue)
        if order is None:
            order = self._orders[overdue] = _Order()
            for model in (*self.processes, *self.swaps):
                order.places[model] = self._place(model, overdue)
            order.line = sorted(place for place in order.places.values() if place is not None)
        return [place[2] for place in order.line]

    def _place(self, model: str, overdue: bool) -> _Place | None:
        """Where a model stands in the running order; None if it is down and not about to start."""
        view = self.processes.get(model)
        if view is None or view.state is State.FAILED:
            return (self._class(model, None, overdue), _HOTTEST, model) if model in self.swaps else None
        return self._class(model, view, overdue), view.tick, model

    def _class(self, model: str, view: ProcessView | None, overdue: bool) -> int:
        if self.protected(model):
            return _PROTECTED
        if self.busy(model):
            return _BUSY
        if view is not None and view.state in (State.STOPPING, State.DRAINING):
            return _GOING
        if self.held(model):
            return _HELD if overdue else _BUSY
        return _IDLE

    def _moved(self, *models: str) -> None:
        """Bring the running orders up to date for models whose state, leases or swap changed."""
        for overdue, order in self._orders.items():
            for model in models:
                order.move(model, self._place(model, overdue))

    def renderers(self, target: str, victims: tuple[str, ...]) -> tuple[str, ...]:
        """Loaded models that render and stay while `target` is spawned."""
        return tuple(
            model
            for model in self._renderers
            if self.state(model) in (State.READY, State.DRAINING) and model != target and model not in victims
        )

    def spawns(self, swap: SwapView) -> bool:
        """Whether the swap has yet to start a process."""
        return not swap.spawned and (self.state(swap.target) is not State.READY or swap.target in swap.victims)

    # --- effects -----------------------------------------------------------------------------------------------

    def grant(self, model: str) -> None:
        """One lease more; the model becomes the hottest (once: its second grant in a walk changes no decision)."""
        if model in self._granted:
            return
        self._granted.add(model)
        view = self.processes[model]
        self._tick += 1
        self.processes[model] = replace(view, leases=view.leases + 1, tick=self._tick)
        self._moved(model)

    def start(self, target: str, victims: tuple[str, ...], blockers: tuple[str, ...]) -> None:
        """Open a swap: its victims drain, which takes no time where they are idle."""
        swap = SwapView(0, target, victims, blockers=blockers)
        for victim in victims:
            self.victim_of[victim] = swap
            view = self.processes.get(victim)
            if view is not None and view.state is State.READY:
                self.processes[victim] = replace(view, state=State.DRAINING, stop_reason=EVICTED)
        self.swaps[target] = swap
        self._moved(target, *victims)

    def abort(self, swap: SwapView) -> None:
        """Drop a swap: victims that still drain for it are ready again, a loading target is stopping."""
        del self.swaps[swap.target]
        for victim in swap.victims:
            self.victim_of.pop(victim, None)
            view = self.processes.get(victim)
            if view is not None and view.state is State.DRAINING and (view.stop_reason or EVICTED).startswith(EVICTED):
                self.processes[victim] = replace(view, state=State.READY, stop_reason=None)
        view = self.processes.get(swap.target)
        if view is not None and view.state is State.STARTING:
            self.processes[swap.target] = replace(view, state=State.STOPPING)
        self._moved(swap.target, *swap.victims)

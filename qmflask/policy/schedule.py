"""The scheduler as a pure function: snapshot in, actions out (DESIGN section 4); nothing else decides.

`admit` answers for one new request; `decide` walks the queue. The leader, the workers' fast path and the tests'
simulator call the same two functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from qmflask.policy.actions import AbortSwap as AbortSwap
from qmflask.policy.actions import Action as Action
from qmflask.policy.actions import Join as Join
from qmflask.policy.actions import Queue as Queue
from qmflask.policy.actions import Reject as Reject
from qmflask.policy.actions import Serve as Serve
from qmflask.policy.actions import StartSwap as StartSwap
from qmflask.policy.actions import Stop as Stop
from qmflask.policy.board import Board
from qmflask.policy.snapshot import EvictionPolicy as EvictionPolicy
from qmflask.policy.snapshot import Failure as Failure
from qmflask.policy.snapshot import ModelRule as ModelRule
from qmflask.policy.snapshot import ProcessView as ProcessView
from qmflask.policy.snapshot import RequestView as RequestView
from qmflask.policy.snapshot import Snapshot as Snapshot
from qmflask.policy.snapshot import SwapView as SwapView
from qmflask.policy.verdict import Kind, Verdict, abandoned, assess
from qmflask.states import DOWN, State


def admit(snapshot: Snapshot, request: RequestView, now: int) -> Action:
    """Decide for one request that is not in the queue yet (DESIGN section 4, the decision order).

    Only `Serve` and `Reject` can be applied by a worker; all else means: queue the row and wake the leader.
    `AbortSwap` is a start for which a load that nobody waits for is dropped first.
    """
    model = request.model
    rule = snapshot.models.get(model)
    if rule is None:
        return Reject(request.id, model, "model_not_found", f'model "{model}" is not configured')
    view = snapshot.processes.get(model)
    ready = view is not None and view.state is State.READY
    if not ready:
        refusal = _stored_failure(snapshot, request, now)
        if refusal is not None:
            return refusal
    if rule.concurrency_limit and snapshot.in_system.get(model, 0) >= rule.concurrency_limit:
        why = f'Too many requests: model "{model}" has {rule.concurrency_limit}, its concurrencyLimit; try again soon'
        return Reject(request.id, model, "concurrency_limit", why, retry_after=1)
    if view is not None and ready and not view.changed and _free_to_serve(snapshot, model):
        return Serve(request.id, model)
    return _Walk(snapshot, now).admit(request)


def decide(snapshot: Snapshot, now: int) -> list[Action]:
    """Walk the whole queue once, in its order, each decision seeing the effects of those before it.

    Apply the actions in this order. Every queued request has exactly one `Serve`, `Join`, `Queue`, `StartSwap` or
    `Reject` among them.
    """
    walk = _Walk(snapshot, now)
    walk.drop_abandoned()
    walk.run()
    walk.stop_idle()
    return walk.actions


def next_deadline(snapshot: Snapshot, now: int) -> int | None:
    """The next moment at which time alone can change a decision: patience (of a changed model, too), hold, TTL.

    The end of a back-off is none: what asks before it is refused, never queued.
    """
    times = [request.patience_at for request in snapshot.queue if request.patience_at > now]
    for view in snapshot.processes.values():
        if view.state is not State.READY:
            continue
        if snapshot.queue and view.hold_until > now:
            times.append(view.hold_until)
        rule = snapshot.models.get(view.model)
        if snapshot.queue and view.changed_since and rule and view.changed_since + rule.patience > now:
            times.append(view.changed_since + rule.patience)
        expiry = _expiry(rule, view)
        if expiry is not None and expiry > now:
            times.append(expiry)
    return min(times, default=None)


def in_order(queue: Sequence[RequestView], now: int) -> tuple[list[RequestView], list[RequestView]]:
    """The queue's order: patience over (oldest first, whatever the priority), then the rest by priority and arrival."""
    overdue = [request for request in queue if 0 < request.patience_at <= now]
    rest = [request for request in queue if not 0 < request.patience_at <= now] if overdue else list(queue)
    rest.sort(key=attrgetter("priority"), reverse=True)  # stable: equal priorities keep their arrival order
    return overdue, rest


def _stored_failure(snapshot: Snapshot, request: RequestView, now: int) -> Reject | None:
    """The refusal of a model in back-off, unless a new start is already under way."""
    view = snapshot.processes.get(request.model)
    if view is None or view.failure is None or now >= view.failure.retry_at:
        return None
    if any(swap.target == request.model for swap in snapshot.swaps):
        return None
    seconds = max(1, -((now - view.failure.retry_at) // 1_000_000_000))
    return Reject(request.id, request.model, view.failure.code, view.failure.message, retry_after=seconds)


def _free_to_serve(snapshot: Snapshot, model: str) -> bool:
    """Whether a ready model has no victims and collides with no open swap; quick, and False when in doubt."""
    for swap in snapshot.swaps:
        if model == swap.target or model in swap.victims or (model in swap.blockers and not swap.spawned):
            return False
    if snapshot.policy.memory_decides(model):
        return True
    running = [name for name, view in snapshot.processes.items() if view.state not in DOWN]
    running += [swap.target for swap in snapshot.swaps]
    return not snapshot.policy.ready_victims(model, running)


def _expiry(rule: ModelRule | None, view: ProcessView) -> int | None:
    """When an idle model's TTL is over, a hold included; None while it is busy or has none."""
    if rule is None or not rule.ttl or view.leases or not view.idle_since:
        return None
    return max(view.idle_since + rule.ttl, view.hold_until)


class _Walk:
    """One walk over the queue: asks for verdicts, applies their effects to the board and collects the actions.

    A verdict holds for every request of its model. What waits goes on waiting while swaps start and leases are
    granted (both only add to what is in the way), so such a verdict is asked for once in a walk; dropping a swap
    makes room and forgets all of them.
    """

    def __init__(self, snapshot: Snapshot, now: int) -> None:
        self.snapshot = snapshot
        self.now = now
        self.board = Board(snapshot, now)
        self.actions: list[Action] = []
        self.waiting = 0
        self._known: dict[str, Verdict] = {}  # by model, for the requests that are (or are not) overdue
        self._first: tuple[str, Verdict] | None = None  # the oldest overdue request that waits
        self._turns: set[str] = set()  # rendering models whose requests wait for a spawn

    def drop_abandoned(self) -> None:
        """Drop the swaps whose last waiter left before anything was lost for them."""
        for swap in list(self.board.swaps.values()):
            if abandoned(swap) and not self.board.awaited(swap):
                self._abort(swap)

    def run(self) -> None:
        """Decide for every queued request, in order."""
        overdue, rest = in_order(self.snapshot.queue, self.now)
        for late, requests in ((True, overdue), (False, rest)):
            self._known = {}
            for request in requests:
                self._take(request, late)

    def _take(self, request: RequestView, overdue: bool) -> None:
        """Decide for one queued request and apply what comes of it."""
        model = request.model
        swap = self.board.swaps.get(model)
        if swap is not None:
            self.actions.append(Join(request.id, model, swap.id))
            return
        verdict = self._known.get(model)
        if verdict is None:
            verdict = self._settled(model, overdue)
        self.actions.append(self._action(request, verdict))

    def _settled(self, model: str, overdue: bool) -> Verdict:
        """The verdict once every swap that is to be dropped for it has been."""
        verdict = self._verdict(model, overdue)
        while verdict.kind is Kind.ABORT:
            assert verdict.swap is not None
            self._abort(verdict.swap)
            verdict = self._verdict(model, overdue)
        if verdict.kind is Kind.WAIT:
            self._note_waiting(model, overdue, verdict)
        self._known[model] = verdict
        return verdict

    def admit(self, request: RequestView) -> Action:
        """The decision for one new request as the next walk would take it, without applying anything."""
        swap = self.board.swaps.get(request.model)
        if swap is not None:
            return Join(request.id, request.model, swap.id)
        ahead = list(self._ahead(request))
        for model, overdue in dict.fromkeys((other.model, other.overdue(self.now)) for other in ahead):
            self._consider(model, overdue)
        verdict = self._verdict(request.model, request.overdue(self.now))
        if verdict.kind is Kind.ABORT:
            assert verdict.swap is not None
            return AbortSwap(verdict.swap.id, verdict.swap.target)
        self.waiting = len(ahead)
        return self._action(request, verdict)

    def stop_idle(self) -> None:
        """Stop what has been idle for its TTL, unless somebody waits for it or a swap names it."""
        board = self.board
        for model, view in list(board.processes.items()):
            if view.state is not State.READY or board.waiters[model]:
                continue
            if model in board.swaps or model in board.victim_of:
                continue
            expiry = _expiry(board.models.get(model), view)
            if expiry is not None and expiry <= self.now:
                self.actions.append(Stop(model, "ttl"))

    def _ahead(self, request: RequestView) -> Iterator[RequestView]:
        """Queued requests that have joined no swap and come before a new one."""
        overdue = request.overdue(self.now)
        for other in self.snapshot.queue:
            if other.model in self.board.swaps:
                continue
            if other.overdue(self.now) or (not overdue and other.priority >= request.priority):
                yield other

    def _consider(self, model: str, overdue: bool) -> None:
        """Let those who are ahead claim their turn, as `run` would."""
        if (overdue and self._first is None) or self.board.rule(model).renders:
            verdict = self._verdict(model, overdue)
            if verdict.kind is Kind.WAIT:
                self._note_waiting(model, overdue, verdict)

    def _verdict(self, model: str, overdue: bool) -> Verdict:
        verdict = assess(self.board, model, overdue)
        return self._in_turn(model, overdue, verdict) if verdict.kind is Kind.START else verdict

    def _in_turn(self, model: str, overdue: bool, verdict: Verdict) -> Verdict:
        """Hold a start back where it would push somebody who was first further away (promise 8)."""
        if self._first is not None and self._disturbs(model, verdict, *self._first):
            first = self._first[0]
            why = f"requests for {first} have waited beyond their patience and go first"
            return Verdict(Kind.WAIT, why=why, blockers=(first,), victims=verdict.victims)
        if not overdue and not self._turns.isdisjoint(verdict.blockers):
            first = min(self._turns.intersection(verdict.blockers))
            return Verdict(
                Kind.WAIT, why=f"{first} renders first for those who wait", blockers=(first,), victims=verdict.victims
            )
        return verdict

    def _disturbs(self, model: str, start: Verdict, first: str, plan: Verdict) -> bool:
        """Whether this start would change what the first overdue request needs, so that its turn might never come."""
        board = self.board
        touched = {model, *start.victims, *start.blockers}
        if first in touched or not touched.isdisjoint(plan.victims):
            return True
        if board.rule(model).renders or board.rule(first).renders:
            return True
        if board.state(first) is State.READY:
            return False
        running = board.running(True)
        ceilings = (board.vram_ceiling, board.ram_ceiling)
        before = plan.victims or board.policy.eviction_for(first, running, *ceilings)
        return not set(before).issuperset(board.policy.eviction_for(first, [*running, model], *ceilings))

    def _note_waiting(self, model: str, overdue: bool, verdict: Verdict) -> None:
        if overdue and self._first is None:
            self._first = (model, verdict)
        if any(model in swap.blockers and not swap.spawned for swap in self.board.swaps.values()):
            self._turns.add(model)

    def _abort(self, swap: SwapView) -> None:
        self.actions.append(AbortSwap(swap.id, swap.target))
        self.board.abort(swap)
        self._known.clear()

    def _action(self, request: RequestView, verdict: Verdict) -> Action:
        if verdict.kind is Kind.WAIT:
            self.waiting += 1
            return Queue(request.id, request.model, self.waiting, verdict.why, verdict.blockers, verdict.victims)
        if verdict.kind is Kind.REJECT:
            return Reject(request.id, request.model, verdict.code, verdict.why, verdict.retry_after)
        if verdict.kind is Kind.SERVE:
            if not request.owned:
                self.board.grant(request.model)
            return Serve(request.id, request.model)
        self.board.start(request.model, verdict.victims, verdict.blockers)
        self._known = {name: kept for name, kept in self._known.items() if kept.kind is not Kind.SERVE}
        return StartSwap(request.id, request.model, verdict.victims, verdict.fixed, verdict.blockers)

"""A deterministic stand-in for store, leader and clock, so that the scheduler's decisions can be played through.

It applies actions exactly as the leader does: a grant adds a lease, a swap is a row whose idle victims stop and busy
ones drain before its target starts, and ready plus all grants are one step. Whatever the promises forbid raises.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from qmflask.policy.eviction import Sizes
from qmflask.policy.schedule import (
    AbortSwap,
    Action,
    EvictionPolicy,
    Failure,
    Join,
    ModelRule,
    ProcessView,
    Queue,
    Reject,
    RequestView,
    Serve,
    Snapshot,
    StartSwap,
    Stop,
    SwapView,
    admit,
    decide,
    next_deadline,
)
from qmflask.states import DOWN, Phase, State, check_transition

MS = 1_000_000
SECOND = 1_000_000_000
STATUS = {
    "model_not_found": 404,
    "model_protected": 409,
    "concurrency_limit": 429,
    "model_start_failed": 502,
    "insufficient_memory": 503,
}


class BrokenPromise(AssertionError):
    """Raised at the step that does what DESIGN section 5 forbids."""


@dataclass
class Client:
    """One request from arrival to end."""

    id: int
    name: str
    model: str
    arrival: int
    priority: int
    patience_at: int
    length: int | None = None  # nanoseconds an answer takes; None = until `finish`
    tool: bool = False  # its answer ends in a tool call
    owned: bool = False
    state: str = "queued"  # queued, granted, then done, gone or the code of an error
    granted_at: int = 0
    left_at: int = 0  # when it stopped waiting without a grant; 0 = it waits, or was granted
    position: int = 0
    why: str = ""

    @property
    def ended_waiting(self) -> int:
        """When it stopped waiting; far away while it waits."""
        return self.granted_at or self.left_at or 1 << 62

    def view(self) -> RequestView:
        return RequestView(self.id, self.model, self.arrival, self.priority, self.patience_at, self.owned)


@dataclass
class Simulator:
    """The world: virtual time in nanoseconds, processes, clients, open swaps, and the events of the last step."""

    rules: Mapping[str, ModelRule]
    policy: EvictionPolicy
    load: int | None = None  # nanoseconds from spawn to healthy; None = until `done`
    stop: int = 0  # nanoseconds from the signal until the tree is gone
    patience: int = 60 * SECOND
    hold: int = 0
    unload_timeout: int = 10 * SECOND
    sizes: Mapping[str, Sizes] = field(default_factory=dict)
    vram_budget: int = 0
    ram_budget: int = 0
    cpu: Collection[str] = ()  # models of the ram pool: they hold no VRAM
    vram_ceiling: int | None = None
    eager_stop: bool = False  # idle victims of a swap stop while others still drain
    now: int = 1_000 * SECOND

    def __post_init__(self) -> None:
        self.processes: dict[str, ProcessView] = {}
        self.clients: dict[str, Client] = {}
        self.waiting: dict[int, Client] = {}
        self.leases: dict[int, Client] = {}
        self.swaps: dict[int, SwapView] = {}
        self.events: list[str] = []
        self.starts: list[tuple[int, str]] = []
        self.departed: dict[str, list[str]] = {}
        self.down = False
        self.ticks = 0
        self._ids = itertools.count(1)
        self._tick_counter = itertools.count(1)
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._incarnation: dict[str, int] = {}

    # --- what happens in the world ------------------------------------------------------------------------------

    def req(
        self,
        name: str,
        model: str,
        *,
        length: int | None = None,
        tool: bool = False,
        patience: int | None = None,
        owned: bool = False,
    ) -> list[str]:
        """A request arrives; `admit` sees what the store caches: neither queue nor leases."""
        rule = self.rules.get(model)
        priority = rule.priority if rule else 0
        until = self.now + (self.patience if patience is None else patience)
        client = Client(next(self._ids), name, model, self.now, priority, until, length, tool, owned)
        self.clients[name] = client
        if self.down:
            return self._end([client], "shutting_down")
        action = admit(self.snapshot(whole=False), client.view(), self.now)
        whole = admit(self.snapshot(), client.view(), self.now)
        if isinstance(action, Serve):
            if not isinstance(whole, Serve):
                raise BrokenPromise(f"the fast path serves {name}, the whole snapshot says {whole}")
            self._grant([client])
            self.settle()
        elif isinstance(action, Reject):
            self._reject(client, action)
        else:
            self.waiting[client.id] = client
            self.settle(client)
        return self.take_events()

    def done(self, model: str) -> list[str]:
        """The target of an open swap is healthy (and everything before that has come to its end)."""
        swap = self._swap_of(model)
        if swap is None:
            return []
        for name in (*swap.victims, model):
            if self.state(name) is State.STOPPING:
                self._vanish(name)
        self._progress()
        swap = self._swap_of(model)
        if swap is not None and swap.phase is Phase.PROBING:
            self._healthy(model)
        for name in self.departed.pop(model, []):
            self.events.append(f"gone {name}")
        self.settle()
        return self.take_events()

    def finish(self, name: str, *, tool: bool = False) -> list[str]:
        """An answer ends: of the request of that name, else the oldest of the model of that name."""
        client = self.clients.get(name)
        if client is None or client.state != "granted":
            client = next((lease for lease in self.leases.values() if name in (lease.name, lease.model)), None)
        if client is not None:
            self._release(client, tool or client.tool)
            self.settle()
        return self.take_events()

    def cancel(self, name: str) -> list[str]:
        """A waiting request is withdrawn; one that was granted is not touched."""
        client = self.clients[name]
        if self.waiting.pop(client.id, None) is not None:
            client.state, client.left_at = "gone", self.now
            self.settle()
        return self.take_events()

    def gone(self, name: str) -> list[str]:
        """The client hangs up, waiting or served."""
        client = self.clients[name]
        if self.waiting.pop(client.id, None) is not None:
            client.state, client.left_at = "gone", self.now
            if self._swap_of(client.model) is not None:
                self.departed.setdefault(client.model, []).append(name)
        elif client.id in self.leases:
            self._release(client, tool=False)
            client.state = "gone"
        self.settle()
        return self.take_events()

    def crash(self, model: str, *, retry: int = SECOND) -> list[str]:
        """The model's process exits by itself; a start that fails is stored for `retry` nanoseconds."""
        view = self.processes.get(model)
        if view is None or view.state in DOWN:
            return []
        for client in [lease for lease in self.leases.values() if lease.model == model]:
            del self.leases[client.id]
            client.state = "upstream_unreachable"
        self._vanish(model)
        if view.state is State.STARTING:
            swap = self._swap_of(model)
            if swap is not None:
                del self.swaps[swap.id]
            self.processes[model] = ProcessView(
                model, State.FAILED, failure=Failure("model_start_failed", f"{model} exited", self.now + retry)
            )
            self._end([c for c in self.waiting.values() if c.model == model], "model_start_failed")
        self.settle()
        return self.take_events()

    def unload(self, models: Collection[str]) -> list[str]:
        """Waiting requests get an error, requests in flight may end until `unload_timeout`, then the model stops."""
        models = sorted(models)
        for model in models:
            self._end([c for c in self.waiting.values() if c.model == model], "model unloaded")
            swap = self._swap_of(model)
            if swap is not None:
                self._close(swap)
            self._wind_down(model, "unload")
        self.events.append(f"stop [{','.join(models)}]")
        self.settle()
        return self.take_events()

    def reload(
        self, rules: Mapping[str, ModelRule], policy: EvictionPolicy, changed: Collection[str] = ()
    ) -> list[str]:
        """A new configuration: `changed` models have other launch settings, those missing in `rules` are removed."""
        self.rules, self.policy = rules, policy
        for model, view in list(self.processes.items()):
            if model not in rules:
                swap = self._swap_of(model)
                if swap is not None:
                    self._close(swap)
                self._wind_down(model, "removed")
            elif model in changed:
                self.processes[model] = replace(view, changed=True, changed_since=0, failure=None)
        self.settle()
        return self.take_events()

    def leader_change(self) -> list[str]:
        """A successor reads the same rows: it must find nothing to do that its predecessor did not."""
        self.settle()
        return self.take_events()

    def shutdown(self) -> list[str]:
        """Everyone who waits gets an error; nothing is admitted any more."""
        self.down = True
        self._end(list(self.waiting.values()), "shutting down")
        return self.take_events()

    def put(self, model: str, state: str) -> list[str]:
        """Force a process into a state, as a vector asks."""
        self.processes[model] = ProcessView(
            model, State(state), tick=next(self._tick_counter), idle_since=self.now, leases=0
        )
        return self.take_events()

    def advance(self, nanoseconds: int) -> list[str]:
        """Let time pass; timers and the scheduler's own deadlines fire on the way."""
        end = self.now + nanoseconds
        while True:
            due = self._next_event()
            if due is None or due > end:
                break
            self.now = max(self.now, due)
            while self._timers and self._timers[0][0] <= self.now:
                heapq.heappop(self._timers)[2]()
            self.settle()
        self.now = end
        return self.take_events()

    # --- what the leader does -----------------------------------------------------------------------------------

    def settle(self, new: Client | None = None) -> None:
        """The leader's tick: advance swaps and decide until nothing changes any more."""
        said: Action | None = None
        for _ in range(1000):
            self._progress()
            actions = decide(self.snapshot(), self.now)
            self.ticks += 1
            self._check_complete(actions)
            for action in actions:
                if new is not None and getattr(action, "request", 0) == new.id:
                    said = action if said is None or isinstance(said, Queue) else said
            if not self._apply(actions):
                break
        else:
            raise BrokenPromise(f"decisions never come to rest: {actions}")
        self._check_pins()
        if new is not None and isinstance(said, Queue):
            self.events.append(f"queue {new.name} #{said.position}")
        elif new is not None and isinstance(said, Join):
            self.events.append(f"join {new.name}")

    def snapshot(self, *, whole: bool = True) -> Snapshot:
        """What the store hands to a decision; without `whole`, what it may cache by version."""
        counts: dict[str, int] = {}
        for client in self.leases.values():
            counts[client.model] = counts.get(client.model, 0) + 1
        system = dict(counts)
        for client in self.waiting.values():
            system[client.model] = system.get(client.model, 0) + 1
        if not whole:
            counts = {}
        return Snapshot(
            models=self.rules,
            policy=self.policy,
            processes={m: replace(v, leases=counts.get(m, 0)) for m, v in self.processes.items()},
            queue=[client.view() for client in self.waiting.values()] if whole else [],
            swaps=list(self.swaps.values()),
            in_system=system,
            vram_ceiling=self.vram_ceiling,
        )

    def _check_pins(self) -> None:
        """Promise 4: whoever has a lease has a model that serves until the answer ends."""
        for client in self.leases.values():
            if self.state(client.model) not in (State.READY, State.DRAINING):
                raise BrokenPromise(f"{client.name} has a lease on {client.model}, which is {self.state(client.model)}")

    def _check_complete(self, actions: Sequence[Action]) -> None:
        said = [action.request for action in actions if isinstance(action, Serve | Join | Queue | StartSwap | Reject)]
        if sorted(said) != sorted(self.waiting):
            raise BrokenPromise(f"decided for {sorted(said)}, waiting are {sorted(self.waiting)}")
        positions = [action.position for action in actions if isinstance(action, Queue)]
        if positions != list(range(1, len(positions) + 1)):
            raise BrokenPromise(f"positions {positions}")

    def _apply(self, actions: Sequence[Action]) -> bool:
        """Apply in order; True when anything but waiting came of it."""
        changed = False
        for action in actions:
            if isinstance(action, Queue):
                self.waiting[action.request].position = action.position
                self.waiting[action.request].why = action.why
                continue
            if isinstance(action, Join):
                self.waiting[action.request].position = 0
                continue
            changed = True
            if isinstance(action, Serve):
                self._grant([self.waiting[action.request]])
            elif isinstance(action, Reject):
                self._reject(self.waiting[action.request], action)
            elif isinstance(action, StartSwap):
                self._open(action)
            elif isinstance(action, AbortSwap):
                self.events.append(f"abort {action.target}")
                self._close(self.swaps[action.swap])
            elif isinstance(action, Stop):
                self.events.append(f"stop {action.model}: {action.reason}")
                self._signal(action.model, action.reason)
        return changed

    def _open(self, action: StartSwap) -> None:
        if self._swap_of(action.target) is not None:
            raise BrokenPromise(f"two swaps for {action.target}")
        busy = [v for v in action.victims if self._count(v) and self.state(v) is not State.STOPPING]
        if busy and not action.fixed:
            raise BrokenPromise(f"{action.target} would stop busy {busy}")
        self.events.append(f"start {action.target} evict=[{','.join(action.victims)}]")
        swap = SwapView(next(self._ids), action.target, action.victims, Phase.DRAINING, action.blockers)
        self.swaps[swap.id] = swap
        for victim in action.victims:
            if self.state(victim) is State.READY:
                self._set(victim, State.DRAINING, "evicted")
                if self.eager_stop and victim not in busy:
                    self._signal(victim, "evicted")
        view = self.processes.get(action.target)
        if view is not None:
            self.processes[action.target] = replace(view, tick=next(self._tick_counter))

    def _progress(self) -> None:
        """Stop what has drained, and move each open swap through its phases as far as it goes now."""
        for model, view in list(self.processes.items()):
            if view.state is State.DRAINING and view.stop_reason != "evicted" and not self._count(model):
                self._signal(model, view.stop_reason or "drained")
        for swap in list(self.swaps.values()):
            if swap.phase is Phase.DRAINING:
                waits = [*swap.victims, *swap.blockers]
                if any(self._count(name) and self.state(name) is not State.STOPPING for name in waits):
                    continue
                for victim in swap.victims:
                    if self.state(victim) in (State.READY, State.DRAINING):
                        self._signal(victim, "evicted")
                swap = self._phase(swap, Phase.STOPPING, signalled=bool(swap.victims))
            if swap.phase is Phase.STOPPING:
                target = self.state(swap.target)
                if any(self.state(victim) not in DOWN for victim in swap.victims) or target is State.STOPPING:
                    continue
                if target is State.READY:
                    self._healthy(swap.target)
                    continue
                if target is State.DRAINING:
                    continue
                self._spawn(self._phase(swap, Phase.STARTING))

    def _phase(self, swap: SwapView, phase: Phase, signalled: bool | None = None) -> SwapView:
        swap = replace(swap, phase=phase, signalled=swap.signalled if signalled is None else signalled)
        self.swaps[swap.id] = swap
        return swap

    def _spawn(self, swap: SwapView) -> None:
        """Start the target's process, after looking whether that keeps the promises."""
        target = swap.target
        if self.state(target) not in DOWN:
            raise BrokenPromise(f"a second process of {target} in state {self.state(target)}")
        rendering = [m for m in self.processes if self.rules.get(m, ModelRule(m)).renders and self._count(m)]
        if rendering:
            raise BrokenPromise(f"{target} spawned while {rendering} render")
        self._check_ledger(target)
        self.processes[target] = ProcessView(target, State.STARTING, tick=next(self._tick_counter))
        self.starts.append((self.now, target))
        self._phase(swap, Phase.PROBING)
        if self.load is not None:
            number = self._incarnation[target] = self._incarnation.get(target, 0) + 1
            self._at(self.now + self.load, lambda: self._loaded(target, number))

    def _check_ledger(self, target: str) -> None:
        """Promise 2, counted independently of the policy: every resident's charge plus the target's fits."""
        aim = self.sizes.get(target, Sizes())
        others = [m for m in self.processes if self.state(m) not in DOWN and m != target]
        sizes = [self.sizes.get(model, Sizes()) for model in others]
        vram = aim.vram + sum(size.vram for model, size in zip(others, sizes, strict=True) if model not in self.cpu)
        ram = aim.ram + sum(size.ram for size in sizes)
        if self.vram_budget and aim.vram and target not in self.cpu and vram > self.vram_budget:
            raise BrokenPromise(f"{target} starts at {vram} of {self.vram_budget} bytes of VRAM")
        if self.ram_budget and (aim.ram or target not in self.cpu) and ram > self.ram_budget:
            raise BrokenPromise(f"{target} starts at {ram} of {self.ram_budget} bytes of RAM")

    def _loaded(self, model: str, number: int) -> None:
        if self._incarnation.get(model) == number and self.state(model) is State.STARTING:
            self._healthy(model)

    def _healthy(self, model: str) -> None:
        """Ready and all grants are one step."""
        swap = self._swap_of(model)
        if swap is None:
            return
        del self.swaps[swap.id]
        if self.state(model) is State.STARTING:
            self._set(model, State.READY)
            self.processes[model] = replace(self.processes[model], idle_since=self.now)
        self._grant([client for client in self.waiting.values() if client.model == model])

    def _grant(self, clients: list[Client]) -> None:
        for client in clients:
            if self.state(client.model) is not State.READY:
                raise BrokenPromise(f"{client.name} granted on {client.model}, {self.state(client.model)}")
            self.waiting.pop(client.id, None)
            view = self.processes[client.model]
            asked = self.now if view.changed and not view.changed_since else view.changed_since
            self.processes[client.model] = replace(view, tick=next(self._tick_counter), changed_since=asked)
            self.events.append(f"serve {client.name}")
            client.granted_at = self.now
            client.state = "done" if client.owned else "granted"
            if client.owned:
                continue
            self.leases[client.id] = client
            if client.length is not None:
                self._at(self.now + client.length, lambda c=client: self._ended(c))  # type: ignore[misc]

    def _ended(self, client: Client) -> None:
        if client.id in self.leases:
            self._release(client, client.tool)

    def _release(self, client: Client, tool: bool) -> None:
        del self.leases[client.id]
        client.state = "done"
        view = self.processes.get(client.model)
        if view is None:
            return
        hold = self.now + self.hold if tool and view.state is State.READY else view.hold_until
        self.processes[client.model] = replace(
            view, tick=next(self._tick_counter), idle_since=self.now, hold_until=hold
        )

    def _close(self, swap: SwapView) -> None:
        """Drop a swap: what drains for it is ready again, what it has begun to load is stopped."""
        del self.swaps[swap.id]
        for victim in swap.victims:
            view = self.processes.get(victim)
            if view is not None and view.state is State.DRAINING and view.stop_reason == "evicted":
                self._set(victim, State.READY)
        if self.state(swap.target) is State.STARTING:
            self._signal(swap.target, "aborted")

    def _wind_down(self, model: str, reason: str) -> None:
        """Stop a model that may finish what it has, for `unload_timeout` at most."""
        view = self.processes.get(model)
        if view is None or view.state in DOWN or view.state is State.STOPPING:
            return
        if view.state is State.STARTING or not self._count(model):
            self._signal(model, reason)
            return
        if view.state is State.READY:
            self._set(model, State.DRAINING, reason)
        self.processes[model] = replace(self.processes[model], hold_until=0, stop_reason=reason)
        self._at(self.now + self.unload_timeout, lambda: self._give_up(model, reason))

    def _give_up(self, model: str, reason: str) -> None:
        if self.state(model) is State.DRAINING and self.processes[model].stop_reason == reason:
            for client in [lease for lease in self.leases.values() if lease.model == model]:
                self._release(client, tool=False)
                client.state = "cut"
            self._signal(model, reason)

    def _signal(self, model: str, reason: str) -> None:
        """TERM to the group; the tree is gone `stop` later."""
        if self._count(model):
            raise BrokenPromise(f"{model} stopped ({reason}) with {self._count(model)} in flight")
        if reason == "ttl" and self.processes[model].hold_until > self.now:
            raise BrokenPromise(f"{model} stopped by TTL while held")
        if self.state(model) is State.STOPPING:
            return
        self._set(model, State.STOPPING, reason)
        number = self._incarnation[model] = self._incarnation.get(model, 0) + 1
        if self.stop:
            self._at(self.now + self.stop, lambda: self._stopped(model, number))
        else:
            self._vanish(model)

    def _stopped(self, model: str, number: int) -> None:
        if self._incarnation.get(model) == number and self.state(model) is State.STOPPING:
            self._vanish(model)

    def _vanish(self, model: str) -> None:
        self._incarnation[model] = self._incarnation.get(model, 0) + 1
        self.processes.pop(model, None)

    def _reject(self, client: Client, action: Reject) -> None:
        self.waiting.pop(client.id, None)
        client.state, client.left_at = action.code, self.now
        client.why = action.message
        self.events.append(f"reject {client.name}: {STATUS.get(action.code, action.code)}")

    def _end(self, clients: list[Client], what: str) -> list[str]:
        for client in clients:
            self.waiting.pop(client.id, None)
            client.state, client.left_at = what, self.now
            self.events.append(f"error {client.name}: {what}")
        return self.events

    # --- small things ------------------------------------------------------------------------------------------

    def state(self, model: str) -> State:
        """The process's state; without a process it is stopped."""
        view = self.processes.get(model)
        return view.state if view is not None else State.STOPPED

    def take_events(self) -> list[str]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def running(self) -> list[str]:
        """Models that serve or could."""
        return sorted(model for model, view in self.processes.items() if view.state is State.READY)

    def _set(self, model: str, state: State, reason: str | None = None) -> None:
        view = self.processes[model]
        check_transition(view.state, state)
        self.processes[model] = replace(view, state=state, stop_reason=reason)

    def _count(self, model: str) -> int:
        return sum(client.model == model for client in self.leases.values())

    def _swap_of(self, model: str) -> SwapView | None:
        return next((swap for swap in self.swaps.values() if swap.target == model), None)

    def _at(self, when: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (when, next(self._ids), action))

    def _next_event(self) -> int | None:
        deadline = next_deadline(self.snapshot(), self.now)
        times = [self._timers[0][0]] if self._timers else []
        if deadline is not None:
            times.append(deadline)
        return min(times, default=None)

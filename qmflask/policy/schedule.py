"""The scheduler as a pure function: snapshot in, actions out (DESIGN section 4); nothing else decides.

`admit` answers for one new request; `decide` walks the queue. The leader, the workers' fast path and the tests'
simulator call the same two functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qmflask.states import Phase, State


class EvictionPolicy(Protocol):
    """What the scheduler asks of groups or the matrix; both are pure (see `policy.eviction`, `policy.matrix`)."""

    def eviction_for(
        self,
        target: str,
        running: Sequence[str],
        vram_ceiling: int | None = None,
        ram_ceiling: int | None = None,
    ) -> list[str]:
        """Models to stop so that `target`, which is down, can load; `running` is coldest first."""

    def ready_victims(self, target: str, running: Sequence[str]) -> list[str]:
        """Models to stop for a target that is ready or starting: none where a memory rule decides."""


@dataclass(frozen=True, slots=True)
class ModelRule:
    """What the scheduler knows of one configured model."""

    id: str
    concurrency_limit: int = 0  # 0 = none
    priority: int = 0
    renders: bool = False  # capabilities name image or video as output
    ttl: int = 0  # nanoseconds of idleness; 0 = never
    displace: bool = True  # False: never evicted for another model while loaded (issue 10)


@dataclass(frozen=True, slots=True)
class Failure:
    """A stored start failure; requests before `retry_at` get it at once."""

    code: str
    message: str
    retry_at: int


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One model that is not simply stopped, as the store has it. Times are monotonic nanoseconds."""

    model: str
    state: State
    leases: int = 0
    tick: int = 0  # least recently used counter; lower is colder
    hold_until: int = 0
    idle_since: int = 0  # when the last answer ended, or ready was reached; 0 = never
    changed: bool = False  # its launch hash differs from the configuration's
    changed_since: int = 0  # first request after that change; 0 = none yet
    failure: Failure | None = None
    stop_reason: str | None = None  # set while draining or stopping: "evicted", "unload", "ttl", ...


@dataclass(frozen=True, slots=True)
class RequestView:
    """One queued request. `patience_at` is the monotonic nanosecond at which its patience ends."""

    id: int
    model: str
    arrival: int
    priority: int = 0
    patience_at: int = 0
    owned: bool = False  # owned by the leader (preload, load): waits without a client


@dataclass(frozen=True, slots=True)
class SwapView:
    """One open swap. `victims` are fixed; `blockers` get no new grants until the spawn is done."""

    id: int
    target: str
    victims: tuple[str, ...] = ()
    phase: Phase = Phase.DRAINING
    blockers: tuple[str, ...] = ()
    signalled: bool = False  # a victim was already told to stop


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that one decision looks at; built by the store in one read, never changed."""

    models: Mapping[str, ModelRule]
    policy: EvictionPolicy
    processes: Mapping[str, ProcessView]
    queue: Sequence[RequestView] = ()  # in arrival order
    swaps: Sequence[SwapView] = ()
    in_system: Mapping[str, int] = field(default_factory=dict)  # queued + granted requests per model
    vram_ceiling: int | None = None
    ram_ceiling: int | None = None


@dataclass(frozen=True, slots=True)
class Serve:
    """Grant the lease: the model is ready and nothing stands in the way."""

    request: int
    model: str


@dataclass(frozen=True, slots=True)
class Join:
    """The model is already loading; the request waits for that swap."""

    request: int
    model: str
    swap: int


@dataclass(frozen=True, slots=True)
class Queue:
    """The request waits; `why` is for people ("ant is answering 2 requests"), `blockers` are model ids."""

    request: int
    model: str
    position: int
    why: str
    blockers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StartSwap:
    """Stop `victims` (in this order), then start `target`. With `fixed`, busy victims drain first."""

    request: int
    target: str
    victims: tuple[str, ...]
    fixed: bool = False
    blockers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AbortSwap:
    """Drop a swap that nobody waits for: its victims are ready again, a starting target is stopped."""

    swap: int
    target: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer with the error of this code; it is not remembered."""

    request: int
    model: str
    code: str
    message: str
    retry_after: int | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop an idle model for a reason that is not a swap ("ttl")."""

    model: str
    reason: str


Action = Serve | Join | Queue | StartSwap | AbortSwap | Reject | Stop


def admit(snapshot: Snapshot, request: RequestView, now: int) -> Action:
    """Decide for one request that is not in the queue yet (DESIGN section 4, the decision order)."""
    raise NotImplementedError


def decide(snapshot: Snapshot, now: int) -> list[Action]:
    """Walk the whole queue once, in its order, each decision seeing the effects of those before it."""
    raise NotImplementedError


def next_deadline(snapshot: Snapshot, now: int) -> int | None:
    """The next moment at which time alone can change a decision: patience, hold, TTL, retry."""
    raise NotImplementedError

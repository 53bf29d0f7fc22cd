"""What one scheduling decision looks at: model rules, processes, queue and open swaps, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qmflask.states import Phase, State

SECOND = 1_000_000_000

#: How the reason begins of a stop that a swap wants; only such a drain ends when the swap is dropped.
EVICTED = "evicted"


class MisfitView(Protocol):
    """Why a target cannot fit, in bytes (`policy.eviction.Misfit` is one)."""

    @property
    def pool(self) -> str:
        """The pool that is too small."""

    @property
    def need(self) -> int:
        """The target's charge plus what `holders` keep."""

    @property
    def budget(self) -> int:
        """The budget, or the ceiling where only that is exceeded."""

    @property
    def holders(self) -> tuple[tuple[str, int], ...]:
        """Models that cannot be stopped for the target, with their charges."""

    @property
    def only_now(self) -> bool:
        """Only the live ceiling is exceeded: asking later may help."""


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

    def memory_decides(self, target: str) -> bool:
        """Whether a memory rule decides for the target, so that it has no victims once it is ready or starting."""

    def ready_victims(self, target: str, running: Sequence[str]) -> list[str]:
        """Models to stop for a target that is ready or starting: none where a memory rule decides."""

    def misfit(
        self,
        target: str,
        running: Sequence[str],
        vram_ceiling: int | None = None,
        ram_ceiling: int | None = None,
    ) -> MisfitView | None:
        """Why the target cannot fit whatever is stopped for it, or None (spec/eviction.md, admission 3)."""


@dataclass(frozen=True, slots=True)
class ModelRule:
    """What the scheduler knows of one configured model."""

    id: str
    concurrency_limit: int = 0  # 0 = none
    priority: int = 0
    renders: bool = False  # capabilities name image or video as output
    ttl: int = 0  # nanoseconds of idleness; 0 = never
    displace: bool = True  # False: never evicted for another model while loaded (issue 10)
    patience: int = 60 * SECOND  # how long it may serve on under old launch settings while busy


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
    stop_reason: str | None = None  # set while draining or stopping: "evicted for bee", "unload", "ttl", ...


@dataclass(frozen=True, slots=True)
class RequestView:
    """One queued request. `patience_at` is the monotonic nanosecond at which its patience ends; 0 = it never does."""

    id: int
    model: str
    arrival: int
    priority: int = 0
    patience_at: int = 0
    owned: bool = False  # owned by the leader (preload, load): waits without a client, is never counted as a lease

    def overdue(self, now: int) -> bool:
        """Whether its patience is over."""
        return 0 < self.patience_at <= now


@dataclass(frozen=True, slots=True)
class SwapView:
    """One open swap. `victims` are fixed; `blockers` get no new grants until the spawn is done (phase probing)."""

    id: int
    target: str
    victims: tuple[str, ...] = ()
    phase: Phase = Phase.DRAINING
    blockers: tuple[str, ...] = ()
    signalled: bool = False  # a victim was already told to stop

    @property
    def spawned(self) -> bool:
        """Whether the target's process exists."""
        return self.phase is Phase.PROBING

    @property
    def loading(self) -> bool:
        """Whether the spawn is under way or done, so that dropping the swap means stopping a process."""
        return self.phase in (Phase.STARTING, Phase.PROBING)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that one decision looks at; built by the store in one read, never changed.

    For `admit` the queue and the lease counts may be left out: what it then grants or refuses is still right, and
    for everything else the leader decides with a whole one.
    """

    models: Mapping[str, ModelRule]
    policy: EvictionPolicy
    processes: Mapping[str, ProcessView]
    queue: Sequence[RequestView] = ()  # in arrival order
    swaps: Sequence[SwapView] = ()
    in_system: Mapping[str, int] = field(default_factory=dict)  # queued + granted requests per model
    vram_ceiling: int | None = None
    ram_ceiling: int | None = None

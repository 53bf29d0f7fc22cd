"""What one scheduling decision says: the actions that the leader and the workers apply, as plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Serve:
    """Grant the lease: the model is ready and nothing stands in the way."""

    request: int
    model: str


@dataclass(frozen=True, slots=True)
class Join:
    """The model is already loading; the request waits for that swap (0: one started in the same list)."""

    request: int
    model: str
    swap: int


@dataclass(frozen=True, slots=True)
class Queue:
    """The request waits; `why` is for people ("ant is answering 2 requests"), `blockers` are model ids.

    `position` is 1-based over those that wait and have joined no swap. `victims` is what would have to stop now.
    """

    request: int
    model: str
    position: int
    why: str
    blockers: tuple[str, ...] = ()
    victims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StartSwap:
    """Stop `victims` (in this order), then start `target`. With `fixed`, busy victims drain first.

    A victim may be stopping already: the swap only waits for it. The target itself is among the victims where it
    runs under old launch settings; it may also be stopping without being a victim (a request came during an unload),
    and then the swap waits in its stopping phase until the tree is gone. A target that is ready and no victim needs
    no start: the swap is done when the victims are gone.

    `blockers` are models that render images or video. They get no new grants, and nothing is signalled or spawned
    while one of them has a lease (draining phase).
    """

    request: int
    target: str
    victims: tuple[str, ...]
    fixed: bool = False
    blockers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AbortSwap:
    """Drop a swap that nobody waits for: its draining victims are ready again, a starting target is stopped.

    Victims that were already signalled go on stopping.
    """

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

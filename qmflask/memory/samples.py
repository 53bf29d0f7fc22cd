"""What was measured, as plain values: cards, processes on them, host memory and process trees. Bytes throughout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """One card. `processes` maps pid to bytes (None: this one cannot be told); None: this card tells of no process."""

    uuid: str
    total: int
    used: int
    processes: Mapping[int, int | None] | None = None
    index: int = 0
    name: str = ""
    utilisation: float | None = None  # per cent
    memory_utilisation: float | None = None  # per cent, of the memory's bandwidth
    temperature: float | None = None  # degrees Celsius
    memory_temperature: float | None = None
    power: float | None = None  # watts
    fan: float | None = None  # per cent


@dataclass(frozen=True, slots=True)
class GpuSample:
    """All cards at one moment (`at`: monotonic nanoseconds, of the oldest part)."""

    at: int
    cards: tuple[Card, ...] = ()

    @property
    def total(self) -> int:
        """Bytes on all cards."""
        return sum(card.total for card in self.cards)

    @property
    def used(self) -> int:
        """Bytes in use on all cards, by whomever."""
        return sum(card.used for card in self.cards)

    def held_by(self, pids: Iterable[int]) -> int | None:
        """Bytes that these processes hold on all cards; None if none of them is listed or one cannot be told."""
        wanted = frozenset(pids)
        found: int | None = None
        for card in self.cards:
            for pid, size in (card.processes or {}).items():
                if pid in wanted:
                    if size is None:
                        return None
                    found = (found or 0) + size
        return found


@dataclass(frozen=True, slots=True)
class HostMemory:
    """System memory. `available` is the kernel's MemAvailable: what new programs can have without swapping."""

    total: int
    available: int
    swap_total: int = 0
    swap_used: int = 0

    @property
    def used(self) -> int:
        """What cannot be had."""
        return self.total - self.available


@dataclass(frozen=True, slots=True)
class TreeMemory:
    """System memory of one process tree; shared pages are divided among their users."""

    anonymous: int = 0
    file: int = 0  # its share of mapped files, mostly the model
    shared: int = 0  # its share of shared memory
    swapped: int = 0

    def __add__(self, other: TreeMemory) -> TreeMemory:
        return TreeMemory(
            self.anonymous + other.anonymous,
            self.file + other.file,
            self.shared + other.shared,
            self.swapped + other.swapped,
        )

    @property
    def held(self) -> int:
        """What the tree needs to stay fast, and what it is charged: anonymous memory, swapped or not, and its share."""
        return self.anonymous + self.file + self.shared + self.swapped

    @property
    def returns(self) -> int:
        """What `HostMemory.used` falls by when it stops.

        Pages of a mapped file are not in it: the kernel counts them as available while they are mapped.
        """
        return self.anonymous + self.shared

"""What the leader measures: cards, host and the trees of its models; slow readings stay on threads of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qmflask import processes
from qmflask.gpu import Gpu
from qmflask.host import Host
from qmflask.memory.ceiling import ModelView
from qmflask.memory.samples import GpuSample, HostMemory, TreeMemory
from qmflask.processes import Identity
from qmflask.sampling import Sampler
from qmflask.states import State

#: How long one round waits for the cards; a driver that hangs costs this much on the meter's own thread.
GPU_WAIT = 0.2


@dataclass(frozen=True, slots=True)
class TreeRef:
    """A model that is not down, and how to find its process tree."""

    model: str
    state: State
    pool: str
    token: str
    identity: Identity | None


@dataclass(frozen=True, slots=True)
class Measured:
    """One round: `at` is when it began (monotonic ns), `version` the schedule's then."""

    at: int
    version: int
    gpu: GpuSample | None
    host: HostMemory
    models: Sequence[ModelView]
    ram: Mapping[str, TreeMemory]


class Meter:
    """Measures every `every` seconds and when asked; `notify` is called after each round and each card sample."""

    def __init__(
        self, every: float, trees: Callable[[], tuple[int, list[TreeRef]]], notify: Callable[[], None]
    ) -> None:
        self._trees = trees
        self.host = Host()
        self.gpu = Gpu(every, notify=notify)
        self._sampler = Sampler("memory", self._measure, every, notify)

    def start(self) -> None:
        """Begin to measure; after fork only."""
        self.gpu.start()
        self._sampler.start()

    def latest(self) -> Measured | None:
        """The newest round, None before the first; never blocks."""
        return self._sampler.latest

    def ask(self) -> None:
        """Have a round measured soon: after a start, a stop, an answer; never blocks."""
        self._sampler.ask()

    def measure_now(self) -> None:
        """Have a round measured and wait for it, a moment at most; a hanging driver leaves the last one in place."""
        self._sampler.fresh(GPU_WAIT + 0.1)

    def has_cards(self) -> bool:
        """Whether any card tells of its memory."""
        sample = self.gpu.latest()
        return sample is not None and sample.total > 0

    def close(self) -> None:
        """End the threads."""
        self._sampler.close()
        self.gpu.close()

    def _measure(self) -> Measured:
        at = time.monotonic_ns()
        version, refs = self._trees()
        known = {ref.model: (ref.identity, ref.token) for ref in refs if ref.identity is not None}
        found = processes.members_of(known)
        members = {ref.model: found.get(ref.model, []) for ref in refs}
        sample = self.gpu.fresh(GPU_WAIT)
        views = [ModelView(ref.model, ref.state, ref.pool, frozenset(members[ref.model])) for ref in refs]
        ram = {model: memory for model, pids in members.items() if (memory := self.host.tree(pids)) is not None}
        return Measured(at, version, sample, self.host.memory(), views, ram)

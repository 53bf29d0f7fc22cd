"""Remembers what was made of the configuration in force, until another one is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from qmflask.configuration import Live

T = TypeVar("T")


class PerLive(Generic[T]):
    """`make(live)`, computed once for each configuration; an old request may compute its own again."""

    def __init__(self, make: Callable[[Live], T]) -> None:
        self._make = make
        self._latest: tuple[Live, T] | None = None

    def __call__(self, live: Live) -> T:
        latest = self._latest
        if latest is None or latest[0] is not live:
            latest = self._latest = (live, self._make(live))
        return latest[1]

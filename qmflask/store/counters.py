"""Counters that survive every process: sums by name and labels, added up in whatever transaction is at hand."""

from __future__ import annotations

import json
import sqlite3
from bisect import bisect_left
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from qmflask.store import bulk

#: One table, the same in `state.db` (what the leader does) and `activity.db` (what requests did).
SCHEMA = """
CREATE TABLE IF NOT EXISTS counters (
    name   TEXT NOT NULL,
    labels TEXT NOT NULL,                          -- JSON list, in the order the metric declares them
    value  REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (name, labels)
) WITHOUT ROWID;
"""

#: Upper bounds in seconds, from a warm first byte to a load of ten minutes.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

#: The same as labels, with the last one.
BOUNDS = (*map(str, BUCKETS), "+Inf")


class Sum(NamedTuple):
    """One value of one counter."""

    name: str
    labels: tuple[str, ...]
    value: float


class Tally:
    """Additions that wait to be written together; a histogram is a `_bucket` (not cumulative) and a `_sum` counter."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, tuple[str, ...]], float] = {}
        #: Per histogram and labels: the sum, then how many fell into each bucket.
        self._histograms: dict[tuple[str, tuple[str, ...]], list[float]] = {}

    def add(self, name: str, labels: tuple[str, ...] = (), value: float = 1) -> None:
        """Add to a counter."""
        key = (name, labels)
        self._sums[key] = self._sums.get(key, 0) + value

    def observe(self, name: str, labels: tuple[str, ...], *seconds: float) -> None:
        """Add observations to a histogram."""
        key = (name, labels)
        found = self._histograms.get(key)
        if found is None:
            found = self._histograms[key] = [0.0] * (len(BOUNDS) + 1)
        found[0] += sum(seconds)
        for value in seconds:
            found[1 + bisect_left(BUCKETS, value)] += 1

    def __bool__(self) -> bool:
        return bool(self._sums or self._histograms)

    def rows(self) -> list[Sum]:
        """What was added."""
        rows = [Sum(name, labels, value) for (name, labels), value in self._sums.items()]
        for (name, labels), (total, *counts) in self._histograms.items():
            rows.append(Sum(f"{name}_sum", labels, total))
            rows += [
                Sum(f"{name}_bucket", (*labels, bound), number)
                for bound, number in zip(BOUNDS, counts, strict=True)
                if number
            ]
        return rows


_as_json = lru_cache(1024)(json.dumps)


def write(tx: sqlite3.Connection, tally: Tally) -> None:
    """Add a tally to the table, inside the caller's transaction."""
    bulk.insert(
        tx,
        "counters",
        ("name", "labels", "value"),
        [(row.name, _as_json(row.labels), row.value) for row in tally.rows()],
        "ON CONFLICT (name, labels) DO UPDATE SET value = value + excluded.value",
    )


def count(tx: sqlite3.Connection, name: str, *labels: str) -> None:
    """Add one to one counter, inside the caller's transaction."""
    tally = Tally()
    tally.add(name, labels)
    write(tx, tally)


def read(tx: sqlite3.Connection) -> Iterable[Sum]:
    """Every counter."""
    rows = tx.execute("SELECT name, labels, value FROM counters ORDER BY name, labels")
    return [Sum(row[0], tuple(json.loads(row[1])), row[2]) for row in rows]

"""The application with access lines and counters, but no activity: no answer is read, nothing is stored or kept.

What `bench.activity` compares with, beside `bench.unrecorded`. Served as `bench.lines_only:app`.
"""

from __future__ import annotations

from collections.abc import Sequence

from qmflask.captures import Allowance
from qmflask.recording import Recording
from qmflask.store.activity import ActivityStore, Record
from qmflask.store.counters import Tally
from wsgi import app

__all__ = ["app"]

_add = ActivityStore.add


def _feed(self: Recording, data: bytes) -> None:
    self._unread_size += len(data)


def _look(self: Recording) -> None:
    pass


def _capture(self: Recording, allowance: Allowance) -> bytes | None:
    return None


def _add_counters(self: ActivityStore, rows: Sequence[tuple[Record, bytes | None]], tally: Tally) -> None:
    _add(self, [], tally)


Recording.feed = _feed  # type: ignore[method-assign]
Recording._look = _look  # type: ignore[method-assign]
Recording.capture = _capture  # type: ignore[method-assign]
ActivityStore.add = _add_counters  # type: ignore[method-assign]

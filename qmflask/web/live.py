"""What the box does now, read at most once per moment and worker however many pages look at it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from qmflask.overview import overview
from qmflask.router import Router
from qmflask.store.activity import ActivityError
from qmflask.store.reading import Status

#: Seconds between two reads.
MOMENT = 0.2


@dataclass(frozen=True)
class Moment:
    """One look at the box. `version` counts the looks that saw a change; `messages` are kept by who makes them."""

    version: int
    status: Status
    generation: int
    body: dict[str, Any]
    encoded: str
    last_record: int
    messages: dict[str, bytes] = field(default_factory=dict)


class Live:
    """The newest Moment of a process; built with the application, it holds nothing that a fork could break."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moment: Moment | None = None
        self._mark: Any = None
        self._at = 0.0

    def look(self, router: Router, age: float = MOMENT) -> Moment:
        """The newest Moment, not older than `age` seconds."""
        with self._lock:
            now = time.monotonic()
            if self._moment is None or now - self._at >= age:
                self._at = now
                self._read(router)
            assert self._moment is not None
            return self._moment

    def _read(self, router: Router) -> None:
        status, live = router.status(), router.live
        try:
            last = router.activity.store.last_id()
        except ActivityError:
            last = self._moment.last_record if self._moment else 0
        mark = (_mark(status), live.generation, id(live.rules), last)
        if self._moment is not None and mark == self._mark:
            return
        body = overview(status, live.config, live.rules.charges, time.monotonic_ns(), time.time())
        used = _last_used(router)
        for model in body["models"]:
            model["used"] = used.get(model["id"])
        version = self._moment.version + 1 if self._moment else 1
        self._moment = Moment(version, status, live.generation, body, orjson.dumps(body).decode(), last)
        self._mark = mark


def _last_used(router: Router) -> dict[str, int]:
    try:
        return router.activity.store.last_used(router.live.config.models)
    except ActivityError:
        return {}


def _mark(status: Status) -> Any:
    """What differs when a page would show something else; clocks that only run on are the page's own business."""
    scheduler = status.scheduler
    return (
        scheduler.schedule_version,
        scheduler.config_error,
        scheduler.active_profile,
        scheduler.leader,
        status.sample.get("at"),
        tuple((row.id, row.state) for row in status.requests),
        tuple((row.id, row.draining) for row in status.workers),
        tuple(row.idle_since for row in status.processes.values()),
    )

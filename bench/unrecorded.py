"""The application with nothing recorded: what `bench.activity` compares with. Served as `bench.unrecorded:app`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qmflask.accesslog import Access
from qmflask.activity import Activity
from wsgi import app

__all__ = ["app"]


def _record(self: Activity, environ: dict[str, Any]) -> None:
    environ["qmflask.recorded"] = True  # no access line instead, either


def _here(self: Activity) -> Mapping[str, Any]:
    return {}


def _note_access(self: Activity, when: float, access: Access) -> None:
    pass


Activity.record = _record  # type: ignore[method-assign, assignment]
Activity.here = _here  # type: ignore[method-assign, assignment]
Activity.note_access = _note_access  # type: ignore[method-assign]

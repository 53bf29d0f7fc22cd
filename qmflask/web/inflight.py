"""What is in flight in all workers, with its progress (compatibility 3.11)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson
from flask import Blueprint, Response, request

from qmflask.captures import redacted
from qmflask.router import Router
from qmflask.store.activity import ActivityError
from qmflask.store.reading import Status
from qmflask.web import auth
from qmflask.web.answers import json_answer
from qmflask.web.metrics import iso


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """`GET /api/inflight`; `operations` cancels."""
    routes = Blueprint("inflight", __name__)

    @routes.before_request
    def check_key() -> None:
        auth.require_admin(router().live.config, request.environ)

    @routes.get("/api/inflight")
    def inflight() -> Response:
        here = router()
        return json_answer({"requests": Entries(here).of(here.status())})

    return routes


class Entries:
    """Requests of all workers: the rows of the store, with what each worker publishes of its own."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def of(self, status: Status) -> list[dict[str, Any]]:
        """One entry per request, in arrival order."""
        here = self._router.activity.here()
        elsewhere = self._published()
        found = []
        for row in status.requests:
            if row.kind not in ("infer", "peer"):
                continue
            detail = orjson.loads(row.detail) if row.detail else {}
            local = here.get(row.public_id)
            if local is not None:
                size, asked, answered = local.received, local.request_headers(), redacted(local.answer_headers)
            else:
                size, text = elsewhere.get(row.public_id, (0, "{}"))
                headers = orjson.loads(text)
                asked, answered = headers.get("req") or {}, redacted(list((headers.get("resp") or {}).items()))
            found.append(
                {
                    "id": row.public_id,
                    "timestamp": iso(row.arrival_wall),
                    "model": row.model,
                    "state": row.state,
                    "req_path": detail.get("path", ""),
                    "method": detail.get("method", ""),
                    "req_headers": asked,
                    "remote_ip": detail.get("remote", ""),
                    "resp_headers": answered,
                    "resp_bytes": size,
                    "elapsed_ms": max(0, time.monotonic_ns() - row.arrival) // 1_000_000,
                    "metadata": {"fifo_priority": str(row.priority)} | _selector(detail),
                }
            )
        return found

    def _published(self) -> dict[str, tuple[int, str]]:
        try:
            self._router.activity.watch()
            return self._router.activity.store.progress()
        except ActivityError:  # the recorder has said so; rows alone are still worth showing
            return {}


def _selector(detail: dict[str, Any]) -> dict[str, str]:
    return {"selector": detail["selector"]} if "selector" in detail else {}

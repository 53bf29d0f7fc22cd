"""Health, workers and the other routes that people and scripts look after the service with."""

from __future__ import annotations

from collections.abc import Callable

from flask import Blueprint, Response, request

from qmflask.errors import NotFound
from qmflask.router import Router
from qmflask.web import auth
from qmflask.web.answers import json_answer, text_answer


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """`/health` is open; the rest wants a key where keys are configured, and cancelling an admin's."""
    routes = Blueprint("operations", __name__)

    @routes.get("/health")
    @routes.get("/wol-health")
    def health() -> Response:
        return text_answer("OK")

    @routes.get("/api/workers")
    def workers() -> Response:
        auth.accept(router().live.config, request.environ)
        status = router().status()
        rows = [{"id": row.id, "pid": row.pid, "draining": row.draining} for row in status.workers]
        leader = next((row.pid for row in status.workers if row.id == status.scheduler.leader), None)
        return json_answer({"leader": leader, "term": status.scheduler.generation, "workers": rows})

    @routes.post("/api/inflight/<path:request_id>/cancel")
    def cancel(request_id: str) -> Response:
        auth.require_admin(router().live.config, request.environ)
        if not router().cancel(request_id):
            raise NotFound("inflight request not found: it has ended, or never was; its id is X-QM-Request-Id")
        return json_answer({"msg": "ok"})

    return routes

"""Health, workers and the other routes that people and scripts look after the service with."""

from __future__ import annotations

from collections.abc import Callable

from flask import Blueprint, Response, request

from qmflask.router import Router
from qmflask.web import auth
from qmflask.web.answers import json_answer


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """`/health` is open; the rest wants a key where keys are configured."""
    routes = Blueprint("operations", __name__)

    @routes.get("/health")
    @routes.get("/wol-health")
    def health() -> Response:
        return Response("OK", mimetype="text/plain")

    @routes.get("/api/workers")
    def workers() -> Response:
        auth.accept(router().live.config, request.environ)
        status = router().status()
        rows = [{"id": row.id, "pid": row.pid, "draining": row.draining} for row in status.workers]
        leader = next((row.pid for row in status.workers if row.id == status.scheduler.leader), None)
        return json_answer({"leader": leader, "term": status.scheduler.generation, "workers": rows})

    return routes

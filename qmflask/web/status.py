"""`/api/status`, `/api/performance`, `/api/hardware` and `/api/version`: the box at one moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from flask import Blueprint, Response, request

from qmflask import __version__
from qmflask.errors import Unavailable
from qmflask.host import machine
from qmflask.router import Router
from qmflask.store.activity import ActivityError
from qmflask.web import auth
from qmflask.web.answers import json_answer
from qmflask.web.live import Live
from qmflask.web.metrics import iso, rfc3339


def blueprint(router: Callable[[], Router], live: Live | None = None) -> Blueprint:
    """The routes."""
    routes = Blueprint("status", __name__)
    shared = live or Live()

    @routes.get("/api/status")
    def status() -> Response:
        auth.require_admin(router().live.config, request.environ)
        # Read anew: who has just unloaded a model and asks must not see it loaded. Pages follow `/api/events`.
        return Response(
            shared.look(router(), age=0).encoded, headers=[("Cache-Control", "no-store")], mimetype="application/json"
        )

    @routes.get("/api/version")
    def version() -> Response:
        auth.accept(router().live.config, request.environ)
        return json_answer({"version": __version__, "commit": "", "build_date": ""})

    @routes.get("/api/hardware")
    def hardware() -> Response:
        auth.accept(router().live.config, request.environ)
        return json_answer(_hardware(router().status().sample))

    @routes.get("/api/performance")
    def performance() -> Response:
        config = router().live.config
        auth.accept(config, request.environ)
        if config.performance.disabled:
            return json_answer({"enabled": False}, 503)
        text = request.args.get("after", "")
        try:
            rows = router().activity.store.performance(rfc3339(text, "after") if text else 0.0)
        except ActivityError as error:
            raise Unavailable(f"performance cannot be read: {error}") from error
        readings = [orjson.loads(body) for _, body in rows]
        for reading in readings:
            for part in (reading["sys"], *reading["gpu"]):
                part["timestamp"] = iso(part["timestamp"])
        return json_answer(
            {
                "enabled": True,
                "sys_stats": [reading["sys"] for reading in readings],
                "gpu_stats": [card for reading in readings for card in reading["gpu"]],
            }
        )

    return routes


def _hardware(sample: Mapping[str, Any]) -> dict[str, Any]:
    """What the machine is made of. `sample` is the last one of memory, empty before the first."""
    cards = [
        {name: card.get(name) for name in ("index", "name", "uuid", "total")} for card in sample.get("cards") or ()
    ]
    return {**machine(), "memory": {"total": (sample.get("host") or {}).get("total")}, "accelerators": cards}

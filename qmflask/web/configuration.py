"""The configuration in force and its reload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import Blueprint, Response, request

from qmflask.errors import BadRequest
from qmflask.router import Router
from qmflask.web import auth
from qmflask.web.answers import json_answer


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """`GET /api/config` and `POST /api/config/reload`."""
    routes = Blueprint("configuration", __name__)

    @routes.before_request
    def check_key() -> None:  # all of it names every model, so it wants an admin where keys exist
        auth.require_admin(router().live.config, request.environ)

    @routes.get("/api/config")
    def show() -> Response:
        return json_answer(_state(router()))

    @routes.post("/api/config/reload")
    def reload() -> Response:
        error = router().reload()
        if error:
            raise InvalidConfiguration(f"the configuration is not taken, the old one stays in force: {error}")
        return json_answer({"msg": "ok", **_state(router())})

    return routes


class InvalidConfiguration(BadRequest):
    """Raised when the file that was to be loaded is wrong; nothing has changed."""

    code = "invalid_configuration"


def _state(router: Router) -> dict[str, Any]:
    scheduler = router.status().scheduler
    return {
        "generation": scheduler.config_generation,
        "worker_generation": router.live.generation,
        "loaded_at": scheduler.config_wall,
        "source": str(router.source),
        "state": str(router.state),
        "error": scheduler.config_error,
        "models": sorted(router.live.config.models),
    }

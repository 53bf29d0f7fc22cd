"""Profiles at run time: which there are, and which one is active for all workers (3.10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import Blueprint, Response, request

from qmflask.bodies import parse_json
from qmflask.errors import BadRequest, InvalidJSON, NotFound
from qmflask.intake import Source
from qmflask.router import Router
from qmflask.web import auth
from qmflask.web.answers import json_answer

#: A body that says a profile's name has no need to be longer.
_MAX_BODY = 64 * 1024


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """`GET /api/profiles` and `PUT /api/profiles/active`."""
    routes = Blueprint("profiles", __name__)

    @routes.get("/api/profiles")
    def show() -> Response:
        live = router().live
        config = live.config
        auth.accept(config, request.environ)
        profiles = [
            {"id": name, "description": profile.description, "pins": profile.pins}
            for name, profile in sorted(config.profiles.items(), key=lambda item: item[0].encode())
        ]
        return json_answer({"active": router().active_profile(live), "profiles": profiles})

    @routes.put("/api/profiles/active")
    def activate() -> Response:
        live = router().live
        auth.require_admin(live.config, request.environ)
        name = _wanted(Source(request.environ, _MAX_BODY).read_all())
        if name is not None and name not in live.config.profiles:
            raise NotFound(f"there is no profile {name[:200]!r}; GET /api/profiles lists them")
        router().activate_profile(live, name)
        return json_answer({"active": name})

    return routes


def _wanted(body: bytes) -> str | None:
    try:
        given: Any = parse_json(body)
    except InvalidJSON as error:
        raise BadRequest(f"invalid profile request: {error.message}") from None
    if given is not None and not isinstance(given, dict):
        raise BadRequest('invalid profile request: send {"name": "..."}')
    if not given or "name" not in given:
        raise BadRequest('profile name is required: send {"name": "..."}, or null for none')
    name = given["name"]
    if name is not None and not isinstance(name, str):
        raise BadRequest("the profile name must be a string or null")
    return name or None

"""One access line for each request that is not answered by a model; those write their own, with more in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flask import Blueprint, Response, request

from qmflask.recording import MILLISECOND, access, asked
from qmflask.router import Router

#: What is asked for every few seconds by machines and open pages tells nobody anything.
SILENT = (
    *("/wol-health", "/health", "/metrics", "/ui/static"),
    *("/api/performance", "/api/status", "/api/logs", "/api/plan", "/api/metrics"),
)


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """No routes: hooks around all of them."""
    routes = Blueprint("access", __name__)

    @routes.before_app_request
    def begun() -> None:
        begin(request.environ)

    @routes.after_app_request
    def ended(response: Response) -> Response:
        end(router, request.environ, response)
        return response

    return routes


def begin(environ: dict[str, Any]) -> None:
    """The request is here."""
    environ["qmflask.began"] = time.monotonic_ns()


def end(router: Callable[[], Router], environ: dict[str, Any], response: Response) -> None:
    """Its answer is on the way: note it, when its body has been sent, unless a recording does."""
    if "qmflask.recorded" in environ:
        return
    if environ.get("PATH_INFO", "").startswith(SILENT) and response.status_code < 400:
        return
    if response.is_streamed:
        response.call_on_close(lambda: _note(router(), environ, response))
    else:
        _note(router(), environ, response)


def _note(router: Router, environ: dict[str, Any], response: Response) -> None:
    now, began = time.monotonic_ns(), environ.get("qmflask.began", 0)
    line = access(asked(environ), response.status_code, response.content_length or 0, (now - began) / MILLISECOND)
    router.activity.note_access(time.time(), line)

"""`/logs` and `/logs/stream`: history and live lines of qmflask and of each model, from any worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import parse_qs

from flask import Blueprint, Response, request

from qmflask.errors import BadRequest
from qmflask.logfiles import ModelLog
from qmflask.logtail import HISTORY, Tail, read_after, service_log
from qmflask.router import Router
from qmflask.web import auth
from qmflask.web.answers import json_answer
from qmflask.web.streams import Viewer, stream_answer

#: Seconds between two looks at the files, by how many there are.
LOOK_ONE, LOOK_MANY = 0.1, 0.25

_HEADERS = [("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-store")]


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """The log routes."""
    routes = Blueprint("logs", __name__)

    @routes.before_request
    def check_key() -> None:
        auth.require_admin(router().live.config, request.environ)

    @routes.get("/logs")
    def history() -> Response:
        if "text/html" in request.headers.get("Accept", ""):
            return Response(status=302, headers=[("Location", f"{request.script_root}/ui/")])
        tail = Tail(_sources(router(), ""), HISTORY)
        try:
            return Response(tail.read(), headers=_HEADERS, content_type="text/plain; charset=utf-8")
        finally:
            tail.close()

    @routes.get("/logs/stream", defaults={"source": ""})
    @routes.get("/logs/stream/<path:source>")
    def stream(source: str) -> Response:
        here = router()
        logs = _sources(here, source)
        # `no-history` counts whatever its value is, also without one.
        wants_history = "no-history" not in parse_qs(request.query_string.decode("latin-1"), keep_blank_values=True)
        return stream_answer(
            here, lambda viewer: _lines(here, viewer, source, logs, HISTORY if wants_history else 0), "text/plain"
        )

    @routes.get("/api/logs/<path:source>")
    def piece(source: str) -> Response:
        """For pages: what comes after `after`, without a stream that holds a thread."""
        (log,) = _sources(router(), source) if source not in ("upstream", "") else (_refuse(source),)
        if "previous" in request.args:
            log = _previous(log)
        found = read_after(log, request.args.get("after", ""))
        text = found.data.decode("utf-8", "replace")
        return json_answer({"text": text, "cursor": found.cursor, "dropped": found.dropped}, headers=_HEADERS)

    return routes


def _sources(router: Router, source: str) -> list[ModelLog]:
    """The logs that a source name stands for: "" is what `logToStdout` shows, as in the combined history."""
    folder = router.state / "logs"
    live = router.live
    wanted = {"proxy": "proxy", "upstream": "upstream", "": live.config.log_to_stdout}.get(source)
    if wanted is None:
        resolved = live.names.resolve(source)
        if resolved is None or resolved.kind != "model":
            raise BadRequest(f"invalid logger {source!r}: use proxy, upstream or the name of a model")
        return [ModelLog(folder, resolved.id)]
    logs: list[ModelLog] = []
    if wanted in ("upstream", "both"):
        logs += [ModelLog(folder, model) for model in live.config.models]
    if wanted in ("proxy", "both"):
        logs.append(service_log(folder))
    return logs


def _refuse(source: str) -> ModelLog:
    raise BadRequest(f"invalid logger {source!r}: use proxy or the name of a model")


def _previous(log: ModelLog) -> ModelLog:
    """The log of the start before the last one, as a log of its own."""
    before = ModelLog(log.path.parent, "")
    before.path = log.previous
    return before


def _lines(router: Router, viewer: Viewer, source: str, logs: list[ModelLog], history: int) -> Iterator[bytes]:
    tail = Tail(logs, history)
    live = router.live
    try:
        while not viewer.ended:
            if router.live is not live and source in ("", "upstream"):
                live = router.live
                tail.extend(_sources(router, source))
            data = tail.read()
            if data:
                yield data
            else:
                viewer.sleep(LOOK_ONE if len(logs) == 1 else LOOK_MANY)
    finally:
        tail.close()

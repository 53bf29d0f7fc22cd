"""What models there are, what runs, loading and unloading."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from flask import Blueprint, Response, request

from qmflask.config import Model
from qmflask.errors import NotFound
from qmflask.hangup import Client, client_socket
from qmflask.router import Router
from qmflask.states import State
from qmflask.store.rows import ProcessRow
from qmflask.web import auth
from qmflask.web.answers import json_answer


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """`/v1/models`, `/running`, load and unload."""
    routes = Blueprint("models", __name__)

    @routes.before_request
    def check_key() -> None:
        auth.accept(router().live.config, request.environ)

    @routes.get("/v1/models")
    @routes.get("/models")
    def list_models() -> Response:
        live = router().live
        states = {row.model: row.state for row in router().status().processes.values()}
        models = sorted((m for m in live.config.models.values() if not m.unlisted), key=lambda m: m.id.encode())
        return json_answer({"object": "list", "data": [_record(m, states.get(m.id)) for m in models]})

    @routes.get("/running")
    def running() -> Response:
        status = router().status()
        models = router().live.config.models
        rows = [row for row in sorted(status.processes.values(), key=lambda r: r.model) if row.state in _RUNNING]
        counts = Counter((request.model, request.state) for request in status.requests if request.kind == "infer")
        return json_answer({"running": [_running(row, models.get(row.model), counts) for row in rows]})

    @routes.get("/unload")
    def unload_all() -> Response:
        with _watched(router()) as client:
            router().unload(router().live, None, client)
        return Response("OK", mimetype="text/plain")

    @routes.post("/api/models/unload")
    def unload_all_api() -> Response:
        with _watched(router()) as client:
            router().unload(router().live, None, client)
        return json_answer({"msg": "ok"})

    @routes.post("/api/models/unload/<path:name>")
    def unload_one(name: str) -> Response:
        model = _known(router(), name)
        with _watched(router()) as client:
            router().unload(router().live, model, client)
        return Response("OK", mimetype="text/plain")

    @routes.post("/api/models/load/<path:name>")
    def load_one(name: str) -> Response:
        model = _known(router(), name)
        with _watched(router()) as client:
            router().load(router().live, model, client)
        return json_answer({"msg": "ok", "model": model, "state": "ready"})

    return routes


_RUNNING = (State.STARTING, State.READY, State.DRAINING, State.STOPPING)


def _known(router: Router, name: str) -> str:
    resolved = router.live.names.resolve(name)
    if resolved is None or resolved.kind != "model":
        raise NotFound(f"model not found: {name}")
    return resolved.id


class _watched:
    """A client under watch while a command waits; the command's row goes when the client leaves."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._client = Client()
        self._sock = client_socket(request.environ)

    def __enter__(self) -> Client:
        if self._sock is not None:
            self._router.hangups.watch(self._sock, self._client)
        return self._client

    def __exit__(self, *_: object) -> None:
        if self._sock is not None:
            self._router.hangups.unwatch(self._sock)


def _record(model: Model, state: State | None) -> dict[str, Any]:
    record: dict[str, Any] = {"id": model.id, "object": "model", "created": int(time.time()), "owned_by": "qmflask"}
    for field in ("name", "description"):
        if text := getattr(model, field).strip():
            record[field] = text
    record["status"] = {"value": "loaded" if state in _RUNNING else "unloaded"}
    return record


def _running(row: ProcessRow, model: Model | None, counts: Counter[tuple[str, str]]) -> dict[str, Any]:
    return {
        "model": row.model,
        "state": _public_state(row.state),
        "cmd": row.cmd or "",
        "proxy": row.proxy or "",
        "ttl": model.ttl if model else 0,
        "name": model.name.strip() if model else "",
        "description": model.description.strip() if model else "",
        "pid": row.pid,
        "port": row.port,
        "reason": row.reason,
        "inflight": counts[row.model, "granted"],
        "queued": counts[row.model, "queued"],
    }


def _public_state(state: State) -> str:
    """Clients that read `/running` know no draining: such a model is still ready for what it answers."""
    return "ready" if state is State.DRAINING else state.value

"""What models there are, what runs, loading and unloading."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from flask import Blueprint, Response, request

from qmflask.config import ApiKey, Model
from qmflask.errors import NotFound
from qmflask.hangup import Client, client_socket
from qmflask.headers import Header
from qmflask.overview import all_sizes, failure_of, stop_of
from qmflask.router import Router
from qmflask.states import DOWN, RESIDENT, State
from qmflask.store.rows import ProcessRow
from qmflask.web import auth, targets
from qmflask.web.answers import json_answer, text_answer
from qmflask.web.model_records import records, title_of


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """`/v1/models`, `/running`, load and unload."""
    routes = Blueprint("models", __name__)

    def key() -> ApiKey | None:
        return auth.accept(router().live.config, request.environ)

    def admin() -> None:
        auth.require_admin(router().live.config, request.environ)

    @routes.get("/v1/models")
    @routes.get("/models")
    def list_models() -> Response:
        return json_answer({"object": "list", "data": _records(router(), key())}, headers=_cors())

    @routes.get("/v1/models/<path:name>")
    def one_model(name: str) -> Response:
        owner = key()
        for record in _records(router(), owner):
            if name == record["id"] or name in record["meta"]["qmflask"].get("aliases", ()):
                return json_answer(record, headers=_cors())
        raise targets.unknown(router().live, owner, name)

    @routes.get("/running")
    def running() -> Response:
        owner = key()
        status = router().status()
        models = router().live.config.models
        rows = [row for row in sorted(status.processes.values(), key=lambda r: r.model) if row.state in RESIDENT]
        rows = [row for row in rows if auth.sees(owner, _names(row, models.get(row.model)))]
        counts = Counter((r.model, r.state) for r in status.requests if r.kind == "infer")
        sizes = all_sizes(router().live.config, status.sizes)
        shown = [
            _running(row, models.get(row.model), counts, auth.is_admin(owner)) | {"size": sizes.get(row.model)}
            for row in rows
        ]
        if "all" not in request.args:  # clients of llama-swap expect this and nothing more
            return json_answer({"running": shown})
        gone = [row for row in status.processes.values() if row.state in DOWN and row.model in models]
        gone = [row for row in gone if auth.sees(owner, _names(row, models.get(row.model)))]
        stopped = [_stopped(row, auth.is_admin(owner)) for row in sorted(gone, key=lambda r: r.model)]
        return json_answer({"running": shown, "stopped": stopped})

    @routes.get("/unload")
    def unload_all() -> Response:
        admin()
        _unload(router(), None)
        return text_answer("OK")

    @routes.post("/api/models/unload")
    def unload_all_api() -> Response:
        admin()
        _unload(router(), None)
        return json_answer({"msg": "ok"})

    @routes.post("/api/models/unload/<path:name>")
    def unload_one(name: str) -> Response:
        admin()
        _unload(router(), _known(router(), name))
        return text_answer("OK")

    @routes.post("/api/models/release/<path:name>")
    def release_one(name: str) -> Response:
        admin()
        held = router().end_hold(_known(router(), name))
        return json_answer({"msg": "ok", "held": held})

    @routes.post("/api/models/load/<path:name>")
    def load_one(name: str) -> Response:
        admin()
        model = _known(router(), name)
        with _watched(router()) as client:
            router().load(router().live, model, client)
        return json_answer({"msg": "ok", "model": model, "state": "ready"})

    return routes


def _records(router: Router, owner: ApiKey | None) -> list[dict[str, Any]]:
    live = router.live
    states = {row.model: row.state for row in router.status().processes.values()}
    return records(live, states, targets.pins_of(router, live), owner)


def _cors() -> list[Header]:
    origin = request.environ.get("HTTP_ORIGIN")
    return [("Access-Control-Allow-Origin", origin), ("Vary", "Origin")] if origin else []


def _unload(router: Router, model: str | None) -> None:
    with _watched(router) as client:
        router.unload(router.live, model, client)


def _known(router: Router, name: str) -> str:
    resolved = router.live.names.resolve(name) or router.newest().names.resolve(name)
    if resolved is None or resolved.kind != "model":
        near = [n for n in router.live.names.nearest(name, 8) if _is_model(router, n)][:3]
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise NotFound(f"model not found: {name[:200]}{hint}")
    return resolved.id


def _is_model(router: Router, name: str) -> bool:
    meaning = router.live.names.resolve(name)
    return meaning is not None and meaning.kind == "model"


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


def _names(row: ProcessRow, model: Model | None) -> tuple[str, ...]:
    return (row.model, *(model.aliases if model is not None else ()))


def _running(row: ProcessRow, model: Model | None, counts: Counter[tuple[str, str]], admin: bool) -> dict[str, Any]:
    """One row. Commands may hold secrets of their own (tokens, paths), so only admins see them."""
    name, description = title_of(model)
    return {
        "model": row.model,
        "state": _public_state(row.state),
        "cmd": row.cmd or "" if admin else "",
        "proxy": row.proxy or "" if admin else "",
        "ttl": model.ttl if model else 0,
        "name": name,
        "description": description,
        "pid": row.pid,
        "port": row.port,
        "reason": row.reason,
        "inflight": counts[row.model, "granted"],
        "queued": counts[row.model, "queued"],
    }


def _stopped(row: ProcessRow, admin: bool) -> dict[str, Any]:
    """Why a model that has run is not loaded. Failures quote its log, which only admins may read."""
    failure = failure_of(row, time.monotonic_ns())
    if failure is not None and not admin:
        failure["message"] = ""
    return {"model": row.model, "state": row.state.value, "stop": stop_of(row), "failure": failure}


def _public_state(state: State) -> str:
    """Clients that read `/running` know no draining: such a model is still ready for what it answers."""
    return "ready" if state is State.DRAINING else state.value

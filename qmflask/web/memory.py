"""Memory as it is, and the plan: what loading a model would stop, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from flask import Blueprint, Response, request

from qmflask.errors import MissingModel
from qmflask.hints import hint
from qmflask.names import Resolved
from qmflask.overview import all_sizes
from qmflask.router import Router
from qmflask.states import DOWN
from qmflask.web import auth, targets
from qmflask.web.answers import json_answer


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """`GET /api/plan?model=M`, `GET /api/memory`, `POST /api/memory/relearn`."""
    routes = Blueprint("memory", __name__)

    @routes.before_request
    def check_key() -> None:  # all of it names every model, so it wants an admin where keys exist
        auth.require_admin(router().live.config, request.environ)

    @routes.get("/api/plan")
    def show_plan() -> Response:
        name = request.args.get("model", "")
        if not name:
            raise MissingModel("missing model: ask for /api/plan?model=NAME", param="model")
        _, (resolved, words) = targets.in_newest(
            router(), router().live, lambda live: targets.destination(router(), live, name)
        )
        if resolved.kind == "peer":
            return json_answer(_at_peer(resolved, words))
        if resolved.id not in router().live.config.models:
            raise targets.unknown(router().live, None, resolved.id)  # a reload was faster
        found = router().plan(resolved.id)
        status = router().status()
        found["notes"] = ([words] if words else []) + found.get("notes", [])
        found["sizes"] = all_sizes(router().live.config, status.sizes)
        found["others"] = _others(status.sample)
        found["hints"] = _hints(router(), [resolved.id, *(line["model"] for line in _residents(found))])
        return json_answer(found)

    @routes.get("/api/memory")
    def show_memory() -> Response:
        status = router().status()
        states = {row.model: row.state.value for row in status.processes.values() if row.state not in DOWN}
        return json_answer({**status.sample, "sizes": all_sizes(router().live.config, status.sizes), "states": states})

    @routes.post("/api/memory/relearn")
    def relearn() -> Response:
        router().relearn()
        return json_answer({"msg": "ok"})

    return routes


def _at_peer(resolved: Resolved, words: str) -> dict[str, Any]:
    """The plan for a model of a peer."""
    why = f"the peer {resolved.peer} answers it; nothing is loaded or stopped here"
    body = {"model": f"{resolved.peer}/{resolved.upstream_name}", "decision": "serve", "why": why, "state": "peer"}
    nothing: dict[str, Any] = {"victims": [], "blockers": [], "position": None, "code": None, "pools": []}
    return {**body, **nothing, "notes": [words] if words else []}


def _residents(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [line for pool in found.get("pools", []) for line in pool["residents"]]


def _hints(router: Router, names: list[str]) -> dict[str, Any]:
    """For models of unknown size: what the header or the file suggests; shown, never charged."""
    models, charges = router.live.config.models, router.live.rules.charges
    unknown = [n for n in dict.fromkeys(names) if n in models and not (charges[n].vram or charges[n].ram)]
    guesses = {name: hint(models[name]) for name in unknown}
    return {name: asdict(guess) for name, guess in guesses.items() if guess is not None}


def _others(sample: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the newest sample says of others on the cards; None where there is no card."""
    if not sample.get("cards"):
        return None
    return {key: sample.get(key) for key in ("foreign", "floor", "excess", "trusted", "why", "foreign_processes")}

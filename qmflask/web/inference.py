"""The routes that models answer: find the model, take a lease, relay. `Inference.answer` knows nothing of Flask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flask import Blueprint, Response, request

from qmflask import intake as intakes
from qmflask.errors import MissingModel
from qmflask.headers import Header
from qmflask.intake import Intake
from qmflask.leases import Lease, Pending
from qmflask.relay import Relayed
from qmflask.router import Router
from qmflask.web import auth, loading, sending, targets
from qmflask.web.answers import Passed
from qmflask.web.derived import PerLive
from qmflask.web.sending import Server, Servers
from qmflask.web.targets import Choices, Target
from qmflask.web.visit import Visit

_OPENAI = ("chat/completions", "responses", "completions", "messages", "messages/count_tokens", "embeddings")
_RERANK = ("rerank", "reranking")
_V1 = ("audio/speech", "audio/voices", "audio/transcriptions", "images/generations", "images/edits")
_OTHER = ("/reranking", "/rerank", "/infill", "/completion", "/sdapi/v1/txt2img", "/sdapi/v1/img2img")

#: Path as the client knows it -> path as the model server knows it.
POST_ROUTES: dict[str, str] = {
    **{f"/v1/{name}": f"/v1/{name}" for name in (*_OPENAI, *_RERANK, *_V1)},
    **{f"/v/{name}": f"/{name}" for name in (*_OPENAI, *_RERANK)},
    **{name: name for name in _OTHER},
    "/audioapi/v1/tasks/run": "/v1/tasks/run",
}
#: These name their model in the query.
GET_ROUTES: dict[str, str] = {name: name for name in ("/v1/audio/voices", "/sdapi/v1/loras", "/props")}


def blueprint(router: Callable[[], Router], inference: Inference) -> Blueprint:
    """The model routes over the process's router."""
    routes = Blueprint("inference", __name__)

    def view(path: str) -> Response:
        return Passed(inference.answer(router(), request.environ, path))

    for table, method in ((POST_ROUTES, "POST"), (GET_ROUTES, "GET")):
        for public, path in table.items():
            endpoint = f"{method}{public.replace('/', '_')}"
            routes.add_url_rule(public, endpoint, partial(view, path), methods=[method])
    return routes


class Inference:
    """Serves model routes; holds what one process remembers for them."""

    def __init__(self) -> None:
        self._servers = PerLive(Servers)
        self._choices = Choices()

    def answer(self, router: Router, environ: dict[str, Any], path: str) -> Relayed:
        """Serve one request; `path` is the one the model server knows.

        Raises QmflaskError or ClientGone before the first byte.
        """
        live = router.live
        key = auth.accept(live.config, environ)
        visit = Visit(router, environ, key, path)
        try:
            visit.record()
            body = visit.body = intakes.take(environ, max_body=live.config.max_body)
            asked = _named(body)
            visit.named(asked, None)
            visit.live, found = targets.in_newest(
                router, visit.live, lambda live: targets.find(router, live, self._choices, key, asked)
            )
            target, visit.on_end = found
            if target.meaning.kind == "peer":
                return self._from_peer(visit, target, body)
            return self._from_model(visit, target, body)
        except BaseException as error:
            visit.end(None, error)
            raise

    def _from_model(self, visit: Visit, target: Target, body: Intake) -> Relayed:
        model = target.meaning.id
        visit.named(target.asked, model, target.selector)
        server = self._servers(visit.live).models[model]
        guest = visit.as_guest(model)
        if guest is not None:
            return _send(visit, target, server, body, guest, visit.answer_headers(model))
        ask = visit.ask(model, target.selector)
        outcome = visit.router.admit(visit.live, model, visit.client, ask)
        if isinstance(outcome, Lease):
            return _relay(visit, target, server, body, outcome)
        kind = loading.wanted(visit, model)
        if kind is not None:
            return loading.stream(visit, outcome, kind, partial(_relay, visit, target, server, body))
        return _relay(visit, target, server, body, _wait(outcome))

    def _from_peer(self, visit: Visit, target: Target, body: Intake) -> Relayed:
        meaning = target.meaning
        model = f"{meaning.peer}/{meaning.upstream_name}"
        visit.named(target.asked, model, target.selector)
        server = self._servers(visit.live).peers[meaning.peer or ""]
        ask = visit.ask(model, target.selector)
        visit.granted(visit.router.lease_peer(visit.live, model, visit.client, ask))
        name = sending.edit(body, target, server)
        return visit.relay(sending.to_peer(visit, server, visit.path, body, name), visit.answer_headers(model))


def _named(body: Intake) -> str:
    name = body.wanted.model
    if name is None:
        example = '{"model": "..."}'
        text = f"missing model: no model id could be identified; the request must name one, for example {example}"
        raise MissingModel(text, param="model")
    return name


def _wait(pending: Pending) -> Lease:
    with pending:
        lease = pending.wait()
    assert lease is not None
    return lease


def _relay(visit: Visit, target: Target, server: Server, body: Intake, lease: Lease) -> Relayed:
    visit.granted(lease)
    return _send(visit, target, server, body, lease.proxy, visit.answer_headers(lease.model, lease))


def _send(visit: Visit, target: Target, server: Server, body: Intake, proxy: str, headers: list[Header]) -> Relayed:
    name = sending.edit(body, target, server)
    return visit.relay(sending.to_model(visit, server, proxy, visit.path, body, name), headers)

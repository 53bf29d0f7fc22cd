"""The routes that models answer: find the model, take a lease, relay. `answer` knows nothing of Flask."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

from flask import Blueprint, Response, request

from qmflask import intake as intakes
from qmflask.config import ApiKey
from qmflask.errors import MissingModel, ModelNotFound
from qmflask.hangup import Client, client_socket
from qmflask.headers import request_headers
from qmflask.intake import Intake
from qmflask.relay import Outcome, Relayed, open_relay
from qmflask.router import Ask, Lease, Router
from qmflask.upstream import Timeouts, UpstreamRequest
from qmflask.web import auth

POST_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """The model routes over the process's router."""
    routes = Blueprint("inference", __name__)

    def view() -> Response:
        relayed = answer(router(), request.environ)
        return Response(relayed.body, relayed.status, relayed.headers, direct_passthrough=True)

    for path in POST_ROUTES:
        routes.add_url_rule(path, endpoint=path.strip("/").replace("/", "_"), view_func=view, methods=["POST"])
    return routes


def answer(router: Router, environ: Mapping[str, Any]) -> Relayed:
    """Serve one request on a model route; raises QmflaskError or ClientGone before the first byte."""
    live = router.live
    key = auth.accept(live.config, environ)
    recording = router.activity.record(environ)
    recording.key_name = key.name if key else ""
    client = Client()
    try:
        router.take_slot()
    except BaseException as error:
        recording.fail(error)
        raise
    sock = client_socket(environ)
    if sock is not None:
        router.hangups.watch(sock, client)
    body: Intake | None = None
    lease: Lease | None = None
    try:
        body = intakes.take(environ, max_body=live.config.max_body)
        recording.named(body.wanted.model, None)
        model = _model(router, body)
        recording.named(model, model)
        lease = router.lease(live, model, client, Ask(public_id=recording.id, detail=_detail(environ, key)))
        recording.granted(lease.wait_ms, lease.paid, lease.arrival.priority)
        sending = _request(environ, body, lease, key.key if key else None)
        recording.sent(environ["PATH_INFO"], sending.headers, sending.body)
    except BaseException as error:
        recording.fail(error)
        _end(router, sock, body, lease)
        raise

    def end(outcome: Outcome) -> None:
        _end(router, sock, body, lease, outcome)
        recording.end(outcome)

    return open_relay(
        router.upstream,
        sending,
        client,
        on_end=end,
        observer=recording,
        extra_headers=[("X-QM-Model", model)] if model.isascii() and model.isprintable() else [],
    )


def _model(router: Router, body: Intake) -> str:
    name = body.wanted.model
    if name is None:
        raise MissingModel('missing model: the request must name one, for example {"model": "..."}', param="model")
    names = router.live.names
    resolved = names.resolve(name)
    if resolved is None or resolved.kind != "model":
        nearest = names.nearest(name)
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else "; GET /v1/models lists the models"
        raise ModelNotFound(f"no router for requested model {name!r}{hint}", param="model")
    return resolved.id


def _request(environ: Mapping[str, Any], body: Intake, lease: Lease, key: str | None) -> UpstreamRequest:
    model = lease.live.config.models[lease.model]
    query = environ.get("QUERY_STRING", "")
    url = lease.proxy.rstrip("/") + environ["PATH_INFO"] + (f"?{query}" if query else "")
    return UpstreamRequest(
        method=environ["REQUEST_METHOD"],
        url=url,
        headers=request_headers(environ, accepted_key=key, upstream_key=model.upstream_key or None),
        body=body.payload(),
        body_length=body.length,
        timeouts=Timeouts(connect=model.timeouts.connect, response_header=model.timeouts.response_header),
        name=f"model {model.id}",
    )


def _detail(environ: Mapping[str, Any], key: ApiKey | None) -> dict[str, str]:
    """What the page shows of a request; no headers, no body."""
    return {
        "method": environ["REQUEST_METHOD"],
        "path": environ["PATH_INFO"],
        "remote": environ.get("REMOTE_ADDR") or "",
        "key": key.name if key else "",
    }


def _end(
    router: Router,
    sock: socket.socket | None,
    body: Intake | None,
    lease: Lease | None,
    outcome: Outcome | None = None,
) -> None:
    """The request is over, however it ended: give its slot back, stop watching the client, remove a spooled upload, end the lease."""
    router.free_slot()
    if sock is not None:
        router.hangups.unwatch(sock)
    if body is not None:
        body.close()
    if lease is not None:
        lease.end(tool_call=outcome is not None and outcome.tool_call)

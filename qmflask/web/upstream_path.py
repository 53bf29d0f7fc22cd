"""`/upstream/MODEL/...` and `/comfyui/...`: any request, passed on as it is, to the model that the path names (3.5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote

from flask import Blueprint, Response, request

from qmflask import intake as intakes
from qmflask.configuration import Live
from qmflask.errors import Conflict, NotFound
from qmflask.names import Resolved
from qmflask.relay import Relayed
from qmflask.router import Router
from qmflask.states import SERVING
from qmflask.web import auth, sending, targets
from qmflask.web.answers import Passed, redirect
from qmflask.web.derived import PerLive
from qmflask.web.inference import GET_ROUTES, POST_ROUTES
from qmflask.web.raw import raw_path
from qmflask.web.sending import Servers
from qmflask.web.visit import Visit

COMFYUI = "comfyui_auto"
#: Requests that are recorded like those on the model routes themselves, by either of a route's paths.
_RECORDED = {("POST", path) for path in (*POST_ROUTES, *POST_ROUTES.values())} | {("GET", path) for path in GET_ROUTES}


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """Both prefixes, for every method there is."""
    routes = Blueprint("upstream_path", __name__)
    upstream = UpstreamPath()

    # Not routes: these would have to list the methods, and would see only the decoded path.
    @routes.before_app_request
    def take() -> Response | None:
        path = request.environ.get("PATH_INFO", "")
        if path.startswith("/upstream/"):
            return upstream.by_name(router(), request.environ)
        if path == "/comfyui" or path.startswith("/comfyui/"):
            return upstream.comfyui(router(), request.environ)
        return None

    @routes.get("/upstream")
    def page() -> Response:
        return redirect(302, "/ui/models", mount=request.environ.get("SCRIPT_NAME", ""))

    return routes


class UpstreamPath:
    """Serves the two prefixes."""

    def __init__(self) -> None:
        self._servers = PerLive(Servers)

    def by_name(self, router: Router, environ: dict[str, Any]) -> Response:
        """`/upstream/MODEL/rest`."""
        live = router.live
        key = auth.accept(live.config, environ)
        rest = raw_path(environ).partition("/upstream")[2]
        live, (path, found) = targets.in_newest(router, live, lambda live: _find(router, live, rest))
        meaning, name, remaining = found
        asked = name if path == rest else unquote(rest.removesuffix(remaining)).strip("/")
        auth.check_model(key, live.config, asked, meaning)
        if not remaining:
            return _with_slash(environ, f"/upstream/{quote(asked, safe='/:@!$&()*+,;=~')}/")
        if meaning.kind == "model" and live.config.ignores_path(unquote(remaining)):
            _need_ready(router, meaning.id, "the path matches upstream.ignorePaths, which never loads a model")
        return Passed(self._pass(router, live, environ, meaning, remaining))

    def comfyui(self, router: Router, environ: dict[str, Any]) -> Response:
        """`/comfyui/rest`, for the one model of that name."""
        live = router.live
        key = auth.accept(live.config, environ)
        remaining = raw_path(environ).partition("/comfyui")[2]
        meaning = live.names.resolve(COMFYUI)
        if meaning is None or meaning.kind != "model":
            raise NotFound(f"model not found: {COMFYUI} is not configured", param="model")
        auth.check_model(key, live.config, COMFYUI, meaning)
        if not remaining:
            return _with_slash(environ, "/comfyui/")
        if remaining != "/":
            _need_ready(router, meaning.id, "only /comfyui/ can start it")
        return Passed(self._pass(router, live, environ, meaning, remaining))

    def _pass(self, router: Router, live: Live, environ: dict[str, Any], meaning: Resolved, path: str) -> Relayed:
        visit = Visit(router, environ, auth.accept(live.config, environ), path)
        try:
            if (environ["REQUEST_METHOD"], path) in _RECORDED:
                visit.record()
            body = visit.body = intakes.passing(environ, max_body=live.config.max_body)
            if meaning.kind == "peer":
                model = f"{meaning.peer}/{meaning.upstream_name}"
                visit.named(model, model)
                server = self._servers(live).peers[meaning.peer or ""]
                visit.granted(router.lease_peer(live, model, visit.client, visit.ask(model)))
                return visit.relay(sending.to_peer(visit, server, path, body, None), visit.answer_headers(model))
            visit.named(meaning.id, meaning.id)
            server = self._servers(live).models[meaning.id]
            guest = visit.as_guest(meaning.id)
            if guest is not None:
                request = sending.to_model(visit, server, guest, path, body, None)
                return visit.relay(request, visit.answer_headers(meaning.id))
            lease = router.lease(live, meaning.id, visit.client, visit.ask(meaning.id))
            visit.granted(lease)
            if environ["REQUEST_METHOD"] == "GET":
                visit.may_idle(lease, lease.live.config.models[meaning.id].idle_stream_timeout)
            request = sending.to_model(visit, server, lease.proxy, path, body, None)
            return visit.relay(request, visit.answer_headers(meaning.id, lease))
        except BaseException as error:
            visit.end(None, error)
            raise


def _find(router: Router, live: Live, rest: str) -> tuple[str, tuple[Resolved, str, str]]:
    """The path after the profile's pin, and whom it names: (meaning, name, remaining path). Raises NotFound."""
    path = _pinned(router, live, rest)
    found = live.names.split_upstream_path(path)
    if found is None:
        raise _not_found(live, rest, path)
    return path, found


def _pinned(router: Router, live: Live, rest: str) -> str:
    """The path with the longest pin of the active profile that begins it replaced. Raises ModelNotFound."""
    pins = targets.pins_of(router, live)
    if not pins:
        return rest
    parts: list[str] = []
    best: tuple[str, str] | None = None
    at = 1
    while at <= len(rest) and len(parts) < 64:
        end = rest.find("/", at)
        end = len(rest) if end < 0 else end
        if end > at:
            parts.append(unquote(rest[at:end]))
            if "/".join(parts) in pins:
                best = ("/".join(parts), rest[end:])
        at = end + 1
    if best is None:
        return rest
    name, remaining = best
    if not pins[name]:
        raise targets.disabled(name)
    return f"/{quote(pins[name], safe='')}{remaining}"


def _not_found(live: Live, rest: str, meant: str) -> NotFound:
    """The error for a path that begins with no model; `meant` is the path once the profile has had its say."""
    text = f"model not found: no model is named by {unquote(rest)[:200]!r}"
    first = unquote(meant.lstrip("/").partition("/")[0])  # `/upstream%2F` leaves nothing at all
    if first in live.config.selectors:
        text += f"; {first[:200]!r} is a selector, which chooses for requests that name it in their body or query"
    return NotFound(text, param="model")


def _with_slash(environ: dict[str, Any], path: str) -> Response:
    status = 301 if environ["REQUEST_METHOD"] in ("GET", "HEAD") else 308
    return redirect(status, path, environ.get("QUERY_STRING", ""), environ.get("SCRIPT_NAME", ""))


def _need_ready(router: Router, model: str, why: str) -> None:
    row = router.process_of(model)
    if row is None or row.state not in SERVING:
        raise Conflict(f"{model} is not loaded: {why}")

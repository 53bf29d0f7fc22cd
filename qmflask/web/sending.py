"""Makes the request that goes to a model server or peer: address, headers, and the body with its edits (1.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote_plus, unquote_plus, urlsplit

from qmflask import config as resolved
from qmflask import filters
from qmflask.config import Peer
from qmflask.configuration import Live
from qmflask.filters import Filters
from qmflask.headers import request_headers
from qmflask.intake import Intake
from qmflask.upstream import Timeouts, UpstreamRequest
from qmflask.web.targets import Target
from qmflask.web.visit import Visit


@dataclass(frozen=True, slots=True)
class Server:
    """What a model or peer wants done to each request, prepared once; `filters` is None where there is nothing."""

    filters: Filters | None
    use_model_name: str
    timeouts: Timeouts
    upstream_key: str | None
    name: str
    base: str = ""
    host: str | None = None


class Servers:
    """All models and peers of one configuration."""

    def __init__(self, live: Live) -> None:
        self.models: Mapping[str, Server] = {model.id: _of_model(model) for model in live.config.models.values()}
        self.peers: Mapping[str, Server] = {name: _of_peer(peer) for name, peer in live.config.peers.items()}


def _of_model(model: resolved.Model) -> Server:
    times = Timeouts(connect=model.timeouts.connect, response_header=model.timeouts.response_header)
    edits = _filters(model.filters)
    return Server(edits, model.use_model_name, times, model.upstream_key or None, f"model {model.id}")


def _of_peer(peer: Peer) -> Server:
    times = Timeouts(connect=peer.timeouts.connect, response_header=peer.timeouts.response_header)
    base = peer.proxy if "://" in peer.proxy else f"http://{peer.proxy.removeprefix('//')}"
    host = urlsplit(base).netloc.rpartition("@")[2]
    name = f"peer proxy error: peer {peer.id}"
    return Server(_filters(peer.filters), "", times, peer.api_key or None, name, base, host)


def _filters(given: resolved.Filters) -> Filters | None:
    if not (given.strip_params or given.set_params or given.set_params_by_id):
        return None
    return Filters(",".join(given.strip_params), given.set_params, given.set_params_by_id)


def edit(body: Intake, target: Target, server: Server) -> str | None:
    """Apply profile, selector, peer's bare name, `useModelName` and filters to the body.

    Returns the name to put into the query where the body names none. Raises FilterFailed.
    """
    name = target.name if target.name != target.asked else None
    if target.meaning.kind == "peer" and target.meaning.upstream_name != target.name:
        name = target.meaning.upstream_name
    if name is not None:
        body.rename(name)
    if body.kind == "json" and body.body is not None and (server.filters or server.use_model_name):
        edits = server.filters or _NOTHING
        body.body = filters.apply(body.body, edits, target.name, server.use_model_name)
    elif body.kind == "multipart" and server.use_model_name:
        body.rename(server.use_model_name)
    return None if body.kind in ("json", "multipart") else name


_NOTHING = Filters()


def to_model(visit: Visit, server: Server, proxy: str, path: str, body: Intake, name: str | None) -> UpstreamRequest:
    """A request for a local model whose server is at `proxy`; `path` is percent-encoded."""
    return _request(visit, server, proxy, path, body, name)


def to_peer(visit: Visit, server: Server, path: str, body: Intake, name: str | None) -> UpstreamRequest:
    """A request for a peer, which is not told whom we serve."""
    return _request(visit, server, server.base, path, body, name)


def _request(visit: Visit, server: Server, base: str, path: str, body: Intake, name: str | None) -> UpstreamRequest:
    environ = visit.environ
    query = environ.get("QUERY_STRING", "")
    if name is not None and query:
        query = rename_in_query(query, name)
    method = environ["REQUEST_METHOD"]
    headers = request_headers(
        environ,
        accepted_key=visit.key.key if visit.key is not None else None,
        upstream_key=server.upstream_key,
        peer_host=server.host,
        readable=method == "POST",
    )
    if visit.websocket:
        headers += [("Connection", "Upgrade"), ("Upgrade", "websocket")]
    return UpstreamRequest(
        method=method,
        url=join(base, path, query),
        headers=headers,
        body=body.payload(),
        body_length=body.length,
        timeouts=server.timeouts,
        switch=visit.websocket,
        name=server.name,
    )


def join(base: str, path: str, query: str) -> str:
    """A configured address with the request's path and query after its own."""
    address, _, own = base.partition("?")
    query = f"{own}&{query}" if own and query else own or query
    return address.rstrip("/") + path + (f"?{query}" if query else "")


def rename_in_query(query: str, model: str) -> str:
    """A query string with its first `model` replaced and all else kept."""
    pieces = query.split("&")
    for index, piece in enumerate(pieces):
        name = piece.partition("=")[0]
        if unquote_plus(name) == "model":
            pieces[index] = f"{name}={quote_plus(model)}"
            break
    return "&".join(pieces)

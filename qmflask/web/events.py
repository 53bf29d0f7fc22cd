"""`/api/events`: changes as they happen, as server-sent events, the same from every worker (compatibility 3.11)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson
from flask import Blueprint, Response, request

from qmflask.logfiles import ModelLog
from qmflask.logtail import HISTORY, Tail, service_log
from qmflask.router import Router
from qmflask.web import auth
from qmflask.web.inflight import Entries
from qmflask.web.live import Live, Moment
from qmflask.web.streams import Viewer, stream_answer

#: Seconds between two looks, and between two comments that keep idle connections open.
LOOK, KEEP_ALIVE = 0.25, 15.0
#: Ids of new records told one by one; after a longer gap only the newest ones.
MAX_RECORDS = 200

#: What a client gets that does not choose with `types=`; `status` is the page's own.
DEFAULT = ("logData", "modelStatus", "uiConfig", "profileChanged", "inflight", "activity")


def blueprint(router: Callable[[], Router], live: Live | None = None) -> Blueprint:
    """`GET /api/events`."""
    routes = Blueprint("events", __name__)
    shared = live or Live()

    @routes.get("/api/events")
    def events() -> Response:
        here = router()
        auth.require_admin(here.live.config, request.environ)
        wanted = tuple(filter(None, request.args.get("types", "").split(","))) or DEFAULT
        return stream_answer(here, lambda viewer: _events(here, viewer, shared, wanted), "text/event-stream")

    return routes


def message(kind: str, data: Any) -> bytes:
    """One message: `data` travels as JSON inside a JSON string."""
    inner = data if isinstance(data, str) else orjson.dumps(data).decode()
    return b"event:message\ndata:" + orjson.dumps({"type": kind, "data": inner}) + b"\n\n"


def _events(router: Router, viewer: Viewer, live: Live, wanted: tuple[str, ...]) -> Iterator[bytes]:
    feeds = [_FEEDS[kind](router) for kind in _FEEDS if kind in wanted]
    spoke = time.monotonic()
    try:
        while not viewer.ended:
            moment = live.look(router)
            data = b"".join(piece for feed in feeds for piece in feed.news(moment))
            if data:
                spoke = time.monotonic()
                yield data
            elif time.monotonic() - spoke > KEEP_ALIVE:
                spoke = time.monotonic()
                yield b":\n\n"
            viewer.sleep(LOOK)
    finally:
        for feed in feeds:
            feed.close()


class _Feed:
    """One type of message: `news` gives what has changed since the last call, at the first everything."""

    def __init__(self, router: Router) -> None:
        self.router = router

    def news(self, moment: Moment) -> Iterator[bytes]:
        """Messages to send now."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what the feed owns."""


class _Logs(_Feed):
    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._generation = router.live.generation
        self._tails = {
            "proxy": Tail([service_log(router.state / "logs")], HISTORY),
            "upstream": Tail(self._models(), HISTORY),
        }
        self._first = True

    def _models(self) -> list[ModelLog]:
        return [ModelLog(self.router.state / "logs", name) for name in self.router.live.config.models]

    def news(self, moment: Moment) -> Iterator[bytes]:
        if self.router.live.generation != self._generation:
            self._generation = self.router.live.generation
            self._tails["upstream"].extend(self._models())
        for source, tail in self._tails.items():
            data = tail.read()
            if data or self._first:
                yield message("logData", {"source": source, "data": data.decode("utf-8", "replace")})
        self._first = False

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()


class _Changes(_Feed):
    """A value that is sent whole whenever it differs from the last one; the same message to all who look."""

    kind = ""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._version = 0
        self._last = b""

    def value(self, moment: Moment) -> Any:
        """What is sent."""
        raise NotImplementedError

    def news(self, moment: Moment) -> Iterator[bytes]:
        if moment.version == self._version:
            return
        self._version = moment.version
        told = moment.messages.get(self.kind)
        if told is None:
            told = moment.messages[self.kind] = message(self.kind, self.value(moment))
        if told != self._last:
            self._last = told
            yield told


class _Models(_Changes):
    kind = "modelStatus"

    def value(self, moment: Moment) -> Any:
        return [_model_status(entry) for entry in moment.body["models"]] + [
            {"id": peer["id"], "name": "", "description": "", "state": "", "unlisted": False, "peerID": peer["peer"]}
            for peer in moment.body["peers"]
        ]


class _UiConfig(_Changes):
    kind = "uiConfig"

    def value(self, moment: Moment) -> Any:
        return {"activity": {"session_id": list(self.router.live.config.ui.activity.session_id)}}


class _Profile(_Changes):
    kind = "profileChanged"

    def value(self, moment: Moment) -> Any:
        return {"active": moment.body["service"]["profile"]}


class _Status(_Changes):
    """The page's own: the whole overview."""

    kind = "status"

    def value(self, moment: Moment) -> Any:
        return moment.encoded


class _Inflight(_Feed):
    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._entries = Entries(router)
        self._known: dict[str, Any] | None = None

    def news(self, moment: Moment) -> Iterator[bytes]:
        now = {entry["id"]: entry for entry in self._entries.of(moment.status)}
        if self._known is None:
            # `requests` is left out when there are none (compatibility 3.11).
            yield message("inflight", {"operation": "snapshot"} | ({"requests": list(now.values())} if now else {}))
        else:
            for entry in now.values():
                if _without_clock(entry) != _without_clock(self._known.get(entry["id"], {})):
                    yield message("inflight", {"operation": "upsert", "request": entry})
            for gone in self._known.keys() - now.keys():
                yield message("inflight", {"operation": "remove", "id": gone})
        self._known = now


class _Activity(_Feed):
    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._last: int | None = None

    def news(self, moment: Moment) -> Iterator[bytes]:
        newest = moment.last_record
        if self._last is not None:
            for record in range(max(self._last, newest - MAX_RECORDS) + 1, newest + 1):
                yield message("activity", {"id": record})
        self._last = newest


def _without_clock(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "elapsed_ms"}


def _model_status(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A model as clients of llama-swap know it: four states, and no more than they read."""
    state = {"draining": "ready", "failed": "stopped"}.get(entry["state"], entry["state"])
    found = {
        "id": entry["id"],
        "name": entry["name"],
        "description": entry["description"],
        "state": state,
        "unlisted": entry["unlisted"],
        "peerID": "",
    }
    if entry["aliases"]:
        found["aliases"] = entry["aliases"]
    capabilities = {key: value for key, value in entry["capabilities"].items() if value and key != "context"}
    if capabilities:
        found["capabilities"] = capabilities
    if entry["capabilities"]["context"]:
        found["context_length"] = entry["capabilities"]["context"]
    return found


#: In the order of the first burst.
_FEEDS: dict[str, Callable[[Router], _Feed]] = {
    "logData": _Logs,
    "modelStatus": _Models,
    "uiConfig": _UiConfig,
    "profileChanged": _Profile,
    "status": _Status,
    "inflight": _Inflight,
    "activity": _Activity,
}

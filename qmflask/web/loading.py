"""What a streaming client sees while its model loads: reasoning text, or comments that no client shows (3.6).

Both begin the answer at once, which keeps the idle timers of proxies quiet; so what fails afterwards can no longer be
a status and becomes an SSE `error` event, after which the connection is cut.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import orjson

from qmflask.errors import BadGateway, ClientGone, QmflaskError, dismissal
from qmflask.headers import first
from qmflask.leases import Lease, Pending
from qmflask.relay import Relayed, error_event
from qmflask.states import State
from qmflask.store.reading import Place
from qmflask.web.visit import Visit, load_headers

log = logging.getLogger(__name__)

Kind = Literal["reasoning", "comments"]

#: Seconds between two looks at the queue, each of which is one small query.
TICK = 1.0
#: Clients know by these bars where the loading text begins and ends.
_BARS = "\u2501" * 5
#: Reasoning text is for chats alone; comments pass in every event stream.
_CHAT = "/v1/chat/completions"
_STREAMS = (_CHAT, "/v1/completions", "/v1/messages", "/v1/responses")
#: The most of an upstream's error that goes into an event.
_MAX_ERROR = 64 * 1024


def wanted(visit: Visit, model: str) -> Kind | None:
    """Which frames a request that must wait gets: only streams, and only where the model is configured for it."""
    setting = visit.live.config.models[model].send_loading_state
    if not setting or visit.body is None or not visit.body.wanted.stream or visit.environ["REQUEST_METHOD"] != "POST":
        return None
    if setting == "comments":
        return "comments" if visit.path in _STREAMS else None
    return "reasoning" if visit.path == _CHAT else None


def stream(visit: Visit, pending: Pending, kind: Kind, open_answer: Callable[[Lease], Relayed]) -> Relayed:
    """An answer that begins now and continues with the model's once it is ready."""
    # The head has gone by then: an encoding of the model's answer could not be announced any more.
    visit.environ["HTTP_ACCEPT_ENCODING"] = "identity"
    visit.writing()
    headers = [
        ("Content-Type", "text/event-stream"),
        ("Cache-Control", "no-cache"),
        ("X-Accel-Buffering", "no"),
        *visit.answer_headers(pending.arrival.model),
    ]
    return Relayed("200 OK", headers, _LoadingBody(visit, pending, kind, open_answer))


class _LoadingBody:
    """Frames until the lease is there, then the model's own stream."""

    def __init__(self, visit: Visit, pending: Pending, kind: Kind, open_answer: Callable[[Lease], Relayed]) -> None:
        self._visit = visit
        self._pending = pending
        self._open_answer = open_answer
        self._frames: _Comments | _Reasoning = _Comments() if kind == "comments" else _Reasoning(pending.arrival.model)
        self._answer: Iterator[bytes] | None = None
        self._relayed: Relayed | None = None
        self._failed: QmflaskError | None = None
        self._looked = False
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._answer is not None:
            return next(self._answer)
        if self._failed is not None:
            raise ConnectionResetError(errno.ECONNRESET, self._failed.message)
        self._visit.client.writing_since = None
        try:
            data = self._step()
        except ClientGone as gone:
            told = dismissal(str(gone))
            if told is None:
                raise BrokenPipeError(errno.EPIPE, f"the client is {gone}") from None
            data = self._fail(told)
        except QmflaskError as error:
            data = self._fail(error)
        self._visit.client.writing_since = time.monotonic_ns()
        return data

    def close(self) -> None:
        """Leave the queue, or end the model's answer; idempotent."""
        self._closed = True
        with contextlib.ExitStack() as stack:  # whatever one of them raises, the others run
            stack.callback(self._visit.end, None, self._failed)
            if self._relayed is not None:
                stack.callback(getattr(self._relayed.body, "close", lambda: None))
            stack.callback(self._pending.close)

    def __del__(self) -> None:
        # As in relay: a slot and a place in the queue must not depend on the server's promise to call close().
        if not self._closed:
            log.error("a response was dropped without close()")
            self.close()

    def _fail(self, error: QmflaskError) -> bytes:
        self._failed = error
        log.warning("the answer that had begun with loading frames ends: %s", error.message)
        return error_event(error)

    def _step(self) -> bytes:
        if not self._looked:
            self._looked = True
            return self._frames.status(self._pending.place())
        lease = self._pending.wait(TICK)
        if lease is None:
            return self._frames.status(self._pending.place())
        relayed = self._relayed = self._open_answer(lease)
        if not _is_stream(relayed):
            raise _refusal(relayed)
        self._answer = iter(relayed.body)
        return self._frames.end(lease)


class _Comments:
    """`: qm-status: loading 12s`, at each look, changed or not: it is there to keep the connection alive."""

    def status(self, place: Place) -> bytes:
        """The comment for the state now."""
        text = f"loading {_seconds(place)}s" if place.state is State.STARTING else f"waiting {place.position}"
        return f": qm-status: {text}\n\n".encode()

    def end(self, lease: Lease) -> bytes:
        """The last comment, with what would have been headers of the answer if it had waited."""
        headers = "".join(f": {name}: {value}\n" for name, value in load_headers(lease))
        return f": qm-status: ready\n{headers}\n".encode()


class _Reasoning:
    """Text that clients show as the model's thinking: one line per change, a dot for each second without one."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._last = ""

    def status(self, place: Place) -> bytes:
        """The text for the state now."""
        opening = "" if self._last else f"{_BARS}\nqmflask is getting {self._model} ready\n"
        text = "Loading it " if place.state is State.STARTING else f"In the queue at place {place.position} "
        if text == self._last:
            return _reasoning(".")
        newline = "\n" if self._last else ""
        self._last = text
        return _reasoning(opening + newline + text)

    def end(self, lease: Lease) -> bytes:
        """The last text."""
        return _reasoning(f"\nReady after {lease.wait_ms / 1000:.2f} s\n{_BARS}\n \n")


def _reasoning(text: str) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"delta": {"reasoning_content": text}}]}) + b"\n\n"


def _seconds(place: Place) -> int:
    return max(0, (time.monotonic_ns() - place.starting_since) // 1_000_000_000) if place.starting_since else 0


def _is_stream(relayed: Relayed) -> bool:
    return relayed.status.startswith("200") and "text/event-stream" in (first(relayed.headers, "content-type") or "")


def _refusal(relayed: Relayed) -> QmflaskError:
    """The model server's answer that is no stream, as the error it must become now."""
    body = b""
    for data in relayed.body:
        body += data
        if len(body) >= _MAX_ERROR:
            break
    return Refused(relayed.status, body)


class Refused(BadGateway):
    """Raised when the model server answers a stream's request with something else, most often an error of its own."""

    code = "upstream_refused"

    def __init__(self, status: str, body: bytes) -> None:
        given: Any = None
        try:
            given = orjson.loads(body)
        except orjson.JSONDecodeError:
            pass
        self._given = given if isinstance(given, dict) and isinstance(given.get("error"), dict) else None
        super().__init__(f"the model server answered {status}: {body[:500].decode('utf-8', 'replace')}")

    def body(self) -> dict[str, Any]:
        """The model server's own error body where it has one."""
        return self._given if self._given is not None else super().body()

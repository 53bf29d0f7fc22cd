"""One request on a route that a model answers, from arrival to end: what it holds, and that all of it is given back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

from qmflask.config import ApiKey
from qmflask.errors import BadRequest, ClientGone, Conflict, QmflaskError
from qmflask.exchange import set_timeout
from qmflask.hangup import Client, client_socket, read_ahead
from qmflask.headers import Header, asks_for_websocket
from qmflask.intake import Intake
from qmflask.leases import Ask, Lease
from qmflask.recording import Recording
from qmflask.relay import Line, Outcome, Relayed, StreamObserver, open_relay
from qmflask.router import Router
from qmflask.states import SERVING
from qmflask.upstream import UpstreamRequest
from qmflask.web import auth, request_id


class WebsocketUnsupported(QmflaskError):
    """Raised for a websocket where the WSGI server does not show us the client's socket."""

    status, code = 501, "websocket_unsupported"


#: A client that sends nothing of a body it has begun for this long will not send the rest either.
READ_SECONDS = 60.0
#: Longest wait a client may ask for, in ms.
_MAX_WAIT_MS = 24 * 3600 * 1000


class Visit:
    """Owns the request's slot, watched socket, body, lease and record; `end` gives them back, once."""

    def __init__(self, router: Router, environ: dict[str, Any], key: ApiKey | None, path: str) -> None:
        """Raises Overloaded, WebsocketUnsupported, Forbidden. `path` is the path that the model server will see."""
        self.router = router
        self.live = router.live
        self.environ = environ
        self.key = key
        self.path = path
        self.id = environ.get(request_id.KEY) or request_id.assign(environ)
        self.client = Client()
        self.body: Intake | None = None
        self.lease: Lease | None = None
        self.recording: Recording | None = None
        self.on_end: Callable[[], None] | None = None
        self._moves: Moves | None = None
        self._ended = False
        self._sock = client_socket(environ)
        self.websocket = asks_for_websocket(environ)
        if self.websocket:
            self._check_websocket()
        router.take_slot()
        try:
            if self._sock is not None:
                router.hangups.watch(self._sock, self.client)
                set_timeout(self._sock, READ_SECONDS)
        except BaseException:
            router.free_slot()
            raise

    def _check_websocket(self) -> None:
        auth.check_websocket(self.key, self.environ)
        if self._sock is None:
            raise WebsocketUnsupported(
                "websockets need a WSGI server that hands over the connection, as gunicorn does; "
                "under this one, connect to the model server itself: /running tells its address"
            )

    def as_guest(self, model: str) -> str | None:
        """Where a loaded model listens, for an ignored websocket, which takes no lease; None for other requests.

        Raises Conflict, ShuttingDown.
        """
        if not (self.websocket and self.live.config.models[model].compat.ignore_websockets):
            return None
        row = self.router.process_of(model)
        if row is None or row.state not in SERVING or row.proxy is None:
            raise Conflict(f"{model} is not loaded: ignored websocket requests cannot start it")
        self.router.departures.welcome(self.client)
        if self.on_end is not None:  # it is no load on the target that a selector chose
            self.on_end()
            self.on_end = None
        return row.proxy

    def record(self) -> None:
        """Have this request recorded (activity, in-flight list, capture, access line)."""
        self.recording = self.router.activity.record(self.environ)
        if self.key is not None:
            self.recording.key_name = self.key.name

    def named(self, asked: str, model: str | None, selector: str | None = None) -> None:
        """Tell the recording which model it is about; None while that is not known, or there is none."""
        if self.recording is not None:
            self.recording.named(asked, model, **({"selector": selector} if selector is not None else {}))

    def granted(self, lease: Lease) -> None:
        """Take over a lease."""
        self.lease = lease
        if self.recording is not None:
            self.recording.granted(lease.wait_ms, lease.paid, lease.arrival.priority or None)

    def ask(self, model: str, selector: str | None = None) -> Ask:
        """What the queue should know. Raises BadRequest for waits that are no numbers."""
        configured = self.live.config.models.get(model)
        environ = self.environ
        detail: dict[str, Any] = {
            "method": environ["REQUEST_METHOD"],
            "path": self.path,
            "remote": environ.get("REMOTE_ADDR") or "",
        }
        if self.key is not None:
            detail["key"] = self.key.name
        if selector is not None:
            detail["selector"] = selector
        if configured is None:
            return Ask(self.id, detail)
        free = self.key is not None and self.key.admin
        patience, hold = _wait(environ, "X-QM-Patience-Ms"), _wait(environ, "X-QM-Hold-Ms")
        if patience is not None and not free:
            patience = max(patience, configured.patience_ms)
        if hold is not None and not free:
            hold = min(hold, configured.hold_ms)
        return Ask(self.id, detail, patience, hold)

    def may_idle(self, lease: Lease, seconds: float) -> None:
        """This answer may be cut when it moves nothing for so long and its model is wanted gone; 0 = never."""
        if seconds > 0:
            lease.idle_limit, lease.moved_at = int(seconds * 1e9), lease.granted_at
            self._moves = Moves(lease, self.recording)

    def relay(self, sending: UpstreamRequest, headers: Iterable[Header]) -> Relayed:
        """Send the request and relay the answer, whose end is this visit's. Raises like `open_relay`."""
        if self.recording is not None:
            self.recording.sent(self.path, sending.headers, sending.body)
        relayed = open_relay(
            self.router.upstream,
            sending,
            self.client,
            on_end=self.end,
            observer=self.recording if self._moves is None else self._moves,
            extra_headers=headers,
            line=self._line() if self.websocket else None,
        )
        if relayed.small:
            # Most clients close as soon as they have the answer: the watcher would wake for nothing.
            self._unwatch()
        else:
            self.writing()
        return relayed

    def _line(self) -> Line | None:
        environ = self.environ
        return Line(self._sock, lambda: read_ahead(environ)) if self._sock is not None else None

    def writing(self) -> None:
        """A long answer begins: whether its client stalls is for the watcher to say, a timeout would cut slow ones."""
        if self._sock is not None:
            set_timeout(self._sock, None)

    def answer_headers(self, model: str, lease: Lease | None = None) -> list[Header]:
        """Our own headers of an answer: what served it, whether it paid for a load, how long it waited."""
        headers = [("X-QM-Request-Id", self.id), ("X-QM-Model", header_text(model))]
        return headers if lease is None else headers + load_headers(lease)

    def end(self, outcome: Outcome | None = None, error: BaseException | None = None) -> None:
        """Give everything back; idempotent."""
        if self._ended:
            return
        self._ended = True
        try:
            if self.lease is not None:
                tool_call = outcome is not None and outcome.tool_call
                self.lease.end(tool_call=tool_call, answered=self._answered(outcome))
        finally:  # whatever one of them raises, the others run
            self._leave(outcome, error)

    def _answered(self, outcome: Outcome | None) -> bool:
        """Whether the model worked. Errors are no sign of it, nor are pages and health checks under `/upstream`."""
        if outcome is None or outcome.status is None or outcome.first_byte_ns is None:
            return False
        return self.environ["REQUEST_METHOD"] == "POST" and 200 <= outcome.status < 300

    def _leave(self, outcome: Outcome | None, error: BaseException | None) -> None:
        self.router.free_slot()
        self.router.departures.part(self.client)
        request_id.forget()
        if self.on_end is not None:
            self.on_end()
        if self.recording is not None:
            _settle(self.recording, outcome, error)
        try:
            self._unwatch()
        finally:
            if self.body is not None:
                self.body.close()

    def _unwatch(self) -> None:
        """Leave the client's socket alone; what the server still writes is bounded by a timeout."""
        if self._sock is None:
            return
        self.router.hangups.unwatch(self._sock)
        if self._sock.fileno() >= 0:
            set_timeout(self._sock, READ_SECONDS)
        self._sock = None


class Moves:
    """Notes when an answer's bytes moved last, and lets the recording see them."""

    def __init__(self, lease: Lease, then: StreamObserver | None) -> None:
        self._lease = lease
        self._then = then

    def begin(self, status: int, headers: list[Header]) -> None:
        """The head has come."""
        self._lease.moved_at = time.monotonic_ns()
        if self._then is not None:
            self._then.begin(status, headers)

    def feed(self, data: bytes) -> None:
        """Bytes pass."""
        self._lease.moved_at = time.monotonic_ns()
        if self._then is not None:
            self._then.feed(data)


def load_headers(lease: Lease) -> list[Header]:
    """Whether a request paid for a load, and how long it waited."""
    return [("X-QM-Loaded", str(int(lease.paid))), ("X-QM-Wait-Ms", str(round(lease.wait_ms)))]


def _settle(recording: Recording, outcome: Outcome | None, error: BaseException | None) -> None:
    if outcome is not None:
        recording.end(outcome)
    else:
        recording.fail(error or ClientGone("gone"))


def header_text(text: str) -> str:
    """A name as a header's value: `%` and what is no printable ASCII are percent-encoded as UTF-8."""
    plain = text.isascii() and text.isprintable() and "%" not in text
    return text if plain else quote(text, safe=_PRINTABLE, errors="replace")


_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


def _wait(environ: dict[str, Any], header: str) -> int | None:
    text = environ.get("HTTP_" + header.upper().replace("-", "_"))
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise BadRequest(f"{header}: {text!r} is not a number of milliseconds")
    return min(int(text), _MAX_WAIT_MS)

"""Passes a model server's answer to the client: one object per response, which ends its lease in `close()`.

Knows nothing of Flask. What goes wrong before the headers is raised as an error with a status; after them an event
stream gets one `error` event, and every body is then cut, never ended as if it were whole (DESIGN, promise 9).
"""

from __future__ import annotations

import errno
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from qmflask import headers as header_rules
from qmflask.errors import Cancelled, ClientGone, QmflaskError, UpstreamUnreachable, dismissal
from qmflask.hangup import Client
from qmflask.headers import Header
from qmflask.pump import Pump
from qmflask.upstream import Upstream, UpstreamRequest, UpstreamResponse

log = logging.getLogger(__name__)

_TOOL_CALL = re.compile(
    rb'"(?:finish_reason"\s*:\s*"tool_calls|stop_reason"\s*:\s*"tool_use|type"\s*:\s*"function_call)"'
)
#: What OpenAI's streams end with, and how much of a stream's end is kept to see it.
#: Bytes that fit into any socket's send buffer.
SMALL = 8 * 1024
_LAST_EVENT = b"data: [DONE]"
_TAIL = 24
#: Longest match of _TOOL_CALL that is looked for across the border of two chunks.
_SEAM = 64


class StreamObserver(Protocol):
    """Sees the body's bytes as they pass (token counts, captures); must be quick and never raise."""

    def begin(self, status: int, headers: list[Header]) -> None:
        """Called once, before the first bytes."""

    def feed(self, data: bytes) -> None:
        """Called with each piece of the body."""


@dataclass
class Outcome:
    """How a relayed request ended. Times are monotonic ns; `status` is None if no headers came.

    `complete`: the whole body was handed to the server. `error`: what the client was told or would have been.
    `gone`: the reason for which the client was cancelled (`Client.reason`), None while it was there.
    """

    status: int | None = None
    bytes: int = 0
    complete: bool = False
    error: QmflaskError | None = None
    gone: str | None = None
    tool_call: bool = False
    content_type: str = ""
    begin_ns: int = 0
    headers_ns: int | None = None
    first_byte_ns: int | None = None
    end_ns: int = 0


@dataclass
class Relayed:
    """What the view hands to the server. `body` has a `close()`, which must be called.

    `small`: the body is at hand and so short that the kernel takes it from the server in one piece.
    """

    status: str
    headers: list[Header]
    body: Iterable[bytes]
    small: bool = False


@dataclass(frozen=True)
class Line:
    """The client's own connection, for an answer that switches it to another protocol.

    `ahead` takes the bytes that the WSGI server has already read from it beyond the request.
    """

    sock: socket.socket
    ahead: Callable[[], bytes]


def open_relay(
    upstream: Upstream,
    request: UpstreamRequest,
    client: Client,
    *,
    on_end: Callable[[Outcome], None],
    observer: StreamObserver | None = None,
    extra_headers: Iterable[Header] = (),
    line: Line | None = None,
) -> Relayed:
    """Send `request` and give back the answer's status, headers and body.

    `on_end` is called exactly once: from the body's `close()`, or before this function raises. `line` is needed where
    the request asks for a switch: the body of a 101 writes to it, head included, and gives the WSGI server nothing.
    Raises UpstreamUnreachable, UpstreamTimeout, ClientGone, and what reading the request's body raises.
    """
    outcome = Outcome(begin_ns=time.monotonic_ns())
    response: UpstreamResponse | None = None
    try:
        response = upstream.send(request, client)
        outcome.status = response.status
        outcome.headers_ns = time.monotonic_ns()
        outcome.content_type = header_rules.first(response.headers, "content-type") or ""
        if observer is not None:
            observer.begin(response.status, response.headers)
        stream = "text/event-stream" in outcome.content_type.lower()
        short = None if stream or response.status == 101 else response.read_short()
    except BaseException as error:
        if response is not None:
            response.close()
        _note_error(outcome, error)
        _end(outcome, client, on_end)
        raise
    passed = header_rules.response_headers(response.headers, extra_headers, _length(request.method, response, short))
    scan = _scanner(response.headers, outcome)
    body: _Body
    if response.status == 101 and line is not None:
        body = _SwitchedBody(passed, line, response, client, outcome, on_end, observer)
    elif short is not None:
        body = _ShortBody(short, response, client, outcome, on_end, observer, scan)
    else:
        # Amid a compressed stream an event of ours would be noise: it is cut like any other body.
        body = _StreamBody(response, client, outcome, on_end, observer, scan, stream and scan is not None)
    small = short is not None and len(short) <= SMALL
    return Relayed(header_rules.status_line(response.status, response.reason), passed, body, small)


class _Body:
    """What both kinds of body share: telling the observers, and ending once."""

    def __init__(
        self,
        response: UpstreamResponse,
        client: Client,
        outcome: Outcome,
        on_end: Callable[[Outcome], None],
        observer: StreamObserver | None,
        scan: ToolCallScan | None,
    ) -> None:
        self._response = response
        self._client = client
        self._outcome = outcome
        self._on_end = on_end
        self._observer = observer
        self._scan = scan
        self._ended = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        raise NotImplementedError

    def __del__(self) -> None:
        # Servers promise to call close(), yet not if the response's start failed: a lease must not depend on that.
        if not self._ended:
            log.error("a response was dropped without close()")
            self.close()

    def close(self) -> None:
        """Release the upstream's connection and report the outcome; idempotent."""
        if self._ended:
            return
        self._ended = True
        self._client.writing_since = None
        try:
            self._response.close()
        finally:
            if self._scan is not None:
                self._outcome.tool_call = self._scan.found
            _end(self._outcome, self._client, self._on_end)

    def _passing(self, data: bytes) -> None:
        outcome = self._outcome
        now = time.monotonic_ns()
        if outcome.first_byte_ns is None:
            outcome.first_byte_ns = now
        outcome.bytes += len(data)
        if self._scan is not None:
            self._scan.feed(data)
        if self._observer is not None:
            self._observer.feed(data)
        self._client.writing_since = now


class _ShortBody(_Body):
    """A body that was read whole before the headers went out."""

    def __init__(
        self,
        data: bytes,
        response: UpstreamResponse,
        client: Client,
        outcome: Outcome,
        on_end: Callable[[Outcome], None],
        observer: StreamObserver | None,
        scan: ToolCallScan | None,
    ) -> None:
        super().__init__(response, client, outcome, on_end, observer, scan)
        self._data: bytes | None = data
        #: Whether the client was gone when the body was handed over.
        self._left: bool | None = None

    def __next__(self) -> bytes:
        data, self._data = self._data, None
        if not data:
            # A client that left after all of it was written has it all: many close as soon as they have read it.
            self._outcome.complete = not (self._client.gone if self._left is None else self._left)
            raise StopIteration
        self._left = self._client.gone
        self._passing(data)
        return data


class _StreamBody(_Body):
    """A body that passes as it comes. Gives b"" first if nothing is at hand, which lets the headers go out."""

    def __init__(
        self,
        response: UpstreamResponse,
        client: Client,
        outcome: Outcome,
        on_end: Callable[[Outcome], None],
        observer: StreamObserver | None,
        scan: ToolCallScan | None,
        events: bool,
    ) -> None:
        super().__init__(response, client, outcome, on_end, observer, scan)
        self._events = events
        self._begun = False
        self._tail = b""
        self._failed: QmflaskError | None = None

    def __next__(self) -> bytes:
        self._client.writing_since = None
        if not self._begun:
            self._begun = True
            if not self._response.at_hand:
                return b""
        if self._failed is not None:
            raise _Cut(self._failed.message)
        try:
            data = next(self._response)
        except StopIteration:
            self._outcome.complete = True
            self.close()  # before the last chunk: a client that comes back at once must not meet its own slot and lease
            raise
        except ClientGone as gone:
            told = _dismissed(self._outcome, str(gone))
            if told is not None:
                return self._fail(told)
            # Clients close at the last event; some servers end the body a moment after it.
            self._outcome.complete = self._events and _LAST_EVENT in self._tail
            # EPIPE is what servers drop in silence; nothing is left to be told to this client.
            raise BrokenPipeError(errno.EPIPE, f"the client is {gone}") from None
        except QmflaskError as error:
            self._outcome.error = error
            return self._fail(error)
        self._passing(data)
        if self._events:
            self._tail = data[-_TAIL:] if len(data) >= _TAIL else (self._tail + data)[-_TAIL:]
        return data

    def _fail(self, error: QmflaskError) -> bytes:
        """Tell a client that reads events what happened; the next step, or this one for others, cuts."""
        self._failed = error
        log.warning("answer cut after %d bytes: %s", self._outcome.bytes, error.message)
        if not self._events:
            raise _Cut(error.message) from None
        self._client.writing_since = time.monotonic_ns()
        return error_event(error, self._tail)


class _SwitchedBody(_Body):
    """What follows a 101: bytes both ways, in the server's thread but past the server. See `pump`."""

    def __init__(
        self,
        headers: list[Header],
        line: Line,
        response: UpstreamResponse,
        client: Client,
        outcome: Outcome,
        on_end: Callable[[Outcome], None],
        observer: StreamObserver | None,
    ) -> None:
        super().__init__(response, client, outcome, on_end, observer, None)
        self._line = line
        self._head = _switching(response, headers)

    def __next__(self) -> bytes:
        sock = self._line.sock
        far, behind = self._response.take_over()
        sock.sendall(self._head)
        over = Pump(self._client, sock, far, self._moved).run(behind, self._line.ahead())
        reason = None if over else self._client.reason
        _dismissed(self._outcome, reason or "")
        self._outcome.complete = reason in (None, "gone")
        self.close()
        # The server then closes, and lingers for what the client still says: else a reset would take the last bytes.
        raise _Cut("the connection was switched to another protocol and has ended")

    def _moved(self, data: bytes) -> None:
        if data:
            self._passing(data)
        elif self._observer is not None:
            self._observer.feed(b"")


class _Cut(ConnectionResetError):
    """Raised out of a body so that the server cuts the connection instead of ending the body regularly.

    gunicorn drops a reset without writing the last chunk and without a traceback (tests/integration/test_relay.py
    pins both); the failure has been logged here.
    """

    def __init__(self, message: str) -> None:
        super().__init__(errno.ECONNRESET, message)


class ToolCallScan:
    """Looks in passing bytes for the mark of an answer that ended in a tool call, across borders of chunks."""

    def __init__(self) -> None:
        self.found = False
        self._tail = b""

    def feed(self, data: bytes) -> None:
        """Look at the next piece."""
        if self.found:
            return
        seam = self._tail + data[:_SEAM] if self._tail else b""
        self.found = _ends_in_tool_call(data) or (bool(seam) and _ends_in_tool_call(seam))
        self._tail = data[-_SEAM:] if len(data) >= _SEAM else (self._tail + data)[-_SEAM:]


def error_event(error: QmflaskError, before: bytes = b"\n\n") -> bytes:
    """One SSE `error` event with the error's JSON; `before` are the stream's last bytes, to begin on a fresh line."""
    text = json.dumps(error.body(), ensure_ascii=False, separators=(",", ":"))
    fresh = not before or before.endswith((b"\n\n", b"\r\r", b"\r\n\r\n"))
    return (b"" if fresh else b"\n\n") + b"event: error\ndata: " + text.encode() + b"\n\n"


def _ends_in_tool_call(data: bytes) -> bool:
    # The plain searches cost next to nothing; the pattern runs only when one of them hits.
    if b'"tool_calls"' in data or b'"tool_use"' in data or b'"function_call"' in data:
        return _TOOL_CALL.search(data) is not None
    return False


def _scanner(headers: list[Header], outcome: Outcome) -> ToolCallScan | None:
    kind = outcome.content_type.lower()
    if "json" not in kind and "text/event-stream" not in kind:
        return None
    if (header_rules.first(headers, "content-encoding") or "identity").lower() != "identity":
        return None
    return ToolCallScan()


def _length(method: str, response: UpstreamResponse, short: bytes | None) -> int | None:
    """The Content-Length to send: the body's, or for HEAD and 304 what the upstream announces about another one."""
    if method == "HEAD" or response.status == 304:
        announced = header_rules.first(response.headers, "content-length") or ""
        return int(announced) if announced.isascii() and announced.isdigit() and len(announced) < 19 else None
    if response.status == 204:
        return None
    return len(short) if short is not None else response.length


def _switching(response: UpstreamResponse, headers: list[Header]) -> bytes:
    """The head of a 101 as we write it: the server would add what belongs to a body, and drop what this is about."""
    protocol = header_rules.first(response.headers, "upgrade") or "websocket"
    lines = [f"HTTP/1.1 {header_rules.status_line(response.status, response.reason)}"]
    lines += [f"{name}: {value}" for name, value in [*headers, ("Connection", "Upgrade"), ("Upgrade", protocol)]]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _note_error(outcome: Outcome, error: BaseException) -> None:
    if isinstance(error, QmflaskError):
        outcome.error = error
    elif isinstance(error, ClientGone):
        _dismissed(outcome, str(error))
    else:
        outcome.error = UpstreamUnreachable(f"The request failed: {error}")


def _dismissed(outcome: Outcome, reason: str) -> QmflaskError | None:
    """What to tell a client that we ended; noted as an error unless somebody asked for it."""
    told = dismissal(reason)
    if told is not None and not isinstance(told, Cancelled):
        outcome.error = told
    return told


def _end(outcome: Outcome, client: Client, on_end: Callable[[Outcome], None]) -> None:
    outcome.end_ns = time.monotonic_ns()
    if client.gone and not outcome.complete and (outcome.error is None or dismissal(client.reason or "") is None):
        outcome.gone = client.reason  # else the error says it
    on_end(outcome)

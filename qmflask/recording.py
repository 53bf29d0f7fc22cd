"""What one request leaves behind: its record, its access line, its counters and its capture; pure but for the clock.

The request's own thread only notes times and keeps references; everything that costs is done later, in `settle_all`,
by the thread that writes.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from qmflask import usage
from qmflask.accesslog import Access, LineStyle
from qmflask.captures import Allowance, decoded, keeps, pack_capture, redacted
from qmflask.errors import ClientGone, QmflaskError
from qmflask.headers import Header, first
from qmflask.relay import Outcome
from qmflask.store.activity import Record
from qmflask.store.counters import Tally
from qmflask.usage import Tokens, UsageReader

MILLISECOND = 1_000_000
SECOND = 1_000_000_000
#: Sent as if by the status that nginx uses for a client that has left; no client ever reads it.
CLIENT_GONE = 499
#: Bytes of an answer that gather before they are looked at: a stream's thread does next to nothing for an event.
_LOOK = 16 * 1024


class Keeper(Protocol):
    """Who takes finished recordings."""

    def started(self, recording: Recording) -> None:
        """A request has begun."""

    def finished(self, recording: Recording) -> None:
        """It has ended; settle it when there is time."""


class Asked(NamedTuple):
    """What is written of the request's head; None where the server that calls us does not say."""

    method: str | None
    path: str | None
    target: str | None
    protocol: str | None
    agent: str | None
    forwarded: str | None
    real_ip: str | None
    peer: str | None

    @property
    def remote(self) -> str:
        """The client's address: the first of X-Forwarded-For, X-Real-IP, or the peer."""
        forwarded = self.forwarded.split(",")[0].strip() if self.forwarded else ""
        return forwarded or (self.real_ip or "").strip() or self.peer or ""


#: Where a WSGI environ has it.
_ASKED = (
    *("REQUEST_METHOD", "PATH_INFO", "RAW_URI", "SERVER_PROTOCOL", "HTTP_USER_AGENT"),
    *("HTTP_X_FORWARDED_FOR", "HTTP_X_REAL_IP", "REMOTE_ADDR"),
)


def asked(environ: Mapping[str, Any]) -> Asked:
    """What is written of a request's head."""
    return Asked._make(map(environ.get, _ASKED))


class Found(NamedTuple):
    """What is found out of a request that has ended. `readable`: whether its answer's body can be kept."""

    asked: Asked
    status: int
    tokens: Tokens
    message: str | None
    readable: bool


class Recording:
    """Notes what happens to one request. Serves as the relay's observer; each method is quick and never raises.

    The request's thread pays more for each step than the writer, which does the same for many in a row: it only keeps
    references. Yet not to the environ, which would keep all of a request alive until its record is written.
    """

    # What most requests never change is the class's: each assignment costs its thread.
    name: str | None = None
    model: str | None = None
    key_name = ""
    wait_ms: float | None = None
    paid = False
    load_ms: float | None = None
    metadata: dict[str, Any] | None = None
    status: int | None = None
    answer_headers: Sequence[Header] = ()
    _coding = ""
    _reader: UsageReader | None = None
    _outcome: Outcome | None = None
    _error: BaseException | None = None
    _ended = 0
    _request_body: bytes | None = None
    _request_headers: Sequence[Header] = ()
    _unread_size = _read_size = 0
    #: What has been read and is kept for the capture; None: not, or no longer.
    _kept: list[bytes] | None = None
    # Set at the end, and by `read`:
    _head: tuple[str | None, ...]
    _found: Found

    def __init__(self, keeper: Keeper, environ: Mapping[str, Any], capture_limit: int) -> None:
        self._keeper = keeper
        self._environ = environ
        self.id: str = environ.get("qmflask.request_id") or uuid.uuid4().hex
        self.began = time.monotonic_ns()
        self.wall = time.time()
        self.path: str = environ.get("PATH_INFO") or "/"
        self._capture_limit = capture_limit
        self._unread: list[bytes] = []
        keeper.started(self)

    # -- in the request's thread ------------------------------------------------------------------------------

    def named(self, name: str | None, model: str | None, **metadata: Any) -> None:
        """The request names `name`, which is `model` in the configuration (None: it is not there)."""
        self.name, self.model = name, model
        if metadata:
            self._note(metadata)

    def granted(self, wait_ms: float, paid: bool, priority: int | None = None) -> None:
        """It has its lease after `wait_ms`; `paid` says that it waited for a load."""
        self.wait_ms, self.paid = wait_ms, paid
        if priority is not None:
            self._note({"fifo_priority": priority})

    def _note(self, metadata: dict[str, Any]) -> None:
        self.metadata = {**(self.metadata or {}), **metadata}

    def sent(self, path: str, headers: list[Header], body: Any) -> None:
        """What goes upstream: the path there, headers and body (kept for the capture if it is bytes)."""
        self.path = path
        if self._capture_limit:
            self._request_headers = headers
            self._request_body = body if isinstance(body, bytes) else None

    def begin(self, status: int, headers: list[Header]) -> None:
        """The answer's status and headers are here."""
        self.status, self.answer_headers = status, headers

    def feed(self, data: bytes) -> None:
        """The next bytes of the answer."""
        self._unread.append(data)
        self._unread_size += len(data)
        if self._unread_size > _LOOK:
            self._look()

    @property
    def received(self) -> int:
        """Bytes of the answer that have passed."""
        return self._read_size + self._unread_size

    def _look(self) -> None:
        """Read what has come since the last time."""
        if self.status is None:
            return
        data, self._unread, self._unread_size = b"".join(self._unread), [], 0
        self._read_size += len(data)
        if self._reader is None:
            self._coding = first(self.answer_headers, "content-encoding") or ""
            self._reader = UsageReader(self.path, first(self.answer_headers, "content-type") or "", self._coding)
            if self._capture_limit and self.name is not None and self.status == 200 and keeps(self.path)[1]:
                self._kept = []
        self._reader.feed(data)
        if self._kept is not None:
            self._kept.append(data)
            if self.received > self._capture_limit:
                self._kept, self._capture_limit = None, 0

    def end(self, outcome: Outcome) -> None:
        """The answer is over, whole or not."""
        self._outcome = outcome
        self._finish()

    def fail(self, error: BaseException) -> None:
        """The request ended before there was an answer to pass on."""
        self._error = error
        self._finish()

    def _finish(self) -> None:
        if not self._ended:
            self._ended = time.monotonic_ns()
            self._head, self._environ = tuple(map(self._environ.get, _ASKED)), {}
            self._keeper.finished(self)

    # -- for those who watch ----------------------------------------------------------------------------------

    def request_headers(self) -> dict[str, str]:
        """The client's headers, sensitive ones redacted."""
        names = {key[5:].replace("_", "-").title(): str(v) for key, v in self._environ.items() if key[:5] == "HTTP_"}
        return redacted(list(names.items()))

    # -- in the writer's thread -------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the answer: the first thing to be done."""
        self._look()
        status = self._ended_with()
        self._found = Found(Asked._make(self._head), status, *self._read_answer(status))

    @property
    def stored(self) -> bool:
        """Whether the record is one that is kept; else only its line and its counters are."""
        return self.name is not None and self._found.asked.method == "POST"

    def _ended_with(self) -> int:
        outcome, error = self._outcome, self._error
        if isinstance(error, ClientGone) or (outcome is not None and outcome.gone and not outcome.complete):
            return CLIENT_GONE
        if isinstance(error, QmflaskError):
            return error.status
        if outcome is not None and outcome.error is not None:
            return outcome.error.status
        return self.status or 500

    def _read_answer(self, status: int) -> tuple[Tokens, str | None, bool]:
        """Token counts, an error message if it failed, and whether the body can be kept."""
        error = self._error or (self._outcome.error if self._outcome is not None else None)
        if isinstance(error, QmflaskError):
            return usage.NOTHING, error.message, True
        reader = self._reader
        if status == CLIENT_GONE:
            reason = self._outcome.gone if self._outcome is not None else str(self._error)
            tokens = reader.tokens() if reader is not None else usage.NOTHING
            return tokens, "cancelled" if reason == "cancelled" else f"the client is {reason or 'gone'}", True
        if error is not None or reader is None:
            return usage.NOTHING, str(error) if error else None, True
        if reader.decode_failed and self.received:
            return usage.NOTHING, "response decode failed", False
        if status != 200:
            return usage.NOTHING, usage.error_message(status, reader.body()), True
        return reader.tokens(), None, True

    def capture(self, allowance: Allowance) -> bytes | None:
        """What is kept to be looked at, packed; None if nothing is. Failures are kept whatever is allowed."""
        if not (self._capture_limit and self._request_headers and self._found.readable and self.stored):
            return None
        if not allowance.take(self._ended) and self._found.status < 400:
            return None
        packed = pack_capture(
            self.path,
            redacted(self._request_headers),
            (self._request_body or b"") if keeps(self.path)[0] else b"",
            redacted(self.answer_headers, "content-encoding" if self._coding else ""),
            decoded(b"".join(self._kept or ()), self._coding, self._capture_limit),
        )
        return packed if len(packed) <= self._capture_limit else None

    def record(self, has_capture: bool) -> Record:
        """The record."""
        asked, status, tokens, message, _ = self._found
        outcome = self._outcome
        first_byte = outcome.first_byte_ns if outcome is not None else None
        return Record(  # by position: names would cost more than all the values
            int(self.wall),
            self.id,
            self.model or self.name or "",
            self.path,
            status,
            outcome.content_type if outcome is not None else "",
            tokens.input_tokens,
            tokens.output_tokens,
            tokens.cache_tokens,
            tokens.prompt_per_second,
            tokens.tokens_per_second,
            tokens.draft_tokens,
            tokens.draft_acc_tokens,
            round(max((self._ended - self.began) / MILLISECOND, tokens.reported_ms)),
            self.wait_ms,
            self.load_ms,
            (first_byte - self.began) / MILLISECOND if first_byte is not None else None,
            self.received,
            self.key_name,
            asked.remote,
            message,
            json.dumps(self.metadata) if self.metadata else None,
            int(has_capture),
        )

    @property
    def route(self) -> str:
        """The route as a label: the path where it is one of ours, without what varies."""
        path = self._found.asked.path or "/"
        return "/upstream" if path.startswith("/upstream/") else path

    def line(self, style: LineStyle, record: Record) -> bytes:
        """The access line."""
        model = record.model
        more = {
            "model": model or None,
            "key": record.key_name or None,
            "wait_ms": record.wait,
            "load_ms": record.load,
            "ttfb_ms": record.first_byte,
            "tokens_in": record.prompt if record.prompt > 0 else None,
            "tokens_out": record.generated if record.generated > 0 else None,
            "tokens_cached": record.cached if record.cached > 0 else None,
            "asked": self.name if self.name != model else None,
            "error": record.error_msg,
        }
        size, took = record.bytes, (self._ended - self.began) / MILLISECOND
        return style.line(self.wall, access(self._found.asked, record.resp_status_code, size, took, self.id, more))


def access(
    asked: Asked, status: int, size: int, took_ms: float, request: str = "-", more: Mapping[str, Any] | None = None
) -> Access:
    """What an access line shows."""
    return Access(
        asked.remote,
        asked.method or "",
        asked.target or asked.path or "",
        asked.protocol or "",
        status,
        size,
        asked.agent or "",
        took_ms,
        request,
        more or {},
    )


class Settled(NamedTuple):
    """What is written of some requests: records with their captures, and access lines."""

    rows: list[tuple[Record, bytes | None]]
    lines: list[bytes]


def settle_all(recordings: Sequence[Recording], tally: Tally, style: LineStyle | None, allowance: Allowance) -> Settled:
    """Work out all that is written, and count it; lines only where there is a style, captures as far as is allowed.

    One step for all before the next one: the same code again and again stays in the processor's caches, which makes
    it a third cheaper than all steps for one.
    """
    for recording in recordings:
        recording.read()
    captures = [recording.capture(allowance) for recording in recordings]
    records = [recording.record(capture is not None) for recording, capture in zip(recordings, captures, strict=True)]
    count(tally, recordings, records)
    rows = [
        (record, capture)
        for recording, record, capture in zip(recordings, records, captures, strict=True)
        if recording.stored
    ]
    if style is None:
        return Settled(rows, [])
    return Settled(rows, [recording.line(style, record) for recording, record in zip(recordings, records, strict=True)])


def count(tally: Tally, recordings: Sequence[Recording], records: Sequence[Record]) -> None:
    """Add requests to the counters; most are alike in all labels, and are added up first."""
    alike: dict[tuple[str, str, int, str], list[Record]] = {}
    for recording, record in zip(recordings, records, strict=True):
        # No label for names that are no models: clients must not be able to make labels.
        key = (recording.model or "", recording.route, record.resp_status_code, record.key_name)
        alike.setdefault(key, []).append(record)
    for (model, route, status, key_name), some in alike.items():
        tally.add("requests", (model, route, str(status), key_name), len(some))
        tally.add("response_bytes", (model,), sum([record.bytes for record in some]))
        tally.observe("request_duration_seconds", (model, route), *[record.duration / 1000 for record in some])
        waits = [record.wait / 1000 for record in some if record.wait is not None]
        if waits:
            tally.observe("wait_seconds", (model,), *waits)
        firsts = [record.first_byte / 1000 for record in some if record.first_byte is not None]
        if firsts:
            tally.observe("time_to_first_byte_seconds", (model, route), *firsts)
        for direction, tokens in (
            ("in", sum([record.prompt for record in some if record.prompt > 0])),
            ("out", sum([record.generated for record in some if record.generated > 0])),
            ("cached", sum([record.cached for record in some if record.cached > 0])),
        ):
            if tokens:
                tally.add("tokens", (model, direction), tokens)

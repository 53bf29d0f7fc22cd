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
from qmflask.captures import decoded, keeps, pack_capture, redacted
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


class Recording:
    """Notes what happens to one request. Serves as the relay's observer; each method is quick and never raises."""

    def __init__(self, keeper: Keeper, environ: Mapping[str, Any], capture_limit: int) -> None:
        self._keeper = keeper
        self._environ = environ
        self.id: str = environ.get("qmflask.request_id") or uuid.uuid4().hex
        self.began = time.monotonic_ns()
        self.wall = time.time()
        self.path: str = environ.get("PATH_INFO") or "/"
        self.name: str | None = None
        self.model: str | None = None
        self.key_name = ""
        self.wait_ms: float | None = None
        self.paid = False
        self.load_ms: float | None = None
        self.metadata: dict[str, Any] = {}
        self.received = 0
        self.status: int | None = None
        self.answer_headers: list[Header] = []
        self._reader: UsageReader | None = None
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._ended = 0
        self._capture_limit = capture_limit
        self._request_body: bytes | None = None
        self._request_headers: list[Header] = []
        self._unread: list[bytes] = []
        self._unread_size = 0
        #: What has been read and is kept for the capture; None: not, or no longer.
        self._kept: list[bytes] | None = None
        self._readable = False
        self._record: Record
        keeper.started(self)

    # -- in the request's thread ------------------------------------------------------------------------------

    def named(self, name: str | None, model: str | None, **metadata: Any) -> None:
        """The request names `name`, which is `model` in the configuration (None: it is not there)."""
        self.name, self.model = name, model
        self.metadata.update(metadata)

    def granted(self, wait_ms: float, paid: bool, priority: int | None = None) -> None:
        """It has its lease after `wait_ms`; `paid` says that it waited for a load."""
        self.wait_ms, self.paid = wait_ms, paid
        if priority is not None:
            self.metadata["fifo_priority"] = priority

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
        size = len(data)
        self.received += size
        self._unread.append(data)
        self._unread_size += size
        if self._unread_size > _LOOK:
            self._look()

    def _look(self) -> None:
        """Read what has come since the last time."""
        if self.status is None:
            return
        data, self._unread, self._unread_size = b"".join(self._unread), [], 0
        if self._reader is None:
            kind = first(self.answer_headers, "content-type") or ""
            self._reader = UsageReader(self.path, kind, first(self.answer_headers, "content-encoding") or "")
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
            self._keeper.finished(self)

    # -- for those who watch ----------------------------------------------------------------------------------

    def request_headers(self) -> dict[str, str]:
        """The client's headers, sensitive ones redacted."""
        names = {key[5:].replace("_", "-").title(): str(v) for key, v in self._environ.items() if key[:5] == "HTTP_"}
        return redacted(list(names.items()))

    # -- in the writer's thread -------------------------------------------------------------------------------

    def settle(self) -> Record:
        """Read the answer and work out the record."""
        self._look()
        tokens, message, self._readable = self._read_answer()
        self._record = self._recorded(self._status(), tokens, message)
        return self._record

    @property
    def stored(self) -> bool:
        """Whether the record is one that is kept; else only its line and its counters are."""
        return self.name is not None and self._posted()

    def _posted(self) -> bool:
        return bool(self._environ.get("REQUEST_METHOD") == "POST")

    def _status(self) -> int:
        outcome, error = self._outcome, self._error
        if isinstance(error, ClientGone) or (outcome is not None and outcome.gone and not outcome.complete):
            return CLIENT_GONE
        if isinstance(error, QmflaskError):
            return error.status
        if outcome is not None and outcome.error is not None:
            return outcome.error.status
        return self.status or 500

    def _read_answer(self) -> tuple[Tokens, str | None, bool]:
        """Token counts, an error message if it failed, and whether the body can be kept."""
        error = self._error or (self._outcome.error if self._outcome is not None else None)
        if isinstance(error, QmflaskError):
            return usage.NOTHING, error.message, True
        status, reader = self._status(), self._reader
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

    def _recorded(self, status: int, tokens: Tokens, message: str | None) -> Record:
        outcome = self._outcome
        first_byte = outcome.first_byte_ns if outcome is not None else None
        return Record(
            time=int(self.wall),
            request=self.id,
            model=self.model or self.name or "",
            req_path=self.path,
            resp_status_code=status,
            resp_content_type=outcome.content_type if outcome is not None else "",
            prompt=tokens.input_tokens,
            generated=tokens.output_tokens,
            cached=tokens.cache_tokens,
            prompt_speed=tokens.prompt_per_second,
            gen_speed=tokens.tokens_per_second,
            drafted=tokens.draft_tokens,
            accepted=tokens.draft_acc_tokens,
            duration=round(max((self._ended - self.began) / MILLISECOND, tokens.reported_ms)),
            wait=self.wait_ms,
            load=self.load_ms,
            first_byte=(first_byte - self.began) / MILLISECOND if first_byte is not None else None,
            bytes=self.received,
            key_name=self.key_name,
            remote=remote_of(self._environ),
            error_msg=message,
            metadata=json.dumps(self.metadata) if self.metadata else None,
        )

    @property
    def route(self) -> str:
        """The route as a label: the path where it is one of ours, without what varies."""
        path = str(self._environ.get("PATH_INFO") or "/")
        return "/upstream" if path.startswith("/upstream/") else path

    def capture(self) -> bytes | None:
        """What is kept to be looked at, packed; None if nothing is. After `settle`."""
        if not (self._capture_limit and self._request_headers and self._readable and self.stored):
            return None
        answer = decoded(
            b"".join(self._kept or ()), first(self.answer_headers, "content-encoding") or "", self._capture_limit
        )
        packed = pack_capture(
            self.path,
            redacted(self._request_headers),
            (self._request_body or b"") if keeps(self.path)[0] else b"",
            redacted(self.answer_headers, "content-encoding"),
            answer,
        )
        if len(packed) > self._capture_limit:
            return None
        self._record.has_capture = 1
        return packed

    def line(self, style: LineStyle) -> bytes:
        """The access line. After `settle`."""
        environ, record = self._environ, self._record
        return style.line(
            self.wall,
            Access(
                remote=record.remote,
                method=str(environ.get("REQUEST_METHOD") or ""),
                target=str(environ.get("RAW_URI") or environ.get("PATH_INFO") or ""),
                protocol=str(environ.get("SERVER_PROTOCOL") or ""),
                status=record.resp_status_code,
                bytes=record.bytes,
                agent=str(environ.get("HTTP_USER_AGENT") or ""),
                duration_ms=(self._ended - self.began) / MILLISECOND,
                id=self.id,
                more={
                    "model": record.model or None,
                    "key": record.key_name or None,
                    "wait_ms": record.wait,
                    "load_ms": record.load,
                    "ttfb_ms": record.first_byte,
                    "tokens_in": record.prompt if record.prompt > 0 else None,
                    "tokens_out": record.generated if record.generated > 0 else None,
                    "tokens_cached": record.cached if record.cached > 0 else None,
                    "asked": self.name if self.name != record.model else None,
                    "error": record.error_msg,
                },
            ),
        )


def remote_of(environ: Mapping[str, Any]) -> str:
    """The client's address: the first of X-Forwarded-For, X-Real-IP, or the peer."""
    forwarded = str(environ.get("HTTP_X_FORWARDED_FOR") or "").split(",")[0].strip()
    return forwarded or str(environ.get("HTTP_X_REAL_IP") or "").strip() or str(environ.get("REMOTE_ADDR") or "")


class Settled(NamedTuple):
    """What is written of some requests: records with their captures, and access lines."""

    rows: list[tuple[Record, bytes | None]]
    lines: list[bytes]


def settle_all(recordings: Sequence[Recording], tally: Tally, style: LineStyle | None) -> Settled:
    """Work out all that is written, and count it; lines only where there is a style.

    One step for all before the next one: the same code again and again stays in the processor's caches, which makes
    it a third cheaper than all steps for one.
    """
    records = [recording.settle() for recording in recordings]
    for recording, record in zip(recordings, records, strict=True):
        count(tally, recording.route, recording.model or "", record)
    captures = [recording.capture() for recording in recordings]
    rows = [
        (record, capture)
        for recording, record, capture in zip(recordings, records, captures, strict=True)
        if recording.stored
    ]
    return Settled(rows, [recording.line(style) for recording in recordings] if style is not None else [])


def count(tally: Tally, route: str, model: str, record: Record) -> None:
    """Add a request to the counters; `model` is empty for names that are no models, which would make labels."""
    tally.add("requests", (model, route, str(record.resp_status_code), record.key_name))
    tally.add("response_bytes", (model,), record.bytes)
    tally.observe("request_duration_seconds", (model, route), record.duration / 1000)
    if record.first_byte is not None:
        tally.observe("time_to_first_byte_seconds", (model, route), record.first_byte / 1000)
    if record.wait is not None:
        tally.observe("wait_seconds", (model,), record.wait / 1000)
    for direction, tokens in (("in", record.prompt), ("out", record.generated), ("cached", record.cached)):
        if tokens > 0:
            tally.add("tokens", (model, direction), tokens)

"""What one request leaves behind: its record, its access line, its counters and its capture; pure but for the clock.

The request's own thread only notes times and keeps references; everything that costs is done later, in `settle`,
by the thread that writes.
"""

from __future__ import annotations

import json
import re
import time
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from qmflask import usage
from qmflask.errors import ClientGone, QmflaskError
from qmflask.headers import Header, first
from qmflask.journal import one_line, timestamp
from qmflask.relay import Outcome
from qmflask.store.activity import Record
from qmflask.store.counters import Tally
from qmflask.usage import Tokens, UsageReader

MILLISECOND = 1_000_000
SECOND = 1_000_000_000
#: Sent as if by the status that nginx uses for a client that has left; no client ever reads it.
CLIENT_GONE = 499
REDACTED = "[REDACTED]"
SENSITIVE = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key"})
#: Captures above this size are worth packing.
_PACK_ABOVE = 4096

#: One word that needs no quotes in a text line.
_PLAIN = re.compile(r"[\w.:/@+-]+")

#: path -> (keep the request's body, keep the answer's body); everything else keeps both (compatibility 6.3).
_KEEPS = {
    "/v1/audio/speech": (True, False),
    "/v1/audio/voices": (False, True),
    "/v1/audio/transcriptions": (False, True),
    "/v1/images/generations": (True, False),
    "/v1/images/edits": (False, False),
    "/sdapi/v1/txt2img": (True, False),
    "/sdapi/v1/img2img": (False, False),
}


class Keeper(Protocol):
    """Who takes finished recordings."""

    def started(self, recording: Recording) -> None:
        """A request has begun."""

    def finished(self, recording: Recording) -> None:
        """It has ended; settle it when there is time."""


@dataclass(frozen=True)
class Settled:
    """What is written of one request: `record` is None for what only the access log shows."""

    record: Record | None
    capture: bytes | None
    line: bytes


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
        self._pieces: list[bytes] | None = None
        self._kept = 0
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
        kind = first(headers, "content-type") or ""
        self._reader = UsageReader(self.path, kind, first(headers, "content-encoding") or "")
        if self._capture_limit and self.name is not None and status == 200 and _keeps(self.path)[1]:
            self._pieces = []

    def feed(self, data: bytes) -> None:
        """The next bytes of the answer."""
        self.received += len(data)
        if self._reader is not None:
            self._reader.feed(data)
        if self._pieces is not None:
            self._kept += len(data)
            if self._kept > self._capture_limit:
                self._pieces = None
                self._capture_limit = 0
            else:
                self._pieces.append(data)

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

    def settle(self, tally: Tally, style: LineStyle) -> Settled:
        """Work out record, counters, capture and access line."""
        tokens, message, readable = self._read_answer()
        status = self._status()
        duration = max((self._ended - self.began) / MILLISECOND, tokens.reported_ms)
        record = self._record(status, tokens, message, duration)
        self._count(tally, record)
        capture = self._capture() if self.name is not None and readable and self._posted() else None
        stored = None
        if self.name is not None and self._posted():
            stored = record if capture is None else _with_capture(record)
        return Settled(stored, capture, self._line(record, style))

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

    def _record(self, status: int, tokens: Tokens, message: str | None, duration: float) -> Record:
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
            duration=round(duration),
            wait=self.wait_ms,
            load=self.load_ms,
            first_byte=(first_byte - self.began) / MILLISECOND if first_byte is not None else None,
            bytes=self.received,
            key_name=self.key_name,
            remote=remote_of(self._environ),
            error_msg=message,
            metadata=json.dumps(self.metadata) if self.metadata else None,
        )

    def _count(self, tally: Tally, record: Record) -> None:
        model, route = self.model or "", self.route
        tally.add("requests", (model, route, str(record.resp_status_code), record.key_name))
        tally.add("response_bytes", (model,), self.received)
        tally.observe("request_duration_seconds", (model, route), record.duration / 1000)
        if record.first_byte is not None:
            tally.observe("time_to_first_byte_seconds", (model, route), record.first_byte / 1000)
        if record.wait is not None:
            tally.observe("wait_seconds", (model,), record.wait / 1000)
        for direction, tokens in (("in", record.prompt), ("out", record.generated), ("cached", record.cached)):
            if tokens > 0:
                tally.add("tokens", (model, direction), tokens)

    @property
    def route(self) -> str:
        """The route as a label: the path where it is one of ours, without what varies."""
        path = str(self._environ.get("PATH_INFO") or "/")
        return "/upstream" if path.startswith("/upstream/") else path

    def _capture(self) -> bytes | None:
        if not self._capture_limit or not self._request_headers:
            return None
        keeps_request, keeps_answer = _keeps(self.path)
        answer = b"".join(self._pieces or []) if keeps_answer else b""
        headers = [(n, v) for n, v in self.answer_headers if n.lower() != "content-encoding"]
        packed = pack_capture(
            self.path,
            redacted(self._request_headers),
            (self._request_body or b"") if keeps_request else b"",
            redacted(headers),
            _decoded(answer, first(self.answer_headers, "content-encoding") or ""),
        )
        return packed if len(packed) <= self._capture_limit else None

    def _line(self, record: Record, style: LineStyle) -> bytes:
        environ = self._environ
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


@dataclass(slots=True)
class Access:
    """One line of the access log."""

    remote: str
    method: str
    target: str
    protocol: str
    status: int
    bytes: int
    agent: str
    duration_ms: float
    id: str
    more: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LineStyle:
    """How access lines look: text with `logTimeFormat`, or one JSON object a line."""

    time_format: str = ""
    as_json: bool = False

    def line(self, when: float, access: Access) -> bytes:
        """One whole line. The query is left out of neither form; bodies are in none."""
        more = {name: _short(value) for name, value in access.more.items() if value is not None}
        if self.as_json:
            row = {
                "time": when,
                "level": "info",
                "id": access.id,
                "remote": access.remote,
                "method": access.method,
                "target": access.target,
                "status": access.status,
                "bytes": access.bytes,
                "agent": access.agent,
                "duration_ms": _short(access.duration_ms),
            }
            return json.dumps({**row, **more}).encode() + b"\n"
        request = f"{access.method} {access.target} {access.protocol}"
        tail = "".join(f" {name}={_word(value)}" for name, value in more.items())
        text = (
            f"{timestamp(self.time_format, when)}[INFO] {one_line(access.remote)} {_quoted(request)} {access.status}"
            f" {access.bytes} {_quoted(access.agent)} {access.duration_ms:.1f}ms id={access.id}{tail}\n"
        )
        return text.encode("utf-8", "backslashreplace")


def remote_of(environ: Mapping[str, Any]) -> str:
    """The client's address: the first of X-Forwarded-For, X-Real-IP, or the peer."""
    forwarded = str(environ.get("HTTP_X_FORWARDED_FOR") or "").split(",")[0].strip()
    return forwarded or str(environ.get("HTTP_X_REAL_IP") or "").strip() or str(environ.get("REMOTE_ADDR") or "")


def redacted(headers: list[Header]) -> dict[str, str]:
    """One value per header, the first, with keys and cookies hidden."""
    found: dict[str, str] = {}
    for name, value in headers:
        found.setdefault(name, REDACTED if name.lower() in SENSITIVE else value)
    return found


def pack_capture(
    path: str, request_headers: Mapping[str, str], request: bytes, answer_headers: Mapping[str, str], answer: bytes
) -> bytes:
    """A capture as stored: a flag byte, then (perhaps packed) a JSON head with lengths, and both bodies."""
    head = orjson.dumps([path, request_headers, len(request), answer_headers, len(answer)])
    body = len(head).to_bytes(4, "big") + head + request + answer
    return b"z" + zlib.compress(body, 1) if len(body) > _PACK_ABOVE else b"-" + body


def unpack_capture(data: bytes) -> tuple[str, dict[str, str], bytes, dict[str, str], bytes]:
    """What `pack_capture` was given."""
    body = zlib.decompress(data[1:]) if data[:1] == b"z" else data[1:]
    end = 4 + int.from_bytes(body[:4], "big")
    path, request_headers, length, answer_headers, _ = orjson.loads(body[4:end])
    return path, request_headers, body[end : end + length], answer_headers, body[end + length :]


def _keeps(path: str) -> tuple[bool, bool]:
    return _KEEPS.get(path, (True, True))


def _decoded(body: bytes, coding: str) -> bytes:
    coding = coding.strip().lower()
    if coding not in ("gzip", "x-gzip", "deflate"):
        return body
    try:
        return zlib.decompress(body, 31 if "gzip" in coding else 15)
    except zlib.error:
        return b""


def _with_capture(record: Record) -> Record:
    record.has_capture = 1
    return record


def _short(value: Any) -> Any:
    return round(value, 1) if isinstance(value, float) else value


def _word(value: Any) -> str:
    """A value in a text line: bare where it is one plain word, else quoted."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else _quoted(text)


def _quoted(text: str) -> str:
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return json.dumps(one_line(text), ensure_ascii=False)

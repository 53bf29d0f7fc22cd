"""Reads token counts and speeds from answers, whole or streamed, and a message from failed ones.

Bytes in, values out. Rules: compatibility 6.1 and 6.2. Streams are looked into only where a counter is named.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson

#: Bytes of a body or of one event's line that are kept to be read; longer ones are not counted.
MAX_KEPT = 8 * 1024 * 1024
#: The same for answers that do not call themselves JSON: enough for an error message.
MAX_OTHER = 64 * 1024
MAX_MESSAGE = 500
#: Bytes at the beginning and at the end of a stream in which counters are looked for: there servers put them, and the
#: last ones count. An event that reaches into the end is read whole.
STREAM_HEAD, STREAM_TAIL = 4 * 1024, 8 * 1024
#: Below it each whole number is a float, too.
_EXACT = 2**53

_COUNTERS = (b'"usage"', b'"timings"', b'"metrics"')


class Tokens(NamedTuple):
    """Counts and tokens per second of one answer; -1 = not known. All zero where an answer has no counters."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_tokens: int = 0
    prompt_per_second: float = 0
    tokens_per_second: float = 0
    draft_tokens: int = 0
    draft_acc_tokens: int = 0
    #: ms of work the server itself reports, 0 if it does not: a record's duration is at least this.
    reported_ms: float = 0


NOTHING = Tokens()


class UsageReader:
    """Collects what counts from an answer as its bytes pass; `tokens()` at the end.

    Never raises on what a server sends. Compressed answers are decoded (gzip, deflate) up to `MAX_KEPT` bytes.
    """

    def __init__(self, path: str, content_type: str = "", content_encoding: str = "") -> None:
        self._path = path
        self._stream, self._limit, self._encoded = _form(content_type, content_encoding)
        self._decoder = _decoder(content_encoding) if self._encoded else None
        self.decode_failed = self._encoded and self._decoder is None
        self._counts = _Counts()
        self._rest = b""
        self._head_left = STREAM_HEAD
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._kept: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        if self._encoded:
            data = self._decode(data)
        if not self._stream:
            self._keep(data)
            return
        head, data = data[: self._head_left], data[self._head_left :]
        if head:
            self._head_left -= len(head)
            self._read_lines(head)
        if data:
            self._keep_tail(data)

    def _keep(self, data: bytes) -> None:
        if self._size <= self._limit:
            self._size += len(data)
            self._kept.append(data)
            if self._size > self._limit:  # a cut body is no JSON; keep only what a message may be read from
                self._kept = [b"".join(self._kept)[:MAX_OTHER]]

    def tokens(self) -> Tokens:
        """The counts of all that was fed."""
        if self._stream:
            self._read_tail()
            self._event_line(self._rest)
            return self._counts.tokens()
        if self._size > self._limit:
            return NOTHING
        return tokens_of(self._path, b"".join(self._kept))

    def body(self) -> bytes:
        """A body that is no stream: all of it if it was short enough to be read, else its start."""
        return b"".join(self._kept)

    def _decode(self, data: bytes) -> bytes:
        if self._decoder is None or self.decode_failed:
            return b""
        try:
            return bytes(self._decoder.decompress(data, MAX_KEPT))
        except zlib.error:
            self.decode_failed = True
            return b""

    def _keep_tail(self, data: bytes) -> None:
        """Keep the last bytes of a stream, from a line's beginning on."""
        tail = self._tail
        if not tail and self._rest:
            tail.append(self._rest)
            self._tail_size, self._rest = len(self._rest), b""
        tail.append(data)
        self._tail_size += len(data)
        # The first piece can go when the line that ends in the second is no part of the stream's end.
        while len(tail) > 1 and 0 <= tail[1].find(b"\n") < self._tail_size - len(tail[0]) - STREAM_TAIL:
            self._tail_size -= len(tail.popleft())
        if self._tail_size > MAX_KEPT:  # one line without end
            tail.clear()
            self._tail_size = 0

    def _read_tail(self) -> None:
        data = b"".join(self._tail)
        self._tail.clear()
        self._read_lines(data[data.rfind(b"\n", 0, max(0, len(data) - STREAM_TAIL)) + 1 :])

    def _read_lines(self, data: bytes) -> None:
        """Look into the lines that name a counter; nearly all do not, and cost next to nothing."""
        if self._rest:
            data = self._rest + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._rest = data[end:] if len(data) - end <= MAX_KEPT else b""
        for line in _lines_with_counters(data[:end]):
            self._event_line(line)

    def _event_line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._counts.add_event(_loads(line[5:].strip()))


def tokens_of(path: str, body: bytes) -> Tokens:
    """The counts of a whole JSON answer; `path` as it was sent upstream."""
    document = _loads(body)
    counts = _Counts()
    if isinstance(document, list) and path.startswith("/infill") and document:
        last = document[-1]
        document = {"timings": last.get("timings")} if isinstance(last, dict) else None
    if isinstance(document, dict):
        counts.add_usage(document.get("usage"))
        counts.add_speeds(document)
    return counts.tokens()


def tokens_of_stream(body: bytes) -> Tokens:
    """The counts of a whole event stream."""
    reader = UsageReader("", "text/event-stream")
    reader.feed(body)
    return reader.tokens()


def error_message(status: int, body: bytes) -> str:
    """What a failed answer says: the first text among error.message, error, message, detail, else the status."""
    document = _loads(body)
    if isinstance(document, dict):
        error = document.get("error")
        nested = error.get("message") if isinstance(error, dict) else None
        for text in (nested, error, document.get("message"), document.get("detail")):
            if isinstance(text, str) and text.strip():
                text = text.strip()
                return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"HTTP {status}"


def _lines_with_counters(data: bytes) -> Iterator[bytes]:
    """The lines that name a counter, found without a look at the others."""
    at = 0
    # Most pieces name none; the search from the end sees that in half the time.
    hits = {name: data.find(name) for name in _COUNTERS if data.rfind(name) >= 0}
    while hits := {name: hit for name, hit in hits.items() if hit >= 0}:
        first = min(hits.values())
        start = max(at, data.rfind(b"\n", at, first) + 1, data.rfind(b"\r", at, first) + 1)
        ends = [end for end in (data.find(b"\n", first), data.find(b"\r", first)) if end >= 0]
        at = min(ends, default=len(data))
        yield data[start:at]
        hits = {name: hit if hit >= at else data.find(name, at) for name, hit in hits.items()}


class _Counts:
    """What was seen so far; later positive numbers overwrite earlier ones."""

    __slots__ = ("cached", "input", "metrics", "output", "seen", "timings")

    def __init__(self) -> None:
        self.seen = False
        self.input = 0
        self.output = 0
        self.cached = -1
        self.timings: dict[str, Any] | None = None
        self.metrics: dict[str, Any] | None = None

    def add_event(self, event: Any) -> None:
        """Take one event of a stream: usage may be at its top, in `response` or in `message`."""
        if not isinstance(event, dict):
            return
        self.add_usage(event.get("usage"))
        for holder in (event.get("response"), event.get("message")):
            if isinstance(holder, dict):
                self.add_usage(holder.get("usage"))
        self.add_speeds(event)

    def add_usage(self, usage: Any) -> None:
        """Take a usage object, OpenAI's or Anthropic's."""
        if not isinstance(usage, dict):
            return
        self.seen = True
        inputs = _number(usage, "prompt_tokens")
        if inputs is None:
            inputs = _number(usage, "input_tokens")
        outputs = _number(usage, "completion_tokens")
        if outputs is None:
            outputs = _number(usage, "output_tokens")
        cached = _number(usage, "cache_read_input_tokens")
        for name in ("input_tokens_details", "prompt_tokens_details"):
            if cached is None and isinstance(detail := usage.get(name), dict):
                cached = _number(detail, "cached_tokens")
        if inputs is not None and inputs > 0:
            self.input = int(inputs)
        if outputs is not None and outputs > 0:
            self.output = int(outputs)
        if cached is not None and cached >= 0:
            self.cached = int(cached)

    def add_speeds(self, document: dict[str, Any]) -> None:
        """Take llama-server's `timings` and vLLM's `metrics`; the last of each count."""
        timings, metrics = document.get("timings"), document.get("metrics")
        if isinstance(timings, dict):
            self.seen, self.timings = True, timings
        if isinstance(metrics, dict):
            self.seen, self.metrics = True, metrics

    def tokens(self) -> Tokens:
        """The result; NOTHING if no counter was seen."""
        if not self.seen:
            return NOTHING
        if self.timings is None and self.metrics is None:
            return Tokens(self.input, self.output, self.cached, -1, -1, -1, -1)
        result = _Result(self.input, self.output, self.cached)
        if self.timings is not None:
            result.use_timings(self.timings)
        if self.metrics is not None:
            result.use_metrics(self.metrics)
        return result.tokens()


class _Result:
    __slots__ = ("accepted", "cached", "drafted", "input", "output", "prompt_rate", "reported_ms", "token_rate")

    def __init__(self, input_tokens: int, output_tokens: int, cached: int) -> None:
        self.input = input_tokens
        self.output = output_tokens
        self.cached = cached
        self.prompt_rate: float = -1
        self.token_rate: float = -1
        self.drafted = -1
        self.accepted = -1
        self.reported_ms: float = 0

    def use_timings(self, timings: dict[str, Any]) -> None:
        """llama-server: its counts override those of usage."""
        self.input = int(_number(timings, "prompt_n") or 0)
        self.output = int(_number(timings, "predicted_n") or 0)
        self.prompt_rate = _number(timings, "prompt_per_second") or 0
        self.token_rate = _number(timings, "predicted_per_second") or 0
        cached = _number(timings, "cache_n")
        if cached is not None:
            self.cached = int(cached)
        self._use_drafts(_number(timings, "draft_n"), _number(timings, "draft_n_accepted"))
        self.reported_ms = (_number(timings, "prompt_ms") or 0) + (_number(timings, "predicted_ms") or 0)

    def use_metrics(self, metrics: dict[str, Any]) -> None:
        """vLLM: times to the first token and between tokens become rates."""
        drafts = metrics.get("speculative_decoding")
        if isinstance(drafts, dict):
            self._use_drafts(_number(drafts, "num_draft_tokens"), _number(drafts, "num_accepted_draft_tokens"))
        first_ms = _number(metrics, "time_to_first_token_ms") or 0
        if first_ms > 0:
            self.prompt_rate = (self.input - max(self.cached, 0)) / (first_ms / 1000)
        between_ms = _number(metrics, "mean_itl_ms") or 0
        if between_ms > 0:
            self.token_rate = 1000 / between_ms

    def tokens(self) -> Tokens:
        """The finished record."""
        return Tokens(
            self.input,
            self.output,
            self.cached,
            self.prompt_rate,
            self.token_rate,
            self.drafted,
            self.accepted,
            self.reported_ms,
        )

    def _use_drafts(self, drafted: float | None, accepted: float | None) -> None:
        if drafted is not None and accepted is not None:
            self.drafted, self.accepted = int(drafted), int(accepted)


def _number(values: dict[str, Any], name: str) -> float | None:
    """A member as a number, if it is one; numeric text counts."""
    value = values.get(name)
    if type(value) is int and -_EXACT < value < _EXACT:  # nearly always
        return value
    if value is None or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


@lru_cache(64)
def _form(content_type: str, coding: str) -> tuple[bool, int, bool]:
    """Whether an answer is an event stream, how much of another one is kept, and whether it is packed."""
    kind = content_type.lower()
    limit = MAX_KEPT if "json" in kind else MAX_OTHER
    return "text/event-stream" in kind, limit, coding.lower().strip() not in ("", "identity")


def _loads(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _decoder(coding: str) -> Any:
    coding = coding.lower().strip()
    if coding in ("gzip", "x-gzip"):
        return zlib.decompressobj(31)
    if coding == "deflate":
        return zlib.decompressobj()
    return None

"""What is kept of a request and its answer to be looked at later: which parts, without keys, in one packed piece."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import orjson

from qmflask.headers import Header

REDACTED = "[REDACTED]"
SENSITIVE = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key"})
#: Captures above this size are worth packing.
_PACK_ABOVE = 4096

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


def keeps(path: str) -> tuple[bool, bool]:
    """Whether the bodies of requests and of answers of a path are kept."""
    return _KEEPS.get(path, (True, True))


def redacted(headers: Sequence[Header], without: str = "") -> dict[str, str]:
    """One value per header, the first, with keys and cookies hidden; `without` leaves a header out."""
    found = dict(headers)
    if len(found) < len(headers):
        found = dict(reversed(headers))
    if not SENSITIVE.isdisjoint(map(str.lower, found)):
        found = {name: REDACTED if name.lower() in SENSITIVE else value for name, value in found.items()}
    if without and without in map(str.lower, found):
        found = {name: value for name, value in found.items() if name.lower() != without}
    return found


class Allowance:
    """How many captures may be kept: so many of a burst, then so many a second. Times are monotonic nanoseconds.

    At hundreds of requests a second packing them would cost more than all other recording, for a buffer that forgets
    them within seconds.
    """

    def __init__(self, burst: int = 20, a_second: float = 10.0) -> None:
        self._burst = burst
        self._rate = a_second / 1e9
        self._left = float(burst)
        self._at = 0

    def take(self, now: int) -> bool:
        """Whether one more may be kept."""
        self._left = min(self._burst, self._left + max(0, now - self._at) * self._rate)
        self._at = max(self._at, now)
        if self._left < 1:
            return False
        self._left -= 1
        return True


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


def decoded(body: bytes, coding: str, limit: int) -> bytes:
    """A body without its content coding; empty if it cannot be read, or only as more than `limit` bytes."""
    coding = coding.strip().lower()
    if coding not in ("gzip", "x-gzip", "deflate"):
        return body
    decoder = zlib.decompressobj(31 if "gzip" in coding else 15)
    try:
        plain = decoder.decompress(body, limit)
    except zlib.error:
        return b""
    return b"" if decoder.unconsumed_tail else plain

"""Parses HTTP/1 responses out of bytes: heads strictly and bounded, bodies without ever waiting for more.

Bytes in, values out, no socket. A model server may lie, so everything that two readers could understand
differently (two lengths, folded names, odd codings) is refused rather than guessed.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Protocol

from qmflask.headers import Header, first

#: Bytes of one head, and of the trailers of a chunked body. nginx allows 32 KiB by default.
MAX_HEAD = 128 * 1024
#: Bytes of a chunk-size line with its extensions.
MAX_SIZE_LINE = 4096
#: Informational responses before the real one.
MAX_INFORMATIONAL = 16

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_STATUS = re.compile(rb"HTTP/(\d)\.(\d)[ \t]+(\d\d\d)(?:[ \t]+([^\r\n]*))?")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_SIZE = re.compile(rb"[ \t]*([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\n]*)?\r?")


class Malformed(ValueError):
    """Raised when a server's bytes are not a response; the text completes "the model server ..."."""


@dataclass(frozen=True)
class Head:
    """A final response head; `rest` are the bytes that followed it."""

    status: int
    reason: str
    version: tuple[int, int]
    headers: list[Header]
    rest: bytes


class HeadReader:
    """Collects bytes until a final head is complete, dropping informational ones.

    `switch`: the request asked for another protocol, so 101 is a final answer.
    """

    def __init__(self, switch: bool = False) -> None:
        self._switch = switch
        self._data = b""
        self._searched = 0  # so many bytes hold no end: a head that drips must not be searched over and over
        self._informational = 0

    @property
    def begun(self) -> bool:
        """True once any byte of a response has come."""
        return bool(self._data or self._informational)

    def feed(self, data: bytes) -> Head | None:
        """Take more bytes; the head once it is complete. Raises Malformed."""
        self._data = data = self._data + data
        while True:
            if not b"HTTP/".startswith(data[:5]):
                raise Malformed(f"did not answer in HTTP but with {data[:40]!r}")
            end = _HEAD_END.search(data, max(0, self._searched - 3))
            if end is None or end.start() > MAX_HEAD:
                self._searched = len(data)
                if len(data) > MAX_HEAD:
                    raise Malformed(f"sent more than {MAX_HEAD} bytes of headers")
                return None
            head = _parse_head(data[: end.start()], data[end.end() :])
            if head.status >= 200 or (head.status == 101 and self._switch):
                return head
            self._searched = 0
            self._informational += 1
            if head.status == 101 or self._informational > MAX_INFORMATIONAL:
                raise Malformed(f"sent status {head.status} where an answer was due")
            self._data = data = head.rest


class Body(Protocol):
    """A body's framing. `done` once its end was seen; `length` where it was announced."""

    done: bool
    surplus: bool
    length: int | None

    def feed(self, data: bytes) -> bytes:
        """The payload in these bytes, all of it, possibly none. Raises Malformed."""

    def end(self) -> None:
        """The connection was closed. Raises Malformed if the body was not complete."""


def body_of(method: str, head: Head) -> Body:
    """The framing of a response's body (RFC 9112, 6.3). Raises Malformed."""
    if method == "HEAD" or head.status in (204, 304):
        return SizedBody(0)
    if head.status == 101:
        return UntilClose()  # of another protocol: whoever reads on reads its bytes
    coding = first(head.headers, "transfer-encoding")
    if coding is not None:
        if [value.lower() for key, value in head.headers if key.lower() == "transfer-encoding"] != ["chunked"]:
            raise Malformed(f"used the transfer coding {coding[:40]!r}, which nobody asked for")
        return ChunkedBody()
    lengths = {value.strip() for key, value in head.headers if key.lower() == "content-length"}
    lengths = {part.strip() for value in lengths for part in value.split(",")}
    if not lengths:
        return UntilClose()
    length = lengths.pop()
    if lengths or not (length.isascii() and length.isdigit()) or len(length) > 18:
        raise Malformed("announced a Content-Length that is not one number")
    return SizedBody(int(length))


def keeps_alive(head: Head, body: Body) -> bool:
    """True if the connection can carry another request after this complete response."""
    connection = (first(head.headers, "connection") or "").lower()
    persistent = head.version >= (1, 1) or "keep-alive" in connection
    return body.done and not body.surplus and persistent and "close" not in connection


class SizedBody:
    """A body with a Content-Length. Bytes beyond it are not the client's business and are dropped."""

    def __init__(self, length: int) -> None:
        self.length: int | None = length
        self.surplus = False
        self.done = length == 0
        self._left = length

    def feed(self, data: bytes) -> bytes:
        """The payload in these bytes."""
        if len(data) > self._left:
            self.surplus = True
            data = data[: self._left]
        self._left -= len(data)
        self.done = self._left == 0
        return data

    def end(self) -> None:
        """Refuse a body that is shorter than announced."""
        if not self.done:
            raise Malformed(f"closed the connection {self._left} bytes before the end of its answer")


class UntilClose:
    """A body that ends with its connection (HTTP/1.0)."""

    def __init__(self) -> None:
        self.length: int | None = None
        self.surplus = False
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """The payload in these bytes: all of them."""
        return data

    def end(self) -> None:
        """The close is the regular end."""
        self.done = True


class ChunkedBody:
    """A chunked body: gives every payload byte that is at hand, without waiting for a chunk to be whole."""

    def __init__(self) -> None:
        self.length: int | None = None
        self.surplus = False
        self.done = False
        self._left = 0  # payload bytes still to come of the current chunk
        self._rest = b""  # bytes of an incomplete line
        self._in_chunk = False  # a chunk's closing CRLF is still to come
        self._trailer_bytes = -1  # counts once the last chunk was seen

    def feed(self, data: bytes) -> bytes:
        """The payload in these bytes. Raises Malformed."""
        left = self._left
        if left > len(data):  # the middle of a big chunk
            self._left = left - len(data)
            return data
        if self._rest:
            data, self._rest = self._rest + data, b""
        position, size, out = 0, len(data), []
        in_chunk, many = self._in_chunk, self._trailer_bytes < 0
        while True:
            if left:
                piece = data[position : position + left]
                out.append(piece)
                position += len(piece)
                left -= len(piece)
                if left:
                    break
            if in_chunk and data.startswith(b"\r\n", position):  # what all servers send
                in_chunk = False
                position += 2
            if many and not in_chunk and size - position > _MANY:
                position, many = _whole_chunks(data, position, out), False
            line_end = data.find(b"\n", position)
            if in_chunk and line_end >= 0:
                if line_end != position:
                    raise Malformed("sent a chunk longer than its announced size")
                in_chunk = False
                position = line_end + 1
                line_end = data.find(b"\n", position)
            if line_end < 0:
                self._rest = data[position:]
                if len(self._rest) > MAX_SIZE_LINE:
                    raise Malformed("sent a chunk-size line without an end")
                break
            line = data[position:line_end]
            position = line_end + 1
            if self._trailer_bytes >= 0:
                if self._trailer(line):
                    self.surplus = position < size
                    break
                continue
            left = _chunk_size(line)
            if left:
                in_chunk = True
            else:
                self._trailer_bytes = 0
        self._left, self._in_chunk = left, in_chunk
        return out[0] if len(out) == 1 else b"".join(out)

    def end(self) -> None:
        """Refuse a body whose last chunk never came."""
        if not self.done:
            raise Malformed("closed the connection before the end of its answer")

    def _trailer(self, line: bytes) -> bool:
        """Take one line after the last chunk; True if it was the empty one that ends the body."""
        self._trailer_bytes += len(line) + 1
        if self._trailer_bytes > MAX_HEAD:
            raise Malformed(f"sent more than {MAX_HEAD} bytes of trailers")
        self.done = line in (b"\r", b"")
        return self.done


#: From so many bytes on it pays to look for a row of whole chunks.
_MANY = 1024


def _whole_chunks(data: bytes, position: int, out: list[bytes]) -> int:
    """Take the chunks that are whole in `data` from `position` on, all at once; where the next one begins.

    Events at full speed come in rows of small chunks, whose payload seldom holds a CRLF: then what lies between two of
    them is either a size or its payload. Where that does not add up, nothing is taken, and the next chunk is read with
    care. The empty chunk ends the row.
    """
    parts = data[position:].split(b"\r\n")
    count = (len(parts) - 1) // 2
    payloads = parts[1 : 2 * count : 2]
    try:
        sizes = list(map(_chunk_size, parts[0 : 2 * count : 2]))
    except Malformed:
        return position
    if 0 in sizes:
        count = sizes.index(0)
        del payloads[count:], sizes[count:]
    if list(map(len, payloads)) != sizes:
        return position
    out += payloads
    return position + sum(sizes) + sum(map(len, parts[0 : 2 * count : 2])) + 4 * count


@functools.lru_cache(maxsize=256)  # the events of a stream are of few lengths
def _chunk_size(line: bytes) -> int:
    size = _SIZE.fullmatch(line)  # in one line: a row of chunks is split at CRLF alone
    if size is None:
        raise Malformed(f"sent {line[:40]!r} where a chunk size was due")
    return int(size[1], 16)


def _parse_head(head: bytes, rest: bytes) -> Head:
    lines = head.split(b"\n")
    status = _STATUS.fullmatch(lines[0].rstrip(b"\r"))
    if status is None or status[1] != b"1":
        raise Malformed(f"sent the status line {lines[0][:60]!r}")
    headers: list[Header] = []
    for line in lines[1:]:
        match = _HEADER.fullmatch(line.rstrip(b"\r"))
        if match is None:
            raise Malformed(f"sent the header line {line[:60]!r}")
        headers.append((match[1].decode("latin-1"), match[2].decode("latin-1").rstrip(" \t")))
    reason = (status[4] or b"").decode("latin-1")
    return Head(int(status[3]), reason, (int(status[1]), int(status[2])), headers, rest)

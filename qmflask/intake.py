"""Takes a request's body from the WSGI server: whole where it must be read, else only as far as the model's name.

Uploads are forwarded while they come in; where the name comes after the file, the bytes before it wait in a
temporary file, never in memory. A body that is shorter than announced is an error (field notes A12).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from qmflask import bodies
from qmflask.bodies import Wanted
from qmflask.errors import BadRequest, BodyTooLarge, Unavailable
from qmflask.multipart import Field, FieldFinder, boundary_of

BLOCK = 256 * 1024
#: Bytes of an upload that wait in memory for the model's name before a file is made.
SPOOL_ABOVE = 1024 * 1024


class Source:
    """The body as the WSGI server gives it, with its length checked. Raises BadRequest and BodyTooLarge."""

    def __init__(self, environ: Mapping[str, Any], max_body: int = 0) -> None:
        self._input = environ["wsgi.input"]
        self._max = max_body
        self.taken = 0
        self.length = _announced(environ)
        if max_body and self.length is not None and self.length > max_body:
            raise self._too_large()

    def read(self, size: int = BLOCK) -> bytes:
        """The next bytes, at most `size`; b"" at the end of a complete body."""
        if self.length is not None:
            size = min(size, self.length - self.taken)
            if size <= 0:
                return b""
        try:
            data: bytes = self._input.read(size)
        except Exception as error:  # servers have many: bad chunks, resets, early ends; all mean one thing
            raise BadRequest(f"The request body broke off after {self.taken} bytes: {error}") from error
        if not data and self.length is not None:
            raise BadRequest(f"The request body ended after {self.taken} of {self.length} announced bytes.")
        self.taken += len(data)
        if self._max and self.taken > self._max:
            raise self._too_large()
        return data

    def read_all(self) -> bytes:
        """All that is left."""
        first = self.read()
        if self.taken == self.length or not first:
            return first
        pieces = [first]
        while True:
            piece = self.read()
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.read, b"")

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request body is larger than {self._max} bytes (maxBodyMB).")


@dataclass
class Intake:
    """A request body, taken as far as was needed to know `wanted`.

    `kind` is "json", "form" (urlencoded), "multipart", "raw" or "none". JSON and forms are whole, in `body`, which
    may be replaced; the others are forwarded from `blocks()`. `close()` removes a temporary file.
    """

    kind: str
    wanted: Wanted
    body: bytes | None = None
    source: Source | None = None
    held: IO[bytes] | None = None
    model_field: Field | None = None
    _replacement: bytes | None = field(default=None, repr=False)

    def rename(self, model: str) -> None:
        """Have the body name another model; bodies that name none stay as they are."""
        if self.kind == "json" and self.body is not None:
            self.body = bodies.rename_in_json(self.body, model)
        elif self.kind == "form" and self.body is not None:
            self.body = bodies.rename_in_form(self.body, model)
        elif self.model_field is not None:
            self._replacement = model.encode()

    @property
    def length(self) -> int | None:
        """The length of what `blocks()` gives; None if that is not known before its end."""
        if self.body is not None:
            return len(self.body)
        if self.source is None:
            return 0
        if self.source.length is None:
            return None
        return self.source.length + self._growth

    def payload(self) -> bytes | Iterator[bytes] | None:
        """What to send upstream: bytes, pieces, or None where there is no body."""
        if self.kind == "none":
            return None
        return self.body if self.body is not None else self.blocks()

    def blocks(self) -> Iterator[bytes]:
        """The body piece by piece, once: what is held, then what still comes."""
        if self.held is not None:
            yield from self._held_blocks(self.held)
            self.close()
        if self.source is not None:
            yield from self.source

    def close(self) -> None:
        """Remove the temporary file; idempotent."""
        if self.held is not None:
            self.held.close()
            self.held = None

    @property
    def _growth(self) -> int:
        if self.model_field is None or self._replacement is None:
            return 0
        return len(self._replacement) - (self.model_field.end - self.model_field.start)

    def _held_blocks(self, held: IO[bytes]) -> Iterator[bytes]:
        held.seek(0)
        if self.model_field is not None and self._replacement is not None:
            left = self.model_field.start
            while left > 0 and (block := held.read(min(BLOCK, left))):
                left -= len(block)
                yield block
            yield self._replacement
            held.seek(self.model_field.end)
        yield from iter(lambda: held.read(BLOCK), b"")


def take(environ: Mapping[str, Any], *, max_body: int = 0, spool_dir: str | None = None) -> Intake:
    """Find the model a request names, reading no more of its body than that needs.

    `max_body` in bytes, 0 = no limit. Uploads that must wait go to a file in `spool_dir` (default: the system's).
    Raises InvalidJSON, BadRequest, BodyTooLarge.
    """
    query = environ.get("QUERY_STRING", "")
    if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
        return Intake("none", bodies.from_query(query))
    source = Source(environ, max_body)
    content_type = environ.get("CONTENT_TYPE", "")
    lower = content_type.lower()
    if "application/json" in lower:
        return _json(source.read_all())
    if "multipart/form-data" in lower:
        return _multipart(source, boundary_of(content_type), spool_dir)
    return _other(source, lower, query, spool_dir)


def passing(environ: Mapping[str, Any], *, max_body: int = 0) -> Intake:
    """A body that is forwarded without a look inside (`/upstream`). Raises BodyTooLarge."""
    source = Source(environ, max_body)
    if source.length == 0:
        return Intake("none" if environ["REQUEST_METHOD"] in ("GET", "HEAD") else "raw", Wanted(), body=b"")
    return Intake("raw", Wanted(), source=source)


def _json(body: bytes) -> Intake:
    return Intake("json", bodies.from_json(body), body=body)


def _other(source: Source, content_type: str, query: str, spool_dir: str | None) -> Intake:
    """JSON sent under another name, a form, or bytes whose model is in the query."""
    start = source.read()
    if bodies.looks_like_json(start):
        return _json(start + source.read_all())
    if content_type == "" or "urlencoded" in content_type or content_type.startswith("text/"):
        body = start + source.read_all()
        wanted = bodies.from_form(body)
        return Intake("form", wanted if wanted.model else bodies.from_query(query), body=body)
    held = _spool(spool_dir)
    _hold(held, start)
    return Intake("raw", bodies.from_query(query), source=source, held=held)


def _multipart(source: Source, boundary: bytes, spool_dir: str | None) -> Intake:
    finder = FieldFinder(boundary, "model")
    held = _spool(spool_dir)
    try:
        for block in source:
            _hold(held, block)
            if finder.feed(block):
                break
        else:
            raise BadRequest("The multipart body ends without its closing delimiter.")
    except BaseException:
        held.close()
        raise
    found = finder.found
    return Intake("multipart", Wanted(found.value if found else None), source=source, held=held, model_field=found)


def _spool(directory: str | None) -> IO[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=SPOOL_ABOVE, dir=directory)


def _hold(held: IO[bytes], block: bytes) -> None:
    try:
        held.write(block)
    except OSError as error:
        raise Unavailable(
            f"There is no room to hold an upload whose model is not known yet ({error.strerror}); "
            "send the field `model` before the file.",
            retry_after=10,
        ) from error


def _announced(environ: Mapping[str, Any]) -> int | None:
    """The body's length; None for a chunked body, whose end the server knows."""
    text = environ.get("CONTENT_LENGTH", "")
    if text:
        if not (text.isascii() and text.isdigit()):
            raise BadRequest(f"The Content-Length {text!r} is not a number.")
        return int(text)
    chunked = environ.get("wsgi.input_terminated") and environ.get("HTTP_TRANSFER_ENCODING")
    return None if chunked else 0

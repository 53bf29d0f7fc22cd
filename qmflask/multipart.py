"""Finds small fields in a multipart/form-data body as it streams by, and where their bytes lie.

Bytes in, fields out; holds only what may be the start of a delimiter. Positions allow a field to be replaced while
everything around it, file parts and their headers included, stays as the client sent it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qmflask.errors import BadRequest

MAX_PART_HEAD = 16 * 1024
MAX_VALUE = 64 * 1024
MAX_PARTS = 1000

_BOUNDARY = re.compile(r';\s*boundary\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s]+))', re.IGNORECASE)
_PARAMETER = re.compile(rb';\s*([^=;\s]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;]*))', re.DOTALL)
_DISPOSITION = re.compile(rb"(?:^|\n)content-disposition\s*:([^\n]*)", re.IGNORECASE)


@dataclass(frozen=True)
class Field:
    """One form field; its value is `[start:end]` of the whole body."""

    name: str
    value: str
    start: int
    end: int


def boundary_of(content_type: str) -> bytes:
    """The boundary a Content-Type names. Raises BadRequest."""
    match = _BOUNDARY.search(content_type)
    boundary = (match[1] if match[1] is not None else match[2]) if match else ""
    if not boundary or len(boundary) > 200:
        raise BadRequest("The multipart body has no usable boundary in its Content-Type header.")
    return re.sub(r"\\(.)", r"\1", boundary).encode("latin-1")


class FieldFinder:
    """Looks for one field, the first of its name that is no file.

    `ended` once the closing delimiter was seen; `found` once the field is complete. Either way `feed` has no more
    to do. Raises BadRequest for bodies that no form parser could read.
    """

    def __init__(self, boundary: bytes, name: str) -> None:
        self.found: Field | None = None
        self.ended = False
        self._delimiter = b"\r\n--" + boundary
        self._name = name.encode()
        self._data = b"\r\n"  # so that the first delimiter, too, follows a line end
        self._offset = -2  # where in the body `_data` begins
        self._in_head = False
        self._parts = 0
        self._value_start: int | None = None
        self._value: list[bytes] = []
        self._value_size = 0

    def feed(self, data: bytes) -> bool:
        """Take the next bytes of the body; True once the field is found or the body's end was seen."""
        self._data = self._data + data if self._data else data
        while not (self.found or self.ended):
            if not (self._head() if self._in_head else self._content()):
                break
        return self.found is not None or self.ended

    def _content(self) -> bool:
        """Skip, or collect, up to the next delimiter; False if more bytes are needed."""
        at = self._data.find(self._delimiter)
        if at < 0:
            # All but what may be the beginning of a delimiter is content.
            self._drop(max(0, len(self._data) - len(self._delimiter) + 1))
            return False
        self._drop(at)
        line_end = self._data.find(b"\r\n", len(self._delimiter))
        after = self._data[len(self._delimiter) : len(self._delimiter) + 2]
        if after != b"--" and line_end < 0:
            if len(self._data) > len(self._delimiter) + 256:
                raise BadRequest("The multipart body has a delimiter line without an end.")
            return False
        self._finish_value()
        if after == b"--":
            self.ended = True
        else:
            self._parts += 1
            if self._parts > MAX_PARTS:
                raise BadRequest(f"The multipart body has more than {MAX_PARTS} parts.")
            # The line end stays: it may itself begin the empty line that ends a head.
            self._drop(line_end)
            self._in_head = True
        return True

    def _head(self) -> bool:
        """Read a part's headers; False if more bytes are needed."""
        end = self._data.find(b"\r\n\r\n")
        if end < 0 or end > MAX_PART_HEAD:
            if len(self._data) > MAX_PART_HEAD:
                raise BadRequest(f"The multipart body has a part with more than {MAX_PART_HEAD} bytes of headers.")
            return False
        wanted = _field_name(self._data[:end]) == self._name
        # Its last line end stays too: an empty value is followed by a delimiter at once.
        self._drop(end + 2)
        self._in_head = False
        if wanted:
            self._value_start = self._offset + 2
        return True

    def _drop(self, count: int) -> None:
        """Let go of the first bytes, keeping them if they belong to the wanted value."""
        if self._value_start is not None and count:
            begin = max(0, self._value_start - self._offset)
            if begin < count:
                self._value.append(self._data[begin:count])
                self._value_size += count - begin
                if self._value_size > MAX_VALUE:
                    raise BadRequest(f"The form field {self._name.decode()!r} is longer than {MAX_VALUE} bytes.")
        self._data = self._data[count:]
        self._offset += count

    def _finish_value(self) -> None:
        if self._value_start is None:
            return
        value = b"".join(self._value)
        try:
            text = value.decode("utf-8")
        except UnicodeDecodeError:
            raise BadRequest(f"The form field {self._name.decode()!r} is not UTF-8.") from None
        self.found = Field(self._name.decode(), text, self._value_start, self._value_start + len(value))


def _field_name(head: bytes) -> bytes | None:
    """The name of the form field a part's headers describe; None for files."""
    match = _DISPOSITION.search(head)
    if match is None:
        return None
    parameters = {m[1].lower(): m[2] if m[2] is not None else m[3].strip() for m in _PARAMETER.finditer(match[1])}
    if b"filename" in parameters or b"filename*" in parameters:
        return None
    return parameters.get(b"name")

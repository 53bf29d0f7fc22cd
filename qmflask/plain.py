"""The usual HTTP/1.1 request, whole in what was read at once: bytes to WSGI's environ, and the answer to bytes.

Anything else, and anything odd, is not judged here but left to gunicorn's parser: `environ_of` gives None. What it
does give is what gunicorn would have given (tests/unit/test_plain.py compares the two), for a fifth of the time.
"""

from __future__ import annotations

import email.utils
import functools
import io
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

#: Bytes of a head that are taken here; gunicorn's own limits, which may be lower, are in `Terms`.
MAX_HEAD = 8000

_LINE = re.compile(rb"([A-Z]{3,20}) (/[!-~]*) HTTP/1\.1")
#: No underscore in a name: its meaning in an environ is ambiguous, and gunicorn has rules for it.
_FIELD = rb"[!#$%&'*+\-.^`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*"
_FIELDS = re.compile(rb"(?:" + _FIELD + rb"\r\n)*")
_PAIR = re.compile(rb"([^:]+):([^\r]*)\r\n")
#: Named more than once, these make a request ambiguous; the others are joined.
_SINGLE = frozenset({"HTTP_HOST", "CONTENT_TYPE", "CONTENT_LENGTH"})
#: What needs more than a place in the environ.
_SPECIAL = frozenset({"HTTP_EXPECT", "HTTP_TRANSFER_ENCODING", "HTTP_HTTP2_SETTINGS"})

_SENT_FIELDS = re.compile(r"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [ \t\x21-\x7e\x80-\xff]*\r\n)*")
_STATUS = re.compile(r"[0-9]{3}(?: [ \t\x21-\x7e\x80-\xff]*)?")
#: The server's own business (WSGI forbids applications to send them).
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailers",
        "transfer-encoding",
        "upgrade",
        "server",
        "date",
    }
)


@dataclass(frozen=True)
class Terms:
    """What the server's settings say: `base` is in every environ; limits in bytes and numbers.

    `secure`: headers by which a trusted peer says that its client came by https, name in the environ -> value.
    """

    base: Mapping[str, Any]
    secure: Mapping[str, str] = field(default_factory=dict)
    max_line: int = 4094
    max_fields: int = 100
    max_field: int = 8190


def environ_of(data: bytes, terms: Terms, trusted: bool) -> dict[str, Any] | None:
    """The environ of the one request that `data` is, without the client's and the server's addresses; None if it is
    not wholly plain. `trusted`: its peer may say which scheme its own client used.
    """
    end = data.find(b"\r\n\r\n")
    if not 0 < end <= MAX_HEAD:
        return None
    line, _, fields = data[: end + 2].partition(b"\r\n")
    request = _LINE.fullmatch(line)
    if request is None or len(line) > terms.max_line or _FIELDS.fullmatch(fields) is None:
        return None
    environ = dict(terms.base)
    if not _enter_fields(environ, fields, terms):
        return None
    if _SPECIAL & environ.keys():
        return None
    length = environ.get("CONTENT_LENGTH", "0")
    body = data[end + 4 :]
    if not (length.isascii() and length.isdigit()) or len(length) > 9 or int(length) != len(body):
        return None
    if not _enter_scheme(environ, terms.secure, trusted):
        return None
    return environ if _enter_target(environ, request, body) else None


def _enter_fields(environ: dict[str, Any], fields: bytes, terms: Terms) -> bool:
    pairs = _PAIR.findall(fields)
    if len(pairs) > terms.max_fields:
        return False
    seen = set()
    for name, value in pairs:
        if len(name) + len(value) + 3 > terms.max_field:
            return False
        key = _key(name)
        text = value.decode("latin-1").strip(" \t")
        if key in seen:
            if key in _SINGLE:
                return False
            text = f"{environ[key]},{text}"
        seen.add(key)
        environ[key] = text
    return True


@functools.lru_cache(maxsize=512)
def _key(name: bytes) -> str:
    key = name.decode("ascii").upper().replace("-", "_")
    return key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}"


def _enter_scheme(environ: dict[str, Any], secure: Mapping[str, str], trusted: bool) -> bool:
    environ["wsgi.url_scheme"] = "http"
    if trusted:
        said = [environ[key] == value for key, value in secure.items() if key in environ]
        if len(said) > 1 or any("," in environ[key] for key in secure if key in environ):
            return False  # they may contradict one another
        if said and said[0]:
            environ["wsgi.url_scheme"] = "https"
    return True


def _enter_target(environ: dict[str, Any], request: re.Match[bytes], body: bytes) -> bool:
    target = request[2].decode("ascii")
    if "#" in target or target.startswith("//"):
        return False
    path, _, query = target.partition("?")
    environ["REQUEST_METHOD"] = request[1].decode("ascii")
    environ["RAW_URI"] = target
    environ["PATH_INFO"] = unquote_to_bytes(path).decode("latin-1") if "%" in path else path
    environ["QUERY_STRING"] = query
    environ["wsgi.input"] = io.BytesIO(body)
    return True


def enter_addresses(environ: dict[str, Any], client: Any, server: Any) -> None:
    """Enter who asks and where: (host, port, ...) for TCP, a path or nothing for AF_UNIX, as gunicorn has it."""
    if isinstance(client, tuple):
        environ["REMOTE_ADDR"], environ["REMOTE_PORT"] = client[0], str(client[1])
    else:
        environ["REMOTE_ADDR"] = client.decode() if isinstance(client, bytes) else client
    if isinstance(server, tuple):
        name, port = server[0], str(server[1])
    else:  # WSGI wants some name: the one the client used
        host = environ.get("HTTP_HOST")
        name, *ports = (host or server).split(":")
        usual = "443" if environ["wsgi.url_scheme"] == "https" else "80"
        port = ports[0] if ports else usual if host else ""
    environ["SERVER_NAME"], environ["SERVER_PORT"] = name, port


class Answer:
    """The answer to one plain request: what `start_response` and `write` are given, framed and handed to `send`.

    The connection closes after it. The head leaves with the first piece of the body, or alone for an empty piece.
    """

    def __init__(self, method: str, send: Callable[[bytes], object], server: str) -> None:
        self._method = method
        self._send = send
        self._server = server
        self._head: bytes | None = None  # made and not sent yet
        self._status = 0
        self._left: int | None = None  # bytes of the body still due, None for a chunked one
        self._bare = False  # an answer that has no body
        #: Whether anything was sent.
        self.begun = False

    def start_response(self, status: str, headers: Iterable[tuple[str, str]], exc_info: Any = None) -> Any:
        """WSGI's. Raises ValueError for what cannot be sent."""
        if exc_info is not None and self.begun:
            raise exc_info[1]
        if exc_info is None and self._status:
            raise AssertionError("the headers are set already")
        if _STATUS.fullmatch(status) is None:
            raise ValueError(f"no status that can be sent: {status!r}")
        self._status = int(status[:3])
        self._bare = self._method == "HEAD" or self._status in (204, 304) or self._status < 200
        self._head = self._made(status, headers)
        return self.write

    def _made(self, status: str, headers: Iterable[tuple[str, str]]) -> bytes:
        lines = []
        self._left = None
        for name, value in headers:
            lower = name.lower()
            if lower in _HOP_BY_HOP:
                continue
            if lower == "content-length":
                if self._status == 204 or self._status < 200:
                    continue
                self._left = int(value)
            lines.append(f"{name}: {value}\r\n")
        fields = "".join(lines)
        if _SENT_FIELDS.fullmatch(fields) is None or fields.count("\n") != len(lines):
            raise ValueError("a header that cannot be sent")
        framing = "Transfer-Encoding: chunked\r\n" if self._left is None and not self._bare else ""
        own = f"HTTP/1.1 {status}\r\nServer: {self._server}\r\nDate: {_date(int(time.time()))}\r\nConnection: close\r\n"
        return f"{own}{framing}{fields}\r\n".encode("latin-1")

    def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        head, self._head = self._head, None
        if not self._status:
            raise AssertionError("write() before start_response()")
        self.begun = True
        if self._bare:
            data = b""
        elif self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        elif data:
            data = b"%X\r\n%b\r\n" % (len(data), data)
        if head or data:
            self._send(head + data if head else data)

    def close(self) -> None:
        """The body is complete."""
        if self._head is not None or not self.begun:
            self.write(b"")
        if self._left is None and not self._bare:
            self._send(b"0\r\n\r\n")


@functools.lru_cache(maxsize=2)
def _date(second: int) -> str:
    return email.utils.formatdate(second, usegmt=True)

"""Plain requests: what is taken is what gunicorn's own parser takes, byte for byte the same environ; and answers."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from gunicorn.config import Config
from gunicorn.http.errors import ParseException
from gunicorn.http.parser import RequestParser
from gunicorn.http.wsgi import create
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qmflask import plain
from qmflask.worker import _terms

CONFIG = Config()
CONFIG.set("keepalive", 0)
CONFIG.set("http_protocols", "h1")
CONFIG.set("threads", 4)
TERMS = _terms(CONFIG)
CLIENT, SERVER = ("127.0.0.1", 4711), ("127.0.0.1", 8080)
#: Not compared: objects made per request, and what gunicorn offers besides.
APART = {"wsgi.input", "wsgi.errors", "wsgi.early_hints", "gunicorn.socket", "wsgi.multithread"}

POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: h:8080\r\n"
    b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
)


class FakeSocket:
    """What gunicorn's reader wants of a socket: all bytes at once, then the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.sent = b""

    def recv(self, size: int) -> bytes:
        data, self._data = self._data[:size], self._data[size:]
        return data

    def send(self, data: bytes) -> int:
        self.sent += data
        return len(data)


def ours(data: bytes, client: Any = CLIENT, server: Any = SERVER, trusted: bool = True) -> dict[str, Any] | None:
    assert TERMS is not None
    environ = plain.environ_of(data, TERMS, trusted)
    if environ is not None:
        plain.enter_addresses(environ, client, server)
    return environ


def gunicorns(data: bytes, client: Any = CLIENT, server: Any = SERVER) -> tuple[dict[str, Any], bytes] | None:
    """gunicorn's environ and the body; None where it refuses the request."""
    sock = FakeSocket(data)
    try:
        request = next(RequestParser(CONFIG, sock, client))
        _, environ = create(request, sock, client, server, CONFIG)
        body = environ["wsgi.input"].read()
    except (ParseException, StopIteration, OSError):
        return None
    return {key: value for key, value in environ.items() if key not in APART}, body


def same(data: bytes, client: Any = CLIENT, server: Any = SERVER) -> bool:
    """Whether we take a request; then gunicorn has to see the very same in it."""
    found = ours(data, client, server)
    if found is None:
        return False
    expected = gunicorns(data, client, server)
    assert expected is not None, "gunicorn refuses what we take"
    body = found["wsgi.input"].read()
    assert ({key: value for key, value in found.items() if key not in APART}, body) == expected
    return True


TARGETS = st.sampled_from(
    [
        "/",
        "/v1/models",
        "/a%2Fb%20c",
        "/a?b=c&d",
        "/?x",
        "//e/f",
        "/a#b",
        "*",
        "http://h/a",
        "/a b",
        "/%ff%FE",
        "/~!$&'()*",
    ]
)
NAMES = st.sampled_from(
    (
        *("Host", "Content-Type", "Content-Length", "X-A", "x-a", "X_A", "Connection", "Expect", "Transfer-Encoding"),
        *("X-Forwarded-Proto", "X-Forwarded-Ssl", "Accept", "Content_Length", "User-Agent", "X-A ", "", "Cookie"),
    )
)
VALUES = st.sampled_from(
    (
        *(
            "",
            "h",
            "h:80",
            "0",
            "2",
            "02",
            "+2",
            "2, 2",
            "²",
            "chunked",
            "100-continue",
            "https",
            "http",
            "on",
            "close",
        ),
        *("a\tb", " lead and trail ", "\x00", "a\rb", "caf\xe9", "https,http", "text/plain; charset=utf-8"),
    )
)
HEADERS = st.lists(st.tuples(NAMES, st.sampled_from([":", ": ", " : ", ":\t"]), VALUES), max_size=7)
ENDS = st.sampled_from(["\r\n", "\n", "\r\n "])


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "get", "G", "CONNECT"]),
    TARGETS,
    st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "http/1.1", "HTTP/1.1 "]),
    HEADERS,
    ENDS,
    st.sampled_from([b"", b"{}", b"{}GET / HTTP/1.1\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n"]),
)
def test_what_is_taken_means_to_gunicorn_what_it_means_to_us(
    method: str, target: str, version: str, headers: list[tuple[str, str, str]], end: str, body: bytes
) -> None:
    lines = [f"{method} {target} {version}", *(f"{name}{colon}{value}" for name, colon, value in headers)]
    same("".join(line + end for line in lines).encode("latin-1") + b"\r\n" + body)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(0, len(POST)), st.integers(0, 12))
@example(b"\r\n", 0, 0)
def test_damaged_requests_are_never_taken_otherwise_than_by_gunicorn(noise: bytes, at: int, cut: int) -> None:
    same(POST[:at] + noise + POST[at + cut :])


@pytest.mark.parametrize(
    "data",
    [
        POST,
        b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /ui?a=b%20c HTTP/1.1\r\nHost: h\r\nAccept: a\r\nAccept: b\r\nCookie: x=1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nX-Forwarded-Proto: https\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /caf%C3%A9 HTTP/1.1\r\nHost: h\r\nX-Name: caf\xe9\r\n\r\n",
    ],
)
def test_the_usual_requests_are_taken(data: bytes) -> None:
    assert same(data)
    assert same(data, "", "/run/qmflask/http.sock"), "over a unix socket"
    assert same(data, ("::1", 4711, 0, 0), ("::1", 8080, 0, 0))


@pytest.mark.parametrize("host", [b"", b":", b"h:", b"a:b:c", b"[::1]:8080"])
def test_odd_hosts_over_a_unix_socket_give_the_name_that_gunicorn_gives(host: bytes) -> None:
    assert same(POST.replace(b"h:8080", host), "", "/run/qmflask/http.sock")


@pytest.mark.parametrize(
    "data",
    [
        POST[:-1],  # the body is not whole
        POST + b"x",  # something follows
        POST.replace(b"Content-Length: 2", b"Content-Length: 2\r\nContent-Length: 2"),
        POST.replace(b"Content-Length: 2", b"Transfer-Encoding: chunked"),
        POST.replace(b"Host: h:8080", b"Host: h\r\nHost: h"),
        POST.replace(b"Host: h:8080", b"Host: h\r\nExpect: 100-continue"),
        POST.replace(b"Host: h:8080", b"Host: h\r\nX_Y: z"),
        POST.replace(b"Host: h:8080", b"Host: h\r\n folded"),
        POST.replace(b"HTTP/1.1", b"HTTP/1.0"),
        POST.replace(b"\r\n", b"\n"),
        POST.replace(b"Host: h:8080", b"X-Forwarded-Proto: https\r\nX-Forwarded-Ssl: off"),
        POST.replace(b"Host: h:8080", b"X: " + b"x" * plain.MAX_HEAD),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"",
    ],
)
def test_the_odd_ones_are_left_to_gunicorn(data: bytes) -> None:
    assert ours(data) is None


def test_only_a_trusted_peer_says_that_its_client_came_by_https() -> None:
    data = POST.replace(b"Host: h:8080", b"X-Forwarded-Proto: https")
    schemes = [(ours(data, trusted=trusted) or {})["wsgi.url_scheme"] for trusted in (True, False)]
    assert schemes == ["https", "http"]


def test_lower_limits_of_the_settings_hold() -> None:
    assert TERMS is not None
    for name, limit in (("max_line", 10), ("max_fields", 2), ("max_field", 20)):
        terms = plain.Terms(**{**vars(TERMS), name: limit})
        assert plain.environ_of(POST, terms, True) is None, name


@pytest.mark.parametrize(
    ("setting", "value"), [("accesslog", "-"), ("keepalive", 5), ("certfile", "x"), ("http_protocols", "h2,h1")]
)
def test_settings_that_want_all_of_gunicorn_get_it(setting: str, value: object) -> None:
    config = Config()
    config.set("keepalive", 0)
    config.set("http_protocols", "h1")
    assert _terms(config) is not None
    config.set(setting, value)
    assert _terms(config) is None


# -- answers --------------------------------------------------------------------------------------------------


class Sent:
    """An answer and what it handed over, piece by piece, dates taken out."""

    def __init__(self, method: str = "GET") -> None:
        self.pieces: list[bytes] = []
        self.answer = plain.Answer(method, self.pieces.append, "gunicorn")

    def __call__(self, status: str, headers: list[tuple[str, str]], *body: bytes) -> list[bytes]:
        self.answer.start_response(status, headers)
        for piece in body:
            self.answer.write(piece)
        self.answer.close()
        return [re.sub(rb"Date: [^\r]*\r\n", b"", piece) for piece in self.pieces]


HEAD = b"HTTP/1.1 200 OK\r\nServer: gunicorn\r\nConnection: close\r\n"


def test_a_short_answer_leaves_in_one_piece() -> None:
    assert Sent()("200 OK", [("Content-Length", "3")], b"ok\n") == [HEAD + b"Content-Length: 3\r\n\r\nok\n"]


def test_a_stream_is_chunked_and_its_head_can_go_ahead() -> None:
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    assert Sent()("200 OK", [], b"", b"0123456789", b"x") == [
        chunked,
        b"A\r\n0123456789\r\n",
        b"1\r\nx\r\n",
        b"0\r\n\r\n",
    ]
    assert Sent()("200 OK", [], b"x") == [chunked + b"1\r\nx\r\n", b"0\r\n\r\n"]
    assert Sent()("200 OK", []) == [chunked, b"0\r\n\r\n"]


def test_answers_without_a_body() -> None:
    assert Sent("HEAD")("200 OK", [("Content-Length", "3")], b"ok\n") == [HEAD + b"Content-Length: 3\r\n\r\n"]
    assert Sent("HEAD")("200 OK", []) == [HEAD + b"\r\n"]
    bare = HEAD.replace(b"200 OK", b"204 No Content") + b"\r\n"
    assert Sent()("204 No Content", [("Content-Length", "0")], b"x") == [bare]


def test_no_byte_beyond_the_announced_length() -> None:
    assert Sent()("200 OK", [("Content-Length", "2")], b"abc", b"d") == [HEAD + b"Content-Length: 2\r\n\r\nab"]


def test_hop_by_hop_headers_are_the_servers() -> None:
    sent = Sent()("200 OK", [("Connection", "keep-alive"), ("Date", "x"), ("Server", "y"), ("Content-Length", "0")])
    assert sent == [HEAD + b"Content-Length: 0\r\n\r\n"]


@pytest.mark.parametrize(
    "header", [("X", "a\r\nEvil: 1"), ("X", "a\nb"), ("X Y", "a"), ("", "a"), ("X", "\u20ac"), ("X:", "")]
)
def test_headers_that_would_break_the_answer_are_refused(header: tuple[str, str]) -> None:
    sent = Sent()
    with pytest.raises(ValueError, match="cannot be sent"):
        sent("200 OK", [header])
    assert sent.pieces == [] and not sent.answer.begun
    with pytest.raises(ValueError, match="status"):
        Sent()("200\r\n", [])


def test_an_error_may_replace_an_answer_that_has_not_begun_and_no_other() -> None:
    sent = Sent()
    sent.answer.start_response("200 OK", [])
    with pytest.raises(AssertionError):
        sent.answer.start_response("200 OK", [])
    error = ValueError("late")
    sent.answer.start_response("500 Error", [("Content-Length", "0")], (ValueError, error, None))
    sent.answer.write(b"")
    with pytest.raises(ValueError, match="late"):
        sent.answer.start_response("500 Error", [], (ValueError, error, None))
    assert sent.pieces[0].startswith(b"HTTP/1.1 500 Error\r\n")


def test_the_body_can_be_read_like_any_file() -> None:
    environ = ours(POST)
    assert environ is not None and isinstance(environ["wsgi.input"], io.BytesIO)
    assert environ["CONTENT_LENGTH"] == "2" and environ["wsgi.input"].read() == b"{}"

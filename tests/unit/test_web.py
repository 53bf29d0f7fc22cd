"""The web layer's pure parts: paths as spelled, scopes, foreign pages, asked waits, redirects."""

from __future__ import annotations

import logging
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from qmflask.config import ApiKey, Config, Model
from qmflask.errors import BadRequest, Forbidden, Unauthorized
from qmflask.names import Names
from qmflask.relay import Outcome
from qmflask.web import auth, request_id, upstream_path
from qmflask.web.answers import preflight, redirect
from qmflask.web.events import _Status
from qmflask.web.live import Moment
from qmflask.web.raw import cleaned, raw_path
from qmflask.web.sending import join, rename_in_query
from qmflask.web.visit import READ_SECONDS, Visit, header_text


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"RAW_URI": "/a%2Fb?x=/y"}, "/a%2Fb"),
        ({"RAW_URI": "http://host:1/a%2Fb?x"}, "/a%2Fb"),
        ({"RAW_URI": "http://host"}, "/"),
        ({"REQUEST_URI": "/m/a%20b", "SCRIPT_NAME": "/m"}, "/a%20b"),
        ({"REQUEST_URI": "/m", "SCRIPT_NAME": "/m"}, "/"),
        ({"PATH_INFO": "/a b/\xc3\xa9"}, "/a%20b/%C3%A9"),
        ({"RAW_URI": "*"}, "/"),
    ],
)
def test_raw_path(environ: dict[str, str], path: str) -> None:
    assert raw_path(environ) == path


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("/", "/"),
        ("/a/b", "/a/b"),
        ("/a/", "/a/"),
        ("/.well-known/x", "/.well-known/x"),
        ("/a/...", "/a/..."),
        ("//", "/"),
        ("/..", "/"),
        ("/a/..", "/"),
        ("/a/./b/..", "/a/"),
        ("/a//b/", "/a/b/"),
        ("/a/b/.", "/a/b/"),
        ("/a%2F%2Fb", "/a%2F%2Fb"),
    ],
)
def test_cleaned(path: str, clean: str) -> None:
    assert cleaned(path) == clean


def test_redirects_stay_here() -> None:
    for path in ("//evil.example/x", "/\\evil.example", "\\/evil.example"):
        location = redirect(307, path).headers["Location"]
        assert location.startswith("/") and location[1:2] not in ("/", "\\")
    assert redirect(301, "/a", "", "/mounted").headers["Location"] == "/mounted/a"
    assert redirect(301, "/a%2Fb", 'x="\n').headers["Location"] == "/a%2Fb?x=%22%0A"


def test_preflight_passes_only_tokens() -> None:
    assert preflight("X-A, b c,\u00e9, x-d").headers["Access-Control-Allow-Headers"] == "X-A, x-d"
    assert "Authorization" in preflight(" , ").headers["Access-Control-Allow-Headers"]


CONFIG = Config(
    models={"big": Model(id="big", aliases=("chat-big",)), "small": Model(id="small")},
    api_keys=(
        ApiKey(key="root", name="root"),
        ApiKey(key="user", name="user", models=("chat-*",), admin=False),
    ),
)


def test_accept() -> None:
    assert auth.accept(Config(), {}) is None
    assert auth.accept(CONFIG, {"HTTP_X_API_KEY": "user"}) is CONFIG.api_keys[1]
    for environ in ({}, {"HTTP_X_API_KEY": ""}, {"HTTP_AUTHORIZATION": "Bearer roo"}):
        with pytest.raises(Unauthorized) as caught:
            auth.accept(CONFIG, environ)
        assert "roo" not in caught.value.message


def test_all_keys_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return a == b

    monkeypatch.setattr("hmac.compare_digest", compare)
    auth.accept(CONFIG, {"HTTP_X_API_KEY": "root"})
    assert set(compared) == {b"root", b"user"}, "the time must not tell which one matched"


def test_scopes() -> None:
    names = Names(CONFIG)
    big, small = names.resolve("big"), names.resolve("small")
    assert big is not None and small is not None
    root, user = CONFIG.api_keys
    assert auth.may_use(None, CONFIG, "small", small) and auth.may_use(root, CONFIG, "small", small)
    assert auth.may_use(user, CONFIG, "big", big), "one of its names matches"
    assert not auth.may_use(user, CONFIG, "small", small)
    assert auth.may_use(user, CONFIG, "chat-pin", small), "the name that was asked for matches"
    with pytest.raises(Forbidden):
        auth.check_model(user, CONFIG, "small", small)


@pytest.mark.parametrize(
    ("environ", "allowed"),
    [
        ({}, True),
        ({"HTTP_SEC_FETCH_SITE": "same-origin"}, True),
        ({"HTTP_SEC_FETCH_SITE": "none"}, True),
        ({"HTTP_SEC_FETCH_SITE": "cross-site"}, False),
        ({"HTTP_SEC_FETCH_SITE": "same-site"}, False),
        ({"HTTP_ORIGIN": "http://box:8080", "HTTP_HOST": "box:8080"}, True),
        ({"HTTP_ORIGIN": "http://box:8081", "HTTP_HOST": "box:8080"}, False),
        ({"HTTP_ORIGIN": "http://BOX", "HTTP_HOST": "box"}, True),
        ({"HTTP_ORIGIN": "null", "HTTP_HOST": "null"}, False),
        ({"HTTP_ORIGIN": "http://[", "HTTP_HOST": "box"}, False),
    ],
)
def test_pages_of_other_sites(environ: dict[str, str], allowed: bool) -> None:
    open_to_all = Config()
    if allowed:
        assert auth.require_admin(open_to_all, environ) is None
    else:
        with pytest.raises(Forbidden):
            auth.require_admin(open_to_all, {**environ, "HTTP_AUTHORIZATION": "Bearer anything"})
        assert auth.require_admin(CONFIG, {**environ, "HTTP_X_API_KEY": "root"}) is not None
    with pytest.raises(Forbidden):
        auth.require_admin(CONFIG, {**environ, "HTTP_X_API_KEY": "user"})


def test_warning_for_open_addresses(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("qmflask").propagate = True
    auth.warn_if_open(Config(), [("127.0.0.1", 1), ("::1", 1, 0, 0), "/run/x.sock"])
    auth.warn_if_open(CONFIG, [("0.0.0.0", 1)])
    assert not caplog.records
    auth.warn_if_open(Config(), [("0.0.0.0", 1), ("fe80::1%eth0", 1, 0, 2)])
    assert "0.0.0.0" in caplog.text and "fe80::1" in caplog.text


def visit(key: ApiKey | None, environ: dict[str, Any]) -> Visit:
    """A visit of which only what `ask` looks at is there."""
    found = Visit.__new__(Visit)
    found.key, found.environ, found.id, found.path = key, {"REQUEST_METHOD": "POST", **environ}, "id", "/p"
    model = Model(id="m", patience_ms=1000, hold_ms=500)
    found.live = SimpleNamespace(config=Config(models={"m": model}))  # type: ignore[assignment]
    return found


@pytest.mark.parametrize(
    ("admin", "patience", "hold", "expected"),
    [
        (False, "10", "900", (1000, 500)),
        (False, "5000", "0", (5000, 0)),
        (True, "10", "900", (10, 900)),
        (True, "99999999999", None, (86_400_000, None)),
        (None, "10", "900", (1000, 500)),
        (None, None, None, (None, None)),
    ],
)
def test_asked_waits(admin: bool | None, patience: str | None, hold: str | None, expected: tuple[Any, Any]) -> None:
    key = None if admin is None else ApiKey(key="k", name="n", admin=admin)
    environ = {"HTTP_X_QM_PATIENCE_MS": patience, "HTTP_X_QM_HOLD_MS": hold}
    ask = visit(key, {k: v for k, v in environ.items() if v is not None}).ask("m", "sel")
    assert (ask.patience_ms, ask.hold_ms) == expected
    assert ask.detail["selector"] == "sel" and ask.detail.get("key") == (None if key is None else "n")


@pytest.mark.parametrize("text", ["", "-1", "1.5", "\u0663", "9" * 20])
def test_waits_that_are_none(text: str) -> None:
    with pytest.raises(BadRequest):
        visit(None, {"HTTP_X_QM_HOLD_MS": text}).ask("m")


def test_a_body_is_waited_for_with_a_limit_an_answer_is_written_without() -> None:
    found = visit(None, {})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(READ_SECONDS)
        found._sock = ours
        found.router = SimpleNamespace(hangups=SimpleNamespace(unwatch=lambda sock: None))  # type: ignore[assignment]
        found.writing()
        assert ours.gettimeout() is None
        found._unwatch()
        assert ours.gettimeout() == READ_SECONDS, "the server still writes the end of a chunked body"


def test_names_in_headers() -> None:
    assert header_text("org/m:7b") == "org/m:7b"
    assert header_text("\u00e9 100%") == "%C3%A9 100%25"
    assert header_text("a\r\nb") == "a%0D%0Ab"


def test_joined_addresses() -> None:
    assert join("http://h/base/?k=1", "/v1", "a=%2F") == "http://h/base/v1?k=1&a=%2F"
    assert join("http://h", "/v1", "") == "http://h/v1"
    assert rename_in_query("a=1&%6Dodel=x&model=y", "n w") == "a=1&%6Dodel=n+w&model=y"
    assert rename_in_query("a=1", "x") == "a=1"


def test_request_ids_are_sane_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    environ: dict[str, Any] = {"HTTP_X_REQUEST_ID": "abc-1"}
    assert request_id.assign(environ) == "abc-1" == environ[request_id.KEY]
    record = logging.LogRecord("qmflask", logging.INFO, "f", 1, "cut %s", ("x",), None)
    assert request_id.RequestIdFilter().filter(record) and record.getMessage() == "request abc-1: cut x"
    request_id.forget()
    plain = logging.LogRecord("qmflask", logging.INFO, "f", 1, "cut", (), None)
    assert request_id.RequestIdFilter().filter(plain) and plain.getMessage() == "cut"
    for bad in ("a b", "", "x" * 129, "%s", "a\nb"):
        assert request_id.assign({"HTTP_X_REQUEST_ID": bad}) != bad
    request_id.forget()


@pytest.mark.parametrize(
    ("method", "outcome", "worked"),
    [
        ("POST", Outcome(status=200, first_byte_ns=1), True),
        ("POST", Outcome(status=200, first_byte_ns=1, gone="left"), True),
        ("POST", Outcome(status=503, first_byte_ns=1), False),
        ("POST", Outcome(status=400, first_byte_ns=1), False),
        ("POST", Outcome(status=200), False),
        ("POST", Outcome(), False),
        ("GET", Outcome(status=200, first_byte_ns=1), False),
        ("POST", None, False),
    ],
)
def test_only_work_shows_that_a_model_is_loaded(method: str, outcome: Outcome | None, worked: bool) -> None:
    visit = SimpleNamespace(environ={"REQUEST_METHOD": method})
    assert Visit._answered(visit, outcome) is worked  # type: ignore[arg-type]


@pytest.mark.parametrize("rest", ["", "/", "//", "/no such", "/%2f/x"])
def test_paths_that_name_no_model_are_not_found(rest: str) -> None:
    live = SimpleNamespace(config=Config())
    error = upstream_path._not_found(live, rest, rest)  # type: ignore[arg-type]
    assert error.status == 404 and "no model is named" in error.message


def test_all_pages_get_one_and_the_same_message_of_a_moment() -> None:
    router: Any = None
    pages = [_Status(router), _Status(router)]

    def told(version: int, encoded: str) -> list[bytes]:
        moment = Moment(version, cast(Any, None), 1, {}, encoded, 0)
        return [piece for page in pages for piece in page.news(moment)]

    first, second = told(1, '{"a":1}')
    assert first is second
    assert first == b'event:message\ndata:{"type":"status","data":"{\\"a\\":1}"}\n\n'
    assert told(2, '{"a":1}') == []  # something changed that they do not show
    assert len(told(3, '{"a":2}')) == 2

"""Headers in both directions: what passes, what does not, and whose keys they are."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from qmflask import headers


def sent(environ: dict[str, Any], **options: Any) -> dict[str, str]:
    pairs = headers.request_headers(environ, **options)
    assert len({name.lower() for name, _ in pairs}) == len(pairs)
    return dict(pairs)


BASE = {
    "HTTP_HOST": "box:8080",
    "CONTENT_TYPE": "application/json",
    "CONTENT_LENGTH": "12",
    "HTTP_ACCEPT": "*/*",
    "REMOTE_ADDR": "10.0.0.9",
    "SERVER_NAME": "s",
    "wsgi.input": None,
}


def test_local_servers_get_the_clients_headers_and_host() -> None:
    assert sent(BASE) == {
        "Host": "box:8080",
        "Content-Type": "application/json",
        "Accept": "*/*",
        "X-Forwarded-For": "10.0.0.9",
    }


def test_hop_by_hop_headers_and_what_connection_names_stay_here() -> None:
    hop = {
        "HTTP_CONNECTION": "keep-alive, X-Private",
        "HTTP_X_PRIVATE": "1",
        "HTTP_KEEP_ALIVE": "5",
        "HTTP_TE": "trailers",
        "HTTP_TRANSFER_ENCODING": "chunked",
        "HTTP_UPGRADE": "h2c",
        "HTTP_EXPECT": "100-continue",
        "HTTP_PROXY_AUTHORIZATION": "x",
        "HTTP_X_PUBLIC": "2",
    }
    assert set(sent({**BASE, **hop})) == {"Host", "Content-Type", "Accept", "X-Forwarded-For", "X-Public"}


def test_forwarded_for_is_appended_and_kept_from_peers() -> None:
    chain = {**BASE, "HTTP_X_FORWARDED_FOR": "1.2.3.4", "HTTP_X_FORWARDED_PROTO": "https", "HTTP_FORWARDED": "for=x"}
    assert sent(chain)["X-Forwarded-For"] == "1.2.3.4, 10.0.0.9"
    peer = sent(chain, peer_host="peer:1")
    assert peer == {"Host": "peer:1", "Content-Type": "application/json", "Accept": "*/*"}
    assert "X-Forwarded-For" not in sent({**BASE, "REMOTE_ADDR": ""})


BASIC = "Basic " + base64.b64encode(b"anyone:key-one").decode()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTP_AUTHORIZATION", "Bearer key-one"),
        ("HTTP_AUTHORIZATION", "bEaReR  key-one"),
        ("HTTP_AUTHORIZATION", BASIC),
        ("HTTP_X_API_KEY", "key-one"),
    ],
)
def test_the_accepted_key_goes_no_further(name: str, value: str) -> None:
    passed = sent({**BASE, name: value}, accepted_key="key-one")
    assert passed.keys() == sent(BASE).keys()


def test_other_keys_pass_unless_the_model_has_its_own() -> None:
    theirs = {**BASE, "HTTP_AUTHORIZATION": "Bearer theirs", "HTTP_X_API_KEY": "key-one"}
    passed = sent(theirs, accepted_key="key-one")
    assert passed["Authorization"] == "Bearer theirs" and "X-Api-Key" not in passed
    own = sent(theirs, upstream_key="own")
    assert (own["Authorization"], own["X-Api-Key"]) == ("Bearer own", "own")


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({"HTTP_AUTHORIZATION": BASIC}, "key-one"),
        ({"HTTP_AUTHORIZATION": "bEaReR key-one"}, "key-one"),
        ({"HTTP_AUTHORIZATION": "Bearer wrong", "HTTP_X_API_KEY": "right"}, "wrong"),
        ({"HTTP_AUTHORIZATION": "Basic %%%", "HTTP_X_API_KEY": "right"}, "right"),
        ({"HTTP_AUTHORIZATION": "Digest x", "HTTP_X_API_KEY": "right"}, "right"),
        ({"HTTP_X_API_KEY": ""}, ""),
        ({}, None),
    ],
)
def test_the_key_a_request_offers(environ: dict[str, str], key: str | None) -> None:
    assert headers.offered_key(environ) == key


def test_codings_that_can_be_read() -> None:
    assert headers.readable_codings("br, gzip;q=0.8, deflate, zstd") == "gzip;q=0.8, deflate"
    assert headers.readable_codings("br") == "identity"
    assert sent({**BASE, "HTTP_ACCEPT_ENCODING": "br, gzip"}, readable=True)["Accept-Encoding"] == "gzip"
    assert "Accept-Encoding" not in sent(BASE, readable=True)


def test_responses_keep_repeated_headers_and_lose_hop_by_hop() -> None:
    upstream = [
        ("Set-Cookie", "a=1"),
        ("set-cookie", "b=2"),
        ("Connection", "close, X-Hop"),
        ("X-Hop", "1"),
        ("Transfer-Encoding", "chunked"),
        ("Content-Encoding", "gzip"),
        ("Bad Name", "x"),
        ("Bad-Value", "a\x00b"),
        ("X-QM-Model", "theirs"),
        ("Content-Length", "5, 5"),
    ]
    passed = headers.response_headers(upstream, [("X-QM-Model", "ours"), ("X-QM-Bad", "鳥")], 5)
    assert passed == [
        ("Set-Cookie", "a=1"),
        ("set-cookie", "b=2"),
        ("Content-Encoding", "gzip"),
        ("X-QM-Model", "ours"),
        ("Content-Length", "5"),
    ]


def test_event_streams_are_marked_for_nginx() -> None:
    stream = [("Content-Type", "text/event-stream; charset=utf-8"), ("X-Accel-Buffering", "yes")]
    assert headers.response_headers(stream)[1:] == [("X-Accel-Buffering", "no")]


@pytest.mark.parametrize(
    ("status", "reason", "line"),
    [(200, "OK", "200 OK"), (200, "", "200 OK"), (404, "a\x00b", "404 Not Found"), (799, "", "799 Unknown")],
)
def test_status_lines(status: int, reason: str, line: str) -> None:
    assert headers.status_line(status, reason) == line

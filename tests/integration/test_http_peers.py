"""Peers, and model servers and peers that answer badly: whatever they do, the client gets a clear answer in time."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.integration.echoing import echo_server, shared
from tests.integration.scripted import Handler, Server, chunk, read_request
from tests.service import Reply, Service, eventually


@dataclass
class Stage:
    """A peer whose next answers a test decides; `seen` are the heads it got."""

    handler: Handler | None = None
    seen: list[bytes] = field(default_factory=list)
    served: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __call__(self, sock: socket.socket) -> None:
        assert self.handler is not None
        self.handler(sock)
        self.served.release()

    def says(self, *pieces: bytes, pause: float = 0.0) -> None:
        """Answer one request per connection with these bytes, then close."""

        def handler(sock: socket.socket) -> None:
            head, body = read_request(sock)
            self.seen.append(head + b"\r\n\r\n" + body)
            for piece in pieces:
                sock.sendall(piece)
                time.sleep(pause)  # the pace is what such tests are about

        self.handler = handler


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[Stage, int]]:
    """The scripted peer and its port."""
    stage = Stage()
    with Server(stage) as server:
        yield stage, server.port


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, stage: tuple[Stage, int]) -> Iterator[Service]:
    """A service in front of an echoing peer, a scripted one, and one that is not there."""
    with echo_server() as port:
        config: dict[str, Any] = {
            "models": {"both": {"cmd": "sleep 60", "proxy": "http://127.0.0.1:1"}},
            "peers": {
                "far": {
                    "proxy": f"http://127.0.0.1:{port}/base?v=1",
                    "apiKey": "peer-key",
                    "models": ["m1", "org/m2", "both"],
                    "filters": {
                        "stripParams": "drop",
                        "setParams": {"add": 1},
                        "setParamsByID": {"far/m1": {"q": 1}, "m1": {"bare": 1}},
                    },
                },
                "near": {"proxy": f"http://127.0.0.1:{port}", "models": ["m1", "n1"]},
                "bad": {
                    "proxy": f"http://127.0.0.1:{stage[1]}",
                    "models": ["x"],
                    "timeouts": {"responseHeader": 1, "connect": 1},
                },
                "gone": {"proxy": "http://127.0.0.1:1", "models": ["m9"]},
            },
        }
        with shared(tmp_path_factory.mktemp("peers"), config) as service:
            yield service


@pytest.fixture
def bad(stage: tuple[Stage, int]) -> Iterator[Stage]:
    """The scripted peer, with nothing seen yet."""
    stage[0].seen.clear()
    yield stage[0]


def body_of(reply: Reply) -> dict[str, Any]:
    """What the peer got, parsed."""
    found = json.loads(reply.json()["body"])
    assert isinstance(found, dict)
    return found


# --- peers ------------------------------------------------------------------------------------------------


def test_qualified_and_bare_names(service: Service) -> None:
    reply = service.post("/v1/completions?z=1", b'{"model": "far/m1","drop":2, "n" : 1.0}')
    assert reply.json()["path"] == "/base/v1/completions?v=1&z=1"
    assert reply.json()["body"] == '{"model": "m1","n" : 1.0,"add":1,"q":1}'
    assert reply.header("X-QM-Model") == "far/m1"
    assert body_of(service.post("/v1/completions", {"model": "org/m2"}))["model"] == "org/m2"
    assert service.post("/v1/completions", {"model": "m1"}).code == "model_not_found", "two peers offer it"
    assert service.post("/v1/completions", {"model": "n1"}).status == 200
    reply = service.get("/upstream/far/org/m2/a%2Fb?c")
    assert reply.json()["path"] == "/base/a%2Fb?v=1&c"
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    reply = service.post("/v1/images/edits", b"a=1&model=far%2Fm1&b", headers=form)
    assert reply.json()["body"] == "a=1&model=m1&b"
    assert service.get("/props?model=far%2Fm1&x=%20").json()["path"] == "/base/props?v=1&model=m1&x=%20"


def test_a_peer_gets_its_own_key_and_is_told_little(service: Service) -> None:
    headers = {"x-api-key": "mine", "Authorization": "Bearer mine", "X-Forwarded-Proto": "https", "Forwarded": "for=x"}
    seen = {k.lower(): v for k, v in service.post("/infill", {"model": "far/m1"}, headers=headers).json()["headers"]}
    assert seen["authorization"] == "Bearer peer-key" and seen["x-api-key"] == "peer-key"
    assert not {"x-forwarded-for", "x-forwarded-proto", "forwarded"} & seen.keys()
    assert seen["host"].startswith("127.0.0.1:") and seen["host"] != f"127.0.0.1:{service.port}"


def test_a_peer_that_is_not_there(service: Service) -> None:
    reply = service.post("/v1/completions", {"model": "gone/m9"})
    assert (reply.status, reply.code) == (502, "upstream_unreachable")
    assert reply.json()["error"]["message"].startswith("peer proxy error: peer gone")
    assert "gone/m9" in [r["id"] for r in service.get("/v1/models").json()["data"]], "it stays listed"
    with service.stream("gone/m9") as stream:
        assert stream.status == 502


def test_requests_at_peers_are_listed_and_can_be_cancelled(service: Service, bad: Stage) -> None:
    release = threading.Event()

    def handler(sock: socket.socket) -> None:
        read_request(sock)
        release.wait(20)

    bad.handler = handler
    sock = service.open("/v1/completions", {"model": "bad/x"}, {"X-Request-Id": "peer-1"})
    eventually(lambda: service.get("/api/inflight").json()["requests"], "it is listed")
    assert service.post("/api/inflight/peer-1/cancel", b"").status == 200
    answer = sock.recv(65536)
    sock.close()
    release.set()
    assert answer.startswith(b"HTTP/1.1 499")
    eventually(lambda: service.get("/api/inflight").json()["requests"] == [], "it is gone")


# --- bad answers ------------------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\n"
BROKEN_HEADS = {
    "garbage": b"\x00\xff\x00garbage\r\n\r\n",
    "nothing": b"",
    "half a status line": b"HTTP/1.1 2",
    "no number": b"HTTP/1.1 abc OK\r\n\r\n",
    "headers that end early": OK + b"Content-Type: a/b\r\n",
    "endless headers": OK + b"X: " + b"y" * 2_000_000,
    "two lengths": OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "a negative length": OK + b"Content-Length: -1\r\n\r\n",
    "early end of a short body": OK + b"Content-Length: 10\r\n\r\nabc",
}


@pytest.mark.parametrize("answer", BROKEN_HEADS.values(), ids=BROKEN_HEADS)
def test_answers_that_are_none(service: Service, bad: Stage, answer: bytes) -> None:
    bad.says(answer)
    reply = service.post("/v1/completions", {"model": "bad/x"})
    assert (reply.status, reply.code) == (502, "upstream_unreachable"), reply.body


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ([OK + b"Content-Length: 3\r\n\r\nabcdefgh"], b"abc"),
        ([b"HTTP/1.0 200 OK\r\n\r\nabc"], b"abc"),
        ([b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc"], b"abc"),
        ([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 E\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\nz"], b"z"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"ab") + b"0\r\nX-Trailer: 1\r\n\r\n"], b"ab"),
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"q" * 3_000_000) + chunk(b"")], b"q" * 3_000_000),
        ([b"HTTP/1.1 200 \xff\xfe odd\r\nContent-Length: 1\r\n\r\nz"], b"z"),
    ],
)  # fmt: skip
def test_odd_but_honest_answers(service: Service, bad: Stage, pieces: list[bytes], body: bytes) -> None:
    bad.says(*pieces)
    reply = service.post("/v1/completions", {"model": "bad/x"})
    assert (reply.status, reply.body) == (200, body)


def test_a_slow_drip_of_headers_ends_at_the_deadline(service: Service, bad: Stage) -> None:
    def handler(sock: socket.socket) -> None:
        read_request(sock)
        for _ in range(100):
            sock.sendall(b"H")
            time.sleep(0.05)

    bad.handler = handler
    reply = service.post("/v1/completions", {"model": "bad/x"})
    assert (reply.status, reply.code) in ((504, "upstream_timeout"), (502, "upstream_unreachable"))


def test_redirects_are_passed_never_followed(service: Service, bad: Stage) -> None:
    bad.says(b"HTTP/1.1 307 Go\r\nLocation: /elsewhere?a=%2F\r\nContent-Length: 0\r\n\r\n")
    reply = service.post("/v1/completions", {"model": "bad/x"})
    assert (reply.status, reply.header("Location")) == (307, "/elsewhere?a=%2F")
    assert len(bad.seen) == 1


def test_headers_pass_as_they_are(service: Service, bad: Stage) -> None:
    bad.says(
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-1/9\r\nContent-Encoding: gzip\r\nSet-Cookie: a=1\r\n"
        b"Set-Cookie: b=2\r\nConnection: X-Mine\r\nX-Mine: 1\r\nContent-Length: 2\r\n\r\n\x1f\x8b"
    )
    reply = service.post("/v1/completions", {"model": "bad/x"}, headers={"Accept-Encoding": "br, gzip;q=0.5"})
    assert (reply.status, reply.body) == (206, b"\x1f\x8b")
    assert [v for k, v in reply.headers if k == "Set-Cookie"] == ["a=1", "b=2"]
    assert reply.header("Content-Range") == "bytes 0-1/9" and reply.header("Content-Encoding") == "gzip"
    assert reply.header("X-Mine") is None and reply.header("Content-Type") is None
    assert b"gzip;q=0.5" in bad.seen[0] and b"br," not in bad.seen[0], "only codings that can be read"


@pytest.mark.parametrize(
    ("answer", "event"),
    [
        (OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"data: 1\n\n"), True),
        (OK + b"Content-Type: text/event-stream\r\nContent-Length: 900\r\n\r\ndata: 1\n\n", True),
        (OK + b"Content-Type: a/b\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * 90_000), False),
        (OK + b"Content-Type: a/b\r\nContent-Length: 900000\r\n\r\n" + b"x" * 90_000, False),
    ],
)
def test_a_stream_that_breaks_never_ends_well(service: Service, bad: Stage, answer: bytes, event: bool) -> None:
    bad.says(answer)
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=10)
    connection.request("POST", "/v1/completions", b'{"model": "bad/x", "stream": true}')
    response = connection.getresponse()
    data = b""
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        while True:
            piece = response.read(1)
            if not piece and response.length:
                raise http.client.IncompleteRead(data)
            assert piece, "it ended as if it were whole"
            data += piece
    connection.close()
    assert (b"event: error\n" in data) is event


def test_no_slot_and_no_lease_is_left(service: Service) -> None:
    eventually(lambda: service.get("/api/inflight").json()["requests"] == [], "nothing is in flight")
    assert all(service.post("/v1/completions", {"model": "far/m1"}).status == 200 for _ in range(40))

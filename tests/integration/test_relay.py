"""The relayed response as an iterable: what the server is handed, and what its owner is told at the end."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from qmflask.errors import ClientGone, QmflaskError, UpstreamTimeout, UpstreamUnreachable
from qmflask.hangup import Client
from qmflask.relay import Outcome, Relayed, ToolCallScan, error_event, open_relay
from qmflask.upstream import Timeouts, Upstream, UpstreamRequest
from tests.integration.scripted import Server, answering, chunk, closed_by_peer, read_request

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

WAIT = 20
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
RAW = b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nTransfer-Encoding: chunked\r\n\r\n"


class Relay:
    """Relays from one server and keeps what `on_end` was told."""

    def __init__(self) -> None:
        self.upstream = Upstream()
        self.client = Client()
        self.ends: list[Outcome] = []

    def open(self, server: Server, *, method: str = "POST", timeouts: Timeouts = Timeouts(), **more: Any) -> Relayed:
        body = b"{}" if method == "POST" else None
        request = UpstreamRequest(method, server.url + "/v1/x", [("Host", "h")], body, timeouts=timeouts)
        return open_relay(self.upstream, request, self.client, on_end=self.ends.append, **more)

    @property
    def end(self) -> Outcome:
        assert len(self.ends) == 1
        return self.ends[0]


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = Relay()
    yield relay
    relay.upstream.close()


def close(relayed: Relayed) -> None:
    relayed.body.close()  # type: ignore[attr-defined]


def test_a_short_answer_is_one_piece_and_ends_in_close(relay: Relay) -> None:
    with Server(answering(JSON + b'X-A: b\r\nContent-Length: 13\r\n\r\n{"a": "bcdef"}')) as server:
        relayed = relay.open(server, extra_headers=[("X-QM-Model", "finch")])
        assert relayed.status == "200 OK"
        assert relayed.headers == [
            ("Content-Type", "application/json"),
            ("X-A", "b"),
            ("X-QM-Model", "finch"),
            ("Content-Length", "13"),
        ]
        assert list(relayed.body) == [b'{"a": "bcdef"']
        assert relay.ends == []
        close(relayed)
        close(relayed)
    end = relay.end
    assert (end.status, end.bytes, end.complete, end.error, end.gone) == (200, 13, True, None, None)
    assert end.content_type == "application/json"
    assert end.first_byte_ns and end.headers_ns
    assert end.begin_ns <= end.headers_ns <= end.first_byte_ns <= end.end_ns


def test_a_chunked_answer_that_is_whole_at_hand_gets_a_length(relay: Relay) -> None:
    with Server(answering(RAW + chunk(b"abc") + chunk(b"de") + chunk(b""))) as server:
        relayed = relay.open(server)
        body = b"".join(relayed.body)
        close(relayed)
    assert body == b"abcde"
    # Head and body may come in two packets; then it is a stream.
    assert ("Content-Length", "5") in relayed.headers or relay.end.complete


@pytest.mark.parametrize(
    ("method", "sent", "announced"),
    [
        ("HEAD", JSON + b"Content-Length: 99\r\n\r\n", ["99"]),
        ("HEAD", JSON + b"Content-Length: banana\r\n\r\n", []),
        ("GET", b"HTTP/1.1 304 X\r\nContent-Length: 99\r\n\r\n", ["99"]),
        ("GET", b"HTTP/1.1 204 X\r\nContent-Length: 99\r\n\r\n", []),
    ],
)
def test_what_is_announced_about_another_body_stays(
    relay: Relay, method: str, sent: bytes, announced: list[str]
) -> None:
    with Server(answering(sent)) as server:
        relayed = relay.open(server, method=method)
        assert [value for name, value in relayed.headers if name == "Content-Length"] == announced
        assert list(relayed.body) == []
        close(relayed)
    assert relay.end.complete and relay.end.bytes == 0


def test_headers_are_let_go_before_the_first_event_and_events_are_not_delayed(relay: Relay) -> None:
    go = threading.Event()

    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(SSE)
        for number in range(3):
            assert go.wait(WAIT)
            go.clear()
            sock.sendall(chunk(b"data: %d\n\n" % number))
        sock.sendall(chunk(b""))

    with Server(handler) as server:
        relayed = relay.open(server)
        assert ("X-Accel-Buffering", "no") in relayed.headers
        body = iter(relayed.body)
        assert next(body) == b""
        for number in range(3):
            go.set()
            assert next(body) == b"data: %d\n\n" % number
        with pytest.raises(StopIteration):
            next(body)
        assert relay.end.complete, "all is given back before the client can see the end, and come again"
        close(relayed)
    assert relay.end.complete


def test_events_at_hand_come_first_without_an_empty_piece(relay: Relay) -> None:
    with Server(answering(SSE + chunk(b"data: 0\n\n") + chunk(b""))) as server:
        relayed = relay.open(server)
        pieces = list(relayed.body)
        close(relayed)
    assert b"".join(pieces) == b"data: 0\n\n"


@pytest.mark.parametrize(
    ("sent", "announced"),
    [
        (b"Content-Length: 5, 5\r\ncontent-length: 5\r\n\r\nhello", {"5"}),
        (b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"hello") + chunk(b""), {"5", None}),
    ],
)
def test_lengths_that_servers_would_stumble_over(relay: Relay, sent: bytes, announced: set[str | None]) -> None:
    with Server(answering(JSON + sent)) as server:
        relayed = relay.open(server)
        lengths = [value for name, value in relayed.headers if name.lower() == "content-length"]
        assert b"".join(relayed.body) == b"hello"
        close(relayed)
    assert len(lengths) < 2 and (lengths or [None])[0] in announced


def test_a_response_that_is_dropped_still_ends(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    with Server(answering(JSON + b"Content-Length: 2\r\n\r\n{}")) as server:
        relayed = relay.open(server)
        del relayed
        assert relay.end.status == 200 and not relay.end.complete
    assert "dropped without close" in caplog.text


class Observer:
    """Notes what it is shown."""

    def __init__(self) -> None:
        self.status = 0
        self.data = b""

    def begin(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.status = status

    def feed(self, data: bytes) -> None:
        self.data += data


@pytest.mark.parametrize("head", [SSE, JSON + b"Transfer-Encoding: chunked\r\n\r\n"])
def test_an_observer_sees_all_that_passes(relay: Relay, head: bytes) -> None:
    observer = Observer()
    with Server(answering(head + chunk(b"abc") + chunk(b"de") + chunk(b""))) as server:
        relayed = relay.open(server, observer=observer)
        list(relayed.body)
        close(relayed)
    assert (observer.status, observer.data) == (200, b"abcde")


# --- failures ---------------------------------------------------------------------------------------------


def drain(relayed: Relayed) -> tuple[bytes, BaseException | None]:
    """All that the server would send, and what was raised at the end of it."""
    data = b""
    try:
        for piece in relayed.body:
            data += piece
    except Exception as error:
        return data, error
    finally:
        close(relayed)
    return data, None


def test_an_event_stream_that_breaks_ends_in_an_error_event_and_a_cut(relay: Relay) -> None:
    with Server(answering(SSE + chunk(b"data: 0\n\n"))) as server:
        data, error = drain(relay.open(server))
    assert isinstance(error, ConnectionResetError)
    event, payload = data.removeprefix(b"data: 0\n\n").split(b"\n", 1)
    assert event == b"event: error" and payload.endswith(b"\n\n")
    body = json.loads(payload.removeprefix(b"data: "))
    assert body["src"] == "qmflask" and body["error"]["code"] == "upstream_unreachable"
    assert isinstance(relay.end.error, UpstreamUnreachable) and not relay.end.complete and relay.end.gone is None


def test_a_compressed_event_stream_that_breaks_is_cut_without_a_word(relay: Relay) -> None:
    packed = SSE.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    with Server(answering(packed + chunk(b"\x1f\x8b"))) as server:
        data, error = drain(relay.open(server))
    assert data == b"\x1f\x8b" and isinstance(error, ConnectionResetError)


def test_an_error_event_begins_on_a_line_of_its_own() -> None:
    error = UpstreamUnreachable("gone\nwith a line end")
    for before in (b"", b"x\n\n", b"\r\n\r\n", b"\r\r"):
        assert error_event(error, before).startswith(b"event: error\ndata: {")
    for before in (b"data: {", b"x\n", b"\r\n"):
        assert error_event(error, before).startswith(b"\n\nevent: error\n")
    assert error_event(error).count(b"\n") == 3


@pytest.mark.parametrize(
    "sent",
    [RAW + chunk(b"RIFF"), b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\nRIFF"],
    ids=["chunked", "length"],
)
def test_other_bodies_that_break_are_cut_at_once(relay: Relay, sent: bytes) -> None:
    with Server(answering(sent)) as server:
        data, error = drain(relay.open(server))
    assert data == b"RIFF" and isinstance(error, ConnectionResetError)
    assert isinstance(relay.end.error, UpstreamUnreachable) and not relay.end.complete


@pytest.mark.parametrize("sent", [b"", b"garbage\r\n\r\n", JSON + b"Content-Length: 10\r\n\r\nshort"])
def test_failures_before_the_headers_are_raised_after_the_end_was_told(relay: Relay, sent: bytes) -> None:
    with Server(answering(sent)) as server, pytest.raises(UpstreamUnreachable) as caught:
        relay.open(server)
    assert relay.end.error is caught.value and not relay.end.complete


def test_a_deadline_before_the_headers(relay: Relay) -> None:
    with Server(lambda sock: closed_by_peer(sock) and None) as server, pytest.raises(UpstreamTimeout):
        relay.open(server, timeouts=Timeouts(response_header=0.1))
    assert relay.end.status is None and isinstance(relay.end.error, UpstreamTimeout)


def test_a_client_that_is_gone_before_the_headers(relay: Relay) -> None:
    relay.client.cancel("gone")
    with Server(answering(JSON)) as server, pytest.raises(ClientGone):
        relay.open(server)
    assert relay.end.gone == "gone" and relay.end.error is None


@pytest.mark.parametrize("reason", ["gone", "stalled"])
def test_a_client_that_leaves_amid_the_answer(relay: Relay, reason: str) -> None:
    cut = threading.Event()

    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(SSE + chunk(b"data: 0\n\n"))
        assert closed_by_peer(sock)
        cut.set()

    with Server(handler) as server:
        relayed = relay.open(server)
        body = iter(relayed.body)
        while not next(body):
            pass
        relay.client.cancel(reason)
        with pytest.raises(BrokenPipeError):
            next(body)
        assert cut.wait(WAIT)
        close(relayed)
    assert relay.end.gone == reason and not relay.end.complete and relay.end.error is None


@pytest.mark.parametrize("head", [SSE, RAW])
@pytest.mark.parametrize(
    ("reason", "code"),
    [("cancelled", "cancelled"), ("shutting_down", "shutting_down"), ("idle", "model_unloaded")],
)
def test_a_client_that_is_sent_away_is_told_why(relay: Relay, head: bytes, reason: str, code: str) -> None:
    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(head + chunk(b"data: 0\n"))
        assert closed_by_peer(sock)

    with Server(handler) as server:
        relayed = relay.open(server)
        body = iter(relayed.body)
        while not next(body):
            pass
        relay.client.cancel(reason)
        if head is SSE:
            event = next(body)
            assert event.startswith(b"\n\nevent: error\ndata: {") and json.loads(event[21:])["error"]["code"] == code
            assert relay.client.writing_since is not None, "a client that does not take it is noticed"
        with pytest.raises(ConnectionResetError):
            next(body)
        close(relayed)
    end = relay.end
    assert not end.complete
    if reason == "cancelled":
        assert (end.gone, end.error) == ("cancelled", None), "what somebody asked for is no failure"
    else:
        assert end.gone is None and end.error is not None and end.error.code == code


def test_an_idle_upstream_is_told_like_one_that_breaks(relay: Relay) -> None:
    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(SSE + chunk(b"data: 0\n\n"))
        assert closed_by_peer(sock)

    with Server(handler) as server:
        data, error = drain(relay.open(server, timeouts=Timeouts(idle=0.2)))
    assert b"event: error\n" in data and b"upstream_timeout" in data and isinstance(error, ConnectionResetError)


def test_a_client_that_is_sent_away_before_the_headers(relay: Relay) -> None:
    relay.client.cancel("shutting_down")
    with Server(answering(JSON)) as server, pytest.raises(ClientGone):
        relay.open(server)
    assert relay.end.error is not None and relay.end.error.code == "shutting_down" and relay.end.gone is None


@pytest.mark.parametrize("steps", [0, 1])
def test_a_body_the_server_drops_ends_and_cuts_the_upstream(relay: Relay, steps: int) -> None:
    cut = threading.Event()

    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(SSE + chunk(b"data: 0\n\n"))
        assert closed_by_peer(sock)
        cut.set()

    with Server(handler) as server:
        relayed = relay.open(server)
        body = iter(relayed.body)
        for _ in range(steps):
            next(body)
        close(relayed)
        assert cut.wait(WAIT)
    assert not relay.end.complete


def test_writing_is_marked_while_the_server_has_bytes_in_hand(relay: Relay) -> None:
    with Server(answering(RAW + chunk(b"a") + chunk(b""))) as server:
        relayed = relay.open(server)
        body = iter(relayed.body)
        while not next(body):
            assert relay.client.writing_since is None
        assert relay.client.writing_since is not None
        close(relayed)
    assert relay.client.writing_since is None


def test_the_request_bodys_own_error_is_raised_as_it_is(relay: Relay) -> None:
    class Mine(QmflaskError):
        pass

    def breaking() -> Iterator[bytes]:
        yield b"a"
        raise Mine("short")

    with Server(lambda sock: closed_by_peer(sock) and None) as server:
        request = UpstreamRequest("POST", server.url, [("Host", "h")], breaking())
        with pytest.raises(Mine):
            open_relay(relay.upstream, request, relay.client, on_end=relay.ends.append)
    assert isinstance(relay.end.error, Mine)


# --- tool calls -------------------------------------------------------------------------------------------

CALLS = [
    b'{"choices":[{"finish_reason":"tool_calls"}]}',
    b'{"choices": [{"delta": {}, "finish_reason" : "tool_calls"}]}',
    b'data: {"type":"message_delta","delta":{"stop_reason": "tool_use"}}\n\n',
    b'{"output":[{"type":"function_call","name":"f"}]}',
]
NO_CALLS = [
    b'{"choices":[{"finish_reason":"stop","message":{"tool_calls":[]}}]}',
    b'{"content":"\\"finish_reason\\":\\"tool_calls\\""}',
    b'{"stop_reason":"end_turn","content":[{"type":"tool_use"}]}',
]


@pytest.mark.parametrize("split", [1, 2, 5, 17, 40, 10_000])
def test_tool_calls_are_seen_across_any_border(split: int) -> None:
    for body, expected in [(b, True) for b in CALLS] + [(b, False) for b in NO_CALLS]:
        scan = ToolCallScan()
        padded = b" " * 1000 + body + b" " * 1000
        for start in range(0, len(padded), split):
            scan.feed(padded[start : start + split])
        assert scan.found == expected, body


@pytest.mark.parametrize(
    ("head", "seen"),
    [(SSE, True), (RAW, False), (JSON + b"Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n", False)],
)
def test_tool_calls_are_looked_for_where_they_can_be(relay: Relay, head: bytes, seen: bool) -> None:
    with Server(answering(head + chunk(CALLS[0]) + chunk(b""))) as server:
        drain(relay.open(server))
    assert relay.end.tool_call == seen

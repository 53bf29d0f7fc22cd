"""What a streaming client sees while its model loads, and how failures reach it then."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.echoing import shared
from tests.service import Service, eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Models that load for a while, one at a time."""

    def config(service: Service) -> dict[str, Any]:
        def slow(name: str, **flags: Any) -> dict[str, Any]:
            return {"cmd": service.fake(name, load_time=1.3, **flags), "sendLoadingState": True}

        return {
            "models": {
                "think": slow("think"),
                "comment": {**slow("comment"), "sendLoadingState": "comments"},
                "quiet": {**slow("quiet"), "sendLoadingState": False},
                "broken": {**slow("broken", exit_after=1.1, health="never"), "sendLoadingState": "comments"},
                "refuses": slow("refuses", status=418),
                "dies": slow("dies", die_after=2),
            }
        }

    with shared(tmp_path_factory.mktemp("loading"), config) as service:
        yield service


def everything(
    service: Service, model: str, path: str = "/v1/chat/completions", **more: Any
) -> tuple[Any, bytes, bool]:
    """One streamed request: (response, all bytes, whether the end was regular)."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    body = json.dumps({"model": model, "stream": True, "messages": [], **more})
    connection.request("POST", path, body, {"Content-Type": "application/json", "Accept-Encoding": "gzip"})
    response = connection.getresponse()
    data, whole = b"", True
    try:
        while piece := response.read(1):
            data += piece
    except (http.client.IncompleteRead, ConnectionError):
        whole = False
    connection.close()
    return response, data, whole


def payloads(data: bytes) -> list[Any]:
    """The JSON of the `data:` lines; `[DONE]` as text."""
    lines = [line[5:].strip() for line in data.split(b"\n") if line.startswith(b"data:")]
    return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]


def reset(service: Service) -> None:
    """Nothing is loaded."""
    assert service.get("/unload").status == 200


def test_reasoning_frames(service: Service) -> None:
    reset(service)
    response, data, whole = everything(service, "think")
    assert whole and response.status == 200
    assert response.getheader("X-QM-Model") == "think"
    assert response.getheader("X-Accel-Buffering") == "no"
    found = payloads(data)
    frames = [p for p in found if p != "[DONE]" and "id" not in p]
    assert all(list(f) == ["choices"] and list(f["choices"][0]["delta"]) == ["reasoning_content"] for f in frames)
    text = "".join(f["choices"][0]["delta"]["reasoning_content"] for f in frames)
    assert text.startswith("\u2501" * 5 + "\n") and "think" in text
    assert "\nReady after " in text and text.endswith("\u2501" * 5 + "\n \n")
    assert found[-1] == "[DONE]"
    assert "I am think." in data.decode()
    _, data, _ = everything(service, "think")
    assert b"reasoning_content" not in data, "it is ready now"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/completions"])
def test_comment_frames(service: Service, path: str) -> None:
    reset(service)
    _, data, whole = everything(service, "comment", path)
    assert whole
    comments = [line for line in data.decode().split("\n") if line.startswith(":")]
    assert comments[0] == ": qm-status: waiting 1"
    assert any(line.startswith(": qm-status: loading ") and line.endswith("s") for line in comments)
    assert comments[-3:-1] == [": qm-status: ready", ": X-QM-Loaded: 1"]
    assert int(comments[-1].removeprefix(": X-QM-Wait-Ms: ")) >= 1000
    assert "I am comment." in data.decode()


@pytest.mark.parametrize(
    ("model", "path", "stream"),
    [
        ("quiet", "/v1/chat/completions", True),
        ("think", "/v1/completions", True),
        ("think", "/v1/chat/completions", False),
        ("comment", "/v1/chat/completions", "no"),
    ],
)
def test_no_frames_where_nobody_expects_them(service: Service, model: str, path: str, stream: Any) -> None:
    reset(service)
    response, data, whole = everything(service, model, path, stream=stream)
    assert whole and response.getheader("X-QM-Loaded") == "1"
    assert b"reasoning_content" not in data and b"qm-status" not in data


def test_a_failed_load_becomes_an_error_event(service: Service) -> None:
    response, data, whole = everything(service, "broken")
    assert response.status == 200 and not whole, "a failure never ends as if it were whole"
    assert b"event: error\ndata: " in data
    error = payloads(data)[-1]
    assert error["error"]["code"] == "model_start_failed" and error["src"] == "qmflask"


def test_an_answer_that_is_no_stream_becomes_an_error_event(service: Service) -> None:
    reset(service)
    _, data, whole = everything(service, "refuses")
    assert not whole
    assert payloads(data)[-1] == {"error": {"message": "refuses was told to say 418"}}


def test_a_death_in_the_middle_is_seen(service: Service) -> None:
    reset(service)
    _, data, whole = everything(service, "dies")
    assert not whole
    assert payloads(data)[-1]["error"]["code"] == "upstream_unreachable"


def test_refusals_before_the_first_frame_keep_their_status(service: Service) -> None:
    assert everything(service, "nobody")[0].status == 404


def test_a_client_that_leaves_while_it_loads_is_forgotten(service: Service) -> None:
    reset(service)
    for model in ("think", "comment"):
        sock = service.open("/v1/chat/completions", {"model": model, "stream": True, "messages": []})
        while b"\n\n" not in sock.recv(4096).split(b"\r\n\r\n")[-1]:
            pass
        sock.close()
        eventually(lambda: service.get("/api/inflight").json()["requests"] == [], "nothing is in flight", 5)
    service.wait_idle()


def test_a_cancelled_waiter_is_told(service: Service) -> None:
    reset(service)
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as sock:
        body = b'{"model": "quiet", "messages": []}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine-7\r\n"
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: service.post("/api/inflight/mine-7/cancel", b"").status == 200, "it can be cancelled")
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 499") and b'"code":"cancelled"' in answer
    assert service.post("/api/inflight/mine-7/cancel", b"").code == "not_found"

"""Websockets, with a real client and a real server: direct, through nginx, and through all that may end them."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect

from tests.integration.conftest import StartService
from tests.integration.echoing import shared
from tests.integration.fronting import nginx
from tests.service import REPO, PortBlock, Service, eventually

_SCRIPT = REPO / "tests" / "parts" / "websocket_server.py"


def talking(service: Service, name: str, **more: Any) -> dict[str, Any]:
    """A model that speaks websockets."""
    cmd = f"{sys.executable} {_SCRIPT} ${{PORT}} {name} {service.events_path}"
    return {"cmd": cmd, "proxy": "http://127.0.0.1:${PORT}", **more}


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, int]]]:
    """A service of one worker, and its ports: its own and nginx's."""
    folder = tmp_path_factory.mktemp("websockets")
    socket_path = folder / "http.sock"
    far = PortBlock()
    port = far.take()

    def config(service: Service) -> dict[str, Any]:
        models = {
            "talk": talking(service, "talk", aliases=["al/ias"]),
            "one": talking(service, "one", concurrencyLimit=1),
            "page": talking(service, "page", compat={"ignoreWebsockets": True}, concurrencyLimit=1),
            "asleep": talking(service, "asleep", compat={"ignoreWebsockets": True}),
            "comfyui_auto": talking(service, "comfyui_auto"),
        }
        return {
            "apiKeys": [{"key": "root", "admin": True}, {"key": "narrow", "models": ["page"]}],
            "models": models,
            "groups": {"all": {"swap": False, "members": list(models)}},
            "peers": {"far": {"proxy": f"http://127.0.0.1:{port}", "models": ["m"], "apiKey": "for-the-peer"}},
        }

    with (
        shared(folder / "service", config, args=("--bind", f"unix:{socket_path}"), workers=1) as service,
        nginx(folder / "nginx", socket_path) as through,
    ):
        yield service, {"direct": service.port, "nginx": through, "far": port}
    far.close()


@pytest.fixture(params=["direct", "nginx"])
def port(fronts: tuple[Service, dict[str, int]], request: pytest.FixtureRequest) -> int:
    """Where a client connects."""
    return fronts[1][request.param]


@pytest.fixture
def service(fronts: tuple[Service, dict[str, int]]) -> Iterator[Service]:
    """The service; after each test nothing is held and nothing was complained of."""
    service, _ = fronts
    yield service
    eventually(lambda: not service.leases(), "no lease is left")
    assert "Traceback" not in service.log() and "[ERROR]" not in service.log()


KEY = {"Authorization": "Bearer root"}


def dial(port: int, path: str, headers: dict[str, str] | None = None, **more: Any) -> ClientConnection:
    """A websocket."""
    given = {**KEY, **(headers or {})}
    return connect(f"ws://127.0.0.1:{port}{path}", additional_headers=given, max_size=None, **more)


def refused(port: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and body of the answer to a handshake that does not succeed."""
    with pytest.raises(InvalidStatus) as caught:
        dial(port, path, headers)
    return caught.value.response.status_code, bytes(caught.value.response.body or b"").decode()


def inflight(service: Service, model: str) -> int:
    rows = service.get("/running", headers=KEY).json()["running"]
    return sum(int(row["inflight"]) for row in rows if row["model"] == model)


def load(service: Service, model: str) -> None:
    assert service.post(f"/api/models/load/{model}", b"", headers=KEY).status == 200


# --- passing ----------------------------------------------------------------------------------------------


def test_messages_pass_both_ways(service: Service, port: int) -> None:
    service.post("/api/models/unload/talk", b"", headers=KEY)
    with dial(port, "/upstream/al%2Fias/a%2Fb?x=%20", subprotocols=["one", "two"]) as ws:  # type: ignore[list-item]
        assert ws.response is not None and ws.response.status_code == 101
        assert (ws.response.headers["X-QM-Model"], ws.response.headers["X-QM-Loaded"]) == ("talk", "1")
        assert ws.subprotocol == "two"
        for message in ("hällo", b"\0\1", "", b"x" * 3_000_000):
            ws.send(message)
            assert ws.recv() == message
        ws.send(["in ", "three ", "fragments"])
        assert ws.recv() == "in three fragments"
        assert ws.ping().wait(30)
        assert inflight(service, "talk") == 1, "it counts as a request, all the time"
    assert ws.close_code == 1000
    opened = service.events("open", "talk")[-1]
    headers = {name.lower(): value for name, value in opened["headers"]}
    assert opened["path"] == "/a/b" and "authorization" not in headers
    assert headers["host"] == f"127.0.0.1:{port}", "a server compares it with the Origin"
    eventually(lambda: inflight(service, "talk") == 0, "its lease has ended")


def test_a_server_that_has_much_to_say(service: Service, port: int) -> None:
    with dial(port, "/upstream/talk/push?3000") as ws:
        assert [str(ws.recv()).partition(" ")[0] for _ in range(3000)] == [str(n) for n in range(3000)]


def test_a_handshake_that_the_server_refuses_is_an_ordinary_answer(service: Service, port: int) -> None:
    assert refused(port, "/upstream/talk/refuse") == (403, "not you\n")


def test_a_frame_that_comes_with_the_handshake_is_not_lost(service: Service) -> None:
    load(service, "talk")
    early, close = (
        Frame(*what).serialize(mask=True, extensions=[])
        for what in ((Opcode.TEXT, b"early"), (Opcode.CLOSE, b"\x03\xe8"))
    )
    lines = [
        *("GET /upstream/talk/ HTTP/1.1", f"Host: 127.0.0.1:{service.port}", "Authorization: Bearer root"),
        *("Connection: keep-alive, Upgrade", "Upgrade: WebSocket", "Sec-WebSocket-Version: 13"),
        "Sec-WebSocket-Key: " + base64.b64encode(b"x" * 16).decode(),
    ]
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as sock:
        sock.sendall("\r\n".join([*lines, "", ""]).encode() + early)
        answer = b""
        while b"early" not in answer:
            answer += sock.recv(1000)
        sock.sendall(close)
        while piece := sock.recv(1000):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 101 ")
    assert answer.count(b"HTTP/1.1") == 1, "gunicorn has nothing to add"


def test_peers(service: Service, fronts: tuple[Service, dict[str, int]], port: int, tmp_path: Path) -> None:
    events = tmp_path / "far.jsonl"
    command = [sys.executable, str(_SCRIPT), str(fronts[1]["far"]), "far", str(events)]
    with subprocess.Popen(command) as process:
        try:

            def listens() -> bool:
                with socket.socket() as probe:
                    return probe.connect_ex(("127.0.0.1", fronts[1]["far"])) == 0

            eventually(listens, "the peer listens")
            with dial(port, "/upstream/far/m/deep") as ws:
                ws.send("hi")
                assert ws.recv() == "hi"
            text = events.read_text()
            assert "for-the-peer" in text and "Bearer root" not in text and "/deep" in text
        finally:
            process.terminate()


# --- who may ----------------------------------------------------------------------------------------------


def test_keys(service: Service) -> None:
    assert refused(service.port, "/upstream/talk/", {"Authorization": "Bearer wrong"})[0] == 401
    assert refused(service.port, "/upstream/talk/", {"Authorization": "Bearer narrow"})[0] == 403


def test_pages_of_other_sites_cannot_use_the_browsers_password(service: Service) -> None:
    basic = {"Authorization": "Basic " + base64.b64encode(b"x:root").decode()}
    assert refused(service.port, "/upstream/talk/", {**basic, "Origin": "http://evil.example"})[0] == 403
    with dial(service.port, "/upstream/talk/", {**basic, "Origin": f"http://127.0.0.1:{service.port}"}) as ws:
        ws.send("mine")
        assert ws.recv() == "mine"


def test_the_limit_counts_them(service: Service) -> None:
    with dial(service.port, "/upstream/one/"):
        assert refused(service.port, "/upstream/one/")[0] == 429
    eventually(lambda: inflight(service, "one") == 0, "it has ended")
    with dial(service.port, "/upstream/one/"):
        pass


# --- ignored ----------------------------------------------------------------------------------------------


def test_ignored_ones_neither_load_nor_count(service: Service, port: int) -> None:
    status, body = refused(port, "/upstream/asleep/")
    assert status == 409 and "ignored websocket requests cannot start it" in body
    assert not service.events("start", "asleep") and not service.events("open", "asleep")
    load(service, "page")
    with dial(port, "/upstream/page/") as one, dial(port, "/upstream/page/") as two:
        for ws in (one, two):
            ws.send("hi")
            assert ws.recv() == "hi"
        assert inflight(service, "page") == 0
        assert service.get("/api/inflight", headers=KEY).json()["requests"] == []
        assert service.post("/api/models/unload/page", b"", headers=KEY).status == 200, "it is not waited for"
        for ws in (one, two):
            with pytest.raises(ConnectionClosed):
                ws.recv(timeout=30)


def test_comfyui(service: Service, port: int) -> None:
    service.post("/api/models/unload/comfyui_auto", b"", headers=KEY)
    assert "only /comfyui/ can start it" in refused(port, "/comfyui/ws")[1]
    assert "ignored websocket requests cannot start it" in refused(port, "/comfyui/")[1]
    load(service, "comfyui_auto")
    with dial(port, "/comfyui/ws?clientId=1") as ws:
        ws.send("queue")
        assert ws.recv() == "queue"
        assert inflight(service, "comfyui_auto") == 0


# --- ends -------------------------------------------------------------------------------------------------


def test_the_server_ends_it(service: Service, port: int) -> None:
    with dial(port, "/upstream/talk/part") as ws:
        assert ws.recv() == "bye"
        with pytest.raises(ConnectionClosed) as caught:
            ws.recv(timeout=30)
    assert caught.value.rcvd is not None and caught.value.rcvd.code == 1000


def test_the_server_dies(service: Service, port: int) -> None:
    with dial(port, "/upstream/talk/die") as ws:
        ws.send("now")
        with pytest.raises(ConnectionClosed) as caught:
            ws.recv(timeout=30)
    assert caught.value.rcvd is None, "nobody said goodbye, and nothing of ours pretends it"
    eventually(lambda: not service.query("SELECT 1 FROM processes WHERE model = 'talk' AND state = 'ready'"), "noticed")
    with dial(port, "/upstream/talk/") as ws:  # which starts it anew
        ws.send("again")
        assert ws.recv() == "again"


def test_a_client_that_vanishes_is_noticed_and_its_last_words_arrive(service: Service, port: int) -> None:
    load(service, "talk")
    heard, closed = len(service.events("message", "talk")), len(service.events("closed", "talk"))
    with dial(port, "/upstream/talk/") as ws:
        ws.send("last words")
        ws.socket.shutdown(socket.SHUT_RDWR)
        service.wait_event("message", "talk", count=heard + 1)
        service.wait_event("closed", "talk", count=closed + 1)
        eventually(lambda: inflight(service, "talk") == 0, "its lease has ended")


def test_cancelled_through_the_api(service: Service, port: int) -> None:
    with dial(port, "/upstream/talk/", {"X-Request-Id": f"cut-{port}"}) as ws:
        ws.send("hi")
        assert ws.recv() == "hi"
        assert service.post(f"/api/inflight/cut-{port}/cancel", b"", headers=KEY).status == 200
        with pytest.raises(ConnectionClosed):
            ws.recv(timeout=30)


def test_what_a_model_with_a_ttl_does_to_them(start_service: StartService) -> None:
    """An idle one does not outlive the TTL, a busy one does; an unload waits for it and then cuts it."""

    def config(s: Service) -> dict[str, Any]:
        return {"idleStreamTimeout": 1, "models": {"talk": talking(s, "talk", ttl=1, unloadTimeout=1)}}

    service = start_service(config, workers=1)
    with dial(service.port, "/upstream/talk/") as ws:
        for _ in range(8):  # bytes move, for longer than the limits
            threading.Event().wait(0.3)
            ws.send("on")
            assert ws.recv() == "on"
        with pytest.raises(ConnectionClosed):
            ws.recv(timeout=30)
    with dial(service.port, "/upstream/talk/") as ws, ThreadPoolExecutor(1) as pool:
        unloading = pool.submit(service.post, "/api/models/unload/talk", b"")
        with pytest.raises(ConnectionClosed):
            ws.recv(timeout=30)
        assert unloading.result().status == 200
    eventually(lambda: not service.leases(), "no lease is left")


def test_a_worker_that_is_killed_and_the_end_of_the_service(start_service: StartService) -> None:
    """Ignored ones are sent away at once; the others are requests, which a drain waits for."""

    def config(s: Service) -> dict[str, Any]:
        models = {"talk": talking(s, "talk"), "page": talking(s, "page", compat={"ignoreWebsockets": True})}
        return {"models": models, "groups": {"all": {"swap": False, "members": ["talk", "page"]}}}

    service = start_service(config, workers=2, args=("--graceful-timeout", "20"))
    service.post("/api/models/load/page", b"")
    with contextlib.ExitStack() as stack:
        talks = [stack.enter_context(dial(service.port, "/upstream/talk/")) for _ in range(8)]
        for ws in talks:
            ws.send("hi")
            assert ws.recv() == "hi"
        assert len(service.leases()) == 8
        ((worker,), *_) = service.query("SELECT worker FROM requests WHERE state = 'granted'")
        os.kill(int(worker.partition("-")[0]), signal.SIGKILL)
        eventually(lambda: len(service.leases()) < 8, "leases of a dead worker are gone")
        left = [ws for ws in talks if answers(ws)]
        assert len(left) == len(service.leases()), "the other worker's go on"
        service.wait_event("closed", "talk", count=8 - len(left))
        page = stack.enter_context(dial(service.port, "/upstream/page/"))
        service.signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed):
            page.recv(timeout=15)
        assert all(map(answers, left))
    assert service.process is not None
    service.process.wait(30)
    assert len(service.events("start", "talk")) <= 1


def answers(ws: ClientConnection) -> bool:
    """Whether it is still connected."""
    try:
        ws.send("still")
        return ws.recv(timeout=30) == "still"
    except ConnectionClosed:
        return False


@pytest.mark.parametrize("kind", ["sync", "gthread"])
def test_servers_and_their_keepalive(start_service: StartService, kind: str) -> None:
    """Whatever gunicorn would do with the connection afterwards: one answer, no lingering, no complaint."""
    args = ("--worker-class", kind, "--keep-alive", "5")
    service = start_service(
        lambda s: {"models": {"talk": talking(s, "talk")}}, workers=2, threads=1 if kind == "sync" else 8, args=args
    )
    for _ in range(3):
        with dial(service.port, "/upstream/talk/") as ws:
            ws.send("hi")
            assert ws.recv() == "hi"
    eventually(lambda: not service.leases(), "no lease is left")
    assert "Traceback" not in service.log() and "[ERROR]" not in service.log()

"""A client that leaves is noticed wherever its request stands, however it leaves, and whichever worker is told."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.integration.conftest import StartService
from tests.integration.fronting import nginx
from tests.service import Service, Stream, eventually


@dataclass
class Doors:
    """One service and the ports by which it can be reached."""

    service: Service
    ports: dict[str, int]


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """One place for two models; the third takes for ever to load, in a pool of its own."""
    folder = tmp_path_factory.mktemp("cancel")
    service = Service(folder, {}, workers=2, threads=32, args=("--bind", f"unix:{folder / 'http.sock'}"))
    models = {name: {"cmd": service.fake(name), "estVramGB": 9} for name in ("alpha", "beta")}
    models["slow"] = {"cmd": service.fake("slow", load_time=3600), "estRamGB": 1}
    models["thinks"] = {**models["slow"], "cmd": service.fake("thinks", load_time=3600), "sendLoadingState": True}
    service.write_config({"vramBudgetGB": 16, "ramBudgetGB": 99, "models": models})
    service.start()
    try:
        with (
            nginx(folder / "unix", folder / "http.sock") as by_socket,
            nginx(folder / "tcp", f"127.0.0.1:{service.port}") as by_tcp,
        ):
            yield Doors(service, {"direct": service.port, "nginx": by_socket, "nginx-tcp": by_tcp})
        print(service.log()[-20_000:])
    finally:
        service.close()


@pytest.fixture
def service(doors: Doors) -> Service:
    """The service behind the doors."""
    return doors.service


def close(sock: socket.socket) -> None:
    """The usual end."""
    sock.close()


def reset(sock: socket.socket) -> None:
    """A client that crashed, or a load balancer that had enough."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def half_close(sock: socket.socket) -> None:
    """What nginx does when its own client has gone."""
    sock.shutdown(socket.SHUT_WR)


#: Model and X-Fake header of a request that is still there when the client leaves.
STAGES = {
    "queued": ("beta", ""),
    "loading": ("slow", ""),
    "before headers": ("alpha", "header_delay=60"),
    "amid the stream": ("alpha", "chunks=1000, interval=0.05"),
}


@pytest.mark.parametrize("leave", [close, reset, half_close])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("door", ["direct", "nginx", "nginx-tcp"])
def test_a_client_that_leaves(doors: Doors, door: str, stage: str, leave: Callable[[socket.socket], None]) -> None:
    service = doors.service
    model, fake = STAGES[stage]
    blocker = None
    if stage == "queued":  # alpha is busy for as long as this stream is open
        blocker = service.stream("alpha", headers={"X-Fake": "chunks=1000, interval=0.05"})
    seen = len(service.events("request", model))
    gone = len(service.events("client_gone", model))
    identity = f"{door}-{stage}-{leave.__name__}".replace(" ", "-")
    body = {"model": model, "messages": [], "stream": True}
    headers = {"X-Fake": fake, "X-Request-Id": identity}
    sock = service.open("/v1/chat/completions", body, headers, port=doors.ports[door])
    try:
        where = f"SELECT state FROM requests WHERE public_id = '{identity}'"
        wanted = [("queued",)] if stage in ("queued", "loading") else [("granted",)]
        eventually(lambda: service.query(where) == wanted, f"the request is {wanted}")
        if stage == "amid the stream":
            sock.recv(100)
        elif stage == "before headers":
            service.wait_event("request", model, count=seen + 1)
        elif stage == "loading":
            service.wait_event("start", "slow")
        left = time.monotonic()
        leave(sock)
        eventually(lambda: not service.query(where), "its row is gone", every=0.002)
        assert time.monotonic() - left < 2, "noticed by an event, not by the next byte"
        if stage in ("before headers", "amid the stream"):
            service.wait_event("client_gone", model, count=gone + 1)
        else:
            assert len(service.events("request", model)) == seen
    finally:
        sock.close()
        if blocker is not None:
            blocker.close()
    if stage == "queued":
        assert not service.events("start", "beta"), "nobody waits for it any more, so it is not loaded"


def test_cancelling_requests_of_any_worker(service: Service) -> None:
    """Until both workers have served some: then one of them was cancelled through the other."""
    names = [f"cancel-{number}" for number in range(12)]
    streams = [
        service.stream("alpha", headers={"X-Fake": "chunks=1000, interval=0.05", "X-Request-Id": name})
        for name in names
    ]
    try:
        workers = service.query("SELECT DISTINCT worker FROM requests WHERE public_id LIKE 'cancel-%'")
        assert len(workers) == 2, "all connections went to one worker"
        for name, stream in zip(names, streams, strict=True):
            assert service.post(f"/api/inflight/{name}/cancel").status == 200
            assert told(stream) == "cancelled"
            stream.close()
    finally:
        for stream in streams:
            stream.close()
    eventually(lambda: not service.leases(), "no lease is left")
    assert service.post("/api/inflight/cancel-0/cancel").status == 404


def told(stream: Stream) -> str:
    """The code of the error event that ends a stream which is then cut."""
    payloads: list[str] = []
    with pytest.raises((OSError, http.client.HTTPException)):
        payloads.extend(stream)
    return str(json.loads(payloads[-1])["error"]["code"])


def test_cancelling_what_has_only_seen_loading_frames(service: Service) -> None:
    with service.stream("thinks", headers={"X-Request-Id": "cancel-thinking"}) as stream:
        assert "thinks" in next(iter(stream))
        assert service.post("/api/inflight/cancel-thinking/cancel").status == 200
        assert told(stream) == "cancelled"


def test_cancelling_before_the_headers(service: Service) -> None:
    service.chat("alpha")
    with ThreadPoolExecutor(1) as pool:
        headers = {"X-Fake": "header_delay=60", "X-Request-Id": "cancel-early"}
        waiting = pool.submit(service.chat, "alpha", headers=headers)
        where = "SELECT 1 FROM requests WHERE public_id = 'cancel-early' AND state = 'granted'"
        eventually(lambda: service.query(where), "it is asked")
        assert service.post("/api/inflight/cancel-early/cancel").status == 200
        assert (waiting.result().status, waiting.result().code) == (499, "cancelled")


def test_the_end_of_the_service_is_told_to_those_it_cuts(start_service: StartService) -> None:
    """Before gunicorn kills the worker they are served by, which could tell nobody."""
    service = start_service(
        lambda s: {"models": {"alpha": {"cmd": s.fake("alpha")}}}, workers=2, args=("--graceful-timeout", "3")
    )
    with service.stream("alpha", headers={"X-Fake": "chunks=1000,interval=0.05"}) as stream:
        next(iter(stream))
        service.signal(signal.SIGTERM)
        assert told(stream) == "shutting_down"
    assert service.process is not None
    service.process.wait(30)

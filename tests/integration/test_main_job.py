"""The main job, end to end: several gunicorn workers, real model servers, real clients, one budget."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest

from tests.integration.conftest import StartService
from tests.service import Service, Stream, eventually, llama


def two_fakes(**flags: object) -> Callable[[Service], dict[str, object]]:
    """A configuration of two scripted models that do not fit together."""

    def config(service: Service) -> dict[str, object]:
        models = {
            name: {"cmd": service.fake(name, load_time=0.05, **flags), "estVramGB": 9} for name in ("alpha", "beta")
        }
        return {"vramBudgetGB": 16, "models": models}

    return config


def never_both(service: Service) -> None:
    """By the servers' own account, no two models were alive at any time."""
    alive: set[str] = set()
    for event in service.events():
        if event["event"] == "start":
            alive.add(event["name"])
            assert len(alive) == 1, f"two models alive at {event['t']}: {alive}"
        elif event["event"] == "exit":
            alive.discard(event["name"])


def test_two_curls_show_a_swap(start_service: StartService) -> None:
    service = start_service(two_fakes())
    for name in ("alpha", "beta", "alpha"):
        reply = service.chat(name)
        assert reply.status == 200
        assert name in reply.body.decode()
        assert [row["model"] for row in service.running() if row["state"] == "ready"] == [name]
    never_both(service)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_other_routes_reach_the_model(start_service: StartService, path: str) -> None:
    service = start_service(two_fakes())
    reply = service.post(path, {"model": "beta", "input": "x", "prompt": "x"})
    assert reply.status == 200
    assert service.events("request", "beta")[-1]["path"] == path


def test_200_alternating_completions_from_8_openai_clients_on_two_llama_servers(
    start_service: StartService, llama_server: Path, tiny_gguf: Callable[..., Path]
) -> None:
    says = {name: f"I am {name} and I am ready." for name in ("alpha", "beta")}
    service = start_service(
        {
            "vramBudgetGB": 16,
            "models": {
                name: {"cmd": llama(llama_server, tiny_gguf(name, say)), "estVramGB": 9} for name, say in says.items()
            },
        },
        workers=2,
    )
    clients = [openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) for _ in range(8)]
    seen_together: list[set[str]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            up = {row["model"] for row in service.running() if row["state"] in ("ready", "starting")}
            if len(up) > 1:
                seen_together.append(up)

    def ask(number: int) -> tuple[str, str]:
        name = ("alpha", "beta")[number % 2]
        answer = clients[number % 8].chat.completions.create(
            model=name, messages=[{"role": "user", "content": f"who are you? {number}"}], max_tokens=16
        )
        return name, answer.choices[0].message.content or ""

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(200)))
    finally:
        stop.set()
        watcher.join()
        for client in clients:
            client.close()
    assert [said for name, said in answers if said != says[name]] == []
    assert seen_together == []
    assert service.get("/unload").status == 200
    assert service.running() == []


def worker_of(service: Service, stream: Stream) -> int:
    """The worker that serves a stream: the one with the other end of its connection."""
    port = stream.local_port()
    for pid in service.worker_pids():
        if any(c.raddr and c.raddr.port == port for c in psutil.Process(pid).net_connections("tcp")):
            return pid
    raise AssertionError("no worker has this connection")


def test_killed_leader_costs_no_stream_and_no_model(start_service: StartService) -> None:
    service = start_service(two_fakes(chunks=60, interval=0.05), workers=2)
    assert service.chat("alpha", headers={"X-Fake": "interval=0"}).status == 200
    (before,) = service.running()
    leader = service.leader()
    with contextlib.ExitStack() as stack:
        spared: list[Stream] = []
        for _ in range(14):  # which worker accepts is chance, so as many as it takes
            stream = stack.enter_context(service.stream("alpha"))
            if worker_of(service, stream) != leader:
                spared.append(stream)
                break
        assert spared, "all connections went to one worker"
        for stream in spared:
            next(iter(stream))
        os.kill(leader, signal.SIGKILL)
        (after,) = service.running()
        assert (after["pid"], after["state"]) == (before["pid"], "ready")
        for stream in spared:
            assert list(stream)[-1] == "[DONE]"
    killed_at = time.monotonic()
    assert service.chat("beta", headers={"X-Fake": "interval=0"}).status == 200
    assert time.monotonic() - killed_at < 10
    assert len(service.events("start", "alpha")) == 1
    never_both(service)


def test_thousand_requests_half_of_which_hang_up(start_service: StartService) -> None:
    def config(service: Service) -> dict[str, object]:
        cmd = service.fake("alpha", load_time=0.05, chunks=20, interval=0.01)
        return {"models": {"alpha": {"cmd": cmd, "ttl": 1}}}

    service = start_service(config, workers=2, threads=32)
    service.chat("alpha")
    descriptors = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in service.worker_pids()}
    chance = random.Random(7)
    body = b'{"model": "alpha", "stream": true, "messages": []}'
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    moments = [chance.uniform(0, 0.3) if chance.random() < 0.5 else None for _ in range(1000)]

    def ask(leave_after: float | None) -> bool:
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as sock:
            sock.sendall(head % len(body) + body)
            if leave_after is not None:
                sock.settimeout(leave_after or 0.001)
                try:
                    while sock.recv(4096):
                        pass
                except TimeoutError:
                    return True
                return True
            data = b""
            while piece := sock.recv(65536):
                data += piece
            return data.startswith(b"HTTP/1.1 200") and data.rstrip().endswith(b"0")

    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(ask, moments))
    service.wait_idle()
    eventually(lambda: service.running() == [], "the TTL has unloaded the model")
    after = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in service.worker_pids()}
    assert all(after[pid] <= before + 4 for pid, before in descriptors.items() if pid in after)


def test_hang_up_before_the_first_byte_cuts_the_upstream(start_service: StartService) -> None:
    service = start_service(two_fakes(header_delay=30))
    stream_free = b'{"model": "alpha", "messages": []}'
    with socket.create_connection(("127.0.0.1", service.port)) as sock:
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(stream_free) + stream_free
        )
        service.wait_event("request", "alpha")
    service.wait_event("client_gone", "alpha", timeout=5)
    service.wait_idle()


def test_the_default_model_comes_back_to_an_idle_box(start_service: StartService) -> None:
    def config(service: Service) -> dict[str, object]:
        models = {name: {"cmd": service.fake(name), "estVramGB": 5, "ttl": 1} for name in ("guest", "home", "other")}
        return {"vramBudgetGB": 12, "models": models, "defaultModel": "home", "returnAfter": 1}

    service = start_service(config)
    service.wait_event("ready", "home")
    assert service.chat("guest").status == 200
    eventually(lambda: [row["model"] for row in service.running()] == ["home"], "the guest has left")
    service.get("/unload")
    service.wait_event("ready", "home", count=2)
    assert service.events("term", "guest")

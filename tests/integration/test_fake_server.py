"""The scripted model server does what its flags say; other tests judge by it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parts.fake_server import booked_mb
from tests.service import PortBlock, Stream, eventually, fake, read_events


class Fake:
    """One running scripted server, its port, its events and its standard error."""

    def __init__(self, folder: Path, port: int, name: str, flags: dict[str, Any]) -> None:
        self.port, self.events, self.errors = port, folder / "events.jsonl", folder / f"{name}.err"
        command = shlex.split(fake(name, self.events, **flags).replace("${PORT}", str(port)))
        with self.errors.open("wb") as err:
            self.process = subprocess.Popen(command, stderr=err, start_new_session=True)

    def ask(self, path: str, body: Any = None, timeout: float = 10, **fakes: Any) -> tuple[int, bytes]:
        """Status and body; `fakes` become X-Fake."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            headers = {"X-Fake": ",".join(f"{k}={v}" for k, v in fakes.items())}
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, headers)
            response = connection.getresponse()
            return response.status, response.read()

    def health(self) -> int:
        """Status of /health, 0 while connections are refused."""
        try:
            return self.ask("/health")[0]
        except ConnectionError:
            return 0

    def event(self, kind: str) -> dict[str, Any]:
        """The first event of a kind, waited for."""
        return eventually(lambda: read_events(self.events, kind), f"event {kind}")[0]


@pytest.fixture
def run(tmp_path: Path, ports: PortBlock) -> Iterator[Callable[..., Fake]]:
    servers: list[Fake] = []

    def start(name: str = "alpha", *, wait: int = 200, **flags: Any) -> Fake:
        server = Fake(tmp_path, ports.take(), name, flags)
        servers.append(server)
        if wait:
            eventually(lambda: server.health() == wait, f"/health says {wait}")
        return server

    yield start
    for server in servers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def test_it_is_unhealthy_while_it_loads(run: Callable[..., Fake]) -> None:
    server = run(wait=503, load_time=0.5)
    assert server.ask("/v1/chat/completions", {})[0] == 503
    eventually(lambda: server.health() == 200, "it is loaded")
    assert server.event("ready")["t"] - server.event("start")["t"] >= 500_000_000


def test_listening_late_refuses_until_loaded(run: Callable[..., Fake]) -> None:
    server = run(wait=0, load_time=0.3, listen_late=True)
    seen = eventually(lambda: {server.health()} - {0}, "it listens")
    assert seen == {200}
    assert server.event("ready")["t"] - server.event("start")["t"] >= 300_000_000


@pytest.mark.parametrize(("health", "status"), [("never", 503), ("401", 401), ("ok", 200)])
def test_health_as_told(run: Callable[..., Fake], health: str, status: int) -> None:
    assert run(wait=status, health=health).health() == status


def test_a_hanging_health_check(run: Callable[..., Fake]) -> None:
    server = run(wait=0, health="hang")
    server.event("ready")
    with pytest.raises((TimeoutError, ConnectionError)):
        server.ask("/health", timeout=0.3)


def test_it_exits_by_itself_with_code_and_words(run: Callable[..., Fake]) -> None:
    server = run(wait=0, exit_after=0.1, exit_code=7, exit_message="out of luck")
    assert server.process.wait(10) == 7
    assert "out of luck" in server.errors.read_text()
    assert server.event("exit")["code"] == 7


def test_term_at_once_late_or_never(run: Callable[..., Fake]) -> None:
    prompt, late, deaf = run("prompt"), run("late", term_delay=0.3), run("deaf", ignore_term=True)
    begin = time.monotonic()
    for server in (prompt, late, deaf):
        server.process.terminate()
    assert prompt.process.wait(10) == 0
    assert late.process.wait(10) == 0 and time.monotonic() - begin >= 0.3
    eventually(lambda: read_events(deaf.events, "term", "deaf"), "the deaf one notes TERM")
    assert deaf.process.poll() is None and deaf.health() == 200


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_streams_in_every_framing(run: Callable[..., Fake], framing: str) -> None:
    body = run(chunks=3).ask("/v1/chat/completions", {"stream": True}, framing=framing)[1]
    payloads = [line for line in body.split(b"\n\n") if line]
    assert len(payloads) == 4 and payloads[-1] == b"data: [DONE]" and b"I am alpha." in payloads[0]


@pytest.mark.parametrize(
    ("path", "stream", "words"),
    [
        ("/v1/chat/completions", True, b'"finish_reason": "tool_calls"'),
        ("/v1/chat/completions", False, b'"finish_reason": "tool_calls"'),
        ("/v1/messages", True, b'"stop_reason": "tool_use"'),
        ("/v1/messages", False, b'"stop_reason": "tool_use"'),
    ],
)
def test_endings_in_a_tool_call(run: Callable[..., Fake], path: str, stream: bool, words: bytes) -> None:
    server = run()
    assert words in server.ask(path, {"stream": stream}, ending="tools")[1]
    assert words not in server.ask(path, {"stream": stream})[1]


def test_death_and_cut_after_an_event(run: Callable[..., Fake]) -> None:
    server = run(chunks=5)
    for how in ("cut_after", "die_after"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("POST", "/v1/chat/completions", '{"stream": true}', {"X-Fake": f"{how}=2,interval=0.05"})
        got = []
        with (
            Stream(connection, connection.getresponse()) as stream,
            pytest.raises((http.client.IncompleteRead, OSError)),
        ):
            for payload in stream:
                got.append(payload)
        assert len(got) == 2
    assert server.process.wait(10) == -signal.SIGKILL


def test_a_client_that_leaves_is_noted(run: Callable[..., Fake]) -> None:
    server = run()
    with pytest.raises(TimeoutError):
        server.ask("/v1/chat/completions", {}, timeout=0.2, header_delay=30)
    assert server.event("client_gone")["n"] == 0


def test_echo_and_bodies(run: Callable[..., Fake]) -> None:
    server = run()
    answer = json.loads(server.ask("/any/%2Fthing?x=1", {"a": 1})[1])
    assert (answer["method"], answer["path"], answer["length"]) == ("POST", "/any/%2Fthing?x=1", 8)
    assert server.event("request")["body_sha256"] == answer["body_sha256"]
    assert len(json.loads(server.ask("/v1/images/generations", {}, size=4000)[1])["data"][0]["b64_json"]) == 4000
    assert server.ask("/v1/embeddings", {"input": "x"}, status=418)[0] == 418


@pytest.mark.parametrize("tree", ["wrapper", "helper", "detached"])
def test_process_trees(run: Callable[..., Fake], tree: str) -> None:
    server = run(tree=tree)
    served_by = server.event("start")
    if tree == "wrapper":
        assert served_by["pid"] != server.process.pid and served_by["ppid"] == server.process.pid
        return
    helper = server.event("helper")["pid"]
    assert (os.getsid(helper) == os.getsid(server.process.pid)) is (tree == "helper")
    os.kill(helper, signal.SIGTERM)
    server.process.terminate()
    server.process.wait(10)
    os.kill(helper, 0)  # it ignored TERM and outlives the server
    os.kill(helper, signal.SIGKILL)


def test_memory_is_booked_and_freed_late(run: Callable[..., Fake], tmp_path: Path) -> None:
    ledger = str(tmp_path / "ledger.json")
    server = run(ledger=ledger, memory_mb=100, ledger_total_mb=150, release_delay=0.3)
    assert booked_mb(ledger) == 100
    second = run("beta", wait=0, ledger=ledger, memory_mb=100, ledger_total_mb=150)
    assert second.process.wait(10) == 1 and "out of memory" in second.errors.read_text()
    killed = time.monotonic_ns()
    server.process.kill()
    assert server.event("released")["t"] - killed >= 300_000_000
    eventually(lambda: booked_mb(ledger) == 0, "it is booked out")


def test_a_log_flood(run: Callable[..., Fake]) -> None:
    server = run(log_flood=1_000_000)
    assert server.errors.stat().st_size >= 1_000_000


def test_loading_at_the_first_request(run: Callable[..., Fake]) -> None:
    server = run(warm_only=True, load_time=0.3)
    begin = time.monotonic()
    assert server.ask("/v1/chat/completions", {})[0] == 200
    assert time.monotonic() - begin >= 0.3

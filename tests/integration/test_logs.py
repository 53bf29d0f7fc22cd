"""Logs through a real service: history and live lines, from any worker, across swaps, restarts and a dead leader."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from tests.integration.conftest import StartService
from tests.service import PATIENCE, Service, eventually


class Follow:
    """A `/logs/stream` that is read as it comes."""

    def __init__(self, service: Service, path: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE)
        self._connection.request("GET", path)
        self.answer = self._connection.getresponse()
        self.text = ""

    def until(self, wanted: str) -> str:
        """All text so far, once it holds `wanted`."""
        deadline = time.monotonic() + PATIENCE
        while wanted not in self.text:
            assert time.monotonic() < deadline, f"{wanted!r} did not come; only {self.text!r}"
            piece = self.answer.read1(65536)
            assert piece, f"the stream ended without {wanted!r}: {self.text!r}"
            self.text += piece.decode()
        return self.text

    def rest(self) -> str:
        """All text up to the end of the stream."""
        with contextlib.suppress(http.client.IncompleteRead):
            self.text += self.answer.read().decode()
        return self.text

    def close(self) -> None:
        """Hang up."""
        self.answer.close()
        self._connection.close()


@contextlib.contextmanager
def follow(service: Service, path: str) -> Iterator[Follow]:
    stream = Follow(service, path)
    try:
        yield stream
    finally:
        stream.close()


def status_of(service: Service, path: str) -> int:
    """The status of a stream that is not read."""
    with follow(service, path) as stream:
        return stream.answer.status


def two(service: Service) -> dict[str, object]:
    models = {
        name: {"cmd": service.fake(name, load_time=0.05), "estVramGB": 9, "aliases": [f"{name}/alias"]}
        for name in ("alpha", "beta")
    }
    return {"vramBudgetGB": 16, "models": models}


def test_history_live_lines_and_what_the_sources_are(start_service: StartService) -> None:
    service = start_service(two, workers=2, threads=64)
    with (
        follow(service, "/logs/stream/beta/alias?no-history") as beta,
        follow(service, "/logs/stream/upstream") as upstream,
        follow(service, "/logs/stream/proxy") as proxy,
    ):
        assert (beta.answer.status, beta.answer.getheader("X-Content-Type-Options")) == (200, "nosniff")
        assert beta.answer.getheader("X-Accel-Buffering") == "no"
        assert (beta.answer.getheader("Content-Type") or "").startswith("text/plain")
        for name in ("alpha", "beta", "alpha"):
            assert service.chat(name, headers={"X-Request-Id": f"from-{name}"}).status == 200
            upstream.until(f"{name}: listening")  # a log that is replaced before anybody looked is not told of
        assert "alpha" not in beta.until("beta: listening")
        proxy.until("id=from-beta model=beta")
    alpha = service.get("/api/logs/alpha").json()["text"]
    assert alpha.count("listening") == 1, "the log of the last attempt only"
    before = service.get("/api/logs/alpha?previous=1").json()["text"]
    assert before.count("listening") == 1, "the attempt before it is kept"
    combined = eventually(lambda: "from-alpha" in (t := service.get("/logs").body.decode()) and t, "the access line")
    assert "listening" not in combined, "logToStdout: proxy shows qmflask's own lines only"
    assert "messages" not in combined
    page = service.get("/logs", headers={"Accept": "text/html"})
    assert (page.status, page.header("Location")) == (302, "/ui/")
    for unknown in ("nope", "alph"):
        reply = service.get(f"/logs/stream/{unknown}")
        assert reply.status == 400
        assert b"invalid logger" in reply.body


def test_pieces_for_pages_follow_a_log_over_starts(start_service: StartService) -> None:
    service = start_service(two, workers=2)
    nothing = service.get("/api/logs/alpha").json()
    assert nothing["text"] == ""
    service.chat("alpha")
    first = service.get(f"/api/logs/alpha?after={nothing['cursor']}").json()
    assert "alpha: listening" in first["text"]
    assert service.get(f"/api/logs/alpha?after={first['cursor']}").json()["text"] == ""
    service.chat("beta")
    service.chat("alpha")
    again = service.get(f"/api/logs/alpha?after={first['cursor']}").json()
    assert again["text"].count("alpha: listening") == 1
    assert again["cursor"].split(":")[0] != first["cursor"].split(":")[0]
    for bad in ("x", "1:2:3", ":", "-1:-5", "%00"):
        assert service.get(f"/api/logs/alpha?after={bad}").status == 200
    assert service.get("/api/logs/upstream").status == 400


def test_streams_have_slots_of_their_own_and_give_them_back(start_service: StartService) -> None:
    service = start_service(two, workers=1, threads=16)
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(follow(service, "/logs/stream/proxy")).answer.status for _ in range(4)]
        assert found == [200, 200, 503, 503]
        assert service.chat("alpha").status == 200, "inference has its own slots"
    eventually(lambda: status_of(service, "/logs/stream/proxy") == 200, "the slots are free again")
    for _ in range(4):  # twice the slots: followers that hang up without a word
        with socket.create_connection(("127.0.0.1", service.port)) as sock:
            sock.sendall(b"GET /logs/stream/alpha HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(20).startswith(b"HTTP/1.1 200")


def test_following_survives_the_leader_and_ends_with_the_worker(start_service: StartService) -> None:
    service = start_service(two, workers=2)
    leader = service.leader()
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(follow(service, "/logs/stream/upstream?no-history")) for _ in range(2)]
        own = service.state / "logs" / "qmflask.log"
        eventually(lambda: "leading: term" in own.read_text(), "it has said so, which comes after it leads")
        os.kill(leader, signal.SIGKILL)
        assert service.chat("beta").status == 200
        ended = 0
        for stream in streams:
            try:
                stream.until("beta: listening")
            except (AssertionError, ConnectionError, http.client.IncompleteRead):
                ended += 1
        assert ended < 2 or service.leader() != leader
    with follow(service, "/logs/stream/proxy") as stream:
        stream.until("leading")
        began = time.monotonic()
        assert service.stop() == 0
        stream.rest()
        assert time.monotonic() - began < 15, "a stream for a page must not hold up the end"
    text = (service.state / "logs" / "qmflask.log").read_text()
    assert text.count("leading: term") >= 2


@pytest.mark.parametrize("where", ["none", "both"])
def test_log_to_stdout(start_service: StartService, where: str) -> None:
    service = start_service(lambda s: {**two(s), "logToStdout": where, "logTimeFormat": "rfc3339"}, workers=2)
    service.chat("alpha")
    own = service.state / "logs" / "qmflask.log"
    eventually(lambda: "model=alpha" in own.read_text(), "the access line is in the file whatever goes to stdout")
    assert own.read_text().splitlines()[-1].startswith("20")
    if where != "none":
        eventually(lambda: "alpha: listening" in service.log(), "the model's lines are on stdout")
        assert "alpha: listening" in service.get("/logs").body.decode()
    else:
        assert service.get("/logs").body == b""
    time.sleep(0.3)  # what would be echoed too often or wrongly has been by now
    assert service.log().count("alpha: listening") == (0 if where == "none" else 1)
    assert ("model=alpha" in service.log()) == (where == "both")


def test_json_lines_and_hostile_requests(start_service: StartService) -> None:
    service = start_service(two, workers=2, env={"QMFLASK_LOG": "json"})
    evil = 'x"\n[INFO] forged\x1b[2J'
    reply = service.chat(evil)
    assert reply.status == 404
    with service.open("/v1/models", headers={"User-Agent": "a\x1b[31m"}) as sock:
        sock.recv(100)
    own = service.state / "logs" / "qmflask.log"
    rows = eventually(
        lambda: (r := [json.loads(line) for line in own.read_text().splitlines()]) and len(r) > 3 and r, "JSON lines"
    )
    row = eventually(
        lambda: next((r for r in map(json.loads, own.read_text().splitlines()) if r.get("status") == 404), None),
        "the refused request's line",
    )
    assert row["error"].startswith("no router")
    assert all({"time", "level"} <= set(row) for row in rows)

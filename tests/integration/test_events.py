"""`/api/events`, `/api/status`, `/api/inflight` and `/api/performance` through a real service, from any worker."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.integration.conftest import StartService
from tests.service import PATIENCE, Service, eventually


class Events:
    """A stream of messages; reads on until one is found."""

    def __init__(self, service: Service, query: str = "") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE)
        self._connection.request("GET", f"/api/events{query}")
        self.answer = self._connection.getresponse()
        self.seen: list[tuple[str, Any]] = []

    def next(self) -> tuple[str, Any]:
        """The next message: its type and inner value."""
        while (first := self.answer.readline()) in (b":\n", b"\n"):
            pass
        second, end = self.answer.readline(), self.answer.readline()
        assert (first, second[:5], end) == (b"event:message\n", b"data:", b"\n"), (first, second, end)
        outer = json.loads(second[5:])
        message = outer["type"], json.loads(outer["data"])
        self.seen.append(message)
        return message

    def until(self, kind: str, found: Callable[[Any], bool]) -> Any:
        """The first message of that kind for which `found` is true."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            got, data = self.next()
            if got == kind and found(data):
                return data
        raise AssertionError(f"no such {kind}; got {self.seen}")

    def close(self) -> None:
        """Hang up."""
        self.answer.close()
        self._connection.close()


@contextlib.contextmanager
def listening(service: Service, query: str = "") -> Iterator[Events]:
    events = Events(service, query)
    try:
        yield events
    finally:
        events.close()


def two(service: Service) -> dict[str, object]:
    fakes = {
        name: {"cmd": service.fake(name, load_time=0.2, chunks=8, interval=0.2), "estVramGB": 9}
        for name in ("beta", "alpha")
    }
    fakes["alpha"] |= {"name": "Alpha", "aliases": ["a"], "capabilities": {"in": ["image"], "context": 4096}}
    return {"vramBudgetGB": 16, "models": fakes, "peers": {"far": {"proxy": "http://127.0.0.1:1", "models": ["m"]}}}


def states(data: Any) -> dict[str, str]:
    return {row["id"]: row["state"] for row in data}


def test_the_first_burst_and_what_follows_from_every_worker(start_service: StartService) -> None:
    service = start_service(two, workers=2, threads=64)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(listening(service)) for _ in range(3)]
        for events in streams:
            assert (events.answer.getheader("Content-Type") or "").startswith("text/event-stream")
            assert events.answer.getheader("X-Accel-Buffering") == "no"
            kinds = [events.next()[0] for _ in range(6)]
            assert kinds == ["logData", "logData", "modelStatus", "uiConfig", "profileChanged", "inflight"]
            models = dict(events.seen)["modelStatus"]
            assert [row["id"] for row in models] == ["alpha", "beta", "far/m"]
            assert models[0] | {"state": "stopped"} == models[0]
            assert (models[0]["aliases"], models[0]["context_length"], models[0]["peerID"]) == (["a"], 4096, "")
            assert (models[2]["state"], models[2]["peerID"]) == ("", "far")
            assert dict(events.seen)["inflight"] == {"operation": "snapshot"}
        caller = threading.Thread(target=lambda: service.chat("alpha", headers={"Cookie": "a=b"}))
        caller.start()
        for events in streams:
            events.until("modelStatus", lambda data: states(data)["alpha"] == "starting")
            events.until("modelStatus", lambda data: states(data)["alpha"] == "ready")
        caller.join()
        for events in streams:
            events.until("activity", lambda data: data == {"id": 1})
            upserts = [d["request"] for k, d in events.seen if k == "inflight" and d["operation"] == "upsert"]
            assert upserts
            assert {(u["model"], u["method"], u["req_path"]) for u in upserts} == {
                ("alpha", "POST", "/v1/chat/completions")
            }
            assert all(u["req_headers"].get("Cookie") in (None, "[REDACTED]") for u in upserts)
        for events in streams:
            if not any(k == "inflight" and d["operation"] == "remove" for k, d in events.seen):
                events.until("inflight", lambda data: data["operation"] == "remove")


def test_progress_cancel_and_status(start_service: StartService) -> None:
    service = start_service(two, workers=2, threads=64)
    with (
        service.stream("alpha", headers={"X-Fake": "chunks=400, interval=0.1"}) as stream,
        listening(service, "?types=inflight") as events,
    ):
        next(iter(stream))
        entry = events.until("inflight", lambda d: d.get("request", {}).get("resp_bytes", 0) > 0)["request"]
        assert entry["resp_headers"]["Content-Type"].startswith("text/event-stream")
        (listed,) = service.get("/api/inflight").json()["requests"]
        assert listed["id"] == entry["id"]
        status = eventually(
            lambda: (s := service.get("/api/status").json())["requests"] and s, "the status has the request"
        )
        (shown,) = status["requests"]
        assert (shown["id"], shown["state"], shown["detail"]["path"]) == (
            entry["id"],
            "granted",
            "/v1/chat/completions",
        )
        waiter = threading.Thread(target=service.chat, args=("beta",))
        waiter.start()
        queued = eventually(
            lambda: next((r for r in service.get("/api/status").json()["requests"] if r["state"] == "queued"), None),
            "the second request waits",
        )
        assert (queued["position"], queued["why"]) == (1, "busy: alpha")
        assert queued["patience_left"] > 0
        assert service.post(f"/api/inflight/{queued['id']}/cancel").status == 200
        waiter.join()
        assert service.post(f"/api/inflight/{entry['id']}/cancel").status == 200
        events.until("inflight", lambda d: d == {"operation": "remove", "id": entry["id"]})
    gone = eventually(lambda: service.get("/api/metrics/activity").json()["data"], "the record")
    assert {row["resp_status_code"] for row in gone} == {499}


def test_why_a_model_is_not_loaded(start_service: StartService) -> None:
    def config(service: Service) -> dict[str, object]:
        dies = service.fake("dies", load_time=60, exit_after=0.05, exit_code=3, exit_message="no such file: m.gguf")
        found: dict[str, Any] = two(service)
        found["models"]["dies"] = {"cmd": dies, "estVramGB": 1}
        return found

    service = start_service(config, workers=2)
    service.chat("alpha")
    service.chat("beta")
    assert service.chat("dies").status == 502

    def model(name: str) -> Any:
        return next(m for m in service.get("/api/status").json()["models"] if m["id"] == name)

    eventually(lambda: model("alpha").get("stop", {}).get("reason") == "evicted for beta", "why alpha is not loaded")
    failed = eventually(lambda: (m := model("dies"))["state"] == "failed" and m, "the start has failed")
    assert failed["failure"]["code"] == "model_start_failed"
    assert "no such file: m.gguf" in failed["failure"]["message"]
    assert (failed["stop"]["exit_code"], failed["failure"]["retry_in"] <= 2) == (3, True)
    service.get("/unload")
    eventually(lambda: model("beta").get("stop", {}).get("reason") == "unload", "why beta is not loaded")
    assert service.get("/running").json() == {"running": []}
    stopped = {row["model"]: row for row in service.get("/running?all").json()["stopped"]}
    assert stopped["alpha"]["stop"]["reason"] == "evicted for beta"
    assert stopped["dies"]["failure"]["code"] == "model_start_failed"
    reading = service.get("/api/performance").json()
    assert reading["enabled"]
    assert reading["sys_stats"][0]["mem_total_mb"] > 0
    assert service.get("/api/performance?after=2999-01-01T00:00:00Z").json()["sys_stats"] == []
    assert service.get("/api/performance?after=x").status == 400
    assert set(service.get("/api/version").json()) == {"version", "commit", "build_date"}


def test_people_are_answered_while_every_slot_is_taken_and_eight_pages_are_open(start_service: StartService) -> None:
    service = start_service(
        lambda s: {"models": {"slow": {"cmd": s.fake("slow", load_time=600)}}}, workers=2, threads=32
    )
    slots = 2 * 24  # each worker keeps 8 of its threads for this
    with contextlib.ExitStack() as stack:
        waiting = [service.open("/v1/chat/completions", {"model": "slow"}) for _ in range(2 * slots)]
        for sock in waiting:
            stack.callback(sock.close)

        def rows() -> list[Any]:
            return service.get("/api/inflight").json()["requests"]

        eventually(lambda: len(rows()) == slots, "every slot is taken, and the rest was refused")
        pages: list[Events] = []

        def open_one() -> bool:
            page = stack.enter_context(listening(service, "?types=status"))
            if page.answer.status == 200:
                pages.append(page)
            return len(pages) == 8

        eventually(open_one, "eight pages have their streams")
        for page in pages:
            assert len(page.until("status", lambda data: True)["requests"]) == slots
        for path in ("/health", "/running", "/api/status", "/api/version", "/v1/models", "/metrics", "/logs"):
            assert service.get(path, timeout=5).status == 200, path
        assert service.post(f"/api/inflight/{rows()[-1]['id']}/cancel", {}).status == 200
        for page in pages:
            page.until("status", lambda data: len(data["requests"]) == slots - 1)
        assert service.post("/api/models/unload/slow", {}).status == 200
        for page in pages:
            page.until("status", lambda data: not data["requests"])


def test_an_event_stream_on_each_worker_goes_on_when_the_leader_dies(start_service: StartService) -> None:
    service = start_service(two, workers=2, threads=64)
    leader = service.leader()
    with contextlib.ExitStack() as stack:
        pages = [stack.enter_context(listening(service, "?types=modelStatus,activity,logData")) for _ in range(8)]
        for page in pages:
            page.until("modelStatus", lambda data: True)
        os.kill(leader, signal.SIGKILL)
        assert service.chat("alpha").status == 200
        went_on = [page for page in pages if told(page)]
        assert went_on, "some of eight streams were the other worker's"
        with listening(service, "?types=modelStatus") as again:
            again.until("modelStatus", lambda data: states(data)["alpha"] == "ready")


def told(page: Events) -> bool:
    """Whether a stream tells of the load, the record and the log line of one request; False if it ended first."""
    signs: dict[str, Callable[[Any], bool]] = {
        "activity": lambda data: True,
        "modelStatus": lambda data: states(data)["alpha"] == "ready",
        "logData": lambda data: data["source"] == "upstream" and "alpha: listening" in data["data"],
    }
    try:
        while signs:
            kind, data = page.next()
            if kind in signs and signs[kind](data):
                del signs[kind]
    except (AssertionError, OSError, http.client.HTTPException):
        return False
    return True

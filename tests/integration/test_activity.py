"""Activity through a real service: records, captures, their queries, and worker deaths."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.conftest import StartService
from tests.service import Service, eventually, llama


def config(service: Service) -> dict[str, object]:
    models: dict[str, Any] = {
        "alpha": {"cmd": service.fake("alpha", load_time=0.05), "estVramGB": 9, "aliases": ["alias"]},
        "beta": {"cmd": service.fake("beta", load_time=0.05), "estVramGB": 9},
        "broken": {"cmd": "false ${PORT}", "estVramGB": 1},
    }
    keys = ["key-one", {"key": "key-two", "name": "laptop", "models": ["alpha"], "admin": False}]
    return {"vramBudgetGB": 16, "models": models, "apiKeys": keys}


ADMIN = {"Authorization": "Bearer key-one"}
LAPTOP = {"x-api-key": "key-two"}


def records(service: Service, count: int, query: str = "") -> list[dict[str, Any]]:
    """The records, newest first, once there are so many."""

    def seen() -> list[dict[str, Any]]:
        found = service.get(f"/api/metrics/activity?limit=999{query}", headers=ADMIN).json()["data"]
        return found if len(found) >= count else []

    return eventually(seen, f"{count} records")


def test_records_captures_queries_and_totals(start_service: StartService) -> None:
    service = start_service(config, workers=2)
    assert service.chat("alias", headers=LAPTOP).status == 200
    with service.stream("beta", headers=ADMIN, stream_options={"include_usage": True}) as stream:
        assert list(stream)[-1] == "[DONE]"
    assert service.chat("nope", headers=ADMIN).status == 404
    assert service.chat("broken", headers=ADMIN).status == 502
    assert service.chat("alpha", headers={"Authorization": "Bearer wrong"}).status == 401
    assert service.post("/v1/chat/completions", {"messages": []}, headers=ADMIN).status == 400
    assert service.get("/v1/models", headers=ADMIN).status == 200
    broken, unknown, beta, alpha = sorted(records(service, 4), key=lambda r: (-r["resp_status_code"], r["model"]))
    broken, unknown, alpha, beta = broken, unknown, *sorted((alpha, beta), key=lambda r: r["model"])
    assert len(records(service, 4)) == 4, "401, no model and GET are no records"
    assert (alpha["model"], alpha["key_name"], alpha["resp_status_code"]) == ("alpha", "laptop", 200)
    assert alpha["tokens"]["input_tokens"] == 3
    assert alpha["load_ms"] > 40
    assert alpha["wait_ms"] > alpha["load_ms"] / 2
    assert alpha["first_byte_ms"] <= alpha["duration_ms"] + 1
    assert beta["resp_content_type"].startswith("text/event-stream")
    assert beta["tokens"]["output_tokens"] > 0
    assert (unknown["model"], unknown["resp_status_code"]) == ("nope", 404)
    assert (broken["model"], broken["resp_status_code"]) == ("broken", 502)
    assert "exit" in broken["error_msg"] or "cannot be started" in broken["error_msg"]
    assert not unknown["has_capture"]

    capture = service.get(f"/api/captures/{beta['id']}", headers=ADMIN).json()
    assert capture["req_path"] == "/v1/chat/completions"
    assert json.loads(base64.b64decode(capture["req_body"]))["model"] == "beta"
    assert base64.b64decode(capture["resp_body"]).rstrip().endswith(b"[DONE]")
    assert "key-one" not in json.dumps(capture)
    assert service.get("/api/captures/x", headers=ADMIN).status == 400
    assert service.get("/api/captures/999", headers=ADMIN).status == 404
    assert service.get(f"/api/captures/{beta['id']}", headers=LAPTOP).status == 403, "prompts of others"
    assert service.get(f"/api/captures/{beta['id']}").status == 401

    stats = service.get("/api/metrics/stats?model=beta", headers=ADMIN).json()
    assert (stats["total_requests"], stats["total_input_tokens"]) == (1, 3)
    assert service.get("/api/metrics/stats", headers=ADMIN).json()["total_requests"] == 4
    page = service.get("/api/metrics/activity?limit=3&page=2&sort=model&order=asc", headers=ADMIN).json()
    assert (page["total"], page["total_pages"], [row["model"] for row in page["data"]]) == (4, 2, ["nope"])
    stamp = alpha["timestamp"].replace("Z", "%2B00:00")
    assert alpha["id"] in [row["id"] for row in records(service, 1, f"&start={stamp}&end={stamp}")]


@pytest.mark.parametrize(
    ("query", "fragment"),
    [
        ("limit=0", "limit must be between 1 and 999"),
        ("limit=x", "invalid limit"),
        ("page=0", "page must be >= 1"),
        ("sort=x;drop", "invalid sort column"),
        ("order=up", "order must be asc or desc"),
        ("min_id=0", "min_id must be >= 1"),
        ("min_id=3&max_id=2", "min_id must be <= max_id"),
        ("start=yesterday", "invalid 'start' timestamp"),
        ("start=2026-01-02T00:00:00Z&end=2026-01-01T00:00:00Z", "start must be before end"),
    ],
)
def test_queries_that_are_wrong(query: str, fragment: str, quiet_service: Service) -> None:
    reply = quiet_service.get(f"/api/metrics/activity?{query}")
    assert reply.status == 400
    assert fragment in reply.json()["error"]["message"]


@pytest.fixture(scope="module")
def quiet_service(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One service for all that change nothing."""
    service = Service(tmp_path_factory.mktemp("quiet") / "service", {"models": {}}, workers=1)
    service.start()
    yield service
    service.close()


def test_kill_9_of_a_worker_loses_no_written_record_and_leaves_a_sound_file(start_service: StartService) -> None:
    service = start_service(
        lambda s: {"models": {"alpha": {"cmd": s.fake("alpha")}}, "store": {"path": str(s.folder / "mine.db")}}
    )
    for _ in range(20):
        service.chat("alpha")
    eventually(lambda: service.get("/api/metrics/activity").json()["total"] == 20, "all are stored")
    for pid in service.worker_pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    service.wait_until_up()
    assert service.get("/api/metrics/activity").json()["total"] == 20
    service.chat("alpha")
    eventually(lambda: service.get("/api/metrics/activity").json()["total"] == 21, "recording goes on")
    assert service.stop() == 0
    with contextlib.closing(sqlite3.connect(service.folder / "mine.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("SELECT COUNT(*) FROM records").fetchone() == (21,)
        assert db.execute("SELECT SUM(value) FROM counters WHERE name = 'requests'").fetchone() == (21,)


def test_a_broken_activity_store_never_touches_requests(start_service: StartService) -> None:
    service = start_service(lambda s: {"models": {"alpha": {"cmd": s.fake("alpha")}}}, workers=2)
    service.chat("alpha")
    eventually(lambda: service.get("/api/metrics/activity").json()["total"] == 1, "the first is stored")
    for name in ("activity.db-wal", "activity.db-shm"):
        (service.state / name).unlink(missing_ok=True)
    (service.state / "activity.db").write_bytes(b"this is no database" * 1000)
    for _ in range(5):
        assert service.chat("alpha").status == 200
    assert service.get("/metrics").status == 200
    assert service.get("/api/status").status == 200
    (service.state / "activity.db").unlink()
    service.chat("alpha")
    eventually(
        lambda: (r := service.get("/api/metrics/activity")).status == 200 and r.json()["total"] >= 1,
        "a new file is begun",
    )


def test_real_llama_server_tells_speeds(start_service: StartService, llama_server: Path, tiny_gguf: Any) -> None:
    cmd = llama(llama_server, tiny_gguf("alpha"))
    service = start_service({"models": {"alpha": {"cmd": cmd}}}, workers=2)
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        for stream in (False, True):
            answer: Any = client.chat.completions.create(
                model="alpha", messages=[{"role": "user", "content": "hello"}], max_tokens=12, stream=stream
            )
            if stream:
                assert "".join(c.choices[0].delta.content or "" for c in answer if c.choices)
    for row in records(service, 2):
        assert row["tokens"]["input_tokens"] > 0
        assert row["tokens"]["output_tokens"] > 1
        assert row["tokens"]["tokens_per_second"] > 0
        assert row["tokens"]["prompt_per_second"] > 0
    assert service.get("/api/metrics/stats").json()["gen_histogram"]["bins"]

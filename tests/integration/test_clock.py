"""The wall clock is set while the service runs: nothing may come of it, for what is compared is the monotonic clock."""

from __future__ import annotations

import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.integration.conftest import StartService
from tests.service import REPO, Service, eventually

SOURCE = REPO / "tests" / "parts" / "wall_clock.c"
DAY = 86_400
PATIENCE, TTL = 2.5, 3
#: Early is wrong by any amount, late only by more than a busy machine takes.
LATE = 15.0


class Clock:
    """A wall clock of the service's own, that can be set; its monotonic clock is the real one."""

    def __init__(self, folder: Path) -> None:
        library = folder / "wall_clock.so"
        subprocess.run(["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
        self._file = folder / "clock"
        self.set(0)
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK": str(self._file)}

    def set(self, offset: int) -> None:
        """So many seconds before (or behind, if negative) ours. In place: the file is mapped."""
        self.offset = offset
        with open(self._file, "r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", offset))

    def is_told_by(self, service: Service) -> bool:
        """Whether the service lives at that time."""
        return bool(abs(service.get("/api/status").json()["now"] - time.time() - self.offset) < 60)


def config_of(service: Service) -> dict[str, Any]:
    models: dict[str, dict[str, Any]] = {name: {"cmd": service.fake(name)} for name in ("alpha", "beta", "gamma")}
    models["alpha"] |= {"estVramGB": 9, "ttl": 3600}
    models["beta"] |= {"estVramGB": 9, "patienceMs": int(PATIENCE * 1000)}
    models["gamma"] |= {"estVramGB": 1, "ttl": TTL}
    aside = {"aside": {"swap": False, "exclusive": False, "persistent": True, "members": ["gamma"]}}
    return {"vramBudgetGB": 16, "groups": aside, "models": models}


def term(service: Service) -> tuple[Any, ...]:
    """Who leads, and since which term."""
    return service.query("SELECT leader, generation FROM scheduler")[0]


def progress_is_seen_everywhere(service: Service) -> bool:
    """Whether either worker knows how many bytes the stream has had, also the one that does not serve it."""
    seen = [service.get("/api/inflight").json()["requests"] for _ in range(8)]
    return all(any(row["resp_bytes"] > 0 for row in rows) for rows in seen)


def test_the_clock_is_set_both_ways(start_service: StartService, tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    service = start_service(config_of, env=clock.environment)
    headers = {"X-Fake": "chunks=2000, interval=0.05"}
    with service.stream("alpha", headers=headers) as stream, ThreadPoolExecutor(1) as pool:
        next(iter(stream))
        assert service.chat("gamma").status == 200
        idle_at = time.monotonic()
        led = term(service)
        asked_at = time.monotonic()
        waiting = pool.submit(service.chat, "beta")
        for offset in (DAY, -DAY):
            clock.set(offset)
            eventually(lambda: clock.is_told_by(service), "the clock is set")
            eventually(lambda: progress_is_seen_everywhere(service), "progress is published")
        drains = "SELECT 1 FROM processes WHERE model = 'alpha' AND state = 'draining'"
        eventually(lambda: service.query(drains), "beta's patience ends")
        assert PATIENCE - 0.1 < time.monotonic() - asked_at < PATIENCE + LATE
        assert not waiting.done()
        stream.close()
        assert waiting.result().status == 200
    ended = service.wait_event("term", "gamma")["t"] / 1e9
    assert TTL - 0.5 < ended - idle_at < TTL + LATE
    assert term(service) == led, "another leader was elected"
    assert [event["name"] for event in service.events("term")] in (["alpha", "gamma"], ["gamma", "alpha"])
    rows = eventually(lambda: (r := service.get("/api/metrics/activity").json()["data"])[2:] and r, "three records")
    assert {row["model"] for row in rows} == {"alpha", "beta", "gamma"}
    assert min(rows, key=lambda row: row["id"])["model"] == "gamma", "in the order of their ends"
    assert all(row["duration_ms"] < 60_000 for row in rows)

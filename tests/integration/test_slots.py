"""Every inference slot taken: who comes too many is told so at once, and whoever runs the box still gets answers."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.integration.conftest import StartService
from tests.service import Service, eventually

THREADS, SLOTS = 8, 6


def config_of(service: Service) -> dict[str, Any]:
    models = {name: {"cmd": service.fake(name), "estVramGB": 9} for name in ("alpha", "beta")}
    return {"vramBudgetGB": 16, "models": models}


def test_streams_and_waiters_take_slots_and_the_rest_goes_on(start_service: StartService) -> None:
    service = start_service(config_of, workers=1, threads=THREADS)
    endless = {"X-Fake": "chunks=2000, interval=0.05"}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        names = [f"stream-{number}" for number in range(SLOTS - 2)]
        streams = [
            stack.enter_context(service.stream("alpha", headers={**endless, "X-Request-Id": name})) for name in names
        ]
        asked = ("1", "90000")
        waiting = [pool.submit(service.chat, "beta", headers={"X-QM-Patience-Ms": ms}) for ms in asked]
        queued = "SELECT 1 FROM requests WHERE state = 'queued'"
        eventually(lambda: len(service.query(queued)) == 2, "two more wait for their model")
        patience = "SELECT (patience_at - arrival) / 1000000 FROM requests WHERE state = 'queued'"
        assert sorted(service.query(patience)) == [(60_000,), (90_000,)], "a header asks for longer patience only"
        reply = service.chat("alpha")
        assert (reply.status, reply.code) == (503, "overloaded")
        assert reply.header("Retry-After")
        for path in ("/health", "/running", "/api/status", "/v1/models", "/metrics", "/api/inflight"):
            began = time.monotonic()
            assert service.get(path).status == 200
            print(f"{path} took {(time.monotonic() - began) * 1000:.1f} ms")
        assert service.post(f"/api/inflight/{names[0]}/cancel").status == 200
        streams[0].close()
        eventually(lambda: service.chat("alpha").status == 200, "its slot is free again")
        assert service.post("/api/models/unload/beta").status == 200, "waiters are sent away"
        assert {future.result().code for future in waiting} == {"model_unloaded"}

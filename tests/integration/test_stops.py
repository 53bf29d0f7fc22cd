"""Why a model is not loaded: reason and time of its last stop in `/running`, the page's status and the metrics."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.conftest import StartService
from tests.service import Service, eventually

#: model -> (what its reason says, exit code, the metrics' cause)
STOPS = {
    "victim": ("evicted for guest", 0, "evicted"),
    "short": ("ttl", 0, "ttl"),
    "unloaded": ("unload", 0, "unload"),
    "dies": ("exited by itself", 7, "crash"),
    "changed": ("its configuration changed", 0, "reload"),
}
#: Runs again before anybody could see that it had stopped.
GONE = {"changed"}


def config(service: Service, changed: str = "before") -> dict[str, object]:
    models: dict[str, dict[str, object]] = {
        name: {"cmd": service.fake(name), "estVramGB": 1} for name in ("unloaded", "changed")
    }
    models["changed"]["env"] = [f"WHICH={changed}"]
    models["short"] = {"cmd": service.fake("short"), "estVramGB": 1, "ttl": 1}
    models["dies"] = {"cmd": service.fake("dies", exit_after=0.4, exit_code=7), "estVramGB": 1}
    models |= {name: {"cmd": service.fake(name), "estVramGB": 12} for name in ("victim", "guest")}
    return {"vramBudgetGB": 16, "models": models}


def stop_of(service: Service, model: str) -> dict[str, Any]:
    """What `/running?all` says of its last stop; empty while there is none."""
    rows = service.get("/running?all").json()["stopped"]
    return next((row["stop"] for row in rows if row["model"] == model), None) or {}


def causes(service: Service) -> dict[str, str]:
    """model -> cause of its one stop, by the metrics."""
    families = text_string_to_metric_families(service.get("/metrics").body.decode())
    samples = [s for f in families for s in f.samples if s.name == "qmflask_model_stops_total"]
    assert {s.value for s in samples} == {1}
    return {s.labels["model"]: s.labels["cause"] for s in samples}


def test_each_way_to_stop_has_its_reason_and_its_time_on_every_worker_and_across_leaders(
    start_service: StartService,
) -> None:
    began = time.time()
    service = start_service(config, workers=2)
    for name in ("victim", "guest", "short", "unloaded", "dies", "changed"):
        assert service.chat(name).status == 200
    service.post("/api/models/unload/unloaded", {})
    service.write_config(config(service, "after"))
    service.post("/api/config/reload", {})
    assert service.chat("changed").status == 200
    service.post("/api/models/unload/guest", {})
    assert "model changed: stopped, its configuration changed" in service.log()
    found = {name: eventually(partial(stop_of, service, name), f"{name} has stopped") for name in STOPS.keys() - GONE}
    for name, stop in found.items():
        reason, code, _ = STOPS[name]
        assert (reason in stop["reason"].lower(), stop["exit_code"]) == (True, code), (name, stop)
        assert began <= stop["wall"] <= time.time()
    assert causes(service) == {name: cause for name, (_, _, cause) in STOPS.items()} | {"guest": "unload"}

    os.kill(service.leader(), signal.SIGKILL)
    eventually(lambda: len(service.registered_workers()) == 2, "both workers are back")
    for _ in range(6):  # of either worker
        assert {name: stop_of(service, name) for name in found} == found
    page = {model["id"]: model for model in service.get("/api/status").json()["models"]}
    assert page["dies"]["stop"] == found["dies"]
    assert page["victim"]["used"] >= int(began)

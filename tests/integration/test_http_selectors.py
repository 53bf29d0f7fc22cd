"""Selectors and profiles at run time, the same for all workers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.echoing import echo_model, echo_server, shared
from tests.service import Service, Stream, eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Models that may run together, selectors of each kind, a profile, a peer."""
    with echo_server() as port:

        def config(service: Service) -> dict[str, Any]:
            names = ("ant", "bee", "cat")
            models: dict[str, Any] = {name: {"cmd": service.fake(name)} for name in names}
            models["echo"] = echo_model(filters={"setParamsByID": {"echo:hot": {"t": 9}}})
            return {
                "models": models,
                "groups": {"all": {"swap": False, "members": [*models]}},
                "selectors": {
                    "warm": {"strategy": "warm", "targets": ["ant", "bee"]},
                    "spill": {"strategy": "spillover", "targets": ["ant", "bee", "cat"], "settings": {"spillover": 2}},
                    "first": {"strategy": "pin", "targets": ["echo:hot", "ant"]},
                    "away": {"strategy": "pin", "targets": ["far/m"]},
                },
                "peers": {"far": {"proxy": f"http://127.0.0.1:{port}/base", "models": ["m"]}},
                "profiles": {
                    "day": {"pins": {"front": "echo:hot", "ant": "bee", "pick": "warm", "shut": None}},
                    "night": {"pins": {"front": "far/m"}, "preload": ["cat"]},
                },
            }

        with shared(tmp_path_factory.mktemp("selectors"), config, threads=32) as service:
            yield service


@pytest.fixture(autouse=True)
def clean(service: Service) -> Iterator[None]:
    """Nothing loaded, no profile."""
    service.wait_idle()
    service.get("/unload")
    yield
    activate(service, None)


def activate(service: Service, name: str | None) -> None:
    """Make a profile active."""
    assert service.request("PUT", "/api/profiles/active", {"name": name}).json() == {"active": name}


def test_warm_prefers_what_is_loaded(service: Service) -> None:
    assert service.chat("bee").header("X-QM-Model") == "bee"
    assert [service.chat("warm").header("X-QM-Model") for _ in range(3)] == ["bee"] * 3
    service.get("/unload")
    assert service.chat("warm").header("X-QM-Model") == "ant"


def test_pin_rewrites_the_name(service: Service) -> None:
    reply = service.post("/v1/completions", {"model": "first"})
    assert reply.header("X-QM-Model") == "echo"
    assert json.loads(reply.json()["body"]) == {"model": "echo:hot", "t": 9}
    reply = service.post("/v1/completions", {"model": "away"})
    assert (reply.json()["path"], json.loads(reply.json()["body"])) == ("/base/v1/completions", {"model": "m"})


def test_spillover_counts_over_all_workers(service: Service) -> None:
    with contextlib.ExitStack() as stack:
        open_streams: list[Stream] = []
        for _ in range(6):
            stream = stack.enter_context(service.stream("spill", headers={"X-Fake": "chunks=300,interval=0.05"}))
            open_streams.append(stream)
        served = [dict(stream.headers)["X-QM-Model"] for stream in open_streams]
    assert served == ["ant", "ant", "bee", "bee", "cat", "cat"]
    service.wait_idle()
    with service.stream("spill") as stream:
        assert dict(stream.headers)["X-QM-Model"] in ("ant", "bee", "cat")
        assert list(stream)[-1] == "[DONE]"


def test_selectors_are_listed_and_recorded(service: Service) -> None:
    service.chat("bee")
    records = {r["id"]: r for r in service.get("/v1/models").json()["data"]}
    assert records["warm"]["status"]["value"] == "loaded"
    assert records["first"]["status"]["value"] == "unloaded"
    assert records["spill"]["meta"]["llamaswap"]["spillover"] == 2
    assert records["spill"]["meta"]["qmflask"]["type"] == "selector"
    service.chat("warm")

    def recorded() -> bool:
        rows = service.get("/api/metrics/activity").json()["data"]
        return any((row.get("metadata") or {}).get("selector") == "warm" for row in rows)

    eventually(recorded, "the selector is in the activity record")


def test_a_profile_pins_disables_and_is_shared(service: Service) -> None:
    assert service.chat("front").code == "model_not_found"
    activate(service, "day")
    for _ in range(8):  # both workers, at once
        reply = service.post("/v1/completions", {"model": "front"})
        assert json.loads(reply.json()["body"]) == {"model": "echo:hot", "t": 9}
    assert service.chat("ant").header("X-QM-Model") == "bee", "a pin may shadow a model"
    assert service.chat("pick").header("X-QM-Model") == "bee", "a pin may name a selector"
    reply = service.chat("shut")
    assert reply.status == 404 and "no model id could be identified" in reply.json()["error"]["message"]
    assert service.get("/upstream/shut/x").status == 404
    assert service.get("/upstream/front/x").header("X-QM-Model") == "echo"
    ids = {r["id"]: r for r in service.get("/v1/models").json()["data"]}
    assert ids["front"]["meta"]["llamaswap"] == {"type": "profile", "target": "echo:hot"}
    assert "shut" not in ids and ids["ant"]["meta"]["llamaswap"]["type"] == "model"


def test_a_profile_survives_a_reload(service: Service) -> None:
    activate(service, "night")
    assert service.get("/api/profiles").json()["active"] == "night"
    service.hup()
    assert service.get("/api/profiles").json()["active"] == "night"
    assert service.chat("front").json()["path"] == "/base/v1/chat/completions"


def test_a_profile_preloads(service: Service) -> None:
    activate(service, "night")
    eventually(lambda: ("cat", "ready") in [(r["model"], r["state"]) for r in service.running()], "cat is preloaded")


@pytest.mark.parametrize(
    ("body", "status", "fragment"),
    [
        (b"{", 400, "invalid profile request"),
        (b"[]", 400, "invalid profile request"),
        (b"{}", 400, "profile name is required"),
        (b'{"name": 5}', 400, "must be a string or null"),
        (b'{"name": "nope"}', 404, "no profile"),
        (b'{"name": ""}', 200, "null"),
    ],
)
def test_bad_activations(service: Service, body: bytes, status: int, fragment: str) -> None:
    reply = service.request("PUT", "/api/profiles/active", body)
    assert reply.status == status
    assert fragment in reply.body.decode()


def test_profiles_are_listed(service: Service) -> None:
    found = service.get("/api/profiles").json()
    assert found["active"] is None
    assert [p["id"] for p in found["profiles"]] == ["day", "night"]
    assert found["profiles"][0]["pins"]["shut"] == ""

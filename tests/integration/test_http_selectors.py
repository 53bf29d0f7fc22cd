"""Selectors and profiles at run time, the same for all workers."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from qmflask.cli import main
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
            models |= {name: {"cmd": "/bin/false", "proxy": "http://127.0.0.1:1"} for name in ("wreck", "ruin")}
            return {
                "models": models,
                "groups": {"all": {"swap": False, "members": [*models]}},
                "selectors": {
                    "warm": {"strategy": "warm", "targets": ["ant", "bee"]},
                    "spill": {"strategy": "spillover", "targets": ["ant", "bee", "cat"], "settings": {"spillover": 2}},
                    "first": {"strategy": "pin", "targets": ["echo:hot", "ant"]},
                    "away": {"strategy": "pin", "targets": ["far/m"]},
                    "broken": {"strategy": "warm", "targets": ["wreck", "ruin"]},
                    "ruins": {"strategy": "spillover", "targets": ["ruin", "wreck"]},
                    "lost": {"strategy": "spillover", "targets": ["gone/m9", "gone/m8"]},
                },
                "peers": {
                    "far": {"proxy": f"http://127.0.0.1:{port}/base", "models": ["m"]},
                    "gone": {"proxy": "http://127.0.0.1:1", "models": ["m9", "m8"]},
                },
                "profiles": {
                    "day": {
                        "pins": {
                            "front": "echo:hot",
                            "front/deep": "cat",
                            "ant": "bee",
                            "pick": "warm",
                            "shut": None,
                            "cat": "spill",
                            "ünï code": "echo",
                        }
                    },
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


def run(service: Service, *args: str) -> str:
    """The output of one command of the command line."""
    return CliRunner().invoke(main, list(args), env={"QMFLASK_URL": service.url, "QMFLASK_API_KEY": None}).output


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
        return ("bee", "warm") in [(row["model"], (row.get("metadata") or {}).get("selector")) for row in rows]

    eventually(recorded, "which selector was asked and which model served is in the activity record")
    assert re.search(r" model=bee .* asked=warm\n", service.log())


def test_what_is_in_flight_says_which_selector_was_asked(service: Service) -> None:
    with service.stream("warm", headers={"X-Fake": "chunks=300,interval=0.05"}) as stream:
        next(iter(stream))
        (entry,) = service.get("/api/inflight").json()["requests"]
        assert (entry["model"], entry["metadata"]["selector"]) == ("ant", "warm")
        (request,) = service.get("/api/status").json()["requests"]
        assert request["detail"]["selector"] == "warm"
        assert "ant (asked: warm)" in run(service, "ps")


def test_each_kind_of_body_is_rewritten(service: Service) -> None:
    activate(service, "day")
    for asked, meant in (("first", "echo%3Ahot"), ("front", "echo%3Ahot")):
        reply = service.get(f"/props?a=%2F&model={asked}&b")
        assert reply.json()["path"] == f"/props?a=%2F&model={meant}&b"
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        reply = service.post("/v1/audio/transcriptions", f"a=b&model={asked}&c".encode(), headers=form)
        assert reply.json()["body"] == f"a=b&model={meant}&c"
        parts = f'--X\r\nContent-Disposition: form-data; name="model"\r\n\r\n{asked}\r\n--X--\r\n'
        kind = {"Content-Type": "multipart/form-data; boundary=X"}
        reply = service.post("/v1/audio/transcriptions", parts.encode(), headers=kind)
        assert "\r\n\r\necho:hot\r\n" in reply.json()["body"]
    assert json.loads(service.post("/v1/completions", {"model": "ünï code"}).json()["body"]) == {"model": "echo"}


def test_upstream_paths_know_pins_but_no_selectors(service: Service) -> None:
    reply = service.get("/upstream/warm/x")
    assert (reply.status, reply.code) == (404, "not_found")
    assert "model not found" in reply.json()["error"]["message"] and "'warm' is a selector" in reply.body.decode()
    activate(service, "day")
    assert service.get("/upstream/ant/health").header("X-QM-Model") == "bee", "a pin shadows the model"
    assert service.get("/upstream/front/deep/health").header("X-QM-Model") == "cat", "the longest pin, and only one"
    assert "'spill' is a selector" in service.get("/upstream/cat/health").body.decode()
    assert service.get("/upstream/front/de/x%2Fy").json()["path"] == "/de/x%2Fy"
    assert service.get("/upstream/%C3%BCn%C3%AF%20code/x").header("X-QM-Model") == "echo"
    reply = service.get("/upstream/front?q=1")
    assert (reply.status, reply.header("Location")) == (301, "/upstream/front/?q=1")
    assert service.get("/upstream/frontier/x").status == 404, "a pin ends at a slash"


def test_the_plan_says_where_a_name_leads(service: Service) -> None:
    assert service.chat("bee").status == 200
    plan = service.get("/api/plan?model=warm").json()
    assert (plan["model"], plan["decision"]) == ("bee", "serve")
    assert plan["notes"] == ["the selector 'warm' (warm) sends a request to 'bee' now"]
    assert service.get("/api/plan?model=away").json()["why"].startswith("the peer far answers it")
    activate(service, "day")
    plan = service.get("/api/plan?model=cat").json()
    assert plan["notes"][0].startswith("the active profile puts 'spill' in place of 'cat'; the selector 'spill'")
    assert service.get("/api/plan?model=shut").status == 404
    assert "sends a request to 'bee' now" in run(service, "plan", "warm")


def test_a_profile_change_is_an_event(service: Service) -> None:
    with service.open("/api/events?types=profileChanged") as sock:
        reader = sock.makefile("rb")

        def told() -> Any:
            line = next(line for line in reader if line.startswith(b"data:"))
            return json.loads(json.loads(line[5:])["data"])["active"]

        assert told() is None
        activate(service, "night")
        assert told() == "night"
        reader.close()


def test_a_selector_whose_targets_all_fail_says_why(service: Service) -> None:
    """Not in the way of anything else, and what is mended serves again."""
    for name in ("broken", "ruins"):
        reply = service.chat(name)
        assert (reply.status, reply.code) == (502, "model_start_failed"), reply.body
        again = service.chat(name)
        assert again.code == "model_start_failed" and again.header("Retry-After")
    assert service.chat("lost").code == "upstream_unreachable"
    assert service.chat("warm").status == 200


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


def test_a_profile_preloads(service: Service) -> None:
    activate(service, "night")
    eventually(lambda: ("cat", "ready") in [(r["model"], r["state"]) for r in service.running()], "cat is preloaded")


@pytest.mark.parametrize(
    ("body", "status", "fragment"),
    [
        (b"{", 400, "invalid profile request"),
        (b"[]", 400, "invalid profile request"),
        (b"{}", 400, "profile name is required"),
        (b"null", 400, "profile name is required"),
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

"""Matrix, protected models, profiles and the default model, through one real service with two workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from click.testing import CliRunner

from qmflask.cli import main
from tests.integration.conftest import StartService
from tests.integration.echoing import shared
from tests.service import Service, eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service, which takes each test's configuration by a reload."""
    with shared(tmp_path_factory.mktemp("routing"), {"models": {}}, threads=32) as service:
        yield service


@pytest.fixture(autouse=True)
def clean(service: Service) -> Iterator[None]:
    """Nothing loaded, no profile, no events."""
    service.events_path.unlink(missing_ok=True)
    yield
    activate(service, None)
    take(service, {"models": {"nothing": {"cmd": "true ${PORT}"}}})
    service.get("/unload")


def models(service: Service, *names: str, **settings: dict[str, Any]) -> dict[str, Any]:
    """Scripted models; `settings` by name."""
    return {name: {"cmd": service.fake(name), **settings.get(name, {})} for name in names}


def take(service: Service, config: dict[str, Any]) -> None:
    """Put another configuration in force, and see all workers have it."""
    service.write_config(config)
    answer = service.post("/api/config/reload")
    assert answer.status == 200, answer.body
    wanted = answer.json()["generation"]

    def all_agree() -> bool:
        return all(service.get("/api/config").json()["worker_generation"] >= wanted for _ in range(6))

    eventually(all_agree, "all workers have the new configuration")


def up(service: Service) -> set[str]:
    """What is loaded; nothing is on its way."""
    service.wait_idle()
    return {row["model"] for row in service.running()}


def ask(service: Service, *names: str) -> set[str]:
    """Ask for models one after another; what is loaded then."""
    for name in names:
        reply = service.chat(name)
        assert reply.status == 200, reply.body
    return up(service)


def run(service: Service, *args: str) -> str:
    """The output of one command of the command line."""
    result = CliRunner().invoke(main, list(args), env={"QMFLASK_URL": service.url, "QMFLASK_API_KEY": None})
    assert result.exit_code == 0, result.output
    return result.output


# --- the matrix -------------------------------------------------------------------------------------------


def test_swaps_follow_the_sets_their_costs_and_the_budget(service: Service) -> None:
    sizes = {"t": {"estVramGB": 10}, "org/x": {"estVramGB": 20}, "y": {"estVramGB": 5}}
    sets = {"pair": "X & y", "first": "t & X", "second": "t & y"}

    def config(service: Service, **more: Any) -> dict[str, Any]:
        matrix = {"vars": {"X": "org/x"}, "sets": sets, **more.pop("matrix", {})}
        return {"models": models(service, "t", "org/x", "y", "lone", **sizes), "matrix": matrix, **more}

    take(service, config(service))
    assert ask(service, "org/x", "y") == {"org/x", "y"}
    assert ask(service, "t") == {"t", "org/x"}, "of two sets at the same cost, the first one written"
    assert ask(service, "y") == {"org/x", "y"}, "pair keeps X, at the cost of t; second keeps t: pair is written first"

    take(service, config(service, matrix={"evict_costs": {"y": 5, "X": 2}}))
    assert ask(service, "t") == {"t", "y"}, "y is dearer to stop"
    assert ask(service, "lone") == {"lone"}, "what is in no set runs alone"

    # With a budget the set that would cost less does not fit, and the plan says so.
    take(service, config(service, matrix={"evict_costs": {"X": 9}}, vramBudgetGB=26))
    assert ask(service, "org/x", "y") == {"org/x", "y"}
    told = 'set "first" would cost 1, but does not fit: t with org/x takes 30 GiB of VRAM, 26 GiB are allowed'
    plan = service.get("/api/plan?model=t").json()
    assert (plan["decision"], plan["victims"]) == ("start", ["org/x"])
    assert told in plan["notes"]
    online = run(service, "plan", "t")
    offline = run(service, "plan", "t", "--config", str(service.config_path), "--running", "org/x,y")
    assert told in online and told in offline
    assert "stop  org/x  20 GiB" in online and offline.startswith("org/x\n")
    assert ask(service, "t") == {"t", "y"}


def test_a_changed_matrix_while_a_swap_is_under_way(service: Service) -> None:
    """The swap was decided by the old sets and is carried through; the next one goes by the new ones."""

    def config(service: Service, **sets: str) -> dict[str, Any]:
        slow = {"cmd": service.fake("b", load_time=0.6)}
        return {"models": models(service, "a", "b", "c", b=slow), "matrix": {"sets": sets}}

    take(service, config(service, one="a & c", two="b"))
    assert ask(service, "a", "c") == {"a", "c"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(service.chat, "b")
        service.wait_event("start", "b")
        take(service, config(service, one="a & b & c"))
        assert answer.result().status == 200
    assert up(service) == {"b"}
    assert ask(service, "a", "c") == {"a", "b", "c"}


# --- protected models -------------------------------------------------------------------------------------


def test_a_protected_model_stays_until_it_is_unloaded(service: Service) -> None:
    def config(service: Service) -> dict[str, Any]:
        sizes = {"home": {"displace": False}, "embed": {}, "guest": {}, "small": {"estVramGB": 1}}
        settings = {name: {"estVramGB": 6, **more} for name, more in sizes.items()}
        group = {"swap": False, "displace": False, "members": ["embed"]}
        return {"vramBudgetGB": 8, "models": models(service, *sizes, **settings), "groups": {"g": group}}

    take(service, config(service))
    for protected in ("home", "embed"):  # by its own key, and by its group's
        assert ask(service, protected) == {protected}
        reply = service.chat("guest")
        assert (reply.status, reply.code) == (409, "model_protected")
        message = reply.json()["error"]["message"]
        assert f'"{protected}" is loaded and protected (displace: false)' in message
        assert f'unload "{protected}" first' in message
        plan = service.get("/api/plan?model=guest").json()
        assert (plan["decision"], plan["code"], plan["why"]) == ("refuse", "model_protected", message)
        told = run(service, "plan", "guest", "--config", str(service.config_path), "--running", protected)
        assert f"refused: {protected} would have to stop for it" in told
        assert ask(service, "small") == {protected, "small"}, "what fits beside it is served"
        assert service.post(f"/api/models/unload/{protected}").status == 200
        assert ask(service, "guest") == {"guest", "small"}, "nothing is protected that is not loaded"
        assert ask(service, protected) == {protected}, "a protected model may take the room of others"
        service.get("/unload")


def test_ttl_ends_the_protection(service: Service) -> None:
    """In the matrix, too: the one set that keeps the protected model is taken, though it is the dearer one."""

    def config(service: Service) -> dict[str, Any]:
        settings = {"home": {"displace": False, "ttl": 1}}
        sets = {"both": "home & dear", "new": "guest & dear", "keep": "guest & home"}
        matrix = {"sets": sets, "evict_costs": {"dear": 50}}
        return {"models": models(service, "home", "dear", "guest", "lone", **settings), "matrix": matrix}

    take(service, config(service))
    with service.stream("home", headers={"X-Fake": "chunks=1000, interval=0.05"}) as stream:
        next(iter(stream))
        service.chat("dear")
        assert service.chat("guest").status == 200
        assert {row["model"] for row in service.running()} == {"home", "guest"}
        assert service.chat("lone").code == "model_protected"
    service.wait_event("exit", "home")
    assert ask(service, "lone") == {"lone"}


# --- profiles ---------------------------------------------------------------------------------------------


def profiles_of(service: Service, *names: str) -> dict[str, Any]:
    """Two models, and profiles that pin `front` to one or the other."""
    known = {
        "day": {"pins": {"front": "sun"}},
        "night": {"pins": {"front": "moon", "sun": None}, "preload": ["moon"]},
        "dusk": {"preload": ["sun"]},
    }
    return {
        "models": models(service, "sun", "moon"),
        "groups": {"all": {"swap": False, "members": ["sun", "moon"]}},
        "profiles": {name: known[name] for name in names or known},
    }


def activate(service: Service, name: str | None) -> None:
    """Make a profile active."""
    assert service.request("PUT", "/api/profiles/active", {"name": name}).json() == {"active": name}


def front(service: Service, times: int = 6) -> set[str | None]:
    """Who answers for `front`, asked so often that each worker is."""
    replies = [service.chat("front") for _ in range(times)]
    return {reply.header("X-QM-Model") if reply.status == 200 else reply.code for reply in replies}


def test_the_active_profile_outlives_reload_failover_and_restart(start_service: StartService) -> None:
    service = start_service(profiles_of, threads=32)
    assert front(service) == {"model_not_found"}
    activate(service, "day")
    assert front(service) == {"sun"}
    activate(service, "night")
    assert front(service) == {"moon"}, "every worker, from the very next request on"
    assert service.chat("sun").code == "model_not_found", "a disabled name"

    service.hup()
    assert front(service) == {"moon"}
    os.kill(leader := service.leader(), signal.SIGKILL)
    eventually(lambda: service.workers_view()["leader"] not in (None, leader), "somebody else leads")
    assert front(service) == {"moon"}
    take(service, profiles_of(service, "day"))
    assert service.get("/api/profiles").json()["active"] is None, "one that vanished means nothing ..."
    assert service.get("/api/status").json()["service"]["profile"] is None
    assert front(service) == {"model_not_found"}
    take(service, profiles_of(service))
    assert front(service) == {"moon"}, "... until it is there again"

    service.stop()
    service.start()
    assert service.get("/api/profiles").json()["active"] == "night"
    eventually(lambda: "moon" in {row["model"] for row in service.running()}, "what the profile preloads is loaded")
    assert front(service) == {"moon"}
    assert "profile night is active" in run(service, "ps")


def test_a_file_that_names_what_is_gone_changes_nothing(service: Service) -> None:
    take(service, profiles_of(service))
    activate(service, "night")
    matrix = {"sets": {"s": "sun & (moon | +late)", "late": "star"}}
    for gone, told in (
        ({"models": models(service, "sun")}, 'profiles.night.pins.front references unknown model "moon"'),
        ({"groups": {}, "matrix": matrix}, 'set "late": unknown var or model "star"'),
        ({"selectors": {"s": {"strategy": "warm", "targets": ["mars"]}}}, 'references unknown model "mars"'),
    ):
        service.write_config({**profiles_of(service), **gone})
        reply = service.post("/api/config/reload")
        assert (reply.status, reply.code) == (400, "invalid_configuration")
        assert told in reply.json()["error"]["message"]
        assert front(service, 2) == {"moon"}


def test_a_profile_loads_what_it_preloads_and_the_next_one_forgets_the_rest(service: Service) -> None:
    def config(service: Service) -> dict[str, Any]:
        slow = {"cmd": service.fake("slow", load_time=60)}
        return {
            "models": models(service, "sun", "moon", "slow", slow=slow),
            "profiles": {"long": {"preload": ["slow", "moon"]}, "day": {"pins": {"x": "sun"}, "preload": ["sun"]}},
        }

    take(service, config(service))
    activate(service, "long")
    service.wait_event("start", "slow")
    activate(service, "day")  # slow's load, for which nobody waits any more, gives way; moon is not loaded at all
    eventually(lambda: [(r["model"], r["state"]) for r in service.running()] == [("sun", "ready")], "sun is loaded")
    assert not service.events("start", "moon")


def test_two_profiles_at_once_leave_one_and_its_preloads_alone(service: Service) -> None:
    take(service, profiles_of(service))
    for _ in range(3):
        ready = threading.Barrier(4)

        def put(name: str, ready: threading.Barrier = ready) -> None:
            ready.wait()
            activate(service, name)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(put, ["night", "dusk", "night", "dusk"]))
        active = service.get("/api/profiles").json()["active"]
        wanted = {"night": "moon", "dusk": "sun"}[active]
        eventually(lambda: not service.query("SELECT 1 FROM requests WHERE kind = 'preload'"), "nothing is waited for")
        assert (wanted, "ready") in [(row["model"], row["state"]) for row in service.running()]


def test_profile_by_command_line(service: Service) -> None:
    take(service, profiles_of(service))
    shown = run(service, "profile")
    assert "front -> moon, sun -> (nothing)" in shown and "active" not in shown
    assert run(service, "profile", "night") == "the profile night is active\n"
    assert ["active" in line for line in run(service, "profile").splitlines()] == [False, False, False, True]
    assert run(service, "profile", "--none") == "no profile is active\n"
    environ = {"QMFLASK_URL": service.url}
    words = {**environ, "_QMFLASK_COMPLETE": "bash_complete", "COMP_WORDS": "qmflask profile d", "COMP_CWORD": "2"}
    completed = CliRunner().invoke(main, prog_name="qmflask", env=words).output
    assert completed.split() == ["plain,day", "plain,dusk"]
    wrong = CliRunner().invoke(main, ["profile", "nihgt"], env=environ)
    assert wrong.exit_code == 1 and "there is no profile 'nihgt'" in wrong.output
    assert CliRunner().invoke(main, ["profile", "day", "--none"], env=environ).exit_code == 2


# --- the default model ------------------------------------------------------------------------------------


def test_the_default_model_returns_to_an_idle_box_and_stops_nobody(service: Service) -> None:
    def config(service: Service) -> dict[str, Any]:
        settings = {"home": {"estVramGB": 6}, "guest": {"estVramGB": 5, "ttl": 1}, "other": {"estVramGB": 1}}
        night = {"pins": {"x": "other"}, "defaultModel": "other"}
        shared = {"vramBudgetGB": 8, "defaultModel": "home", "returnAfter": 0.3, "profiles": {"night": night}}
        return {"models": models(service, *settings, **settings), **shared}

    take(service, config(service))
    service.wait_event("ready", "home")  # nobody has asked for it
    assert ask(service, "guest") == {"guest"}
    asked = service.events("request", "guest")[-1]["t"]
    back = service.wait_event("start", "home", count=2)["t"]
    left = service.events("exit", "guest")[-1]["t"]
    assert left - asked > 0.9e9, "the box was idle for longer than returnAfter while guest was still there"
    assert left < back, "and it was not stopped for home"
    activate(service, "night")
    service.wait_event("start", "other")  # the profile's own comes beside it


def test_the_load_of_a_default_model_is_in_nobodys_way(service: Service) -> None:
    def config(service: Service) -> dict[str, Any]:
        found = models(service, "guest", "home", home={"cmd": service.fake("home", load_time=60)})
        return {"models": found, "defaultModel": "home", "returnAfter": 0}

    take(service, config(service))
    service.wait_event("start", "home")
    reply = service.chat("guest", timeout=20)
    assert reply.status == 200, reply.body
    service.wait_event("exit", "home")

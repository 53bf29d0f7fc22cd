"""A changed configuration: taken up by all workers, harmless to what runs, refused when it is wrong."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.conftest import StartService
from tests.integration.survival import lives
from tests.service import Service, eventually


def config_of(service: Service, **models: dict[str, Any]) -> dict[str, Any]:
    """A configuration of scripted models; `cmd` is filled in where it is not given."""
    filled = {name: {"cmd": service.fake(name), **keys} for name, keys in models.items()}
    return {"groups": {"all": {"swap": False, "exclusive": False, "members": list(filled)}}, "models": filled}


@pytest.fixture(scope="module")
def running_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for all tests that need no start of their own."""
    service = Service(tmp_path_factory.mktemp("reload"), {"models": {}}, workers=3, threads=24)
    service.start()
    yield service
    print(service.log()[-20_000:])
    service.close()


@pytest.fixture
def service(running_service: Service) -> Iterator[Service]:
    """The running service with a model that nobody asks for, and with nothing noted yet."""
    yield running_service
    put(running_service, {"models": {"nothing": {"cmd": "true ${PORT}"}}})
    eventually(lambda: running_service.running() == [], "the test's models are gone")
    running_service.events_path.unlink(missing_ok=True)


def put(service: Service, config: dict[str, Any]) -> None:
    """Write the file and have it taken up."""
    service.write_config(config)
    assert service.post("/api/config/reload").status == 200


def all_agree(service: Service) -> bool:
    """Whether every worker that answers serves with the newest configuration."""
    answers = [service.get("/api/config").json() for _ in range(8)]
    return all(answer["worker_generation"] == answer["generation"] for answer in answers)


def generation(service: Service) -> int:
    return int(service.get("/api/config").json()["generation"])


def reload_with(service: Service, config: dict[str, Any]) -> None:
    """Write the file and wait until it is noticed, and in force in every worker."""
    before = generation(service)
    service.write_config(config)
    eventually(lambda: generation(service) > before, "the new configuration is in force")
    eventually(lambda: all_agree(service), "all workers agree", timeout=5)


def test_every_worker_takes_up_a_changed_file(service: Service) -> None:
    put(service, config_of(service, alpha={}))
    reload_with(service, config_of(service, alpha={}, beta={}))
    assert service.chat("beta").status == 200


def test_who_has_not_heard_of_a_reload_looks_before_he_says_that_there_is_no_such_model(
    start_service: StartService,
) -> None:
    service = start_service(lambda s: config_of(s, alpha={}), workers=3)
    for socket in (service.state / "wake").iterdir():
        socket.unlink()  # nobody is told anything: workers look for themselves, once a second

    def ask_all_at_once(path: str, **models: dict[str, Any]) -> set[int]:
        put(service, config_of(service, alpha={}, **models))
        with ThreadPoolExecutor(8) as pool:
            return {reply.status for reply in pool.map(lambda _: service.get(path), range(8))}

    assert ask_all_at_once("/api/plan?model=plan-me", **{"plan-me": {}}) == {200}
    assert ask_all_at_once("/upstream/look/here", look={}) == {200}
    assert ask_all_at_once("/props?model=ask", ask={}) == {200}
    assert ask_all_at_once("/props?model=ask") == {404}


def test_unrelated_changes_touch_no_running_model(service: Service) -> None:
    put(service, config_of(service, alpha={}, beta={}))
    service.chat("alpha")
    (before,) = service.running()
    reload_with(service, config_of(service, aaa={}, alpha={"name": "Alpha", "ttl": 500}, gamma={}))
    assert service.chat("alpha").status == 200
    (after,) = service.running()
    assert (after["pid"], after["name"], after["ttl"]) == (before["pid"], "Alpha", 500)


def test_a_removed_model_drains_and_stops(service: Service) -> None:
    put(service, config_of(service, alpha={}, beta={}))
    with service.stream("alpha", headers={"X-Fake": "chunks=60, interval=0.05"}) as stream:
        events = iter(stream)
        next(events)
        put(service, config_of(service, beta={}))
        assert service.chat("alpha").code == "model_not_found"
        assert list(events)[-1] == "[DONE]"
    service.wait_event("exit", "alpha")
    eventually(lambda: service.running() == [], "the removed model is gone")


def test_a_model_removed_while_it_loads_is_aborted_and_its_waiters_are_told(service: Service) -> None:
    put(service, config_of(service, alpha={}, slow={"cmd": service.fake("slow", load_time=60)}))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(service.chat, "slow") for _ in range(2)]
        pid = service.wait_event("start", "slow")["pid"]
        put(service, config_of(service, alpha={}))
        for future in waiting:
            assert (future.result().status, future.result().code) == (404, "model_not_found")
    eventually(lambda: not lives(pid), "its load is aborted")
    eventually(lambda: service.running() == [], "and forgotten")


def test_a_command_changed_while_the_model_loads_counts_from_the_next_start(service: Service) -> None:
    put(service, config_of(service, alpha={"cmd": service.fake("old", load_time=1)}))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(service.chat, "alpha")
        service.wait_event("start", "old")
        put(service, config_of(service, alpha={"cmd": service.fake("new")}))
        assert "I am old." in waiting.result().text, "the load that was under way is finished"
    assert "I am new." in service.chat("alpha").text
    assert [event["name"] for event in service.events("start")] == ["old", "new"]


def test_a_changed_command_is_used_at_the_next_idle_request(service: Service) -> None:
    put(service, config_of(service, alpha={}))
    service.chat("alpha")
    changed = config_of(service, alpha={"cmd": service.fake("alpha2")})
    with service.stream("alpha", headers={"X-Fake": "chunks=60, interval=0.05"}) as stream:
        events = iter(stream)
        next(events)
        reload_with(service, changed)
        assert "alpha2" not in service.chat("alpha").body.decode()  # busy: it serves on under the old command
        assert list(events)[-1] == "[DONE]"
    service.wait_idle()
    assert "alpha2" in service.chat("alpha").body.decode()
    assert [event["name"] for event in service.events("start")] == ["alpha", "alpha2"]


def test_a_wrong_file_changes_nothing_and_is_shown(service: Service) -> None:
    put(service, config_of(service, alpha={}))
    service.chat("alpha")
    before = generation(service)
    service.write_config("models:\n  alpha: {cmd: x, ttl: never}\n")
    error = eventually(lambda: service.get("/api/config").json()["error"], "the error is shown")
    assert "config.yaml" in error and "ttl" in error
    assert generation(service) == before
    assert service.chat("alpha").status == 200
    refused = service.post("/api/config/reload")
    assert (refused.status, refused.code) == (400, "invalid_configuration")
    assert "ttl" in refused.body.decode()
    reload_with(service, config_of(service, alpha={}, beta={}))
    assert service.get("/api/config").json()["error"] is None


def test_a_start_failure_is_forgotten_when_the_command_changes(service: Service) -> None:
    put(service, config_of(service, alpha={"cmd": "/no/such/program ${PORT}"}))
    assert service.chat("alpha").code == "model_start_failed"
    assert service.chat("alpha").header("Retry-After")
    reload_with(service, config_of(service, alpha={}))
    assert service.chat("alpha").status == 200


def test_a_symlink_swap_is_noticed(start_service: StartService) -> None:
    service = start_service(lambda s: config_of(s, alpha={}), up=False)
    for name in ("one", "two"):
        service.write_config(config_of(service, alpha={}, **({"beta": {}} if name == "two" else {})))
        os.rename(service.config_path, service.folder / name)
    os.symlink("one", service.config_path)
    service.start()
    before = generation(service)
    os.symlink("two", service.folder / "next")
    os.replace(service.folder / "next", service.config_path)
    eventually(lambda: generation(service) > before, "the swapped link is noticed")
    assert service.chat("beta").status == 200


def test_reload_under_load_cuts_no_stream_and_restarts_no_model(service: Service) -> None:
    put(service, config_of(service, alpha={}, beta={}))
    service.chat("alpha")
    stop = threading.Event()
    configurations = itertools.cycle([{"beta": {"ttl": 9}}, {"beta": {}, "gamma": {}}, {"beta": {"name": "B"}}])

    def reload_on_and_on() -> None:
        while not stop.is_set():
            put(service, config_of(service, alpha={}, **next(configurations)))
            stop.wait(0.05)

    def stream(_: int) -> int:
        with service.stream("alpha", headers={"X-Fake": "chunks=100, interval=0.05"}) as answer:
            payloads = list(answer)
        assert payloads[-1] == "[DONE]"
        return len(payloads)

    before = generation(service)
    reloader = threading.Thread(target=reload_on_and_on)
    reloader.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(stream, range(8)))) == 1
    finally:
        stop.set()
        reloader.join()
    assert generation(service) - before >= 5
    assert len(service.events("start", "alpha")) == 1


def test_hup_keeps_models_and_streams(start_service: StartService) -> None:
    service = start_service(lambda s: config_of(s, alpha={}))
    service.chat("alpha")
    (before,) = service.running()
    with service.stream("alpha", headers={"X-Fake": "chunks=60, interval=0.05"}) as stream:
        events = iter(stream)
        next(events)
        service.hup()
        began = time.monotonic()
        assert service.chat("alpha").status == 200
        assert time.monotonic() - began < 10
        assert list(events)[-1] == "[DONE]"
    (after,) = service.running()
    assert after["pid"] == before["pid"]


def test_two_services_do_not_share_a_state_directory_unless_they_are_one(start_service: StartService) -> None:
    first = start_service(lambda s: config_of(s, alpha={}))
    other = start_service(lambda s: config_of(s, beta={}), up=False, env={"QMFLASK_STATE": str(first.state)})
    other.spawn()
    assert other.process is not None and other.process.wait(30) != 0
    assert "belongs to a running qmflask" in other.log() and str(first.config_path) in other.log()
    assert first.chat("alpha").status == 200
    assert first.chat("beta").code == "model_not_found"


def test_a_removed_state_directory_is_made_again(start_service: StartService) -> None:
    service = start_service(lambda s: config_of(s, alpha={}, beta={}))
    service.chat("alpha")
    os.rename(service.state, service.folder / "taken-away")
    eventually(lambda: service.chat("beta").status == 200, "requests are served again", timeout=20, every=0.5)
    assert service.state.stat().st_mode & 0o777 == 0o700
    assert generation(service) >= 1
    reload_with(service, config_of(service, gamma={}))
    assert service.chat("gamma").status == 200

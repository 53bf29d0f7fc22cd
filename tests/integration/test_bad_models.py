"""Model servers that do not start, do not stop, die, fork away or leave their port to others: clear errors, no rest."""

from __future__ import annotations

import http.client
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.survival import lives
from tests.service import Service, eventually

#: Starts an HTTP server on the port as somebody else's: another session, no environment, no descriptor of ours.
ELSEWHERE = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-m", "http.server", "--bind", "127.0.0.1", sys.argv[1]], env={},
                 start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """All of them fit together."""
    service = Service(tmp_path_factory.mktemp("bad"), {}, workers=2, threads=24)
    script = service.folder / "elsewhere.py"
    script.write_text(ELSEWHERE)
    models: dict[str, Any] = {
        "deaf": {"cmd": service.fake("deaf", ignore_term=True), "unloadTimeout": 1},
        "mortal": {"cmd": service.fake("mortal")},
        "never": {"cmd": service.fake("never", health="never"), "healthCheckTimeout": 15},
        "elsewhere": {"cmd": f"{sys.executable} {script} ${{PORT}}", "checkEndpoint": "/"},
        "missing": {"cmd": "no-such-program-anywhere --port ${PORT}"},
        "moody": {"cmd": f"sh -c 'test -e {service.folder}/good && exec {service.fake('moody')}; echo no; exit 7'"},
    }
    for tree in ("wrapper", "helper", "detached"):
        models[tree] = {"cmd": service.fake(tree, tree=tree), "unloadTimeout": 1}
    groups = {"all": {"swap": False, "exclusive": False, "members": list(models)}}
    service.write_config({"groups": groups, "models": models})
    service.start()
    yield service
    print(service.log()[-20_000:])
    service.close()


def test_who_ignores_term_is_killed_when_its_time_is_over(service: Service) -> None:
    assert service.chat("deaf").status == 200
    pid = service.events("start", "deaf")[-1]["pid"]
    assert service.post("/api/models/unload/deaf").status == 200
    assert not lives(pid)
    assert len(service.events("term", "deaf")) == 1, "it was asked first"
    assert service.chat("deaf").status == 200


@pytest.mark.parametrize("tree", ["wrapper", "helper", "detached"])
def test_the_whole_tree_goes(service: Service, tree: str) -> None:
    """A shell that passes nothing on; a helper that ignores TERM; the same in a session of its own."""
    assert service.chat(tree).status == 200
    events = [event for event in service.events(name=tree) if event["event"] in ("start", "helper")]
    pids = {event["pid"] for event in events} | {event.get("of", event["pid"]) for event in events}
    assert service.post(f"/api/models/unload/{tree}").status == 200
    assert not [pid for pid in pids if lives(pid)]


def wait_until_its_death_is_noticed(service: Service, name: str) -> None:
    """Who asks before that gets an honest 502."""
    query = f"SELECT 1 FROM processes WHERE model = '{name}' AND state = 'stopped'"
    eventually(lambda: service.query(query), f"{name} is seen to be dead")


def test_a_death_before_the_headers_and_amid_a_stream(service: Service) -> None:
    reply = service.chat("mortal", headers={"X-Fake": "die_after=0"}, stream=True)
    assert (reply.status, reply.code) == (502, "upstream_unreachable")
    wait_until_its_death_is_noticed(service, "mortal")
    with service.stream("mortal", headers={"X-Fake": "chunks=5, interval=0.05, die_after=2"}) as stream:
        payloads: list[str] = []
        with pytest.raises((http.client.HTTPException, OSError)):
            for payload in stream:
                payloads.append(payload)
    assert "[DONE]" not in payloads
    assert "upstream" in payloads[-1], "an error event comes before the cut"
    wait_until_its_death_is_noticed(service, "mortal")
    assert service.chat("mortal").status == 200, "no back-off: it had started well"
    assert len(service.events("start", "mortal")) == 3


def test_a_killed_model_answers_again(service: Service) -> None:
    assert service.chat("mortal").status == 200
    os.kill(service.events("start", "mortal")[-1]["pid"], signal.SIGKILL)
    wait_until_its_death_is_noticed(service, "mortal")
    assert "mortal exited by itself with signal SIGKILL" in service.log()
    assert service.chat("mortal").status == 200


def test_a_stranger_on_the_port_is_no_model(service: Service) -> None:
    reply = service.chat("elsewhere")
    assert (reply.status, reply.code) == (502, "model_start_failed")
    message = reply.json()["error"]["message"]
    assert "does not listen on its port" in message and "(pid " in message
    stranger = int(message.partition("(pid ")[2].partition(")")[0])
    assert lives(stranger), "it is not ours to end"
    os.kill(stranger, signal.SIGKILL)


def test_what_cannot_start_is_remembered_until_somebody_loads_it(service: Service) -> None:
    first, second = service.chat("missing"), service.chat("missing")
    for reply in (first, second):
        assert (reply.status, reply.code) == (502, "model_start_failed")
        assert "no-such-program-anywhere" in reply.json()["error"]["message"]
    assert int(second.header("Retry-After") or 0) >= 1

    reply = service.chat("moody")
    assert reply.code == "model_start_failed"
    assert "exit code 7" in reply.body.decode() and "no" in reply.body.decode()
    (service.folder / "good").touch()
    assert service.post("/api/models/load/moody").status == 200, "an explicit load starts anew"
    assert service.chat("moody").status == 200


@pytest.mark.heavy
def test_who_is_never_healthy_is_ended(service: Service) -> None:
    """All who wait are told. Fifteen seconds is the shortest time that can be configured, so this is run by hand."""
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda _: service.chat("never", timeout=60), range(2)))
    for reply in replies:
        assert (reply.status, reply.code) == (504, "model_start_timeout")
        assert "healthCheckTimeout" in reply.json()["error"]["message"]
    pid = service.events("start", "never")[-1]["pid"]
    eventually(lambda: not lives(pid), "it is stopped")
    assert len(service.events("start", "never")) == 1

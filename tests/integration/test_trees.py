"""Process trees of a real service: stop commands, leftovers that hold a spawn lock, logs that grow without end."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from qmflask.logfiles import ModelLog
from tests.integration.survival import lives
from tests.service import Service, eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Models with a stop command, a slow stop command, a log that is flooded, and a plain one."""
    service = Service(tmp_path_factory.mktemp("trees"), {}, workers=2)
    note = service.folder / "stopped"
    quick = f"sh -c 'echo $MARK $$ >> {note}; kill $1' stop ${{PID}}"
    slow = f"sh -c 'echo $MARK $$ >> {note}; exec sleep 3600'"
    models = {
        "quick": {"cmd": service.fake("quick"), "cmdStop": quick, "env": ["MARK=of-the-quick"]},
        "slow": {"cmd": service.fake("slow"), "cmdStop": slow, "env": ["MARK=of-the-slow"], "unloadTimeout": 3},
        "loud": {"cmd": service.fake("loud", log_flood=25_000_000, log_rate=1000)},
        "plain": {"cmd": service.fake("plain")},
    }
    groups = {"all": {"swap": False, "exclusive": False, "members": list(models)}}
    service.write_config({"groups": groups, "models": models})
    service.start()
    yield service
    print(service.log()[-20_000:])
    service.close()


def stops(service: Service, mark: str) -> list[int]:
    """The pids of the stop commands that were run with this mark in their environment."""
    path = service.folder / "stopped"
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [int(row[-1]) for row in rows if row[:-1] == [mark]]


def test_a_stop_command_has_the_environment_of_its_model(service: Service) -> None:
    assert service.chat("quick").status == 200
    assert service.post("/api/models/unload/quick").status == 200
    assert len(stops(service, "of-the-quick")) == 1
    assert len(service.events("term", "quick")) == 1


def test_a_stop_command_also_runs_after_a_death_nobody_asked_for(service: Service) -> None:
    """The docker client is not the container."""
    before = len(stops(service, "of-the-quick"))
    assert service.chat("quick").status == 200
    os.kill(service.events("start", "quick")[-1]["pid"], signal.SIGKILL)
    eventually(lambda: len(stops(service, "of-the-quick")) == before + 1, "the stop command ran")
    eventually(lambda: service.running() == [], "the model is down")
    assert len(stops(service, "of-the-quick")) == before + 1, "once"


def test_a_successor_ends_the_stop_command_of_a_dead_leader_and_runs_it_anew(service: Service) -> None:
    assert service.chat("slow").status == 200
    eventually(lambda: len(service.registered_workers()) == 2, "both workers are up")
    leader = service.leader()
    with service.open("/api/models/unload/slow", b"{}"):
        (first,) = eventually(lambda: stops(service, "of-the-slow"), "the stop command runs")
        os.kill(leader, signal.SIGKILL)
        _, second = eventually(
            lambda: (found := stops(service, "of-the-slow"))[1:] and found, "the successor runs it anew"
        )
        eventually(lambda: not lives(first), "the first one is ended")
        model = service.events("start", "slow")[-1]["pid"]
        eventually(lambda: not lives(model), "the model is ended at the first deadline")
        eventually(lambda: not lives(second), "and so is the second stop command")
    assert len(stops(service, "of-the-slow")) == 2


def test_logs_of_live_models_are_kept_below_their_cap(service: Service) -> None:
    assert service.chat("loud").status == 200
    log = ModelLog(service.state / "logs", "loud")
    eventually(lambda: 0 < log.size <= log.cap, "the log is shortened")
    assert log.end > 25_000_000, "nothing that was written is lost from the count"


def test_a_leftover_without_a_token_that_holds_the_spawn_lock_is_ended(service: Service) -> None:
    name = hashlib.sha256(b"plain").hexdigest()[:16]
    lock = service.state / "spawn" / f"{name}.lock"
    program = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(3600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(lock)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert service.chat("plain").status == 200
        assert holder.wait(10) == -signal.SIGKILL
    assert len(service.events("start", "plain")) == 1

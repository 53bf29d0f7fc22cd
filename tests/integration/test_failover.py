"""The leader dies, or stands still, at the worst moments: whoever takes over finishes what was begun, never twice."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.survival import lives, overlaps, persistent_chat
from tests.service import Reply, Service, eventually

#: Phases of a swap, each right after its commit, and the two sides of the spawn (DESIGN section 3).
POINTS = ("draining", "stopping", "reclaim", "before-spawn", "after-spawn", "probing", "ready")


class Crashing:
    """A service whose processes strike themselves where they are told to."""

    def __init__(self, folder: Path) -> None:
        self._plan = folder / "plan"
        self.service = Service(
            folder, {}, workers=3, app="tests.parts.crashing_wsgi:application", env={"CRASH_PLAN": str(self._plan)}
        )
        models = {
            name: {"cmd": self.service.fake(name, load_time=0.1, interval=0.2), "estRamGB": 0.06}
            for name in ("alpha", "beta")
        }
        # In RAM, so that there is a gate to pass before each start; impatient, so that busy victims drain.
        patience = {"scheduler": {"settings": {"fifo": {"patienceMs": 50}}}}
        config = {"ramBudgetGB": 0.1, "reclaimTimeout": 20, "routing": patience, "models": models}
        self.service.write_config(config)

    def plan(self, point: str, times: int = 1, name: str = "KILL") -> None:
        """The next blows, once all workers are there."""
        eventually(lambda: len(self.service.registered_workers()) >= 3, "every worker is up")
        self._plan.with_suffix(".struck").unlink(missing_ok=True)
        self._plan.with_suffix(".new").write_text(f"{point} {times} {name}")
        os.replace(self._plan.with_suffix(".new"), self._plan)

    def plan_nothing(self) -> None:
        """No more blows."""
        self._plan.unlink()

    def struck(self) -> list[int]:
        """Who was struck."""
        path = self._plan.with_suffix(".struck")
        return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashing]:
    """One service for all: starting one costs more than a case."""
    crashing = Crashing(tmp_path_factory.mktemp("crashing"))
    crashing.service.start()
    yield crashing
    print(crashing.service.log()[-20_000:])
    crashing.service.close()


@pytest.mark.parametrize("point", POINTS)
def test_leader_killed_twice_at_each_phase(crashing: Crashing, point: str) -> None:
    service = crashing.service
    crashing.plan(point, times=2)
    answers: list[tuple[str, Reply, list[str]]] = []
    with ThreadPoolExecutor(4) as pool:
        while len(crashing.struck()) < 2:
            asked = [(name, pool.submit(persistent_chat, service, name)) for name in ("alpha", "beta") * 2]
            answers += [(name, *future.result()) for name, future in asked]
            assert len(answers) < 40, f"{point} is never reached"
    for name, reply, _ in answers:
        assert reply.text == f"I am {name}."
    # Whose worker was killed has lost its connection; nothing was refused.
    assert {why for _, _, tries in answers for why in tries} <= {"connection lost"}, answers
    assert overlaps(service.events(), 1) == []
    service.wait_idle()


def db_leader(service: Service) -> int | None:
    """The leader's pid by the state database: no worker that may be stopped is asked."""
    rows = service.query("SELECT w.pid FROM scheduler s JOIN workers w ON w.id = s.leader")
    return int(rows[0][0]) if rows else None


def other_model(service: Service) -> str:
    """The model that is not loaded now."""
    return "beta" if service.query("SELECT 1 FROM processes WHERE model = 'alpha' AND state = 'ready'") else "alpha"


def test_forced_second_leader_while_the_first_stands_before_its_spawn(crashing: Crashing) -> None:
    service = crashing.service
    name = other_model(service)
    before = len(service.events("start", name))
    crashing.plan("before-spawn", name="STOP")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(persistent_chat, service, name)
        (stopped,) = eventually(crashing.struck, "the leader stands before its spawn")
        try:
            (service.state / "leader.lock").unlink()
            leader = eventually(lambda: (pid := db_leader(service)) not in (None, stopped) and pid, "a second leader")
            assert len(service.events("start", name)) == before, "the second leader spawned beside the spawn lock"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
        reply, _ = asked.result()
    assert reply.text == f"I am {name}."
    assert len(service.events("start", name)) == before + 1
    assert overlaps(service.events(), 1) == []
    assert lives(stopped), "resumed within its time, it is a worker like any other"
    assert db_leader(service) == leader


def test_a_leader_whose_tick_hangs_resigns_and_does_no_harm_afterwards(crashing: Crashing) -> None:
    service = crashing.service
    name = other_model(service)
    before = len(service.events("start", name))
    deposed = service.log().count("no longer leading")
    crashing.plan("stopping", name="HANG")
    reply, _ = persistent_chat(service, name, timeout=25)
    assert reply.text == f"I am {name}."
    (hung,) = crashing.struck()
    assert db_leader(service) not in (None, hung)
    assert "the scheduler's tick hangs for 3 s: resigning" in service.log()
    eventually(lambda: service.log().count("no longer leading") > deposed, "its next write is refused")
    assert lives(hung), "it is a worker like any other"
    assert len(service.events("start", name)) == before + 1
    assert overlaps(service.events(), 1) == []


def test_stopped_leader_is_replaced_and_killed(crashing: Crashing) -> None:
    service = crashing.service
    crashing.plan("nowhere")
    leader = db_leader(service)
    assert leader is not None
    name = other_model(service)
    began = time.monotonic()
    os.kill(leader, signal.SIGSTOP)
    reply, _ = persistent_chat(service, name, timeout=8)
    took = time.monotonic() - began
    assert reply.text == f"I am {name}."
    assert 4 < took < 25, took
    eventually(lambda: not lives(leader), "the stopped leader is killed, so that it can do no harm when it is resumed")


def test_worker_stopped_inside_a_write_of_the_store_is_killed(crashing: Crashing) -> None:
    service = crashing.service
    crashing.plan("in-transaction", name="STOP")
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(persistent_chat, service, name, timeout=30) for name in ("alpha", "beta") * 2]
        (stopped,) = eventually(crashing.struck, "a worker stands still with the write lock")
        leader = db_leader(service)
        assert leader != stopped
        for future in asked:
            assert future.result()[0].status == 200
    eventually(lambda: not lives(stopped), "it is killed")
    assert overlaps(service.events(), 1) == []

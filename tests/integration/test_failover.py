"""The leader dies, or stands still, at the worst moments: whoever takes over finishes what was begun, never twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.survival import overlaps, persistent_chat
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

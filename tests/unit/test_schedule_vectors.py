"""The `scheduler` and `group-evict` cases of compatibility.json, played through the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from qmflask.policy.eviction import GroupPolicy, GroupRule, Sizes
from qmflask.policy.schedule import EvictionPolicy, ModelRule
from tests.unit.simulator import Simulator

CASES = json.loads((Path(__file__).parents[1] / "data" / "compatibility.json").read_text(encoding="utf-8"))


class Sets:
    """Whole combinations written out: a tiny stand-in for the matrix where a vector has one."""

    def __init__(self, sets: list[set[str]]) -> None:
        self.sets = sets

    def eviction_for(
        self, target: str, running: Any, vram_ceiling: int | None = None, ram_ceiling: int | None = None
    ) -> list[str]:
        others = [model for model in running if model != target]
        plans = [[m for m in others if m not in chosen] for chosen in self.sets if target in chosen]
        return min(plans, key=len, default=others)

    def memory_decides(self, target: str) -> bool:
        return False

    def ready_victims(self, target: str, running: Any) -> list[str]:
        return []

    def misfit(
        self, target: str, running: Any, vram_ceiling: int | None = None, ram_ceiling: int | None = None
    ) -> None:
        return None


def world(text: str) -> tuple[dict[str, ModelRule], EvictionPolicy]:
    """The few keys that the scheduler's vectors use."""
    config = yaml.safe_load(text)
    fifo = config.get("routing", {}).get("scheduler", {}).get("settings", {}).get("fifo", {})
    rules = {
        model: ModelRule(model, body.get("concurrencyLimit", 0), fifo.get("priority", {}).get(model, 0))
        for model, body in config["models"].items()
    }
    if "matrix" in config:
        sets = [{part.strip() for part in text.split("&")} for text in config["matrix"]["sets"].values()]
        return rules, Sets(sets)
    groups = [
        GroupRule(
            name,
            body.get("swap", True),
            body.get("exclusive", True),
            body.get("persistent", False),
            body.get("pool", "vram"),
            tuple(body["members"]),
        )
        for name, body in config.get("groups", {}).items()
    ]
    return rules, GroupPolicy({model: Sizes(0, 0) for model in rules}, groups, 0, 0)


def of_area(area: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in CASES if case["area"] == area]


@pytest.mark.parametrize("case", of_area("scheduler"))
def test_scheduler_vector(case: dict[str, Any]) -> None:
    rules, policy = world(case["given"]["config_yaml"])
    sim = Simulator(rules, policy)
    for model in case["given"]["ready"]:
        sim.put(model, "ready")
    verbs = {"state": sim.put}
    seen = [verbs.get(verb, getattr(sim, verb, None))(*rest) for verb, *rest in case["given"]["steps"]]
    assert seen == case["expect"]["events"]


@pytest.mark.parametrize("case", of_area("group-evict"))
def test_group_evict_vector(case: dict[str, Any]) -> None:
    """The same victims, whether asked of the policy or seen as a swap of idle models."""
    given = case["given"]
    rules, policy = world(given["config_yaml"])
    assert policy.eviction_for(given["target"], given["running"]) == case["expect"]["evict"]
    sim = Simulator(rules, policy)
    for model in given["running"]:
        sim.put(model, "ready")
    assert sim.req("r", given["target"]) == [f"start {given['target']} evict=[{','.join(case['expect']['evict'])}]"]


def test_every_scheduler_vector_is_run() -> None:
    assert len(of_area("scheduler")) >= 10
    assert len(of_area("group-evict")) >= 4

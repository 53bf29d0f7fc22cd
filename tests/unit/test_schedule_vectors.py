"""The `scheduler` and `group-evict` cases of compatibility.json, played through the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qmflask.config import Source, load
from qmflask.policy.rules import Rules, make_rules
from tests.unit.simulator import Simulator

CASES = json.loads((Path(__file__).parents[1] / "data" / "compatibility.json").read_text(encoding="utf-8"))


def world(text: str) -> Rules:
    """The rules of a vector's configuration, made as the service makes them."""
    return make_rules(load([Source("config.yaml", text)], {}).config, {})


def of_area(area: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in CASES if case["area"] == area]


@pytest.mark.parametrize("case", of_area("scheduler"))
def test_scheduler_vector(case: dict[str, Any]) -> None:
    rules = world(case["given"]["config_yaml"])
    sim = Simulator(rules.models, rules.policy)
    for model in case["given"]["ready"]:
        sim.put(model, "ready")
    verbs = {"state": sim.put}
    seen = [verbs.get(verb, getattr(sim, verb, None))(*rest) for verb, *rest in case["given"]["steps"]]
    assert seen == case["expect"]["events"]


@pytest.mark.parametrize("case", of_area("group-evict"))
def test_group_evict_vector(case: dict[str, Any]) -> None:
    """The same victims, whether asked of the policy or seen as a swap of idle models."""
    given = case["given"]
    rules = world(given["config_yaml"])
    assert rules.policy.eviction_for(given["target"], given["running"]) == case["expect"]["evict"]
    sim = Simulator(rules.models, rules.policy)
    for model in given["running"]:
        sim.put(model, "ready")
    assert sim.req("r", given["target"]) == [f"start {given['target']} evict=[{','.join(case['expect']['evict'])}]"]


def test_every_scheduler_vector_is_run() -> None:
    assert len(of_area("scheduler")) >= 10
    assert len(of_area("group-evict")) >= 4

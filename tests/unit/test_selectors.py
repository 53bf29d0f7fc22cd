"""Selectors: the pinned choices, and what spillover promises over any sequence of requests."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmflask.policy.selectors import NO_TARGET, Target, choose
from qmflask.states import State

CASES = json.loads((Path(__file__).parents[1] / "data" / "compatibility.json").read_text())


def cases(area: str) -> Any:
    found = [case for case in CASES if case["area"] == area]
    return pytest.mark.parametrize("case", found, ids=[case["id"] for case in found])


def targets(*names: str) -> list[Target]:
    return [Target(name, name, local="/" not in name) for name in names]


def states(written: dict[str, str]) -> dict[str, State]:
    return {model: State(state) for model, state in written.items()}


@cases("selector-warm")
def test_warm(case: dict[str, Any]) -> None:
    given_ = case["given"]
    found = choose("warm", targets(*given_["targets"]), states(given_["process_states"]))
    assert found is not None
    assert found.name == case["expect"]["target"]


@cases("selector-spillover")
def test_spillover(case: dict[str, Any]) -> None:
    given_ = case["given"]
    reserved: Counter[str] = Counter()
    picks = []
    for counter, (_, written) in enumerate(given_["steps"]):
        found = choose(
            "spillover", targets(*given_["targets"]), states(written), reserved, given_["spillover"], counter
        )
        picks.append(found.name if found else f"503 {NO_TARGET}")
        if found:
            reserved[found.model] += 1
    assert picks == case["expect"]["picks"]


def picked(strategy: str, names: str, written: dict[str, str], **more: Any) -> str | None:
    found = choose(strategy, targets(*names.split()), states(written), **more)
    return found.name if found else None


def test_pin_is_the_first() -> None:
    assert picked("pin", "ant bee", {"bee": "ready"}) == "ant"


def test_warm_prefers_ready_then_loading_then_the_first() -> None:
    assert picked("warm", "ant bee cat", {"ant": "draining", "bee": "starting", "cat": "starting"}) == "bee"
    assert picked("warm", "ant bee cat", {"bee": "stopping"}) == "ant"
    assert picked("warm", "ant bee cat", {"cat": "ready", "bee": "ready"}) == "bee"


def test_an_alias_is_judged_by_its_model() -> None:
    bird = Target("bird", "finch")
    assert choose("warm", [Target("owl", "owl"), bird], {"finch": State.READY}) is bird


def test_spillover_skips_what_leaves() -> None:
    assert picked("spillover", "ant bee", {"ant": "draining"}) == "bee"
    assert picked("spillover", "ant bee", {"ant": "stopping", "bee": "draining"}) is None
    assert picked("spillover", "ant bee", {"ant": "failed"}) == "ant", "the next request may find it mended"


def test_spillover_counts_peers_by_their_requests() -> None:
    assert picked("spillover", "far/m1 ant", {"ant": "ready"}) == "ant"
    assert picked("spillover", "far/m1 ant", {"ant": "ready"}, reserved={"ant": 1}) == "far/m1"
    assert picked("spillover", "far/m1 ant", {}, reserved={"far/m1": 1}, spillover=2) == "far/m1"


def test_ties_go_round() -> None:
    both = {"ant": "ready", "bee": "ready"}
    assert [picked("spillover", "ant bee", both, counter=n) for n in range(4)] == ["ant", "bee", "ant", "bee"]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="unknown strategy"):
        choose("random", targets("ant"), {})
    with pytest.raises(ValueError, match="needs targets"):
        choose("pin", [], {})


@settings(deadline=None)
@given(st.lists(st.sampled_from(["pick", "end"]), max_size=40), st.integers(1, 3))
def test_nothing_new_is_loaded_while_there_is_room(steps: list[str], spillover: int) -> None:
    names = ["ant", "bee", "cat"]
    reserved: Counter[str] = Counter()
    loaded: dict[str, State] = {}
    for counter, step in enumerate(steps):
        if step == "end":
            busiest = max(names, key=lambda name: reserved[name])
            reserved[busiest] = max(0, reserved[busiest] - 1)
            continue
        found = choose("spillover", targets(*names), loaded, reserved, spillover, counter)
        assert found is not None
        if found.model not in loaded and loaded:
            assert all(reserved[name] >= spillover for name in loaded)
        if loaded.get(found.model):
            assert reserved[found.model] == min(reserved[name] for name in loaded)
        loaded[found.model] = State.READY
        reserved[found.model] += 1

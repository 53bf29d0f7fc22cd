"""The eviction function: every pinned case, its admission companions, and properties over random configurations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmflask.policy.eviction import DEFAULT_GROUP, GroupPolicy, GroupRule, Misfit, Sizes

GB = 2**30
CASES = json.loads((Path(__file__).parents[1] / "data" / "eviction.json").read_text())
GROUP_CASES = [
    case
    for case in json.loads((Path(__file__).parents[1] / "data" / "compatibility.json").read_text())
    if case["area"] == "group-evict"
]


def policy_of(config: dict[str, Any], **kwargs: Any) -> GroupPolicy:
    """A policy from the vectors' form: budgets round up to a byte, charges down."""
    sizes = {
        model: Sizes(math.floor(keys["estVramGB"] * GB), math.floor(keys["estRamGB"] * GB))
        for model, keys in config["models"].items()
    }
    groups = [
        GroupRule(name, keys["swap"], keys["exclusive"], keys["persistent"], keys["pool"], tuple(keys["members"]))
        for name, keys in config["groups"].items()
    ]
    return GroupPolicy(
        sizes, groups, math.ceil(config["vramBudgetGB"] * GB), math.ceil(config["ramBudgetGB"] * GB), **kwargs
    )


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_pinned_case(case: dict[str, Any]) -> None:
    policy = policy_of(case["config"])
    ceiling = None if case["liveCeilingGB"] is None else math.floor(case["liveCeilingGB"] * GB)
    assert policy.eviction_for(case["target"], case["running"], ceiling) == case["expect"]
    assert list(policy.explain(case["target"], case["running"], ceiling).victims) == case["expect"]


GROUPS_OF_CASES = {
    "big": GroupRule("big", members=("owl", "elk")),
    "duo": GroupRule("duo", swap=False, exclusive=False, members=("fox", "yak")),
    "keep": GroupRule("keep", swap=False, exclusive=False, persistent=True, members=("emu",)),
}
GROUPS_OF_CASE = {
    "gr-001": [],
    "gr-002": list(GROUPS_OF_CASES.values()),
    "gr-004": list(GROUPS_OF_CASES.values()),
    "gr-006": [GroupRule("keep", persistent=True, members=("owl", "elk"))],
}


@pytest.mark.parametrize("case", GROUP_CASES, ids=[case["id"] for case in GROUP_CASES])
def test_group_case(case: dict[str, Any]) -> None:
    policy = GroupPolicy({}, GROUPS_OF_CASE[case["id"]])
    assert policy.eviction_for(case["given"]["target"], case["given"]["running"]) == case["expect"]["evict"]


def make(sizes: dict[str, tuple[float, float]], groups: list[GroupRule] | None = None, **kwargs: Any) -> GroupPolicy:
    converted = {model: Sizes(int(vram * GB), int(ram * GB)) for model, (vram, ram) in sizes.items()}
    budgets = {name: int(value * GB) for name, value in kwargs.items() if name.endswith("budget")}
    return GroupPolicy(converted, groups or [], **{**kwargs, **budgets})


def test_a_model_in_two_groups_is_an_error_that_names_both() -> None:
    with pytest.raises(ValueError, match='model "m" is in multiple groups: "a" and "b"'):
        GroupPolicy({}, [GroupRule("a", members=("m",)), GroupRule("b", members=("x", "m"))])
    with pytest.raises(ValueError, match='model "m" is in multiple groups: "a" and "a"'):
        GroupPolicy({}, [GroupRule("a", members=("m", "m"))])


def test_unknown_pools_and_negative_figures_are_errors() -> None:
    with pytest.raises(ValueError, match='unknown pool "disk"'):
        GroupPolicy({}, [GroupRule("a", pool="disk")])
    with pytest.raises(ValueError, match="negative"):
        GroupPolicy({"m": Sizes(-1, 0)}, [])
    with pytest.raises(ValueError, match="negative"):
        GroupPolicy({}, [], vram_budget=-1)


def test_figures_that_add_up_on_paper_fit() -> None:
    sizes = {name: Sizes(math.floor(0.1 * GB)) for name in "abcdefghij"}
    policy = GroupPolicy(sizes, [], vram_budget=math.ceil(1.0 * GB))
    assert policy.eviction_for("j", list("abcdefghi")) == []


def test_a_ram_ceiling_tightens_the_ram_rule_alone() -> None:
    cpu = GroupRule("c", pool="ram", members=("a", "b"))
    policy = make({"a": (0, 4), "b": (0, 4)}, [cpu], ram_budget=16)
    assert policy.eviction_for("b", ["a"], ram_ceiling=7 * GB) == ["a"]
    assert policy.eviction_for("b", ["a"], ram_ceiling=8 * GB) == []
    assert policy.eviction_for("b", ["a"], ram_ceiling=99 * GB) == []
    assert policy.eviction_for("b", ["a"], vram_ceiling=0) == []


def test_a_removed_model_that_still_drains_is_of_the_default_group() -> None:
    policy = make({"owl": (8, 0)}, vram_budget=24)
    assert policy.eviction_for("owl", ["ghost"]) == ["ghost"]
    kept = GroupPolicy({}, [GroupRule(DEFAULT_GROUP, swap=False, exclusive=False)])
    assert kept.eviction_for("owl", ["ghost"]) == []


def test_ready_target_has_no_victims_where_memory_decides() -> None:
    policy = make({"owl": (8, 0), "elk": (8, 0), "yeti": (0, 0)}, vram_budget=10)
    assert policy.memory_decides("owl")
    assert policy.ready_victims("owl", ["owl", "elk"]) == []
    assert not policy.memory_decides("yeti")
    assert policy.ready_victims("yeti", ["owl", "yeti"]) == ["owl"]


def test_ready_ram_target_is_decided_by_its_own_pool() -> None:
    cpu = GroupRule("c", pool="ram", members=("a", "b", "blank"))
    policy = make({"a": (0, 4), "b": (0, 4), "blank": (0, 0), "g": (4, 0)}, [cpu], ram_budget=4)
    assert policy.ready_victims("a", ["b", "g"]) == []
    assert policy.ready_victims("blank", ["g", "b"]) == ["b"]
    # Only a RAM budget: the VRAM side of a GPU target is static, and stays so when it is ready.
    assert policy.ready_victims("g", ["a", "ghost"]) == ["ghost"]


def test_misfit_names_need_budget_and_holders() -> None:
    keep = GroupRule("keep", persistent=True, members=("pin", "idle"))
    policy = make({"pin": (6, 0), "idle": (0, 0), "whale": (20, 0), "elk": (10, 0)}, [keep], vram_budget=24)
    assert policy.misfit("whale", ["elk"]) is None
    assert policy.misfit("whale", ["elk", "pin", "idle"]) == Misfit(
        "vram", 26 * GB, 24 * GB, (("pin", 6 * GB),), only_now=False
    )


def test_misfit_now_is_told_apart_from_misfit_for_ever() -> None:
    policy = make({"whale": (20, 0), "kraken": (30, 0), "yeti": (0, 0)}, vram_budget=24)
    assert policy.misfit("whale", [], 24 * GB) is None
    assert policy.misfit("whale", [], 15 * GB) == Misfit("vram", 20 * GB, 15 * GB, (), only_now=True)
    assert policy.misfit("kraken", [], 15 * GB) == Misfit("vram", 30 * GB, 24 * GB, (), only_now=False)
    assert policy.misfit("yeti", [], 0) is None, "the static rule decides, so nothing is refused"


def test_misfit_in_system_memory_counts_gpu_residents_that_stay() -> None:
    groups = [
        GroupRule("c", pool="ram", members=("a", "p")),
        GroupRule("v", members=("g", "h")),
    ]
    policy = make({"a": (0, 4), "g": (8, 6), "h": (8, 6)}, groups, vram_budget=16, ram_budget=9)
    assert policy.misfit("a", ["g"]) == Misfit("ram", 10 * GB, 9 * GB, (("g", 6 * GB),), only_now=False)
    assert policy.misfit("h", ["g"]) == Misfit("ram", 12 * GB, 9 * GB, (("g", 6 * GB),), only_now=False)
    tight = make({"a": (0, 4), "g": (8, 6), "h": (8, 6)}, groups, vram_budget=8, ram_budget=9)
    assert tight.misfit("h", ["g"]) is None, "g is stopped for VRAM and gives its share of RAM back"


def test_what_never_fits_is_told_before_what_does_not_fit_now() -> None:
    policy = make({"h": (8, 12)}, vram_budget=16, ram_budget=9)
    misfit = policy.misfit("h", [], vram_ceiling=GB)
    assert misfit is not None
    assert (misfit.pool, misfit.only_now) == ("ram", False)


def test_oversize_evict_lets_the_rules_run_as_written() -> None:
    policy = make({"whale": (30, 0), "elk": (4, 0)}, vram_budget=24, oversize_evict=True)
    assert policy.misfit("whale", ["elk"]) is None
    assert policy.eviction_for("whale", ["elk"]) == ["elk"]


def test_explanation_carries_the_arithmetic() -> None:
    keep = GroupRule("keep", persistent=True, members=("pin",))
    sizes = {"pin": (2.0, 0.0), "owl": (9.0, 0.0), "fox": (7.0, 0.0), "elk": (5.0, 0.0), "yeti": (0.0, 0.0)}
    step = (
        make(sizes, [keep], vram_budget=24).explain("elk", ["owl", "pin", "yeti", "fox"], vram_ceiling=15 * GB).steps[0]
    )
    assert (step.rule, step.budget, step.cap, step.charge) == ("memory", 24 * GB, 15 * GB, 5 * GB)
    assert (step.total, step.after) == (23 * GB, 14 * GB)
    assert step.victims == ("yeti", "owl")
    assert {line.model: line.why for line in step.residents} == {
        "yeti": "its size is unknown",
        "owl": "makes room, coldest first",
        "pin": "is persistent",
        "fox": "fits",
    }


def test_explanation_of_the_static_rule_names_its_row() -> None:
    step = make({}, [GroupRule("keep", persistent=True, members=("pin",))]).explain("elk", ["owl", "pin"]).steps[0]
    assert (step.rule, step.victims) == ("static", ("owl",))
    assert [line.why for line in step.residents] == ["group (default) swaps", "group keep is persistent"]


def test_the_swap_line_is_silent_without_a_budget() -> None:
    sizes = {"owl": (9.0, 0.0), "elk": (5.0, 0.0)}
    assert make(sizes).on_swap_start("elk", ["owl"]) is None
    policy = make(sizes, vram_budget=24)
    line = policy.on_swap_start("elk", ["owl"])
    assert line == "swap to elk: estimate 5 GiB, residents 9 GiB, budget in force 24 GiB"
    tightened = policy.on_swap_start("elk", ["owl"], 12 * GB)
    assert tightened is not None
    assert tightened.endswith("budget in force 12 GiB (configured 24 GiB)")


MODELS = [f"m{n}" for n in range(7)]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[GroupPolicy, list[GroupRule], dict[str, Sizes], str, list[str], Any, Any]:
    sizes = {model: Sizes(draw(st.integers(0, 12)), draw(st.integers(0, 12))) for model in MODELS}
    names = ["g0", "g1", "g2", ""]
    home = {model: draw(st.sampled_from(names)) for model in MODELS}
    flag = st.booleans()
    groups = [
        GroupRule(
            name,
            draw(flag),
            draw(flag),
            draw(flag),
            draw(st.sampled_from(["vram", "ram"])),
            tuple(model for model in MODELS if home[model] == name),
        )
        for name in names
        if name
    ]
    budgets = st.sampled_from([0, 0, 8, 16, 24])
    policy = GroupPolicy(sizes, groups, draw(budgets), draw(budgets))
    running = draw(st.lists(st.sampled_from(MODELS), max_size=10))
    ceiling = st.none() | st.integers(0, 30)
    return policy, groups, sizes, draw(st.sampled_from(MODELS)), running, draw(ceiling), draw(ceiling)


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_properties(world: tuple[GroupPolicy, list[GroupRule], dict[str, Sizes], str, list[str], Any, Any]) -> None:
    policy, groups, sizes, target, running, vram_ceiling, ram_ceiling = world
    before = list(running)
    victims = policy.eviction_for(target, running, vram_ceiling, ram_ceiling)
    assert running == before, "the argument is not touched"
    assert victims == policy.eviction_for(target, tuple(running), vram_ceiling, ram_ceiling), "pure"
    assert target not in victims
    assert len(victims) == len(set(victims))
    assert set(victims) <= set(running)
    assert list(policy.explain(target, running, vram_ceiling, ram_ceiling).victims) == victims

    home = {model: group for group in groups for model in group.members}
    default = GroupRule(DEFAULT_GROUP)
    group_of = {model: home.get(model, default) for model in MODELS}
    for victim in victims:
        if group_of[victim].name != group_of[target].name:
            assert not group_of[victim].persistent
    if group_of[target].pool == "ram":
        assert all(group_of[victim].pool == "ram" for victim in victims)

    left = {model for model in running if model not in victims and model != target}
    order = {model: place for place, model in enumerate(dict.fromkeys(running))}
    if policy.vram_budget and sizes[target].vram and group_of[target].pool == "vram":
        cap = policy.vram_budget if vram_ceiling is None else min(policy.vram_budget, vram_ceiling)
        gpu = [model for model in left if group_of[model].pool == "vram"]
        total = sizes[target].vram + sum(sizes[model].vram for model in gpu)
        assert total <= cap or all(group_of[model].persistent for model in gpu)
        taken = [v for v in victims if group_of[v].pool == "vram" and sizes[v].vram]
        assert taken == sorted(taken, key=order.__getitem__)
        if taken:
            assert total + sizes[taken[-1]].vram > cap, "nobody goes in vain"
        assert all(order[model] > order[taken[-1]] for model in gpu if taken and not group_of[model].persistent)
    if policy.ram_budget and (group_of[target].pool == "vram" or sizes[target].ram):
        cap = policy.ram_budget if ram_ceiling is None else min(policy.ram_budget, ram_ceiling)
        total = sizes[target].ram + sum(sizes[model].ram for model in left)
        stoppable = [m for m in left if group_of[m].pool == "ram" and not group_of[m].persistent and sizes[m].ram]
        assert total <= cap or not stoppable


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_where_nothing_is_refused_the_budget_holds(
    world: tuple[GroupPolicy, list[GroupRule], dict[str, Sizes], str, list[str], Any, Any],
) -> None:
    policy, groups, sizes, target, running, vram_ceiling, ram_ceiling = world
    if policy.misfit(target, running, vram_ceiling, ram_ceiling) is not None:
        return
    victims = policy.eviction_for(target, running, vram_ceiling, ram_ceiling)
    pool_of = {model: group.pool for group in groups for model in group.members}
    left = {*running, target} - set(victims)
    if pool_of.get(target, "vram") == "vram" and policy.vram_budget and sizes[target].vram:
        cap = policy.vram_budget if vram_ceiling is None else min(policy.vram_budget, vram_ceiling)
        assert sum(sizes[model].vram for model in left if pool_of.get(model, "vram") == "vram") <= cap
    if policy.ram_budget and (pool_of.get(target, "vram") == "vram" or sizes[target].ram):
        cap = policy.ram_budget if ram_ceiling is None else min(policy.ram_budget, ram_ceiling)
        assert sum(sizes[model].ram for model in left) <= cap

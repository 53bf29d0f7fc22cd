"""Matrix, selectors, profiles and the default model in the file: what is said of doubtful and of wrong settings."""

from __future__ import annotations

import pytest

from qmflask.config import Config, ConfigError, Source, load

TWO = "models:\n  a: {cmd: 'r ${PORT}', aliases: [al], estVramGB: 4}\n  b: {cmd: 'r ${PORT}', estVramGB: 5}\n"
SPILL = "selectors: {s: {strategy: spillover, targets: [al, b]}}\n"


def loaded(text: str) -> tuple[Config, list[str]]:
    """The configuration and its warnings."""
    found = load([Source("f.yaml", TWO + text)], {})
    return found.config, [problem.message for problem in found.warnings]


def errors(text: str) -> str:
    """Every error, as a person reads it."""
    with pytest.raises(ConfigError) as caught:
        load([Source("f.yaml", TWO + text)], {})
    return str(caught.value)


@pytest.mark.parametrize("costs", ["{v: 2, a: 7}", "{a: 7, v: 2}", "{a: 7, v: 7}"])
def test_of_two_costs_the_ids_counts(costs: str) -> None:
    """llama-swap takes one at random, so files that have two load there."""
    config, warnings = loaded(f"matrix: {{vars: {{v: a}}, sets: {{s: a}}, evict_costs: {costs}}}")
    assert config.matrix is not None and config.matrix.evict_costs == {"a": 7}
    assert ["two evict_costs" in text for text in warnings] == ([True] if "2" in costs else [])


@pytest.mark.parametrize("priority", ["{al: 2, a: 7}", "{a: 7, al: 2}"])
def test_of_two_priorities_the_ids_counts(priority: str) -> None:
    config, warnings = loaded(f"routing: {{scheduler: {{settings: {{fifo: {{priority: {priority}}}}}}}}}")
    assert config.priority == {"a": 7}
    assert "two priorities" in warnings[0]


def test_the_blame_falls_on_the_set_that_is_wrong() -> None:
    text = errors("matrix:\n  sets:\n    first: a | +second\n    second: +first\n")
    assert "f.yaml:7:13: matrix.sets.second" in text
    assert 'circular reference detected involving set "first"' in text


def test_where_memory_decides_spillover_needs_no_group() -> None:
    assert "must share a group with swap: false" in errors(SPILL)
    assert loaded("vramBudgetGB: 9\n" + SPILL)[0].selectors["s"].targets == ("al", "b")
    assert "must fit vramBudgetGB together: they need 9 GiB, it is 8 GiB" in errors("vramBudgetGB: 8\n" + SPILL)
    config = TWO.replace(", estVramGB: 5", "") + "vramBudgetGB: 9\n" + SPILL
    with pytest.raises(ConfigError, match="must share a group"):  # a size is unknown: memory does not decide
        load([Source("f.yaml", config)], {})


def test_a_profile_may_do_without_pins() -> None:
    config, _ = loaded("profiles: {night: {preload: [al]}, day: {defaultModel: al}}")
    assert (config.profiles["night"].preload, config.profiles["night"].pins) == (("a",), {})
    assert config.profiles["day"].default_model == "a"


def test_the_default_model_is_one_of_this_host() -> None:
    selector = "selectors: {s: {strategy: pin, targets: [a]}}\n"
    for text in (selector + "defaultModel: s", selector + "profiles: {p: {pins: {x: a}, defaultModel: s}}"):
        assert 'defaultModel references unknown model "s": it must be a model of this host' in errors(text)
    assert "did you mean al?" in errors("defaultModel: all")


def test_a_default_model_with_a_ttl_is_told() -> None:
    config, warnings = loaded("globalTTL: 60\nreturnAfter: 1m\nprofiles: {p: {defaultModel: b}}")
    assert config.profiles["p"].default_model == "b"
    assert ["loaded again 60 s later" in text for text in warnings] == [True]
    assert loaded("defaultModel: a")[1] == []

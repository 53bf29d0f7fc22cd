"""Foreign use, floor and ceiling: the pinned cases, the trust rules, and what must never move them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmflask.memory import ceiling as live
from qmflask.memory.ceiling import Ceiling, ModelView
from qmflask.memory.samples import GIB, Card, GpuSample
from qmflask.states import State

BUDGET, RESERVE = 24 * GIB, 1 * GIB
OWL = ModelView("owl", State.READY, "vram", frozenset({100, 101}))


def sample(
    used: float, processes: Mapping[int, float | None] | None = None, total: float = 24, at: int = 0
) -> GpuSample:
    listed = (
        None
        if processes is None
        else {pid: None if size is None else int(size * GIB) for pid, size in processes.items()}
    )
    return GpuSample(at, (Card("GPU-0", int(total * GIB), int(used * GIB), listed),))


def run(
    samples: list[GpuSample | None], models: list[ModelView] | None = None, state: Ceiling | None = None
) -> Ceiling:
    state = state or Ceiling()
    for one in samples:
        state = live.step(state, one, models or [], BUDGET, RESERVE)
    return state


def test_pinned() -> None:
    state = run([sample(1.5)] * 3)
    assert state.ceiling == 24 * GIB
    state = run([sample(9.5)], state=state)
    assert state.ceiling == 15 * GIB
    assert (state.foreign, state.floor, state.excess) == (int(9.5 * GIB), int(1.5 * GIB), 8 * GIB)
    assert run([sample(1.5)], state=state).ceiling == 24 * GIB


def test_a_card_full_of_our_own_models_is_healthy() -> None:
    state = run([sample(1.5)])
    assert run([sample(23.5, {100: 20, 101: 2, 7: 1.5})], [OWL], state).ceiling == 24 * GIB


def test_the_floor_only_falls() -> None:
    state = run([sample(3), sample(1), sample(2)])
    assert state.floor == GIB
    assert state.ceiling == 22 * GIB
    assert run([sample(2)], state=live.relearn(state)).ceiling == 24 * GIB


def test_a_ceiling_is_never_below_zero_and_zero_without_a_budget_is_none() -> None:
    state = run([sample(0.5)])
    assert run([sample(24)], state=state).ceiling == 0
    assert live.step(state, sample(9), [], 0, RESERVE).ceiling is None


@pytest.mark.parametrize(
    ("one", "models", "why"),
    [
        (sample(10), [OWL], "does not tell"),
        (sample(10, {7: 1}), [OWL], '"owl"'),
        (sample(10, {100: None}), [OWL], '"owl"'),
        (sample(10, {100: 8}), [OWL, ModelView("fox", State.READY, "vram", frozenset({200}))], '"fox"'),
        (sample(10, {7: 1}), [ModelView("owl", State.DRAINING, "vram", frozenset({100}))], '"owl"'),
        (sample(0, total=0), [], "no card"),
        (GpuSample(0), [], "no card"),
        (None, [], "no card"),
    ],
)
def test_distrust_leaves_no_ceiling(one: GpuSample | None, models: list[ModelView], why: str) -> None:
    before = run([sample(1.5)])
    after = run([one], models, before)
    assert (after.ceiling, after.trusted) == (None, False)
    assert why in after.why
    assert after.floors == before.floors, "the floor is kept across untrusted gaps"
    assert run([sample(9.5)], state=after).ceiling == 15 * GIB


def test_a_wrapper_is_not_the_process_that_holds_the_memory() -> None:
    wrapped = ModelView("owl", State.READY, "vram", frozenset({99, 100}))
    assert live.read_foreign(sample(10, {100: 8}), [wrapped]).total == 2 * GIB


def test_a_missing_ram_model_is_no_reason_for_distrust() -> None:
    bee = ModelView("bee", State.READY, "ram", frozenset({300}))
    assert live.read_foreign(sample(10, {100: 8}), [OWL, bee]).trusted
    assert live.read_foreign(sample(10), [bee]).trusted, "no GPU model of ours runs"


def test_a_card_without_process_list_beside_one_that_has_it() -> None:
    cards = (Card("a", 24 * GIB, 9 * GIB, {100: 8 * GIB}), Card("b", GIB, GIB // 2, None))
    reading = live.read_foreign(GpuSample(0, cards), [OWL])
    assert reading.trusted
    assert reading.foreign == {"a": GIB, "b": GIB // 2}


@pytest.mark.parametrize("state", [State.STARTING, State.STOPPING])
def test_nothing_moves_while_our_models_move(state: State) -> None:
    before = run([sample(3)])
    fox = ModelView("fox", state, "vram", frozenset({200}))
    for one in (sample(15), sample(0.5), None):
        assert live.step(before, one, [fox], BUDGET, RESERVE) == before
    assert live.step(before, sample(15), [], BUDGET, RESERVE, reclaiming=True) == before


def test_floors_are_kept_by_card() -> None:
    two = GpuSample(0, (Card("a", 24 * GIB, 2 * GIB), Card("b", 24 * GIB, GIB)))
    state = run([two])
    assert state.floors == {"a": 2 * GIB, "b": GIB}
    gone = GpuSample(0, (Card("b", 24 * GIB, 4 * GIB),))
    state = run([gone], state=state)
    assert state.excess == 3 * GIB, "a card that is away counts on neither side"
    assert state.floors["a"] == 2 * GIB


def test_one_line_until_it_recovers() -> None:
    good = run([sample(1.5)])
    bad = run([sample(9)], [OWL], good)
    assert "configured budget stays" in (live.news(good, bad) or "")
    assert live.news(bad, run([sample(9)], [OWL], bad)) is None
    assert "back" in (live.news(bad, run([sample(1.5)], state=bad)) or "")
    assert live.news(good, run([sample(1.5)], state=good)) is None


def test_a_stale_sample_tells_nothing() -> None:
    one = sample(1, at=1000)
    assert live.fresh(one, 1500, 500) is one
    assert live.fresh(one, 1501, 500) is None
    assert live.fresh(None, 0, 0) is None


def test_who_holds_what() -> None:
    one = sample(20, {100: 8, 101: 2, 7: 1, 8: 4, 9: None})
    assert live.holdings(one, [OWL, ModelView("fox", State.READY, "vram", frozenset({5}))]) == {"owl": 10 * GIB}
    assert list(live.foreign_processes(one, [OWL]).items()) == [(8, 4 * GIB), (7, GIB)]
    assert live.holdings(None, [OWL]) == live.foreign_processes(None, []) == {}


def test_ram_ceiling() -> None:
    assert live.ram_ceiling(16 * GIB, 40 * GIB, 0) == 16 * GIB
    assert live.ram_ceiling(16 * GIB, 6 * GIB, 4 * GIB) == 9 * GIB
    assert live.ram_ceiling(16 * GIB, 0, 0) == 0
    assert live.ram_ceiling(0, 6 * GIB, 0) is None
    assert live.ram_ceiling(16 * GIB, None, 0) is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 24), st.booleans(), st.booleans()), max_size=30))
def test_over_any_history(history: list[tuple[int, bool, bool]]) -> None:
    state, lowest = Ceiling(), None
    for used, listed, moving in history:
        models = [OWL, ModelView("fox", State.STARTING)] if moving else [OWL]
        before = state
        state = live.step(state, sample(used, {100: min(used, 4)} if listed else None), models, BUDGET, RESERVE)
        if moving:
            assert state == before
            continue
        assert state.ceiling is None or 0 <= state.ceiling <= BUDGET
        assert (state.ceiling is not None) == listed
        if listed:
            foreign = (used - min(used, 4)) * GIB
            lowest = foreign if lowest is None else min(lowest, foreign)
            assert state.floor == lowest
            assert state.ceiling == (BUDGET if foreign == lowest else max(0, BUDGET - (foreign - lowest) - RESERVE))

"""The default model comes back to an idle box, and only where it costs nobody anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmflask.policy.eviction import GroupPolicy, GroupRule, Sizes
from qmflask.policy.returning import Quiet, returns
from qmflask.policy.schedule import Failure, ModelRule, ProcessView, RequestView, Snapshot, SwapView
from qmflask.states import State

SECOND = 1_000_000_000
NOW = 1000 * SECOND
GIB = 1 << 30

POLICY = GroupPolicy(
    {"home": Sizes(6 * GIB, 0), "guest": Sizes(5 * GIB, 0), "huge": Sizes(99 * GIB, 0)},
    [GroupRule("all", members=("home", "guest", "huge"))],
    vram_budget=12 * GIB,
    ram_budget=0,
)
QUIET = Snapshot({name: ModelRule(name) for name in ("home", "guest", "huge")}, POLICY, {})


def asked(snapshot: Snapshot, model: str = "home", quiet: int = 300) -> bool:
    return returns(snapshot, model, NOW - quiet * SECOND, 300 * SECOND, NOW)


def with_process(view: ProcessView) -> Snapshot:
    return replace(QUIET, processes={view.model: view})


def test_it_returns_when_the_box_has_been_idle_long_enough() -> None:
    assert asked(QUIET)
    assert not asked(QUIET, quiet=299)


def test_it_returns_beside_what_leaves_room() -> None:
    assert asked(with_process(ProcessView("guest", State.READY)))


@pytest.mark.parametrize(
    "snapshot",
    [
        with_process(ProcessView("home", State.READY)),
        with_process(ProcessView("home", State.STARTING)),
        with_process(ProcessView("guest", State.READY, leases=1)),
        with_process(ProcessView("home", State.FAILED, failure=Failure("x", "y", NOW + 1))),
        replace(QUIET, queue=[RequestView(1, "guest", NOW)]),
        replace(QUIET, swaps=[SwapView(1, "guest")]),
    ],
)
def test_it_stays_away_while_anything_is_going_on(snapshot: Snapshot) -> None:
    assert not asked(snapshot)


def test_it_never_evicts() -> None:
    sizes = {"home": Sizes(6 * GIB, 0), "guest": Sizes(9 * GIB, 0)}
    tight = GroupPolicy(sizes, [GroupRule("all", members=("home", "guest"))], 12 * GIB, 0)
    assert not asked(replace(with_process(ProcessView("guest", State.READY)), policy=tight))


def test_one_that_cannot_fit_or_is_unknown_is_not_tried() -> None:
    assert not asked(QUIET, "huge")
    assert not asked(QUIET, "nobody")


def test_the_box_is_quiet_since_the_last_answer_load_or_stop() -> None:
    quiet = Quiet(5)
    assert quiet.look(QUIET, 6) == 5
    loading = with_process(ProcessView("guest", State.STARTING))
    assert quiet.look(loading, 10) == 10
    assert quiet.look(loading, 20) == 10
    assert quiet.look(with_process(ProcessView("guest", State.READY, idle_since=30)), 31) == 30
    assert quiet.look(QUIET, 40) == 40, "unloaded: whoever did that does not want the next one loaded at once"
    assert quiet.look(with_process(ProcessView("home", State.FAILED, failure=Failure("x", "y", 60))), 50) == 40


def test_a_new_leader_takes_what_it_finds_for_no_stir() -> None:
    assert Quiet(5).look(with_process(ProcessView("guest", State.READY, idle_since=3)), 9) == 5

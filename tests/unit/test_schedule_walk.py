"""One walk over a written-out snapshot: what each decision sees of those before it, and whose turn it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qmflask.policy.eviction import GroupPolicy, GroupRule, Sizes
from qmflask.policy.schedule import (
    AbortSwap,
    Action,
    Failure,
    ModelRule,
    ProcessView,
    Queue,
    Reject,
    RequestView,
    Serve,
    Snapshot,
    StartSwap,
    Stop,
    SwapView,
    admit,
    decide,
)
from qmflask.states import Phase, State

NOW = 1000
LATE = NOW - 1  # patience that is over


def view(model: str, state: str = "ready", leases: int = 0, tick: int = 0, **more: Any) -> ProcessView:
    return ProcessView(model, State(state), leases, tick, **more)


def scene(
    queue: Sequence[str | tuple[str, dict[str, Any]]],
    processes: Sequence[ProcessView] = (),
    swaps: Sequence[SwapView] = (),
    *,
    sizes: dict[str, int] | None = None,
    budget: int = 0,
    groups: Sequence[GroupRule] = (),
    rules: Sequence[ModelRule] = (),
    also: Sequence[str] = (),
) -> Snapshot:
    """Requests are numbered from 1 in arrival order; every model that is named anywhere is configured."""
    requests = []
    for number, item in enumerate(queue, 1):
        model, more = item if isinstance(item, tuple) else (item, {})
        requests.append(RequestView(number, model, number, **more))
    named = {request.model for request in requests} | {process.model for process in processes}
    named |= {swap.target for swap in swaps} | set(sizes or {}) | set(also)
    models = {name: ModelRule(name) for name in sorted(named)} | {rule.id: rule for rule in rules}
    policy = GroupPolicy({name: Sizes(size, 0) for name, size in (sizes or {}).items()}, groups, budget)
    return Snapshot(models, policy, {process.model: process for process in processes}, requests, swaps)


def walk(*args: Any, **more: Any) -> list[Action]:
    return decide(scene(*args, **more), NOW)


def apart(*names: str) -> GroupRule:
    """A group whose members stop nobody and are stopped by nobody."""
    return GroupRule("apart", swap=False, exclusive=False, persistent=True, members=names)


# --- effects within one walk ------------------------------------------------------------------------------------


def test_a_grant_makes_the_model_busy_for_those_behind() -> None:
    actions = walk(
        ["ant", "bee"],
        [view("ant", tick=1), view("dog", tick=2)],
        sizes={"ant": 4, "bee": 4, "dog": 4},
        budget=8,
    )
    assert actions == [Serve(1, "ant"), StartSwap(2, "bee", ("dog",))]


def test_a_grant_is_seen_by_an_order_that_was_already_made() -> None:
    actions = walk(
        ["big", "ant", "bee"],
        [view("ant", tick=1), view("dog", tick=2), view("cow", leases=1, tick=3)],
        sizes={"ant": 4, "bee": 4, "dog": 4, "cow": 4, "big": 12},
        budget=12,
    )
    assert isinstance(actions[0], Queue)
    assert actions[1:] == [Serve(2, "ant"), StartSwap(3, "bee", ("dog",))]


def test_a_start_is_seen_by_an_order_that_was_already_made() -> None:
    actions = walk(
        ["big", "ant", "bee"],
        [view("cow", leases=1, tick=3)],
        sizes={"ant": 4, "bee": 4, "cow": 4, "big": 12},
        budget=8,
    )
    assert isinstance(actions[0], Reject)
    assert actions[1] == StartSwap(2, "ant", ())
    assert isinstance(actions[2], Queue) and actions[2].blockers == ("cow",)


def test_dropping_a_load_and_starting_in_its_room_are_one_list() -> None:
    actions = walk(
        ["cat"],
        [view("ant", tick=1), view("bee", "starting", tick=2)],
        [SwapView(9, "bee", phase=Phase.PROBING)],
        sizes={"ant": 4, "bee": 4, "cat": 8},
        budget=8,
    )
    assert actions == [AbortSwap(9, "bee"), StartSwap(1, "cat", ("bee", "ant"))]


def test_dropping_a_load_frees_those_who_waited_earlier_in_the_walk() -> None:
    """dog waits for both halves; once bee's load is gone for cat's sake, its answer is asked for anew."""
    actions = walk(
        ["dog", ("cat", {"priority": -1}), ("dog", {"priority": -2})],
        [view("ant", leases=1, tick=1), view("bee", "starting", tick=2)],
        [SwapView(9, "bee", phase=Phase.PROBING)],
        sizes={"ant": 4, "bee": 4, "cat": 4, "dog": 8},
        budget=8,
    )
    assert [type(action) for action in actions] == [Queue, AbortSwap, StartSwap, Queue]
    assert isinstance(actions[0], Queue) and isinstance(actions[3], Queue)
    assert actions[0].blockers == ("ant",)
    assert actions[3].blockers == ("cat",)


def test_what_was_served_a_moment_ago_is_asked_anew_after_a_start() -> None:
    """A preload of a ready model is done without a lease; its room may be taken by the next in the queue."""
    actions = walk(
        [("ant", {"owned": True}), "bee", "ant"],
        [view("ant", tick=1)],
        sizes={"ant": 4, "bee": 4},
        budget=4,
    )
    assert actions[:2] == [Serve(1, "ant"), StartSwap(2, "bee", ("ant",))]
    assert isinstance(actions[2], Queue)


def test_a_victim_that_is_unloaded_stays_so_when_its_swap_is_dropped() -> None:
    unloading = view("ant", "draining", leases=1, tick=1, stop_reason="unload")
    swap = SwapView(9, "bee", ("ant",))
    actions = walk(["ant"], [unloading], [swap], sizes={"ant": 4, "bee": 4}, budget=4)
    assert actions[0] == AbortSwap(9, "bee")
    assert isinstance(actions[1], Queue)
    evicted = view("ant", "draining", leases=1, tick=1, stop_reason="evicted for bee")
    actions = walk(["ant"], [evicted], [swap], sizes={"ant": 4, "bee": 4}, budget=4)
    assert actions == [AbortSwap(9, "bee"), Serve(1, "ant")]


def test_a_swap_whose_victims_were_signalled_is_dropped_too_but_not_a_load() -> None:
    for phase, dropped in (
        (Phase.DRAINING, True),
        (Phase.STOPPING, True),
        (Phase.RECLAIM, True),
        (Phase.STARTING, False),
        (Phase.PROBING, False),
    ):
        swap = SwapView(9, "bee", ("ant",), phase, signalled=phase is not Phase.DRAINING)
        actions = walk([], [view("ant", "stopping")], [swap], sizes={"ant": 4, "bee": 4}, budget=4)
        assert actions == ([AbortSwap(9, "bee")] if dropped else []), phase


def test_back_off_refuses_what_is_queued_as_well() -> None:
    failed = view("ant", "failed", failure=Failure("model_start_failed", "exit 1", NOW + 5))
    assert walk(["ant"], [failed]) == [Reject(1, "ant", "model_start_failed", "exit 1", 1)]
    over = view("ant", "failed", failure=Failure("model_start_failed", "exit 1", NOW))
    assert walk(["ant"], [over]) == [StartSwap(1, "ant", ())]


# --- who is busy, who goes first --------------------------------------------------------------------------------


def test_a_loading_model_with_waiters_is_not_idle_even_if_colder() -> None:
    actions = walk(
        ["ant", "cat"],
        [view("ant", "starting", tick=1), view("bee", tick=2)],
        [SwapView(9, "ant", phase=Phase.PROBING)],
        sizes={"ant": 4, "bee": 4, "cat": 4},
        budget=8,
    )
    assert actions[1] == StartSwap(2, "cat", ("bee",))


def test_a_target_whose_victims_still_stop_takes_its_room_already() -> None:
    """ant is not there yet, but its room is: cat goes for idle bee, and big (all of it) waits for ant."""
    processes = [view("old", "stopping", tick=1), view("bee", tick=2)]
    swaps = [SwapView(9, "ant", ("old",), Phase.STOPPING, signalled=True)]
    sizes = {"old": 4, "ant": 4, "bee": 4, "cat": 4}
    (join, wait) = walk(["ant", "cat"], processes, swaps, sizes=sizes, budget=8)
    assert isinstance(wait, Queue)  # bee alone would do once old is gone, but it shares old with ant's swap
    assert wait.victims == ("old", "bee")
    assert wait.blockers == ("ant",)
    assert join.request == 1  # type: ignore[union-attr]


def test_a_starting_model_that_no_swap_owns_is_not_idle() -> None:
    sizes = {"ant": 4, "bee": 4, "cat": 4}
    processes = [view("ant", "starting", tick=1), view("bee", tick=2)]
    assert walk(["cat"], processes, sizes=sizes, budget=8) == [StartSwap(1, "cat", ("bee",))]


def test_a_starting_model_that_no_swap_owns_is_never_drained() -> None:
    (wait,) = walk([("bee", {"patience_at": LATE})], [view("ant", "starting")])
    assert isinstance(wait, Queue)
    assert wait.blockers == ("ant",)


def test_leases_of_a_stopping_model_block_nobody() -> None:
    (start,) = walk(["bee"], [view("ant", "stopping", leases=2)])
    assert start == StartSwap(1, "bee", ("ant",))


def test_held_and_in_flight_are_one_class_by_coldness_until_patience_ends() -> None:
    processes = [view("ant", leases=1, tick=1), view("bee", tick=2, hold_until=NOW + 9)]
    sizes = {"ant": 4, "bee": 4, "cat": 4}
    (wait,) = walk(["cat"], processes, sizes=sizes, budget=8)
    assert isinstance(wait, Queue) and wait.blockers == ("ant",)
    (start,) = walk([("cat", {"patience_at": LATE})], processes, sizes=sizes, budget=8)
    assert start == StartSwap(1, "cat", ("bee",), fixed=True)


# --- collisions -------------------------------------------------------------------------------------------------


def test_two_swaps_that_share_a_victim_do_not_run_together() -> None:
    sizes = {"old": 8, "ant": 4, "cat": 4}
    ant, cat = walk(["ant", "cat"], [view("old")], sizes=sizes, budget=8)
    assert ant == StartSwap(1, "ant", ("old",))
    assert isinstance(cat, Queue) and cat.blockers == ("ant",)


def test_a_victim_that_is_down_already_still_waits_for_its_swap() -> None:
    swap = SwapView(9, "ant", ("old",), Phase.PROBING, signalled=True)
    (join, wait) = walk(["ant", "old"], [view("ant", "starting")], [swap], groups=[apart("old")])
    assert isinstance(wait, Queue) and wait.blockers == ("ant",)
    assert join.request == 1  # type: ignore[union-attr]


# --- whose turn it is -------------------------------------------------------------------------------------------

LOADING = (SwapView(9, "now", phase=Phase.PROBING),)


def behind_an_overdue_request(queue: list[Any], processes: Sequence[ProcessView] = (), **more: Any) -> Action:
    """`now` loads and is waited for; `big` is beyond its patience and needs its room; what happens to the last?"""
    actions = walk(
        ["now", ("big", {"patience_at": LATE}), *queue],
        [view("now", "starting", tick=50), *processes],
        LOADING,
        **more,
    )
    by_request = {getattr(action, "request", 0): action for action in actions}
    assert isinstance(by_request[2], Queue) and by_request[2].blockers == ("now",)
    return by_request[len(queue) + 2]


def test_nothing_starts_that_an_overdue_request_would_have_to_stop_as_well() -> None:
    sizes = {"now": 4, "big": 12, "ant": 4}
    assert isinstance(behind_an_overdue_request(["ant"], sizes=sizes, budget=12), Queue)
    snapshot = scene(
        ["now", ("big", {"patience_at": LATE})], [view("now", "starting")], LOADING, sizes=sizes, budget=12
    )
    action = admit(snapshot, RequestView(3, "ant", 3), NOW)
    assert isinstance(action, Queue) and action.position == 2 and action.blockers == ("big",)


def test_nothing_starts_that_stops_what_an_overdue_request_will_stop() -> None:
    groups = [
        GroupRule("exclusive", persistent=True, members=("ant",)),
        GroupRule("all", persistent=True, members=("now", "big")),
        GroupRule("rest", swap=False, exclusive=False, members=("cow",)),
    ]
    action = behind_an_overdue_request(["ant"], [view("cow")], groups=groups)
    assert isinstance(action, Queue)


def test_nothing_that_renders_starts_before_an_overdue_request() -> None:
    groups = [apart("pic")]
    rules = [ModelRule("pic", renders=True)]
    assert isinstance(behind_an_overdue_request(["pic"], groups=groups, rules=rules), Queue)
    assert behind_an_overdue_request(["pic"], groups=groups) == StartSwap(3, "pic", ())


def test_what_has_nothing_to_do_with_an_overdue_request_starts() -> None:
    assert behind_an_overdue_request(["ant"], groups=[apart("ant")]) == StartSwap(3, "ant", ())


def test_an_overdue_request_whose_own_model_is_unloaded_holds_back_only_what_concerns_it() -> None:
    processes = [view("big", "draining", leases=1, stop_reason="unload"), view("old")]
    queue: list[Any] = [("big", {"patience_at": LATE}), "ant", "cat"]
    sizes = {"big": 8, "old": 6, "cat": 2}
    actions = walk(queue, processes, sizes=sizes, budget=16, groups=[apart("ant")])
    assert isinstance(actions[0], Queue)
    assert actions[1] == StartSwap(2, "ant", ())  # whatever starts beside it, big fits
    assert actions[2] == StartSwap(3, "cat", ())
    actions = walk(queue, processes, sizes=sizes, budget=13, groups=[apart("ant")])
    assert actions[1] == StartSwap(2, "ant", ())  # big will stop old, with ant or without


def test_nothing_starts_that_makes_renders_wait_again() -> None:
    groups = [
        GroupRule("one", exclusive=False, members=("ant", "bee")),
        GroupRule("two", exclusive=False, members=("cat", "dog")),
        apart("pic"),
    ]
    processes = [view("ant", "stopping"), view("cat"), view("pic")]
    swaps = [SwapView(9, "bee", ("ant",), Phase.STOPPING, blockers=("pic",))]
    rules = [ModelRule("pic", renders=True)]
    more: dict[str, Any] = {"groups": groups, "rules": rules}
    actions = walk(["bee", "pic", "dog"], processes, swaps, **more)
    assert isinstance(actions[1], Queue)
    assert isinstance(actions[2], Queue) and actions[2].blockers == ("pic",)
    # nobody wants to render: it starts, and so it does when it has waited beyond its patience
    assert walk(["bee", "dog"], processes, swaps, **more)[1] == StartSwap(2, "dog", ("cat",), blockers=("pic",))
    late = walk(["bee", "pic", ("dog", {"patience_at": LATE})], processes, swaps, **more)
    assert StartSwap(3, "dog", ("cat",), True, ("pic",)) in late
    action = admit(scene(["bee", "pic"], processes, swaps, also=["dog"], **more), RequestView(3, "dog", 3), NOW)
    assert isinstance(action, Queue) and action.blockers == ("pic",)


# --- rendering models -------------------------------------------------------------------------------------------


def test_a_rendering_model_waits_until_a_swap_that_makes_room_has_spawned() -> None:
    rules = [ModelRule("pic", renders=True)]
    for phase, waits in ((Phase.STOPPING, True), (Phase.STARTING, True), (Phase.PROBING, False)):
        state = "stopping" if phase is Phase.STOPPING else "starting"
        processes = [view("ant" if phase is Phase.STOPPING else "bee", state)]
        swap = SwapView(9, "bee", ("ant",), phase)
        action = walk(["bee", "pic"], processes, [swap], groups=[apart("pic")], rules=rules)[1]
        assert isinstance(action, Queue if waits else StartSwap), phase


def test_a_swap_for_a_ready_target_spawns_nothing_and_waits_for_no_render() -> None:
    rules = [ModelRule("pic", renders=True)]
    processes = [view("pic", leases=1), view("ant"), view("bee")]
    (start,) = walk(["ant"], processes, groups=[apart("pic")], rules=rules)
    assert start == StartSwap(1, "ant", ("bee",))
    swap = SwapView(9, "ant", ("bee",), Phase.STOPPING)
    processes = [view("ant"), view("bee", "stopping")]
    assert walk(["ant", "pic"], processes, [swap], groups=[apart("pic")], rules=rules)[1] == StartSwap(2, "pic", ())


# --- changed launch settings ------------------------------------------------------------------------------------


def test_old_launch_settings_are_not_served_for_ever_while_a_restart_waits() -> None:
    def ask(since: int) -> Action:
        changed = view("ant", changed=True, changed_since=since)
        return walk(
            ["ant", "bee"],
            [changed, view("bee", "starting")],
            [SwapView(9, "bee", phase=Phase.PROBING)],
            sizes={"ant": 8, "bee": 4},
            budget=8,
            rules=[ModelRule("ant", patience=10)],
        )[0]

    assert ask(NOW - 9) == Serve(1, "ant")
    assert isinstance(ask(NOW - 10), Queue)


# --- time to live -----------------------------------------------------------------------------------------------


def test_ttl_leaves_what_a_swap_names_to_the_swap() -> None:
    old = view("ant", idle_since=1)
    rules = [ModelRule("ant", ttl=10)]
    assert walk([], [old], rules=rules) == [Stop("ant", "ttl")]
    swap = SwapView(9, "bee", ("ant",), Phase.STARTING)
    assert walk(["bee"], [old], [swap], rules=rules)[1:] == []


# --- one request ------------------------------------------------------------------------------------------------


def test_a_request_without_any_patience_drains_at_once() -> None:
    snapshot = scene([], [view("ant", leases=1)], also=["bee"])
    assert isinstance(admit(snapshot, RequestView(1, "bee", NOW, patience_at=NOW + 1), NOW), Queue)
    action = admit(snapshot, RequestView(1, "bee", NOW, patience_at=NOW), NOW)
    assert action == StartSwap(1, "bee", ("ant",), fixed=True)


def test_positions_count_only_those_who_wait_for_no_load() -> None:
    busy = [view("ant", leases=1)]
    queue = ["bee", ("cat", {"priority": 5}), ("dog", {"patience_at": LATE, "priority": -5})]
    snapshot = scene(queue, busy)
    assert [type(action) for action in decide(snapshot, NOW)] == [StartSwap, Queue, Queue]
    swap = SwapView(9, "dog", ("ant",))
    snapshot = scene(queue, [view("ant", "draining", leases=1)], [swap], also=["eel"])
    for priority, position in ((0, 3), (5, 2), (6, 1), (-1, 3)):
        action = admit(snapshot, RequestView(9, "eel", 9, priority), NOW)
        assert isinstance(action, Queue)
        assert action.position == position, priority

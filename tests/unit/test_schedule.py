"""Scripted cases of the decision order: what is refused, joined, queued, started, dropped, and in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qmflask.errors import from_code
from qmflask.policy.eviction import GroupPolicy, GroupRule, Sizes
from qmflask.policy.schedule import (
    AbortSwap,
    Failure,
    Join,
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
    next_deadline,
)
from qmflask.states import Phase, State
from tests.unit.simulator import MS, SECOND, Simulator

GIB = 1 << 30


def box(budget: int = 10, groups: tuple[GroupRule, ...] = (), **models: Any) -> Simulator:
    """A machine with `budget` GiB; models are given by size in GiB, or as (size, {rule fields})."""
    rules, sizes = {}, {}
    for name, spec in models.items():
        size, extra = spec if isinstance(spec, tuple) else (spec, {})
        rules[name] = ModelRule(name, **extra)
        sizes[name] = Sizes(size * GIB, 0)
    policy = GroupPolicy(sizes, groups, budget * GIB, 0)
    return Simulator(rules, policy, sizes=sizes, vram_budget=budget * GIB)


def loaded(sim: Simulator, *models: str) -> None:
    """Bring models up, one after another, idle."""
    for model in models:
        sim.put(model, "ready")
        sim.advance(MS)


# --- (1) unknown and in back-off ---------------------------------------------------------------------------------


def test_unknown_model_is_not_found() -> None:
    assert box(ant=1).req("r", "ghost") == ["reject r: 404"]


def test_back_off_answers_with_the_stored_error_at_once() -> None:
    sim = box(ant=1)
    sim.req("a1", "ant")
    assert sim.crash("ant", retry=4 * SECOND) == ["error a1: model_start_failed"]
    sim.advance(SECOND)
    request = RequestView(9, "ant", sim.now)
    assert admit(sim.snapshot(), request, sim.now) == Reject(9, "ant", "model_start_failed", "ant exited", 3)
    assert sim.req("a2", "ant") == ["reject a2: 502"]
    sim.advance(3 * SECOND)
    assert sim.req("a3", "ant") == ["start ant evict=[]"]


def test_retry_after_is_rounded_up() -> None:
    views = {"ant": ProcessView("ant", State.FAILED, failure=Failure("model_start_failed", "exit 1", 2 * SECOND))}
    snapshot = Snapshot({"ant": ModelRule("ant")}, GroupPolicy({}, []), views)
    for now, seconds in ((1, 2), (SECOND, 1), (2 * SECOND - 1, 1)):
        action = admit(snapshot, RequestView(1, "ant", 0), now)
        assert isinstance(action, Reject)
        assert action.retry_after == seconds
    assert isinstance(admit(snapshot, RequestView(1, "ant", 0), 2 * SECOND), StartSwap)


def test_a_start_under_way_hides_an_old_failure() -> None:
    views = {"ant": ProcessView("ant", State.FAILED, failure=Failure("model_start_failed", "exit 1", 9 * SECOND))}
    snapshot = Snapshot(
        {"ant": ModelRule("ant")}, GroupPolicy({}, []), views, swaps=[SwapView(5, "ant", phase=Phase.STARTING)]
    )
    assert admit(snapshot, RequestView(1, "ant", 0), SECOND) == Join(1, "ant", 5)


def test_a_failing_model_does_not_disturb_others() -> None:
    sim = box(ant=6, bee=6)
    sim.req("a1", "ant")
    sim.req("b1", "bee")
    assert sim.crash("ant") == ["error a1: model_start_failed", "start bee evict=[]"]


# --- (2) limits -------------------------------------------------------------------------------------------------


def test_limit_counts_waiting_and_granted_and_names_itself() -> None:
    sim = box(ant=(1, {"concurrency_limit": 2}))
    sim.req("a1", "ant")
    sim.req("a2", "ant")
    assert sim.req("a3", "ant") == ["reject a3: 429"]
    assert "2" in sim.clients["a3"].why
    sim.done("ant")
    assert sim.req("a4", "ant") == ["reject a4: 429"]
    sim.gone("a1")
    assert sim.req("a5", "ant") == ["serve a5"]


def test_unset_limit_is_none() -> None:
    sim = box(ant=1)
    loaded(sim, "ant")
    assert all(sim.req(f"r{n}", "ant") == [f"serve r{n}"] for n in range(30))


# --- (4) what cannot fit ----------------------------------------------------------------------------------------


def test_what_exceeds_the_budget_is_refused_before_anything_stops() -> None:
    keep = GroupRule("keep", persistent=True, members=("emu",))
    sim = box(10, (keep,), ant=4, big=8, emu=3)
    loaded(sim, "ant", "emu")
    assert sim.req("r", "big") == ["reject r: 503"]
    assert sim.running() == ["ant", "emu"]
    text = sim.clients["r"].why
    assert "11 GiB" in text and "10 GiB" in text and "emu" in text and "ant" not in text


def test_only_the_ceiling_too_low_invites_to_ask_again() -> None:
    sim = box(10, ant=8)
    sim.vram_ceiling = 6 * GIB
    action = admit(sim.snapshot(), RequestView(1, "ant", sim.now), sim.now)
    assert isinstance(action, Reject)
    assert action.code == "insufficient_memory" and action.retry_after
    sim.vram_ceiling = None
    action = admit(sim.snapshot(), RequestView(1, "ant", sim.now), sim.now)
    assert isinstance(action, StartSwap)


def test_busy_models_are_not_unstoppable() -> None:
    sim = box(10, ant=10, bee=10)
    loaded(sim, "ant")
    sim.req("a1", "ant")
    assert sim.req("b1", "bee") == ["queue b1 #1"]


def test_a_ready_model_over_a_fallen_ceiling_serves_on() -> None:
    sim = box(10, ant=5, bee=5)
    loaded(sim, "ant", "bee")
    sim.vram_ceiling = 2 * GIB
    assert sim.req("a1", "ant") == ["serve a1"]


# --- (5) ready targets ------------------------------------------------------------------------------------------


def test_ready_target_has_no_victims_where_memory_decides() -> None:
    sim = box(4, ant=4, bee=4)
    loaded(sim, "ant", "bee")  # above the cap: the watchdog's business
    assert sim.req("a1", "ant") == ["serve a1"]


def test_static_rule_keeps_its_effect_on_ready_targets() -> None:
    sim = box(0, ant=0, bee=0)
    loaded(sim, "ant", "bee")
    assert sim.req("a1", "ant") == ["start ant evict=[bee]", "serve a1"]
    assert sim.running() == ["ant"]
    assert sim.starts == []  # it was running: nothing was spawned


# --- order of victims -------------------------------------------------------------------------------------------


def test_idle_before_busy_even_if_the_busy_one_is_colder() -> None:
    sim = box(8, ant=4, bee=4, cat=4)
    loaded(sim, "ant", "bee")
    sim.req("a1", "ant")
    sim.req("b1", "bee")
    sim.finish("b1")
    assert sim.req("c1", "cat") == ["start cat evict=[bee]"]


def test_coldest_idle_first_ties_by_id() -> None:
    rules = {name: ModelRule(name) for name in ("ant", "bee", "cat", "dog")}
    policy = GroupPolicy({name: Sizes(GIB, 0) for name in rules}, [], 3 * GIB)

    def views(**ticks: int) -> dict[str, ProcessView]:
        return {name: ProcessView(name, State.READY, tick=tick) for name, tick in ticks.items()}

    snapshot = Snapshot(rules, policy, views(cat=5, bee=4, ant=4), [RequestView(1, "dog", 0)])
    assert decide(snapshot, 0) == [StartSwap(1, "dog", ("ant",))]
    snapshot = Snapshot(rules, policy, views(cat=3, bee=4, ant=4), [RequestView(1, "dog", 0)])
    assert decide(snapshot, 0) == [StartSwap(1, "dog", ("cat",))]


def test_what_is_going_anyway_makes_the_room_first() -> None:
    sim = box(8, ant=4, bee=4, cat=4)
    sim.stop = SECOND
    loaded(sim, "ant", "bee")
    sim.unload(["bee"])
    assert sim.req("c1", "cat") == ["start cat evict=[bee]"]
    sim.advance(2 * SECOND)
    assert sim.running() == ["ant"]


def test_first_of_three_busy_models_to_become_idle_is_taken() -> None:
    for first in ("ant", "bee", "cat"):
        sim = box(12, ant=4, bee=4, cat=4, dog=4)
        loaded(sim, "ant", "bee", "cat")
        for model in ("ant", "bee", "cat"):
            sim.req(f"{model}-1", model)
        assert sim.req("d1", "dog") == ["queue d1 #1"]
        assert sim.finish(f"{first}-1") == [f"start dog evict=[{first}]"]


# --- (3, 6, 8) joins, collisions, parallel swaps ------------------------------------------------------------------


def test_swaps_that_do_not_collide_run_in_parallel() -> None:
    sim = box(8, ant=4, bee=4, cat=4)
    sim.load = SECOND
    assert sim.req("a1", "ant") == ["start ant evict=[]"]
    assert sim.req("b1", "bee") == ["start bee evict=[]"]
    assert sim.req("c1", "cat") == ["queue c1 #1"]
    assert sim.req("b2", "bee") == ["join b2"]
    assert sim.advance(SECOND) == ["serve a1", "serve b1", "serve b2"]


def test_later_request_passes_a_blocked_earlier_one() -> None:
    sim = box(8, ant=4, bee=8, cat=4)
    loaded(sim, "ant")
    sim.req("a1", "ant")
    assert sim.req("b1", "bee") == ["queue b1 #1"]
    assert sim.req("c1", "cat") == ["start cat evict=[]"]
    assert sim.req("a2", "ant") == ["serve a2"]


def test_a_request_for_a_victim_queues_behind_the_swap() -> None:
    sim = box(4, ant=4, bee=4)
    sim.stop, sim.load = SECOND, SECOND
    loaded(sim, "ant")
    assert sim.req("b1", "bee") == ["start bee evict=[ant]"]
    assert sim.req("a1", "ant") == ["queue a1 #1"]
    assert sim.advance(2 * SECOND) == ["serve b1"]
    assert sim.finish("b1") == ["start ant evict=[bee]"]


def test_a_b_c_a_b_c_becomes_a_a_b_b_c_c() -> None:
    sim = box(4, ant=4, bee=4, cat=4)
    sim.load = SECOND
    for n, model in enumerate(["ant", "bee", "cat"] * 2):
        sim.req(f"r{n}", model, length=SECOND)
    sim.advance(20 * SECOND)
    assert [model for _, model in sim.starts] == ["ant", "bee", "cat"]
    assert all(client.state == "done" for client in sim.clients.values())


# --- abandoned swaps --------------------------------------------------------------------------------------------


def test_load_without_waiters_finishes_if_nobody_needs_its_room() -> None:
    sim = box(8, ant=4, bee=4)
    sim.load = SECOND
    sim.req("a1", "ant")
    sim.gone("a1")
    sim.req("b1", "bee")
    sim.advance(SECOND)
    assert sim.running() == ["ant", "bee"]


def test_load_without_waiters_is_dropped_for_a_queued_request() -> None:
    sim = box(4, ant=4, bee=4)
    sim.load, sim.stop = 10 * SECOND, MS
    sim.req("a1", "ant")
    sim.gone("a1")
    assert sim.req("b1", "bee") == ["abort ant", "start bee evict=[ant]"]
    sim.advance(11 * SECOND)
    assert sim.running() == ["bee"]


def test_last_waiter_that_leaves_makes_room_for_those_already_queued() -> None:
    sim = box(4, ant=4, bee=4)
    sim.load, sim.stop = 10 * SECOND, MS
    sim.req("a1", "ant")
    assert sim.req("b1", "bee") == ["queue b1 #1"]
    assert sim.gone("a1") == ["abort ant", "start bee evict=[ant]"]


def test_draining_swap_without_waiters_is_dropped_and_its_victims_serve_again() -> None:
    sim = box(4, ant=4, bee=4)
    sim.patience = SECOND
    loaded(sim, "ant")
    sim.req("a1", "ant")
    sim.req("b1", "bee")
    assert sim.advance(SECOND) == ["start bee evict=[ant]"]
    assert sim.req("a2", "ant") == ["queue a2 #1"]
    assert sim.gone("b1") == ["abort bee", "serve a2"]
    assert sim.starts == []


def test_client_that_leaves_while_victims_stop_causes_no_load() -> None:
    sim = box(4, ant=4, bee=4)
    sim.stop = SECOND
    loaded(sim, "ant")
    sim.req("b1", "bee")
    assert sim.gone("b1") == ["abort bee"]
    sim.advance(2 * SECOND)
    assert sim.starts == [] and sim.running() == []


def test_a_load_is_not_dropped_for_a_request_that_must_wait_anyway() -> None:
    sim = box(8, ant=4, bee=4, big=8)
    sim.load = 10 * SECOND
    loaded(sim, "bee")
    sim.req("b1", "bee")
    sim.req("a1", "ant")
    sim.gone("a1")
    assert sim.req("big1", "big") == ["queue big1 #1"]
    sim.advance(10 * SECOND)
    assert sim.running() == ["ant", "bee"]


# --- queue order ------------------------------------------------------------------------------------------------


def test_priority_then_arrival_and_positions_follow() -> None:
    sim = box(4, ant=4, bee=4, cat=(4, {"priority": 9}), low=(4, {"priority": -1}))
    loaded(sim, "ant")
    sim.req("a1", "ant")
    assert sim.req("l1", "low") == ["queue l1 #1"]
    assert sim.req("b1", "bee") == ["queue b1 #1"]
    assert sim.req("b2", "bee") == ["queue b2 #2"]
    assert sim.req("c1", "cat") == ["queue c1 #1"]
    assert [sim.clients[name].position for name in ("c1", "b1", "b2", "l1")] == [1, 2, 3, 4]
    assert sim.finish("a1") == ["start cat evict=[ant]"]
    assert [sim.clients[name].position for name in ("c1", "b1", "b2", "l1")] == [0, 1, 2, 3]


def test_admit_tells_the_position_that_the_walk_gives() -> None:
    sim = box(4, ant=4, bee=4, cat=(4, {"priority": 9}))
    loaded(sim, "ant")
    sim.req("a1", "ant")
    sim.req("b1", "bee")
    sim.req("c1", "cat")
    action = admit(sim.snapshot(), RequestView(99, "bee", sim.now, 0, sim.now + SECOND), sim.now)
    assert isinstance(action, Queue)
    assert action.position == 3
    assert action.blockers == ("ant",) and action.victims == ("ant",)
    assert action.why == "ant is answering 1 request"


def test_patience_over_goes_before_priority() -> None:
    sim = box(4, ant=4, bee=4, cat=(4, {"priority": 9}))
    sim.patience = SECOND
    loaded(sim, "ant")
    sim.req("a1", "ant")
    sim.req("b1", "bee")
    sim.advance(SECOND // 2)
    sim.req("c1", "cat")
    assert sim.advance(SECOND // 2) == ["start bee evict=[ant]"]
    assert sim.finish("a1") == []
    assert sim.done("bee") == ["serve b1"]


def test_of_two_overdue_requests_the_older_goes_first_whatever_the_priority() -> None:
    queue = [
        RequestView(1, "bee", 10, priority=0, patience_at=50),
        RequestView(2, "cat", 20, priority=9, patience_at=40),
        RequestView(3, "dog", 30, priority=5, patience_at=900),
        RequestView(4, "cow", 40, priority=7, patience_at=0),
    ]
    rules = {name: ModelRule(name) for name in ("ant", "bee", "cat", "cow", "dog")}
    views = {"ant": ProcessView("ant", State.READY, 1, tick=1)}
    actions = decide(Snapshot(rules, GroupPolicy({}, []), views, queue), 60)
    assert [getattr(action, "request", None) for action in actions] == [1, 2, 4, 3]
    assert actions[0] == StartSwap(1, "bee", ("ant",), fixed=True)
    assert all(isinstance(action, Queue) for action in actions[1:])


# --- patience ---------------------------------------------------------------------------------------------------


def test_victims_are_fixed_and_drain_when_patience_ends() -> None:
    sim = box(4, ant=4, bee=4)
    sim.patience, sim.load = 10 * SECOND, SECOND
    loaded(sim, "ant")
    sim.req("a1", "ant")
    sim.req("b1", "bee")
    sim.advance(9 * SECOND)
    assert sim.req("a2", "ant") == ["serve a2"]
    assert sim.advance(SECOND) == ["start bee evict=[ant]"]
    assert sim.req("a3", "ant") == ["queue a3 #1"]
    assert sim.finish("a1") == []
    assert sim.state("ant") is State.DRAINING
    sim.finish("a2")
    assert sim.advance(SECOND) == ["serve b1"]


def test_longer_patience_of_one_request_is_kept() -> None:
    sim = box(4, ant=4, bee=4)
    sim.patience = SECOND
    loaded(sim, "ant")
    sim.req("a1", "ant")
    sim.req("b1", "bee", patience=5 * SECOND)
    assert sim.advance(4 * SECOND) == []
    assert sim.advance(SECOND) == ["start bee evict=[ant]"]


def test_no_patience_at_all_never_drains_anybody() -> None:
    queue = [RequestView(1, "bee", 10, patience_at=0)]
    rules = {name: ModelRule(name) for name in ("ant", "bee")}
    snapshot = Snapshot(rules, GroupPolicy({}, []), {"ant": ProcessView("ant", State.READY, 1)}, queue)
    assert isinstance(decide(snapshot, 10**18)[0], Queue)
    assert next_deadline(snapshot, 10) is None


# --- hold -------------------------------------------------------------------------------------------------------


def test_hold_keeps_a_model_between_tool_calls() -> None:
    sim = box(4, ant=4, bee=4)
    sim.hold = 10 * SECOND
    loaded(sim, "ant")
    sim.req("a1", "ant")
    sim.finish("a1", tool=True)
    assert sim.req("b1", "bee") == ["queue b1 #1"]
    assert "ant" in sim.clients["b1"].why
    assert sim.req("a2", "ant") == ["serve a2"]
    assert sim.finish("a2") == []  # the earlier hold still runs
    assert sim.advance(10 * SECOND) == ["start bee evict=[ant]"]


def test_idle_models_go_before_held_ones() -> None:
    sim = box(8, ant=4, bee=4, cat=4)
    sim.hold = 10 * SECOND
    loaded(sim, "ant", "bee")
    sim.req("a1", "ant")
    sim.finish("a1", tool=True)
    sim.req("b1", "bee")
    sim.finish("b1")  # bee is hotter than ant, but ant is held
    assert sim.req("c1", "cat") == ["start cat evict=[bee]"]


def test_hold_protects_nothing_once_patience_is_over() -> None:
    sim = box(4, ant=4, bee=4)
    sim.hold, sim.patience = 60 * SECOND, 5 * SECOND
    loaded(sim, "ant")
    sim.req("a1", "ant")
    sim.finish("a1", tool=True)
    sim.req("b1", "bee")
    assert sim.advance(5 * SECOND) == ["start bee evict=[ant]"]
    assert sim.state("ant") is State.STOPPED


def test_past_patience_a_held_model_goes_before_one_in_flight() -> None:
    sim = box(8, ant=4, bee=4, cat=4)
    sim.hold, sim.patience = 60 * SECOND, 5 * SECOND
    loaded(sim, "bee", "ant")
    sim.req("b1", "bee")
    sim.req("a1", "ant")
    sim.finish("a1", tool=True)
    sim.req("c1", "cat")
    assert sim.advance(5 * SECOND) == ["start cat evict=[ant]"]


def test_unload_ends_a_hold() -> None:
    sim = box(4, ant=4, bee=4)
    sim.hold = 60 * SECOND
    loaded(sim, "ant")
    sim.req("a1", "ant")
    sim.finish("a1", tool=True)
    sim.unload(["ant"])
    assert sim.req("b1", "bee") == ["start bee evict=[]"]


# --- time to live -----------------------------------------------------------------------------------------------


def test_ttl_counts_from_the_last_answer() -> None:
    sim = box(4, ant=(4, {"ttl": 10 * SECOND}))
    loaded(sim, "ant")
    sim.advance(9 * SECOND)
    sim.req("a1", "ant")
    assert sim.advance(60 * SECOND) == []
    sim.finish("a1")
    assert sim.advance(10 * SECOND - 1) == []
    assert sim.advance(1) == ["stop ant: ttl"]


def test_ttl_waits_for_a_hold_and_for_whoever_queues() -> None:
    sim = box(4, ant=(4, {"ttl": SECOND}))
    sim.hold = 10 * SECOND
    loaded(sim, "ant")
    sim.req("a1", "ant")
    sim.finish("a1", tool=True)
    assert sim.advance(10 * SECOND - 1) == []
    assert sim.advance(1) == ["stop ant: ttl"]
    view = ProcessView("pic", State.READY, idle_since=1)
    rules = {"pic": ModelRule("pic", ttl=10, renders=True), "big": ModelRule("big")}
    swap = SwapView(1, "big", blockers=("pic",))
    free = Snapshot(rules, GroupPolicy({}, []), {"pic": view})
    assert decide(free, 100) == [Stop("pic", "ttl")]
    queue = [RequestView(2, "pic", 50), RequestView(3, "big", 50)]
    waiting = Snapshot(rules, GroupPolicy({}, []), {"pic": view}, queue, [swap])
    assert not any(isinstance(action, Stop) for action in decide(waiting, 100))


# --- stopping and draining targets ------------------------------------------------------------------------------


def test_a_request_during_an_unload_starts_the_model_again_afterwards() -> None:
    sim = box(4, ant=4)
    sim.load, sim.stop = SECOND, 5 * SECOND
    loaded(sim, "ant")
    sim.unload(["ant"])
    assert sim.req("a1", "ant") == ["start ant evict=[]"]
    assert sim.req("a2", "ant") == ["join a2"]
    assert sim.advance(5 * SECOND) == []
    assert sim.advance(SECOND) == ["serve a1", "serve a2"]


def test_a_request_during_the_drain_of_an_unload_waits_for_the_stop() -> None:
    sim = box(4, ant=4)
    sim.load, sim.stop = SECOND, SECOND
    loaded(sim, "ant")
    sim.req("a1", "ant")
    sim.unload(["ant"])
    assert sim.req("a2", "ant") == ["queue a2 #1"]
    assert sim.finish("a1") == ["start ant evict=[]"]
    assert sim.advance(2 * SECOND) == ["serve a2"]


def test_a_starting_model_without_a_swap_is_waited_for() -> None:
    rules = {name: ModelRule(name) for name in ("ant", "bee")}
    views = {"ant": ProcessView("ant", State.STARTING)}
    queue = [RequestView(1, "ant", 0, patience_at=1), RequestView(2, "bee", 0, patience_at=1)]
    first, second = decide(Snapshot(rules, GroupPolicy({}, []), views, queue), 10)
    assert isinstance(first, Queue) and isinstance(second, Queue)
    assert second.blockers == ("ant",)


# --- changed launch settings ------------------------------------------------------------------------------------


def changed_box(**sizes: int) -> Simulator:
    sim = box(10, **sizes)
    sim.load, sim.stop = SECOND, SECOND
    loaded(sim, *sizes)
    sim.reload(sim.rules, sim.policy, changed=["ant"])
    return sim


def test_a_changed_idle_model_is_its_own_victim() -> None:
    sim = changed_box(ant=4, bee=4)
    assert sim.req("a1", "ant") == ["start ant evict=[ant]"]
    assert sim.req("a2", "ant") == ["join a2"]
    assert sim.advance(2 * SECOND) == ["serve a1", "serve a2"]
    assert sim.starts[-1][1] == "ant"
    assert sim.req("a3", "ant") == ["serve a3"]


def test_a_changed_model_nobody_asks_for_runs_on() -> None:
    sim = changed_box(ant=4, bee=4)
    assert sim.advance(600 * SECOND) == []
    assert sim.running() == ["ant", "bee"]


def test_a_changed_busy_model_serves_on_for_its_patience() -> None:
    sim = box(10, ant=4)
    sim.load, sim.stop = SECOND, SECOND
    loaded(sim, "ant")
    sim.req("a0", "ant")
    sim.reload(sim.rules, sim.policy, changed=["ant"])
    assert sim.req("a1", "ant") == ["serve a1"]
    sim.advance(59 * SECOND)
    assert sim.req("a2", "ant") == ["serve a2"]
    sim.advance(SECOND)
    assert sim.req("a3", "ant") == ["start ant evict=[ant]"]
    assert sim.state("ant") is State.DRAINING
    for name in ("a0", "a1", "a2"):
        sim.finish(name)
    assert sim.advance(2 * SECOND) == ["serve a3"]


def test_a_hold_does_not_keep_old_launch_settings() -> None:
    sim = box(10, ant=4)
    sim.hold = 10 * SECOND
    loaded(sim, "ant")
    sim.req("a0", "ant")
    sim.finish("a0", tool=True)
    sim.reload(sim.rules, sim.policy, changed=["ant"])
    assert sim.req("a1", "ant") == ["start ant evict=[ant]"]


def test_a_changed_model_that_needs_room_of_a_busy_one_serves_on() -> None:
    sim = box(10, ant=4, bee=6)
    loaded(sim, "ant", "bee")
    sim.req("b1", "bee")
    bigger = GroupPolicy({"ant": Sizes(8 * GIB, 0), "bee": Sizes(6 * GIB, 0)}, [], 10 * GIB)
    sim.reload(sim.rules, bigger, changed=["ant"])
    assert sim.req("a1", "ant") == ["serve a1"]
    sim.finish("a1")
    sim.finish("b1")
    assert sim.req("a2", "ant") == ["start ant evict=[ant,bee]"]


def test_removed_models_drain_and_their_requests_are_not_found() -> None:
    sim = box(4, ant=4, bee=4)
    loaded(sim, "ant")
    sim.req("a1", "ant")
    sim.req("b1", "bee")
    rules = {"ant": sim.rules["ant"]}
    assert sim.reload(rules, sim.policy) == ["reject b1: 404"]
    sim.reload({"bee": ModelRule("bee")}, sim.policy)
    assert sim.req("b2", "bee") == ["queue b2 #1"]
    assert sim.finish("a1") == ["start bee evict=[]"]


# --- protected models -------------------------------------------------------------------------------------------


def test_a_protected_model_is_not_evicted_for_another() -> None:
    sim = box(4, ant=(4, {"displace": False}), bee=4)
    loaded(sim, "ant")
    assert sim.req("b1", "bee") == ["reject b1: 409"]
    assert "ant" in sim.clients["b1"].why
    sim.unload(["ant"])
    assert sim.req("b2", "bee") == ["start bee evict=[]"]


def test_a_protected_model_is_passed_over_while_another_makes_the_room() -> None:
    sim = box(8, ant=(4, {"displace": False}), bee=4, cat=4)
    loaded(sim, "ant", "bee")
    sim.req("b1", "bee")
    assert sim.req("c1", "cat") == ["queue c1 #1"]
    assert sim.finish("b1") == ["start cat evict=[bee]"]


def test_a_protected_model_itself_may_evict_and_restart() -> None:
    sim = box(4, ant=(4, {"displace": False}), bee=4)
    loaded(sim, "bee")
    assert sim.req("a1", "ant") == ["start ant evict=[bee]"]
    sim.done("ant")
    sim.finish("a1")
    sim.reload(sim.rules, sim.policy, changed=["ant"])
    assert sim.req("a2", "ant") == ["start ant evict=[ant]"]


def test_who_is_loaded_beside_a_protected_model_is_served() -> None:
    """Groups say that ant goes when bee is asked for; it may not, and bee's memory is taken already."""
    policy = GroupPolicy({}, [GroupRule("home", swap=False, exclusive=False, members=("ant",))], 0)
    sim = Simulator({"ant": ModelRule("ant", displace=False), "bee": ModelRule("bee"), "cat": ModelRule("cat")}, policy)
    loaded(sim, "bee", "ant")
    assert sim.req("b1", "bee") == ["serve b1"]
    assert sim.req("c1", "cat") == ["reject c1: 409"]


def test_its_refusal_is_an_error_that_clients_can_meet() -> None:
    assert from_code("model_protected", "x").status == 409


# --- rendering models -------------------------------------------------------------------------------------------


def studio() -> Simulator:
    sim = box(20, pic=(4, {"renders": True}), ant=4, bee=4, gif=(4, {"renders": True}))
    sim.load, sim.stop, sim.patience = SECOND, SECOND, 10 * SECOND
    loaded(sim, "pic", "bee")
    return sim


def test_nothing_is_spawned_while_a_model_renders_and_ready_ones_serve_on() -> None:
    sim = studio()
    sim.req("p1", "pic")
    assert sim.req("a1", "ant") == ["queue a1 #1"]
    assert sim.req("b1", "bee") == ["serve b1"]
    assert sim.finish("p1") == ["start ant evict=[]"]


def test_overlapping_renders_do_not_starve_a_load() -> None:
    sim = studio()
    sim.req("p0", "pic", length=3 * SECOND)
    sim.req("a1", "ant")
    for n in range(1, 40):
        sim.advance(SECOND)
        sim.req(f"p{n}", "pic", length=3 * SECOND)
        if sim.clients["a1"].state == "granted":
            break
    waited = sim.clients["a1"].granted_at - sim.clients["a1"].arrival
    assert waited <= (10 + 3 + 1 + 1) * SECOND
    sim.advance(20 * SECOND)
    assert all(client.state == "done" for client in sim.clients.values() if client.model == "pic")


def test_renders_wait_only_until_the_process_exists() -> None:
    sim = studio()
    sim.load = 60 * SECOND
    sim.req("p1", "pic", length=12 * SECOND)
    sim.req("a1", "ant")
    assert sim.advance(10 * SECOND) == ["start ant evict=[]"]
    assert sim.req("p2", "pic", length=SECOND) == ["queue p2 #1"]
    assert sim.advance(2 * SECOND) == ["serve p2"]
    assert sim.starts == [(sim.now, "ant")]


def test_a_rendering_model_that_loads_counts_as_one_about_to_render() -> None:
    sim = studio()
    assert sim.req("g1", "gif") == ["start gif evict=[]"]
    assert sim.req("a1", "ant") == ["queue a1 #1"]
    assert sim.advance(SECOND) == ["serve g1"]
    assert sim.finish("g1") == ["start ant evict=[]"]


def test_a_rendering_model_loads_only_after_a_swap_that_makes_room_has_spawned() -> None:
    sim = box(12, pic=(4, {"renders": True}), ant=4, bee=8)
    sim.load, sim.stop = 10 * SECOND, SECOND
    loaded(sim, "bee")
    sim.rules = {**sim.rules, "ant": ModelRule("ant")}
    sim.vram_budget = 0  # what is pinned here is the order, not the ledger
    sim.policy = GroupPolicy({"bee": Sizes(8 * GIB)}, [GroupRule("duo", False, True, members=("pic", "ant"))], 0)
    assert sim.req("a1", "ant") == ["start ant evict=[bee]"]
    assert sim.req("p1", "pic") == ["queue p1 #1"]
    assert sim.advance(SECOND) == ["start pic evict=[]"]


def test_a_stream_of_loads_does_not_starve_renders() -> None:
    sim = box(12, pic=(4, {"renders": True}), ant=4, dog=4, bee=4, cat=4)
    sim.load, sim.stop = 10 * SECOND, SECOND
    loaded(sim, "ant", "dog", "pic")
    assert sim.req("b1", "bee") == ["start bee evict=[ant]"]
    assert sim.req("p1", "pic") == ["queue p1 #1"]
    assert sim.req("c1", "cat") == ["queue c1 #2"]  # it could start beside bee, and pic would wait for it as well
    assert sim.advance(SECOND) == ["serve p1"]
    assert sim.finish("p1") == ["start cat evict=[dog]"]


# --- fairness over time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [0, 9])
@pytest.mark.parametrize("eager", [False, True])
def test_a_steady_overlapping_stream_does_not_starve_another_model(priority: int, eager: bool) -> None:
    sim = box(4, ant=(4, {"priority": priority}), bee=4)
    sim.load, sim.stop, sim.patience, sim.eager_stop = SECOND, SECOND, 10 * SECOND, eager
    loaded(sim, "ant")
    sim.req("a0", "ant", length=3 * SECOND)
    sim.req("b1", "bee", length=SECOND)
    for n in range(1, 60):
        sim.advance(SECOND // 2)
        sim.req(f"a{n}", "ant", length=3 * SECOND)
    waited = sim.clients["b1"].granted_at - sim.clients["b1"].arrival
    assert sim.clients["b1"].state == "done"
    assert waited <= (10 + 3 + 1 + 1) * SECOND
    sim.advance(60 * SECOND)
    assert all(client.state == "done" for client in sim.clients.values())


def ping_pong(hold: int, rounds: int = 20) -> Simulator:
    """Two agents, each in rounds of one answer of 1 s and 2 s of tool work, on two models of which one fits."""
    sim = box(4, ant=4, bee=4)
    sim.load, sim.stop, sim.hold, sim.patience = 3 * SECOND, SECOND, hold, 60 * SECOND
    todo = {"ant": rounds, "bee": rounds}
    resting: dict[str, int] = {"ant": 0, "bee": 0}
    open_: dict[str, str] = {}
    while any(todo.values()) or open_:
        for model in ("ant", "bee"):
            name = open_.get(model)
            if name is not None and sim.clients[name].state == "done":
                del open_[model]
                resting[model] = sim.now + 2 * SECOND
            if model not in open_ and todo[model] and sim.now >= resting[model]:
                open_[model] = f"{model}-{todo[model]}"
                sim.req(open_[model], model, length=SECOND, tool=todo[model] > 1)
                todo[model] -= 1
        sim.advance(SECOND // 10)
    return sim


def test_ping_pong_agents_swap_five_times_less_with_the_hold() -> None:
    without, with_hold = ping_pong(0), ping_pong(10 * SECOND)
    assert len(without.starts) >= 5 * len(with_hold.starts)
    assert len(without.starts) >= 20
    for sim in (without, with_hold):
        waits = [client.granted_at - client.arrival for client in sim.clients.values()]
        assert max(waits) <= (60 + 1 + 1 + 3) * SECOND


def test_an_overdue_request_is_not_pushed_away_by_ever_new_swaps() -> None:
    """big needs the room of both halves; swaps of small models into each half overlap for ever."""
    models = {f"m{n}": 4 for n in range(6)}
    sim = box(8, big=8, **models)
    sim.load, sim.stop, sim.patience = 4 * SECOND, MS, 10 * SECOND
    sim.req("b1", "big", length=SECOND, patience=10 * SECOND)
    sim.gone("b1")
    sim.advance(20 * SECOND)
    for n in range(80):
        sim.req(f"r{n}", f"m{n % 6}", length=SECOND // 2, patience=10 * SECOND)
        if n == 3:
            sim.req("b2", "big", length=SECOND, patience=10 * SECOND)
        sim.advance(2 * SECOND)
    waited = sim.clients["b2"].granted_at - sim.clients["b2"].arrival
    assert sim.clients["b2"].state == "done"
    assert waited <= (10 + 4 + 1 + 4 + 1) * SECOND


# --- shapes of the answer ---------------------------------------------------------------------------------------


def test_admit_asks_to_drop_a_swap_first() -> None:
    rules = {name: ModelRule(name) for name in ("ant", "bee")}
    views = {"ant": ProcessView("ant", State.STARTING)}
    swap = SwapView(3, "ant", phase=Phase.PROBING)
    snapshot = Snapshot(rules, GroupPolicy({}, []), views, swaps=[swap])
    assert admit(snapshot, RequestView(1, "bee", 0), 0) == AbortSwap(3, "ant")
    waited = replace(snapshot, queue=[RequestView(2, "ant", 0)])
    assert isinstance(admit(waited, RequestView(1, "bee", 0), 0), Queue)


def test_every_queued_request_has_one_answer_in_queue_order() -> None:
    rules = {name: ModelRule(name) for name in ("ant", "bee", "cat")}
    views = {"ant": ProcessView("ant", State.READY, 0, tick=1)}
    queue = [RequestView(n, model, n) for n, model in enumerate(("bee", "ghost", "ant", "bee", "cat"), 1)]
    actions = decide(Snapshot(rules, GroupPolicy({}, []), views, queue), 0)
    assert [type(action) for action in actions] == [StartSwap, Reject, Queue, Join, Queue]
    assert [action.request for action in actions] == [1, 2, 3, 4, 5]  # type: ignore[union-attr]


def test_each_decision_sees_the_effects_of_those_before_it() -> None:
    rules = {name: ModelRule(name) for name in ("ant", "bee")}
    views = {"ant": ProcessView("ant", State.READY, 0, tick=1)}
    queue = [RequestView(1, "ant", 1), RequestView(2, "bee", 2)]
    first, second = decide(Snapshot(rules, GroupPolicy({}, []), views, queue), 0)
    assert first == Serve(1, "ant")
    assert isinstance(second, Queue) and second.why == "ant is answering 1 request"


def test_a_snapshot_is_never_changed() -> None:
    rules = {name: ModelRule(name) for name in ("ant", "bee")}
    views = {"ant": ProcessView("ant", State.READY, 0, tick=1)}
    queue = (RequestView(1, "bee", 1), RequestView(2, "ant", 2))
    snapshot = Snapshot(rules, GroupPolicy({}, []), views, queue)
    before = (dict(rules), dict(views), tuple(queue))
    assert decide(snapshot, 5) == decide(snapshot, 5)
    assert (dict(rules), dict(views), tuple(queue)) == before


def test_next_deadline_is_the_first_of_patience_hold_and_ttl() -> None:
    rules = {"ant": ModelRule("ant", ttl=100), "bee": ModelRule("bee")}
    view = ProcessView("ant", State.READY, idle_since=10, hold_until=30)
    queue = [RequestView(1, "bee", 1, patience_at=25), RequestView(2, "bee", 1, patience_at=5)]
    policy = GroupPolicy({}, [])
    assert next_deadline(Snapshot(rules, policy, {"ant": view}, queue), 6) == 25
    assert next_deadline(Snapshot(rules, policy, {"ant": view}, queue), 25) == 30
    assert next_deadline(Snapshot(rules, policy, {"ant": view}, []), 6) == 110
    assert next_deadline(Snapshot(rules, policy, {"ant": replace(view, leases=1)}, []), 6) is None
    assert next_deadline(Snapshot(rules, policy, {}, []), 6) is None
    changed = ProcessView("bee", State.READY, changed=True, changed_since=7)
    late = 7 + rules["bee"].patience
    assert next_deadline(Snapshot(rules, policy, {"bee": changed}, queue), 26) == late
    assert next_deadline(Snapshot(rules, policy, {"bee": changed}, queue), late) is None
    assert next_deadline(Snapshot(rules, policy, {"bee": changed}, []), 26) is None

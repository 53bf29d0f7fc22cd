"""Time of one scheduling decision by number of models and queued requests, and of the matrix; prints tables.

Run: python -m bench.decide [rounds]. Medians of processor time (a decision waits for nothing, and the machine may be
shared): milliseconds, `admit` in microseconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

from qmflask.policy.eviction import GroupPolicy, GroupRule, Sizes
from qmflask.policy.matrix import MatrixPolicy, compile_sets
from qmflask.policy.schedule import (
    ModelRule,
    ProcessView,
    RequestView,
    Snapshot,
    SwapView,
    admit,
    decide,
)
from qmflask.states import Phase, State

GIB = 1 << 30
NOW = 10**15
PATIENCE = 60 * 10**9


def names(count: int) -> list[str]:
    """Model ids."""
    return [f"model-{number:03d}" for number in range(count)]


def queue(models: list[str], length: int, overdue: int = 0) -> list[RequestView]:
    """Requests round-robin over models, three priorities, the first `overdue` of them beyond their patience."""
    return [
        RequestView(
            number,
            models[number % len(models)],
            NOW - length + number,
            priority=number % 3,
            patience_at=NOW - 1 if number < overdue else NOW + PATIENCE,
        )
        for number in range(length)
    ]


def budgeted(
    count: int, running: int, *, leases: int
) -> tuple[dict[str, ModelRule], GroupPolicy, dict[str, ProcessView]]:
    """`running` models fill the budget, each with `leases` requests in flight."""
    models = names(count)
    sizes = {model: Sizes(4 * GIB, GIB) for model in models}
    processes = {
        model: ProcessView(model, State.READY, leases, tick=place) for place, model in enumerate(models[:running])
    }
    return {model: ModelRule(model) for model in models}, GroupPolicy(sizes, [], 4 * GIB * running, 0), processes


def all_blocked(count: int, length: int, overdue: int = 0) -> Snapshot:
    """Half of the models run and answer; everyone else waits for them."""
    rules, policy, processes = budgeted(count, count // 2, leases=2)
    return Snapshot(rules, policy, processes, queue(names(count)[count // 2 :], length, overdue))


def all_start(count: int, length: int) -> Snapshot:
    """Nothing runs, everything fits: every model starts, the rest joins."""
    models = names(count)
    policy = GroupPolicy({model: Sizes(GIB, GIB) for model in models}, [], 1000 * GIB, 0)
    return Snapshot({model: ModelRule(model) for model in models}, policy, {}, queue(models, length))


def half_idle(count: int, length: int) -> Snapshot:
    """Half of the models run, idle ones among busy ones: starts, joins and waits mixed."""
    rules, policy, processes = budgeted(count, count // 2, leases=0)
    for place, (model, view) in enumerate(list(processes.items())):
        if place % 2:
            processes[model] = ProcessView(model, view.state, 3, tick=view.tick)
    return Snapshot(rules, policy, processes, queue(names(count), length))


def one_loading(count: int, length: int) -> Snapshot:
    """The default group: one model loads, everybody else waits for it."""
    models = names(count)
    processes = {models[0]: ProcessView(models[0], State.STARTING, tick=1)}
    swaps = [SwapView(7, models[0], phase=Phase.PROBING)]
    policy = GroupPolicy({}, [], 0, 0)
    return Snapshot({model: ModelRule(model) for model in models}, policy, processes, queue(models, length), swaps)


def together(count: int) -> Snapshot:
    """All models ready in one group without swap: the fast path with the static rule."""
    models = names(count)
    group = GroupRule("all", swap=False, exclusive=False, members=tuple(models))
    processes = {model: ProcessView(model, State.READY, 2, tick=place) for place, model in enumerate(models)}
    return Snapshot({model: ModelRule(model) for model in models}, GroupPolicy({}, [group], 0, 0), processes)


def many_sets(budget: int) -> tuple[MatrixPolicy, str, list[str]]:
    """100 models in 50 sets of some ten alternatives each; six models run."""
    models = names(100)
    sets = []
    for number in range(50):
        few = [models[(number * step + offset) % 100] for step, offset in ((1, 7), (1, 13), (3, 0), (7, 5))]
        text = (
            f"{models[number]} & {models[number + 50]} & ({few[0]} | {few[1]}) & ({' | '.join(models[:3] + few[2:])})"
        )
        sets.append((f"set-{number}", text))
    sizes = {model: Sizes(4 * GIB, GIB) for model in models}
    matrix = compile_sets(sets, {model: model for model in models})
    running = [models[number] for number in (7, 13, 57, 2, 20, 63)]
    return (
        MatrixPolicy(sizes, matrix, {model: 1 + place % 5 for place, model in enumerate(models)}, budget),
        models[1],
        running,
    )


def combinations(width: int, factors: int, budget: int) -> tuple[MatrixPolicy, str, list[str]]:
    """One set of `width` ** `factors` alternatives; all its models run but one, which is more than ever would."""
    rows = [[f"m{factor}-{number}" for number in range(width)] for factor in range(factors)]
    models = [model for row in rows for model in row]
    text = " & ".join("(" + " | ".join(row) + ")" for row in rows)
    sizes = {model: Sizes((3 + place % 7) * GIB) for place, model in enumerate(models)}
    matrix = compile_sets([("all", text)], {model: model for model in models})
    return MatrixPolicy(sizes, matrix, {}, budget), models[1], [models[0], *models[2:]]


def median(function: Callable[[], object], rounds: int) -> float:
    """Median processor time in seconds."""
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return statistics.median(times)


def main(rounds: int) -> None:
    """Print the table."""
    shapes: dict[str, Callable[[int, int], Snapshot]] = {
        "all blocked": all_blocked,
        "all blocked, a third overdue": lambda count, length: all_blocked(count, length, length // 3),
        "all start": all_start,
        "half idle": half_idle,
        "one loading": one_loading,
    }
    points = [(10, 100), (100, 100), (100, 500), (100, 1000), (100, 2000), (200, 2000)]
    print(f"{'decide, ms':32}" + "".join(f"{f'{count}x{length}':>12}" for count, length in points))
    for title, shape in shapes.items():
        cells = []
        for count, length in points:
            snapshot = shape(count, length)
            cells.append(median(lambda s=snapshot: decide(s, NOW), rounds) * 1e3)  # type: ignore[misc]
        print(f"{title:32}" + "".join(f"{cell:12.3f}" for cell in cells))
    print("\nadmit, us")
    rules, policy, processes = budgeted(100, 50, leases=2)
    new = RequestView(9999, "model-010", NOW, patience_at=NOW + PATIENCE)
    blocked = RequestView(9999, "model-090", NOW, patience_at=NOW + PATIENCE)
    shapes_of_admit = {
        "ready, memory decides": (Snapshot(rules, policy, processes), new),
        "ready, static rule, 50 models": (together(50), new),
        "ready, static rule, 100 models": (together(100), new),
        "down, cached snapshot": (Snapshot(rules, policy, processes), blocked),
        "down, 1000 queued": (all_blocked(100, 1000), blocked),
    }
    for title, (snapshot, request) in shapes_of_admit.items():
        print(f"{title:32}{median(lambda s=snapshot, r=request: admit(s, r, NOW), rounds * 5) * 1e6:12.1f}")  # type: ignore[misc]

    print("\nmatrix, ms")
    shapes_of_matrix = {
        "100 models, 50 sets": many_sets(0),
        "100 models, 50 sets, budget": many_sets(24 * GIB),
        "11^4 combinations": combinations(11, 4, 0),
        "10^6 combinations": combinations(10, 6, 0),
        "10^6 combinations, budget": combinations(10, 6, 30 * GIB),
        "10^10 combinations": combinations(10, 10, 0),
    }
    for title, (matrix, target, running) in shapes_of_matrix.items():
        cell = median(lambda m=matrix, t=target, r=running: m.eviction_for(t, r), rounds) * 1e3  # type: ignore[misc]
        print(f"{title:32}{cell:12.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 51)

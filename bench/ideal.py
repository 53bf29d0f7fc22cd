"""How long the mixed work would take without any overhead: the same scheduler, played by the tests' simulator."""

from __future__ import annotations

from qmflask.policy.eviction import GroupPolicy, GroupRule, Sizes
from qmflask.policy.schedule import ModelRule
from tests.unit.simulator import MS, SECOND, Simulator


def mixed_work(plans: list[list[str]], room: int, load_ms: int, answer_ms: int) -> tuple[float, float]:
    """(seconds for all, longest single wait): stops and everything of ours take no time, loads and answers do."""
    models = sorted({model for plan in plans for model in plan})
    sizes = dict.fromkeys(models, Sizes(1, 0))
    group = GroupRule("(default)", True, True, False, "vram", tuple(models))
    world = Simulator(
        rules={model: ModelRule(model) for model in models},
        policy=GroupPolicy(sizes, [group], room, 0),
        load=load_ms * MS,
        sizes=sizes,
        vram_budget=room,
    )
    begin, waits = world.now, list[int]()
    asked: list[tuple[int, str] | None] = [None] * len(plans)  # each client's open request: when, and its name
    left = [list(plan) for plan in plans]
    while any(left) or any(asked):
        for number, plan in enumerate(left):
            open_request = asked[number]
            if open_request and world.clients[open_request[1]].state == "done":
                waits.append(world.now - open_request[0])
                asked[number] = open_request = None
            if open_request is None and plan:
                name = f"{number}.{len(plan)}"
                world.req(name, plan.pop(0), length=answer_ms * MS)
                asked[number] = (world.now, name)
        world.advance(MS)
    return (world.now - begin) / SECOND, max(waits) / SECOND

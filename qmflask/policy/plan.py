"""What would happen if a model were asked for now, and why: the scheduler's own answer with its arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from qmflask.policy.actions import AbortSwap, Action, Join, Queue, Reject, Serve, StartSwap
from qmflask.policy.board import Board
from qmflask.policy.eviction import Explanation, PoolPlan, gib
from qmflask.policy.rules import Rules
from qmflask.policy.schedule import admit
from qmflask.policy.snapshot import EvictionPolicy, RequestView, Snapshot


class Explains(EvictionPolicy, Protocol):
    """A policy that can also show its arithmetic; both of ours can."""

    def explain(
        self,
        target: str,
        running: Sequence[str],
        vram_ceiling: int | None = None,
        ram_ceiling: int | None = None,
    ) -> Explanation:
        """The decision of `eviction_for` with every resident, charge and reason."""

    def on_swap_start(self, target: str, running: Sequence[str], vram_ceiling: int | None = None) -> str | None:
        """Estimate, resident sum and budget in force; None without a VRAM budget."""


def plan(snapshot: Snapshot, rules: Rules, model: str, now: int) -> dict[str, Any]:
    """The plan for `model` as JSON values; nothing is done.

    Shape: `{model, decision, why, victims, blockers, position, state, charge, pools: [...], notes: [...]}`; sizes are
    bytes; `decision` is serve, join, queue, start or refuse.
    """
    action = admit(snapshot, RequestView(0, model, now), now)
    body: dict[str, Any] = {"model": model, "victims": [], "blockers": [], "position": None, "code": None}
    body.update(_decision(action))
    view = snapshot.processes.get(model)
    body["state"] = view.state.value if view else "stopped"
    if model in rules.charges:
        body["charge"] = {"vram": rules.charges[model].vram, "ram": rules.charges[model].ram}
        running = Board(snapshot, now).running(False)
        body.update(arithmetic(rules, model, running, snapshot.vram_ceiling, snapshot.ram_ceiling))
    for pool in body.get("pools", []):
        for line in pool["residents"]:
            resident = snapshot.processes.get(line["model"])
            line["in_flight"] = resident.leases if resident else 0
            line["idle_seconds"] = _idle_seconds(resident.idle_since if resident else 0, now)
            line["held"] = bool(resident and resident.hold_until > now)
    return body


def _idle_seconds(since: int, now: int) -> float | None:
    return round((now - since) / 1e9, 1) if since else None


def _decision(action: Action) -> dict[str, Any]:
    if isinstance(action, Serve):
        return {"decision": "serve", "why": "it is loaded and nothing stands in the way"}
    if isinstance(action, Join):
        return {"decision": "join", "why": "it is loading already"}
    if isinstance(action, Queue):
        waits = {"victims": list(action.victims), "blockers": list(action.blockers), "position": action.position}
        return {"decision": "queue", "why": action.why, **waits}
    if isinstance(action, StartSwap):
        stops = ", ".join(action.victims) or "nothing"
        verb = "stop" if len(action.victims) > 1 else "stops"
        return {"decision": "start", "why": f"it is started; {stops} {verb}", "victims": list(action.victims)}
    if isinstance(action, AbortSwap):
        why = f"the load of {action.target}, for which nobody waits any more, is dropped first"
        return {"decision": "start", "why": why, "victims": [action.target]}
    if isinstance(action, Reject):
        return {"decision": "refuse", "why": action.message, "code": action.code}
    raise TypeError(f"no decision about one request: {action}")


def arithmetic(
    rules: Rules, model: str, running: Sequence[str], vram_ceiling: int | None, ram_ceiling: int | None
) -> dict[str, Any]:
    """The eviction policy's answer for `running` (coldest first): what it names, and every step's sums in bytes."""
    found = _explains(rules.policy).explain(model, running, vram_ceiling, ram_ceiling)
    return {
        "evicts": list(found.victims),
        "pools": [{**asdict(step), "residents": [asdict(line) for line in step.residents]} for step in found.steps],
        "notes": list(found.notes),
        "vram_ceiling": vram_ceiling,
        "ram_ceiling": ram_ceiling,
    }


def what_if(
    rules: Rules, model: str, running: Sequence[str], vram_ceiling: int | None = None, ram_ceiling: int | None = None
) -> dict[str, Any]:
    """The plan without a service: `running` (coldest first) are idle and ready.

    `victims` is what the policy names; with `refused` set, the service would refuse the request and stop nothing.
    """
    running = sorted(running, key=lambda name: _protected(rules, name))  # last, as the scheduler has them
    body = {"model": model, **arithmetic(rules, model, running, vram_ceiling, ram_ceiling)}
    body["victims"] = body.pop("evicts")
    body["refused"] = None if model in running else _refusal(rules, body, running)
    charge = rules.charges.get(model)
    body["charge"] = {"vram": charge.vram if charge else 0, "ram": charge.ram if charge else 0}
    return body


def _protected(rules: Rules, model: str) -> bool:
    return model in rules.models and not rules.models[model].displace


def _refusal(rules: Rules, body: dict[str, Any], running: Sequence[str]) -> str | None:
    """Why the service would refuse a model that is not running; None where it would load it."""
    model = body["model"]
    misfit = rules.policy.misfit(model, running, body["vram_ceiling"], body["ram_ceiling"])
    if misfit is not None:
        holders = ", ".join(f"{name} {gib(size)}" for name, size in misfit.holders)
        return (
            f"{model} cannot fit: {gib(misfit.need)} of {misfit.pool.upper()} are needed"
            f"{f' beside {holders}' if holders else ''}, {gib(misfit.budget)} are allowed"
        )
    kept = [name for name in body["victims"] if _protected(rules, name)]
    return f"{', '.join(kept)} would have to stop for it, and is protected (displace: false)" if kept else None


def sentence(rules: Rules, swap: StartSwap, running: Sequence[str], snapshot: Snapshot) -> str:
    """The leader's one line per swap: need, residents, budget, ceiling, and who stops."""
    found = _explains(rules.policy).explain(swap.target, running, snapshot.vram_ceiling, snapshot.ram_ceiling)
    stops = ", ".join(swap.victims) if swap.victims else "nothing"
    sums = "; ".join(_sum(step) for step in found.steps if step.budget)
    how = ", once it has drained" if swap.fixed else ""
    return f"swap to {swap.target}: stops {stops}{how}" + (f" ({sums})" if sums else "")


def on_swap_start(rules: Rules, swap: StartSwap, running: Sequence[str], snapshot: Snapshot) -> str | None:
    """The policy's own line of one real swap, for the debug log (spec/eviction.md)."""
    return _explains(rules.policy).on_swap_start(swap.target, running, snapshot.vram_ceiling)


def _sum(step: PoolPlan) -> str:
    need = gib(step.charge) if step.charge else "an unknown size"
    limit = f"{gib(step.budget)} budget" + (f", {gib(step.cap)} ceiling" if step.cap != step.budget else "")
    return f"{step.pool}: needs {need}, {gib(step.total)} with all that runs, {gib(step.after)} after, of {limit}"


def _explains(policy: EvictionPolicy) -> Explains:
    assert hasattr(policy, "explain"), "both eviction policies explain themselves"
    return policy  # type: ignore[return-value]

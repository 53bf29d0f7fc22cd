"""What pages show of the box: models, queue, swaps, memory and workers as plain values, from one read of the store."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from qmflask.config import Config, Model
from qmflask.memory.charges import charge
from qmflask.policy.eviction import Sizes
from qmflask.states import DOWN, State
from qmflask.store.reading import Status
from qmflask.store.rows import ProcessRow, RequestRow, SwapRow

SECOND = 1_000_000_000
#: Bytes; a model that others would write to the log of a page is cut.
MESSAGE_LIMIT = 2000


def overview(status: Status, config: Config, charges: Mapping[str, Sizes], now: int, wall: float) -> dict[str, Any]:
    """Everything the page shows at once; times are seconds from now, sizes are bytes.

    `charges` is what each model is charged; `now` is monotonic ns, `wall` the same moment in seconds since the epoch.
    """
    return {
        "now": wall,
        "models": models(status, config, charges, now, wall),
        "peers": [
            {"id": f"{peer.id}/{name}", "peer": peer.id} for peer in config.peers.values() for name in peer.models
        ],
        "selectors": selectors(config),
        "profiles": profiles(config),
        "requests": requests(status, now),
        "swaps": [_swap(swap, now) for swap in status.swaps],
        "memory": memory(status, config, charges, now),
        "service": service(status, config, wall),
    }


# -- models ---------------------------------------------------------------------------------------------------


def models(status: Status, config: Config, charges: Mapping[str, Sizes], now: int, wall: float) -> list[dict[str, Any]]:
    """One entry for each configured model, and for those that run on after their removal; sorted by id."""
    counts = Counter((row.model, row.state) for row in status.requests if row.kind == "infer")
    measured = status.sample.get("models") or {}
    found = []
    for model in config.models.values():
        row = status.processes.get(model.id)
        entry = _model(model, row, counts, now, wall)
        learned = status.sizes.get(model.launch_hash, (0, 0))
        resident = row is not None and row.state not in DOWN
        counted = sizes_of(model, learned if config.learn_sizes else (0, 0))
        entry["size"] = {
            "configured": {"vram": model.est_vram, "ram": model.est_ram},
            "learned": {"vram": learned[0], "ram": learned[1]},
            "charged": _both(charges.get(model.id)),
            "origin": {pool: counted[pool]["origin"] for pool in ("vram", "ram")},
            "measured": measured.get(model.id) if resident else None,
        }
        found.append(entry)
    known = {entry["id"] for entry in found}
    for row in status.processes.values():
        if row.model not in known and row.state not in DOWN:
            found.append(_model(Model(id=row.model), row, counts, now, wall) | {"removed": True, "size": None})
    return sorted(found, key=lambda entry: str(entry["id"]))


def sizes_of(model: Model, learned: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """A model's charge in each pool with its origin, beside the estimate and the measured peak (`learned`); bytes."""
    found = {}
    for pool, configured, peak in (("vram", model.est_vram, learned[0]), ("ram", model.est_ram, learned[1])):
        one = charge(configured, peak)
        found[pool] = {"charged": one.size, "origin": one.origin, "configured": configured, "measured": peak}
    return found


def all_sizes(config: Config, learned: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, Any]]:
    """The same for every configured model, with its pool; `learned` by launch hash."""
    learned = learned if config.learn_sizes else {}
    return {
        model.id: {**sizes_of(model, learned.get(model.launch_hash, (0, 0))), "pool": model.pool}
        for model in config.models.values()
    }


def _model(
    model: Model, row: ProcessRow | None, counts: Counter[tuple[str, str]], now: int, wall: float
) -> dict[str, Any]:
    state = row.state if row else State.STOPPED
    entry: dict[str, Any] = {
        "id": model.id,
        "name": model.name.strip(),
        "description": model.description.strip(),
        "aliases": list(model.aliases),
        "unlisted": model.unlisted,
        "pool": model.pool,
        "group": model.group,
        "capabilities": {
            "in": list(model.capabilities.in_),
            "out": list(model.capabilities.out),
            "tools": model.capabilities.tools,
            "reranker": model.capabilities.reranker,
            "context": model.capabilities.context,
        },
        "state": state.value,
        "ttl": model.ttl,
        "inflight": counts[model.id, "granted"],
        "queued": counts[model.id, "queued"],
    }
    if row is not None:
        entry |= _life(model, row, entry["inflight"], now, wall)
    return entry


def _life(model: Model, row: ProcessRow, inflight: int, now: int, wall: float) -> dict[str, Any]:
    """What its process row tells: why it is in this state, since when, and what it waits for."""
    life: dict[str, Any] = {
        "reason": row.reason,
        "since": max(0.0, wall - row.changed_wall) if row.changed_wall else None,
        "usual_load": row.load_ms / 1000 if row.load_ms else None,
        "pid": row.pid,
        "port": row.port,
    }
    if row.state is State.STARTING:
        life["loading"] = max(0, now - row.started_at) / SECOND
        life["load_limit"] = max(0, row.deadline - row.started_at) / SECOND if row.deadline else None
    if row.state in (State.READY, State.DRAINING):
        idle = max(0, now - row.idle_since) / SECOND if row.idle_since and not inflight else None
        life["idle"] = idle
        life["hold"] = max(0, row.hold_until - now) / SECOND if row.hold_until > now else None
        if model.ttl and idle is not None:
            life["ttl_left"] = max(0.0, model.ttl - idle)
    if row.state in DOWN:
        life["stop"] = stop_of(row)
        life["failure"] = failure_of(row, now)
    return life


def stop_of(row: ProcessRow) -> dict[str, Any] | None:
    """Why and when it was stopped last; None if it never was."""
    if row.stop_reason is None:
        return None
    return {"reason": row.stop_reason, "wall": row.stop_wall, "exit_code": row.exit_code}


def failure_of(row: ProcessRow, now: int) -> dict[str, Any] | None:
    """Why its last start failed, and in how many seconds it may be tried again."""
    if row.failure_code is None:
        return None
    wait = max(0, row.retry_at - now) / SECOND
    message = (row.failure_message or "")[:MESSAGE_LIMIT]
    return {"code": row.failure_code, "message": message, "retry_in": wait, "attempts": row.attempts}


# -- names ----------------------------------------------------------------------------------------------------


def selectors(config: Config) -> list[dict[str, Any]]:
    """The selectors as configured, sorted by id."""
    return [
        {
            "id": name,
            "name": selector.name.strip(),
            "description": selector.description.strip(),
            "strategy": selector.strategy,
            "targets": list(selector.targets),
            "spillover": selector.spillover if selector.strategy == "spillover" else None,
            "unlisted": selector.unlisted,
        }
        for name, selector in sorted(config.selectors.items())
    ]


def profiles(config: Config) -> list[dict[str, Any]]:
    """The profiles as configured, sorted by id; `service.profile` says which one is active."""
    return [
        {
            "id": name,
            "description": profile.description.strip(),
            "pins": dict(profile.pins),
            "preload": list(profile.preload),
            "default_model": profile.default_model,
        }
        for name, profile in sorted(config.profiles.items())
    ]


# -- queue ----------------------------------------------------------------------------------------------------


def requests(status: Status, now: int) -> list[dict[str, Any]]:
    """All requests in arrival order; those that wait say for what, at which place and how long they still may."""
    places: defaultdict[str, int] = defaultdict(int)
    found = []
    for row in status.requests:
        if row.kind == "unload" and row.state == "pending":
            continue
        entry = _request(row, now)
        if row.state == "queued" and row.kind != "unload":
            places["queue"] += 1
            entry |= {"position": places["queue"], "why": why(row, status)}
            entry["patience_left"] = (row.patience_at - now) / SECOND
        found.append(entry)
    return found


def _request(row: RequestRow, now: int) -> dict[str, Any]:
    detail = orjson.loads(row.detail) if row.detail else {}
    return {
        "id": row.public_id,
        "kind": row.kind,
        "model": row.model,
        "state": row.state,
        "priority": row.priority,
        "age": max(0, now - row.arrival) / SECOND,
        "wait": ((row.granted_at or now) - row.arrival) / SECOND,
        "paid": row.paid,
        "arrived": row.arrival_wall,
        "detail": detail if isinstance(detail, Mapping) else {},
    }


def why(row: RequestRow, status: Status) -> str:
    """What a queued request waits for, in words."""
    process = status.processes.get(row.model)
    state = process.state if process else State.STOPPED
    swap = next((swap for swap in status.swaps if swap.target == row.model), None)
    if state is State.STARTING:
        return "its model loads"
    if state is State.STOPPING:
        return "its model stops first"
    if swap is not None:
        return _swap_waits(swap, status)
    against = next((swap for swap in status.swaps if row.model in swap.victims), None)
    if against is not None:
        return f"its model makes room for {against.target}"
    busy = _busy(status, [name for name in status.processes if name != row.model])
    return f"busy: {', '.join(busy)}" if busy else "its turn"


def _swap_waits(swap: SwapRow, status: Status) -> str:
    victims = [name for name in swap.victims if _resident(status, name)]
    if swap.phase.value == "draining":
        busy = _busy(status, (*victims, *swap.blockers))
        return f"answers of {', '.join(busy)} end first" if busy else "room is being made"
    if swap.phase.value == "stopping":
        return f"{', '.join(victims)} stops" if victims else "its start"
    if swap.phase.value == "reclaim":
        return "freed memory has to be seen free"
    return "its model loads"


def _resident(status: Status, name: str) -> bool:
    row = status.processes.get(name)
    return row is not None and row.state not in DOWN


def _busy(status: Status, names: Sequence[str]) -> list[str]:
    leased = {row.model for row in status.requests if row.state == "granted"}
    return sorted(name for name in set(names) if name in leased and _resident(status, name))


def _swap(swap: SwapRow, now: int) -> dict[str, Any]:
    return {
        "id": swap.id,
        "target": swap.target,
        "victims": list(swap.victims),
        "blockers": list(swap.blockers),
        "reason": swap.reason,
        "phase": swap.phase.value,
        "age": max(0, now - swap.created_at) / SECOND,
    }


# -- memory and service ---------------------------------------------------------------------------------------


def memory(status: Status, config: Config, charges: Mapping[str, Sizes], now: int) -> dict[str, Any]:
    """Budgets, ceilings and what is used of both pools, for stacked bars.

    A model's share is what was measured of it; where it cannot be, what it is charged.
    """
    sample = status.sample
    cards = [card for card in sample.get("cards") or [] if isinstance(card, Mapping)]
    host = sample.get("host") or {}
    totals = {"vram": sum(int(card.get("total") or 0) for card in cards), "ram": int(host.get("total") or 0)}
    used = {"vram": sum(int(card.get("used") or 0) for card in cards), "ram": _host_used(host)}
    budgets = {"vram": config.vram_budget, "ram": config.ram_budget}
    pools = {}
    for pool in ("vram", "ram"):
        pools[pool] = {
            "budget": budgets[pool],
            "ceiling": sample.get(f"{pool}_ceiling"),
            "total": totals[pool],
            "used": used[pool],
            "foreign": sample.get("foreign") if pool == "vram" else None,
            "shares": _shares(status, charges, pool),
        }
    age = max(0, now - int(sample["at"])) / SECOND if "at" in sample else None
    shown = [{key: value for key, value in card.items() if key != "processes"} for card in cards]
    return {"pools": pools, "cards": shown, "age": age, "why": sample.get("why") or ""}


def _host_used(host: Mapping[str, Any]) -> int:
    return max(0, int(host.get("total") or 0) - int(host.get("available") or 0))


def _shares(status: Status, charges: Mapping[str, Sizes], pool: str) -> list[dict[str, Any]]:
    measured = status.sample.get("models") or {}
    found = []
    for row in sorted(status.processes.values(), key=lambda row: row.model):
        if row.state in DOWN:
            continue
        now = (measured.get(row.model) or {}).get(pool)
        charge = _both(charges.get(row.model))[pool]
        if now is None and not charge:
            continue
        found.append(
            {"model": row.model, "bytes": charge if now is None else int(now), "measured": now is not None}
            | {"state": row.state.value, "charge": charge}
        )
    return found


def _both(sizes: Sizes | None) -> dict[str, int]:
    return {"vram": sizes.vram, "ram": sizes.ram} if sizes is not None else {"vram": 0, "ram": 0}


def service(status: Status, config: Config, wall: float) -> dict[str, Any]:
    """Workers, leader and configuration."""
    scheduler = status.scheduler
    leader = next((row.pid for row in status.workers if row.id == scheduler.leader), None)
    return {
        "leader": leader,
        "term": scheduler.generation,
        "workers": [
            {"pid": row.pid, "draining": row.draining, "age": max(0.0, wall - row.started_wall)}
            for row in status.workers
        ],
        "generation": scheduler.config_generation,
        "config_error": scheduler.config_error,
        "profile": scheduler.active_profile if scheduler.active_profile in config.profiles else None,
    }

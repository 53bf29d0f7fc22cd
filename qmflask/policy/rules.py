"""The configuration as the scheduler needs it: model rules, eviction policy and launch hashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qmflask.config import Config, Model
from qmflask.memory.charges import charge
from qmflask.policy.eviction import GroupPolicy, GroupRule, Sizes
from qmflask.policy.matrix import MatrixPolicy, compile_sets
from qmflask.policy.schedule import EvictionPolicy, ModelRule

SECOND = 1_000_000_000
MILLISECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class Rules:
    """Made once for each configuration generation and set of learned sizes; never changed."""

    models: Mapping[str, ModelRule]
    policy: EvictionPolicy
    launch_hashes: Mapping[str, str]
    charges: Mapping[str, Sizes] = field(default_factory=dict)


def make_rules(config: Config, learned: Mapping[str, tuple[int, int]]) -> Rules:
    """Rules of a configuration; `learned` has peaks (vram, ram) in bytes by launch hash, unless learning is off."""
    learned = learned if config.learn_sizes else {}
    charges = {model.id: _charge(model, learned) for model in config.models.values()}
    return Rules(
        models={model.id: _rule(config, model) for model in config.models.values()},
        policy=_policy(config, charges),
        charges=charges,
        launch_hashes={model.id: model.launch_hash for model in config.models.values()},
    )


def _rule(config: Config, model: Model) -> ModelRule:
    group = config.groups.get(model.group)  # the matrix has none
    return ModelRule(
        id=model.id,
        concurrency_limit=model.concurrency_limit,
        priority=config.priority.get(model.id, 0),
        renders=bool({"image", "video"} & set(model.capabilities.out)),
        ttl=model.ttl * SECOND,
        displace=model.displace and (group is None or group.displace),
        patience=model.patience_ms * MILLISECOND,
    )


def _charge(model: Model, learned: Mapping[str, tuple[int, int]]) -> Sizes:
    vram, ram = learned.get(model.launch_hash, (0, 0))
    return Sizes(vram=charge(model.est_vram, vram).size, ram=charge(model.est_ram, ram).size)


def _policy(config: Config, sizes: Mapping[str, Sizes]) -> EvictionPolicy:
    oversize = config.oversize == "evict"
    if config.router == "matrix" and config.matrix is not None:
        names = {**{model: model for model in config.models}, **config.matrix.vars}
        compiled = compile_sets(config.matrix.sets, names)
        protected = [model.id for model in config.models.values() if not model.displace]
        budgets = (config.vram_budget, config.ram_budget)
        return MatrixPolicy(sizes, compiled, config.matrix.evict_costs, *budgets, oversize, protected)
    groups = [
        GroupRule(name, group.swap, group.exclusive, group.persistent, group.pool, group.members)
        for name, group in config.groups.items()
    ]
    return GroupPolicy(sizes, groups, config.vram_budget, config.ram_budget, oversize)

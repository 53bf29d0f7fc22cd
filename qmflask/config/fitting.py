"""Warnings about memory and groups: what can never fit, never runs together, or can never be unloaded."""

from __future__ import annotations

from collections.abc import Sequence

from qmflask.config.context import Context
from qmflask.config.problems import Path, shown
from qmflask.config.resolved import Config, Model
from qmflask.config.units import show_size
from qmflask.policy.eviction import GroupPolicy, GroupRule, Sizes
from qmflask.policy.matrix import CompiledMatrix, MatrixError, MatrixPolicy, compile_sets

#: Above this many models the questions about pairs are not asked; they are about small slips.
_MANY = 300


def lint_fitting(ctx: Context, config: Config) -> None:
    """Note every warning about sizes, budgets and what may be loaded with what."""
    for model in config.models.values():
        _too_large(ctx, config, model)
    _persistent_sum(ctx, config)
    if len(config.models) <= _MANY:
        _preload(ctx, config)
        _never_unloaded(ctx, config)


def _too_large(ctx: Context, config: Config, model: Model) -> None:
    for size, budget, key, name in (
        (model.est_vram if model.pool == "vram" else 0, config.vram_budget, "estVramGB", "vramBudgetGB"),
        (model.est_ram, config.ram_budget, "estRamGB", "ramBudgetGB"),
    ):
        if 0 < budget < size:
            text = f"model {shown(model.id)} needs {show_size(size)}, more than {name} of {show_size(budget)}: "
            text += "requests for it are refused" if config.oversize == "refuse" else "all others stop for it"
            ctx.warning(text, ("models", model.id, key), "larger_than_budget", allowed=f"at most {show_size(budget)}")


def _persistent_sum(ctx: Context, config: Config) -> None:
    for pool, budget, name in (("vram", config.vram_budget, "vramBudgetGB"), ("ram", config.ram_budget, "ramBudgetGB")):
        total, groups = 0, []
        for group_name, group in config.groups.items():
            if group.persistent and group.pool == pool:
                sizes = [_size(config.models[model], pool) for model in group.members]
                total += sum(sizes)  # under a budget `swap` is not looked at
                groups.append(group_name)
        if 0 < budget < total:
            listed = ", ".join(shown(group) for group in groups)
            text = f"persistent members of {listed} need {show_size(total)} together, more than {name} of "
            text += f"{show_size(budget)}, and they are never stopped for one another"
            ctx.warning(
                text,
                (*_groups_path(ctx), groups[-1], "members"),
                "persistent_over_budget",
                allowed=f"at most {show_size(budget)}",
            )


def _size(model: Model, pool: str) -> int:
    return model.est_vram if pool == "vram" else model.est_ram


def _groups_path(ctx: Context) -> Path:
    return ("groups",) if ctx.file.groups else ("routing", "router", "settings", "groups")


def _compiled(config: Config) -> CompiledMatrix | None:
    if config.matrix is None:
        return None
    try:
        return compile_sets(config.matrix.sets, {model: model for model in config.models} | config.matrix.vars)
    except MatrixError:
        return None


def policy_of(config: Config) -> GroupPolicy | MatrixPolicy | None:
    """The eviction policy with configured sizes only; None when the matrix does not compile."""
    sizes = {model.id: Sizes(model.est_vram, model.est_ram) for model in config.models.values()}
    budgets = (config.vram_budget, config.ram_budget)
    if config.router == "matrix":
        compiled = _compiled(config)
        costs = config.matrix.evict_costs if config.matrix else {}
        return None if compiled is None else MatrixPolicy(sizes, compiled, costs, *budgets)
    rules = [
        GroupRule(
            name=name,
            swap=group.swap,
            exclusive=group.exclusive,
            persistent=group.persistent,
            pool=group.pool,
            members=group.members,
        )
        for name, group in config.groups.items()
    ]
    return GroupPolicy(sizes, rules, *budgets)


def may_run_together(policy: GroupPolicy | MatrixPolicy, first: Model, second: Model) -> bool:
    """Whether loading one of the two leaves the other running, in at least one order."""
    orders = ((first.id, second.id), (second.id, first.id))
    return any(running not in policy.eviction_for(target, [running]) for running, target in orders)


def _preload(ctx: Context, config: Config) -> None:
    policy = policy_of(config)
    if policy is None or len(config.preload) < 2:
        return
    loaded: list[str] = []
    for name in dict.fromkeys(config.preload):
        victims = policy.eviction_for(name, loaded)
        if victims:
            listed = ", ".join(shown(victim) for victim in victims)
            text = f"preloading {shown(name)} stops {listed}, which is preloaded before it: they do not fit together"
            ctx.warning(
                text, ("hooks", "on_startup", "preload"), "preload_conflict", allowed="models that fit together"
            )
        loaded = [model for model in loaded if model not in victims] + [name]


def _never_unloaded(ctx: Context, config: Config) -> None:
    """A model without TTL that no load of any other model could ever stop.

    Persistent models are meant to stay, and so are those that one set of a matrix names together.
    """
    models = list(config.models.values())
    if len(models) < 2 or config.router == "matrix":
        return
    for model in models:
        if model.ttl or not model.displace or _groups_stop(config, model) or _budget_stops(config, model, models):
            continue
        text = f"model {shown(model.id)} is never unloaded: it has no ttl, and no other model's load can stop it"
        hint = "set ttl, give it a size and set a budget, or let its group swap or another group be exclusive"
        ctx.warning(text, ("models", model.id), "never_unloaded", allowed="a way to be unloaded", hint=hint)


def _groups_stop(config: Config, model: Model) -> bool:
    own = config.groups.get(model.group)
    if own is None or own.persistent or (own.swap and len(own.members) > 1):
        return True
    others = [group for name, group in config.groups.items() if name != model.group and group.members]
    return own.pool == "vram" and any(group.exclusive and group.pool == "vram" for group in others)


def _budget_stops(config: Config, model: Model, others: Sequence[Model]) -> bool:
    """Whether a memory rule decides for some other model of its pool; that all fit together is no fault."""
    if model.pool == "ram":
        sized = any(other.est_ram for other in others if other.id != model.id)
        return config.ram_budget > 0 and (config.learn_sizes or sized)
    peers = (other for other in others if other.id != model.id and other.pool == "vram")
    return config.vram_budget > 0 and (config.learn_sizes or any(other.est_vram for other in peers))

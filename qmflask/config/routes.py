"""Which router decides, with which groups or matrix; priorities and preload (compatibility 1.8-1.10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from qmflask.config.context import Context
from qmflask.config.nametable import NameTable
from qmflask.config.problems import Path, shown
from qmflask.config.resolved import DEFAULT_GROUP, Group, Matrix
from qmflask.config.schema import GroupSection, MatrixSection

_LEGACY_GROUPS: Path = ("groups",)
_LEGACY_MATRIX: Path = ("matrix",)
_GROUPS: Path = ("routing", "router", "settings", "groups")
_MATRIX: Path = ("routing", "router", "settings", "matrix")


@dataclass(slots=True)
class Route:
    """The routing part of the configuration; `group_of` is empty in matrix mode."""

    router: Literal["group", "matrix"] = "group"
    groups: dict[str, Group] = field(default_factory=dict)
    matrix: Matrix | None = None
    group_of: dict[str, tuple[str, Group]] = field(default_factory=dict)
    compiled: Any = None
    priority: dict[str, int] = field(default_factory=dict)
    preload: tuple[str, ...] = ()

    def together_fault(self, models: Sequence[str]) -> str | None:
        """Why these models cannot all be loaded at once by the router's rules; None when they can."""
        if self.router == "matrix":
            if self.compiled is None or self.compiled.permits(models):
                return None
            return "must all appear together in one expanded matrix set"
        names = {self.group_of[model][0] for model in models if model in self.group_of}
        if len(names) > 1:
            listed = ", ".join(shown(name) for name in sorted(names))
            return f"must share one routing group, and must share a group with swap: false (they are in {listed})"
        name = next(iter(names), DEFAULT_GROUP)
        if name in self.groups and self.groups[name].swap:
            return f"must share a group with swap: false (group {shown(name)} has swap: true)"
        return None


def route(ctx: Context, table: NameTable) -> Route:
    """Normalise the routing settings, from their new and old places."""
    found = Route()
    router, groups, groups_path, matrix, matrix_path = _sources(ctx)
    found.router = router
    if router == "matrix" and matrix is not None:
        found.matrix, found.compiled = _matrix(ctx, matrix, matrix_path, table)
    elif router == "group":
        _groups(ctx, groups, groups_path, table, found)
    scheduler = ctx.file.routing.scheduler
    if scheduler.use not in ("", "fifo"):
        text = f"routing.scheduler.use: unknown scheduler {shown(scheduler.use)!r}"
        ctx.error(text, ("routing", "scheduler", "use"), allowed="fifo")
    found.priority = _priority(ctx, scheduler.settings.fifo.priority, table)
    preload: Path = ("hooks", "on_startup", "preload")
    found.preload = expand_names(ctx, ctx.file.hooks.on_startup.preload, preload, table, found.groups)
    return found


_Sources = tuple[Literal["group", "matrix"], Mapping[str, GroupSection | None], Path, MatrixSection | None, Path]


def _sources(ctx: Context) -> _Sources:
    file, router = ctx.file, ctx.file.routing.router
    settings = router.settings
    old = [name for name, given in (("groups", bool(file.groups)), ("matrix", file.matrix is not None)) if given]
    new = [
        name
        for name, given in (
            ("routing.router.use", bool(router.use)),
            ("routing.router.settings.matrix", settings.matrix is not None),
            ("routing.router.settings.groups", bool(settings.groups)),
        )
        if given
    ]
    if len(old) == 2:
        text = "cannot use both groups and matrix: they are two answers to what may run together"
        ctx.key_error(text, _LEGACY_MATRIX, allowed="one of groups and matrix", hint="keep one of the two")
    elif old and new:
        text = f"top-level {old[0]} cannot stand beside {new[0]}: migrate it to routing.router.settings.{old[0]}"
        ctx.key_error(text, (old[0],), allowed="one of the two places")
    if old:
        chosen: Literal["group", "matrix"] = "matrix" if old == ["matrix"] else "group"
        return chosen, file.groups, _LEGACY_GROUPS, file.matrix, _LEGACY_MATRIX
    if router.use not in ("", "group", "matrix"):
        close = ctx.problems.guess(router.use, ("group", "matrix"))
        hint = f"did you mean {close[0]}?" if close else None
        text = f"routing.router.use: unknown router {shown(router.use)!r}"
        ctx.error(text, ("routing", "router", "use"), allowed="group, matrix", hint=hint)
    if router.use == "matrix" and settings.matrix is None and not ctx.problems.failed_at(_MATRIX):
        text = "routing.router.settings.matrix is not set, though routing.router.use is matrix"
        ctx.error(text, ("routing", "router", "use"), allowed="matrix with its settings, or group")
    use: Literal["group", "matrix"] = "matrix" if router.use == "matrix" else "group"
    return use, settings.groups, _GROUPS, settings.matrix, _MATRIX


def _groups(
    ctx: Context, sections: Mapping[str, GroupSection | None], base: Path, table: NameTable, found: Route
) -> None:
    owner: dict[str, str] = {}
    members: dict[str, list[str]] = {}
    explicit = {member for section in sections.values() if section for member in section.members}
    for name, section in sections.items():
        if name == DEFAULT_GROUP:
            text = (
                "the group (default) is made by qmflask from all models in no other group; these settings are ignored"
            )
            ctx.warning(text, (*base, name), "default_group", allowed="any other name")
            continue
        members[name] = _members(ctx, (base, name), section.members if section else [], table, explicit, owner)
        found.groups[name] = _group(section, members[name])
    rest = sorted((model for model in table.models if model not in owner), key=_bytes)
    found.groups[DEFAULT_GROUP] = Group(members=tuple(rest))
    for name, group in found.groups.items():
        for model in group.members:
            found.group_of[model] = (name, group)


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _group(section: GroupSection | None, members: list[str]) -> Group:
    if section is None:
        # A whole group set to null has neither default (compatibility 1.2).
        return Group(swap=False, exclusive=False, members=tuple(members))
    return Group(
        swap=section.swap,
        exclusive=section.exclusive,
        persistent=section.persistent,
        pool=section.pool,
        displace=section.displace,
        members=tuple(members),
    )


def _members(
    ctx: Context,
    place: tuple[Path, str],
    given: Sequence[str],
    table: NameTable,
    explicit: Set[str],
    owner: dict[str, str],
) -> list[str]:
    """Model ids of one group's members; an alias counts as its model when that is in no group by its id."""
    found: list[str] = []
    base, group = place
    for number, member in enumerate(given):
        path = (*base, group, "members", number)
        model = member if member in table.models else None
        if model is None and member in table.aliases:
            model = table.aliases[member]
            text = f"group {shown(group)!r}: {shown(member)!r} is an alias of the model {shown(model)!r}"
            ctx.warning(
                text, path, "alias_member", allowed="ids of models", hint=f"write {shown(model)}, groups hold model ids"
            )
            if model in explicit:
                continue
        if model is None:
            close = ctx.problems.guess(member, table.models)
            hint = f"did you mean {close[0]}?" if close else "members are ids of models"
            text = (
                f'group "{shown(group)}" names the unknown model "{shown(member)}": no model config for {shown(member)}'
            )
            ctx.error(text, path, allowed="ids of models", hint=hint)
        elif model in owner:
            _twice(ctx, model, owner[model], group, path)
        else:
            owner[model] = group
            found.append(model)
    return found


def _twice(ctx: Context, model: str, first: str, second: str, path: Path) -> None:
    name = shown(model)
    text = f'model "{name}" is in multiple groups: "{shown(first)}" and "{shown(second)}"'
    if first == second:
        text += f" (duplicate model member {name} in one group)"
    else:
        text += f" (model member {name} is used in multiple groups)"
    ctx.error(text, path, allowed="each model in one group, once")


def _matrix(ctx: Context, section: MatrixSection, base: Path, table: NameTable) -> tuple[Matrix, Any]:
    from qmflask.policy.matrix import MatrixError, compile_sets  # same layer, and it need not know of configuration

    short = {name: model or "" for name, model in section.vars.items()}  # an empty value is an empty text here
    for name, model in short.items():
        _check_var(ctx, name, model, base, table)
    names = {model: model for model in table.models} | short
    costs = _costs(ctx, section, base, names)
    order = tuple((name, text or "") for name, text in section.sets.items())
    compiled = None
    if not order and not ctx.problems.failed_at((*base, "sets")):
        ctx.key_error("matrix: at least one set is required under sets", base, allowed="name: expression")
    elif order:
        try:
            compiled = compile_sets(order, names)
        except MatrixError as error:
            place = next((name for name in section.sets if str(error).startswith(f'set "{name}": ')), None)
            path = (*base, "sets", place) if place else (*base, "sets")
            ctx.error(f"matrix: {error}", path, allowed="models and vars with &, |, +set and parentheses")
    return Matrix(sets=order, vars=short, evict_costs=costs), compiled


def _check_var(ctx: Context, name: str, model: str, base: Path, table: NameTable) -> None:
    path = (*base, "vars", name)
    if not (1 <= len(name) <= 32 and all(char.isascii() and (char.isalnum() or char in "-.") for char in name)):
        rule = "must contain only alphanumeric characters, - and ., and be 1-32 long"
        ctx.key_error(f"matrix.vars: {shown(name)!r} {rule}", path, allowed="letters, digits, - and .")
    if model not in table.models:
        text = f'matrix.vars.{shown(name)} references unknown model "{shown(model)}"'
        hint = f"it is an alias of {shown(table.aliases[model])}" if model in table.aliases else None
        ctx.error(text, path, allowed="ids of models", hint=hint)


def _costs(ctx: Context, section: MatrixSection, base: Path, names: Mapping[str, str]) -> dict[str, int]:
    costs: dict[str, int] = {}
    for name, given in section.evict_costs.items():
        path, cost = (*base, "evict_costs", name), given or 0
        if name not in names:
            close = ctx.problems.guess(name, names)
            hint = f"did you mean {close[0]}?" if close else None
            text = f'matrix.evict_costs: unknown var or model "{shown(name)}"'
            ctx.key_error(text, path, allowed="vars and ids of models", hint=hint)
        elif cost <= 0:
            ctx.error(f"matrix.evict_costs.{shown(name)} must be a positive integer", path, allowed="1 or more")
        else:
            if costs.get(names[name], cost) != cost:
                text = f"the model {shown(names[name])!r} has two evict_costs; its id's counts, else the first"
                ctx.warning(text, path, "two_costs", allowed="one cost for each model", hint="keep one of the two")
            if name == names[name] or names[name] not in costs:
                costs[names[name]] = cost
    return costs


def _priority(ctx: Context, given: Mapping[str, int], table: NameTable) -> dict[str, int]:
    base: Path = ("routing", "scheduler", "settings", "fifo", "priority")
    found: dict[str, int] = {}
    for name, value in given.items():
        model = table.local(name)
        if model is None:
            text = f'routing.scheduler.settings.fifo.priority references unknown model "{shown(name)}"'
            close = ctx.problems.guess(name, table.models, table.aliases)
            hint = f"did you mean {close[0]}?" if close else None
            ctx.key_error(text, (*base, name), allowed="models and aliases", hint=hint)
        else:
            if found.get(model, value) != value:
                text = f"the model {shown(model)!r} has two priorities; its id's counts, else the first"
                ctx.warning(text, (*base, name), "two_priorities", allowed="one priority for each model")
            if name == model or model not in found:
                found[model] = value
    return found


def expand_names(
    ctx: Context, given: Sequence[str], base: Path, table: NameTable, groups: Mapping[str, Group]
) -> tuple[str, ...]:
    """Model ids of a preload list: models, aliases and groups in order, repeats kept; the rest is left out."""
    found: list[str] = []
    for number, entry in enumerate(given):
        name = entry.strip()
        model = table.local(name)
        if model is not None:
            found.append(model)
        elif name in groups:
            found.extend(groups[name].members)
        elif name:
            close = ctx.problems.guess(name, table.models, table.aliases, groups)
            hint = f"did you mean {close[0]}?" if close else None
            ctx.warning(
                f"preload: {shown(name)!r} is no model, alias or group and is left out",
                (*base, number),
                "unknown_preload",
                allowed="models, aliases, groups",
                hint=hint,
            )
    return tuple(found)

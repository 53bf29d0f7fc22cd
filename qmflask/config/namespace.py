"""Aliases, peers, selectors and profiles: each name must mean one thing (compatibility 1.5, 1.11, 1.12, 5.7)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from qmflask.config.context import Context
from qmflask.config.nametable import NameTable
from qmflask.config.problems import Path, shown
from qmflask.config.resolved import Peer, Profile, Selector
from qmflask.config.routes import Route, expand_names
from qmflask.config.schema import ModelSection, PeerSection, ProfileSection, SelectorSection
from qmflask.config.sections import filters, timeouts
from qmflask.config.units import show_size
from qmflask.config.urls import url_fault

#: What a new name may be.
_FREE = "a name that nothing else has"
_STRATEGIES = ("warm", "pin", "spillover")


@dataclass(slots=True)
class Names:
    """Every model's aliases and the table that resolves a name."""

    table: NameTable
    by_model: dict[str, list[str]] = field(default_factory=dict)

    def aliases_of(self, model: str) -> tuple[str, ...]:
        """A model's aliases in file order, then those that come from its filters."""
        return tuple(self.by_model.get(model, ()))

    @classmethod
    def collect(cls, ctx: Context) -> Names:
        """All names of the file; duplicates are noted."""
        models = ctx.file.models
        aliases: dict[str, str] = {}
        names = cls(NameTable(frozenset(models), aliases, frozenset(ctx.file.selectors)))
        order = sorted(models, key=lambda name: name.encode("utf-8", "surrogatepass"))
        for model in order:
            names._explicit(ctx, model, models[model] or ModelSection(), aliases)
        for model in order:
            names._automatic(ctx, model, models[model] or ModelSection(), aliases)
        names._peers(ctx)
        return names

    def _explicit(self, ctx: Context, model: str, section: ModelSection, aliases: dict[str, str]) -> None:
        own = self.by_model.setdefault(model, [])
        for number, alias in enumerate(section.aliases):
            if not alias:
                continue
            if alias in aliases:
                text = f"duplicate alias {shown(alias)} found in model: {shown(model)}"
                hint = f"it already names {shown(aliases[alias])}"
                ctx.error(text, ("models", model, "aliases", number), allowed="names of one model only", hint=hint)
                continue
            aliases[alias] = model
            own.append(alias)

    def _automatic(self, ctx: Context, model: str, section: ModelSection, aliases: dict[str, str]) -> None:
        for name in sorted(section.filters.set_params_by_id):
            path: Path = ("models", model, "filters", "setParamsByID", name)
            label = f"model {shown(model)} filters.setParamsByID: {shown(name)!r}"
            if name == model or aliases.get(name) == model or not name:
                continue
            if name in self.table.models:
                ctx.key_error(
                    f"{label} conflicts with an existing model ID", path, allowed=_FREE, hint="each id becomes an alias"
                )
            elif name in aliases:
                text = f"{label}: duplicate alias {shown(name)!r}, it already names {shown(aliases[name])}"
                ctx.key_error(text, path, allowed=_FREE, hint="each id becomes an alias of its model")
            else:
                aliases[name] = model
                self.by_model[model].append(name)

    def _peers(self, ctx: Context) -> None:
        peers = ctx.file.peers
        offered = [(peer, section.models if section else []) for peer, section in sorted(peers.items())]
        for name, first, second in self.table.add_peers(offered):
            text = f"peer model name {shown(name)!r} is ambiguous between peers {shown(first)!r} and {shown(second)!r}"
            ctx.error(text, ("peers", second, "models"), allowed=_FREE, hint="rename one of the peers")
        pins = {pin: name for name, profile in ctx.file.profiles.items() if profile for pin in profile.pins}
        for name, (peer, _model) in self.table.qualified.items():
            self._check_qualified(ctx, name, peer, pins.get(name))

    def _check_qualified(self, ctx: Context, name: str, peer: str, pinned: str | None) -> None:
        taken: tuple[tuple[bool, str, Path], ...] = (
            (name in self.table.models, "model ID", ("models", name)),
            (name in self.table.aliases, "alias", ("models", self.table.aliases.get(name, ""), "aliases")),
            (name in self.table.selectors, "selector", ("selectors", name)),
            (pinned is not None, "profile pin", ("profiles", pinned or "", "pins", name)),
        )
        for hit, kind, path in taken:
            if hit:
                text = f"{kind} {shown(name)!r} conflicts with fully qualified peer model name of peer {shown(peer)!r}"
                ctx.key_error(text, path, allowed=_FREE, hint="rename one of the two")


def resolve(ctx: Context, names: Names, route: Route) -> dict[str, Any]:
    """Peers, selectors, profiles and the default model, as the fields of `Config`."""
    return {
        "peers": {name: _peer(ctx, name, section) for name, section in ctx.file.peers.items()},
        "selectors": _selectors(ctx, names, route),
        "profiles": {
            name: _profile(ctx, name, section or ProfileSection(), names, route)
            for name, section in ctx.file.profiles.items()
        },
        "default_model": _default(ctx, ctx.file.default_model, ("defaultModel",), names),
    }


def _peer(ctx: Context, name: str, section: PeerSection | None) -> Peer:
    if section is None:
        return Peer(id=name)
    path: Path = ("peers", name)
    label = f"peers.{shown(name)}"
    if not section.proxy.strip():
        if not ctx.problems.failed_at((*path, "proxy")):
            ctx.key_error(f"{label}.proxy is required: the peer's URL", path, allowed="http://host:port")
    else:
        fault = url_fault(section.proxy)
        if fault:
            text = f"{label}.proxy: invalid peer proxy URL {shown(section.proxy)!r}: {fault}"
            ctx.error(text, (*path, "proxy"), allowed="http://host:port")
    if not section.models and not ctx.problems.failed_at((*path, "models")):
        ctx.key_error(f"{label}.models: peer models can not be empty", path, allowed="a list of the peer's models")
    return Peer(
        id=name,
        proxy=section.proxy,
        models=tuple(section.models),
        api_key=section.api_key,
        filters=filters(section.filters),
        timeouts=timeouts(section.timeouts),
    )


def _unknown(ctx: Context, target: str, names: Names) -> dict[str, str]:
    table = names.table
    known = (table.models, table.aliases, table.selectors, table.qualified)
    close = ctx.problems.guess(target, *known, limit=3)
    hint = {"hint": f"did you mean {' or '.join(close)}?"} if close else {}
    return {"allowed": "a model, an alias, peer/model or a peer's model that only one peer has", **hint}


def _selectors(ctx: Context, names: Names, route: Route) -> dict[str, Selector]:
    found: dict[str, Selector] = {}
    for name, given in ctx.file.selectors.items():
        section = given or SelectorSection()
        _selector_name(ctx, name, names)
        strategy = _strategy(ctx, name, section)
        locals_ = _targets(ctx, name, section, names)
        if strategy == "spillover":
            _spillover(ctx, name, section, locals_, route)
        found[name] = Selector(
            id=name,
            strategy=cast(Any, strategy),
            targets=tuple(section.targets),
            spillover=max(1, section.settings.spillover),
            name=section.name,
            description=section.description,
            unlisted=section.unlisted,
            metadata=section.metadata,
        )
    return found


def _selector_name(ctx: Context, name: str, names: Names) -> None:
    path: Path = ("selectors", name)
    label = f"selectors.{shown(name)}"
    if not name.strip():
        ctx.key_error("selectors: selector names cannot be empty", path, allowed=_FREE)
    elif name in names.table.models:
        ctx.key_error(
            f"{label}: name conflicts with model ID {shown(name)!r}", path, allowed=_FREE, hint="rename the selector"
        )
    elif name in names.table.aliases:
        model = shown(names.table.aliases[name])
        text = f"{label}: name conflicts with model alias {shown(name)!r} of model {model}"
        ctx.key_error(text, path, allowed=_FREE, hint="rename the selector or remove the alias")


def _strategy(ctx: Context, name: str, section: SelectorSection) -> str:
    path: Path = ("selectors", name, "strategy")
    allowed = ", ".join(_STRATEGIES)
    if not section.strategy:
        ctx.error(f"selectors.{shown(name)}.strategy is required", path, allowed=allowed)
    elif section.strategy not in _STRATEGIES:
        close = ctx.problems.guess(section.strategy, _STRATEGIES)
        hint = f"did you mean {close[0]}?" if close else None
        text = f"selectors.{shown(name)}.strategy: unknown strategy {shown(section.strategy)!r}"
        ctx.error(text, path, allowed=allowed, hint=hint)
    return section.strategy if section.strategy in _STRATEGIES else "pin"


def _targets(ctx: Context, name: str, section: SelectorSection, names: Names) -> list[str]:
    """Checks each target; returns the local models among them, in order."""
    path: Path = ("selectors", name, "targets")
    label = f"selectors.{shown(name)}.targets"
    if not section.targets and not ctx.problems.failed_at(path):
        ctx.error(f"{label} must contain at least one entry", path, allowed="models, aliases or peer models")
    found: list[str] = []
    seen: set[str] = set()
    for number, target in enumerate(section.targets):
        place = (*path, number)
        hit = names.table.resolve(target, selectors=False)
        real = hit.id if hit and hit.kind == "model" else f"{hit.peer}/{hit.upstream_name}" if hit else ""
        if target in names.table.selectors and names.table.local(target) is None:
            text = f"{label}[{number}]: {shown(target)!r} is a selector, and selector chaining is not supported"
            ctx.error(text, place, allowed="models, aliases or peer models")
        elif hit is None:
            text = f'{label}[{number}] references unknown model "{shown(target)}"'
            ctx.error(text, place, **_unknown(ctx, target, names))
        elif section.strategy == "warm" and hit.kind == "peer":
            text = f"{label}[{number}]: {shown(target)!r} must resolve to a local model, because the strategy is warm"
            ctx.error(text, place, allowed="models of this host")
        elif section.strategy == "spillover" and real in seen:
            text = f"{label}[{number}]: duplicate resolved model {shown(real)!r}"
            ctx.error(text, place, allowed="each model once")
        elif hit.kind == "model":
            found.append(hit.id)
        seen.add(real)
    return found


def _spillover(ctx: Context, name: str, section: SelectorSection, models: list[str], route: Route) -> None:
    label = f"selectors.{shown(name)}"
    if section.settings.spillover < 1:
        path: Path = ("selectors", name, "settings", "spillover")
        ctx.error(f"{label}.settings.spillover must be >= 1", path, allowed="1 or more")
    fault = _together_fault(ctx, route, models) if len(models) > 1 else None
    if fault:
        ctx.error(
            f"{label}.targets {fault}",
            ("selectors", name, "targets"),
            allowed="models that may run together",
            hint="spillover needs them loaded at once",
        )


def _together_fault(ctx: Context, route: Route, models: list[str]) -> str | None:
    """Why a budget or the router never lets these models be loaded at once; None when they may be."""
    pools = {route.group_of[model][1].pool if model in route.group_of else "vram" for model in models}
    pool = pools.pop()
    budget = ctx.file.vram_budget if pool == "vram" else ctx.file.ram_budget
    sections = [ctx.file.models[model] or ModelSection() for model in models]
    sizes = [section.est_vram if pool == "vram" else section.est_ram for section in sections]
    if pools or not budget or not all(sizes):
        return route.together_fault(models)
    if sum(sizes) > budget:
        return f"must fit {pool}BudgetGB together: they need {show_size(sum(sizes))}, it is {show_size(budget)}"
    # Where memory decides, `swap` and `exclusive` are not looked at.
    return route.together_fault(models) if route.router == "matrix" else None


def _profile(ctx: Context, name: str, section: ProfileSection, names: Names, route: Route) -> Profile:
    path: Path = ("profiles", name)
    label = f"profiles.{shown(name)}"
    if not name.strip():
        ctx.key_error("profiles: profile names cannot be empty", path, allowed="any text")
    does_more = section.preload or section.default_model  # what llama-swap does not know is reason enough
    if not section.pins and not does_more and not ctx.problems.failed_at((*path, "pins")):
        ctx.key_error(f"{label}.pins must contain at least one entry", path, allowed="name: target")
    pins: dict[str, str] = {}
    for pin, target in section.pins.items():
        place: Path = (*path, "pins", pin)
        if not pin.strip():
            ctx.key_error(f"{label}: pin names cannot be empty", place, allowed="any text")
        if target and names.table.resolve(target) is None:
            text = f'{label}.pins.{shown(pin)} references unknown model "{shown(target)}"'
            ctx.error(text, place, **_unknown(ctx, target, names))
        pins[pin] = target or ""
    return Profile(
        description=section.description,
        pins=pins,
        preload=expand_names(ctx, section.preload, (*path, "preload"), names.table, route.groups),
        default_model=_default(ctx, section.default_model, (*path, "defaultModel"), names),
    )


def _default(ctx: Context, target: str, path: Path, names: Names) -> str:
    if not target:
        return ""
    model = names.table.local(target)
    if model is None:
        close = ctx.problems.guess(target, names.table.models, names.table.aliases)
        text = f'{path[-1]} references unknown model "{shown(target)}"'
        if names.table.resolve(target) is not None:
            text += ": it must be a model of this host, no selector and no peer's"
        hint = f"did you mean {close[0]}?" if close else None
        ctx.error(text, path, allowed="a model's id or alias", hint=hint)
    return model or ""

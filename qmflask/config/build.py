"""From the file's sections to the resolved `Config`: inheritance, defaults, limits (compatibility 1.1, 11-12)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from qmflask.config import namespace
from qmflask.config.context import Context
from qmflask.config.expand import Templates
from qmflask.config.go_regex import compile_go
from qmflask.config.problems import Path, shown
from qmflask.config.resolved import (
    DEFAULT_IGNORE,
    ApiKey,
    Capabilities,
    Compat,
    Config,
    Hold,
    Model,
    Performance,
    Store,
    Ui,
    UiActivity,
    Warmup,
)
from qmflask.config.routes import Route, route
from qmflask.config.schema import ModelSection
from qmflask.config.sections import filters, timeouts
from qmflask.config.units import show_duration
from qmflask.config.urls import url_fault

MIN_HEALTH_TIMEOUT = 15
_STDOUT = ("proxy", "upstream", "both", "none")
_COMFY = "comfyui_auto"
_IN = ("text", "audio", "image")
_OUT = (*_IN, "video")


def build(ctx: Context) -> Config:
    """The configuration of the sections; every fault is noted in the context's problems."""
    shared = _globals(ctx)
    names = namespace.Names.collect(ctx)
    models = {name: _model(ctx, name, shared, names) for name in ctx.file.models}
    chosen = route(ctx, names.table)
    models = {name: _placed(model, chosen) for name, model in models.items()}
    rest = namespace.resolve(ctx, names, chosen)
    return Config(
        models=models,
        groups=chosen.groups,
        router=chosen.router,
        matrix=chosen.matrix,
        priority=chosen.priority,
        preload=chosen.preload,
        api_keys=_api_keys(ctx),
        **shared,
        **rest,
    )


def _placed(model: Model, chosen: Route) -> Model:
    if model.id not in chosen.group_of:
        return model
    name, group = chosen.group_of[model.id]
    return replace(model, group=name, pool=group.pool, displace=model.displace and group.displace)


def floor_health(seconds: int) -> int:
    """`healthCheckTimeout` is raised to its minimum in silence."""
    return max(seconds, MIN_HEALTH_TIMEOUT)


def _globals(ctx: Context) -> dict[str, Any]:
    file = ctx.file
    if file.start_port < 1:
        ctx.error("startPort must be greater than 1", ("startPort",), allowed="a port from 1 to 65535")
    if file.global_ttl < 0:
        ctx.error("globalTTL must be >= 0", ("globalTTL",), allowed="seconds; 0 = never")
    if file.unload_timeout < 0:
        ctx.error("unloadTimeout must be >= 0", ("unloadTimeout",), allowed="seconds; 0 means 10")
    if file.log_to_stdout not in _STDOUT:
        allowed = ", ".join(_STDOUT)
        ctx.error(f"logToStdout must be one of: {allowed}", ("logToStdout",), allowed=allowed)
    if file.max_body_mb < 0:
        ctx.error("maxBodyMB must be >= 0", ("maxBodyMB",), allowed="MiB; 0 = no limit")
    return {
        "health_check_timeout": floor_health(file.health_check_timeout),
        "unload_timeout": file.unload_timeout or 10,
        "global_ttl": file.global_ttl,
        "start_port": file.start_port,
        "send_loading_state": bool(file.send_loading_state) if file.send_loading_state != "comments" else "comments",
        "include_aliases_in_list": file.include_aliases_in_list,
        "log_level": _level(file.log_level),
        "log_time_format": file.log_time_format.strip(),
        "log_to_stdout": file.log_to_stdout if file.log_to_stdout in _STDOUT else "proxy",
        "log_requests": file.log_requests,
        "metrics_max_in_memory": file.metrics_max_in_memory if file.metrics_max_in_memory > 0 else 1000,
        "capture_buffer": max(0, file.capture_buffer),
        "store": _store(ctx),
        "performance": _performance(ctx),
        "ui": Ui(activity=UiActivity(session_id=_session_ids(file.ui.activity.session_id))),
        "upstream_ignore_paths": _ignore_paths(ctx),
        "vram_budget": file.vram_budget,
        "ram_budget": file.ram_budget,
        "vram_reserve": file.vram_reserve,
        "oversize": file.oversize,
        "learn_sizes": file.learn_sizes,
        "reclaim_timeout": file.reclaim_timeout,
        "pressure_evict": file.pressure_evict,
        "pressure_grace": file.pressure_grace,
        "patience_ms": _patience(ctx),
        "hold": file.hold,
        "hold_ms": file.hold_ms,
        "on_shutdown": file.on_shutdown,
        "max_body": max(0, file.max_body_mb) * 1024 * 1024,
        "strict": file.strict,
        "idle_stream_timeout": file.idle_stream_timeout,
        "return_after": file.return_after,
    }


def _level(text: str) -> str:
    level = text.strip().lower()
    return level if level in ("debug", "info", "warn", "error") else "warn" if level == "warning" else "info"


def _patience(ctx: Context) -> int:
    own, inner = ctx.file.patience_ms, ctx.file.routing.scheduler.settings.fifo.patience_ms
    if own is not None and inner is not None and own != inner:
        path = ("routing", "scheduler", "settings", "fifo", "patienceMs")
        ctx.error(
            "patienceMs is set twice, and not to the same value",
            path,
            allowed="milliseconds, in one place",
            hint="keep one of the two",
        )
    chosen = inner if inner is not None else own
    return 60_000 if chosen is None else chosen


def _store(ctx: Context) -> Store:
    store = ctx.file.store
    if store is None:
        return Store()
    path: Path = ("store", "path")
    fault = None if (store.path or "").strip() else "store.path must not be empty"
    if fault is None and ctx.path_fault is not None:
        fault = ctx.path_fault(store.path or "")
        fault = f"store.path {fault}" if fault else None
    if fault:
        ctx.error(fault, path, allowed="a file in a directory that exists; without `store`, activity is kept in memory")
    if store.max_mb < 0:
        ctx.error("store.maxMB must be >= 0", ("store", "maxMB"), allowed="MiB; 0 = no limit")
    return Store(path=store.path, keep_days=store.keep_days, max_mb=max(0, store.max_mb))


def _performance(ctx: Context) -> Performance:
    section = ctx.file.performance
    every = section.every
    if every != 0 and every < 5:
        text = f"performance.every must be at least 5s, not {show_duration(every)}"
        ctx.error(text, ("performance", "every"), allowed="5s or more")
    return Performance(disabled=section.disabled, every=max(every, 5.0))


def _session_ids(names: list[str]) -> tuple[str, ...]:
    kept: dict[str, str] = {}
    for name in names:
        if name.strip():
            kept.setdefault(name.strip().lower(), name.strip())
    return tuple(kept.values())


def _ignore_paths(ctx: Context) -> tuple[str, ...]:
    patterns = ctx.file.upstream.ignore_paths
    for number, pattern in enumerate(patterns):
        try:
            compile_go(pattern)
        except ValueError as error:
            text = f"upstream.ignorePaths: invalid regular expression: {error}"
            ctx.error(
                text, ("upstream", "ignorePaths", number), allowed="RE2 syntax: no look-around, no back-references"
            )
    return tuple(patterns) or (DEFAULT_IGNORE,)


def _api_keys(ctx: Context) -> tuple[ApiKey, ...]:
    keys: list[ApiKey] = []
    for number, section in enumerate(ctx.file.api_keys):
        path: Path = ("apiKeys", number)
        if not section.key:
            if not ctx.problems.failed_at((*path, "key")):
                ctx.error(
                    "empty api key found in apiKeys",
                    path,
                    allowed="a key of at least one character",
                    hint="remove the entry, or set the variable it refers to",
                )
        elif " " in section.key:
            ctx.error(f"apiKeys[{number}]: api key cannot contain spaces", path, allowed="text without spaces")
        else:
            models = tuple(glob for glob in section.models if glob)
            keys.append(ApiKey(key=section.key, name=section.name.strip(), models=models, admin=section.admin))
    return tuple(keys)


def _model(ctx: Context, name: str, shared: Mapping[str, Any], names: namespace.Names) -> Model:
    section = ctx.file.models[name]
    templates = ctx.expanded.templates.get(name, Templates())
    if section is None:
        # A null model loads, and fails only when it is started (compatibility 1.4, edge cases).
        section, templates = ModelSection(), Templates()
    path: Path = ("models", name)
    _check_model(ctx, path, name, section, templates)
    port = templates.port

    def fill(template: str) -> str:
        return template if port is None else template.replace("${PORT}", str(port))

    limit = max(0, section.concurrency_limit)
    return Model(
        id=name,
        cmd=fill(templates.cmd),
        cmd_stop=fill(templates.cmd_stop),
        proxy=fill(templates.proxy),
        env=tuple(fill(pair) for pair in templates.env),
        check_endpoint=fill(templates.check_endpoint),
        cmd_template=templates.cmd,
        cmd_stop_template=templates.cmd_stop,
        proxy_template=templates.proxy,
        env_template=templates.env,
        check_endpoint_template=templates.check_endpoint,
        port=port,
        aliases=names.aliases_of(name),
        ttl=max(0, shared["global_ttl"] if section.ttl < 0 else section.ttl),
        unload_timeout=section.unload_timeout if section.unload_timeout > 0 else shared["unload_timeout"],
        health_check_timeout=shared["health_check_timeout"]
        if section.health_check_timeout is None
        else floor_health(section.health_check_timeout),
        est_vram=section.est_vram,
        est_ram=section.est_ram,
        name=section.name,
        description=section.description,
        unlisted=section.unlisted,
        use_model_name=section.use_model_name,
        concurrency_limit=max(50, limit) if name == _COMFY else limit,
        filters=filters(section.filters),
        metadata=section.metadata,
        capabilities=_capabilities(ctx, path, section),
        send_loading_state=shared["send_loading_state"]
        if section.send_loading_state is None
        else section.send_loading_state,
        timeouts=timeouts(section.timeouts),
        compat=Compat(ignore_websockets=section.compat.ignore_websockets or name == _COMFY),
        upstream_key=section.upstream_key,
        warmup=_warmup(ctx, path, section),
        hold=cast(Hold, section.hold or shared["hold"]),
        hold_ms=shared["hold_ms"] if section.hold_ms is None else section.hold_ms,
        patience_ms=shared["patience_ms"] if section.patience_ms is None else section.patience_ms,
        idle_stream_timeout=shared["idle_stream_timeout"]
        if section.idle_stream_timeout is None
        else section.idle_stream_timeout,
        displace=section.displace,
    )


def _check_model(ctx: Context, path: Path, name: str, section: ModelSection, templates: Templates) -> None:
    label = f"model {shown(name)}"
    if section.ttl < -1:
        text = f"{label}: invalid TTL value {section.ttl}"
        ctx.error(text, (*path, "ttl"), allowed="seconds; 0 = never, -1 = globalTTL")
    if section.unload_timeout < 0:
        text = f"{label}: invalid unloadTimeout value {section.unload_timeout}"
        ctx.error(text, (*path, "unloadTimeout"), allowed="seconds; 0 = the global value")
    proxy = templates.proxy if templates.port is None else templates.proxy.replace("${PORT}", str(templates.port))
    fault = url_fault(proxy) if "${" not in proxy else None
    if fault:
        ctx.error(f"{label}: invalid proxy URL {shown(proxy)!r}: {fault}", (*path, "proxy"), allowed="http://host:port")


def _capabilities(ctx: Context, path: Path, section: ModelSection) -> Capabilities:
    caps = section.capabilities
    base = (*path, "capabilities")
    for side, values, known in (("in", caps.in_, _IN), ("out", caps.out, _OUT)):
        for number, value in enumerate(values):
            if value not in known:
                text = f"model {shown(path[1])}: capabilities.{side}: invalid modality {shown(value)!r}"
                close = ctx.problems.guess(value, known)
                hint = f"did you mean {close[0]}?" if close else None
                ctx.error(text, (*base, side, number), allowed=", ".join(known), hint=hint)
    if caps.context < 0:
        text = f"model {shown(path[1])}: capabilities.context: must be >= 0"
        ctx.error(text, (*base, "context"), allowed="tokens; 0 = not said")
    return Capabilities(
        in_=tuple(caps.in_), out=tuple(caps.out), tools=caps.tools, reranker=caps.reranker, context=max(0, caps.context)
    )


def _warmup(ctx: Context, path: Path, section: ModelSection) -> Warmup | None:
    if section.warmup is None:
        return None
    if not section.warmup.path:
        ctx.error(
            "warmup.path is required: the path of the request", (*path, "warmup"), allowed="a path such as /props"
        )
    where = section.warmup.path if section.warmup.path.startswith("/") else "/" + section.warmup.path
    return Warmup(path=where, body=section.warmup.body)

"""The resolved configuration for people and scripts: the file's own keys, values after macros and defaults."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic.alias_generators import to_camel

from qmflask.config.resolved import (
    ApiKey,
    Compat,
    Config,
    Filters,
    Group,
    LaunchError,
    Model,
    Peer,
    Profile,
    Selector,
    Timeouts,
)
from qmflask.config.units import gib, show_duration

#: Stands for a secret where secrets are not shown.
HIDDEN = "[REDACTED]"


def view(config: Config, secrets: bool = True) -> dict[str, Any]:
    """The configuration as JSON-ready values under the names of the file; sizes in GiB, times in seconds.

    With `secrets` false, API keys and values of environment variables are hidden.
    """
    return {
        **_globals(config),
        "apiKeys": [_key(key, secrets) for key in config.api_keys],
        "models": {name: _model(model, secrets) for name, model in config.models.items()},
        "groups": {name: _group(group) for name, group in config.groups.items()},
        "router": config.router,
        "matrix": _matrix(config),
        "priority": config.priority,
        "preload": list(config.preload),
        "peers": {name: _peer(peer, secrets) for name, peer in config.peers.items()},
        "selectors": {name: _selector(selector) for name, selector in config.selectors.items()},
        "profiles": {name: _profile(profile) for name, profile in config.profiles.items()},
        **_nested(config),
    }


_PLAIN = (
    *("health_check_timeout", "unload_timeout", "start_port", "send_loading_state", "include_aliases_in_list"),
    *("log_level", "log_time_format", "log_to_stdout", "log_requests", "metrics_max_in_memory", "capture_buffer"),
    *("oversize", "learn_sizes", "reclaim_timeout", "pressure_evict", "pressure_grace", "patience_ms", "hold"),
    *("hold_ms", "on_shutdown", "strict", "idle_stream_timeout", "default_model", "return_after"),
)


def _globals(config: Config) -> dict[str, Any]:
    return {
        **{to_camel(name): getattr(config, name) for name in _PLAIN},
        "globalTTL": config.global_ttl,
        "vramBudgetGB": gib(config.vram_budget),
        "ramBudgetGB": gib(config.ram_budget),
        "vramReserveGB": gib(config.vram_reserve),
        "maxBodyMB": config.max_body // 1024**2,
    }


def _nested(config: Config) -> dict[str, Any]:
    """The blocks of the file whose values are also shown flat, and those that are only nested."""
    store, performance = config.store, config.performance
    fifo = {"priority": config.priority, "patienceMs": config.patience_ms}
    settings = {"groups": {name: _group(group) for name, group in config.groups.items()}, "matrix": _matrix(config)}
    return {
        "routing": {
            "router": {"use": config.router, "settings": settings},
            "scheduler": {"use": "fifo", "settings": {"fifo": fifo}},
        },
        "hooks": {"on_startup": {"preload": list(config.preload)}},
        "upstream": {"ignorePaths": list(config.upstream_ignore_paths)},
        "store": None
        if store.path is None
        else {"path": store.path, "keepDays": store.keep_days, "maxMB": store.max_mb},
        "performance": {"disabled": performance.disabled, "every": show_duration(performance.every)},
        "ui": {"activity": {"session_id": list(config.ui.activity.session_id)}},
    }


def _key(key: ApiKey, secrets: bool) -> Any:
    text = key.key if secrets else HIDDEN
    if key.admin and key.models == ("*",) and not key.name:
        return text
    return {"key": text, "name": key.name, "models": list(key.models), "admin": key.admin}


def _model(model: Model, secrets: bool) -> dict[str, Any]:
    env = [pair if secrets or "=" not in pair else f"{pair.split('=', 1)[0]}={HIDDEN}" for pair in model.env]
    automatic = [name for name in model.aliases if name in model.filters.set_params_by_id]
    return {
        "cmd": model.cmd,
        **_launch(model),
        "cmdStop": model.cmd_stop,
        "proxy": model.proxy,
        "port": model.port,
        "checkEndpoint": model.check_endpoint,
        "env": env,
        "aliases": list(model.aliases),
        "automaticAliases": automatic,
        "ttl": model.ttl,
        "unloadTimeout": model.unload_timeout,
        "healthCheckTimeout": model.health_check_timeout,
        "estVramGB": gib(model.est_vram),
        "estRamGB": gib(model.est_ram),
        "group": model.group,
        "pool": model.pool,
        "name": model.name,
        "description": model.description,
        "unlisted": model.unlisted,
        "useModelName": model.use_model_name,
        "concurrencyLimit": model.concurrency_limit,
        "filters": _filters(model.filters),
        "setParams": model.filters.set_params,
        "setParamsByID": model.filters.set_params_by_id,
        "metadata": model.metadata,
        "capabilities": _capabilities(model),
        "sendLoadingState": model.send_loading_state,
        "timeouts": _by_alias(model.timeouts),
        "compat": _by_alias(model.compat),
        "upstreamKey": model.upstream_key if secrets or not model.upstream_key else HIDDEN,
        "warmup": asdict(model.warmup) if model.warmup else None,
        "hold": model.hold,
        "holdMs": model.hold_ms,
        "patienceMs": model.patience_ms,
        "idleStreamTimeout": model.idle_stream_timeout,
        "displace": model.displace,
        "launchHash": model.launch_hash,
    }


def _launch(model: Model) -> dict[str, Any]:
    """How it would be spawned now; `args` is `argv` under the name that llama-swap's own tests use."""
    try:
        launch = model.launch()
    except LaunchError as error:
        return {"argv": None, "args": None, "checkUrl": None, "launchError": str(error)}
    argv = list(launch.argv)
    return {"argv": argv, "args": argv, "checkUrl": launch.check_url, "launchError": None}


def _capabilities(model: Model) -> dict[str, Any]:
    caps = model.capabilities
    return {
        "in": list(caps.in_),
        "out": list(caps.out),
        "tools": caps.tools,
        "reranker": caps.reranker,
        "context": caps.context,
    }


def _filters(filters: Filters) -> dict[str, Any]:
    return {
        "stripParams": ",".join(filters.strip_params),
        "setParams": filters.set_params,
        "setParamsByID": filters.set_params_by_id,
    }


def _by_alias(section: Timeouts | Compat) -> dict[str, Any]:
    return {to_camel(name): value for name, value in asdict(section).items()}


def _group(group: Group) -> dict[str, Any]:
    return {**asdict(group), "members": list(group.members)}


def _matrix(config: Config) -> dict[str, Any] | None:
    matrix = config.matrix
    if matrix is None:
        return None
    order = [name for name, _expression in matrix.sets]
    return {"sets": dict(matrix.sets), "setOrder": order, "vars": matrix.vars, "evict_costs": matrix.evict_costs}


def _peer(peer: Peer, secrets: bool) -> dict[str, Any]:
    return {
        "proxy": peer.proxy,
        "models": list(peer.models),
        "apiKey": peer.api_key if secrets or not peer.api_key else HIDDEN,
        "filters": _filters(peer.filters),
        "timeouts": _by_alias(peer.timeouts),
    }


def _selector(selector: Selector) -> dict[str, Any]:
    return {
        "strategy": selector.strategy,
        "targets": list(selector.targets),
        "spillover": selector.spillover,
        "settings": {"spillover": selector.spillover},
        "name": selector.name,
        "description": selector.description,
        "unlisted": selector.unlisted,
        "metadata": selector.metadata,
    }


def _profile(profile: Profile) -> dict[str, Any]:
    return {
        "description": profile.description,
        "pins": profile.pins,
        "preload": list(profile.preload),
        "defaultModel": profile.default_model,
    }

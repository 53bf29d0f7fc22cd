"""Warnings about what is legal but surely not meant: names, values and settings that have no effect."""

from __future__ import annotations

from collections.abc import Mapping

from qmflask.config.context import Context
from qmflask.config.fitting import lint_fitting
from qmflask.config.listening import lint_ports
from qmflask.config.problems import Path, shown
from qmflask.config.resolved import Config, LaunchError, Model
from qmflask.config.sections import protects_model

_LEVELS = ("debug", "info", "warn", "warning", "error")
_TIME_FORMATS = (
    *("ansic", "unixdate", "rubydate", "rfc822", "rfc822z", "rfc850", "rfc1123", "rfc1123z", "rfc3339", "rfc3339nano"),
    *("kitchen", "stamp", "stampmilli", "stampmicro", "stampnano"),
)


def lint(ctx: Context, config: Config, environ: Mapping[str, str]) -> None:
    """Note every warning about `config` in the context's problems."""
    _nothing_to_serve(ctx, config)
    _log_words(ctx)
    _idle_routing(ctx)
    _keys(ctx)
    for name, model in config.models.items():
        if not ctx.problems.failed_under(("models", name)):
            _model(ctx, model, config)
    _returning(ctx, config)
    lint_ports(ctx, config, environ)
    lint_fitting(ctx, config)


def _nothing_to_serve(ctx: Context, config: Config) -> None:
    if config.models or config.peers or ctx.problems.errors:
        return
    hint = "write `models:`, and below it NAME: {cmd: PROGRAM --port ${PORT} ...}, or have `qmflask init FOLDER` do it"
    ctx.warning("there are no models: no request can be answered", (), "no_models", allowed="at least one", hint=hint)


def _log_words(ctx: Context) -> None:
    file = ctx.file
    if file.log_level.strip().lower() not in _LEVELS:
        close = ctx.problems.guess(file.log_level, _LEVELS)
        hint = f"did you mean {close[0]}?" if close else None
        text = f"unknown log level {shown(file.log_level)!r} counts as info"
        ctx.warning(text, ("logLevel",), "log_level", allowed="debug, info, warn, error", hint=hint)
    word = file.log_time_format.strip().lower()
    if word and word not in _TIME_FORMATS:
        text = f"unknown time format {shown(file.log_time_format)!r}: log lines get no time"
        ctx.warning(text, ("logTimeFormat",), "log_time_format", allowed=", ".join(_TIME_FORMATS))
    for path, seconds in (("healthCheckTimeout", file.health_check_timeout),):
        if seconds < 15:
            ctx.warning(f"{seconds} s is raised to the minimum of 15 s", (path,), "raised", allowed="15 or more")


def _idle_routing(ctx: Context) -> None:
    """Settings of the router that is not used."""
    router = ctx.file.routing.router
    if router.use == "matrix" and router.settings.groups:
        path: Path = ("routing", "router", "settings", "groups")
        ctx.warning(
            "groups have no effect, because routing.router.use is matrix",
            path,
            "unused_groups",
            allowed="settings of the router in use",
        )
    if router.use in ("", "group") and router.settings.matrix is not None:
        path = ("routing", "router", "settings", "matrix")
        text = "the matrix has no effect, because routing.router.use is not matrix"
        ctx.warning(
            text,
            path,
            "unused_matrix",
            allowed="settings of the router in use",
            hint="set routing.router.use to matrix",
        )


def _returning(ctx: Context, config: Config) -> None:
    """A default model that is unloaded for being idle, which is when it is loaded."""
    wanted: list[tuple[Path, str]] = [(("defaultModel",), config.default_model)]
    wanted += [(("profiles", name, "defaultModel"), profile.default_model) for name, profile in config.profiles.items()]
    for path, name in wanted:
        model = config.models.get(name)
        if model is not None and model.ttl:
            text = (
                f"the default model {shown(name)!r} has a ttl: it is unloaded after {model.ttl} s without a request, "
            )
            text += f"and loaded again {config.return_after:g} s later"
            ctx.warning(text, path, "default_ttl", allowed="a model that stays", hint="give that model ttl: 0")


def _keys(ctx: Context) -> None:
    seen: set[str] = set()
    for number, section in enumerate(ctx.file.api_keys):
        if section.key and section.key in seen:
            text = "this API key stands here twice; the first entry counts"
            ctx.warning(text, ("apiKeys", number), "same_key", allowed="each key once")
        seen.add(section.key)


def _model(ctx: Context, model: Model, config: Config) -> None:
    path: Path = ("models", model.id)
    section = ctx.file.models[model.id]
    if section is None:
        ctx.warning(
            "the model has no settings, so it can never be started", path, "empty_model", allowed="a mapping with cmd"
        )
        return
    for number, alias in enumerate(section.aliases):
        if alias in config.models and alias != model.id:
            text = f"the alias {shown(alias)!r} has no effect: it is the id of another model"
            ctx.warning(text, (*path, "aliases", number), "dead_alias", allowed="names that nothing else has")
    for number, pair in enumerate(section.env):
        if "=" not in pair or pair.startswith("="):
            text = "an environment entry without NAME= is left out"
            ctx.warning(text, (*path, "env", number), "env_entry", allowed="NAME=value")
    _launch(ctx, model, path)
    timeout = section.health_check_timeout
    if timeout is not None and timeout < 15:
        text = f"{timeout} s is raised to the minimum of 15 s"
        ctx.warning(text, (*path, "healthCheckTimeout"), "raised", allowed="15 or more")
    _filters(ctx, model, path)


def _launch(ctx: Context, model: Model, path: Path) -> None:
    try:
        model.launch()
    except LaunchError as error:
        ctx.warning(
            f"the model cannot be started: {error}",
            (*path, "proxy" if model.cmd else "cmd"),
            "launch",
            allowed="a command and the address it listens on",
        )
    if model.proxy.strip() and "://" not in model.proxy:
        text = f"proxy {shown(model.proxy)!r} has no scheme and counts as http://"
        ctx.warning(text, (*path, "proxy"), "scheme", allowed="http://host:port")


def _filters(ctx: Context, model: Model, path: Path) -> None:
    section = ctx.file.models[model.id]
    assert section is not None
    bases: list[tuple[Path, Mapping[str, object]]] = [((*path, "filters", "setParams"), section.filters.set_params)]
    for name, given in section.filters.set_params_by_id.items():
        bases.append(((*path, "filters", "setParamsByID", name), given or {}))
    for base, params in bases:
        for key in params:
            if protects_model(key):
                ctx.warning(
                    "a filter never touches `model`; this entry is left out",
                    (*base, key),
                    "model_filter",
                    allowed="any other key",
                )
    if section.filters.strip_params.strip() and section.filters.old_strip_params.strip():
        text = "strip_params has no effect beside stripParams"
        ctx.warning(text, (*path, "filters", "strip_params"), "strip_params", allowed="one of the two")

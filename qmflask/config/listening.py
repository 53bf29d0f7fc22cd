"""Warnings about ports: one that nobody names, one that two want, one that is qmflask's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import combinations

from qmflask.config.command import split_command
from qmflask.config.context import Context
from qmflask.config.fitting import may_run_together, policy_of
from qmflask.config.problems import shown
from qmflask.config.resolved import Config, Model
from qmflask.config.urls import host_of, port_of
from qmflask.policy.eviction import GroupPolicy
from qmflask.policy.matrix import MatrixPolicy

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::", ""})
_PORT_FLAGS = ("--port", "-port", "--http-port", "--server-port", "--listen-port")
_PUBLISH_FLAGS = ("-p", "--publish")
_CONTAINERS = frozenset({"docker", "podman", "nerdctl"})
_BIND = re.compile(r"(?:^|\s)(?:-b|--bind)[=\s]?\S*?:(\d+)")
DEFAULT_PORT = 8080


def own_port(environ: Mapping[str, str]) -> int:
    """The port qmflask itself listens on, as far as the environment tells."""
    bind = _BIND.search(environ.get("GUNICORN_CMD_ARGS", ""))
    port = bind.group(1) if bind else environ.get("PORT", "")
    return int(port) if port.isascii() and port.isdigit() and len(port) < 6 else DEFAULT_PORT


def command_ports(command: str) -> list[int]:
    """The fixed ports a command tells its server to listen on: `--port 9000`, or what docker publishes."""
    try:
        words = split_command(command)
    except ValueError:
        return []
    container = any(word.rpartition("/")[2] in _CONTAINERS for word in words[:2])
    flags = _PUBLISH_FLAGS if container else _PORT_FLAGS
    found = []
    for value in _values(words, flags):
        # 127.0.0.1:9000:8080/tcp: the part before the last colon is the host's
        parts = value.partition("/")[0].split(":")
        port = parts[-2] if container and len(parts) > 1 else parts[-1]
        if port.isascii() and port.isdigit() and len(port) < 6:
            found.append(int(port))
    return found


def _values(words: list[str], flags: Iterable[str]) -> Iterable[str]:
    for word, after in zip(words, [*words[1:], ""], strict=True):
        for flag in flags:
            if word == flag:
                yield after
            elif word.startswith(flag + "="):
                yield word[len(flag) + 1 :]


def lint_ports(ctx: Context, config: Config, environ: Mapping[str, str]) -> None:
    """Note every warning about ports."""
    own = own_port(environ)
    fixed: dict[int, list[Model]] = {}
    for name, model in config.models.items():
        if ctx.problems.failed_under(("models", name)):
            continue
        port = port_of(model.proxy) if host_of(model.proxy) in _LOCAL and model.proxy else None
        _unnamed(ctx, model, port)
        if port is None:
            continue
        if port == own:
            text = f"model {shown(name)}: port {port} is the one qmflask itself listens on"
            where = "proxy" if model.port is None else "cmd"
            ctx.warning(
                text,
                ("models", name, where),
                "own_port",
                allowed="any other port",
                hint="choose another port, or another startPort",
            )
        if port > 65535:
            ctx.warning(
                f"model {shown(name)}: there is no port {port}",
                ("models", name, "proxy"),
                "no_port",
                allowed="1 to 65535",
            )
        if model.port is None and model.cmd.strip():
            fixed.setdefault(port, []).append(model)
    if any(len(models) > 1 for models in fixed.values()):
        policy = policy_of(config)
        for port, models in fixed.items():
            if policy is not None:
                _shared(ctx, policy, port, models)


def _unnamed(ctx: Context, model: Model, port: int | None) -> None:
    ports = command_ports(model.cmd)
    if port is None or not ports or port in ports:
        return
    path = ("models", model.id, "proxy")
    if model.port is not None and port != model.port:
        text = f"model {shown(model.id)}: cmd listens on ${{PORT}}, but proxy names port {port}"
        ctx.warning(
            text, path, "port_mismatch", allowed="the same port", hint="use ${PORT} in proxy too, or leave proxy out"
        )
    else:
        text = f"model {shown(model.id)}: cmd listens on port {ports[0]}, but proxy names port {port}"
        ctx.warning(
            text, path, "port_mismatch", allowed="the same port", hint=f"set proxy to http://127.0.0.1:{ports[0]}"
        )


def _shared(ctx: Context, policy: GroupPolicy | MatrixPolicy, port: int, models: list[Model]) -> None:
    for first, second in combinations(models[:50], 2):
        if may_run_together(policy, first, second):
            text = f"models {shown(first.id)} and {shown(second.id)} both use port {port} and may run together"
            hint = "use ${PORT} in cmd and proxy, so that each gets its own"
            ctx.warning(text, ("models", second.id, "proxy"), "same_port", allowed="a port for each", hint=hint)
            return

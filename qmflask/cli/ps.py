"""`qmflask ps`: what is loaded, what waits and for what, and how full memory is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import click

from qmflask.cli.service import Down, connect, json_option, place_options, print_json, url_option
from qmflask.cli.table import brief, plain, size, span, table

_MODELS = ("model", "state", "since", "vram", "ram", "charged", "busy", "queued", "idle", "stops in", "pid", "port")
_REQUESTS = ("request", "model", "state", "age", "waits for")
_DOWN = ("stopped", "failed")


@click.command("ps")
@click.option("--all", "-a", "everything", is_flag=True, help="Models that are not loaded, too.")
@place_options
@url_option
@json_option
def command(everything: bool, url: str, as_json: bool) -> None:
    """Show the loaded models, the requests, and memory.

    Sizes are GiB: what was measured now, else what the model is charged; `charged` has that of its own pool and where
    it comes from. Without a running service: what the state directory says (QMFLASK_STATE, QMFLASK_CONFIG). Exit code:
    0 shown, 1 refused, 3 no service and no state.
    """
    body, running = look(url)
    if as_json:
        print_json({"running": running, **body})
        return
    if not running:
        click.echo(f"no service at {url}; from the state directory:", err=True)
    click.echo("\n".join(lines(body, everything)))


def look(url: str) -> tuple[dict[str, Any], bool]:
    """The service's state, and whether it runs. Raises Refused, Down."""
    try:
        return connect(url).get("/api/status"), True
    except Down as down:
        from qmflask.cli import local  # it brings the whole service along

        try:
            return local.look(), False
        except click.ClickException as error:
            raise Down(f"{down.message}; {error.message}") from None


def lines(body: Mapping[str, Any], everything: bool = False) -> list[str]:
    """The state for people."""
    models = [model for model in body["models"] if everything or model["state"] != "stopped"]
    found = table(_MODELS, [_model(model) for model in models]) if models else ["no model is loaded"]
    for model in models:
        if failure := model.get("failure"):
            again = f" (again in {span(failure['retry_in'])})" if failure["retry_in"] else ""
            name = plain(model["id"])
            found.append(f"{name}: {brief(name, failure['message'])}{again}; see qmflask logs {shlex.quote(name)}")
    if body["requests"]:
        found += ["", *table(_REQUESTS, [_request(request) for request in body["requests"]])]
    found += ["", *_memory(body["memory"]["pools"])]
    return found + _service(body["service"])


def _model(model: Mapping[str, Any]) -> tuple[str, ...]:
    vram, ram = (_size(model, pool) for pool in ("vram", "ram"))
    up = model["state"] not in _DOWN
    return (
        model["id"],
        model["state"],
        span(model.get("since")),
        vram,
        ram,
        _charged(model),
        str(model["inflight"]),
        str(model["queued"]),
        span(model.get("idle")),
        span(model.get("ttl_left")),
        str(model.get("pid") or "-") if up else "-",
        str(model.get("port") or "-") if up else "-",
    )


def _size(model: Mapping[str, Any], pool: str) -> str:
    sizes = model.get("size") or {}
    measured = (sizes.get("measured") or {}).get(pool)
    charged = (sizes.get("charged") or {}).get(pool)
    if measured is None and not charged:
        return "?" if pool == model.get("pool") else "-"
    return size(charged if measured is None else measured) if measured or charged else "-"


def _charged(model: Mapping[str, Any]) -> str:
    """The charge with its origin; a measurement that overrules an estimate stands beside it."""
    sizes, pool = model.get("size") or {}, model.get("pool")
    charge, origin = (sizes.get("charged") or {}).get(pool), (sizes.get("origin") or {}).get(pool)
    if not charge or not origin:
        return "unknown"
    told = (sizes.get("configured") or {}).get(pool) if origin == "measured" else 0
    return f"{size(charge)} {origin}" + (f", {size(told)} configured" if told else "")


def _request(request: Mapping[str, Any]) -> tuple[str, ...]:
    waits = f"{request['why']} (place {request['position']})" if "why" in request else "-"
    selector = request["detail"].get("selector")
    model = f"{request['model']} (asked: {selector})" if selector else request["model"]
    return request["id"], model, request["state"], span(request["age"]), waits


def _memory(pools: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = []
    for name, pool in pools.items():
        held = sum(share["bytes"] for share in pool["shares"])
        if not held and not pool["budget"]:
            continue
        limit = f" of {size(pool['budget'])}" if pool["budget"] else ""
        if pool["ceiling"] is not None and pool["budget"] and pool["ceiling"] < pool["budget"]:
            limit += f" ({size(pool['ceiling'])} now, other programs have the rest)"
        found.append(f"{name}: models hold {size(held) if held else 0}{limit} GiB")
    return found


def _service(service: Mapping[str, Any]) -> list[str]:
    found = []
    if service["leader"] is not None:
        found.append(f"{len(service['workers'])} workers, process {service['leader']} schedules")
    if service["profile"] is not None:
        found.append(f"profile {plain(service['profile'])} is active")
    if service["config_error"]:
        found.append(click.style(f"configuration not taken: {_first_line(service['config_error'])}", fg="red"))
    return found


def _first_line(text: str) -> str:
    return plain(text.splitlines()[0] if text else "")

"""`qmflask plan MODEL`: what would be stopped to load a model, and why; asks the service, or works without one."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from qmflask.cli.service import Down, connect, json_option, quoted, url_option
from qmflask.config import ConfigError, Model, load
from qmflask.config.units import GIB
from qmflask.configfiles import read_sources
from qmflask.policy.eviction import GroupPolicy, GroupRule, Sizes, gib
from qmflask.policy.plan import what_if
from qmflask.policy.rules import make_rules


@click.command("plan")
@click.argument("model", required=False)
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="Answer from this file, without a service."
)
@click.option("--running", default="", help="Models that run, coldest first, separated by commas.")
@click.option("--ceiling", type=float, help="The live VRAM ceiling in GiB.")
@click.option("--cases", type=click.Path(path_type=Path), help="Answer all cases of a JSON file.")
@url_option
@json_option
def command(
    model: str | None,
    config_path: Path | None,
    running: str,
    ceiling: float | None,
    cases: Path | None,
    url: str,
    as_json: bool,
) -> None:
    """Say what loading MODEL would stop, and why.

    Asks the running service (its key in QMFLASK_API_KEY). With --config it answers for the given --running models
    instead, without a service; with --cases for every case of a file: [{id, config, liveCeilingGB, target, running}].
    Exit code: 0 answered, 1 no answer, 2 wrong usage, 3 no service.
    """
    if cases is not None:
        try:
            answers = _answer_cases(json.loads(cases.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise click.ClickException(f"{cases} cannot be answered: {error!r}") from None
        _print_cases(answers, as_json)
        return
    if not model:
        raise click.UsageError("name a MODEL, or give --cases")
    body = _what_if(config_path, model, running, ceiling) if config_path else _ask(url, model)
    if as_json:
        click.echo(json.dumps(body, indent=2))
    else:
        click.echo("\n".join(_lines(body)))


def _what_if(path: Path, model: str, running: str, ceiling: float | None) -> dict[str, Any]:
    from qmflask.hints import hint  # these two bring much along
    from qmflask.overview import all_sizes

    try:
        config = load(read_sources(path), os.environ).config
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    names = [name.strip() for name in running.split(",") if name.strip()]
    aliases = {alias: found.id for found in config.models.values() for alias in found.aliases}
    wanted = [name if name in config.models else aliases.get(name, name) for name in (model, *names)]
    unknown = [name for name in wanted if name not in config.models]
    if unknown:
        raise click.ClickException(f"not in {path}: {', '.join(unknown)}")
    limit = None if ceiling is None else _up(ceiling)
    body = what_if(make_rules(config, {}), wanted[0], wanted[1:], limit)
    guesses = {name: hint(config.models[name]) for name in dict.fromkeys(wanted) if _unknown(config.models[name])}
    hints = {name: asdict(guess) for name, guess in guesses.items() if guess is not None}
    return {**body, "sizes": all_sizes(config, {}), "hints": hints}


def _unknown(model: Model) -> bool:
    return not (model.est_ram if model.pool == "ram" else model.est_vram)


def _answer_cases(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"id": case.get("id"), "target": case["target"], "victims": _evict(case)} for case in cases]


def _evict(case: dict[str, Any]) -> list[str]:
    """One case by the pure policy, from figures alone: such a case has no commands to check."""
    config = case["config"]
    sizes = {
        name: Sizes(int(model.get("estVramGB", 0) * GIB), int(model.get("estRamGB", 0) * GIB))
        for name, model in config.get("models", {}).items()
    }
    groups = [
        GroupRule(
            name,
            group.get("swap", True),
            group.get("exclusive", True),
            group.get("persistent", False),
            group.get("pool", "vram"),
            tuple(group.get("members", ())),
        )
        for name, group in config.get("groups", {}).items()
    ]
    ceiling = case.get("liveCeilingGB")
    policy = GroupPolicy(sizes, groups, _up(config.get("vramBudgetGB", 0)), _up(config.get("ramBudgetGB", 0)))
    return policy.eviction_for(case["target"], case["running"], None if ceiling is None else _up(ceiling))


def _up(gigabytes: float) -> int:
    """Budgets are rounded up to a byte, charges down: figures that add up exactly on paper fit."""
    return math.ceil(gigabytes * GIB)


def _print_cases(answers: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answers, indent=2))
        return
    for answer in answers:
        click.echo(f"{answer['id']}: {' '.join(answer['victims']) or '-'}")


def _ask(url: str, model: str) -> dict[str, Any]:
    try:
        body: dict[str, Any] = connect(url).get(f"/api/plan?model={quoted(model)}")
    except Down as down:
        raise Down(f"{down.message}; --config FILE answers without one") from None
    return body


def _lines(body: dict[str, Any]) -> list[str]:
    """The plan for people."""
    lines = []
    if "decision" in body:
        lines.append(f"{body['model']} ({body['state']}): {body['decision']} - {body['why']}")
    elif body["refused"]:
        lines.append(f"refused: {body['refused']}; nothing would be stopped")
    elif body["victims"]:
        lines += list(body["victims"])
    else:
        lines.append("nothing would be stopped")
    refused = body.get("decision") == "refuse" or body.get("refused")
    for pool in [] if refused else body.get("pools", []):
        cap = f", {gib(pool['cap'])} in force now" if pool["cap"] != pool["budget"] else ""
        limit = f"of {gib(pool['budget'])}{cap}" if pool["budget"] else "without a budget"
        size = _size(body, body["model"], pool["pool"], pool["charge"])
        sums = f", {gib(pool['total'])} with all that runs, {gib(pool['after'])} then" if pool["residents"] else ""
        lines.append(f"{pool['pool']} ({pool['rule']} rule): {size} for {body['model']}{sums}, {limit}")
        for line in pool["residents"]:
            mark = "stop" if line["stops"] else "keep"
            size = _size(body, line["model"], pool["pool"], line["charge"])
            lines.append(f"  {mark}  {line['model']}  {size}  {line['why']}")
    return lines + _others(body.get("others") or {}) + [f"note: {note}" for note in body.get("notes", [])]


def _size(body: dict[str, Any], model: str, pool: str, charge: int) -> str:
    """A charge and where it comes from; for one of unknown size what its header or its file suggests."""
    if charge:
        origin = body.get("sizes", {}).get(model, {}).get(pool, {}).get("origin")
        return f"{gib(charge)} {origin}" if origin else gib(charge)
    guess = body.get("hints", {}).get(model)
    if guess and guess[pool]:
        return f"unknown size (its {guess['origin']} suggests {gib(guess[pool])})"
    return "nothing" if body.get("sizes", {}).get(model, {}).get("pool", pool) != pool else "unknown size"


def _others(seen: dict[str, Any]) -> list[str]:
    """What programs of others hold on the cards, as far as a sample tells."""
    if seen.get("why"):
        return [f"others: {seen['why']}; the configured budget holds"]
    if not seen.get("foreign"):
        return []
    names = ", ".join(f"{one['name']} {gib(one['bytes'])}" for one in seen.get("foreign_processes") or ())
    growth = f"{gib(seen['excess'])} above the floor of {gib(seen['floor'])}" if seen["excess"] else "their floor"
    return [f"others: {gib(seen['foreign'])} on the cards, {growth}{f': {names}' if names else ''}"]

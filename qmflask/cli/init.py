"""`qmflask init FOLDER`: writes a first configuration from a folder of GGUF files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import click

from qmflask.cli import firstconfig
from qmflask.cli.examine import cards
from qmflask.cli.firstconfig import Entry, Found
from qmflask.cli.service import json_option, print_json
from qmflask.cli.table import GIB, size, table
from qmflask.config import ConfigError, Source, load
from qmflask.host import Host
from qmflask.memory.estimate import Estimate
from qmflask.memory.gguf import GGUFError
from qmflask.modelfiles import read_model
from qmflask.places import is_there


@click.command("init")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--output", "-o", default="qmflask.yaml", show_default=True, help="File to write; - for stdout.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option("--server", default="llama-server", show_default=True, help="The program that serves the models.")
@click.option("--ctx", type=click.IntRange(min=512), default=16384, show_default=True, help="Most tokens of context.")
@click.option("--vram", type=click.FloatRange(min=0), help="VRAM budget in GiB. [what the cards have]")
@json_option
@click.option("--ram", type=click.FloatRange(min=0), help="RAM budget in GiB. [three quarters of the machine's]")
def command(
    folder: Path,
    output: str,
    force: bool,
    server: str,
    ctx: int,
    vram: float | None,
    ram: float | None,
    as_json: bool,
) -> None:
    """Write a configuration for the GGUF files in FOLDER and below.

    Each gets a name, a command, sizes from its header and a place on card or processor; a projector (mmproj) beside
    a model is used with it. Exit code: 0 written, 1 not.
    """
    if not folder.is_dir():
        raise click.ClickException(f"{folder} is no folder")
    target = None if output == "-" else Path(output)
    if target is not None and is_there(target) and not force:
        raise click.ClickException(f"{target} is there already; --force replaces it, -o names another file")
    vram_budget, ram_budget = _budgets(vram, ram)
    found, unreadable = _scan(folder.absolute())
    entries, refused = _decide(found, ctx, vram_budget, ram_budget)
    if not entries:
        what = f": {unreadable[0]}" if unreadable else ""
        raise click.ClickException(f"no GGUF model in {folder}{what}")
    program = shutil.which(server) or server
    text = firstconfig.text(entries, program, vram_budget, ram_budget, [*unreadable, *refused])
    _prove(text)
    if target is not None:
        _write(target, text)
    if as_json:
        print_json(_document(entries, target, text, [*unreadable, *refused]))
    elif target is None:
        click.echo(text, nl=False)
    else:
        _tell(entries, target)
    if shutil.which(server) is None:
        click.echo(f"{server} is not in PATH: install it, or run this again with --server /its/path", err=True)


def _budgets(vram: float | None, ram: float | None) -> tuple[int, int]:
    total = 0 if vram is not None else sum(card.total for card in cards())
    found_vram, found_ram = firstconfig.budgets(total, Host().memory().total)
    return (
        found_vram if vram is None else int(vram * GIB),
        found_ram if ram is None else int(ram * GIB),
    )


def _scan(folder: Path) -> tuple[list[Found], list[str]]:
    """The models of a folder, and what could not be read."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    models = [path for path in paths if firstconfig.is_model(path.name)]
    projectors = [path for path in paths if firstconfig.is_projector(path.name)]
    found, unreadable = [], []
    for path in models:
        beside = [p for p in projectors if p.parent == path.parent]
        alone = sum(other.parent == path.parent for other in models) == 1
        try:
            header = read_model(path)
            if beside and alone:
                found.append(Found(str(path), header, str(beside[0]), read_model(beside[0])))
            else:
                found.append(Found(str(path), header))
        except GGUFError as error:
            unreadable.append(str(error))
    return found, unreadable


def _decide(found: list[Found], ctx: int, vram: int, ram: int) -> tuple[list[Entry], list[str]]:
    entries, refused = [], []
    for name, one in zip(firstconfig.names_of([one.path for one in found]), found, strict=True):
        try:
            entries.append(firstconfig.decide(name, one, ctx, vram, ram))
        except GGUFError as error:
            refused.append(f"{one.path}: {error}")
    return entries, refused


def _prove(text: str) -> None:
    """What is written must load."""
    try:
        load([Source("the new file", text)], os.environ)
    except ConfigError as error:
        raise click.ClickException(f"this is a fault of qmflask init, please report it: {error}") from None


def _write(target: Path, text: str) -> None:
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{target} cannot be written: {error.strerror}") from None


def _document(entries: list[Entry], target: Path | None, text: str, left_out: list[str]) -> dict[str, Any]:
    """What was decided; a model that fits nowhere has no sizes."""
    models = [
        {
            "name": entry.name,
            "path": entry.found.path,
            "kind": entry.kind,
            "pool": entry.pool,
            "context": entry.context,
            "vram": entry.estimate.vram if entry.estimate else None,
            "ram": entry.estimate.ram if entry.estimate else None,
        }
        for entry in entries
    ]
    return {"file": str(target) if target else None, "models": models, "left_out": left_out, "text": text}


def _figures(estimate: Estimate) -> tuple[str, str]:
    vram, ram = (size(count) if count else "-" for count in (estimate.vram, estimate.ram))
    return vram, ram


def _tell(entries: list[Entry], target: Path) -> None:
    rows = [
        (entry.name, entry.kind, entry.pool, str(entry.context), *_figures(entry.estimate))
        if entry.estimate
        else (entry.name, entry.kind, "too large", "-", "-", "-")
        for entry in entries
    ]
    click.echo("\n".join(table(("model", "kind", "memory", "context", "vram", "ram"), rows)))
    click.echo(f"\n{target} is written. Next:\n  qmflask check {target}\n  qmflask serve --config {target}")

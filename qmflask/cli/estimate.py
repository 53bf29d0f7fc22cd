"""`qmflask estimate`: how much memory a GGUF model will take, as a table and as keys to paste."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from qmflask.askserver import AskError, ask, free_port
from qmflask.cli.table import span
from qmflask.cli.waiting import told
from qmflask.config import Config, ConfigError, LaunchError, Model, load
from qmflask.configfiles import read_sources
from qmflask.hints import command_of, estimate_of
from qmflask.memory.estimate import Estimate, Row, Settings
from qmflask.memory.gguf import GGUFError
from qmflask.memory.llama import Command
from qmflask.memory.samples import GIB, MIB
from qmflask.policy.eviction import gib


@click.command("estimate")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="Every llama-server model of a configuration."
)
@click.option("--ctx", type=click.IntRange(min=0), default=0, help="Context in tokens; 0: the model's own.")
@click.option("--kv", "cache", metavar="TYPE", default="f16", help="Cache type: f16, q8_0, q4_0 ...")
@click.option("--ngl", type=int, help="Layers on the card; without it all, 0 for none.")
@click.option("--parallel", type=click.IntRange(min=1), help="Slots; without it as llama-server does.")
@click.option("--ubatch", type=click.IntRange(min=1), default=512, help="Tokens computed at once.")
@click.option("--mmproj", type=click.Path(path_type=Path), help="A projector's file.")
@click.option("--draft", type=click.Path(path_type=Path), help="A draft model's file.")
@click.option("--ask-server", is_flag=True, help="Start the server and read what it allocates (takes a load).")
@click.option("--server", default="llama-server", help="The program that --ask-server starts for FILE.")
@click.option("--timeout", type=float, default=600, help="Seconds that --ask-server waits.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    file: Path | None,
    config_path: Path | None,
    ctx: int,
    cache: str,
    ngl: int | None,
    parallel: int | None,
    ubatch: int,
    mmproj: Path | None,
    draft: Path | None,
    ask_server: bool,
    server: str,
    timeout: float,
    as_json: bool,
) -> None:
    """Estimate the memory of a GGUF FILE, or of all models of a --config, from headers alone.

    The figures are hints: what a model is charged is its configured estimate or what was measured.
    Exit code: 0 all estimated, 1 some not, 2 wrong usage.
    """
    if (file is None) == (config_path is None):
        raise click.UsageError("give a FILE or --config")
    if config_path is not None:
        _configured(config_path, timeout if ask_server else None, as_json)
        return
    settings = Settings(
        context=ctx, parallel=parallel, cache_k=cache, cache_v=cache, gpu_layers=ngl, micro_batch=ubatch
    )
    wanted = Command(
        str(file), settings, str(mmproj) if mmproj else None, str(draft) if draft else None, replace(settings)
    )
    try:
        found = estimate_of(wanted)
        if ask_server:
            found = _instead(found, _ask(_server_argv(server, wanted), {}, timeout, as_json))
    except (GGUFError, AskError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(_document(found), indent=2))
    else:
        click.echo("\n".join([*_table(found), "", found.yaml()]))


def _server_argv(server: str, wanted: Command) -> list[str]:
    program = shutil.which(server)
    if program is None:
        raise AskError(f"{server} is not installed; name the program with --server")
    settings = wanted.settings
    argv = [program, "-m", wanted.model, "--host", "127.0.0.1", "--port", str(free_port())]
    argv += ["-c", str(settings.context), "-ub", str(settings.micro_batch)]
    argv += ["-ctk", settings.cache_k, "-ctv", settings.cache_v]
    argv += ["-np", str(settings.parallel)] if settings.parallel else []
    argv += ["-ngl", str(settings.gpu_layers)] if settings.gpu_layers is not None else []
    argv += ["--mmproj", wanted.projector] if wanted.projector else []
    argv += ["-md", wanted.draft] if wanted.draft else []
    return argv


def _configured(path: Path, ask_timeout: float | None, as_json: bool) -> None:
    """All models of a configuration whose command names a GGUF file; the others are said to be left out."""
    try:
        config = load(read_sources(path), os.environ).config
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    found: dict[str, Estimate] = {}
    faults: dict[str, str] = {}
    for model in config.models.values():
        try:
            found[model.id] = _one(model, ask_timeout, as_json)
        except (GGUFError, AskError, LaunchError) as error:
            faults[model.id] = str(error)
    if as_json:
        documents: dict[str, Any] = {name: _document(one) for name, one in found.items()}
        click.echo(json.dumps({**documents, **{name: {"error": text} for name, text in faults.items()}}, indent=2))
    else:
        _print_configured(config, found, faults)
    if faults:
        raise SystemExit(1)


def _ask(argv: Sequence[str], env: Mapping[str, str], timeout: float, quiet: bool) -> tuple[Row, ...]:
    since = time.monotonic()
    name = Path(argv[0]).name
    with told(lambda: f"{name} loads the model: {span(time.monotonic() - since)}", quiet=quiet):
        return tuple(ask(argv, env, timeout))


def _one(model: Model, ask_timeout: float | None, quiet: bool) -> Estimate:
    port = free_port() if ask_timeout is not None else None
    wanted = command_of(model, port)
    launch = model.launch(port)
    found = estimate_of(wanted)
    if ask_timeout is None:
        return found
    return _instead(found, _ask(launch.argv, launch.env, ask_timeout, quiet))


def _instead(found: Estimate, rows: tuple[Row, ...]) -> Estimate:
    """The estimate with what the server tells instead; a projector of which it says nothing stays estimated."""
    names = {row.name for row in rows}
    kept = [row for row in found.rows if row.name == "projector" and row.name not in names]
    return replace(found, rows=(*rows, *kept))


def _print_configured(config: Config, found: dict[str, Estimate], faults: dict[str, str]) -> None:
    for name, one in found.items():
        model = config.models[name]
        known = [
            f"{key} is {size / GIB:g}"
            for key, size in (("estVramGB", model.est_vram), ("estRamGB", model.est_ram))
            if size
        ]
        click.echo("\n".join([f"# {name}" + (f" ({', '.join(known)} now)" if known else ""), *_table(one), ""]))
    if found:
        click.echo("models:")
        for name, one in found.items():
            click.echo(f"  {json.dumps(name, ensure_ascii=False)}:")
            click.echo("\n".join(f"    {line}" for line in one.yaml().splitlines()))
    for name, text in faults.items():
        click.echo(f"not estimated: {name}: {text}", err=True)


def _table(found: Estimate) -> list[str]:
    width = max(len(row.name) for row in found.rows)
    lines = [f"{found.model}, context {found.context}", f"{'':{width}}  {'VRAM':>12}  {'RAM':>12}"]
    for name, vram, ram in [*((r.name, r.vram, r.ram) for r in found.rows), ("sum", found.vram, found.ram)]:
        lines.append(f"{name:{width}}  {_size(vram):>12}  {_size(ram):>12}")
    return lines + [f"note: {note}" for note in found.notes]


def _size(size: int) -> str:
    """Small models are told in MiB, or they would read as nothing."""
    if not size:
        return "-"
    return gib(size) if size >= GIB else f"{size / MIB:.1f} MiB"


def _document(found: Estimate) -> dict[str, Any]:
    return {
        "model": found.model,
        "context": found.context,
        "rows": [{"name": row.name, "vram": row.vram, "ram": row.ram} for row in found.rows],
        "vram": found.vram,
        "ram": found.ram,
        "yaml": found.yaml(),
        "notes": list(found.notes),
    }

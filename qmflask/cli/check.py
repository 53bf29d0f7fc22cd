"""`qmflask check`: says all that is wrong or doubtful in a configuration, and how each model would be started."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unicodedata import east_asian_width

import click

from qmflask.cli.table import plural
from qmflask.config import Config, ConfigError, LaunchError, Model, Problem, Report, analyse
from qmflask.config.units import show_size
from qmflask.config.view import view
from qmflask.configfiles import path_fault, read_sources

_COLOURS = {"error": "red", "warning": "yellow"}
_HEADS = ("model", "port", "group", "pool", "vram", "ram", "ttl", "command")


@click.command("check")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--config-dir", type=click.Path(path_type=Path), help="Merge the YAML files of this folder too.")
@click.option("--json", "as_json", is_flag=True, help="Print {errors, warnings, config} as JSON, keys and all.")
@click.option("--strict", is_flag=True, help="Exit 1 for warnings too.")
def command(path: Path | None, config_dir: Path | None, as_json: bool, strict: bool) -> None:
    """Check a configuration, a file or a folder of files, without starting anything.

    Without PATH: what QMFLASK_CONFIG names, else the shipped demonstration. Unknown keys are errors here. Exit code:
    0 good, 1 errors (with --strict: or warnings).
    """
    unnamed = path is None
    if path is None:
        from qmflask.places import source_path

        path = source_path()
    report = _report(path, config_dir)
    if as_json:
        _print_json(report)
    else:
        if unnamed:
            click.echo(f"{path}:")
        _print_text(report)
    sys.exit(1 if report.errors or (strict and report.warnings) else 0)


def _report(path: Path, config_dir: Path | None) -> Report:
    try:
        sources = read_sources(path, config_dir)
    except ConfigError as error:
        return Report(None, error.problems, ())
    report = analyse(sources, os.environ, strict=True, path_fault=path_fault)
    return report if report.config is None else replace(report, warnings=(*report.warnings, *_cards(report.config)))


def _cards(config: Config) -> Iterator[Problem]:
    """What this machine's cards have to say to the configuration; without a budget they are not asked."""
    if not config.vram_budget:
        return
    from qmflask.cli import examine  # it brings the whole service along

    if (several := examine.several_cards(config.vram_budget, examine.cards())) is not None:
        text, hint = several
        yield Problem("warning", text, path="vramBudgetGB", hint=hint, code="several_cards")


def _print_json(report: Report) -> None:
    document = {
        "errors": [problem.as_dict() for problem in report.errors],
        "warnings": [problem.as_dict() for problem in report.warnings],
        "config": None if report.config is None else view(report.config),
    }
    click.echo(json.dumps(document, indent=2, ensure_ascii=True, default=str))


def _print_text(report: Report) -> None:
    for problem in (*report.errors, *report.warnings):
        _print_problem(problem)
    if report.config is not None and report.config.models:
        if report.errors or report.warnings:
            click.echo()
        _print_table(report.config)
        click.echo()
    errors, warnings = len(report.errors), len(report.warnings)
    models = len(report.config.models) if report.config else 0
    click.secho(
        f"{plural(errors, 'error')}, {plural(warnings, 'warning')}, {plural(models, 'model')}",
        fg="red" if errors else "yellow" if warnings else "green",
    )


def _print_problem(problem: Problem) -> None:
    label = click.style(problem.severity, fg=_COLOURS.get(problem.severity), bold=True)
    click.echo(f"{label}: {problem.text()}")


def _print_table(config: Config) -> None:
    rows = [_HEADS, *(_row(model) for model in config.models.values())]
    widths = [max(_width(row[column]) for row in rows) for column in range(len(_HEADS) - 1)]
    room = max(30, _terminal_width() - sum(widths) - 2 * len(widths))
    for number, row in enumerate(rows):
        line = _line(row, widths, room)
        click.echo(click.style(line, bold=True) if number == 0 else line)


def _terminal_width() -> int:
    """Whole commands where nobody looks at a terminal, so that they can be searched for."""
    return os.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def _width(text: str) -> int:
    """Columns on a terminal; ideographs take two."""
    return sum(2 if east_asian_width(char) in "WF" else 1 for char in text)


def _line(row: Sequence[str], widths: Sequence[int], room: int) -> str:
    cells = [cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=False)]
    last = row[-1] if len(row[-1]) <= room else row[-1][: room - 3] + "..."
    return "  ".join([*cells, last]).rstrip()


def _row(model: Model) -> tuple[str, ...]:
    try:
        launch = model.launch()
        shown = shlex.join(launch.argv)
    except LaunchError as error:
        shown = f"({error})"
    return tuple(
        text.encode("unicode_escape").decode() if not text.isprintable() else text
        for text in (
            model.id,
            str(model.port) if model.port is not None else "-",
            model.group,
            model.pool,
            show_size(model.est_vram) if model.est_vram else "?",
            show_size(model.est_ram) if model.est_ram else "?",
            f"{model.ttl} s" if model.ttl else "never",
            shown,
        )
    )

"""`qmflask schema`: the JSON Schema of the configuration, for editors."""

from __future__ import annotations

import json
from pathlib import Path

import click

from qmflask.config.reference import json_schema, with_table


@click.command("schema")
@click.option("--update", type=click.Path(path_type=Path, exists=True, dir_okay=False), hidden=True)
def command(update: Path | None) -> None:
    """Print the JSON Schema of the configuration file.

    Editors that speak YAML use it: put `# yaml-language-server: $schema=PATH` into the first line of the file.
    """
    if update is not None:
        update.write_text(with_table(update.read_text(encoding="utf-8")), encoding="utf-8")
        return
    click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))

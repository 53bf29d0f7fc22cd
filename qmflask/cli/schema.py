"""`qmflask schema`: the JSON Schema of the configuration, for editors."""

from __future__ import annotations

import json

import click

from qmflask.config.reference import json_schema


@click.command("schema")
def command() -> None:
    """Print the JSON Schema of the configuration file.

    Editors that speak YAML use it: put `# yaml-language-server: $schema=PATH` into the first line of the file.
    """
    click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))

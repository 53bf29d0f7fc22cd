"""`qmflask example NAME`: prints a file to begin with, for those who have the package but not the repository."""

from __future__ import annotations

from pathlib import Path

import click

#: Name -> file of the package's folder `conf`.
FILES = {
    "demo": "quartermaster.yaml",
    "config": "example.yaml",
    "nginx": "nginx.conf",
    "systemd": "qmflask.service",
    "passenger": "passenger_wsgi.py",
    "grafana": "grafana.json",
}


@click.command("example")
@click.argument("name", type=click.Choice(list(FILES)))
def command(name: str) -> None:
    """Print an example: a configuration with every key (config), the demonstration's (demo), or a file for nginx,
    systemd, Passenger or Grafana."""
    path = Path(__file__).resolve().parent.parent / "conf" / FILES[name]
    click.echo(path.read_text(encoding="utf-8"), nl=False)

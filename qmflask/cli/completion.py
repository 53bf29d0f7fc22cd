"""`qmflask completion SHELL`, and the names of models that it completes."""

from __future__ import annotations

import os

import click
from click.shell_completion import get_completion_class

from qmflask.cli.service import DEFAULT_URL, Service

#: Seconds; nobody waits longer for a tab.
PATIENCE = 1.0


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print what makes SHELL complete commands, options and the names of models.

    bash: `eval "$(qmflask completion bash)"` in ~/.bashrc; zsh the same in ~/.zshrc; fish: `qmflask completion fish >
    ~/.config/fish/completions/qmflask.fish`.
    """
    found = get_completion_class(shell)
    assert found is not None
    root = click.get_current_context().find_root().command
    click.echo(found(root, {}, "qmflask", "_QMFLASK_COMPLETE").source())


def complete_models(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Ids and aliases of the service's models, else of the configuration's."""
    return [name for name in _names() if name.startswith(incomplete)]


def complete_profiles(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of the service's profiles."""
    service = Service(os.environ.get("QMFLASK_URL") or DEFAULT_URL, os.environ.get("QMFLASK_API_KEY"))
    try:
        rows = service.get("/api/profiles", timeout=PATIENCE)["profiles"]
    except (click.ClickException, KeyError, TypeError):
        return []
    return [row["id"] for row in rows if row["id"].startswith(incomplete)]


def _names() -> list[str]:
    service = Service(os.environ.get("QMFLASK_URL") or DEFAULT_URL, os.environ.get("QMFLASK_API_KEY"))
    try:
        rows = service.get("/v1/models", timeout=PATIENCE)["data"]
        return sorted({name for row in rows for name in (row["id"], *row["meta"]["qmflask"].get("aliases", ()))})
    except (click.ClickException, KeyError, TypeError):
        pass  # a tab is no place for messages
    from qmflask.cli.local import config_in_force

    config = config_in_force()
    return sorted({n for m in config.models.values() for n in (m.id, *m.aliases)}) if config else []

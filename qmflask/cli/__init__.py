"""The command line `qmflask`; each command is a module of its own, imported only when it is asked for."""

from __future__ import annotations

from importlib import import_module

import click

from qmflask import __version__

#: Command -> module of this package whose `command` it is. A new command needs a line here.
COMMANDS = {
    "check": "check",
    "estimate": "estimate",
    "plan": "plan",
    "schema": "schema",
}


class Commands(click.Group):
    """Imports a command's module when it is used, so that `qmflask check` does not wait for the rest."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands in alphabetical order."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None when there is none of that name."""
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        found = import_module(f"qmflask.cli.{module}").command
        assert isinstance(found, click.Command)
        return found


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="qmflask")
def main() -> None:
    """One OpenAI- and Anthropic-compatible endpoint in front of many local model servers."""

"""The command line `qmflask`; each command is a module of its own, imported only when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from qmflask import __version__

#: Command -> module of this package and the command in it. A new command needs a line here.
COMMANDS = {
    "cancel": ("asking", "cancel"),
    "check": ("check", "command"),
    "completion": ("completion", "command"),
    "doctor": ("doctor", "command"),
    "estimate": ("estimate", "command"),
    "example": ("example", "command"),
    "init": ("init", "command"),
    "load": ("loading", "load"),
    "logs": ("logs", "command"),
    "plan": ("plan", "command"),
    "profile": ("profile", "command"),
    "ps": ("ps", "command"),
    "reload": ("asking", "reload"),
    "schema": ("schema", "command"),
    "serve": ("serve", "command"),
    "top": ("top", "command"),
    "unload": ("loading", "unload"),
}


class Commands(click.Group):
    """Imports a command's module when it is used, so that `qmflask check` does not wait for the rest."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands in alphabetical order."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None when there is none of that name."""
        module, name = COMMANDS.get(cmd_name, ("", ""))
        if not module:
            return None
        found = getattr(import_module(f"qmflask.cli.{module}"), name)
        assert isinstance(found, click.Command)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a place that this user may not enter is told in a line, whoever met it."""
        try:
            return super().invoke(ctx)
        except PermissionError as error:
            if error.filename is None:
                raise
            mend = "run as the user to whom it belongs, or name another place"
            raise click.ClickException(f"{error.filename}: Permission denied; {mend}") from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="qmflask")
def main() -> None:
    """One OpenAI- and Anthropic-compatible endpoint in front of many local model servers.

    \b
    QMFLASK_URL      the running service [http://127.0.0.1:8080], also unix:/PATH
    QMFLASK_API_KEY  its key, where it has keys; most commands need an admin's
    QMFLASK_CONFIG   the configuration, a file or a folder
    QMFLASK_STATE    the state directory

    Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 no service.
    """

"""`qmflask profile [NAME]`: which profiles there are, and which one is active; makes one active, or none."""

from __future__ import annotations

from typing import Any

import click

from qmflask.cli.completion import complete_profiles
from qmflask.cli.service import connect, json_option, print_json, url_option
from qmflask.cli.table import plain, table


@click.command("profile")
@click.argument("name", required=False, shell_complete=complete_profiles)
@click.option("--none", "no_profile", is_flag=True, help="Make no profile active.")
@url_option
@json_option
def command(name: str | None, no_profile: bool, url: str, as_json: bool) -> None:
    """Show the profiles, or make the profile NAME active for all requests from now on.

    It stays active over reloads, restarts and failovers. Exit code: 0 done, 1 refused or no such profile, 3 no
    service.
    """
    if name is not None and no_profile:
        raise click.UsageError("give NAME or --none")
    service = connect(url)
    if name is not None or no_profile:
        body = service.put("/api/profiles/active", {"name": name})
        text = "no profile is active" if no_profile else f"the profile {plain(str(body['active']))} is active"
    else:
        body = service.get("/api/profiles")
        text = "\n".join(_lines(body))
    if as_json:
        print_json(body)
    else:
        click.echo(text)


def _lines(body: dict[str, Any]) -> list[str]:
    if not body["profiles"]:
        return ["no profiles are configured"]
    rows = [_row(profile, profile["id"] == body["active"]) for profile in body["profiles"]]
    return table(("profile", "", "pins", "description"), rows)


def _row(profile: dict[str, Any], active: bool) -> tuple[str, ...]:
    pins = ", ".join(f"{pin} -> {target or '(nothing)'}" for pin, target in profile["pins"].items())
    return profile["id"], "active" if active else "", pins or "-", profile["description"] or "-"

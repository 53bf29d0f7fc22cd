"""`qmflask logs [-f] [MODEL]`: the log of a model's server, or qmflask's own."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from qmflask.cli.completion import complete_models
from qmflask.cli.service import Down, connect, place_options, quoted, url_option

#: Seconds between two looks; a look holds no thread of the service.
LOOK = 0.4

#: cursor -> (text after it, next cursor, bytes that were dropped between)
Read = Callable[[str], tuple[str, str, int]]


@click.command("logs")
@click.argument("model", required=False, shell_complete=complete_models)
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes, also over new starts; Ctrl-C ends it.")
@click.option("--lines", "-n", type=click.IntRange(min=0), help="Only the last so many lines.")
@click.option("--previous", "-p", is_flag=True, help="Of the start before the last.")
@place_options
@url_option
def command(model: str | None, follow: bool, lines: int | None, previous: bool, url: str) -> None:
    """Print the log of MODEL's server, or without MODEL qmflask's own.

    At most the last 100 KiB. Without a running service the files of the state directory are read. Exit code: 0 printed,
    1 refused, 3 no service and no state directory.
    """
    if follow and previous:
        raise click.UsageError("a start that is over cannot be followed")
    read = _reader(url, model, previous)
    text, cursor, _ = read("")
    if lines is not None:
        text = "".join(text.splitlines(keepends=True)[-lines:] if lines else [])
    click.echo(text, nl=False)
    while follow:
        try:
            time.sleep(LOOK)
            text, cursor, dropped = _patient(read, cursor)
        except KeyboardInterrupt:
            return
        if dropped:
            click.echo(f"\n[{dropped} bytes dropped]")
        click.echo(text, nl=False)


def _patient(read: Read, cursor: str) -> tuple[str, str, int]:
    """A service that restarts is waited for."""
    try:
        return read(cursor)
    except Down:
        return "", cursor, 0


def _reader(url: str, model: str | None, previous: bool) -> Read:
    """Reads through the service, or from the files where there is none. Raises Refused, Down."""
    service = connect(url)
    path = f"/api/logs/{quoted(model) if model else 'proxy'}?{'previous&' if previous else ''}after="

    def through_service(cursor: str) -> tuple[str, str, int]:
        body = service.get(path + quoted(cursor))
        return body["text"], body["cursor"], body["dropped"]

    try:
        service.text("/health")
    except Down as down:
        return _from_files(model, previous, down)
    return through_service


def _from_files(model: str | None, previous: bool, down: Down) -> Read:
    from qmflask.cli import local  # it brings the whole service along
    from qmflask.logfiles import ModelLog
    from qmflask.logtail import read_after, service_log
    from qmflask.places import is_there

    folder = local.state_directory() / "logs"
    log = ModelLog(folder, local.model_id(model)) if model else service_log(folder)
    if previous:
        log.path = log.previous
    if not is_there(log.path):
        raise Down(f"{down.message}; and {folder} has no such log") from None
    click.echo(f"no service; from {log.path}:", err=True)

    def from_file(cursor: str) -> tuple[str, str, int]:
        piece = read_after(log, cursor)
        return piece.data.decode("utf-8", "replace"), piece.cursor, piece.dropped

    return from_file

"""`qmflask top`: what `ps` shows, again and again."""

from __future__ import annotations

import sys
import time

import click

from qmflask.cli.ps import lines
from qmflask.cli.service import Down, connect, url_option


@click.command("top")
@click.option("--every", "-d", type=click.FloatRange(min=0.2), default=1.0, show_default=True, help="Seconds.")
@click.option("--times", "-n", type=click.IntRange(min=1), help="End after so many looks.")
@click.option("--all", "-a", "everything", is_flag=True, help="Models that are not loaded, too.")
@url_option
def command(every: float, times: int | None, everything: bool, url: str) -> None:
    """Show models, requests and memory, renewed each second; Ctrl-C ends it.

    Exit code: 0, also after Ctrl-C; 1 refused; 3 no service at the first look.
    """
    service = connect(url)
    shown = 0
    while times is None or shown < times:
        try:
            if shown:
                time.sleep(every)
            text = "\n".join(lines(service.get("/api/status"), everything))
        except KeyboardInterrupt:
            return
        except Down as down:
            if not shown:
                raise
            text = down.message  # a restart is no reason to end
        shown += 1
        if sys.stdout.isatty():
            click.clear()
        click.echo(f"{time.strftime('%H:%M:%S')}  {url}\n\n{text}")

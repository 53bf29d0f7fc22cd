"""`qmflask serve`: gunicorn with the shipped settings, from any folder."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import click

#: gunicorn 27 has no such list; this is where its settings of ours are.
_SETTINGS = "python:qmflask.gunicorn_conf"


def _addresses(_context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """The addresses as they are. Raises BadParameter for one that gunicorn would end with a traceback for."""
    for address in given:
        if not _is_address(address):
            raise click.BadParameter(
                f"{address!r} is no address to listen at: HOST:PORT with a port from 0 to 65535, as in 127.0.0.1:8080, "
                "or unix:/PATH"
            )
    return given


def _is_address(address: str) -> bool:
    if address.startswith("unix:"):
        return address.removeprefix("unix:").strip("/") != ""
    if address.startswith("fd://"):
        return address.removeprefix("fd://").isdecimal()
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        return False
    if host.startswith("[") or ":" in host:
        if not (host.startswith("[") and host.endswith("]")):
            return False
        host = host[1:-1]
    try:
        socket.getaddrinfo(host or None, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return True


@click.command("serve", context_settings={"ignore_unknown_options": True})
@click.option("--config", type=click.Path(path_type=Path), help="File or folder (QMFLASK_CONFIG).")
@click.option("--state", type=click.Path(path_type=Path), help="State directory, on a local disk (QMFLASK_STATE).")
@click.option(
    "--bind", "-b", multiple=True, callback=_addresses, help="HOST:PORT or unix:PATH; may be repeated. [127.0.0.1:8080]"
)
@click.option("--workers", "-w", type=click.IntRange(min=1), help="Processes. [as many as cores, 2 to 4]")
@click.option("--threads", "-t", type=click.IntRange(min=2), help="Requests at once in each of them. [64]")
@click.argument("gunicorn_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- GUNICORN OPTIONS]")
def command(
    config: Path | None,
    state: Path | None,
    bind: tuple[str, ...],
    workers: int | None,
    threads: int | None,
    gunicorn_args: tuple[str, ...],
) -> None:
    """Serve until Ctrl-C or TERM; the models stop with the service, unless `onShutdown: keep`.

    Without --config and QMFLASK_CONFIG the demonstration is served. Exit code: gunicorn's own; 1 for a configuration
    with errors.
    """
    if config is not None:
        os.environ["QMFLASK_CONFIG"] = str(config.absolute())
    if state is not None:
        os.environ["QMFLASK_STATE"] = str(state.absolute())
    _check()
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *arguments(bind, workers, threads, gunicorn_args)])


def arguments(bind: tuple[str, ...], workers: int | None, threads: int | None, more: tuple[str, ...] = ()) -> list[str]:
    """What Python is to run; what is not given is left to the settings."""
    found = ["-m", "gunicorn", "-c", _SETTINGS]
    for address in bind:
        found += ["--bind", address]
    if workers is not None:
        found += ["--workers", str(workers)]
    if threads is not None:
        found += ["--threads", str(threads), "--worker-connections", str(threads)]
    return [*found, *more]


def _check() -> None:
    """Say what is wrong with the configuration before gunicorn begins to talk."""
    from qmflask.config import ConfigError
    from qmflask.configfiles import load_path
    from qmflask.places import demonstration, source_path

    source = source_path()
    try:
        load_path(source, os.environ)
    except ConfigError as error:
        raise click.ClickException(f"the configuration has errors:\n{error}") from None
    if source == demonstration():
        click.echo("serving the demonstration; your own: `qmflask init FOLDER`, then `qmflask serve --config FILE`")

"""`qmflask doctor`: looks at everything that people ask about when it does not work, and says how to mend it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from qmflask import __version__
from qmflask.cli.findings import Finding, fail, ok, warn
from qmflask.cli.service import Down, Refused, Service, connect, json_option, place_options, print_json, url_option
from qmflask.cli.table import brief, plain

_MARKS = {"ok": ("ok  ", "green"), "warn": ("WARN", "yellow"), "fail": ("FAIL", "red")}


@click.command("doctor")
@place_options
@url_option
@json_option
def command(url: str, as_json: bool) -> None:
    """Look for what is wrong with this installation and its service, and say how to mend it.

    Changes nothing. Exit code: 0 nothing is wrong (there may be warnings), 1 something is.
    """
    found = list(_examine(connect(url)))
    if as_json:
        print_json([finding.as_dict() for finding in found])
    else:
        click.echo("\n".join(line for finding in found for line in _lines(finding)))
    if any(finding.grade == "fail" for finding in found):
        raise SystemExit(1)


def _lines(finding: Finding) -> Iterator[str]:
    mark, colour = _MARKS[finding.grade]
    yield f"{click.style(mark, fg=colour)}  {finding.topic}: {plain(finding.text)}"
    if finding.mend:
        yield f"      -> {plain(finding.mend)}"


def _examine(service: Service) -> Iterator[Finding]:
    from qmflask.cli import examine, local  # they bring the whole service along
    from qmflask.host import Host

    yield from examine.versions()
    source, state = _places(service)
    config, found = examine.configuration(source)
    yield from found
    yield from examine.state(state)
    body = None
    for finding in _service(service, str(source)):
        if isinstance(finding, Finding):
            yield finding
        else:
            body = finding
    if body is None:
        yield from _survivors(local.survivors)
    yield from examine.memory(config, examine.cards(), Host().memory().total)
    if config is not None:
        running = {m["id"]: m["port"] for m in body["models"] if m.get("port")} if body else {}
        yield from examine.commands(config)
        yield from examine.ports(config, running)
    yield from examine.nginx()


def _places(service: Service) -> tuple[Path, Path]:
    """Configuration and state directory: those that were named here, else the service's, where they are in reach."""
    from qmflask.cli import local
    from qmflask.places import source_path

    here = source_path(), local.state_directory()
    if any(os.environ.get(name) for name in ("QMFLASK_CONFIG", "QMFLASK_STATE", "STATE_DIRECTORY")):
        return here
    try:
        told = service.get("/api/config")
        theirs = Path(told["source"]), Path(told["state"])
    except (click.ClickException, KeyError, TypeError):
        return here  # what is wrong with the service is said later
    return theirs if os.path.exists(theirs[0]) and os.path.isdir(theirs[1]) else here


def _service(service: Service, source: str) -> Iterator[Finding | dict[str, Any]]:
    """The running service; its status, too, when it has told it."""
    from qmflask.cli import examine

    try:
        theirs = service.get("/api/version")["version"]
        config = service.get("/api/config")
        body: dict[str, Any] = service.get("/api/status")
        memory: dict[str, Any] = service.get("/api/memory")
    except Down as down:
        yield warn("service", down.message, "qmflask serve")
        return
    except Refused as error:
        mend = "set QMFLASK_API_KEY to an admin's key" if error.status in (401, 403) else "see `qmflask logs`"
        yield fail("service", f"{service.url}: {error.message}", mend)
        return
    except (KeyError, TypeError):
        yield fail(
            "service", f"what answers at {service.url} is not qmflask", "name its address with --url or QMFLASK_URL"
        )
        return
    yield from _answered(service, source, theirs, config, body)
    yield from examine.growth(memory, service.url)
    yield body


def _answered(
    service: Service, source: str, theirs: str, config: dict[str, Any], body: dict[str, Any]
) -> Iterator[Finding]:
    here = body["service"]
    yield ok("service", f"{service.url} answers, {len(here['workers'])} workers")
    if theirs != __version__:
        yield warn("service", f"it is version {theirs}, this command {__version__}", "restart the service")
    if config["source"] != source:
        mend = "set QMFLASK_CONFIG (and QMFLASK_STATE) here as for the service"
        yield warn("service", f"it reads {config['source']}, this command looks at {source}", mend)
    if config["error"]:
        yield fail(
            "service", f"the changed configuration is not taken: {config['error'].splitlines()[0]}", "qmflask check"
        )
    if here["leader"] is None:
        yield fail("scheduler", "nobody schedules", "if this lasts for more than two seconds: `qmflask logs`, restart")
    else:
        yield ok("scheduler", f"process {here['leader']}, term {here['term']}")
    for model in body["models"]:
        if failure := model.get("failure"):
            yield fail(f"model {model['id']}", brief(model["id"], failure["message"]), f"qmflask logs {model['id']}")


def _survivors(look: Any) -> Iterator[Finding]:
    try:
        left = look()
    except click.ClickException as error:
        yield fail("state", error.message, "run as the service's user")
        return
    except PermissionError:
        return  # said of the state directory already
    if left:
        names = ", ".join(f"{name} (pid {pid})" for name, pid in left.items())
        yield warn(
            "models",
            f"without a service these still run: {names}",
            "start it and it adopts them, or `qmflask unload --all`",
        )

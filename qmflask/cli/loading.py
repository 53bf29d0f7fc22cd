"""`qmflask load` and `qmflask unload`: have the service load or stop models, and wait until that is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from qmflask.cli.completion import complete_models
from qmflask.cli.service import (
    Down,
    Refused,
    Service,
    connect,
    json_option,
    place_options,
    print_json,
    quoted,
    url_option,
)
from qmflask.cli.table import plural, span
from qmflask.cli.waiting import waited

#: Stands for a name where all are meant.
_ALL = "all models"


@click.command("load")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", shell_complete=complete_models)
@url_option
@json_option
def load(models: tuple[str, ...], url: str, as_json: bool) -> None:
    """Load MODELs, one after another, and wait until they are ready.

    What has to make room is stopped as for a request; `qmflask plan MODEL` says it beforehand. Ctrl-C gives
    the load up. Exit code: 0 all ready, 1 one was refused or failed (the others are tried), 3 no service.
    """
    service = connect(url)

    def one(name: str) -> None:
        service.post(f"/api/models/load/{quoted(name)}", timeout=None)

    _each(service, models, one, "ready", as_json)


@click.command("unload")
@click.argument("models", nargs=-1, metavar="[MODEL...]", shell_complete=complete_models)
@click.option("--all", "everything", is_flag=True, help="All models.")
@place_options
@url_option
@json_option
def unload(models: tuple[str, ...], everything: bool, url: str, as_json: bool) -> None:
    """Stop MODELs, or all, after the answers they are giving; wait until their processes are gone.

    Without a running service, --all stops the models that a crash or `onShutdown: keep` has left, by the state
    directory. Exit code: 0 stopped, 1 refused, 3 no service.
    """
    if bool(models) == everything:
        raise click.UsageError("name MODELs, or give --all")
    service = connect(url)

    def one(name: str) -> None:
        service.post(f"/api/models/unload/{quoted(name)}", timeout=None)

    def every(name: str) -> None:
        service.post("/api/models/unload", timeout=None)

    if not everything:
        _each(service, models, one, "stopped", as_json)
        return
    try:
        _each(service, (_ALL,), every, "stopped", as_json)
    except Down:
        _stop_survivors(as_json)


def _each(service: Service, names: tuple[str, ...], work: Callable[[str], None], done: str, as_json: bool) -> None:
    results: list[dict[str, Any]] = []
    for name in names:
        result: dict[str, Any] = {"model": name, "state": done}
        try:
            waited(lambda name=name: work(name), lambda name=name: _progress(service, name), quiet=as_json)  # type: ignore[misc]
        except Refused as error:
            result = {"model": name, "state": "failed", "error": error.message}
        results.append(result)
        if not as_json:
            click.echo(f"{name}: {result.get('error', done)}", err="error" in result)
    if as_json:
        print_json(results)
    if any("error" in result for result in results):
        raise SystemExit(1)


def _progress(service: Service, name: str) -> str:
    """What the model is at; the part before a colon is what it waits for, the rest are figures."""
    try:
        body = service.get("/api/status", timeout=2)
    except click.ClickException:
        return ""
    if name == _ALL:
        return _left(body["models"])
    model = next((m for m in body["models"] if name == m["id"] or name in m.get("aliases", ())), None)
    if model is None:
        return ""
    if model["state"] == "starting":
        usual = f", usually {span(model['usual_load'])}" if model.get("usual_load") else ""
        return f"{name} loads: {span(model.get('loading'))}{usual}"
    waiting = next((r for r in body["requests"] if r["model"] == model["id"] and r.get("why")), None)
    if waiting is not None:
        return f"{name} waits, {waiting['why']}: {span(waiting['age'])}"
    return f"{name} is {model['state']}: {plural(model['inflight'], 'answer')}"


def _left(models: Iterable[Mapping[str, Any]]) -> str:
    left = [model for model in models if model["state"] not in ("stopped", "failed")]
    answers = sum(model["inflight"] for model in left)
    return f"not stopped yet: {', '.join(model['id'] for model in left)}, {plural(answers, 'answer')}" if left else ""


def _stop_survivors(as_json: bool) -> None:
    from qmflask.cli import local  # they bring the whole service along
    from qmflask.shutdown import stop_models

    left = local.survivors()
    if left and not stop_models(local.state_directory(), kept=False):
        raise click.ClickException("somebody leads this state directory: a service runs that does not answer here")
    results = [{"model": name, "state": "stopped", "pid": pid} for name, pid in left.items()]
    if as_json:
        print_json(results)
        return
    click.echo(
        "\n".join(f"{r['model']}: stopped (pid {r['pid']})" for r in results) or "no service, and no model is left"
    )

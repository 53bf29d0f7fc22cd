"""`qmflask reload` and `qmflask cancel`: short requests to the running service."""

from __future__ import annotations

from typing import Any

import click

from qmflask.cli.service import Refused, connect, json_option, print_json, quoted, url_option
from qmflask.cli.table import plural


@click.command("reload")
@url_option
@json_option
def reload(url: str, as_json: bool) -> None:
    """Have the service read its configuration now, which it does by itself within two seconds of a change.

    With errors in the file the old configuration stays in force. Exit code: 0 taken, 1 not taken, 3 no service.
    """
    body = connect(url).post("/api/config/reload", timeout=60)
    if as_json:
        print_json(body)
    else:
        models = plural(len(body["models"]), "model")
        click.echo(f"{body['source']} is in force: {models}, generation {body['generation']}")


@click.command("cancel")
@click.argument("requests", nargs=-1, required=True, metavar="REQUEST...")
@url_option
@json_option
def cancel(requests: tuple[str, ...], url: str, as_json: bool) -> None:
    """End REQUESTs, queued or streaming; their ids are in `qmflask ps` and in the answers' X-QM-Request-Id.

    Exit code: 0 all cancelled, 1 one was not there any more, 3 no service.
    """
    service = connect(url)
    results: list[dict[str, Any]] = []
    for request in requests:
        result: dict[str, Any] = {"request": request, "cancelled": True}
        try:
            service.post(f"/api/inflight/{quoted(request)}/cancel")
        except Refused as error:
            if error.status != 404:
                raise
            result = {"request": request, "cancelled": False, "error": error.message}
        results.append(result)
        if not as_json:
            click.echo(f"{request}: {result.get('error', 'cancelled')}", err="error" in result)
    if as_json:
        print_json(results)
    if any("error" in result for result in results):
        raise SystemExit(1)

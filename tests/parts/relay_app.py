"""A bare WSGI app around the relay, for gunicorn: relays everything to $RELAY_TARGET, notes ends in $RELAY_LEDGER."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from qmflask import headers, intake
from qmflask.errors import ClientGone, QmflaskError
from qmflask.hangup import Client, HangupWatcher, client_socket
from qmflask.relay import Outcome, open_relay
from qmflask.upstream import Upstream, UpstreamRequest

StartResponse = Callable[[str, list[tuple[str, str]]], object]


class App:
    """Made by the first request, so after fork."""

    def __init__(self) -> None:
        self._watcher = HangupWatcher(stall_seconds=float(os.environ.get("RELAY_STALL", "60")))
        self._upstream = Upstream()

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        sock, client = client_socket(environ), Client()
        assert sock is not None
        self._watcher.watch(sock, client)

        def on_end(outcome: Outcome) -> None:
            self._watcher.unwatch(sock)
            note({**dataclasses.asdict(outcome), "error": str(outcome.error or "")})

        try:
            relayed = self._relay(environ, client, on_end)
        except QmflaskError as error:
            body = json.dumps(error.body()).encode()
            start_response(f"{error.status} Error", [("Content-Type", "application/json")])
            return [body]
        except ClientGone:
            start_response("499 Client Closed Request", [])
            return []
        start_response(relayed.status, relayed.headers)
        return relayed.body

    def _relay(self, environ: dict[str, Any], client: Client, on_end: Callable[[Outcome], None]) -> Any:
        taken = intake.take(environ)
        request = UpstreamRequest(
            environ["REQUEST_METHOD"],
            os.environ["RELAY_TARGET"] + environ["RAW_URI"],
            headers.request_headers(environ),
            taken.payload(),
            taken.length,
        )
        return open_relay(self._upstream, request, client, on_end=on_end)


def note(row: dict[str, Any]) -> None:
    """Append one line to the ledger, whole."""
    descriptor = os.open(os.environ["RELAY_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, json.dumps(row).encode() + b"\n")
    os.close(descriptor)


_app: App | None = None


def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
    """The WSGI entry point."""
    global _app
    if _app is None:
        _app = App()
    return _app(environ, start_response)

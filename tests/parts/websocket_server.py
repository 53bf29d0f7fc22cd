#!/usr/bin/env python3
"""A model server for tests that speaks websockets: `websocket_server.py PORT NAME EVENTS`.

`/health` is 200. Every other path switches and then sends each message back; `/push?N` sends N messages of its own
first, `/part` says "bye" and ends, `/die` kills the process at the first message, `/refuse` answers 403. What it sees
is noted in EVENTS, one JSON line each, as by the scripted server: open, message, closed.
"""

from __future__ import annotations

import hashlib
import http
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve
from websockets.typing import Subprotocol

PORT, NAME, EVENTS = int(sys.argv[1]), sys.argv[2], sys.argv[3]


def note(event: str, **fields: Any) -> None:
    """Append one event."""
    row = {"event": event, "name": NAME, "pid": os.getpid(), "t": time.monotonic_ns(), **fields}
    with open(EVENTS, "ab", buffering=0) as file:
        file.write(json.dumps(row).encode() + b"\n")


def refuse(connection: ServerConnection, request: Request) -> Response | None:
    """Plain answers for what is no websocket."""
    if request.path == "/health":
        return connection.respond(http.HTTPStatus.OK, "OK\n")
    if request.path == "/refuse":
        return connection.respond(http.HTTPStatus.FORBIDDEN, "not you\n")
    return None


def talk(connection: ServerConnection) -> None:
    """One websocket."""
    assert connection.request is not None
    path, _, count = connection.request.path.partition("?")
    note("open", path=unquote(path), headers=list(connection.request.headers.raw_items()))
    for number in range(int(count) if path == "/push" else 0):
        connection.send(f"{number} " + "x" * 1000)
    if path == "/part":
        connection.send("bye")
        return
    try:
        for message in connection:
            data = message if isinstance(message, bytes) else message.encode()
            note("message", length=len(data), sha256=hashlib.sha256(data).hexdigest())
            if path == "/die":
                os.kill(os.getpid(), signal.SIGKILL)
            connection.send(message)
    except ConnectionClosed:
        pass
    note("closed", code=connection.close_code)


def choose(_: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    """The last one that the client offers."""
    return offered[-1] if offered else None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with serve(talk, "127.0.0.1", PORT, process_request=refuse, select_subprotocol=choose, max_size=1 << 24) as server:
        server.serve_forever()

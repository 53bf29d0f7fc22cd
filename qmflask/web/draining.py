"""Reads on a little when a request is refused before its body was read.

Servers reset a connection with unread bytes, and a client that is still sending would see the reset, not the refusal.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from qmflask.hangup import client_socket

log = logging.getLogger(__name__)

#: Longer bodies are not waited for: such clients ask first (Expect), or stand behind nginx, which reads the answer.
MOST_BYTES = 16 * 1024 * 1024
MOST_SECONDS = 2.0
#: gunicorn itself drains this much.
_SERVERS_OWN = 64 * 1024
_BLOCK = 256 * 1024


def drain(environ: dict[str, Any]) -> None:
    """Read and forget what is left of the request's body, within limits."""
    length = environ.get("CONTENT_LENGTH", "")
    if length.isascii() and length.isdigit() and len(length) < 12:
        left = int(length)
    else:
        left = MOST_BYTES if environ.get("HTTP_TRANSFER_ENCODING") else 0
    if not _SERVERS_OWN < left <= MOST_BYTES:
        return
    sock = client_socket(environ)
    deadline = time.monotonic() + MOST_SECONDS
    try:
        if sock is not None:
            sock.settimeout(MOST_SECONDS)
        while left > 0 and time.monotonic() < deadline:
            data = environ["wsgi.input"].read(min(left, _BLOCK))
            if not data:
                return
            left -= len(data)
    except Exception as error:  # every server has its own for a body that breaks off; the refusal stands
        log.debug("the rest of a refused body did not come: %s", error)
    finally:
        if sock is not None and sock.fileno() >= 0:
            sock.settimeout(None)

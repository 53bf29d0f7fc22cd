"""One id per request: in its answer's header, its row and its log lines."""

from __future__ import annotations

import logging
import os
import re
import threading
from typing import Any

_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=-]{0,127}")
KEY = "qmflask.request_id"


class _Current(threading.local):
    id: str | None = None


_current = _Current()


def assign(environ: dict[str, Any]) -> str:
    """The client's X-Request-Id where it is sane, else a new one; kept in the environ, and for this thread's log."""
    given = environ.get("HTTP_X_REQUEST_ID", "")
    found = given if _SANE.fullmatch(given) else os.urandom(16).hex()
    environ[KEY] = _current.id = found
    return found


def forget() -> None:
    """This thread's request is over."""
    _current.id = None


class RequestIdFilter(logging.Filter):
    """Puts the id of the request that a thread serves before what it logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always True."""
        if _current.id is not None and not getattr(record, "has_request_id", False):
            record.msg = f"request {_current.id}: {record.msg}"
            record.has_request_id = True
        return True

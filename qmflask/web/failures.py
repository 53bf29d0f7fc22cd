"""What a client is told when its request fails: every error of a view, and of the routes answered ahead of Flask."""

from __future__ import annotations

import logging
from typing import Any

from flask import Response

from qmflask.errors import Cancelled, ClientGone, QmflaskError, dismissal
from qmflask.web import request_id
from qmflask.web.answers import error_answer
from qmflask.web.draining import drain

log = logging.getLogger(__name__)


def answer(error: Exception, environ: dict[str, Any]) -> Response:
    """The answer to a request that failed with `error`; what is no error of ours is a bug, and logged as one."""
    if isinstance(error, ClientGone):
        error = dismissal(str(error)) or Cancelled("the client has left")  # which then nobody reads
    else:
        if not isinstance(error, QmflaskError):
            log.error("%s %s failed", environ["REQUEST_METHOD"], environ.get("PATH_INFO"), exc_info=error)
            error = QmflaskError("internal error; the log has the details")
        drain(environ)
    return error_answer(error, environ.get("HTTP_ACCEPT", ""), environ.get(request_id.KEY))

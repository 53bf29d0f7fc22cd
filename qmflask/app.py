"""The WSGI application, and what the server's hooks call."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from qmflask.config import ConfigError
from qmflask.errors import ClientGone, QmflaskError
from qmflask.journal import install, wants_json
from qmflask.router import Router
from qmflask.runtime import Runtime, complain, source_path, state_path
from qmflask.shutdown import stop_models
from qmflask.store import StoreError
from qmflask.web import access, configuration, inference, logs, memory, models, operations
from qmflask.web.answers import error_answer

log = logging.getLogger(__name__)

_runtime = Runtime()
os.register_at_fork(after_in_child=_runtime.forget)


def create_app(router: Callable[[], Router] = _runtime.router) -> Flask:
    """The Flask application over a source of this process's Router."""
    app = Flask("qmflask", static_folder=None)
    for module in (inference, models, operations, configuration, access, logs, memory):
        app.register_blueprint(module.blueprint(router))
    app.register_error_handler(QmflaskError, _known_error)
    app.register_error_handler(ClientGone, _client_gone)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _bug)
    return app


def _known_error(error: QmflaskError) -> Response:
    return error_answer(error, request.headers.get("Accept", ""))


def _client_gone(error: ClientGone) -> Response:
    """Nobody reads this, unless the request was cancelled through the API."""
    return Response(status="499 Client Closed Request")


def _http_error(error: HTTPException) -> Response:
    text = "404 page not found" if error.code == 404 else f"{error.code} {error.name}"
    headers = [(name, value) for name, value in error.get_headers() if name.lower() == "allow"]
    return Response(text, error.code, headers, mimetype="text/plain")


def _bug(error: Exception) -> Response:
    log.exception("%s %s failed", request.method, request.path)
    return error_answer(QmflaskError("internal error; the log has the details"), request.headers.get("Accept", ""))


# -- what gunicorn.conf.py calls ------------------------------------------------------------------------------


def start_worker(worker: Any) -> None:
    """`post_worker_init`: build this worker's Router now, so that it stands for election before its first request."""
    setup_logging()
    try:
        _runtime.start(worker)
    except (ConfigError, StoreError) as error:
        complain(error)
        raise SystemExit(3) from None  # gunicorn's code for a worker that cannot boot: the master stops


def stop_worker(worker: Any) -> None:
    """`worker_exit`: resign and close."""
    _runtime.stop()


def worker_died(pid: int) -> None:
    """`child_exit`, in the master: nothing to do, the leader sees the pid's end by itself."""


def stop_service() -> None:
    """`on_exit`, in the master: stop all models, unless a new master has taken over or the configuration keeps them."""
    setup_logging()
    stop_models(state_path(source_path()))


def setup_logging() -> None:
    """Send qmflask's log to stdout and to one file of the state directory, once. `QMFLASK_LOG=json` for JSON lines."""
    install(state_path(source_path()) / "logs", as_json=wants_json())


app = create_app()

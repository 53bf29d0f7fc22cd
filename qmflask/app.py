"""The WSGI application, and what the server's hooks call."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from qmflask.config import ConfigError
from qmflask.journal import install, wants_json
from qmflask.places import source_path, state_path
from qmflask.router import Router
from qmflask.runtime import Runtime, complain
from qmflask.store import StoreError
from qmflask.timedsocket import release
from qmflask.web import (
    access,
    auth,
    configuration,
    events,
    failures,
    inference,
    inflight,
    logs,
    memory,
    metrics,
    models,
    operations,
    profiles,
    prometheus,
    request_id,
    status,
    ui,
    upstream_path,
)
from qmflask.web.ahead import Ahead
from qmflask.web.answers import preflight, redirect, text_answer
from qmflask.web.draining import drain
from qmflask.web.raw import cleaned, raw_path

log = logging.getLogger(__name__)

_runtime = Runtime()
os.register_at_fork(after_in_child=_runtime.forget)


#: Answer the model routes ahead of Flask's dispatch, which costs as much as all else we do for them; 0 turns it off.
AHEAD = os.environ.get("QMFLASK_AHEAD", "1") != "0"

#: How long a worker that cannot boot leaves it to the first one to fail, in seconds; below gunicorn's `timeout`.
ANOTHER_FAILS = 30.0

#: Each has `blueprint(router)`; `access` is registered before them.
_MODULES = (
    *(upstream_path, models, profiles, operations, configuration, memory),
    *(logs, metrics, prometheus, events, inflight, status, ui),
)


def create_app(router: Callable[[], Router] = _runtime.router, *, ahead: bool = AHEAD) -> Flask:
    """The Flask application over a source of this process's Router."""
    answers = inference.Inference()
    app = Flask("qmflask", static_folder=None)
    app.url_map.merge_slashes = False  # `_before` redirects, in the spelling that the client used
    app.register_blueprint(access.blueprint(router))  # its clock starts first
    app.before_request(_before)
    app.register_blueprint(inference.blueprint(router, answers))
    for module in _MODULES:
        app.register_blueprint(module.blueprint(router))
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _failed)
    if ahead:
        app.wsgi_app = Ahead(app.wsgi_app, router, answers)  # type: ignore[method-assign]
    return app


def _before() -> Response | None:
    """For every request, whatever its path: an id, the answer to OPTIONS, and the redirect to a clean path."""
    environ = request.environ
    request_id.assign(environ)
    if environ["REQUEST_METHOD"] == "OPTIONS":
        return preflight(environ.get("HTTP_ACCESS_CONTROL_REQUEST_HEADERS"))
    path = raw_path(environ)
    clean = cleaned(path)
    if clean == path:
        return None
    return redirect(307, clean, environ.get("QUERY_STRING", ""), environ.get("SCRIPT_NAME", ""))


def _http_error(error: HTTPException) -> Response:
    drain(request.environ)
    headers = []
    if isinstance(error, MethodNotAllowed):  # OPTIONS, which every path answers, says nothing about this one
        headers = [("Allow", ", ".join(sorted({*(error.valid_methods or ())} - {"OPTIONS"})))]
    return text_answer("404 page not found" if error.code == 404 else error.name, error.code or 500, headers)


def _failed(error: Exception) -> Response:
    return failures.answer(error, request.environ)


# -- what gunicorn_conf.py calls -------------------------------------------------------------------------------


def start_worker(worker: Any) -> None:
    """`post_worker_init`: build this worker's Router now, so that it stands for election before its first request."""
    setup_logging()
    try:
        router = _runtime.start(worker)
    except (ConfigError, StoreError) as error:
        first = _speaks_for_all(worker)
        if first or isinstance(error, StoreError):
            complain(error)
        if not first and _told_to_end(worker):
            raise SystemExit(0) from None
        raise SystemExit(3) from None  # gunicorn's code for a worker that cannot boot: the master stops
    _take_over(worker)
    if _speaks_for_all(worker):
        if type(worker).__name__ == "SyncWorker":
            log.warning(
                "the sync worker serves one request at a time in each process: whoever waits for a model blocks it, "
                "status pages included; use --worker-class gthread --threads 64"
            )
        auth.warn_if_open(router.live.config, [listener.getsockname() for listener in worker.sockets])


def _take_over(worker: Any) -> None:
    """Before gunicorn's own kinds of worker accept: by a HUP or USR2 they may inherit sockets that ours had."""
    if not hasattr(worker, "may_go"):
        for listener in getattr(worker, "sockets", ()):
            release(listener)


def _speaks_for_all(worker: Any) -> bool:
    """Whether this is the first of the workers that start together: what is true for all of them is said once."""
    cfg = getattr(worker, "cfg", None)
    return not 1 < getattr(worker, "age", 1) <= getattr(cfg, "workers", 1)


def _told_to_end(worker: Any) -> bool:
    """Wait for the end that the first worker's failure brings; False if it does not come.

    gunicorn's master stops when one worker cannot boot. If a second one ends the same way meanwhile, it breaks off with
    a traceback and exit code 1, and leaves the models running.
    """
    deadline = time.monotonic() + ANOTHER_FAILS
    while worker.alive and not getattr(worker, "told_early", False) and worker.ppid == os.getppid():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def stop_worker(worker: Any) -> None:
    """`worker_exit`: resign and close."""
    _runtime.stop()


def setup_logging() -> None:
    """Send qmflask's log to stdout and to one file of the state directory, once. `QMFLASK_LOG=json` for JSON lines."""
    install(state_path(source_path()) / "logs", as_json=wants_json())
    for handler in logging.getLogger("qmflask").handlers:
        if not handler.filters:
            handler.addFilter(request_id.RequestIdFilter())


app = create_app()

"""Answers the model routes ahead of Flask's dispatch, by the same functions as behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from qmflask.router import Router
from qmflask.web import access, answers, failures, request_id
from qmflask.web.inference import GET_ROUTES, POST_ROUTES, Inference

Application = Callable[..., Iterable[bytes]]

_ROUTES = {"POST": POST_ROUTES, "GET": GET_ROUTES}
_NONE: dict[str, str] = {}


class Ahead:
    """WSGI middleware: what is no model route in its plain spelling goes on to `application`."""

    def __init__(self, application: Application, router: Callable[[], Router], inference: Inference) -> None:
        self._application = application
        self._router = router
        self._inference = inference

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Called by the WSGI server."""
        path = _ROUTES.get(environ["REQUEST_METHOD"], _NONE).get(environ.get("PATH_INFO", ""))
        if path is None:
            return self._application(environ, start_response)
        access.begin(environ)
        request_id.assign(environ)
        try:
            relayed = self._inference.answer(self._router(), environ, path)
        except Exception as error:
            response = failures.answer(error, environ)
            access.end(self._router, environ, response)
            return response(environ, start_response)
        return answers.pass_on(relayed, start_response)

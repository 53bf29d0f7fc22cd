"""The tree of errors a client can meet: status, code and the one JSON body they all share."""

from __future__ import annotations

from typing import Any

#: OpenAI-style error type by status; other 4xx are invalid_request_error, the rest server_error.
_TYPES = {401: "authentication_error", 403: "authentication_error", 429: "rate_limit_error"}


class QmflaskError(Exception):
    """Raised when a request cannot be served; becomes the JSON body of DESIGN section 6.

    `message` is a whole sentence that says what to do. `retry_after` is in whole seconds and becomes a header.
    """

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def type(self) -> str:
        """OpenAI-style error type."""
        if self.status in _TYPES:
            return _TYPES[self.status]
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """The one error body: `{"src": "qmflask", "error": {message, type, code, param}}`."""
        return {
            "src": "qmflask",
            "error": {"message": self.message, "type": self.type, "code": self.code, "param": self.param},
        }

    def headers(self) -> list[tuple[str, str]]:
        """Response headers that belong to this error."""
        return [("Retry-After", str(self.retry_after))] if self.retry_after is not None else []


class BadRequest(QmflaskError):
    """Raised when a request is malformed in a way no other class names."""

    status, code = 400, "bad_request"


class InvalidJSON(BadRequest):
    """Raised when a JSON body cannot be parsed."""

    code = "invalid_json"


class MissingModel(BadRequest):
    """Raised when a request to a model route names no model."""

    code = "missing_model"


class Unauthorized(QmflaskError):
    """Raised when keys are configured and the request has none of them."""

    status, code = 401, "unauthorized"

    def headers(self) -> list[tuple[str, str]]:
        """Browsers log in to the page with Basic."""
        return [("WWW-Authenticate", 'Basic realm="qmflask"')]


class Forbidden(QmflaskError):
    """Raised when the key is known but may not do this."""

    status, code = 403, "forbidden"


class NotFound(QmflaskError):
    """Raised when what the path names does not exist."""

    status, code = 404, "not_found"


class ModelNotFound(NotFound):
    """Raised when no model, alias, selector or peer has the requested name."""

    code = "model_not_found"


class Conflict(QmflaskError):
    """Raised when the request is right but the state forbids it."""

    status, code = 409, "conflict"


class ModelProtected(Conflict):
    """Raised when a model with `displace: false` would have to be evicted for the requested one."""

    code = "model_protected"


class BodyTooLarge(QmflaskError):
    """Raised when a body is longer than `maxBodyMB`."""

    status, code = 413, "body_too_large"


class ConcurrencyLimit(QmflaskError):
    """Raised when a model's `concurrencyLimit` is reached."""

    status, code = 429, "concurrency_limit"


class BadGateway(QmflaskError):
    """Raised when a model server or peer answers wrongly or not at all."""

    status, code = 502, "bad_gateway"


class ModelStartFailed(BadGateway):
    """Raised when a model's command is missing or exits before it is healthy."""

    code = "model_start_failed"


class UpstreamUnreachable(BadGateway):
    """Raised when the model server refuses, resets or dies before its headers."""

    code = "upstream_unreachable"


class ModelStartTimeout(QmflaskError):
    """Raised when a model is not healthy within `healthCheckTimeout`."""

    status, code = 504, "model_start_timeout"


class UpstreamTimeout(QmflaskError):
    """Raised when the model server sends no headers within `timeouts.responseHeader`."""

    status, code = 504, "upstream_timeout"


class Unavailable(QmflaskError):
    """Raised when the service cannot serve now but may later."""

    status, code = 503, "service_unavailable"


class InsufficientMemory(Unavailable):
    """Raised when a model cannot fit in the budget, or not now."""

    code = "insufficient_memory"


class ModelUnloaded(Unavailable):
    """Raised when a model was unloaded while the request waited for it."""

    code = "model_unloaded"


class ShuttingDown(Unavailable):
    """Raised when the worker drains."""

    code = "shutting_down"


class Overloaded(Unavailable):
    """Raised when all inference slots of the worker are taken."""

    code = "overloaded"


class NoScheduler(Unavailable):
    """Raised when no leader has been heard for 10 s."""

    code = "no_scheduler"


class StoreBusy(Unavailable):
    """Raised when the store stays locked."""

    code = "store_busy"


class StoreFull(Unavailable):
    """Raised when the disk with the state directory is full."""

    code = "store_full"


class Cancelled(QmflaskError):
    """Raised when somebody cancelled the request through the API; its client is still there."""

    status, code = 499, "cancelled"


class ClientGone(Exception):
    """Raised inside a request whose client has left or which was cancelled; never becomes a response body."""


def dismissal(reason: str) -> QmflaskError | None:
    """What a client is told whose request was ended by us, by `Client.reason`; None if it has left by itself."""
    if reason == "cancelled":
        return Cancelled("the request was cancelled")
    if reason == "shutting_down":
        return ShuttingDown("qmflask is shutting down; ask again", retry_after=1)
    if reason == "idle":
        return ModelUnloaded("this stream moved nothing for idleStreamTimeout, and its model has to go")
    return None


def _leaves(base: type[QmflaskError]) -> dict[str, type[QmflaskError]]:
    found = {base.code: base}
    for sub in base.__subclasses__():
        found.update({code: cls for code, cls in _leaves(sub).items() if code not in found})
    return found


def from_code(code: str, message: str, *, param: str | None = None, retry_after: int | None = None) -> QmflaskError:
    """Rebuild an error that was stored in a row by its code; unknown codes become a plain 500."""
    cls = _leaves(QmflaskError).get(code, QmflaskError)
    return cls(message, param=param, retry_after=retry_after)

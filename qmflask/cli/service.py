"""The running service as the commands see it: requests with the key, answers as values, failures as exit codes."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import click

#: Exit codes of all commands; 2 is click's, for wrong usage.
FAILED, USAGE, DOWN = 1, 2, 3

DEFAULT_URL = "http://127.0.0.1:8080"
#: Seconds for what answers at once; loads and stops are waited for without an end.
QUICK = 10.0

F = TypeVar("F")


class Down(click.ClickException):
    """Raised when no service answers at the address; commands that can do without one catch it. Exit code 3."""

    exit_code = DOWN


class Refused(click.ClickException):
    """Raised when the service answers with an error; the message is its own. Exit code 1."""

    exit_code = FAILED

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Service:
    """One service by its address: `http://host:port`, with a path where it is mounted below one, or `unix:/path`."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = _address(url)
        self._key = key

    def get(self, path: str, timeout: float | None = QUICK) -> Any:
        """GET, parsed. Raises Down, Refused."""
        return self._json("GET", path, timeout)

    def post(self, path: str, timeout: float | None = QUICK) -> Any:
        """POST without a body, the answer parsed. Raises Down, Refused."""
        return self._json("POST", path, timeout)

    def put(self, path: str, value: Any, timeout: float | None = QUICK) -> Any:
        """PUT of a value as JSON, the answer parsed. Raises Down, Refused."""
        return self._json("PUT", path, timeout, json.dumps(value).encode())

    def text(self, path: str, timeout: float | None = QUICK) -> str:
        """GET, as text. Raises Down, Refused."""
        return self._send("GET", path, timeout).decode("utf-8", "replace")

    def _json(self, method: str, path: str, timeout: float | None, sent: bytes | None = None) -> Any:
        body = self._send(method, path, timeout, sent)
        try:
            return json.loads(body) if body.lstrip()[:1] in (b"{", b"[") else body.decode("utf-8", "replace")
        except ValueError:
            raise Refused(f"{self.url}{path} answers something that is no JSON; is that qmflask?", 200) from None

    def _send(self, method: str, path: str, timeout: float | None, sent: bytes | None = None) -> bytes:
        connection = self._connect(timeout)
        headers = {"Accept": "application/json", **({} if sent is None else {"Content-Type": "application/json"})}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection.request(method, self._base() + path, sent, headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise Down(
                f"no service at {self.url} ({str(error) or type(error).__name__}); start it with `qmflask serve`, or "
                "name another address with --url or QMFLASK_URL"
            ) from None
        finally:
            connection.close()
        if answer.status >= 300:
            raise Refused(_message(answer.status, body, self._key), answer.status)
        return body

    def _connect(self, timeout: float | None) -> http.client.HTTPConnection:
        if self.url.startswith("unix:"):
            return _UnixConnection(self.url.removeprefix("unix:"), timeout)
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.netloc.rpartition("@")[2], timeout=timeout)

    def _base(self) -> str:
        return "" if self.url.startswith("unix:") else urlsplit(self.url).path


def _address(url: str) -> str:
    """The address in full; HOST:PORT is taken for http. Raises UsageError for what is none."""
    full = url.strip()
    if full.startswith("unix:/"):
        return full
    if "://" not in full:
        full = f"http://{full}"
    try:
        parts = urlsplit(full)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise click.UsageError(f"{url!r} is no address; give http://HOST:PORT or unix:/PATH")
    return full.rstrip("/")


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a socket file, which is where the service listens behind nginx."""

    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the file. Raises OSError."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _message(status: int, body: bytes, key: str | None) -> str:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = body.decode("utf-8", "replace").strip()[:500] or http.client.responses.get(status, "")
    if status == 401:
        message += " (QMFLASK_API_KEY is " + ("not accepted)" if key else "not set)")
    return f"{status}: {message}"


def quoted(name: str) -> str:
    """A model's name inside a path."""
    return quote(name, safe="")


def connect(url: str) -> Service:
    """The service at `url`, with the key of `QMFLASK_API_KEY`."""
    return Service(url, os.environ.get("QMFLASK_API_KEY") or None)


def url_option(function: F) -> F:
    """`--url`, else `QMFLASK_URL`, else the address that `qmflask serve` takes by itself."""
    option = click.option(
        "--url", envvar="QMFLASK_URL", default=DEFAULT_URL, show_default=True, help="The running service (QMFLASK_URL)."
    )
    return option(function)  # type: ignore[type-var]


def json_option(function: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)  # type: ignore[type-var]


def place_options(function: F) -> F:
    """`--config` and `--state`: where a service that is down keeps its things; they stand for the variables."""
    for name, variable, text in (
        ("--state", "QMFLASK_STATE", "State directory, for when no service runs (QMFLASK_STATE)."),
        ("--config", "QMFLASK_CONFIG", "Configuration, for when no service runs (QMFLASK_CONFIG)."),
    ):
        kind = click.Path(path_type=Path)
        option = click.option(name, expose_value=False, callback=_sets(variable), type=kind, help=text)
        function = option(function)  # type: ignore[type-var]
    return function


def _sets(variable: str) -> Callable[[click.Context, click.Parameter, Path | None], None]:
    def callback(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
        if value is not None:
            os.environ[variable] = str(value.expanduser().absolute())

    return callback


def print_json(value: Any) -> None:
    """Print a value for scripts."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))

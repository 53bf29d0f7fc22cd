"""Echo servers, as models and as peers, and services that several tests share."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.service import REPO, PortBlock, Service, eventually

_SCRIPT = REPO / "tests" / "parts" / "echo_server.py"
#: The `cmd` of a model that answers what it was sent.
ECHO = f"{sys.executable} -S -E {_SCRIPT} ${{PORT}}"


def echo_model(**more: Any) -> dict[str, Any]:
    """A model's configuration: an echo server on loopback."""
    return {"cmd": ECHO, "proxy": "http://127.0.0.1:${PORT}", **more}


@contextlib.contextmanager
def echo_server() -> Iterator[int]:
    """An echo server that is no model of ours, as a peer is; gives its port."""
    ports = PortBlock()
    port = ports.take()
    with subprocess.Popen([sys.executable, "-S", "-E", str(_SCRIPT), str(port)]) as process:
        try:
            eventually(lambda: _listens(port), "the echo server listens")
            yield port
        finally:
            process.terminate()
    ports.close()


@contextlib.contextmanager
def shared(folder: Path, config: Any, **options: Any) -> Iterator[Service]:
    """A started service. `config` as for `start_service`: a mapping, a text, or a function of the service."""
    given: Mapping[str, Any] | str = {} if callable(config) else config
    service = Service(folder, given, **options)
    if callable(config):
        function: Callable[[Service], Any] = config
        service.write_config(function(service))
    try:
        yield service.start()
    finally:
        print(service.log()[-20_000:])
        service.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

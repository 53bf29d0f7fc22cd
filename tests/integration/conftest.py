"""Real parts for integration tests, and the check that each test leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import llama
from tests.service import PortBlock, Service, eventually

StartService = Callable[..., Service]


# --- nothing is left behind -------------------------------------------------------------------------------


def _descriptors() -> dict[int, str]:
    """Our open descriptors and what they are; the one that lists them is left out."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd: what for fd, what in found.items() if not what.endswith("/fd")}


def _children() -> set[int]:
    """Our child processes, zombies included."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread, a child process or a descriptor of the test process behind."""
    threads, children, descriptors = set(threading.enumerate()), _children(), _descriptors()
    yield

    def left() -> list[str]:
        rows = [f"thread {t.name}" for t in set(threading.enumerate()) - threads if t.is_alive()]
        rows += [f"child process {pid}" for pid in _children() - children]
        rows += [f"descriptor {fd} -> {what}" for fd, what in _descriptors().items() if descriptors.get(fd) != what]
        return rows

    if not left():
        return
    gc.collect()  # a fifth of a second in the whole suite's process, so only where something is held yet
    with contextlib.suppress(AssertionError):
        eventually(lambda: not left(), "everything is given back", timeout=3)
    gc.collect()
    assert not (rows := left()), "left behind by the test:\n" + "\n".join(rows)


# --- services ---------------------------------------------------------------------------------------------


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[StartService]:
    """Start services: `start_service(config, workers=2, threads=16, args=(), env=None)`.

    `config` is a mapping, YAML text, or a function that gets the not yet started Service and returns either, so
    that it can use `service.fake(name, ...)`. Each service is stopped afterwards, and must leave no process.
    """
    services: list[Service] = []

    def start(config: Any, *, up: bool = True, name: str = "", **options: Any) -> Service:
        given: Mapping[str, Any] | str = {} if callable(config) else config
        service = Service(tmp_path / (name or f"service{len(services)}"), given, **options)
        services.append(service)
        if callable(config):
            service.write_config(config(service))
        return service.start() if up else service

    yield start
    with contextlib.ExitStack() as stack:
        for service in services:
            stack.callback(_finish, service)


def _finish(service: Service) -> None:
    print(f"--- log of {service.folder.name}\n{service.log()[-20_000:]}")
    service.close()


@pytest.fixture
def ports() -> Iterator[PortBlock]:
    """Ports that nobody else takes."""
    block = PortBlock()
    yield block
    block.close()


# --- real llama-server ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama.cpp's server, from a pinned test dependency: the real binary, or a stand-in where it does not run."""
    return llama.server(tmp_path_factory.mktemp("llama-server"))


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make (once per session) a tiny GGUF model that says its sentence: `tiny_gguf("alpha", "I am alpha.")`."""
    folder = tmp_path_factory.mktemp("gguf")
    made: dict[tuple[str, ...], Path] = {}

    def make(name: str, say: str = "", *flags: str) -> Path:
        key = (name, say, *flags)
        if key not in made:
            path = folder / f"{len(made)}-{name}.gguf"
            llama.make_gguf(path, "--say", say or f"I am {name} and I am ready.", *flags)
            made[key] = path
        return made[key]

    return make

"""What all tests share: an environment without surprises."""

from __future__ import annotations

import gc
import os
import signal

import pytest

from tests import llama

#: Variables of the developer's shell that would steer what is tested.
_STEERING = ("QMFLASK_", "GUNICORN_", "OPENAI_", "ANTHROPIC_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


def pytest_report_header() -> str:
    """Say which llama-server the tests use."""
    return llama.described()


def pytest_configure() -> None:
    """Where we run in a shell's background, SIGINT is ignored, and all that we start would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Take what stays till the end, 4000 tests and their modules, out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts without the variables that steer qmflask, its server or its clients."""
    for name in list(os.environ):
        if name.upper().startswith(_STEERING):
            monkeypatch.delenv(name)

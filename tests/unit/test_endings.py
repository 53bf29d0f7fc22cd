"""How the end of a process is told."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qmflask.endings import exit_words
from qmflask.trees import Trees


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "an unknown exit code"),
        (0, "exit code 0"),
        (1, "exit code 1"),
        (-9, "signal SIGKILL"),
        (-40, "signal 40"),
    ],
)
def test_an_end_in_words(code: int | None, words: str) -> None:
    assert exit_words(code) == words


@pytest.mark.parametrize(("code", "words"), [(-signal.SIGILL, "signal SIGILL"), (128 + signal.SIGILL, "exit code 132")])
def test_an_illegal_instruction_is_a_build_for_another_cpu(code: int, words: str) -> None:
    told = exit_words(code)
    assert told.startswith(f"{words} (")
    assert "built for another CPU" in told
    assert "install a build for this one" in told


def test_who_held_the_port_is_told_as_of_then(tmp_path: Path) -> None:
    """The message is shown for as long as the model stays down, and whoever it names may be long gone."""
    trees: Any = SimpleNamespace(_store=SimpleNamespace(directory=tmp_path))
    tree: Any = SimpleNamespace(exit_code=1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        row: Any = SimpleNamespace(model="m", port=server.getsockname()[1])
        told = Trees._exited_early(trees, tree, row).message
    assert re.search(rf"; at \d\d:\d\d:\d\d port {row.port} was held by .*pid", told), told

"""How the end of a process is told."""

from __future__ import annotations

import signal

import pytest

from qmflask.endings import exit_words


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

"""How the end of a process is put into words; pure."""

from __future__ import annotations

import signal

_OTHER_CPU = (
    " (it used an instruction that this CPU does not have: the program, or a library of it, was built for another CPU;"
    " install a build for this one, or build it here)"
)


def exit_words(code: int | None) -> str:
    """An exit code in words, as subprocess has it (negative for a signal), and what to do where that is known."""
    if code is None:
        return "an unknown exit code"
    words = f"signal {_name(-code)}" if code < 0 else f"exit code {code}"
    # Shells and containers tell a signal of their child as 128 and its number.
    return words + (_OTHER_CPU if code in (-signal.SIGILL, 128 + signal.SIGILL) else "")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time signals
        return str(number)

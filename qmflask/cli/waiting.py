"""Waiting for something that may take minutes, and saying meanwhile what it waits for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import click

T = TypeVar("T")

#: Seconds between two looks.
LOOK = 0.5


def waited(work: Callable[[], T], progress: Callable[[], str], *, quiet: bool = False) -> T:
    """The result of `work`, run beside; while it runs, what `progress` says goes to stderr.

    On a terminal that is one line that changes; elsewhere each new text is a line. An exception of `work` is raised
    here. After Ctrl-C the process ends and with it the connection, by which the service knows that nobody waits.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    line = _Line(quiet)
    thread.join(LOOK)
    while thread.is_alive():
        line.say(progress())
        thread.join(LOOK)
    line.end()
    if failures:
        raise failures[0]
    return results[0]


@contextmanager
def told(progress: Callable[[], str], *, quiet: bool = False) -> Iterator[None]:
    """Says `progress` as `waited` does, while the block runs: for work that has to clean up after Ctrl-C."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(LOOK):
            line.say(progress())

    line = _Line(quiet)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        line.end()


class _Line:
    """The one line of progress."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._rewrites = sys.stderr.isatty()
        self._last = ""

    def say(self, text: str) -> None:
        if self._quiet or not text or text == self._last:
            return
        if self._rewrites:
            click.echo(f"\r\033[K{text}", err=True, nl=False)
        elif text.split(":")[0] != self._last.split(":")[0]:  # figures alone are no news
            click.echo(text, err=True)
        self._last = text

    def end(self) -> None:
        if self._rewrites and self._last:
            click.echo("\r\033[K", err=True, nl=False)

"""One thread that reads one source at intervals and on request, so that a source that hangs stalls nobody."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Sampler(Generic[T]):
    """Calls `read` every `every` seconds and whenever asked; owns its thread, which `close` ends.

    `read` runs on that thread only and may block for ever: whoever asks waits as long as he said and then gets the
    last sample. The thread is a daemon, since nothing can end a call that hangs in a driver. Start it after fork.
    """

    def __init__(
        self, name: str, read: Callable[[], T], every: float, notify: Callable[[], None] | None = None
    ) -> None:
        """`notify` is called after each sample, on the sampler's thread; it must be quick and never raise."""
        self._read = read
        self._notify = notify
        self._every = every
        self._turn = threading.Condition()
        self._asked = 0
        self._answered = 0
        self._stop = False
        self._latest: T | None = None
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name=f"qmflask-{name}", daemon=True)

    def start(self) -> None:
        """Begin with a first sample at once."""
        self._thread.start()

    @property
    def latest(self) -> T | None:
        """The newest sample, None before the first; never blocks."""
        return self._latest

    def ask(self) -> int:
        """Ask for a sample that begins after now; returns the ticket for `wait`. Never blocks for long."""
        with self._turn:
            self._asked += 1
            self._turn.notify_all()
            return self._asked

    def wait(self, ticket: int, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the sample of a ticket; False when it has not come."""
        with self._turn:
            return self._turn.wait_for(lambda: self._answered >= ticket or self._stop, max(0.0, timeout))

    def fresh(self, timeout: float) -> T | None:
        """A sample that began after now, or the last one if it takes longer than `timeout` seconds."""
        self.wait(self.ask(), timeout)
        return self._latest

    def close(self, timeout: float = 1.0) -> bool:
        """End the thread; False when it hangs in its source and had to be left behind."""
        with self._turn:
            self._stop = True
            self._turn.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            with self._turn:
                self._turn.wait_for(
                    lambda: self._stop or self._asked > self._answered, max(0.0, due - time.monotonic())
                )
                if self._stop:
                    return
                serving = self._asked
            due = time.monotonic() + self._every
            self._sample()
            with self._turn:
                self._answered = serving
                self._turn.notify_all()
            if self._notify is not None:
                self._notify()

    def _sample(self) -> None:
        try:
            self._latest = self._read()
            self._trouble = ""
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:  # once, not at every interval
                log.exception("%s: sampling failed", self._thread.name)
            self._trouble = trouble

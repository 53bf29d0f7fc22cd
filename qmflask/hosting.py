"""The WSGI server around this process, as far as it can be known: whether it still takes requests, and how it ends.

Only gunicorn shows its worker; under other servers a process serves until it ends. A gunicorn worker ends badly in two
ways, and both are mended here. At HUP it stops accepting at once, although those that are to replace it need a moment
to boot: it serves on until they are there. And while its last streams run it keeps its listening sockets, so that the
kernel lets clients in for whom nobody will ever come: it closes them when it stops accepting.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

#: How long a worker that HUP replaces serves on at most until its successors are there.
HANDOVER = 20.0


class Hosting:
    """What serves this process. `look` is called several times a second; all else may be called by any thread."""

    def __init__(self, worker: Any = None) -> None:
        """`worker` is gunicorn's, if its hook handed it over; otherwise it is looked for."""
        self._worker = worker if worker is not None else _gunicorn_worker()
        self._give_way_by = 0.0  # when we end at the latest, once we are to be replaced; 0: we are not
        self._original: Callable[[int, Any], Any] | None = None
        self._close_with_accepting()
        self._take_over_term()

    @property
    def threads(self) -> int:
        """Requests that this process serves at once."""
        return int(getattr(getattr(self._worker, "cfg", None), "threads", 0) or 64)

    def alive(self) -> bool:
        """Whether we take new requests: not once we were told to end, nor when the master is gone."""
        worker = self._worker
        return worker is None or (bool(worker.alive) and worker.ppid == os.getppid())

    # -- leaving the address ----------------------------------------------------------------------------------

    def _close_with_accepting(self) -> None:
        """This hangs on the one method by which gunicorn's thread worker stops to accept, on its own thread.

        What others hold (the master and the new workers at HUP, a new master after USR2) stays open. Versions
        without that method close by themselves.
        """
        worker = self._worker
        set_accept_enabled = getattr(worker, "set_accept_enabled", None)
        if set_accept_enabled is None:
            return

        def set_and_close(enabled: bool) -> None:
            set_accept_enabled(enabled)
            if not enabled and not self.alive():
                for listener in worker.sockets:
                    listener.close()

        worker.set_accept_enabled = set_and_close

    # -- giving way to successors -----------------------------------------------------------------------------

    def _take_over_term(self) -> None:
        """Answer TERM in gunicorn's place; only a hook, which runs in the main thread, can do that."""
        handler = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            return
        if getattr(handler, "__self__", None) is self._worker is not None:
            self._original = handler
            signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, number: int, frame: Any) -> None:
        """In the main thread, between any two of its steps: so it takes no lock and starts no thread."""
        assert self._original is not None
        if self._give_way_by == 0.0 and self._is_replaced():
            self._give_way_by = time.monotonic() + HANDOVER
        elif self._give_way_by <= time.monotonic() or not self._is_replaced():
            self._original(number, frame)

    def _is_replaced(self) -> bool:
        """Whether the service goes on without us: its master, when it ends, closes the listening sockets first."""
        try:
            ours = {f"socket:[{os.fstat(listener.fileno()).st_ino}]" for listener in self._worker.sockets}
            folder = f"/proc/{self._worker.ppid}/fd"
            return any(_link(f"{folder}/{name}") in ours for name in os.listdir(folder))
        except (OSError, AttributeError, ValueError):
            return False

    def look(self, successors: Callable[[], int]) -> None:
        """Go when as many workers as there should be have come after us, or when our time is over."""
        if not self._give_way_by or not self._worker.alive:
            return
        if time.monotonic() >= self._give_way_by or successors() >= int(self._worker.cfg.workers):
            self._give_way_by = time.monotonic()
            os.kill(os.getpid(), signal.SIGTERM)  # so that gunicorn's handler runs where it expects to


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def _gunicorn_worker() -> Any:
    """gunicorn's worker object without its hooks: TERM's handler is a method of it (field notes A6)."""
    handler = signal.getsignal(signal.SIGTERM)
    owner = getattr(handler, "__self__", None)
    return owner if hasattr(owner, "alive") else None

"""The one Router of a process: built after fork by the server's hook, or by the first request where there is none."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from qmflask import journal
from qmflask.places import find_our_commands, source_path, state_path
from qmflask.router import Router
from qmflask.shutdown import stop_models

log = logging.getLogger(__name__)

#: Threads a worker keeps from inference: two thirds for the streams of open pages, the rest for health, status, unload
#: and cancel while every other thread is taken.
RESERVE = 12


class Runtime:
    """Holds the process's Router. A forked child that finds its parent's forgets it and builds its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._router: Router | None = None
        self._pid = 0

    def forget(self) -> None:
        """In a child after fork: the parent's threads, sockets and connections are not ours."""
        self._lock = threading.Lock()
        self._router = None

    def router(self) -> Router:
        """This process's Router, started now if the server has no hooks. Raises ConfigError, StoreError."""
        router = self._router
        if router is not None and self._pid == os.getpid():
            return router
        return self.start(None)

    def start(self, worker: Any) -> Router:
        """Build and start the Router; `worker` is gunicorn's, whose `alive` says when it drains."""
        with self._lock:
            if self._router is None or self._pid != os.getpid():
                server = worker or _gunicorn_worker()
                alive = _alive_of(server)
                find_our_commands()
                source = source_path()
                journal.install(state_path(source) / "logs", as_json=journal.wants_json())
                threads, reserve = _threads(worker)
                sizes = max(1, threads - reserve), _viewers(reserve)
                turn = getattr(worker, "turn", None)
                router = Router(source, state_path(source), alive, *sizes, _grace(worker), turn)
                router.start()
                if hasattr(server, "may_go"):
                    server.may_go = router.may_go
                self._router, self._pid = router, os.getpid()
                if worker is None:
                    atexit.register(self._end)  # nobody will tell us
            return self._router

    def stop(self) -> None:
        """End the Router of this process, if there is one."""
        with self._lock:
            router, self._router = self._router, None
        if router is not None and self._pid == os.getpid():
            router.stop()

    def _end(self) -> None:
        """Without the server's hooks: at the end of the process resign, and stop the models if nobody serves on."""
        router = self._router
        if router is None or self._pid != os.getpid():
            return  # a child of ours, or somebody has stopped it
        last, state = router.leave(), router.state
        self.stop()
        if last:
            stop_models(state)


def _gunicorn_worker() -> Any:
    """gunicorn's worker object without its hooks: TERM's handler is a method of it (field notes A6)."""
    handler = signal.getsignal(signal.SIGTERM)
    owner = getattr(handler, "__self__", None)
    return owner if hasattr(owner, "alive") else None


def _alive_of(worker: Any) -> Callable[[], bool]:
    """Whether the worker takes new requests: it does not once it was told to end, nor when its master is gone."""
    if worker is None:
        return lambda: True
    return lambda: bool(worker.alive) and worker.ppid == os.getppid()


def _threads(worker: Any) -> tuple[int, int]:
    """The worker's threads, and how many of them inference never gets."""
    threads = int(getattr(getattr(worker, "cfg", None), "threads", 0) or 64)
    return threads, min(RESERVE, threads // 4)


def _grace(worker: Any) -> float | None:
    """Seconds from TERM to KILL."""
    grace = getattr(getattr(worker, "cfg", None), "graceful_timeout", None)
    return float(grace) if grace is not None else None


def _viewers(reserve: int) -> int:
    return reserve * 2 // 3


def complain(error: Exception) -> None:
    """Say why the service cannot start, to where its user looks, without a traceback."""
    print(f"qmflask cannot start:\n{error}", file=sys.stderr, flush=True)

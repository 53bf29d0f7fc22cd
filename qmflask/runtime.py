"""The one Router of a process: built after fork by the server's hook, or by the first request where there is none."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from typing import Any

from qmflask import journal
from qmflask.hosting import Hosting
from qmflask.places import source_path, state_path
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
                source = source_path()
                journal.install(state_path(source) / "logs", as_json=journal.wants_json())
                hosting = Hosting(worker)
                reserve = min(RESERVE, hosting.threads // 4)
                slots, viewers = max(1, hosting.threads - reserve), reserve * 2 // 3
                router = Router(source, state_path(source), hosting, slots, viewers)
                router.start()
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


def complain(error: Exception) -> None:
    """Say why the service cannot start, to where its user looks, without a traceback."""
    print(f"qmflask cannot start:\n{error}", file=sys.stderr, flush=True)

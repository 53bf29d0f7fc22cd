"""This process in the list of workers: it signs on after its fork and off at its end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable

from qmflask import errors, processes
from qmflask.processes import Identity
from qmflask.store import Store, admission, reading

log = logging.getLogger(__name__)

#: How long a worker that signs off waits for the end of others that may be dying.
DYING = 0.5


class Roster:
    """One worker's entry. `worker` is its name in the store, `master` the process that forked it."""

    def __init__(self, store: Store) -> None:
        identity = Identity.of(os.getpid())
        assert identity is not None
        self._store = store
        self._identity = identity
        self.worker = f"{identity.pid}-{identity.start_ticks}"
        self.master = _master()
        self.entered = False

    def enter(self) -> None:
        """Sign on; a store that is locked or full just now must not keep a worker from coming up: it tries again."""
        me = self._identity
        try:
            admission.register_worker(self._store, self.worker, me.pid, me.start_ticks, self.master)
            self.entered = True
        except errors.QmflaskError as error:
            log.warning("worker %s is not entered yet: %s", self.worker, error)
            self.entered = False

    def successors(self) -> int:
        """How many workers our master has forked after us that are up and take requests."""
        with self._store.read() as tx:
            rows = reading.workers(tx)
        born = self._identity.start_ticks
        return sum(row.master == self.master and row.start_ticks > born and not row.draining for row in rows)

    def leave(self) -> bool:
        """Sign off; True when the service ends with this worker.

        That is: no worker is left, and our master is still there. With another parent the master was killed, and the
        next start will adopt the models.
        """
        try:
            left = admission.remove_worker(self._store, self.worker)
        except errors.QmflaskError as error:  # the leader sees our end anyway
            log.warning("worker %s could not sign off: %s", self.worker, error)
            return False
        others = [Identity(pid, start, processes.boot_id()) for pid, start in left]
        return not _any_lives(others) and _master() == self.master


def _any_lives(others: Iterable[Identity]) -> bool:
    """Whether one of them goes on living: who was killed a moment ago counts as alive until the kernel has done it."""
    deadline = time.monotonic() + DYING
    while any(other.alive() for other in others):
        if time.monotonic() >= deadline:
            return True
        time.sleep(0.02)
    return False


def _master() -> str:
    """Identity of the process that forked us: workers of one master serve one configuration."""
    identity = Identity.of(os.getppid())
    return f"{identity.pid}-{identity.start_ticks}" if identity else "none"

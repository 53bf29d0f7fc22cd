"""The requests of one worker: who waits, who holds a lease, and what becomes of each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from qmflask import errors
from qmflask.configuration import Live
from qmflask.hangup import Client
from qmflask.leases import MILLISECOND, Lease, Waiter
from qmflask.store import Store, admission, reading
from qmflask.store.admission import Arrival

log = logging.getLogger(__name__)


class FrontDesk:
    """Keeps the worker's waiters and leases. For requests of a live worker this memory is the truth, not their rows.

    It is the `Desk` of `leases`. Thread-safe: request threads come and go, the mailbox thread delivers and reconciles.
    """

    def __init__(self, store: Store, worker: str, wake_leader: Callable[[], None]) -> None:
        self._store = store
        self._worker = worker
        self._wake_leader = wake_leader
        self._lock = threading.Lock()
        self._waiters: dict[int, Waiter] = {}
        self._leases: dict[int, Lease] = {}
        self._unknown: set[int] = set()
        #: How often the mailbox was emptied, or would have been: see `register`.
        self.mails = 0

    def leases(self) -> list[Lease]:
        """Those that are open."""
        with self._lock:
            return list(self._leases.values())

    # -- in request threads -----------------------------------------------------------------------------------

    def enter(
        self,
        request: int,
        proxy: str,
        live: Live,
        arrival: Arrival,
        client: Client,
        hold_ms: int | None,
        *,
        paid: bool,
    ) -> Lease:
        """A lease for a row that is granted in the store."""
        lease = Lease(self, request, arrival.model, proxy, live, arrival, client, time.monotonic_ns(), paid, hold_ms)
        with self._lock:
            self._leases[lease.id] = lease
        return lease

    def register(self, waiter: Waiter, mails: int) -> None:
        """Have `waiter` told what becomes of its row; `mails` is the count of wake-ups from before the row's commit."""
        with self._lock:
            self._waiters[waiter.request] = waiter
        self._wake_leader()
        if self.mails != mails:
            self.deliver()  # a datagram may have come between the commit and our registration

    def unregister(self, waiter: Waiter) -> None:
        """Stop telling; idempotent."""
        with self._lock:
            self._waiters.pop(waiter.request, None)

    def withdraw(self, request: int, *, wake: bool = True) -> None:
        """Remove a row: it is answered, or (`wake`) its client left and whoever waited behind it is looked at."""
        admission.withdraw(self._store, request)
        if wake:
            self._wake_leader()

    def place(self, request: int, model: str) -> reading.Place:
        """Where a waiting request stands, for its client's eyes."""
        with self._store.read() as tx:
            return reading.place(tx, request, model)

    def end_lease(self, lease: Lease, tool_call: bool, answered: bool) -> None:
        """End a lease once, whatever the store says; a row that could not be removed goes when we reconcile."""
        with self._lock:
            if lease._ended:
                return
            lease._ended = True
            self._leases.pop(lease.id, None)
        now = time.monotonic_ns()
        try:
            if admission.release(self._store, lease.id, lease.model, now, _hold(lease, tool_call, now), answered):
                self._wake_leader()
        except errors.QmflaskError as error:
            log.error("request %d: its lease could not be written off yet: %s", lease.id, error)

    # -- in the mailbox thread --------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Re-read the rows of all waiters in one query and hand over what has changed."""
        with self._lock:
            waiting = dict(self._waiters)
        if not waiting:
            return
        for ended in admission.outcomes(self._store, waiting.keys()):
            waiting[ended.id].tell(ended)

    def refuse_all(self, error: errors.QmflaskError) -> None:
        """Tell every waiter the same."""
        with self._lock:
            waiting = list(self._waiters.values())
        for waiter in waiting:
            waiter.tell(error)

    def cancel_marked(self) -> None:
        """End those of our requests that somebody has cancelled."""
        for request in admission.cancelled(self._store, self._worker):
            with self._lock:
                waiter, lease = self._waiters.get(request), self._leases.get(request)
            if lease is not None:
                lease.client.cancel("cancelled")
            elif waiter is not None:
                waiter.woken.set()

    def reconcile(self) -> None:
        """Enter again what the store has lost of ours, and drop what it has of ours that has ended."""
        with self._lock:
            leases, known = dict(self._leases), {*self._leases, *self._waiters}
            waiters = dict(self._waiters)
        own = admission.own_rows(self._store, self._worker)
        for request in waiters.keys() - own:
            self._queue_again(waiters[request])
        for request in leases.keys() - own:
            self._lease_again(leases[request])
        # A row that is unknown twice, a second apart, is no arrival between its commit and our entry.
        unknown = own - known
        stale = unknown & self._unknown
        self._unknown = unknown - stale
        if stale:
            log.warning("dropping %d rows whose requests have ended", len(stale))
            admission.drop_rows(self._store, sorted(stale))
            self._wake_leader()

    def _lease_again(self, lease: Lease) -> None:
        if lease._ended:
            return
        new = admission.reinsert(self._store, lease.arrival, lease.granted_at)
        with self._lock:
            ended = lease._ended
            if not ended:
                self._leases[new] = self._leases.pop(lease.id)
                lease.id = new
        if ended:
            admission.drop_rows(self._store, [new])

    def _queue_again(self, waiter: Waiter) -> None:
        if waiter.request not in self._waiters:
            return
        arrival = waiter.arrival
        new = admission.enqueue(self._store, arrival, "queued" if arrival.kind == "infer" else "pending")
        with self._lock:
            found = self._waiters.get(waiter.request) is waiter
            if found:
                self._waiters[new] = self._waiters.pop(waiter.request)
                waiter.request = new
        if not found:
            admission.drop_rows(self._store, [new])
        self._wake_leader()


def _hold(lease: Lease, tool_call: bool, now: int) -> int | None:
    """Until when the model is kept for the next round of this conversation; None: its answer changes nothing."""
    model = lease.live.config.models.get(lease.model)
    if model is None or model.hold == "never" or (model.hold == "tools" and not tool_call):
        return None
    hold = model.hold_ms if lease.hold_ms is None else lease.hold_ms
    return now + hold * MILLISECOND

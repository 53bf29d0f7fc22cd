"""Who has to leave before an answer's end: idle streams, guests without a lease, and all when the service ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from qmflask.errors import ShuttingDown
from qmflask.hangup import Client
from qmflask.leases import SECOND, Lease, idle_streams
from qmflask.processes import Identity, boot_id
from qmflask.store import Store, reading

log = logging.getLogger(__name__)

#: So long before gunicorn kills a worker whose service ends, its clients are told; half of a short grace.
NOTICE = 3.0


class Departures:
    """Of one worker. Guests come and go in request threads; the rest is the business of the mailbox thread.

    `grace`: the seconds that the server gives a worker to end, None where that is not known.
    """

    def __init__(self, master: str, grace: float | None) -> None:
        self._master = master
        self._grace = grace
        self._guests: set[Client] = set()
        self._draining = False
        self._last_call: int | None = None

    def welcome(self, guest: Client) -> None:
        """Enter a client that holds nothing, and is sent away when the worker drains. Raises ShuttingDown."""
        self._guests.add(guest)
        if self._draining:
            self._guests.discard(guest)
            raise ShuttingDown("this worker is shutting down; ask again", retry_after=1)

    def part(self, guest: Client) -> None:
        """It has left; that it was no guest is fine."""
        self._guests.discard(guest)

    def drain(self, now: int) -> None:
        """From now on the worker takes nothing new: guests leave at once."""
        self._draining = True
        if self._grace is not None:
            self._last_call = now + int((self._grace - min(NOTICE, self._grace / 2)) * SECOND)
        for guest in tuple(self._guests):
            guest.cancel("shutting_down")

    def look(self, store: Store, leases: Sequence[Lease], now: int) -> None:
        """Once a second: whose answer has to end now?"""
        self._cut_idle_streams(store, leases, now)
        if self._last_call is not None and now >= self._last_call and self._is_the_end(store):
            self._last_call = None
            for lease in leases:
                lease.client.cancel("shutting_down")

    def _is_the_end(self, store: Store) -> bool:
        # After HUP our master has forked successors, and gives old workers more time than its grace.
        with store.read() as tx:
            ours = [row for row in reading.workers(tx) if row.master == self._master and not row.draining]
        return not any(Identity(row.pid, row.start_ticks, boot_id()).alive() for row in ours)

    def _cut_idle_streams(self, store: Store, leases: Sequence[Lease], now: int) -> None:
        """A page that was left open must not keep a model for ever."""
        limited = [lease for lease in leases if lease.idle_limit]
        if not limited:
            return
        with store.read() as tx:
            states = {row.model: row.state for row in reading.processes(tx).values()}
            counts = reading.leases(tx)
        for lease in idle_streams(limited, states, counts, now):
            log.info("cutting an idle stream of model %s (idleStreamTimeout)", lease.model)
            lease.client.cancel("idle")

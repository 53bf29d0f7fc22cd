"""A request's right to a model: what it asks for, its wait in the queue, and the lease until its answer's end."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from qmflask import errors
from qmflask.configuration import Live
from qmflask.hangup import Client
from qmflask.states import State
from qmflask.store.admission import Arrival, Ended
from qmflask.store.reading import Place

SECOND = 1_000_000_000
MILLISECOND = 1_000_000


class Desk(Protocol):
    """What leases and waiters need of their worker's Router."""

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
        """A lease for a granted row."""

    def end_lease(self, lease: Lease, tool_call: bool, answered: bool) -> None:
        """End a lease once."""

    def register(self, waiter: Waiter, mails: int) -> None:
        """Have a waiter told what becomes of its row."""

    def unregister(self, waiter: Waiter) -> None:
        """Stop telling."""

    def withdraw(self, request: int, *, wake: bool = True) -> None:
        """Remove a row; `wake` has the leader look at who waited behind it."""

    def place(self, request: int, model: str) -> Place:
        """Where a waiting request stands."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request brings besides its model: its id for people, what the page shows, and the waits it asks for."""

    public_id: str = ""
    detail: Any = None
    patience_ms: int | None = None
    hold_ms: int | None = None


NO_WISHES = Ask()


@dataclass
class Lease:
    """The right to use a model from grant to the end of the answer; `end` exactly once, from the answer's `close`."""

    desk: Desk
    id: int
    model: str
    proxy: str
    live: Live
    arrival: Arrival
    client: Client
    granted_at: int
    paid: bool
    hold_ms: int | None = None
    #: Nanoseconds without a byte after which it counts as idle, 0 = never; and when the last byte moved.
    idle_limit: int = 0
    moved_at: int = 0
    _ended: bool = field(default=False, repr=False)

    @property
    def wait_ms(self) -> float:
        """From arrival to grant."""
        return (self.granted_at - self.arrival.arrival) / MILLISECOND

    def end(self, *, tool_call: bool = False, answered: bool = False) -> None:
        """End the lease, once. `tool_call` decides the hold; from an answer on what the model holds is its size."""
        self.desk.end_lease(self, tool_call, answered)


class Waiter:
    """One request thread that waits for its row to change; woken by the mailbox thread or by its client's end."""

    def __init__(self, request: int, arrival: Arrival) -> None:
        self.request = request
        self.arrival = arrival
        self.outcome: Ended | errors.QmflaskError | None = None
        self.woken = threading.Event()

    def tell(self, outcome: Ended | errors.QmflaskError) -> None:
        """Hand over what became of the request."""
        self.outcome = outcome
        self.woken.set()


class Pending:
    """A request in the queue. Use it in a `with`, or `close` it: a row that nobody waits for any more is withdrawn."""

    def __init__(
        self,
        desk: Desk,
        request: int,
        live: Live,
        arrival: Arrival,
        client: Client,
        hold_ms: int | None,
        mails: int,
    ) -> None:
        self._desk = desk
        self._live = live
        self.arrival = arrival
        self._client = client
        self._hold_ms = hold_ms
        self._waiter = Waiter(request, arrival)
        self._open = True
        self._detach = client.attach(self._waiter.woken.set)
        try:
            desk.register(self._waiter, mails)
        except BaseException:
            self.close()
            raise

    def wait(self, timeout: float | None = None) -> Lease | None:
        """The lease; None when `timeout` seconds have passed without one. Raises what `Router.lease` raises."""
        if not self._waiter.woken.wait(timeout):
            return None
        ended = self.ended()
        assert ended.proxy is not None
        live, arrival, client = self._live, self.arrival, self._client
        return self._desk.enter(ended.id, ended.proxy, live, arrival, client, self._hold_ms, paid=ended.paid)

    def ended(self) -> Ended:
        """Block until the row's outcome is known, and take it; withdraws the row when the client leaves first."""
        self._waiter.woken.wait()
        self._forget()
        outcome = self._waiter.outcome
        if isinstance(outcome, Ended):
            if outcome.state != "granted":
                self._desk.withdraw(self._waiter.request, wake=False)
            if outcome.state == "failed":
                assert outcome.error_code is not None
                raise errors.from_code(outcome.error_code, outcome.error_message or "", retry_after=outcome.retry_after)
            return outcome
        self._desk.withdraw(self._waiter.request)
        raise outcome if outcome is not None else errors.ClientGone(self._client.reason or "cancelled")

    def place(self) -> Place:
        """Where it stands now."""
        return self._desk.place(self._waiter.request, self.arrival.model)

    def close(self) -> None:
        """Leave the queue unless the outcome was taken; idempotent."""
        if self._open:
            self._forget()
            self._desk.withdraw(self._waiter.request)

    def _forget(self) -> None:
        self._open = False
        self._detach()
        self._desk.unregister(self._waiter)

    def __enter__(self) -> Pending:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def idle_streams(
    leases: Iterable[Lease], states: Mapping[str, State], counts: Mapping[str, int], now: int
) -> list[Lease]:
    """GET streams under `/upstream` that keep a model which drains, or whose TTL would be over without them.

    `counts` are all granted requests by model: as long as another one works, the TTL is not over (DESIGN, promise 3).
    """
    idle = [lease for lease in leases if lease.idle_limit and now - lease.moved_at >= lease.idle_limit]
    found = []
    for lease in idle:
        model = lease.live.config.models.get(lease.model)
        ttl = model.ttl * SECOND if model is not None else 0
        alone = counts.get(lease.model, 0) <= sum(other.model == lease.model for other in idle)
        if states.get(lease.model) is State.DRAINING or (ttl and alone and now - lease.moved_at >= ttl):
            found.append(lease)
    return found

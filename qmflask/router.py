"""What request threads talk to: leases, waiting, loading and unloading; one Router per process, built after fork."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from qmflask import errors, processes
from qmflask.activity import Activity, Surroundings
from qmflask.ballast import Ballast
from qmflask.commands import ALL
from qmflask.configreader import Turn
from qmflask.configuration import Configuration, Live
from qmflask.departures import Departures
from qmflask.desk import FrontDesk
from qmflask.hangup import Client, HangupWatcher
from qmflask.leader import Duties, Leader
from qmflask.leases import NO_WISHES, Ask, Lease, Pending
from qmflask.policy.plan import plan
from qmflask.policy.schedule import Reject
from qmflask.processes import Children
from qmflask.roster import Roster, lives
from qmflask.slots import Slots
from qmflask.store import Store, admission, counters, prepare_state_directory, reading, scheduling
from qmflask.store.admission import Admissions, Arrival, Ended, Granted, Stale
from qmflask.store.counters import Sum
from qmflask.store.rows import ProcessRow, SchedulerRow
from qmflask.upstream import Upstream
from qmflask.wake import CANCEL, CONFIG, LEADER, ROWS, Mailbox

log = logging.getLogger(__name__)

SECOND = 1_000_000_000
MILLISECOND = 1_000_000
#: A worker looks at the rows of its waiting requests at least this often, datagram or not.
LOOK = 0.25
#: Without a heartbeat for this long, waiters are told that nobody schedules.
NO_LEADER = 10 * SECOND
#: Streams for pages (events, logs) that a worker serves at once; they never take an inference slot.
VIEWERS = 4
#: How long a request waits for one of the worker's slots before it is refused.
SLOT_WAIT = 0.05


class Router:
    """The request's side of one worker: owns its store connection, wake-up channel, hang-up watcher and threads."""

    def __init__(
        self,
        source: Path,
        state: Path,
        alive: Callable[[], bool],
        slots: int,
        viewers: int = VIEWERS,
        grace: float | None = None,
        turn: Turn | None = None,
    ) -> None:
        self._alive = alive
        self._slots = Slots(slots)
        self.viewers = Slots(viewers)
        for warning in prepare_state_directory(state):
            log.warning("%s", warning)
        self.state = state
        self.source = source
        self._ballast = Ballast(state)
        self._full = not self._ballast.take()
        if self._full:
            self._ballast.shortage(time.monotonic())  # a start says it at once
        self._store = self._open_store()
        self._roster = Roster(self._store)
        self.worker, self.master = self._roster.worker, self._roster.master
        self.departures = Departures(self.master, grace)
        self._configuration = Configuration(source, state)
        self._configuration.boot(self._store, self.master, turn)
        self._admissions = Admissions(self._store)
        self._mailbox = Mailbox(state / "wake", self.worker)
        self._mailbox.sweep(lives)
        self._children = Children()
        self.upstream = Upstream()
        self.hangups = HangupWatcher()
        self._desk = FrontDesk(self._store, self.worker, self.wake_leader)
        self._leader_id: str | None = None
        self._led_at = time.monotonic_ns()  # the last sign of a leader
        self._draining = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="qmflask-mailbox", daemon=True)
        self._leader = Leader(self._open_store, self._store.path, self._children, self._duties())
        self.activity = Activity(state, self._surroundings())
        if self._alive():  # else it was told to end before it was up, and is nobody's successor
            self._roster.enter()

    def _open_store(self) -> Store:
        store = Store(self.state, processes.boot_id())
        store.on_full = self._give_up_ballast
        return store

    def _give_up_ballast(self) -> None:
        self._full = True
        self._ballast.give_up()

    def _duties(self) -> Duties:
        def configuration() -> tuple[int, Any, Any]:
            live = self._configuration.live
            return live.generation, live.config, live.rules

        return Duties(
            worker=self.worker,
            configuration=configuration,
            refresh=self._configuration.refresh,
            send=self._send,
            alive=lambda: self._alive() and not self._stop.is_set(),
            workers=self._worker_pids,
            on_elected=self._elected,
            on_turn=self._on_turn,
            on_learned=self._learned,
        )

    def _surroundings(self) -> Surroundings:
        def load_ms(model: str) -> float | None:
            with self._store.read() as tx:
                row = reading.process(tx, model)
            return row.load_ms if row else None

        def sample() -> dict[str, Any]:
            with self._store.read() as tx:
                return reading.sample(tx)

        return Surroundings(
            worker=self.worker,
            master=self.master,
            config=lambda: self.live.config,
            leading=lambda: self._leader.leading,
            load_ms=load_ms,
            sample=sample,
            full=lambda: self._full,
            slots=lambda: {
                kind: (s.total, s.taken) for kind, s in (("inference", self._slots), ("page", self.viewers))
            },
        )

    def start(self) -> None:
        """Start the threads: from here on requests are served, and this worker may lead."""
        self.activity.start()
        self._thread.start()
        self._leader.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Resign, answer the waiters, end the threads; leases that still run end with the process."""
        self._stop.set()
        self._leader.stop(timeout)
        self._mailbox.send(self.worker, ROWS)
        if self._thread.is_alive():
            self._thread.join(timeout)
        self.activity.stop(timeout)
        self.hangups.close()
        self.upstream.close()
        self._mailbox.close()
        self._children.release()
        self._store.close()

    @property
    def ending(self) -> bool:
        """True when this worker takes nothing new: streams for pages end, and their readers come back elsewhere."""
        return self._draining or self._stop.is_set() or not self._alive()

    def leave(self) -> bool:
        """Take this worker out of the list; True when the service ends with it."""
        return self._roster.leave()

    def may_go(self) -> bool:
        """Whether those that are to replace this worker are up."""
        return self._roster.may_go()

    @property
    def live(self) -> Live:
        """The configuration in force in this process."""
        return self._configuration.live

    def newest(self) -> Live:
        """The configuration in force in the store: before somebody is told that a name means nothing, we catch up."""
        with contextlib.suppress(errors.QmflaskError, OSError, ValueError):  # then what we have is the newest we can
            self._configuration.refresh(self._store)
        return self.live

    # -- leases -----------------------------------------------------------------------------------------------

    def take_slot(self) -> None:
        """Take one of the worker's inference slots for a request, from before its body is read. Raises Overloaded."""
        if not self._slots.acquire(timeout=SLOT_WAIT):
            raise errors.Overloaded("all inference slots of this worker are taken; try again", retry_after=1)

    def free_slot(self) -> None:
        """Give back what `take_slot` took, exactly once."""
        self._slots.release()

    def lease(self, live: Live, model: str, client: Client, ask: Ask = NO_WISHES) -> Lease:
        """Wait until `model` is ready and granted to this request.

        Raises what DESIGN section 6 lists for a request that cannot be served, ClientGone when the client left first.
        """
        outcome = self.admit(live, model, client, ask)
        if isinstance(outcome, Lease):
            return outcome
        with outcome:
            lease = outcome.wait()
        assert lease is not None
        return lease

    def admit(self, live: Live, model: str, client: Client, ask: Ask = NO_WISHES) -> Lease | Pending:
        """Grant at once, or queue: then the caller waits on what is returned and closes it. Raises like `lease`."""
        self._refuse_when_full()
        arrival = self._arrival("infer", live, model, ask)
        mails = self._desk.mails
        while True:
            if client.gone:
                raise errors.ClientGone(client.reason)
            if self._draining:
                raise errors.ShuttingDown("this worker is shutting down; ask again", retry_after=1)
            outcome = self._admissions.admit(live.rules, live.generation, arrival, time.monotonic_ns())
            if not isinstance(outcome, Stale):
                break
            live = self._configuration.take_up(self._store, outcome.generation)
            if arrival.model not in live.config.models:
                raise errors.ModelNotFound(f"model {arrival.model} was removed from the configuration")
        if isinstance(outcome, Reject):
            raise errors.from_code(outcome.code, outcome.message, retry_after=outcome.retry_after)
        if isinstance(outcome, Granted):
            return self._desk.enter(outcome.id, outcome.proxy, live, arrival, client, ask.hold_ms, paid=False)
        return Pending(self._desk, outcome.id, live, arrival, client, ask.hold_ms, mails)

    def _refuse_when_full(self) -> None:
        if self._full:
            raise errors.StoreFull(self._ballast.shortage(time.monotonic()), retry_after=10)

    def lease_peer(self, live: Live, name: str, client: Client, ask: Ask = NO_WISHES) -> Lease:
        """Enter a request that a peer answers: nobody schedules it, but it is listed and can be cancelled."""
        if self._draining:
            raise errors.ShuttingDown("this worker is shutting down; ask again", retry_after=1)
        self._refuse_when_full()
        arrival = self._arrival("peer", live, name, ask)
        row = admission.reinsert(self._store, arrival, arrival.arrival)
        return self._desk.enter(row, "", live, arrival, client, None, paid=False)

    def _arrival(self, kind: str, live: Live, model: str, ask: Ask = NO_WISHES) -> Arrival:
        now = time.monotonic_ns()
        configured = live.config.models.get(model)
        patience = configured.patience_ms if configured else live.config.patience_ms
        if ask.patience_ms is not None:
            patience = ask.patience_ms
        return Arrival(
            public_id=ask.public_id or uuid.uuid4().hex,
            worker=self.worker,
            kind=kind,
            model=model,
            arrival=now,
            arrival_wall=time.time(),
            priority=live.config.priority.get(model, 0),
            patience_at=now + patience * MILLISECOND,
            detail=orjson.dumps(ask.detail).decode() if ask.detail is not None else None,
        )

    def load_of(self, selector: str, *, everybody: bool = False) -> reading.SelectorLoad:
        """What a selector chooses by: its requests at other workers, or (`everybody`) at this one too."""
        with self._store.read() as tx:
            return reading.selector_load(tx, selector, "" if everybody else self.worker)

    def process_of(self, model: str) -> ProcessRow | None:
        """A model's process now; None if it never had one."""
        with self._store.read() as tx:
            return reading.process(tx, model)

    # -- commands ---------------------------------------------------------------------------------------------

    def load(self, live: Live, model: str, client: Client | None = None) -> Ended:
        """Load a model and wait until it is ready; raises what a request for it would get."""
        return self._command(self._arrival("load", live, model), client)

    def unload(self, live: Live, model: str | None, client: Client | None = None) -> None:
        """Unload one model, or all; returns when their process groups are gone."""
        self._command(self._arrival("unload", live, model or ALL), client)

    def end_hold(self, model: str) -> bool:
        """Let a held model go when others need its room; True if it was held."""
        held = admission.end_hold(self._store, model, time.monotonic_ns())
        if held:
            self.wake_leader()
        return held

    def _command(self, arrival: Arrival, client: Client | None) -> Ended:
        mails = self._desk.mails
        row = admission.enqueue(self._store, arrival)
        with Pending(self._desk, row, self.live, arrival, client or Client(), None, mails) as pending:
            return pending.ended()

    def cancel(self, public_id: str) -> bool:
        """Cancel a request of any worker; False when there is none of that id."""
        workers = admission.cancel(self._store, public_id)
        for worker in workers:
            self._send(worker, CANCEL)
        return bool(workers)

    def active_profile(self, live: Live) -> str | None:
        """The profile that somebody made active, by any worker; None for one that the configuration has no more."""
        if not live.config.profiles:
            return None
        with self._store.read() as tx:
            name = reading.scheduler(tx).active_profile
        return name if name in live.config.profiles else None

    def activate_profile(self, live: Live, name: str | None) -> None:
        """Make a profile (or none) active for all workers, and queue what it preloads."""
        profile = live.config.profiles[name] if name is not None else None
        now = time.monotonic_ns()
        with self._store.write() as tx:
            scheduling.activate_profile(
                tx, name, profile.preload if profile else (), now, now + live.config.patience_ms * MILLISECOND
            )
        self.wake_leader()

    def reload(self) -> str | None:
        """Read the configuration's source now; "" when it is in force, else the error."""
        error = self._configuration.reload(self._store)
        with self._store.write() as tx:
            scheduling.set_config_error(tx, error or None)
        self._spread(self._store)
        return error

    def counters(self) -> Sequence[Sum]:
        """What the leaders have counted so far."""
        with self._store.read() as tx:
            return list(counters.read(tx))

    def status(self) -> reading.Status:
        """What the box is doing, in one consistent read."""
        with self._store.read() as tx:
            return reading.status(tx)

    def plan(self, model: str) -> dict[str, Any]:
        """What would happen now if `model` were asked for, and why; nothing is done."""
        rules = self.live.rules
        with self._store.read() as tx:
            snapshot = reading.snapshot(tx, rules, whole=True)
        return plan(snapshot, rules, model, time.monotonic_ns())

    def relearn(self) -> None:
        """Have the leader forget the floors of foreign use; the next trusted reading sets them."""
        self._command(self._arrival("relearn", self.live, ALL), None)

    # -- waking -----------------------------------------------------------------------------------------------

    def wake_leader(self) -> None:
        """Make the leader look at the queue, whoever it is."""
        if self._leader.leading:
            self._leader.ring()
        elif self._leader_id is not None:
            self._mailbox.send(self._leader_id, LEADER)

    def _send(self, worker: str, kind: bytes) -> None:
        if worker == self.worker and kind == ROWS:
            self._desk.mails += 1
            self._deliver()
        else:
            self._mailbox.send(worker, kind)

    def _run(self) -> None:
        """The mailbox thread: hands outcomes to waiters, and keeps house once a second."""
        next_round = 0.0
        while not self._stop.is_set():
            try:
                kinds = self._mailbox.receive(LOOK)
                self._desk.mails += 1
                if self._store.replaced():  # first of all: what is read from the old one may be damaged
                    self._move_to_new_store()
                if LEADER in kinds:
                    self._leader.ring()
                if CONFIG in kinds:
                    self._configuration.refresh(self._store)
                    self._find_leader()
                    self._leader.ring()
                if CANCEL in kinds:
                    self._desk.cancel_marked()
                self._deliver()
                if time.monotonic() >= next_round or not self._alive():  # a drain is short
                    next_round = time.monotonic() + 1.0
                    self._keep_house()
            except errors.QmflaskError as error:
                log.warning("the store does not answer: %s", error)
            except Exception:
                # This thread is what every waiter of the worker depends on.
                log.exception("keeping house failed")
        self._desk.refuse_all(errors.ShuttingDown("qmflask is shutting down; ask again", retry_after=1))

    def _deliver(self) -> None:
        """Hand over what has become of requests that wait; a worker that drains has nothing good to tell them."""
        if self._alive():
            self._desk.deliver()
        else:
            self._drain()

    def _drain(self) -> None:
        if not self._draining:
            self._draining = True
            self.departures.drain(time.monotonic_ns())
            admission.set_draining(self._store, self.worker)
        self._desk.refuse_all(errors.ShuttingDown("this worker is shutting down; ask again", retry_after=1))

    # -- keeping house ----------------------------------------------------------------------------------------

    def _keep_house(self) -> None:
        """Once a second: reap, follow the configuration and the leader, compare our leases with our rows."""
        self._children.reap()
        self._full = not self._ballast.take()
        if not self._alive() and not self._draining:
            self._drain()
        if not self._roster.entered and self._alive():
            self._roster.enter()
        self._configuration.refresh(self._store)
        state = self._find_leader()
        now = time.monotonic_ns()
        if state.leader is not None:
            self._led_at = max(self._led_at, state.heartbeat)
        if now - self._led_at > NO_LEADER:
            self._desk.refuse_all(
                errors.NoScheduler("no scheduler has been heard for 10 s; see the log", retry_after=5)
            )
        self._desk.reconcile()
        self.departures.look(self._store, self._desk.leases(), time.monotonic_ns())

    def _move_to_new_store(self) -> None:
        """The file was removed or replaced: open the new one and enter ourselves, our leases and waiters again."""
        log.warning("the state store was replaced: entering %d leases again", len(self._desk.leases()))
        self._store.reopen()
        if self._mailbox.lost(self.state / "wake"):
            self._mailbox.close()
            self._mailbox = Mailbox(self.state / "wake", self.worker)
        self._roster.enter()
        if self._draining:
            admission.set_draining(self._store, self.worker)
        self._configuration.refresh(self._store)
        self._desk.reconcile()

    def _worker_pids(self) -> set[int]:
        with self._store.read() as tx:
            return {row.pid for row in reading.workers(tx)}

    def _find_leader(self) -> SchedulerRow:
        """Whom to wake."""
        with self._store.read() as tx:
            state = reading.scheduler(tx)
        self._leader_id = state.leader
        return state

    # -- leading ----------------------------------------------------------------------------------------------

    def _elected(self, store: Store, generation: int) -> None:
        self._leader_id = self.worker
        if not self._configuration.refresh(store):  # what its source says now can be published in its place
            self._on_turn(store, generation, time.monotonic_ns(), wait=True)
        config = self.live.config
        now = time.monotonic_ns()
        with store.write(generation) as tx:
            patience = now + config.patience_ms * MILLISECOND
            profile = config.profiles.get(reading.scheduler(tx).active_profile or "")
            more = [model for model in profile.preload if model not in config.preload] if profile else []
            scheduling.queue_preload(tx, [*config.preload, *more], self.master, now, patience)
        self._spread(store)  # so that the others know whom to wake

    def _learned(self, store: Store) -> None:
        """A size was learned: the next decision counts with it, ours and that of the other workers."""
        self._configuration.refresh(store)
        self._spread(store)

    def _on_turn(self, store: Store, generation: int, now: int, *, wait: bool = False) -> None:
        error = self._configuration.look(store, now, wait=wait)
        if error is not None:
            if error:
                log.error("the changed configuration is not taken: %s", error)
            with store.write(generation) as tx:
                scheduling.set_config_error(tx, error or None)
            self._spread(store)

    def _spread(self, store: Store) -> None:
        """Tell every worker that there may be a new configuration or leader."""
        with store.read() as tx:
            names = [row.id for row in reading.workers(tx)]
        for name in names:
            self._mailbox.send(name, CONFIG)
        self._leader.ring()

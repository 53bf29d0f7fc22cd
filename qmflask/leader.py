"""Standing for election and leading: the thread of each worker that may become the scheduler's leader."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from qmflask import processes
from qmflask.config import Config
from qmflask.election import Candidacy
from qmflask.errors import QmflaskError
from qmflask.policy.rules import Rules
from qmflask.processes import Children, Identity
from qmflask.rebuild import GRACE, restore, survivors
from qmflask.store import Deposed, Store, StoreError, reading, scheduling
from qmflask.term import Term
from qmflask.writelock import WriteLockWatch

log = logging.getLogger(__name__)

SECOND = 1_000_000_000
#: How often a standby tries the lock when no event tells it to.
POLL = 0.25
#: So many looks at the lock for one at the store: who leads changes seldom, and reading it costs more.
LOOKS = 4
#: A tick that hangs this long makes the leader's own watchdog resign.
HUNG = 3 * SECOND
#: A leader in state T is replaced after this time, a silent one after the second.
STOPPED = 5 * SECOND
SILENT = 20 * SECOND


@dataclass(frozen=True)
class Duties:
    """What the leader's thread needs of its worker."""

    worker: str
    configuration: Callable[[], tuple[int, Config, Rules]]
    refresh: Callable[[Store], bool]
    send: Callable[[str, bytes], None]
    alive: Callable[[], bool]
    workers: Callable[[], Collection[int]]
    on_elected: Callable[[Store, int], None]
    on_turn: Callable[[Store, int, int], None]
    on_learned: Callable[[Store], None]


class Leader:
    """Stands until it wins, leads until its worker drains, is deposed or told to stop; owns two threads."""

    def __init__(self, open_store: Callable[[], Store], database: Path, children: Children, duties: Duties) -> None:
        self._open_store = open_store
        self._database = database
        self._children = children
        self._duties = duties
        self._stop = threading.Event()
        self._term: Term | None = None
        self._last_turn = 0
        self._candidacy: Candidacy | None = None
        self._thread = threading.Thread(target=self._run, name="qmflask-leader", daemon=True)
        self._watchdog = threading.Thread(target=self._watch_own_tick, name="qmflask-leader-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to stand."""
        self._thread.start()
        self._watchdog.start()

    @property
    def leading(self) -> bool:
        """True while this worker leads."""
        return self._term is not None

    def ring(self) -> None:
        """Make the leader look now, if we lead."""
        term = self._term
        if term is not None:
            term.ring()

    def stop(self, timeout: float) -> None:
        """Resign and end both threads."""
        self._stop.set()
        self.ring()
        for thread in (self._thread, self._watchdog):
            if thread.is_alive():
                thread.join(timeout)

    def _may_stand(self) -> bool:
        return not self._stop.is_set() and self._duties.alive()

    def _run(self) -> None:
        store = self._open_store()
        self._candidacy = candidacy = Candidacy(store.directory)
        try:
            while self._may_stand():
                if store.replaced():
                    self._reopen(store)
                elif candidacy.try_win():
                    self._lead(store, candidacy)
                else:
                    self._stand_by(store, candidacy)
        finally:
            candidacy.resign()
            store.close()

    def _reopen(self, store: Store) -> None:
        try:
            store.reopen()
        except (QmflaskError, StoreError, OSError) as error:
            log.error("the new state store cannot be opened: %s", error)
            self._stop.wait(POLL)

    def _take_up_survivors(self, store: Store, generation: int) -> None:
        """On a fresh store: give the workers a moment to enter their leases again before anything is decided."""
        if not survivors(store):
            return
        log.warning("the state store is new, but models run: waiting %g s for the leases on them", GRACE)
        self._stop.wait(GRACE)
        restore(store, generation, survivors(store))

    def _lead(self, store: Store, candidacy: Candidacy) -> None:
        """One term, from the won lock to the released one."""
        generation = None
        try:
            generation = scheduling.take_office(store, self._duties.worker, time.monotonic_ns())
            self._duties.on_elected(store, generation)
            self._take_up_survivors(store, generation)
            self._last_turn = time.monotonic_ns()
            term = Term(
                store,
                generation,
                self._duties.worker,
                self._children,
                self._duties.configuration,
                lambda: self._duties.refresh(store),
                self._duties.send,
                self._note_turn,
                lambda: self._duties.on_learned(store),
            )
            self._term = term
            term.run(lambda: self._may_go_on(store, candidacy, generation))
        except Deposed as event:
            log.warning("no longer leading: %s", event)
        except QmflaskError as error:
            log.error("leading failed, standing again: %s", error)
            self._stop.wait(POLL)
        except Exception:
            # A bug in a tick must not end scheduling for good: the next term takes everything up from the rows.
            log.exception("leading failed, standing again")
            self._stop.wait(1.0)
        finally:
            self._term = None
            if generation is not None:
                self._write_vacancy(store, generation)
            candidacy.resign()

    def _may_go_on(self, store: Store, candidacy: Candidacy, generation: int) -> bool:
        if not (self._may_stand() and candidacy.held) or store.replaced():
            return False
        self._duties.on_turn(store, generation, time.monotonic_ns())
        return True

    def _note_turn(self, now: int) -> None:
        self._last_turn = now

    def _write_vacancy(self, store: Store, generation: int) -> None:
        try:
            scheduling.leave_office(store, generation)
        except QmflaskError as error:
            log.warning("could not write that nobody leads: %s", error)

    def _watch_own_tick(self) -> None:
        """Resign when a tick hangs: the lock is released from here, and the term's next write is refused.

        This thread also sees who stands still in a write of the store, since all others may be waiting for him.
        """
        write_lock = WriteLockWatch(self._database, self._duties.workers)
        while not self._stop.wait(0.5):
            write_lock.look(time.monotonic_ns())
            term, candidacy = self._term, self._candidacy
            if term is not None and candidacy is not None and time.monotonic_ns() - self._last_turn > HUNG:
                log.error("the scheduler's tick hangs for %d s: resigning", HUNG // SECOND)
                candidacy.resign()

    # -- standing by ------------------------------------------------------------------------------------------

    def _stand_by(self, store: Store, candidacy: Candidacy) -> None:
        """Wait until the leader's process ends or its lock is free, for a while; judge a leader that stands still."""
        leader = self._leader_process(store)
        if leader is None:
            self._stop.wait(POLL)
            return
        identity, _ = leader
        descriptor = processes.pidfd(identity)
        if descriptor is None:
            self._stop.wait(0.01)
            return
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            for _ in range(LOOKS):
                if poller.poll(POLL * 1000) or not self._may_stand():
                    return  # it has ended: its lock is free now
                if candidacy.try_win():
                    return  # it has resigned, and the lock is ours
        finally:
            os.close(descriptor)
        latest = self._leader_process(store)
        if latest is not None and latest[0] == identity:
            self._judge(*latest)

    def _leader_process(self, store: Store) -> tuple[Identity, int] | None:
        try:
            with store.read() as tx:
                state = reading.scheduler(tx)
                workers = {row.id: row for row in reading.workers(tx)}
        except QmflaskError as error:
            log.warning("standing by: %s", error)
            return None
        row = workers.get(state.leader or "")
        if row is None or row.id == self._duties.worker:
            return None
        return Identity(row.pid, row.start_ticks, store.boot_id), state.heartbeat

    def _judge(self, identity: Identity, heartbeat: int) -> None:
        """Kill a leader that is stopped for 5 s or silent for 20 s; only its death frees what it holds."""
        silence = time.monotonic_ns() - heartbeat
        if heartbeat and (silence > SILENT or (silence > STOPPED and identity.stopped())):
            log.error("the leader (pid %d) stood still for %d s: killing it", identity.pid, silence // SECOND)
            processes.send(identity, signal.SIGKILL)

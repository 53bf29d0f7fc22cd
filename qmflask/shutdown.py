"""Stopping every model when the service ends; runs where no leader is left, in the master's `on_exit`."""

from __future__ import annotations

import logging
import selectors
import time
from pathlib import Path

from qmflask import journal, processes
from qmflask.configfiles import read_resolved
from qmflask.election import Candidacy
from qmflask.places import find_our_commands, source_path, state_path
from qmflask.processes import Children
from qmflask.states import DOWN, State
from qmflask.store import Store, reading, scheduling
from qmflask.trees import SECOND, Trees

log = logging.getLogger(__name__)

#: How long the lock is tried for; whoever has it then is a new generation of the service, whose models these are now.
LOCK_WAIT = 2.0


def stop_service() -> None:
    """What the master does last: stop all models, unless a new master leads or the configuration keeps them."""
    state = state_path(source_path())
    journal.install(state / "logs", as_json=journal.wants_json())
    stop_models(state)


def stop_models(state: Path, *, kept: bool = True) -> bool:
    """Stop all models by their rows, in parallel, bounded by the largest `unloadTimeout`.

    False, and nothing is done, when somebody else leads (a new master after USR2), or with `onShutdown: keep`, unless
    `kept` is False: somebody wants those stopped too.
    """
    if not (state / "state.db").exists():
        return False
    find_our_commands()  # for `cmdStop`
    candidacy = Candidacy(state)
    deadline = time.monotonic() + LOCK_WAIT
    while not candidacy.try_win():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    store = Store(state, processes.boot_id())
    try:
        if kept and _kept(store, state):
            return False
        _stop(store, scheduling.take_office(store, "shutdown", time.monotonic_ns()))
        return True
    finally:
        store.close()
        candidacy.resign()


def _kept(store: Store, state: Path) -> bool:
    with store.read() as tx:
        generation = reading.scheduler(tx).config_generation
    if generation == 0:
        return False
    try:
        return read_resolved(state, generation).on_shutdown == "keep"
    except (OSError, ValueError) as error:
        log.warning("the resolved configuration is lost (%s): stopping the models", error)
        return False


def _stop(store: Store, generation: int) -> None:
    selector = selectors.DefaultSelector()
    trees = Trees(
        store,
        generation,
        Children(),
        wake=lambda: None,
        watch=lambda fd, model: void(selector.register(fd, selectors.EVENT_READ, model)),
        unwatch=lambda fd: void(selector.unregister(fd)),
    )
    try:
        with store.write(generation) as tx:
            for swap in reading.swaps(tx):
                scheduling.close_swap(tx, swap.id)
            for row in reading.processes(tx).values():
                if row.state in (State.STARTING, State.READY, State.DRAINING):
                    end = time.monotonic_ns() + int(row.unload_timeout * SECOND)
                    scheduling.set_state(tx, row.model, State.STOPPING, "the service stopped", deadline=end)
            rows = reading.processes(tx)
        left = [row.model for row in rows.values() if row.state not in DOWN]
        if left:
            log.info("stopping with the service: %s", ", ".join(sorted(left)))
        trees.adopt(rows, {}, time.monotonic_ns())
        while _left(store):
            due = trees.next_look()
            timeout = 0.5 if due is None else min(0.5, max(0, due - time.monotonic_ns()) / SECOND)
            exited = {key.data for key, _ in selector.select(timeout)}
            trees.poll(exited, time.monotonic_ns())
    finally:
        trees.close()
        selector.close()


def _left(store: Store) -> bool:
    with store.read() as tx:
        return any(row.state not in DOWN for row in reading.processes(tx).values())


def void(_: object) -> None:
    """Drop a value, where a callback must return nothing."""

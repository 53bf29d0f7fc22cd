"""Who is the last worker: the one that finds nobody else alive, whatever the list says."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qmflask import processes, roster
from qmflask.processes import Identity
from qmflask.roster import Roster
from qmflask.store import Store, admission, prepare_state_directory, reading


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    prepare_state_directory(tmp_path)
    opened = Store(tmp_path, processes.boot_id())
    yield opened
    opened.close()


@pytest.fixture
def other(store: Store) -> Iterator[subprocess.Popen[bytes]]:
    """Another worker of the list, a process of its own."""
    with subprocess.Popen(["sleep", "60"]) as process:
        identity = Identity.of(process.pid)
        assert identity is not None
        admission.register_worker(store, "other", identity.pid, identity.start_ticks, "master")
        yield process
        process.kill()


def names(store: Store) -> set[str]:
    with store.read() as tx:
        return {row.id for row in reading.workers(tx)}


def test_a_worker_enters_and_leaves_the_list(store: Store) -> None:
    me = Roster(store)
    me.enter()
    assert names(store) == {me.worker}
    assert me.leave()
    assert names(store) == set()


def test_who_leaves_others_behind_is_not_the_last(
    store: Store, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "DYING", 0.05)
    me = Roster(store)
    me.enter()
    assert not me.leave()
    assert names(store) == {"other"}


def test_a_dead_worker_in_the_list_counts_as_dead_though_nobody_has_reaped_it(
    store: Store, other: subprocess.Popen[bytes]
) -> None:
    os.kill(other.pid, signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert Roster(store).leave()


def test_a_dying_worker_counts_as_dead(
    store: Store, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, but not gone yet when the last one looks: then nobody would stop the models."""
    monkeypatch.setattr(roster, "DYING", 60.0)
    looked = threading.Event()
    alive = Identity.alive

    def look(identity: Identity) -> bool:
        found = alive(identity)
        looked.set()
        return found

    def die() -> None:
        assert looked.wait(20)
        os.kill(other.pid, signal.SIGKILL)

    monkeypatch.setattr(Identity, "alive", look)
    kernel = threading.Thread(target=die)
    kernel.start()
    try:
        assert Roster(store).leave()
    finally:
        kernel.join()


def test_without_its_master_nobody_ends_the_service(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    me = Roster(store)
    me.enter()
    monkeypatch.setattr(roster, "_master", lambda: "1-1")
    assert not me.leave()


def test_who_cannot_sign_on_tries_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    me = Roster(store)
    with monkeypatch.context() as patch:
        patch.setattr(admission, "register_worker", refuse)
        me.enter()
    assert not me.entered
    me.enter()
    assert me.entered


def refuse(*_: object) -> None:
    """A store that is locked."""
    raise roster.errors.StoreBusy("locked")

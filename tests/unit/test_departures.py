"""Who is sent away when a worker drains: guests at once, the others shortly before its service's end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qmflask.departures import Departures
from qmflask.errors import ShuttingDown
from qmflask.hangup import Client
from qmflask.leases import SECOND
from qmflask.processes import Identity, boot_id
from qmflask.store import Store, admission, prepare_state_directory


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    prepare_state_directory(tmp_path)
    opened = Store(tmp_path, boot_id())
    enter(opened, "ours", os.getpid(), "m")
    admission.set_draining(opened, "ours")
    yield opened
    opened.close()


def enter(store: Store, name: str, pid: int, master: str) -> None:
    """Another worker, alive or dead."""
    identity = Identity.of(pid)
    admission.register_worker(store, name, pid, identity.start_ticks if identity else 1, master)


def lease() -> Any:
    return SimpleNamespace(client=Client(), idle_limit=0)


def test_guests_leave_at_once_and_none_is_let_in() -> None:
    departures = Departures("m", 30)
    stays, leaves = Client(), Client()
    departures.welcome(stays)
    departures.welcome(leaves)
    departures.part(stays)
    departures.part(Client())
    departures.drain(0)
    assert (stays.reason, leaves.reason) == (None, "shutting_down")
    with pytest.raises(ShuttingDown):
        departures.welcome(Client())


@pytest.mark.parametrize(("grace", "told_at"), [(30.0, 27), (4.0, 2), (None, None)])
def test_all_others_are_told_before_the_kill(store: Store, grace: float | None, told_at: int | None) -> None:
    departures, held = Departures("m", grace), lease()
    departures.look(store, [held], 1000 * SECOND)
    assert held.client.reason is None, "it does not drain"
    departures.drain(0)
    for second in range(40):
        departures.look(store, [held], second * SECOND)
        expected = None if told_at is None or second < told_at else "shutting_down"
        assert held.client.reason == expected, second


@pytest.mark.parametrize(
    ("pid", "master", "draining", "told"),
    [
        (os.getppid(), "m", False, False),  # HUP: a successor of the same master, which then waits longer
        (os.getppid(), "m", True, True),
        (os.getppid(), "new", False, True),  # USR2: the new master's, while ours ends
        (1 << 22, "m", False, True),  # dead, and nobody has taken its row away
    ],
)
def test_what_is_the_end_of_the_service(store: Store, pid: int, master: str, draining: bool, told: bool) -> None:
    enter(store, "other", pid, master)
    if draining:
        admission.set_draining(store, "other")
    departures, held = Departures("m", 30), lease()
    departures.drain(0)
    departures.look(store, [held], 28 * SECOND)
    assert (held.client.reason == "shutting_down") is told

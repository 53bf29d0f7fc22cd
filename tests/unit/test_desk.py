"""What a worker's memory knows of its requests, against what the store has of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qmflask.desk import FrontDesk
from qmflask.hangup import Client
from qmflask.store import Store, admission, prepare_state_directory
from qmflask.store.admission import Arrival

LIVE: Any = SimpleNamespace(config=SimpleNamespace(models={}))


class Office:
    """A desk, its store, and how often it woke the leader."""

    def __init__(self, folder: Path) -> None:
        prepare_state_directory(folder)
        self.store = Store(folder, "boot-1")
        self.wakes = 0
        self.desk = FrontDesk(self.store, "ours", self.wake)

    def wake(self) -> None:
        self.wakes += 1

    def row(self, public_id: str, worker: str = "ours") -> tuple[int, Arrival]:
        """A lease in the store, of which the desk does not know yet."""
        arrival = Arrival(public_id, worker, "infer", "alpha", 1, 0.0)
        return admission.reinsert(self.store, arrival, 1), arrival

    def enter(self, request: int, arrival: Arrival) -> None:
        """From here on it knows."""
        self.desk.enter(request, "", LIVE, arrival, Client(), None, paid=False)

    def rows(self) -> list[str]:
        """The public ids of all rows, whoever's."""
        with self.store.read() as tx:
            return [row["public_id"] for row in tx.execute("SELECT public_id FROM requests ORDER BY public_id")]


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    opened = Office(tmp_path / "state")
    yield opened
    opened.store.close()


def test_a_phantom_row_goes_at_the_second_look_and_nothing_else_does(office: Office) -> None:
    """One that is left of a request whose end could not be written; its model would never be stopped again."""
    office.row("phantom")
    office.row("a neighbour's", worker="theirs")
    office.enter(*office.row("running"))
    office.desk.reconcile()
    assert office.rows() == ["a neighbour's", "phantom", "running"] and not office.wakes
    office.desk.reconcile()
    assert office.rows() == ["a neighbour's", "running"]
    assert office.wakes == 1, "somebody may wait for the room"


def test_a_row_that_is_entered_between_two_looks_is_no_phantom(office: Office) -> None:
    request, arrival = office.row("arriving")
    office.desk.reconcile()
    office.enter(request, arrival)
    office.desk.reconcile()
    office.desk.reconcile()
    assert office.rows() == ["arriving"]


def test_a_lease_that_the_store_lost_is_entered_again(office: Office) -> None:
    request, arrival = office.row("running")
    office.enter(request, arrival)
    admission.drop_rows(office.store, [request])
    office.desk.reconcile()
    office.desk.reconcile()
    assert office.rows() == ["running"]

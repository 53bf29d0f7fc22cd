"""Command rows that meet in one look: the second sees what the first has written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qmflask.commands import Commands
from qmflask.config import Config, Model
from qmflask.inforce import InForce
from qmflask.states import State
from qmflask.store import Store, admission, prepare_state_directory, reading, scheduling
from qmflask.store.admission import Arrival
from qmflask.store.rows import ProcessRow

NOW = 1_000_000_000


class Stops:
    """Trees of which only the stop signals are noted."""

    def __init__(self) -> None:
        self.signalled: list[str] = []

    def signal_stop(self, row: ProcessRow) -> None:
        """Part of the Stopper contract."""
        self.signalled.append(row.model)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    prepare_state_directory(tmp_path)
    opened = Store(tmp_path, "boot-1")
    yield opened
    opened.close()


def test_an_unload_of_a_model_that_drains_for_an_unload(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    with store.write(term) as tx:
        scheduling.set_state(tx, "ant", State.STARTING, "asked", token="t")
        scheduling.set_state(tx, "ant", State.READY, "loaded")
        scheduling.set_state(tx, "ant", State.DRAINING, "unload", deadline=NOW + 1)
    admission.enqueue(store, Arrival("id", "w1", "unload", "ant", NOW, 0.0))
    stops = Stops()
    in_force = InForce(store, lambda: 0, lambda: True)
    commands = Commands(store, term, stops, lambda: None, in_force)
    commands.run(0, Config(models={"ant": Model(id="ant")}), NOW + 2)
    with store.read() as tx:
        row = reading.process(tx, "ant")
    assert row is not None and row.state is State.STOPPING
    assert stops.signalled == ["ant"]

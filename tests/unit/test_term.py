"""A leader that has not heard of a new configuration takes it up before it decides about what was asked under it."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qmflask import term as term_module
from qmflask.config import Config
from qmflask.configfiles import resolved_path
from qmflask.configreader import ConfigReader
from qmflask.configuration import Configuration
from qmflask.errors import Unavailable
from qmflask.policy import schedule
from qmflask.policy.rules import Rules
from qmflask.processes import Children, boot_id
from qmflask.states import State
from qmflask.store import Store, admission, prepare_state_directory, reading, scheduling
from qmflask.store.admission import Admissions, Arrival, Queued
from qmflask.term import Term

#: No program of that name: whoever starts a model learns at once that it was tried, and nothing runs.
OLD = "models: {old: {cmd: '/no/such/program ${PORT}'}}\n"
NEW = OLD.replace("{old:", "{new: {cmd: '/no/such/program ${PORT}'}, old:")
WORKER = "worker-1"


class Box:
    """One state directory with two workers: one leads, the other may know more than the leader."""

    def __init__(self, folder: Path) -> None:
        self.state, self.source = folder / "state", folder / "config.yaml"
        prepare_state_directory(self.state)
        self.store = Store(self.state, boot_id())
        self.source.write_text(OLD)
        self.leader, self.other = (Configuration(self.source, self.state) for _ in range(2))
        self.leader.boot(self.store, "master")
        self.other.boot(self.store, "master")
        self.asked: list[int] = []

    def publish(self) -> int:
        """The other worker reads the changed source and publishes it."""
        self.source.write_text(NEW)
        assert self.other.reload(self.store) == ""
        return self.other.live.generation

    def ask(self, model: str) -> None:
        """The other worker queues a request by the configuration it has."""
        now = time.monotonic_ns()
        arrival = Arrival(f"id-{len(self.asked)}", WORKER, "infer", model, now, 0.0, patience_at=now + 10**11)
        outcome = Admissions(self.store).admit(self.other.live.rules, self.other.live.generation, arrival, now)
        assert isinstance(outcome, Queued)
        self.asked.append(outcome.id)

    def load(self, model: str) -> None:
        """The other worker queues a command."""
        now = time.monotonic_ns()
        arrival = Arrival("load", WORKER, "load", model, now, 0.0, patience_at=now + 10**11)
        self.asked.append(admission.enqueue(self.store, arrival))

    def lead(self, on_look: Callable[[], None] = lambda: None) -> None:
        """A term of the worker that has not heard of anything, until all is answered, or for a few turns.

        `on_look` is called whenever it looks at its configuration, after it has seen it.
        """

        def configuration() -> tuple[int, Config, Rules]:
            live = self.leader.live
            if threading.current_thread() is threading.main_thread():  # the meter looks too, whenever it likes
                on_look()
            return live.generation, live.config, live.rules

        turns = iter(range(3))

        def keep_on() -> bool:
            term.ring()
            return next(turns, None) is not None and (not self.asked or "still waiting" in self.codes())

        children = Children()
        term = Term(
            self.store,
            scheduling.take_office(self.store, WORKER, time.monotonic_ns()),
            WORKER,
            children,
            configuration,
            lambda: self.leader.refresh(self.store),
            lambda worker, kind: None,
            lambda now: None,
            lambda: None,
        )
        term.run(keep_on)
        children.release()

    def codes(self) -> list[str | None]:
        """What became of all that was asked."""
        ended = {row.id: row.error_code for row in admission.outcomes(self.store, self.asked)}
        return [ended.get(request, "still waiting") for request in self.asked]


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    monkeypatch.setattr(ConfigReader, "_start", lambda reader: None)  # read here: a process each time takes long
    opened = Box(tmp_path)
    yield opened
    opened.store.close()


def test_what_was_asked_under_a_newer_configuration_is_decided_by_it(box: Box) -> None:
    box.publish()
    box.ask("new")
    box.load("new")
    box.lead()
    assert box.codes() == ["model_start_failed"] * 2


@pytest.mark.parametrize("look", range(1, 16))
def test_at_whatever_moment_of_a_turn_it_is_published(box: Box, look: int) -> None:
    looks = 0

    def publish_at_that_look() -> None:
        nonlocal looks
        looks += 1
        if looks == look:
            box.publish()
            box.ask("new")
            box.load("new")

    box.lead(publish_at_that_look)
    assert box.codes() == ["model_start_failed"] * 2


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"models": 3}'])
def test_a_configuration_that_cannot_be_read_makes_no_model_unknown(
    box: Box, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once; what the old one knows is served, and nobody is told that there is no such model."""
    published = resolved_path(box.state, box.publish())
    published.unlink()
    if content is not None:
        published.write_bytes(content)
    for model in ("new", "old"):
        box.ask(model)
        box.load(model)
    with caplog.at_level(logging.INFO):
        box.lead()
        box.leader.refresh(box.store)
    assert box.codes() == ["service_unavailable", "service_unavailable", "model_start_failed", "model_start_failed"]
    assert caplog.text.count("cannot be read") == 1


def test_a_worker_that_cannot_take_up_what_is_in_force_says_so_and_keeps_house(box: Box) -> None:
    """Its requests are to come again; what it does once a second goes on."""
    published = box.publish()
    resolved_path(box.state, published).unlink()
    with pytest.raises(Unavailable, match=f"configuration {published} cannot be read") as refused:
        box.leader.take_up(box.store, published)
    assert (refused.value.status, refused.value.retry_after) == (503, 1)
    assert not box.leader.refresh(box.store)
    assert box.leader.live.generation < published


def test_what_runs_under_a_configuration_that_cannot_be_read_is_not_removed(box: Box) -> None:
    resolved_path(box.state, box.publish()).unlink()
    with box.store.write() as tx:
        scheduling.restore(tx, "new", State.READY, "it runs")
    box.lead()
    with box.store.read() as tx:
        row = reading.process(tx, "new")
    assert row is not None and row.state is State.READY


def test_the_leader_publishes_its_source_where_the_configuration_in_force_is_lost(box: Box) -> None:
    lost = box.publish()
    resolved_path(box.state, lost).unlink()
    assert box.leader.look(box.store, time.monotonic_ns()) is None, "its source is what is in force"
    assert not box.leader.refresh(box.store)
    assert box.leader.look(box.store, time.monotonic_ns(), wait=True) == ""
    assert box.leader.live.generation == lost + 1
    assert box.leader.refresh(box.store) and box.other.refresh(box.store)
    box.ask("new")
    box.lead()
    assert box.codes() == ["model_start_failed"]


def test_a_wrong_source_is_not_read_on_and_on_for_a_lost_configuration(box: Box) -> None:
    resolved_path(box.state, box.publish()).unlink()
    box.source.write_text("models: [")
    assert not box.leader.refresh(box.store)
    now, second = time.monotonic_ns(), 10**9
    told = [box.leader.look(box.store, now + step * second, wait=True) for step in range(5)]
    assert [bool(text) for text in told] == [False, True, False, False, False], "twice, as it may be half written"
    box.source.write_text(NEW)
    assert box.leader.look(box.store, now + 6 * second, wait=True) == ""


class Sights:
    """Counts how often the whole queue is read while a leader looks that has a heartbeat in every turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        whole = reading.snapshot

        def counted(*args: Any, **more: Any) -> Any:
            self.count += 1
            return whole(*args, **more)

        monkeypatch.setattr(reading, "snapshot", counted)
        monkeypatch.setattr(term_module, "HEARTBEAT", 0)


def test_where_nothing_happens_the_queue_is_read_once(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    sights = Sights(monkeypatch)
    box.lead()
    assert sights.count <= 2, "once, and once more if memory was measured meanwhile"


def test_what_others_write_is_seen(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    sights, elsewhere, ticks = Sights(monkeypatch), Store(box.state, boot_id()), itertools.count()

    def change() -> None:
        with elsewhere.write() as tx:
            scheduling.update_process(tx, "old", used_at=next(ticks))

    with box.store.write() as tx:
        scheduling.restore(tx, "old", State.STOPPED, "it was never there")
    box.lead(change)
    elsewhere.close()
    assert sights.count >= 4


def test_what_the_leader_itself_writes_is_seen(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    sights = Sights(monkeypatch)

    def change() -> None:
        with box.store.write() as tx:
            scheduling.update_process(tx, "old", used_at=1)

    with box.store.write() as tx:
        scheduling.restore(tx, "old", State.STOPPED, "it was never there")
    box.lead(change)
    assert sights.count >= 4


def test_time_alone_is_enough(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    sights = Sights(monkeypatch)
    monkeypatch.setattr(schedule, "next_deadline", lambda snapshot, now: now + 1)
    box.lead()
    assert sights.count >= 4


def test_only_a_worker_that_ended_unasked_is_worth_a_warning(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("killed", "drained"):
        admission.register_worker(box.store, name, 2**22 + 1, 1, "master")  # above the largest pid
    admission.set_draining(box.store, "drained")
    with caplog.at_level(logging.INFO):
        box.lead()
    found = {record.getMessage(): record.levelname for record in caplog.records if record.getMessage().endswith("gone")}
    assert found == {"worker killed is gone": "WARNING", "worker drained is gone": "INFO"}

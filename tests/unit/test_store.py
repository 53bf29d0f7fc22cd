"""The store: transactions, terms, states, and the request's path through its rows."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qmflask import errors
from qmflask.policy.eviction import GroupPolicy, GroupRule, Sizes
from qmflask.policy.rules import Rules
from qmflask.policy.schedule import ModelRule, Reject
from qmflask.states import TRANSITIONS, Phase, State
from qmflask.store import (
    Deposed,
    Store,
    StoreError,
    StoreTooNew,
    admission,
    prepare_state_directory,
    reading,
    scheduling,
)
from qmflask.store.admission import Admissions, Arrival, Granted, Queued, Stale

NOW = 1_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    prepare_state_directory(tmp_path)
    opened = Store(tmp_path, "boot-1")
    yield opened
    opened.close()


def rules(**limits: int) -> Rules:
    models = {name: ModelRule(name, concurrency_limit=limits.get(name, 0)) for name in ("ant", "bee")}
    sizes = {name: Sizes(0, 0) for name in models}
    group = GroupRule("all", swap=True, exclusive=True, persistent=False, pool="vram", members=("ant", "bee"))
    return Rules(models, GroupPolicy(sizes, [group], 0, 0), {name: f"hash-{name}" for name in models})


def arrival(model: str = "ant", worker: str = "w1", kind: str = "infer", at: int = NOW) -> Arrival:
    return Arrival(f"id-{model}-{at}", worker, kind, model, at, 0.0)


def make_ready(store: Store, model: str, term: int) -> None:
    with store.write(term) as tx:
        scheduling.set_state(
            tx, model, State.STARTING, "asked", launch_hash=f"hash-{model}", proxy=f"http://{model}", token="t"
        )
        scheduling.set_state(tx, model, State.READY, "loaded", idle_since=NOW)


def row(store: Store, model: str) -> reading.ProcessRow:
    with store.read() as tx:
        found = reading.process(tx, model)
    assert found is not None
    return found


def last_use(store: Store, model: str) -> int:
    """What the policy sees of when a model was used."""
    with store.read() as tx:
        return reading.snapshot(tx, rules(), whole=True).processes[model].tick


def version(store: Store) -> int:
    with store.read() as tx:
        return reading.scheduler(tx).schedule_version


# -- opening --------------------------------------------------------------------------------------------------


def test_directory_and_database_are_private(store: Store) -> None:
    assert store.directory.stat().st_mode & 0o777 == 0o700
    assert store.path.stat().st_mode & 0o777 == 0o600


def test_unwritable_directory_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="QMFLASK_STATE"):
        prepare_state_directory(tmp_path / "file" / "below")


def test_newer_schema_is_refused(store: Store) -> None:
    with sqlite3.connect(store.path) as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(StoreTooNew, match="newer qmflask"):
        Store(store.directory, "boot-1")


def test_tables_of_an_older_qmflask_get_their_new_columns(store: Store) -> None:
    with store.write() as tx:
        tx.execute("ALTER TABLE scheduler DROP COLUMN config_source")
        tx.execute("DROP TRIGGER lease_ended")  # the older one knows nothing of it
        tx.execute("ALTER TABLE processes DROP COLUMN answered")
        tx.execute("PRAGMA application_id=1")
    again = Store(store.directory, "boot-1")
    with again.read() as tx:
        assert reading.status(tx).scheduler.config_source == ""
        assert tx.execute("SELECT answered FROM processes").fetchall() == []
    again.close()


def test_another_boot_forgets_processes_requests_and_swaps_but_keeps_sizes(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    make_ready(store, "ant", term)
    Admissions(store).admit(rules(), 0, arrival(), NOW)
    with store.write(term) as tx:
        scheduling.open_swap(tx, "bee", ["ant"], [], "asked", NOW)
        scheduling.learn_size(tx, "hash-ant", "ant", 5, 6)
    again = Store(store.directory, "boot-2")
    with again.read() as tx:
        status = reading.status(tx)
    again.close()
    assert (status.requests, status.swaps, status.scheduler.leader) == ([], [], None)
    assert status.processes["ant"].state is State.STOPPED
    assert status.processes["ant"].pid is None
    assert status.sizes == {"hash-ant": (5, 6)}


def test_replaced_file_is_noticed_and_reopened(store: Store) -> None:
    assert not store.replaced()
    for name in ("state.db", "state.db-wal", "state.db-shm"):
        (store.directory / name).unlink(missing_ok=True)
    assert store.replaced()
    store.reopen()
    assert not store.replaced()


def test_locked_store_is_store_busy_not_a_traceback(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmflask.store.database.BUSY_TIMEOUT_MS", 50)
    impatient = Store(store.directory, "boot-1")
    with store.write(), pytest.raises(errors.StoreBusy), impatient.write():
        pass
    impatient.close()


def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    with pytest.raises(RuntimeError), store.write() as tx:
        scheduling.open_swap(tx, "ant", [], [], "asked", NOW)
        raise RuntimeError
    with store.read() as tx:
        assert reading.swaps(tx) == []


def test_threads_share_the_connection_one_at_a_time(store: Store) -> None:
    def bump() -> None:
        for _ in range(100):
            with store.write() as tx:
                scheduling.bump(tx)

    before = version(store)
    threads = [threading.Thread(target=bump) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert version(store) == before + 400


# -- terms and states -----------------------------------------------------------------------------------------


def test_a_deposed_leader_cannot_write(store: Store) -> None:
    old = scheduling.take_office(store, "w1", NOW)
    new = scheduling.take_office(store, "w2", NOW)
    with pytest.raises(Deposed), store.write(old) as tx:
        scheduling.beat(tx, NOW)
    scheduling.leave_office(store, old)
    with store.read() as tx:
        assert reading.scheduler(tx).leader == "w2"
    with store.write(new) as tx:
        scheduling.beat(tx, NOW + 1)


def test_states_move_only_along_the_table(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    with store.write(term) as tx, pytest.raises(ValueError, match="no transition stopped -> ready"):
        scheduling.set_state(tx, "ant", State.READY, "no")
    for old, allowed in TRANSITIONS.items():
        for new in State:
            if new not in allowed:
                with store.write(term) as tx:
                    tx.execute("INSERT OR REPLACE INTO processes (model, state) VALUES ('bee', ?)", (old.value,))
                    with pytest.raises(ValueError, match="no transition"):
                        scheduling.set_state(tx, "bee", new, "no")


def test_each_state_change_bumps_the_version_and_keeps_term_and_reason(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    before = version(store)
    make_ready(store, "ant", term)
    assert version(store) == before + 2
    with store.write(term) as tx:
        scheduling.set_state(tx, "ant", State.STOPPING, "evicted for bee")
        scheduling.set_state(tx, "ant", State.STOPPED, "evicted for bee")
    now = row(store, "ant")
    assert (now.generation, now.reason, now.stop_reason) == (term, "evicted for bee", "evicted for bee")


# -- requests -------------------------------------------------------------------------------------------------


def test_ready_model_is_granted_in_the_requests_own_transaction(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    make_ready(store, "ant", term)
    cold = last_use(store, "ant")
    admissions = Admissions(store)
    granted = admissions.admit(rules(), 0, arrival(), NOW)
    assert isinstance(granted, Granted)
    assert granted.proxy == "http://ant"
    assert last_use(store, "ant") == NOW > cold
    with store.write(term) as tx:
        assert not scheduling.idle(tx, "ant")
    assert admission.release(store, granted.id, "ant", NOW + 5, None) is True, "the first answer: its size is learned"
    with store.write(term) as tx:
        assert scheduling.idle(tx, "ant")
    assert row(store, "ant").idle_since == last_use(store, "ant") == NOW + 5


def test_only_an_answer_shows_that_a_model_is_loaded(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    make_ready(store, "ant", term)
    for answered, known, first in ((False, 0, False), (True, 1, True), (False, 1, False), (True, 1, False)):
        granted = Admissions(store).admit(rules(), 0, arrival(), NOW)
        assert isinstance(granted, Granted)
        look = admission.release(store, granted.id, "ant", NOW, None, answered)
        assert (row(store, "ant").answered, look) == (known, first)


def test_stopped_model_queues_and_the_leader_grants_later(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    queued = Admissions(store).admit(rules(), 0, arrival(), NOW)
    assert isinstance(queued, Queued)
    assert admission.outcomes(store, [queued.id]) == []
    make_ready(store, "ant", term)
    with store.write(term) as tx:
        assert scheduling.grant(tx, scheduling.waiting_for(tx, "ant"), "ant", NOW, paid=True) == {"w1"}
    (ended,) = admission.outcomes(store, [queued.id])
    assert (ended.state, ended.paid, ended.proxy) == ("granted", True, "http://ant")


def test_cached_snapshot_is_dropped_when_a_state_changes(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    make_ready(store, "ant", term)
    admissions, known = Admissions(store), rules()
    assert isinstance(admissions.admit(known, 0, arrival(), NOW), Granted)
    with store.write(term) as tx:
        scheduling.set_state(tx, "ant", State.DRAINING, "evicted for bee")
    assert isinstance(admissions.admit(known, 0, arrival(), NOW), Queued)


def test_a_known_snapshot_grants_in_one_statement(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    make_ready(store, "ant", term)
    admissions, known = Admissions(store), rules()
    first = admissions.admit(known, 0, arrival(), NOW)
    assert isinstance(first, Granted)
    admission.release(store, first.id, "ant", NOW + 5, None)
    assert last_use(store, "ant") == NOW + 5
    with monkeypatch.context() as patch:
        patch.setattr(store, "write", None)  # no transaction is opened
        second = admissions.admit(known, 0, arrival(at=NOW + 7), NOW + 7)
    assert second == Granted(second.id, "http://ant") and second.id > first.id, "ids do not come again"
    assert last_use(store, "ant") == NOW + 7
    with store.read() as tx:
        (lease,) = reading.requests(tx, "granted")
    assert (lease.id, lease.public_id, lease.arrival) == (second.id, f"id-ant-{NOW + 7}", NOW + 7)


def test_a_known_snapshot_is_not_trusted_once_another_process_changed_something(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    make_ready(store, "ant", term)
    admissions, known = Admissions(store), rules()
    assert isinstance(admissions.admit(known, 0, arrival(), NOW), Granted)
    other = Store(store.directory, "boot-1")
    with other.write(term) as tx:
        scheduling.set_state(tx, "ant", State.DRAINING, "evicted for bee")
    assert isinstance(admissions.admit(known, 0, arrival(), NOW), Queued)
    admission.publish_configuration(other, 0, "mark", "m1", "/c.yaml")
    other.close()
    assert admissions.admit(known, 0, arrival(), NOW) == Stale(1)


def test_a_lock_of_another_process_is_waited_for(store: Store) -> None:
    other = Store(store.directory, "boot-1")
    held, asked = threading.Event(), threading.Event()

    def hold() -> None:
        with other.write():
            held.set()
            asked.wait(20)
            # Whoever asks sleeps and asks again from here on.

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    threading.Timer(0.05, asked.set).start()
    assert isinstance(Admissions(store).admit(rules(), 0, arrival(), NOW), Queued)
    thread.join(20)
    other.close()


def test_worker_with_an_old_configuration_is_told_so(store: Store) -> None:
    assert admission.publish_configuration(store, 0, "mark", "m1", "/c.yaml") == 1
    assert admission.publish_configuration(store, 0, "mark", "m1", "/c.yaml") is None
    assert Admissions(store).admit(rules(), 0, arrival(), NOW) == Stale(1)
    with store.read() as tx:
        assert reading.requests(tx, "queued", "granted") == []


def test_concurrency_limit_counts_waiting_and_served_requests_of_all_workers(store: Store) -> None:
    admissions, known = Admissions(store), rules(ant=2)
    first = admissions.admit(known, 0, arrival(worker="w1"), NOW)
    admissions.admit(known, 0, arrival(worker="w2"), NOW)
    refused = admissions.admit(known, 0, arrival(worker="w1"), NOW)
    assert isinstance(refused, Reject)
    assert refused.code == "concurrency_limit"
    assert isinstance(first, Queued)
    admission.withdraw(store, first.id)
    assert isinstance(admissions.admit(known, 0, arrival(), NOW), Queued)


def test_release_wakes_the_leader_when_somebody_waits(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    make_ready(store, "ant", term)
    admissions = Admissions(store)
    granted = admissions.admit(rules(), 0, arrival("ant"), NOW)
    assert isinstance(admissions.admit(rules(), 0, arrival("bee"), NOW), Queued)
    assert isinstance(granted, Granted)
    assert admission.release(store, granted.id, "ant", NOW, None) is True


def test_failing_waiters_tells_them_once_and_passes_over_who_left(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    admissions = Admissions(store)
    stays = admissions.admit(rules(), 0, arrival(worker="w1"), NOW)
    leaves = admissions.admit(rules(), 0, arrival(worker="w2"), NOW)
    assert isinstance(stays, Queued) and isinstance(leaves, Queued)
    with store.write(term) as tx:
        waiting = scheduling.waiting_for(tx, "ant")
    admission.withdraw(store, leaves.id)
    error = errors.ModelStartFailed("no such file", retry_after=3)
    with store.write(term) as tx:
        assert scheduling.fail(tx, waiting, error) == {"w1"}
    (ended,) = admission.outcomes(store, [stays.id, leaves.id])
    assert (ended.error_code, ended.error_message, ended.retry_after) == ("model_start_failed", "no such file", 3)


def test_rows_of_a_dead_worker_go_with_it(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    admission.register_worker(store, "w2", 1, 2, "m")
    Admissions(store).admit(rules(), 0, arrival(worker="w2"), NOW)
    with store.write(term) as tx:
        assert scheduling.drop_dead_workers(tx, {"w2"}) == 1
    with store.read() as tx:
        assert (reading.requests(tx, "queued"), reading.workers(tx)) == ([], [])


def test_unload_rows_are_no_waiters_for_the_model(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    command = admission.enqueue(store, arrival(kind="unload"))
    with store.write(term) as tx:
        scheduling.mark_queued(tx, command)
        assert scheduling.waiting_for(tx, "ant") == []
        assert reading.snapshot(tx, rules(), whole=True).queue == []
        assert scheduling.finish(tx, [command]) == {"w1"}


def test_preload_is_queued_once_for_a_master(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    with store.write(term) as tx:
        assert scheduling.queue_preload(tx, ["ant", "bee"], "master-1", NOW, 0)
        assert not scheduling.queue_preload(tx, ["ant", "bee"], "master-1", NOW, 0)
        assert [request.model for request in reading.requests(tx, "pending")] == ["ant", "bee"]
        assert scheduling.queue_preload(tx, ["ant"], "master-2", NOW, 0)


def test_hold_is_written_with_the_end_of_a_lease_and_kept_without_word(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    make_ready(store, "ant", term)
    admissions = Admissions(store)
    for hold, expected in ((NOW + 7, NOW + 7), (None, NOW + 7), (0, 0)):
        granted = admissions.admit(rules(), 0, arrival(), NOW)
        assert isinstance(granted, Granted)
        admission.release(store, granted.id, "ant", NOW, hold)
        assert row(store, "ant").hold_until == expected


def test_phases_and_victims_survive_in_the_row(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    with store.write(term) as tx:
        swap = scheduling.open_swap(tx, "bee", ["ant"], ["cat"], "asked", NOW)
        scheduling.set_phase(tx, swap, Phase.STOPPING, signalled=1)
        (opened,) = reading.swaps(tx)
    assert (opened.target, opened.victims, opened.blockers) == ("bee", ("ant",), ("cat",))
    assert (opened.phase, opened.signalled) == (Phase.STOPPING, True)


def test_learned_peaks_only_rise(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    with store.write(term) as tx:
        assert scheduling.learn_size(tx, "h", "ant", 10, 1)
        assert not scheduling.learn_size(tx, "h", "ant", 9, 1)
        assert scheduling.learn_size(tx, "h", "ant", 9, 2)
        assert reading.learned_sizes(tx) == {"h": (10, 2)}


def test_a_read_inside_a_write_sees_the_write(tmp_path: Path) -> None:
    store = Store(tmp_path, "boot")
    with store.write() as tx:
        scheduling.bump(tx)
        with store.read() as inner:
            assert reading.scheduler(inner).schedule_version == 2
        assert tx.in_transaction, "the read must not end the write"
    with store.read() as tx:
        assert reading.scheduler(tx).schedule_version == 2
    store.close()


# --- profiles -----------------------------------------------------------------------------------------------------


def preloads(store: Store) -> list[str]:
    with store.read() as tx:
        return [row.model for row in reading.requests(tx, "pending", "queued") if row.kind == "preload"]


def activate(store: Store, name: str | None, *preload: str) -> None:
    with store.write() as tx:
        scheduling.activate_profile(tx, name, preload, NOW, 0)


def active(store: Store) -> str | None:
    with store.read() as tx:
        return reading.scheduler(tx).active_profile


def test_a_profile_takes_the_place_of_what_the_one_before_it_still_waits_for(store: Store) -> None:
    with store.write() as tx:
        scheduling.queue_preload(tx, ["ant"], "master", NOW, 0)
    activate(store, "day", "bee", "cat")
    with store.write() as tx:
        scheduling.mark_queued(tx, tx.execute("SELECT id FROM requests WHERE model = 'bee'").fetchone()[0])
    activate(store, "night", "dog")
    assert (active(store), preloads(store)) == ("night", ["ant", "dog"]), "the start's own list is another matter"
    activate(store, None)
    assert (active(store), preloads(store)) == (None, ["ant"])


def test_a_worker_killed_between_activation_and_commit_changes_nothing(store: Store, tmp_path: Path) -> None:
    activate(store, "day", "ant")
    child = os.fork()
    if child == 0:  # what the worker does, up to the moment before its commit
        with Store(tmp_path, "boot-1").write() as tx:
            scheduling.activate_profile(tx, "night", ["bee"], NOW, 0)
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert (active(store), preloads(store)) == ("day", ["ant"])
    activate(store, "night", "bee")
    assert (active(store), preloads(store)) == ("night", ["bee"])


def test_nobody_waits_for_the_default_model_once_its_load_is_under_way(store: Store) -> None:
    term = scheduling.take_office(store, "w1", NOW)
    with store.write(term) as tx:
        scheduling.queue_load(tx, "ant", NOW)
        row = tx.execute("SELECT id FROM requests").fetchone()[0]
        scheduling.mark_queued(tx, row)
        assert scheduling.waiting_for(tx, "ant") == [row]
        assert not scheduling.wanted(tx, "ant"), "others are not stopped for it"
        swap = scheduling.open_swap(tx, "ant", [], [], "asked", NOW)
        scheduling.forget_waiting_default(tx)
        assert scheduling.waiting_for(tx, "ant") == [row], "a swap that has not begun would be dropped"
        scheduling.set_phase(tx, swap, Phase.STARTING)
        scheduling.forget_waiting_default(tx)
        assert scheduling.waiting_for(tx, "ant") == []
    admission.enqueue(store, arrival())
    with store.read() as tx:
        assert scheduling.wanted(tx, "ant") is False
    admission.enqueue(store, arrival(), "queued")
    with store.read() as tx:
        assert scheduling.wanted(tx, "ant")


def test_a_load_that_nobody_asked_for_is_not_given_up_in_silence(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    activate(store, "night", "ant")
    with store.write() as tx:
        scheduling.queue_load(tx, "bee", NOW)
        rows = [row.id for row in reading.requests(tx, "pending")]
        with caplog.at_level(logging.WARNING):
            assert scheduling.fail(tx, rows, errors.ModelProtected("cat is protected")) == set()
    assert preloads(store) == []
    assert [record.getMessage() for record in caplog.records] == [
        "ant is not loaded for the profile: cat is protected",
        "bee is not loaded for the idle box (defaultModel): cat is protected",
    ]

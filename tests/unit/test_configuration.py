"""Who publishes a changed file: one process, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qmflask import configreader
from qmflask.configuration import SECOND, Configuration
from qmflask.store import Store, prepare_state_directory, reading, scheduling

ONE = "models: {a: {cmd: 'r ${PORT}'}}\n"
TWO = ONE + "logLevel: warn\n"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    prepare_state_directory(tmp_path / "state")
    opened = Store(tmp_path / "state", "boot-1")
    yield opened
    opened.close()


def generation(store: Store) -> int:
    with store.read() as tx:
        return reading.scheduler(tx).config_generation


def test_the_leader_does_not_publish_again_what_another_worker_has_taken(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "config.yaml"
    source.write_text(ONE)
    leader, other = (Configuration(source, tmp_path / "state") for _ in range(2))
    leader.boot(store, "master")
    other.boot(store, "master")
    assert leader.look(store, SECOND, wait=True) is None
    source.write_text(TWO)
    assert other.reload(store) == ""
    published = generation(store)
    assert leader.look(store, 3 * SECOND, wait=True) is None
    assert generation(store) == published
    source.write_text(ONE)
    assert leader.look(store, 5 * SECOND, wait=True) == ""
    assert generation(store) == published + 1


def test_a_file_that_was_put_right_again_ends_the_complaint(store: Store, tmp_path: Path) -> None:
    """Also where that is the very file that is in force."""
    source = tmp_path / "config.yaml"
    source.write_text(ONE)
    leader = Configuration(source, tmp_path / "state")
    leader.boot(store, "master")
    stamp = source.stat()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("models: [")
    source.rename(tmp_path / "right.yaml")
    wrong.rename(source)
    assert leader.look(store, SECOND, wait=True) is None, "it may be half written"
    told = leader.look(store, 3 * SECOND, wait=True)
    assert told
    with store.write() as tx:
        scheduling.set_config_error(tx, told)
    (tmp_path / "right.yaml").rename(source)
    assert (source.stat().st_ino, source.stat().st_mtime_ns) == (stamp.st_ino, stamp.st_mtime_ns)
    assert leader.look(store, 5 * SECOND, wait=True) == ""


@pytest.mark.parametrize("text", ["", "# nothing\n", "logLevel: warn\n"])
def test_a_file_that_lost_all_its_models_changes_nothing(store: Store, tmp_path: Path, text: str) -> None:
    source = tmp_path / "config.yaml"
    source.write_text(ONE)
    leader = Configuration(source, tmp_path / "state")
    leader.boot(store, "master")
    source.write_text(text)
    assert leader.look(store, SECOND, wait=True) is None, "it may be half written"
    for told in (leader.look(store, 3 * SECOND, wait=True), leader.reload(store)):
        assert told and str(source) in told and "no models" in told and "stop the service" in told
    assert generation(store) == 1 and list(leader.live.config.models) == ["a"]
    source.write_text("peers: {p: {proxy: 'http://p', models: [x]}}\n")
    assert leader.look(store, 5 * SECOND, wait=True) == "", "a peer's models are models"


def test_a_service_may_start_without_models_and_go_on_so(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "config.yaml"
    source.write_text("")
    leader = Configuration(source, tmp_path / "state")
    leader.boot(store, "master")
    source.write_text("logLevel: warn\n")
    assert leader.look(store, SECOND, wait=True) == ""


def test_the_leader_does_not_wait_while_a_file_is_read(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "config.yaml"
    source.write_text(ONE)
    leader = Configuration(source, tmp_path / "state")
    leader.boot(store, "master")
    monkeypatch.setattr(configreader, "_PROGRAM", "import time; time.sleep(600)")
    source.write_text(TWO)
    assert [leader.look(store, second * SECOND) for second in range(1, 9)] == [None] * 8
    reader = leader._reading
    assert reader is not None and reader._process is not None and not reader.done()
    reader._process.kill()
    assert leader.look(store, 9 * SECOND, wait=True) is None, "patience"


def test_what_was_overtaken_while_it_was_read_is_not_published(store: Store, tmp_path: Path) -> None:
    """By another worker with the same content, then by a newer file."""
    source = tmp_path / "config.yaml"
    source.write_text(ONE)
    leader, other = (Configuration(source, tmp_path / "state") for _ in range(2))
    leader.boot(store, "master")
    other.boot(store, "master")
    for second, (text, newer) in enumerate(((TWO, TWO), (ONE, ONE + "logLevel: error\n")), 1):
        source.write_text(text)
        assert leader.look(store, 2 * second * SECOND) is None and leader._reading is not None
        if newer != text:
            source.write_text(newer)
        assert other.reload(store) == ""
        published = generation(store)
        assert leader.look(store, 2 * second * SECOND, wait=True) is None and leader._reading is None
        assert generation(store) == published
    assert leader.look(store, 4 * SECOND, wait=True) is None, "it is in force"
    source.write_text(TWO)
    assert leader.look(store, 9 * SECOND, wait=True) == ""

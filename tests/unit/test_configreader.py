"""Reading the configuration in a process of its own: the same result and the same words, whatever becomes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qmflask import configreader, configuration
from qmflask.config import ConfigError
from qmflask.configfiles import load_path, mark_of
from qmflask.configreader import ConfigReader, Turn
from qmflask.configuration import Configuration
from qmflask.store import Store, prepare_state_directory

RIGHT = "models: {a: {cmd: 'r ${PORT}', ttl: 5, metadata: {x: [1, 2.5, null]}}}\nlogLevle: warn\n"
WRONG = "models:\n  a:\n    cmd: 'r ${PORT}'\n    ttl: soon\n  b: {cmd: x, cmd: y}\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(RIGHT)
    return path


def test_the_result_is_that_of_reading_here(source: Path) -> None:
    assert ConfigReader(source).result() == load_path(source, os.environ)


def test_errors_are_those_of_reading_here(source: Path) -> None:
    source.write_text(WRONG)
    with pytest.raises(ConfigError) as here:
        load_path(source, os.environ)
    with pytest.raises(ConfigError) as there:
        ConfigReader(source).result()
    assert there.value.problems == here.value.problems and len(here.value.problems) >= 2
    assert f"{source}:4:" in str(there.value) and str(there.value) == str(here.value)


def test_the_mark_is_from_before_the_reading(source: Path) -> None:
    before = mark_of(source)
    reader = ConfigReader(source)
    source.write_text(RIGHT + "logLevel: warn\n")
    reader.result()
    assert reader.mark == before != mark_of(source)


@pytest.mark.parametrize("executable", ["/usr/bin/uwsgi", "", "/nowhere/python3"])
def test_without_an_interpreter_it_is_read_here(source: Path, executable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    reader = ConfigReader(source)
    assert reader.done() and reader.result() == load_path(source, os.environ)


@pytest.mark.parametrize("program", ["raise SystemExit(1)", "", "print('{}')"])
def test_a_child_that_fails_is_no_reason_not_to_read(
    source: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configreader, "_PROGRAM", program)
    assert ConfigReader(source).result() == load_path(source, os.environ)


def test_a_reading_that_is_killed_is_told(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configreader, "_PROGRAM", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ConfigError, match=r"config\.yaml: reading it was ended by signal 9"):
        ConfigReader(source).result()


def test_a_reading_that_takes_too_long_is_ended(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configreader, "_PROGRAM", "import time; time.sleep(600)")
    monkeypatch.setattr(configreader, "PATIENCE", 0.05)
    reader = ConfigReader(source)
    with pytest.raises(ConfigError, match="took more than"):
        reader.result()
    assert isinstance(reader._process, subprocess.Popen) and reader._process.returncode == -9 and reader.done()


def test_one_has_the_turn(source: Path, tmp_path: Path) -> None:
    first, second = (Turn(tmp_path).begin(source) for _ in range(2))
    assert first.reader is not None and second.reader is None
    with first:
        first.reader.result()
    with second:
        pass


def test_of_workers_that_start_together_one_reads(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    class Counted(ConfigReader):
        def __init__(self, source: Path) -> None:
            begun.append(source)
            super().__init__(source)

    monkeypatch.setattr(configreader, "ConfigReader", Counted)
    monkeypatch.setattr(configuration, "ConfigReader", Counted)
    state = tmp_path / "state"
    prepare_state_directory(state)

    def boot(early: bool) -> int:
        turn = Turn(state).begin(source) if early else None
        store = Store(state, "boot-1")
        try:
            return Configuration(source, state).boot(store, "master", turn).generation
        finally:
            store.close()

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(boot, [True, False, True, False])) == [1, 1, 1, 1]
    assert begun == [source]


#: Needed to read a configuration, by TLS, by commands: nothing of it may cost every worker its memory.
HEAVY = {"pydantic", "pydantic_core", "yaml", "requests", "urllib3", "gguf", "numpy"}
SERVE = """
import sys
from pathlib import Path
import qmflask.app, qmflask.gunicorn_conf, qmflask.worker
from qmflask.configuration import Configuration
from qmflask.store import Store, prepare_state_directory
state = Path(sys.argv[2])
prepare_state_directory(state)
Configuration(Path(sys.argv[1]), state).boot(Store(state, "boot-1"), "master")
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_a_worker_that_has_read_its_configuration_has_not_imported_what_that_takes(
    source: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SERVE, str(source), str(tmp_path / "state")]
    modules = set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert {"flask", "qmflask"} <= modules and not modules & HEAVY

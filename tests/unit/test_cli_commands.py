"""Command lines, completion and the doctor's eyes, without a service."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from qmflask import app
from qmflask.app import _speaks_for_all
from qmflask.cli import COMMANDS, main
from qmflask.cli.examine import commands, configuration, growth, nginx, ports, state
from qmflask.cli.examine import memory as memory_findings
from qmflask.cli.example import FILES
from qmflask.cli.plan import _lines as plan_lines
from qmflask.cli.ps import lines as ps_lines
from qmflask.cli.serve import arguments
from qmflask.cli.service import Service
from qmflask.cli.table import brief, span, table
from qmflask.config import ConfigError, Problem, Source, load
from qmflask.journal import Journal
from qmflask.memory.samples import GIB, Card
from qmflask.places import find_our_commands
from tests.service import REPO


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_and_says_its_exit_codes(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    if name not in ("schema", "completion", "example"):
        assert "Exit code:" in " ".join(result.output.split())


def test_serve_leaves_to_the_settings_what_is_not_given() -> None:
    assert arguments((), None, None)[-2:] == ["-c", "python:qmflask.gunicorn_conf"]
    full = arguments(("unix:/s", ":80"), 3, 7, ("--log-level", "debug"))
    assert full[full.index("-c") + 2 :] == [
        *("--bind", "unix:/s", "--bind", ":80", "--workers", "3"),
        *("--threads", "7", "--worker-connections", "7", "--log-level", "debug"),
    ]


@pytest.mark.parametrize(
    "bind", ["127.0.0.1:99999", "nonsense", "8080", "a:b", "127.0.0.1:", "::1:80", "unix:", "fd://x", "no host:80", ""]
)
def test_serve_refuses_an_address_that_is_none(bind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("gunicorn would say it with a traceback"))
    result = CliRunner().invoke(main, ["serve", "--bind", bind])
    assert result.exit_code == 2 and "HOST:PORT" in result.output and repr(bind) in result.output


@pytest.mark.parametrize("bind", ["127.0.0.1:0", ":80", "[::1]:80", "tcp://127.0.0.1:80", "unix:s", "fd://3"])
def test_serve_takes_the_addresses_that_gunicorn_takes(bind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _program, words: started.append(words))
    assert CliRunner().invoke(main, ["serve", "--bind", bind]).exit_code == 0
    assert bind in started[0]


def test_serve_says_what_is_wrong_before_gunicorn_speaks(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("models: {a: {}}\n")
    result = CliRunner().invoke(main, ["serve", "--config", str(path)])
    assert result.exit_code == 1 and "the configuration has errors" in result.output and "models.a" in result.output


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--config"),
        ("check",),
        ("estimate",),
        ("estimate", "--config"),
        ("plan", "a", "--config"),
        ("plan", "--cases"),
        ("init",),
    ],
)
def test_what_is_not_there_is_a_failure_and_not_wrong_usage(tmp_path: Path, words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*words, str(tmp_path / "none")])
    assert result.exit_code == 1 and "none" in result.output and isinstance(result.exception, SystemExit), result


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that may not be searched, for root either; the state is in it."""
    folder = tmp_path / "locked"

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(path: Any, *more: Any, **named: Any) -> Any:
            if str(path).startswith(f"{folder}/"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path, *more, **named)

        return wrapper

    folder.mkdir()
    for name in ("stat", "open", "listdir"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    monkeypatch.setenv("QMFLASK_STATE", f"{folder}/state")
    monkeypatch.setenv("QMFLASK_URL", f"unix:{tmp_path}/none")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        *[("ps",), ("logs",), ("unload", "--all"), ("check", "{locked}/c.yaml"), ("doctor",)],
        *[("init", "{locked}/models"), ("init", "{folder}", "-o", "{locked}/c.yaml")],
    ],
)
def test_a_place_that_may_not_be_entered_is_told_in_a_line(locked: Path, words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [word.format(locked=locked, folder=locked.parent) for word in words])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result
    told = [line for line in result.output.splitlines() if str(locked) in line]
    assert len(told) == 1 and "Permission denied" in told[0], result.output
    if words[0] != "check":
        assert "run as the" in result.output


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:abc", "http://h:99999", "unix:x", ""])
def test_addresses_that_are_none(url: str) -> None:
    result = CliRunner().invoke(main, ["load", "x", "--url", url])
    assert result.exit_code == 2 and "is no address" in result.output, result.output


def test_an_address_may_lack_its_scheme() -> None:
    assert [Service(url).url for url in ("localhost:80", "https://h/llm/")] == ["http://localhost:80", "https://h/llm"]


def test_the_first_worker_speaks_for_those_that_start_with_it() -> None:
    def worker(age: int) -> SimpleNamespace:
        return SimpleNamespace(age=age, cfg=SimpleNamespace(workers=2))

    assert [_speaks_for_all(w) for w in (worker(1), worker(2), worker(3), object())] == [True, False, True, True]


EARLY, NEVER = 1 << 29, 1 << 30


class Booting:
    """A gunicorn worker that is told to end at the `told`th look, or before we look, as our class notes it."""

    def __init__(self, age: int, told: int) -> None:
        self.age, self.cfg, self.ppid = age, SimpleNamespace(workers=2), os.getppid()
        self._left = told
        self.told_early = told == EARLY

    @property
    def alive(self) -> bool:
        self._left -= 1
        return self._left > 0


@pytest.mark.parametrize(
    ("age", "told", "code", "says"), [(1, 1, 3, True), (2, 3, 0, False), (2, EARLY, 0, False), (2, NEVER, 3, False)]
)
def test_of_workers_that_cannot_boot_together_one_fails(
    age: int, told: int, code: int, says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """gunicorn's master ends with a traceback and code 1, and leaves the models running, if a second one fails too."""

    def start(worker: object) -> None:
        raise ConfigError([Problem("error", "nothing is right", "here")])

    monkeypatch.setattr(app, "_runtime", SimpleNamespace(start=start))
    monkeypatch.setattr(app, "setup_logging", lambda: None)
    monkeypatch.setattr(app, "ANOTHER_FAILS", 0.1)
    with pytest.raises(SystemExit) as end:
        app.start_worker(Booting(age, told))
    assert end.value.code == code
    assert ("nothing is right" in capsys.readouterr().err) == says


@pytest.mark.parametrize("name", sorted(FILES))
def test_examples_are_the_files_of_the_repository(name: str) -> None:
    result = CliRunner().invoke(main, ["example", name])
    assert result.output == (REPO / "conf" / FILES[name]).read_text()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0 and "_QMFLASK_COMPLETE" in result.output


def test_completion_of_models_without_a_service(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("models: {alpha: {cmd: 'x ${PORT}', aliases: [also]}, beta: {cmd: 'x ${PORT}'}}\n")
    environ = {
        "_QMFLASK_COMPLETE": "bash_complete",
        "COMP_WORDS": "qmflask load al",
        "COMP_CWORD": "2",
        "QMFLASK_CONFIG": str(path),
        "QMFLASK_URL": f"unix:{tmp_path}/none",
    }
    result = CliRunner().invoke(main, [], prog_name="qmflask", env=environ)
    assert result.output.split() == ["plain,alpha", "plain,also"]


def test_tables_and_spans() -> None:
    assert [span(s) for s in (None, 7.9, 200, 7500)] == ["-", "7s", "3m20s", "2h05m"]
    assert table(("a", "b"), [("\x1b[31m", "x")])[1] == "\\x1b[31m  x"


def test_commands_of_this_environment_are_found_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/somewhere")
    for _ in range(2):
        find_our_commands()
        assert os.environ["PATH"] == f"/somewhere:{sys.prefix}/bin"


def test_a_failure_is_told_in_brief() -> None:
    assert brief("a", "model a: ended with exit code 1; last log lines: x | y\nmore") == "ended with exit code 1"
    assert brief("a", "\x1b") == "\\x1b" and brief("a", "") == ""


def grades(findings: object) -> list[str]:
    return [finding.grade for finding in findings]  # type: ignore[attr-defined]


def test_doctor_on_configurations(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    config, findings = configuration(path)
    assert config is None and grades(findings) == ["fail"]
    path.write_text("models: {a: {cmd: 'sleep ${PORT}'}}\nwhat: 1\n")
    config, findings = configuration(path)
    assert config is not None and grades(findings) == ["warn"] and "what" in findings[0].text


def test_doctor_on_commands(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines = {
        "a": "nowhere-to-be-found",
        "b": "nowhere-to-be-found",
        "c": f"{tmp_path}/none",
        "d": f"{tmp_path}/file",
        "e": f"{sys.executable} -m /none.gguf",
    }
    text = "".join(f"  {name}: {{cmd: '{cmd} ${{PORT}}'}}\n" for name, cmd in lines.items())
    config = load([Source("f", f"models:\n{text}")], {}).config
    assert [(finding.topic, finding.text) for finding in commands(config)] == [
        ("model a, b", "nowhere-to-be-found is not in PATH"),
        ("model c", f"{tmp_path}/none does not exist"),
        ("model d", f"{tmp_path}/file may not be executed"),
        ("model e", "/none.gguf does not exist"),
    ]


def test_doctor_on_budgets() -> None:
    config = load([Source("f", "vramBudgetGB: 30\nmodels: {a: {cmd: 'x ${PORT}'}}")], {}).config
    found = list(memory_findings(config, (Card("u", 24 * GIB, 0),), 64 * GIB))
    assert grades(found) == ["ok", "ok", "warn", "warn"] and "more than the 24.0 GiB" in found[2].text
    assert grades(memory_findings(config, (), 64 * GIB)) == ["ok", "ok", "warn"], "no card: nothing to compare with"


def test_doctor_on_several_cards_under_one_budget() -> None:
    config = load([Source("f", "vramBudgetGB: 30\nmodels: {a: {cmd: 'x ${PORT}', estVramGB: 1}}")], {}).config
    cards = (Card("u", 24 * GIB, 0, {}), Card("v", 8 * GIB, 0, {}))
    found = list(memory_findings(config, cards, 64 * GIB))
    assert grades(found) == ["ok", "ok", "warn"] and "all 2 cards (24.0 GiB, 8.0 GiB)" in found[2].text
    free = load([Source("f", "models: {a: {cmd: 'x ${PORT}'}}")], {}).config
    assert grades(memory_findings(free, cards, 64 * GIB)) == ["ok", "ok"], "without a budget it does not matter"


def test_doctor_on_a_floor_that_looks_wrong() -> None:
    told = {"trusted": True, "excess": 8 * GIB, "floor": GIB, "vram_ceiling": 15 * GIB, "vram_budget": 24 * GIB}
    (found,) = growth({**told, "foreign_processes": [{"pid": 7, "name": "game", "bytes": 9 * GIB}]}, "http://box")
    assert "8 GiB more" in found.text and "(game 9 GiB): 15 GiB of 24 GiB" in found.text
    assert "POST http://box/api/memory/relearn" in found.mend
    for more in ({"excess": 0}, {"trusted": False}, {"vram_ceiling": None}):
        assert not list(growth({**told, **more}, "http://box"))
    assert not list(growth({}, "http://box")), "nothing was sampled yet"


SERVICE = {"leader": None, "config_error": "", "profile": None}


def test_ps_says_where_a_charge_comes_from() -> None:
    def model(name: str, pool: str, charged: int, origin: str, configured: int = 0) -> dict[str, object]:
        size = {"charged": {pool: charged * GIB}, "origin": {pool: origin}, "configured": {pool: configured * GIB}}
        return {"id": name, "state": "ready", "pool": pool, "inflight": 0, "queued": 0, "size": size}

    models = [
        model("a", "vram", 9, "measured", 8),
        model("b", "ram", 5, "measured"),
        model("c", "vram", 6, "configured", 6),
        model("d", "vram", 0, "unknown"),
        {**model("e", "vram", 0, "unknown"), "removed": True, "size": None},
    ]
    body = {"models": models, "requests": [], "memory": {"pools": {}}, "service": SERVICE}
    told = {line.split()[0]: line for line in ps_lines(body)[1:6]}
    assert "  9.0 measured, 8.0 configured  " in told["a"] and "  5.0 measured  " in told["b"]
    assert "  6.0 configured  " in told["c"]
    assert "  unknown  " in told["d"] and "  unknown  " in told["e"]


def test_the_plan_says_where_sizes_come_from_and_what_others_hold() -> None:
    residents = [
        {"model": "b", "charge": 9 * GIB, "stops": True, "why": "makes room, coldest first"},
        {"model": "c", "charge": 0, "stops": True, "why": "its size is unknown"},
        {"model": "d", "charge": 0, "stops": True, "why": "its size is unknown"},
    ]
    pool = {"pool": "vram", "rule": "memory", "charge": 8 * GIB, "budget": 24 * GIB, "cap": 15 * GIB}
    pool |= {"total": 17 * GIB, "after": 8 * GIB}
    body = {
        "model": "a",
        "state": "stopped",
        "decision": "start",
        "why": "it is started",
        "notes": [],
        "pools": [{**pool, "residents": residents}],
        "sizes": {"a": {"vram": {"origin": "configured"}}, "b": {"vram": {"origin": "measured"}}},
        "hints": {"c": {"vram": 4 * GIB, "ram": 0, "origin": "header"}},
        "others": {
            "foreign": 9 * GIB,
            "floor": GIB,
            "excess": 8 * GIB,
            "trusted": True,
            "why": "",
            "foreign_processes": [{"pid": 7, "name": "game", "bytes": 8 * GIB}],
        },
    }
    assert plan_lines(body)[1:] == [
        "vram (memory rule): 8 GiB configured for a, 17 GiB with all that runs, 8 GiB then, of 24 GiB, 15 GiB in force"
        " now",
        "  stop  b  9 GiB measured  makes room, coldest first",
        "  stop  c  unknown size (its header suggests 4 GiB)  its size is unknown",
        "  stop  d  unknown size  its size is unknown",
        "others: 9 GiB on the cards, 8 GiB above the floor of 1 GiB: game 8 GiB",
    ]
    untold = {**body, "others": {"why": 'the driver does not list the processes of "b"', "trusted": False}}
    assert plan_lines(untold)[-1].startswith('others: the driver does not list the processes of "b"; the configured')
    assert len(plan_lines({**body, "others": None})) == 5, "no card"


def test_doctor_on_the_state_directory(tmp_path: Path) -> None:
    assert grades(state(tmp_path / "none")) == ["ok"] and not (tmp_path / "none").exists()
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    assert "chmod 700" in " ".join(finding.mend for finding in state(folder))


def test_doctor_on_ports(unused_tcp: int) -> None:
    config = load([Source("f", f"startPort: {unused_tcp}\nmodels: {{a: {{cmd: 'x ${{PORT}}'}}}}")], {}).config
    assert grades(ports(config, {"a": unused_tcp})) == ["ok"]


@pytest.fixture
def unused_tcp() -> int:
    return 23_457


def test_doctor_on_nginx(tmp_path: Path) -> None:
    (tmp_path / "good.conf").write_text((REPO / "conf" / "nginx.conf").read_text())
    assert grades(nginx([tmp_path])) == ["ok"]
    (tmp_path / "good.conf").write_text("location / { proxy_pass http://127.0.0.1:8080; # proxy_buffering off;\n }")
    found = list(nginx([tmp_path, tmp_path / "none"]))
    assert {"warn"} == set(grades(found)) and any("proxy_buffering off" in finding.text for finding in found)
    assert any("websockets" in finding.text for finding in found)
    (tmp_path / "good.conf").write_text("location / { proxy_pass http://other; }")
    assert not list(nginx([tmp_path]))


def test_the_log_reaches_a_stdout_without_a_descriptor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As under mod_wsgi, where it is Apache's log."""

    class ApacheLog(io.StringIO):
        def fileno(self) -> int:
            raise OSError("not associated with a file descriptor")

    out = ApacheLog()
    monkeypatch.setattr(sys, "stdout", out)
    journal = Journal(tmp_path)
    journal.write(b"a line\n")
    journal.close()
    assert out.getvalue() == "a line\n" and (tmp_path / "qmflask.log").read_bytes() == b"a line\n"

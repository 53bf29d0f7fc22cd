"""`qmflask check` and `qmflask schema` as people and scripts call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from qmflask.cli import main
from qmflask.config.schema import RootSection
from qmflask.memory.samples import Card

GOOD = "models:\n  m: {cmd: 'r --port ${PORT} \"a b\"', aliases: [x], filters: {setParamsByID: {y: {a: 1}}}}\n"


def run(*args: object, **environ: str) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], env={"QMFLASK_CONFIG": None, **environ})


def file(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_good_file(tmp_path: Path) -> None:
    result = run("check", file(tmp_path, GOOD))
    assert result.exit_code == 0, result.output
    head, row = result.output.splitlines()[:2]
    assert head.split() == ["model", "port", "group", "pool", "vram", "ram", "ttl", "command"]
    assert row.split(None, 7) == ["m", "5800", "(default)", "vram", "?", "?", "never", "r --port 5800 'a b'"]
    assert result.output.endswith("0 errors, 0 warnings, 1 model\n")
    assert run("check", QMFLASK_CONFIG=str(tmp_path)).output == f"{tmp_path}:\n{result.output}"


def test_a_file_that_was_not_named_is_said(tmp_path: Path) -> None:
    path = file(tmp_path, GOOD)
    assert run("check", QMFLASK_CONFIG=str(path)).output.startswith(f"{path}:\n")
    assert str(path) not in run("check", path).output


def test_errors_and_unknown_keys(tmp_path: Path) -> None:
    path = file(tmp_path, "modls: {}\nstartPort: 0\n")
    result = run("check", path)
    assert result.exit_code == 1
    assert f"error: {path}:1:1: modls: unknown key 'modls' (allowed: models; did you mean models?)" in result.output
    assert "startPort must be greater than 1" in result.output and "2 errors" in result.output


def test_strict_fails_for_warnings(tmp_path: Path) -> None:
    path = file(tmp_path, "logLevel: loud\n")
    assert run("check", path).exit_code == 0
    assert run("check", path, "--strict").exit_code == 1


@pytest.mark.parametrize("text", ["", "models: {}", "startPort: 7000\r\n"])
def test_a_file_without_models_says_how_to_add_one(tmp_path: Path, text: str) -> None:
    result = run("check", file(tmp_path, text))
    assert result.exit_code == 0 and "warning: " in result.output and "there are no models" in result.output
    assert "qmflask init FOLDER" in result.output and result.output.endswith("0 errors, 1 warning, 0 models\n")


def test_a_model_without_a_command(tmp_path: Path) -> None:
    result = run("check", file(tmp_path, "models: {a: {cmdd: x}}"))
    assert result.exit_code == 1 and "it has no cmd" in result.output and "did you mean cmd" in result.output


def test_models_of_a_peer_are_models(tmp_path: Path) -> None:
    result = run("check", file(tmp_path, "peers: {big: {proxy: 'http://h:1', models: [x]}}"))
    assert "no models" not in result.output, result.output


def test_line_ends_of_windows(tmp_path: Path) -> None:
    text = "models:\n  a:\n    cmd: |\n      run --port ${PORT} \\\n        # why\n        --name a\n"
    plain, windows = (run("check", file(tmp_path, t)).output for t in (text, "\ufeff" + text.replace("\n", "\r\n")))
    assert "run --port 5800 --name a\n" in plain and windows == plain


def test_json(tmp_path: Path) -> None:
    result = run("check", file(tmp_path, GOOD + "logLevel: loud\napiKeys: [k]\nperformance: {every: 75s}"), "--json")
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert sorted(found) == ["config", "errors", "warnings"] and found["errors"] == []
    warning = found["warnings"][0]
    assert (warning["line"], warning["column"], warning["path"], warning["value"]) == (3, 11, "logLevel", "loud")
    config = found["config"]
    model = config["models"]["m"]
    assert model["argv"] == ["r", "--port", "5800", "a b"] and model["cmd"] == 'r --port 5800 "a b"'
    assert model["aliases"] == ["x", "y"] and model["automaticAliases"] == ["y"] and model["ttl"] == 0
    assert config["groups"]["(default)"]["members"] == ["m"] and config["apiKeys"] == ["k"]
    assert config["performance"]["every"] == "1m15s" and config["healthCheckTimeout"] == 120


def test_json_of_a_bad_file_still_has_what_could_be_read(tmp_path: Path) -> None:
    result = run("check", file(tmp_path, GOOD + "startPort: 0\n"), "--json")
    found = json.loads(result.output)
    assert result.exit_code == 1 and found["config"]["models"]["m"]["port"] == 5800
    assert found["errors"][0]["path"] == "startPort" and found["errors"][0]["allowed"]


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for args in ((tmp_path / "none.yaml",), (tmp_path,)):
        result = run("check", *args)
        assert result.exit_code == 1 and "error:" in result.output and "Traceback" not in result.output
        assert json.loads(run("check", *args, "--json").output)["config"] is None
    path = file(tmp_path, GOOD)
    assert "is also present in -config-dir" in run("check", path, "--config-dir", tmp_path).output
    (tmp_path / "more.yaml").write_text("models: {n: {cmd: '${PORT}'}}", encoding="utf-8")
    assert "2 models" in run("check", tmp_path).output


def test_several_cards_under_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = (Card("u", 24 << 30, 0), Card("v", 8 << 30, 0))
    monkeypatch.setattr("qmflask.cli.examine.cards", lambda: cards)
    budget = file(tmp_path, GOOD + "vramBudgetGB: 30\n")
    result = run("check", budget)
    assert "warning: vramBudgetGB: one budget covers all 2 cards (24.0 GiB, 8.0 GiB)" in result.output
    assert result.exit_code == 0 and "1 warning" in result.output
    assert run("check", budget, "--strict").exit_code == 1
    (warning,) = json.loads(run("check", budget, "--json").output)["warnings"]
    assert (warning["code"], warning["path"]) == ("several_cards", "vramBudgetGB")
    monkeypatch.setattr("qmflask.cli.examine.cards", lambda: cards[:1])
    assert "0 warnings" in run("check", budget).output

    def asked() -> None:
        raise AssertionError("without a budget the cards do not matter")

    monkeypatch.setattr("qmflask.cli.examine.cards", asked)
    assert "0 warnings" in run("check", file(tmp_path, GOOD)).output


@pytest.mark.parametrize("name", ["\x1b[31mred", "a\nb", "模型"])
def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path, name: str) -> None:
    result = run("check", file(tmp_path, json.dumps({"models": {name: {"cmd": "x ${PORT}"}}, name: 1})))
    assert "\x1b" not in result.output and "a\nb" not in result.output


def test_schema_is_made_of_the_same_keys() -> None:
    schema = json.loads(run("schema").output)
    assert set(schema["properties"]) == {field.alias or name for name, field in RootSection.model_fields.items()}
    model = schema["$defs"]["ModelSection"]["properties"]
    assert model["ttl"]["default"] == -1 and model["ttl"]["description"]
    assert schema["properties"]["vramReserveGB"]["default"] == 1
    assert schema["$defs"]["ModelSection"]["additionalProperties"] is False and "^x-" in schema["patternProperties"]


def test_help_lists_the_commands() -> None:
    output = run("--help").output
    assert "check" in output and "schema" in output and run("nonsense").exit_code == 2

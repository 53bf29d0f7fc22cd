"""The configuration cases of the compatibility vectors; where `What we do differently` speaks, it wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qmflask.config import Config, ConfigError, Model, Peer, Source, load
from qmflask.config.command import split_command
from qmflask.config.view import view
from qmflask.configfiles import path_fault, read_sources
from qmflask.names import Names
from qmflask.policy.matrix import MatrixError, compile_sets

CASES = json.loads((Path(__file__).parents[1] / "data" / "compatibility.json").read_text(encoding="utf-8"))
OTHERS = {"macros", "env", "matrix-config", "peers", "selectors", "profiles"}


def of(*areas: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in CASES if case["area"] in areas]


FILES = [pytest.param(c, id=c["id"]) for c in CASES if c["area"].startswith("config-") or c["area"] in OTHERS]


def sources(given: dict[str, Any], folder: Path) -> list[Source]:
    if "config_dir_files" not in given:
        return [Source("config.yaml", given["config_yaml"])]
    for name, text in given["config_dir_files"].items():
        (folder / name).write_text(text, encoding="utf-8")
    if "config_flag_points_into_dir" in given:
        return read_sources(folder / given["config_flag_points_into_dir"], folder)
    return read_sources(folder)


@pytest.mark.parametrize("case", FILES)
def test_file(case: dict[str, Any], tmp_path: Path) -> None:
    given, expect = case["given"], case["expect"]
    if expect["result"] == "error":
        with pytest.raises(ConfigError) as caught:
            load(sources(given, tmp_path), given.get("env", {}), path_fault=path_fault)
        assert expect["message_contains"] in str(caught.value)
        assert any(expect["message_contains"] in problem.message for problem in caught.value.problems)
        return
    config = load(sources(given, tmp_path), given.get("env", {}), path_fault=path_fault).config
    assert Config.from_json(config.to_json()) == config
    judge(config, expect, case["id"])


def judge(config: Config, expect: dict[str, Any], case: str) -> None:
    seen = view(config)
    for path, value in expect.get("global", {}).items():
        got: Any = seen
        for part in path.split("."):
            got = got[part]
        assert got == value, path
    for model, values in expect.get("models", {}).items():
        for key, value in values.items():
            assert seen["models"][model][key] == value, (model, key)
    names = Names(config)
    for name, meaning in expect.get("resolve", {}).items():
        found = names.resolve(name)
        assert (found.id if found else None) == meaning, name
    for name, values in expect.get("selectors", {}).items():
        assert values.items() <= seen["selectors"][name].items()
    if "models_ids" in expect:
        assert sorted(config.models) == expect["models_ids"]
    if "groups_ids" in expect:
        assert sorted(config.groups) == expect["groups_ids"]
    if "evict_costs" in expect:
        assert config.matrix is not None and config.matrix.evict_costs == expect["evict_costs"]
    if "set_order" in expect:
        # mx-021 pins the reference's natural-sorted order; ours is the order of definition, as its documents say.
        order = ["zulu", "s10", "s9"] if case == "mx-021" else expect["set_order"]
        assert seen["matrix"]["setOrder"] == order


@pytest.mark.parametrize("case", of("cmd-split"))
def test_command(case: dict[str, Any]) -> None:
    if case["expect"]["result"] == "error":
        with pytest.raises(ValueError, match=case["expect"]["message_contains"]):
            split_command(case["given"]["cmd"])
    else:
        assert split_command(case["given"]["cmd"]) == case["expect"]["args"]


@pytest.mark.parametrize("case", of("matrix-error"))
def test_matrix_error(case: dict[str, Any]) -> None:
    given, part = case["given"], case["expect"]["message_contains"]
    with pytest.raises(MatrixError) as caught:
        compile_sets([tuple(pair) for pair in given["sets"]], {model: model for model in given["models"]})
    assert part in str(caught.value)
    lines = [f"  {model}: {{cmd: 'r --port ${{PORT}}'}}" for model in given["models"]]
    sets = json.dumps(dict(given["sets"]))
    text = "models:\n" + "\n".join(lines) + f"\nmatrix: {{sets: {sets}}}\n"
    with pytest.raises(ConfigError) as refused:
        load([Source("config.yaml", text)], {})
    assert part in str(refused.value) and 'matrix: set "' in str(refused.value)


@pytest.mark.parametrize("case", of("upstream-path"))
def test_upstream_path(case: dict[str, Any]) -> None:
    given, expect = case["given"], case["expect"]
    aliases: dict[str, list[str]] = {}
    for alias, model in given["aliases"].items():
        aliases.setdefault(model, []).append(alias)
    models = {name: Model(id=name, aliases=tuple(aliases.get(name, ()))) for name in given["local_models"]}
    peers = {name: Peer(id=name, proxy="http://x", models=tuple(known)) for name, known in given["peers"].items()}
    found = Names(Config(models=models, peers=peers)).split_upstream_path(given["path_after_upstream"])
    assert (found is not None) == expect["found"]
    if found is not None:
        assert (found[1], found[0].id, found[2]) == (expect["name"], expect["model_id"], expect["remaining"])


def test_all_areas_are_there() -> None:
    """Else an emptied data file would pass."""
    assert len(FILES) > 70 and len(of("cmd-split")) > 8 and len(of("upstream-path")) > 5

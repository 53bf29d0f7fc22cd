"""Configurations as people write them load, mean what they say, and are quick to load."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from qmflask.config import Config, LaunchError, Source, analyse, load
from qmflask.config.decode import inner_section, section_keys
from qmflask.config.problems import Problems
from qmflask.config.reference import keys, table, with_table
from qmflask.config.schema import RootSection, Section
from qmflask.config.yaml12 import Map, Node, Seq, parse
from qmflask.configfiles import read_sources

REPO = Path(__file__).parents[2]
CONFIGS = Path(__file__).parents[1] / "data" / "configs"
NAMES = sorted(path.name for path in CONFIGS.iterdir())
ENVIRON = {"QM_KEY": "k", "WS_KEY": "w", "CLOUD_KEY": "c", "ADMIN_KEY": "a", "TEAM_KEY": "t"}
#: What `check` rightly says about some of them.
DOUBTS = {
    "legacy.yaml": ["legacy_key"],
    "whisper.yaml": ["never_unloaded"],
}


def loaded(name: str) -> Config:
    return load(read_sources(CONFIGS / name), ENVIRON, strict=True).config


@pytest.mark.parametrize("name", NAMES)
def test_realistic_files(name: str) -> None:
    found = load(read_sources(CONFIGS / name), ENVIRON, strict=True)
    assert [problem.code for problem in found.warnings] == DOUBTS.get(name, [])
    assert Config.from_json(found.config.to_json()) == found.config
    for model in found.config.models.values():
        launch = model.launch()
        text = " ".join([*launch.argv, launch.proxy, *launch.env.values()])
        assert "${" not in text and "#" not in launch.argv[0]
        if model.port is not None:
            assert str(model.port) in text and "59999" in " ".join(model.launch(59999).argv)


def test_there_are_enough_of_them() -> None:
    assert len(NAMES) >= 15


def test_thirty_models() -> None:
    config = loaded("thirty-macros.yaml")
    assert len(config.models) == 30 and sorted(m.port or 0 for m in config.models.values()) == list(range(10001, 10031))
    argv = config.models["alder-70b"].launch().argv
    assert argv[:5] == ("/opt/llama.cpp/build/bin/llama-server", "--host", "127.0.0.1", "--port", "10008")
    assert argv[-4:] == ("--model", "/srv/models/alder-70b-q4_k_m.gguf", "--ctx-size", "8192")
    assert config.models["alder-7b"].metadata == {"context": 65536, "family": "alder"}


def test_containers() -> None:
    model = loaded("docker.yaml").models["mistral"]
    assert model.stop_argv(1) == ("docker", "stop", "--time", "20", "qm-mistral")
    assert "5800:8080" in model.launch().argv and model.unload_timeout == 30


def test_anchors() -> None:
    models = loaded("anchors.yaml").models
    assert models["qwen-14b"].aliases == ("qwen-14b:quick", "qwen-14b:think")
    assert (models["qwen-4b"].ttl, models["qwen-14b"].ttl, models["phi"].aliases) == (900, 0, ())


def test_folder() -> None:
    config = loaded("folder")
    assert [key.key for key in config.api_keys] == ["first", "second"] and config.preload == ("chat", "embed")
    assert config.models["embed"].group == "keep" and config.models["embed"].unlisted


def test_remote() -> None:
    config = loaded("remote-and-always-on.yaml")
    assert config.models["always-on"].launch().check_url is None
    assert config.models["over-ssh"].launch().env == {"SSH_AUTH_SOCK": "/run/agent.sock"}


def test_the_shipped_configuration_is_clean() -> None:
    report = analyse(read_sources(REPO / "conf" / "quartermaster.yaml"), {}, strict=True)
    assert not report.errors and not report.warnings


def best(work: object, rounds: int = 5) -> float:
    times = []
    for _round in range(rounds):
        begin = time.perf_counter()
        work()  # type: ignore[operator]
        times.append(time.perf_counter() - begin)
    return min(times)


def test_loading_is_quick() -> None:
    """Wide bounds: 30 models load in about 25 ms and come back from JSON in about 2 ms."""
    sources = read_sources(CONFIGS / "thirty-macros.yaml")
    data = load(sources, {}).config.to_json()
    assert best(lambda: load(sources, {})) < 1.0
    assert best(lambda: Config.from_json(data)) < 0.2


# -- the example and the documentation --

EXAMPLE = (REPO / "conf" / "example.yaml").read_text(encoding="utf-8")


def test_the_example_loads_without_a_word() -> None:
    report = analyse([Source("example.yaml", EXAMPLE)], {}, strict=True)
    assert [problem.text() for problem in (*report.errors, *report.warnings)] == []
    assert report.config is not None and len(report.config.models) == 3
    assert all(model.launch().argv for model in report.config.models.values())


def mentioned(node: Node, section: type[Section], prefix: str = "") -> Iterator[str]:
    assert isinstance(node, Map) or prefix
    if not isinstance(node, Map):
        return
    known = section_keys(section)
    for key, value in node.entries.items():
        assert key in known, prefix + key
        yield prefix + key
        inner, how = inner_section(known[key])
        if inner is None:
            continue
        if how == "one":
            yield from mentioned(value, inner, f"{prefix}{key}.")
        elif isinstance(value, Map):
            for child in value.entries.values():
                yield from mentioned(child, inner, f"{prefix}{key}.*.")
        elif isinstance(value, Seq):
            for child in value.items:
                yield from mentioned(child, inner, f"{prefix}{key}[].")


def test_the_example_mentions_every_key_once() -> None:
    """With its switched-off lines switched on; only the second and third model repeat what a model must have."""
    problems = Problems()
    tree = parse(re.sub(r"(?m)^( *)#(?=[a-z])", r"\1", EXAMPLE), "example.yaml", problems)
    assert tree is not None and not problems.found
    counted = Counter(mentioned(tree, RootSection))
    assert set(counted) == {key.path for key in keys()}
    twice = {path for path, number in counted.items() if number > 1}
    assert twice == {"models.*.cmd", "models.*.estVramGB", "models.*.estRamGB"}


def test_the_documentation_has_the_table_of_keys() -> None:
    text = (REPO / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert with_table(text) == text, "run: qmflask schema --update docs/configuration.md"
    assert table() in text


@pytest.mark.parametrize("key", [pytest.param(key, id=key.path) for key in keys()])
def test_every_key_is_explained(key: object) -> None:
    assert key.meaning.endswith(".") and key.type and key.example  # type: ignore[attr-defined]


def test_every_config_can_be_started_or_says_why() -> None:
    with pytest.raises(LaunchError):
        Config.from_json(b'{"models": {"m": {"id": "m"}}}').models["m"].launch()

"""Whatever stands in a file: a configuration or a list of problems, never a traceback, a hang, or much memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qmflask.config import Config, Report, Source, analyse
from qmflask.config.command import split_command
from qmflask.config.go_regex import compile_go
from qmflask.config.schema import RootSection
from qmflask.config.view import view
from qmflask.names import Names

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
TEXTS = [path.read_text(encoding="utf-8") for path in sorted(CONFIGS.glob("*.yaml"))]
TEXTS.append((Path(__file__).parents[2] / "conf" / "example.yaml").read_text(encoding="utf-8"))
ENVIRON = {"QM_KEY": "k", "WS_KEY": "a: b", "CLOUD_KEY": '"', "TEAM_KEY": "[", "E": "", "N": "${env.WS_KEY}"}
PIECES = [
    *(
        "{",
        "}",
        "[",
        "]",
        ": ",
        "\n",
        "\n  ",
        "- ",
        "'",
        '"',
        "|",
        ">",
        "&a ",
        "*a",
        "<<: ",
        "# ",
        "~",
        "!",
        "%",
        "\t",
        "--- ",
    ),
    *(
        "${PORT}",
        "${PID}",
        "${MODEL_ID}",
        "${env.QM_KEY}",
        "${env.TEAM_KEY}",
        "${env.E}",
        "${env.N}",
        "${env.NO}",
        "${x}",
    ),
    *(
        "models",
        "macros",
        "groups",
        "matrix",
        "sets",
        "null",
        "-1",
        "1e99",
        "0x",
        "true",
        ".nan",
        "2024-01-01",
        "\ud800",
    ),
    *("\x00", "\u2028", "\ufeff", "\ufdd0", "é", "\r\n", "=", "?", "? ", "@", "`", "\\", "🦙"),
]
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)


def survive(text: str) -> Report:
    """Analyse; whatever comes out must be printable, and a configuration must work as one."""
    found = analyse([Source("f.yaml", text)], ENVIRON)
    for problem in (*found.errors, *found.warnings):
        assert problem.text().isprintable() and problem.file and problem.message
        assert not any("\ufdd0" <= char <= "\ufdef" for char in problem.text())
    if found.config is not None and not found.errors:
        assert Config.from_json(found.config.to_json()) == found.config
        view(found.config)
        Names(found.config).split_upstream_path("/a/b")
    return found


@st.composite
def edited(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(TEXTS))
    for _edit in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.integers(0, 12)))
        text = text[:at] + draw(st.sampled_from([*PIECES, ""])) + text[end:]
    return text


@QUICK
@given(edited())
def test_edited_files(text: str) -> None:
    survive(text)


@QUICK
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_random_text(text: str) -> None:
    survive(text)


KEYS = sorted({field.alias or name for name, field in RootSection.model_fields.items()})
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(PIECES), st.just("a")
)
INNER = st.sampled_from(
    [
        *(
            "cmd",
            "proxy",
            "members",
            "swap",
            "sets",
            "vars",
            "evict_costs",
            "router",
            "use",
            "settings",
            "groups",
            "key",
        ),
        *("matrix", "scheduler", "fifo", "priority", "models", "pins", "targets", "strategy", "aliases", "filters"),
        *("setParamsByID", "setParams", "metadata", "env", "a", "b", "on_startup", "preload", "path", "every"),
    ]
)
TREES = st.recursive(
    LEAVES, lambda deeper: st.lists(deeper, max_size=3) | st.dictionaries(INNER, deeper, max_size=4), max_leaves=12
)


@QUICK
@given(st.dictionaries(st.sampled_from(KEYS), TREES, max_size=4))
def test_random_trees(tree: dict[str, object]) -> None:
    import yaml

    survive(yaml.safe_dump(tree, allow_unicode=True))


@QUICK
@given(st.text(alphabet="ab '\"\\\n#$`\t\r", max_size=40))
def test_random_commands(text: str) -> None:
    try:
        words = split_command(text)
    except ValueError as error:
        assert "empty command" in str(error)
    else:
        assert words and all(isinstance(word, str) for word in words)


@QUICK
@given(st.text(alphabet="ab()[]{}|*+?\\^$.:,-19iQEzpPdx<>=!&", max_size=20))
def test_random_patterns(text: str) -> None:
    try:
        compile_go(text).search("aabb/xyz")
    except ValueError:
        pass


def laughs(levels: int, width: int) -> str:
    lines = ["a0: &a0 [x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


def macro_bomb() -> str:
    lines = ["macros:", "  m0: '" + "x" * 50 + "'"]
    lines += [f"  m{n}: '{f'${{m{n - 1}}}' * 6}'" for n in range(1, 60)]
    return "\n".join([*lines, "models: {a: {cmd: '${PORT} ${m59}'}}", "groups: {g: {members: ['${m59}']}}"])


MEGABYTES = 10_000_000
MONSTERS = {
    "laughs": lambda: laughs(40, 9),
    "merge laughs": lambda: "\n".join(
        ["m0: &m0 {k: v}"] + [f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}], k{n}: v}}" for n in range(1, 300)]
    ),
    "macro laughs": macro_bomb,
    "deep flow": lambda: "[" * 100_000,
    "deep map": lambda: "{a: " * 100_000,
    "deep block": lambda: "\n".join(" " * n + "a:" for n in range(1500)),
    "dashes": lambda: "- " * 100_000,
    "many items": lambda: "apiKeys: [" + "a, " * (MEGABYTES // 3) + "]",
    "many keys": lambda: "".join(f"k{n}: {n}\n" for n in range(MEGABYTES // 14)),
    "many models": lambda: "models:\n" + "".join(f"  m{n}: {{cmd: 'r ${{PORT}}'}}\n" for n in range(20_000)),
    "one long text": lambda: "logTimeFormat: " + "x" * MEGABYTES,
    "one long command": lambda: "models: {a: {cmd: '${PORT} " + "x y " * (MEGABYTES // 4) + "'}}",
    "comments": lambda: "# nothing here\n" * (MEGABYTES // 15),
    "blank": lambda: "\n" * MEGABYTES,
    "references": lambda: "a: " + "${env.E}" * (MEGABYTES // 8),
    "dead references": lambda: "# ${env.NO}\n" * 50_000 + "startPort: ${env.E}",
    "dollars": lambda: "models: {a: {cmd: '${PORT} " + "${" * (MEGABYTES // 2) + "'}}",
    "most models": lambda: "models:\n" + "".join(f"  m{n}: {{cmd: 'r ${{PORT}}'}}\n" for n in range(1_900)),
    "long command": lambda: "models: {a: {cmd: '${PORT} " + "x y " * 32_000 + "'}}",
    "many dollars": lambda: "models: {a: {cmd: '${PORT} " + "${" * 60_000 + "'}}",
    "unknown keys": lambda: "".join(f"key{n}: 1\n" for n in range(30_000)),
    "unknown names": lambda: (
        "models:\n"
        + "".join(f"  model{n}: {{cmd: 'r ${{PORT}}'}}\n" for n in range(1_900))
        + "groups:\n"
        + "".join(f"  g{n}: {{members: [mudel{n}, mudel{n + 1}]}}\n" for n in range(8_000))
    ),
    "unset variables": lambda: "".join(f"k{n}: ${{env.NO_{n}}} {'x' * 500}\n" for n in range(18_000)),
    "one port": lambda: (
        "models:\n" + "".join(f"  m{n}: {{cmd: r, proxy: 'http://localhost:9000'}}\n" for n in range(1_900))
    ),
    "many macros": lambda: (
        "macros: {"
        + ", ".join(f"k{n}: v" for n in range(1_000))
        + "}\nmodels:\n"
        + "".join(f"  m{n}: {{cmd: 'r ${{PORT}} ${{k7}}', macros: {{k7: q}}}}\n" for n in range(1_900))
    ),
    "peers and pins": lambda: (
        "peers: {p: {proxy: 'http://p', models: ["
        + ", ".join(f"m{n}" for n in range(15_000))
        + "]}}\nprofiles:\n"
        + "".join(f"  q{n}: {{pins: {{a{n}: p/m{n}}}}}\n" for n in range(5_000))
    ),
    "many sets": lambda: (
        "models: {a: {cmd: '${PORT}'}, b: {cmd: '${PORT}'}}\nmatrix:\n  sets:\n"
        + "".join(f"    s{n}: a & b | +s{n - 1}\n" if n else "    s0: a\n" for n in range(1_500))
    ),
    "long number": lambda: "startPort: " + "9" * 1_000_000,
    "long key": lambda: "k" * 1_000_000 + ": 1\nmodels: {" + "m" * 1000 + ": {cmdd: 1}}",
    "many errors": lambda: "models:\n" + "".join(f"  m{n}: {{cmd: [], ttl: x, foo: 1}}\n" for n in range(3000)),
    "many groups": lambda: (
        "models: {a: {cmd: '${PORT}'}}\ngroups:\n" + "".join(f"  g{n}: {{members: [a, b]}}\n" for n in range(3000))
    ),
    "matrix": lambda: "models: {a: {cmd: '${PORT}'}}\nmatrix: {sets: {s: '" + "(" * 20_000 + "a" + ")" * 20_000 + "'}}",
}


#: Forks a child for each file, so that each has its own CPU limit and its own peak of memory.
JUDGE = """
import json, os, resource, sys
from qmflask.config import analyse
from qmflask.configfiles import read_sources
for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        found = analyse(read_sources(path), {"E": ""})
        longest = max((len(problem.text()) for problem in (*found.errors, *found.warnings)), default=0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps([path, len(found.errors), longest, peak]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.timeout(600)
def test_monsters_are_quick_and_small(tmp_path: Path) -> None:
    """At most 20 s of CPU each, which the kernel watches, and 200 MB, the interpreter included.

    One test for all: a process of their own judges them, and processes that share out the tests would each start it.
    """
    paths = {str(tmp_path / f"{name}.yaml"): name for name in MONSTERS}
    for path, name in paths.items():
        Path(path).write_text(MONSTERS[name](), encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", JUDGE, *paths], capture_output=True, text=True, check=True)
    assert not done.stderr, done.stderr[-3000:]
    judged = {paths[path]: rest for path, *rest in map(json.loads, done.stdout.splitlines())}
    assert judged.keys() == set(MONSTERS), "the missing ones used up their CPU limit"
    wordy = {name: longest for name, (_errors, longest, _peak) in judged.items() if longest >= 2000}
    large = {name: f"{peak // 1024} MB" for name, (_errors, _longest, peak) in judged.items() if peak >= 200 * 1024}
    assert (wordy, large) == ({}, {})

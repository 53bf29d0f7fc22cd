"""Errors and warnings: all at once, each with its place, its value and the way out; and what is doubtful."""

from __future__ import annotations

import pytest

from qmflask.config import ConfigError, Problem, Source, analyse, load

BAD = """\
healthCheckTimout: 300
vramBudgetGB: -4
models:
  a:
    cmd: llama --port ${PORT}
    ttl: '60'
    aliasses: [x]
    estVramGB: {}
  b: {cmd: "x ${PORT} ${nope}", ttl: -3, capabilities: {in: [txt]}}
  b: {}
groups:
  g: {members: [a, c], pool: disk}
apiKeys: [geheim wort, '']
peers: {p: {models: [m]}}
"""


def report(text: str, **environ: str) -> tuple[list[Problem], list[Problem]]:
    found = analyse([Source("f.yaml", text)], environ)
    return list(found.errors), list(found.warnings)


def warned(text: str, **environ: str) -> list[str]:
    errors, warnings = report(text, **environ)
    assert not errors, errors
    return [problem.code for problem in warnings]


def test_all_problems_of_a_file_come_at_once_in_order() -> None:
    errors, warnings = report(BAD)
    places = [(problem.line, problem.column, problem.path) for problem in errors]
    assert places == [
        (2, 15, "vramBudgetGB"),
        (6, 10, "models.a.ttl"),
        (8, 16, "models.a.estVramGB"),
        (9, 12, "models.b.cmd"),
        (9, 38, "models.b.ttl"),
        (9, 62, "models.b.capabilities.in[0]"),
        (10, 3, "models.b"),
        (12, 20, "groups.g.members[1]"),
        (12, 30, "groups.g.pool"),
        (13, 11, "apiKeys[0]"),
        (13, 24, "apiKeys[1]"),
        (14, 9, "peers.p"),
    ]
    assert [(problem.line, problem.path, problem.hint) for problem in warnings if problem.code == "unknown_key"] == [
        (1, "healthCheckTimout", "did you mean healthCheckTimeout?"),
        (7, "models.a.aliasses", "did you mean aliases?"),
    ]
    for problem in (*errors, *warnings):
        assert problem.file == "f.yaml" and problem.allowed and problem.message and "\n" not in problem.text()
        assert problem.text().startswith(f"f.yaml:{problem.line}:{problem.column}: {problem.path}")
    assert {problem.value for problem in errors} >= {"60", "-3", "txt", "c", "disk"}


def test_the_error_is_one_problem_a_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load([Source("f.yaml", BAD)], {})
    assert len(str(caught.value).splitlines()) == len(caught.value.problems) == 12
    assert (
        "f.yaml:6:10: models.a.ttl: expected a whole number, not text (got '60'; "
        "allowed: a whole number; remove the quotes)" in str(caught.value)
    )


def test_secrets_are_not_shown() -> None:
    text = BAD + "  # x\nmodels2: {}\n"
    errors, warnings = report(text.replace("m]}}", "m], apiKey: [geheim], proxy: 'http://p'}}"))
    assert not any("geheim" in str(problem.as_dict()) for problem in (*errors, *warnings))
    for bad in (
        "models: {m: {cmd: '${PORT}', upstreamKey: [geheim]}}",
        "apiKeys: [geheim ${x}]",
        "apiKeys: [{key: geheim q}]",
    ):
        errors, _warnings = report(bad)
        assert errors and not any("geheim" in str(problem.as_dict()) for problem in errors)
    errors, _warnings = report("apiKeys: [${env.K}]", K="geheim: [")
    assert errors and "geheim" not in str([problem.as_dict() for problem in errors])


def test_unknown_values_are_shown_as_such() -> None:
    found = analyse([Source("f", "models: {m: {cmd: 'x ${PORT} ${env.NO}'}}")], {})
    assert found.config is not None and found.config.models["m"].launch().argv == ("x", "5800", "${env.?}")


def test_strict_makes_unknown_keys_errors() -> None:
    assert warned("foo: 1\nx-foo: 1\nmodels: {m: {cmd: '${PORT}', x-foo: 1}}") == ["unknown_key", "unknown_key"]
    errors, _warnings = report("strict: true\nstrickt: 1")
    assert errors[0].path == "strickt" and errors[0].hint == "did you mean strict?"
    assert analyse([Source("f", "foo: 1")], {}, strict=True).errors


def test_one_fault_makes_one_error() -> None:
    text = "models: {a: {cmd: 'r ${PORT}', ttl: '${no}', unlisted: '${env.NO}', capabilities: {in: ['${no}']}}}"
    errors, _warnings = report(text)
    paths = ["models.a.ttl", "models.a.unlisted", "models.a.capabilities.in[0]"]
    assert [problem.path for problem in errors] == paths


def test_hostile_keys_make_one_line() -> None:
    errors, warnings = report('"a\\nb\\e[31m": 1\nmodels: {"x\\ny": {cmd: [1]}}')
    for problem in (*errors, *warnings):
        assert problem.text().isprintable()


TWO = "models: {a: {cmd: 'r ${PORT}'BODY}, b: {cmd: 'r ${PORT}'MORE}}\n"


def two(first: str = "", second: str = "", top: str = "") -> str:
    return TWO.replace("BODY", first).replace("MORE", second) + top


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (two(", estVramGB: 9", top="vramBudgetGB: 8"), "larger_than_budget"),
        (two(", estRamGB: 9", top="ramBudgetGB: 8"), "larger_than_budget"),
        (
            two(
                ", estVramGB: 5", ", estVramGB: 5", "vramBudgetGB: 8\ngroups: {g: {persistent: true, members: [a, b]}}"
            ),
            "persistent_over_budget",
        ),
        ("models: {a: {cmd: 'r --port 9001', proxy: 'http://127.0.0.1:9000'}}", "port_mismatch"),
        ("models: {a: {cmd: 'r --port=9001', proxy: 'http://localhost:9000/v1'}}", "port_mismatch"),
        ("models: {a: {cmd: 'r --port ${PORT}', proxy: 'http://localhost:9000'}}", "port_mismatch"),
        ("models: {a: {cmd: 'docker run -p 9001:80 i --port 80', proxy: 'http://localhost:9000'}}", "port_mismatch"),
        (
            "models: {a: {cmd: 'r', proxy: 'http://h:9', ttl: 1}, b: {cmd: r, ttl: 1, proxy: 'http://localhost:9000'}, "
            "c: {cmd: r, ttl: 1, proxy: 'http://127.0.0.1:9000'}}\n"
            "groups: {g: {swap: false, members: [a, b, c]}}",
            "same_port",
        ),
        ("models: {a: {cmd: 'r --port 8080', proxy: 'http://127.0.0.1:8080'}}", "own_port"),
        ("startPort: 8080\nmodels: {a: {cmd: 'r ${PORT}'}}", "own_port"),
        ("startPort: 65536\nmodels: {a: {cmd: 'r ${PORT}'}}", "no_port"),
        (two(top="hooks: {on_startup: {preload: [a, b]}}"), "preload_conflict"),
        (
            two(", estVramGB: 5", ", estVramGB: 5", "vramBudgetGB: 8\nhooks: {on_startup: {preload: [a, b]}}"),
            "preload_conflict",
        ),
        (two(top="matrix: {sets: {s: a | b}}\nhooks: {on_startup: {preload: [a, b]}}"), "preload_conflict"),
        (two(top="hooks: {on_startup: {preload: [ghost]}}"), "unknown_preload"),
        (two(", ttl: 5", top="groups: {g: {swap: no, exclusive: no, members: [a, b]}}"), "never_unloaded"),
        (
            two(top="ramBudgetGB: 8\nlearnSizes: no\ngroups: {g: {pool: ram, swap: no, members: [a, b]}}"),
            "never_unloaded",
        ),
        (two(", aliases: [b]"), "dead_alias"),
        (two(", env: [ODD]"), "env_entry"),
        ("models: {a: {cmd: r, proxy: 'localhost:9000'}}", "scheme"),
        ("models: {a: {cmd: '', proxy: 'http://h'}}", "launch"),
        ("models: {a: }", "empty_model"),
        (two(", filters: {setParams: {model: x}}"), "model_filter"),
        (two(", filters: {stripParams: a, strip_params: b}"), "strip_params"),
        (two(", healthCheckTimeout: 5"), "raised"),
        ("healthCheckTimeout: 5", "raised"),
        ("logLevel: loud", "log_level"),
        ("logTimeFormat: never", "log_time_format"),
        ("apiKeys: [a, a]", "same_key"),
        (two(top="routing: {router: {settings: {matrix: {sets: {s: a}}}}}"), "unused_matrix"),
        (two(top="groups: {(default): {}}"), "default_group"),
        (two(top="matrix: {sets: {s: a}, var: {}}"), "legacy_key"),
        ("performance: {enable: true}", "legacy_key"),
        ("just a word", "ignored_file"),
        ("a: 1\n---\nb: 2", "documents"),
    ],
)
def test_what_is_surely_not_meant(text: str, code: str) -> None:
    _errors, warnings = report(text)
    problem = next(problem for problem in warnings if problem.code == code)
    assert code in warned(text)
    assert problem.line and problem.column and problem.allowed and (problem.path or code == "ignored_file")


@pytest.mark.parametrize(
    "text",
    [
        "# ${env.NOPE}\nmodels: {a: {cmd: 'r --port ${PORT}'}}",
        two(", estVramGB: 5", ", estVramGB: 3", "vramBudgetGB: 8\nhooks: {on_startup: {preload: [a, b]}}"),
        two(top="matrix: {sets: {s: a & b}}\nhooks: {on_startup: {preload: [a, b]}}"),
        "models: {a: {cmd: 'r --port 9000', proxy: 'http://127.0.0.1:9000'}, b: {cmd: r, proxy: 'http://127.0.0.1:9000'}}",
        "models: {a: {cmd: 'docker run -p 127.0.0.1:9000:80 i --port 80', proxy: 'http://localhost:9000'}}",
        "models: {a: {cmd: 'ssh x --port 1', proxy: 'http://elsewhere:8080'}}",
        two("", ", ttl: 5", "groups: {keep: {swap: no, exclusive: no, persistent: yes, members: [a]}}"),
        "models: {a: {cmd: 'r ${PORT}', aliases: [a]}}",
        two("", "", "ramBudgetGB: 8\ngroups: {g: {pool: ram, swap: no, exclusive: no, members: [a, b]}}"),
        two(", estVramGB: 7.3", ", estRamGB: 8", "vramBudgetGB: 7.3\nramBudgetGB: 8"),
    ],
)
def test_what_is_fine(text: str) -> None:
    assert warned(text) == []


def test_own_port_is_what_the_environment_says() -> None:
    text = "models: {a: {cmd: 'r --port 9000', proxy: 'http://127.0.0.1:9000'}}"
    assert warned(text, PORT="9000") == ["own_port"] == warned(text, GUNICORN_CMD_ARGS="--bind 0.0.0.0:9000")
    assert warned(text) == [] == warned(text, PORT="x")

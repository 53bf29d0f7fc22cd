"""Macros, ports and environment values, as compatibility 1.5 to 1.7 and 1.14 say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qmflask.config import Config, ConfigError, Source, analyse, load
from qmflask.config.units import show_float


def config(text: str, **environ: str) -> Config:
    return load([Source("f.yaml", text)], environ).config


def errors(text: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load([Source("f.yaml", text)], environ)
    return str(caught.value)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *[(0.7, "0.7"), (1.0, "1"), (12345678.5, "1.23456785e+07"), (1e6, "1e+06"), (999999.5, "999999.5")],
        *[(1e-4, "0.0001"), (1e-5, "1e-05"), (-2.5, "-2.5"), (1e100, "1e+100"), (0.1 + 0.2, "0.30000000000000004")],
        *[(123456.0, "123456"), (1234567.0, "1.234567e+06"), (0.0, "0"), (120.0, "120"), (1.5e-7, "1.5e-07")],
    ],
)
def test_floats_print_in_their_shortest_form(number: float, text: str) -> None:
    assert show_float(number) == text


@pytest.mark.parametrize(
    ("macros", "part"),
    [
        ("[a]", "macros must be a mapping"),
        ("word", "macros must be a mapping"),
        ("{" + "n" * 64 + ": x}", "exceeds maximum length of 63"),
        ("{a b: x}", "contains invalid characters"),
        ("{'': x}", "contains invalid characters"),
        ("{a: ~}", "must be a scalar type"),
        ("{a: {b: c}}", "must be a scalar type"),
        ("{a: 2024-01-02}", "must be a scalar type"),
        ("{PORT: x}", "is reserved"),
        ("{PID: x}", "is reserved"),
        ("{MODEL_ID: x}", "is reserved"),
        ("{a: 'x${a}'}", "self-reference"),
    ],
)
def test_declarations(macros: str, part: str) -> None:
    assert part in errors(f"macros: {macros}\n")
    local = errors(f"models:\n  m:\n    cmd: x ${{PORT}}\n    macros: {macros}\n")
    assert "model m: macro" in local and part in local


def test_good_names() -> None:
    text = f"macros: {{port: 1, {'n' * 63}: 2, a-b_C9: 3}}\nmodels: {{m: {{cmd: 'x ${{PORT}} ${{port}}${{a-b_C9}}'}}}}"
    assert config(text).models["m"].cmd == "x 5800 13"


def test_later_macros_use_earlier_ones_only() -> None:
    base = "models: {m: {cmd: 'x ${PORT} ${b}'}}\nmacros: "
    assert config(base + "{a: 1, b: 'b${a}'}").models["m"].cmd == "x 5800 b1"
    assert "unknown macro '${a}'" in errors(base + "{b: 'b${a}', a: 1}")
    assert "unknown macro '${b}'" in errors(base + "{a: '${b}', b: '${a}'}")


def test_a_model_macro_takes_the_position_of_the_global_one() -> None:
    text = "macros: {g: x}\nmodels: {m: {macros: {own: 1, g: 'y${own}'}, cmd: 'x ${PORT} ${g}'}}"
    assert "unknown macro '${own}'" in errors(text)


def test_a_value_that_is_one_macro_keeps_its_type() -> None:
    text = """
macros: {n: 5, f: 0.70, b: true, w: yes, one: 1.0, s: '${n}'}
models:
  m:
    cmd: x ${PORT}
    ttl: ${n}
    unlisted: ${b}
    metadata: {n: "${n}", f: '${f}', b: '${b}', w: '${w}', t: 'v${f}${b}', one: '${one}', s: '${s}', p: '${PORT}'}
"""
    model = config(text).models["m"]
    assert (model.ttl, model.unlisted) == (5, True)
    wanted: dict[str, Any] = {"n": 5, "f": 0.7, "b": True, "w": "yes", "t": "v0.7true", "one": 1, "s": 5, "p": 5800}
    assert model.metadata == wanted
    assert [type(model.metadata[key]) for key in wanted] == [type(value) for value in wanted.values()]
    assert "whole number" in errors("macros: {n: '5'}\nmodels: {m: {cmd: 'x ${PORT}', ttl: '${n}'}}")


def test_globals_reach_every_top_level_value_but_keys() -> None:
    text = """
macros: {p: 7000, host: box, key: secret}
startPort: ${p}
apiKeys: ['${key}']
peers: {far: {proxy: 'http://${host}', models: ['${host}']}}
hooks: {on_startup: {preload: ['${host}']}}
x-${key}: ${nothing}
models: {box: {cmd: 'x ${PORT}'}}
"""
    found = config(text)
    assert (found.start_port, found.models["box"].port) == (7000, 7000)
    assert found.api_keys[0].key == "secret" and found.peers["far"].proxy == "http://box"
    assert found.preload == ("box",)


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("{cmd: 'x ${PORT} ${no}'}", "unknown macro '${no}' found in m.cmd"),
        ("{cmd: 'x ${PORT} ${PID}'}", "unknown macro '${PID}' found in m.cmd"),
        ("{cmd: x, proxy: 'http://h', name: '${PORT}'}", "should have been substituted"),
        ("{cmd: x, proxy: 'http://h', cmdStop: 'k ${PORT}'}", "should have been substituted"),
        ("{cmd: x, proxy: 'http://h', filters: {stripParams: '${PORT}'}}", "should have been substituted"),
        ("{cmd: x, proxy: 'http://h', env: ['A=${PORT}']}", "model m env[0]: unknown macro '${PORT}'"),
        ("{cmd: x, proxy: 'http://h:${PORT}'}", "proxy uses ${PORT} but cmd does not"),
        ("{cmd: 'x ${PORT}', capabilities: {in: ['${no}']}}", "model m capabilities: unknown macro '${no}'"),
        ("{cmd: 'x ${PORT}', metadata: {a: [{b: '${no}'}]}}", "model m metadata: unknown macro '${no}'"),
        (
            "{cmd: 'x ${PORT}', filters: {setParams: {a: '${no}'}}}",
            "model m filters.setParams.a: unknown macro '${no}'",
        ),
        ("{cmd: 'x ${PORT}', odd: '${no}'}", "model m odd: unknown macro '${no}'"),
        (
            "{cmd: 'x ${PORT}', filters: {setParamsByID: {'${no}': {}}}}",
            "unknown macro '${no}' found in model m filters",
        ),
        ("{cmd: 'x ${PORT}', cmdStop: 'k ${PID} ${no}'}", "unknown macro '${no}' found in m.cmdStop"),
    ],
)
def test_leftovers(model: str, part: str) -> None:
    assert part in errors(f"models: {{m: {model}}}")


def test_global_leftovers() -> None:
    text = (
        "groups: {g: {members: [a, '${x}']}}\napiKeys: [k, '${y}']\nlogLevel: ${MODEL_ID}\nx-z: ${nope}\nodd: ${nope}"
    )
    message = errors(text)
    for part in ("groups.g.members[1]: unknown macro '${x}'", "apiKeys[1]: unknown macro '${y}'", "'${MODEL_ID}'"):
        assert part in message
    assert "nope" not in message


def test_other_dollars_are_plain_text() -> None:
    text = "models: {m: {cmd: 'x ${PORT} $HOME ${} ${A:-b} ${a b} $${c.d} ${env.1X} ${env.a-b}'}}"
    assert config(text).models["m"].cmd == "x 5800 $HOME ${} ${A:-b} ${a b} $${c.d} ${env.1X} ${env.a-b}"


@pytest.mark.parametrize("cmd", ["[x]", "'${gone}'", "'x ${env.GONE}'", "{}"])
def test_a_wrong_command_is_one_error(cmd: str) -> None:
    assert len(errors(f"models: {{m: {{cmd: {cmd}}}}}").splitlines()) == 1


def test_an_unused_macro_may_hold_an_undefined_one() -> None:
    assert config("macros: {a: '${nope}'}\nmodels: {m: {cmd: 'x ${PORT}'}}").models["m"].port == 5800


def test_ports_go_to_models_that_want_one_in_byte_order() -> None:
    text = """
macros: {srv: 'r ${PORT}'}
models:
  b: {cmd: 'r ${PORT}', checkEndpoint: '/${PORT}', env: ['P=${PORT}'], name: 'at ${PORT}'}
  é: {cmd: '${srv}'}
  a: {cmd: r, proxy: 'http://h:1'}
  Z: {cmd: "# ${PORT}\\nr ${PORT}"}
"""
    models = config(text).models
    assert {name: model.port for name, model in models.items()} == {"b": 5801, "é": 5802, "a": None, "Z": 5800}
    assert list(models) == ["b", "é", "a", "Z"]
    assert (models["b"].check_endpoint, models["b"].env, models["b"].name) == ("/5801", ("P=5801",), "at 5801")


def test_comments_in_commands() -> None:
    text = """
macros: {with: "--a\\n# ${gone} ${PORT}\\n--b"}
models:
  m:
    cmd: |
      r --port ${PORT}
        # never ${expanded}
      ${safe}
    macros: {safe: --z}
    cmdStop: "# ${never}\\nkill ${PID}"
"""
    model = config(text).models["m"]
    assert model.launch().argv == ("r", "--port", "5800", "--z")
    assert model.stop_argv(42) == ("kill", "42")
    assert "unknown macro '${gone}'" in errors("macros: {w: '# ${gone}'}\nmodels: {m: {cmd: \"r ${PORT}\\n${w}\"}}")


def test_growth_is_bounded() -> None:
    lines = ["macros:", "  m0: xxxxxxxxxx"] + [f"  m{n}: '{f'${{m{n - 1}}}' * 8}'" for n in range(1, 40)]
    assert "far too much text" in errors("\n".join([*lines, "models: {m: {cmd: 'x ${PORT} ${m39}'}}"]))


def test_anchors_are_expanded_before_macros() -> None:
    text = """
x-base: &base
  cmd: run --port ${PORT} --size ${size}
  env: [&gpu "GPU=${gpu}"]
  metadata: {size: "${size}"}
models:
  a: {<<: *base, macros: {size: 7, gpu: 0}}
  b: {<<: [*base], macros: {size: 13, gpu: 1}, metadata: {other: "${size}"}}
"""
    models = config(text).models
    assert models["a"].cmd.endswith("--size 7") and models["b"].cmd.endswith("--size 13")
    assert (models["a"].metadata, models["b"].metadata) == ({"size": 7}, {"other": 13})
    assert models["b"].env == ("GPU=1",)
    assert "duplicate alias" in errors("x-b: &b {cmd: '${PORT}', aliases: [q]}\nmodels: {a: *b, b: {<<: *b}}")


# -- environment --


def test_environment_values_are_pasted_as_text() -> None:
    text = 'models:\n  m:\n    cmd: "x ${PORT} ${env.Q}"\n    name: ${env.Q}\n    ttl: ${env.N}\n'
    text += '  ${env.ID}: {cmd: "${PORT}"}'
    found = config(text, Q='a\\b"c', N="30", ID="given")
    assert found.models["m"].cmd == 'x 5801 a\\b"c'
    assert found.models["m"].name == 'a\\\\b\\"c'  # the escapes stay visible outside of double quotes
    assert found.models["m"].ttl == 30 and "given" in found.models
    assert "whole number" in errors("models: {m: {cmd: '${PORT}', ttl: '${env.N}'}}", N="30")


def test_environment_references_in_comments_are_dead() -> None:
    assert config("# ${env.NOPE}\nstartPort: 7000 # ${env.NOPE}\n").start_port == 7000
    message = errors("models:\n  m:\n    cmd: |\n      # ${env.NOPE}\n      x ${PORT}\n")
    assert "f.yaml:4:9: models.m.cmd: environment variable 'NOPE' is not set" in message
    # Without its value this text is no YAML, so comments cannot be told apart.
    assert "'NOPE' is not set" in errors("# ${env.NOPE}\napiKeys: [${env.K}]", K="k")
    assert config("# ${env.K}\napiKeys: [${env.K}]", K="k").api_keys[0].key == "k"


def test_environment_values_are_followed_once() -> None:
    assert config("logTimeFormat: ${env.A}", A="${env.B}", B="stamp").log_time_format == "stamp"
    assert "'${env.C}'" in errors("logTimeFormat: ${env.A}", A="${env.B}", B="${env.C}", C="stamp")
    assert "'B' is not set" in errors("logTimeFormat: ${env.A}", A="${env.B}")
    assert config("macros: {m: kitchen}\nlogTimeFormat: ${env.A}", A="${m}").log_time_format == "kitchen"


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b"])
def test_environment_values_with_line_ends_are_refused(value: str) -> None:
    assert "contains newlines or null bytes" in errors("logTimeFormat: ${env.A}", A=value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("apiKeys: ${env.A}", "[1, 2]"),
        ("apiKeys: [${env.A}]", "a, b"),
        ("apiKeys: [${env.A}]", ""),
        ("logTimeFormat: ${env.A}", "a: b"),
        ("logTimeFormat: ${env.A}", "a #b"),
        ("logTimeFormat: ${env.A}", "*x"),
        ("logTimeFormat: ${env.A}", "{a: b}"),
        ("logTimeFormat: '${env.A}'", "it's"),
        ("logTimeFormat: ${env.A}", "\t- x"),
    ],
)
def test_environment_values_must_not_change_the_structure(text: str, value: str) -> None:
    message = errors(text, A=value)
    assert "environment variable 'A'" in message
    assert "f.yaml:1:" in message and (not value or repr(value) not in message)


def test_the_variable_at_fault_is_named_and_the_rest_still_checked() -> None:
    report = analyse(
        [Source("f", "logLevel: ${env.A}\nlogTimeFormat: ${env.B}\nlogToStdout: x")], {"A": "a: b", "B": "ok"}
    )
    texts = [problem.text() for problem in report.errors]
    assert len(texts) == 2 and "'A'" in texts[0] and "logToStdout must be one of" in texts[1]


def test_empty_environment_values_are_allowed() -> None:
    assert (
        config("models: {m: {cmd: 'x ${PORT} ${env.A}'}}\nlogTimeFormat: ${env.A}", A="").models["m"].cmd == "x 5800 "
    )


SPACED = "models: {'my model': {%s}}\n"
SHARED = """macros:
  alias: '--alias ${MODEL_ID} -x'
  dir: /my models
  exe: /opt/a server
  args: ' --fa on -n 3 '
  v: 'b: 1'
"""


@pytest.mark.parametrize(
    ("command", "torn"),
    [
        ("srv --alias ${MODEL_ID}", ["MODEL_ID"]),
        ("srv --alias=${MODEL_ID} --again ${MODEL_ID}", ["MODEL_ID"]),
        ('srv --alias "${MODEL_ID}"', []),
        ('srv --alias="${MODEL_ID}"', []),
        ("srv --alias 'a ${MODEL_ID}' b", []),
        ("srv '${MODEL_ID}' ${MODEL_ID}.gguf", ["MODEL_ID"]),
        ("srv # ${MODEL_ID}", ["MODEL_ID"]),
        ("\n  # ${MODEL_ID}\n  srv\n", []),
        ("srv ${alias}", ["MODEL_ID"]),
        ("srv -m ${dir}/x.gguf", ["dir"]),
        ("srv -m ${dir}", ["dir"]),
        ('srv -m "${dir}/x.gguf" --mmproj "${dir}"', []),
        ("${exe}${args}--host h${args}", []),
        ("${exe} ${dir}", []),
        ("srv --set ${v}", []),
        ("srv ${dir}/a ${MODEL_ID}", ["MODEL_ID", "dir"]),
    ],
)
def test_a_reference_that_the_split_tears_is_warned_of(command: str, torn: list[str]) -> None:
    """And none that holds several arguments on purpose, which is what most macros with spaces do."""
    model = {"cmd": "srv ${PORT}", "cmdStop": command}
    for where in ("cmd", "cmdStop"):
        text = SHARED + SPACED % f"cmd: {json.dumps(command + ' ${PORT}')}"
        if where == "cmdStop":
            text = SHARED + SPACED % ", ".join(f"{key}: {json.dumps(value)}" for key, value in model.items())
        warnings = [w for w in load([Source("f.yaml", text)], {}).warnings if w.code == "spaces"]
        assert [w.message[2 : w.message.index("}")] for w in warnings] == torn
        assert all(w.path.endswith(f".{where}") and "becomes 2 arguments" in w.message for w in warnings)

"""YAML 1.2 values, bounds and merge keys, as compatibility 1.2 says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from qmflask.config import Config, ConfigError, Source, load
from qmflask.config.problems import Problems
from qmflask.config.yaml12 import Timestamp, YamlError, parse, plain_data, resolve_plain


def data(text: str) -> Any:
    problems = Problems()
    node = parse(text, "f", problems)
    assert not problems.errors, problems.errors
    return None if node is None else plain_data(node)


def config(text: str, **environ: str) -> Config:
    return load([Source("f.yaml", text)], environ).config


def errors(text: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load([Source("f.yaml", text)], environ)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(word, word) for word in ("yes", "on", "y", "no", "off", "n", "Yes", "NO", "On")],
        *[("true", True), ("True", True), ("TRUE", True), ("tRue", "tRue"), ("False", False)],
        *[("5", 5), ("+5", 5), ("-5", -5), ("5.7", 5.7), ("5.0", 5), ("5.", 5), (".5", 0.5), ("1e3", 1000)],
        *[("010", 8), ("0o10", 8), ("0x1f", 31), ("0b11", 3), ("1_000", 1000), ("-0x1F", -31), ("09", 9), ("0", 0)],
        *[("1:30", "1:30"), ("12:30:45", "12:30:45"), ("0x", "0x"), ("0b12", "0b12"), ("1e", "1e"), ("-", "-")],
        *[("~", None), ("null", None), ("Null", None), ("", None), ("nUll", "nUll")],
        *[("12345678901234567890", 12345678901234567890), ("99999999999999999999", 1e20), ("1e6", 1e6)],
        *[(".inf", math.inf), ("-.INF", -math.inf), ("inf", "inf"), ("nan", "nan"), ("1.2.3", "1.2.3")],
        *[("2024-01-02", "2024-01-02T00:00:00Z"), ("2024-1-2 3:04:05", "2024-01-02T03:04:05Z")],
        *[("2024-01-02T03:04:05.250+02:00", "2024-01-02T03:04:05.25+02:00"), ("2024-13-02", "2024-13-02")],
        *[("2023-02-29", "2023-02-29"), ("2024-02-29", "2024-02-29T00:00:00Z"), ("=", "="), ("<<", "<<")],
    ],
)
def test_plain_scalars(text: str, value: Any) -> None:
    got = resolve_plain(text)
    assert got == value and type(got) in (type(value), Timestamp)


def test_quoting_and_tags_decide() -> None:
    text = """{a: "true", b: '5', c: !!str 5, d: !!int "7", e: !!float 2.5, f: ! 5, g: !odd x, h: "2024-01-02"}"""
    assert data(text) == {"a": "true", "b": "5", "c": "5", "d": 7, "e": 2.5, "f": "5", "g": "x", "h": "2024-01-02"}
    problems = Problems()
    parse("a: !!int word", "f", problems)
    assert "!!int" in problems.errors[0].message


@pytest.mark.parametrize(
    ("value", "field"),
    [("60", 60), ("5.7", 5), ("5.0", 5), ("1e3", 1000), ("010", 8), ("0x1f", 31), ("1_000", 1000), ("~", 7), ("", 7)],
)
def test_int_field(value: str, field: int) -> None:
    assert config(f"globalTTL: 7\nmodels: {{a: {{cmd: '${{PORT}}', ttl: {value}}}}}").models["a"].ttl == field


@pytest.mark.parametrize("value", ["'60'", "yes", "true", "[1]", "{a: 1}", "1:30", "2024-01-02", "word", "1e30"])
def test_int_field_refuses(value: str) -> None:
    assert "models.a.ttl" in errors(f"models:\n  a:\n    cmd: x ${{PORT}}\n    ttl: {value}")


@pytest.mark.parametrize(
    ("value", "field"), [("yes", True), ("'yes'", True), ("ON", True), ("y", True), ("off", False), ("TRUE", True)]
)
def test_bool_field(value: str, field: bool) -> None:
    assert config(f"models: {{a: {{cmd: '${{PORT}}', unlisted: {value}}}}}").models["a"].unlisted is field


@pytest.mark.parametrize("value", ["'true'", "5", "1", "0", "[]", "oN", "2024-01-02"])
def test_bool_field_refuses(value: str) -> None:
    assert "models.a.unlisted" in errors(f"models: {{a: {{cmd: '${{PORT}}', unlisted: {value}}}}}")


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("5", "5"),
        ("5.0", "5"),
        ("True", "true"),
        ("0x1f", "31"),
        ("2024-01-02", "2024-01-02T00:00:00Z"),
        ("1e6", "1e+06"),
    ],
)
def test_text_field(value: str, field: str) -> None:
    assert config(f"models: {{a: {{cmd: '${{PORT}}', name: {value}}}}}").models["a"].name == field


def test_text_field_refuses_a_list() -> None:
    assert "models.a.cmd: expected text, not a list" in errors("models: {a: {cmd: [x, '${PORT}']}}")


def test_merge_keys() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], z: 3}\nd: {z: 4, <<: *a}\ne: {<<: *a, '<<': q}\n"
    problems = Problems()
    assert data(text.replace(", '<<': q", "")) == {
        "a": {"x": 1, "y": 1},
        "b": {"y": 2, "z": 2},
        "c": {"x": 1, "y": 1, "z": 3},
        "d": {"z": 4, "x": 1, "y": 1},
        "e": {"x": 1, "y": 1},
    }
    parse("a: {<<: 5}", "f", problems)
    assert "<<" in problems.errors[0].message


def test_merge_keys_are_names_inside_macros() -> None:
    assert "macro '<<' contains invalid characters" in errors("x-a: &a {k: v}\nmacros: {<<: *a}\n")


def test_merge_chain_is_shallow_and_transitive() -> None:
    assert data("a: &a {m: {x: 1}}\nb: &b {<<: *a, n: 1}\nc: {<<: *b, m: {y: 2}}")["c"] == {"n": 1, "m": {"y": 2}}


@pytest.mark.parametrize(
    ("text", "part", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", "already defined at line 1", 3),
        ("models: {x: {cmd: a}, x: {cmd: b}}", "already defined", 1),
        ("x-y:\n  k: 1\n  'k': 2\n", "already defined at line 2", 3),
        ("a: *nope\n", "unknown anchor 'nope'", 1),
        ("a: &a [*a]\n", "contains itself", 1),
        ("models:\n\ta: b\n", "no tab", 2),
        ("a: b: c\n", "not valid YAML", 1),
        ("? [a, b]\n: c\n", "mapping key must be plain text", 1),
        ("a: \x01\n", "control characters", 0),
    ],
)
def test_broken_files(text: str, part: str, line: int) -> None:
    message = errors(text)
    assert part in message
    assert f"f.yaml:{line}:" in message if line else "f.yaml" in message


def test_only_the_first_document_counts() -> None:
    loaded = load([Source("f", "startPort: 7000\n---\nstartPort: 8000\n]]]")], {})
    assert loaded.config.start_port == 7000
    assert [(problem.code, problem.line) for problem in loaded.warnings][1:] == [("documents", 2)]


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "models:\n", "models: ~\n", "\ufeffmodels: {}\r\n", "{}"])
def test_empty_files_are_valid(text: str) -> None:
    assert config(text).models == {}


def test_keys_that_are_no_text_are_coerced() -> None:
    text = "models:\n  123: {cmd: 'a ${PORT}'}\n  true: {cmd: 'b ${PORT}'}\n  1.50: {cmd: 'c ${PORT}'}\n"
    assert list(config(text).models) == ["123", "true", "1.50"]


def test_null_is_absent_except_for_whole_models_and_groups() -> None:
    found = config("models: {a: , b: {cmd: '${PORT}', proxy: , env: ~, filters: }}\ngroups: {g: }\nstore: \nui: ~")
    assert (found.models["a"].cmd, found.models["a"].proxy) == ("", "")
    assert found.models["b"].proxy == "http://localhost:5800"
    assert (found.groups["g"].swap, found.groups["g"].exclusive) == (False, False)
    with pytest.raises(ValueError, match="upstream proxy missing"):
        found.models["a"].launch()


def test_depth_and_size_are_bounded() -> None:
    for text in ("[" * 500, "{a: " * 500, "a: " + "[" * 150 + "]" * 150, "- " * 5000 + "x"):
        with pytest.raises(YamlError):
            parse(text, "f", Problems())
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    with pytest.raises(YamlError, match="expand to more"):
        parse(bomb, "f", Problems())
    merges = "m0: &m0 {k: v}\n" + "".join(
        f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}], k{n}: v}}\n" for n in range(1, 40)
    )
    assert len(data(merges)) == 40
    deep = "d0: &d0 [x]\n" + "".join(f"d{n}: &d{n} [*d{n - 1}]\n" for n in range(1, 200))
    with pytest.raises(YamlError, match="nested deeper"):
        parse(deep, "f", Problems())

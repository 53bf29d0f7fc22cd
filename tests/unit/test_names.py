"""Names at run time: which meaning wins, which names are near, where a model's name ends in a path."""

from __future__ import annotations

import pytest

from qmflask.config import Source, load
from qmflask.names import Names, Resolved

TEXT = """
models:
  ant: {cmd: 'r ${PORT}', aliases: [gpt, al/ias, org/cat/x]}
  org: {cmd: 'r ${PORT}'}
  org/cat: {cmd: 'r ${PORT}', filters: {setParamsByID: {'org/cat:hot': {a: 1}}}}
  "a b/ü": {cmd: 'r ${PORT}'}
peers:
  px: {proxy: 'http://px', models: [rm, o/rm2, dup, ant, dup]}
  py: {proxy: 'http://py', models: [dup]}
  rm: {proxy: 'http://rm', models: [x]}
selectors:
  sel: {strategy: pin, targets: [ant]}
"""
NAMES = Names(load([Source("f", TEXT)], {}).config)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("ant", Resolved("model", "ant", None, "ant")),
        ("gpt", Resolved("model", "ant", None, "gpt")),
        ("org/cat:hot", Resolved("model", "org/cat", None, "org/cat:hot")),
        ("sel", Resolved("selector", "sel", None, "sel")),
        ("px/ant", Resolved("peer", "px/ant", "px", "ant")),
        ("rm", Resolved("peer", "rm", "px", "rm")),
        ("rm/x", Resolved("peer", "rm/x", "rm", "x")),
        ("px/o/rm2", Resolved("peer", "px/o/rm2", "px", "o/rm2")),
        ("py/dup", Resolved("peer", "py/dup", "py", "dup")),
        ("dup", None),
        ("Ant", None),
        ("", None),
    ],
)
def test_resolve(name: str, meaning: Resolved | None) -> None:
    assert NAMES.resolve(name) == meaning


@pytest.mark.parametrize(
    ("path", "name", "model", "rest"),
    [
        ("/ant", "ant", "ant", ""),
        ("/ant/", "ant", "ant", "/"),
        ("/ant/v1/x%20y//z", "ant", "ant", "/v1/x%20y//z"),
        ("/org/cat/v1", "org/cat", "org/cat", "/v1"),
        ("/org%2Fcat/v1%2Fx", "org/cat", "org/cat", "/v1%2Fx"),
        ("//org//cat//v1", "org/cat", "org/cat", "//v1"),
        ("/org/cat/x/y", "org/cat/x", "ant", "/y"),
        ("/org/dog", "org", "org", "/dog"),
        ("/al/ias", "al/ias", "ant", ""),
        ("/a%20b/%C3%BC/q?x=/ant", "a b/ü", "a b/ü", "/q"),
        ("/px/o/rm2/q", "px/o/rm2", "px/o/rm2", "/q"),
        ("/rm/x/y", "rm/x", "rm/x", "/y"),
        ("/rm/z", "rm", "rm", "/z"),
        ("ant/x", "ant", "ant", "/x"),
    ],
)
def test_split_upstream_path(path: str, name: str, model: str, rest: str) -> None:
    found = NAMES.split_upstream_path(path)
    assert found is not None and (found[1], found[0].id, found[2]) == (name, model, rest)


@pytest.mark.parametrize("path", ["", "/", "///", "/dup/q", "/nope", "/sel", "/?ant", "/%2F%2F", "/%ff%zz"])
def test_paths_that_name_nothing(path: str) -> None:
    assert NAMES.split_upstream_path(path) is None


def test_nearest() -> None:
    assert NAMES.nearest("ORG/CAT")[0] == "org/cat"
    assert NAMES.nearest("org/cat:hit", 1) == ["org/cat:hot"]
    assert NAMES.nearest("zzzzzz") == [] and NAMES.nearest("x" * 10_000) == []

"""Filters: the shared cases, paths, and that no byte changes that no filter names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmflask import jsonedit
from qmflask.filters import FilterFailed, Filters, apply, parse_path, strip_keys

CASES = [
    case
    for case in json.loads((Path(__file__).parents[1] / "data" / "compatibility.json").read_text())
    if case["area"] == "filters"
]


def filters(raw: dict[str, Any]) -> Filters:
    """Filters from the spelling of the configuration."""
    return Filters(raw.get("stripParams", ""), raw.get("setParams", {}), raw.get("setParamsByID", {}))


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_shared_case(case: dict[str, Any]) -> None:
    asked, expected = case["given"], case["expect"]

    def run() -> bytes:
        body = asked["body"].encode()
        return apply(body, filters(asked["filters"]), asked["requested_model"], asked["useModelName"])

    if expected["result"] == "error":
        with pytest.raises(FilterFailed, match=expected["message_contains"]) as caught:
            run()
        assert caught.value.status == expected["status"]
    else:
        assert json.loads(run()) == expected["body_json"]


def test_the_cases_are_there() -> None:
    assert len(CASES) >= 11


@pytest.mark.parametrize(
    ("body", "set_params", "expected"),
    [
        ('{"a" : 1.0 }', {"a": 2}, '{"a" : 2 }'),
        ('{"a" : 1.0 }', {"b": 2}, '{"a" : 1.0,"b":2 }'),
        ("{ }", {"b": "é"}, '{"b":"é" }'),
        ('{"a":{"b":[1, 2]}}', {"a.b.1": 3}, '{"a":{"b":[1, 3]}}'),
        ('{"a":[1]}', {"a.3": 4}, '{"a":[1,null,null,4]}'),
        ("{}", {"a.1.b": 4}, '{"a":[null,{"b":4}]}'),
        ('{"a":"text"}', {"a.b": 1}, '{"a":{"b":1}}'),
        ('{"a":1,"a":2}', {"a": 9}, '{"a":9,"a":2}'),
        ('{"a":{"x":1}}', {"a": {"y": 2}}, '{"a":{"y":2}}'),
        ('{"m":1}', {"model.x": 1, "model": 2}, '{"m":1}'),
        ('{"m":1}', {"a*": 1, "b?": 1, "c|d": 1, "e#": 1, "@f": 1}, '{"m":1}'),
        ('{"q\\"x":1}', {'q"x': 2}, '{"q\\"x":2}'),
    ],
)
def test_set_paths(body: str, set_params: dict[str, Any], expected: str) -> None:
    assert apply(body.encode(), Filters(set_params=set_params), "m").decode() == expected


@pytest.mark.parametrize(
    ("body", "strip", "expected"),
    [
        ('{"a":1, "b":2, "c":3}', "b", '{"a":1, "c":3}'),
        ('{"a":1, "b":2, "c":3}', "a", '{"b":2, "c":3}'),
        ('{"a":1, "b":2 }', "b", '{"a":1 }'),
        ('{"a":1}', "a", "{}"),
        ('{"a":{"b":[1, 2, 3]}}', "a.b.-1", '{"a":{"b":[1, 2]}}'),
        ('{"a":{"b":[1, 2, 3]}}', "a.b.0", '{"a":{"b":[2, 3]}}'),
        ('{"a":{"b":1}}', "a.x,z.y,a.b.c", '{"a":{"b":1}}'),
        ('{"a":1,"a":2}', "a", '{"a":2}'),
        ('{"a.b":1,"c":{"d":1}}', "a\\.b,c.d", '{"c":{}}'),
        ('{"model":{"x":1}}', "model,model.x", '{"model":{"x":1}}'),
        ("[1]", "0", "[1]"),
    ],
)
def test_strip_paths(body: str, strip: str, expected: str) -> None:
    assert apply(body.encode(), Filters(strip_params=strip), "m").decode() == expected


def test_errors_name_the_key() -> None:
    with pytest.raises(FilterFailed, match="error setting parameter"):
        apply(b"{}", Filters(set_params={"": 1}), "m")
    with pytest.raises(FilterFailed, match=r"error setting parameter 'a\.x'"):
        apply(b'{"a":[]}', Filters(set_params={"a.x": 1}), "m")
    with pytest.raises(FilterFailed, match="error setting parameter 'a'"):
        apply(b"{}", Filters(set_params={"a": {1: 2}}), "m")
    with pytest.raises(FilterFailed, match="too far"):
        apply(b"{}", Filters(set_params={"a.99999999": 1}), "m")


def test_keys_and_paths() -> None:
    assert strip_keys(" b , a,, model,b,model.x") == ["a", "b"]
    assert parse_path(r"a\.b.c\\.d") == ("a.b", "c\\", "d")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=5)


@given(OBJECTS, st.text(max_size=5), JSON, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_set_then_delete_is_what_a_dict_does(
    document: dict[str, Any], name: str, value: Any, indent: Any, ascii_only: bool
) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    changed = jsonedit.set_value(text, (name,), json.dumps(value).encode())
    assert json.loads(changed) == {**document, name: value}
    removed = jsonedit.delete(changed, (name,))
    assert json.loads(removed) == {k: v for k, v in document.items() if k != name}
    if name not in document:
        assert json.loads(removed) == document


@given(OBJECTS)
def test_members_are_what_the_parser_sees(document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=2).encode()
    found = {m.name: json.loads(text[m.start : m.end]) for m in jsonedit.members(text)}
    assert found == document

"""Dataclasses as JSON and back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest

from qmflask.config import plain


class Place(NamedTuple):
    """A named tuple in a dataclass."""

    file: str
    line: int = 0


@dataclass(frozen=True)
class Inner:
    """Something inside."""

    ratio: float = 0
    mode: bool | Literal["loud"] = False


@dataclass(frozen=True, slots=True)
class Outer:
    """Every kind of field that there is."""

    name: str
    pairs: tuple[tuple[str, int], ...] = ()
    inner: dict[str, Inner] = field(default_factory=dict)
    one: Inner | None = None
    place: Place | None = None
    free: Any = None


FULL = Outer(
    "\ud800 é \ufde1",
    (("a", 1), ("b", 10**20)),
    {"x": Inner(math.inf, "loud"), "y": Inner(1, True)},
    Inner(-0.5),
    Place("f", 3),
    {"k": [1, None, 2.5, {"l": True}]},
)


def test_there_and_back() -> None:
    assert plain.load(Outer, plain.dump(FULL)) == FULL
    assert plain.load(Outer, plain.dump(Outer("x"))) == Outer("x")


def test_a_whole_number_may_stand_for_a_fraction() -> None:
    found = plain.load(Inner, b'{"ratio": 2}')
    assert found == Inner(2.0) and isinstance(found.ratio, float)


def test_not_a_number() -> None:
    assert math.isnan(plain.load(Inner, plain.dump(Inner(math.nan))).ratio)


def test_keys_of_another_version_are_passed_over() -> None:
    assert plain.load(Outer, b'{"name": "x", "new": 1}') == Outer("x")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "invalid JSON"),
        ('{"name": "x"', "invalid JSON"),
        ("[]", "no object"),
        ("{}", "name"),
        ('{"name": 1}', "no str"),
        ('{"name": "x", "pairs": {}}', "no list"),
        ('{"name": "x", "pairs": [["a"]]}', "no list"),
        ('{"name": "x", "pairs": [["a", true]]}', "no int"),
        ('{"name": "x", "inner": []}', "no object"),
        ('{"name": "x", "inner": {"a": {"ratio": "1"}}}', "no float"),
        ('{"name": "x", "inner": {"a": {"mode": "quiet"}}}', "none of"),
        ('{"name": "x", "one": 1}', "no null"),
        ('{"name": "x", "place": ["f"]}', "no null"),
    ],
)
def test_anything_else_is_told(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        plain.load(Outer, text.encode())


def test_what_is_cached_in_an_object_is_not_written() -> None:
    inner = Inner()
    vars(inner)["_cached"] = object()
    assert json.loads(plain.dump(inner)) == {"ratio": 0, "mode": False}

"""Which idle streams are to be cut; the waiting itself is tested on real services."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qmflask.config import Config, Model
from qmflask.leases import SECOND, idle_streams
from qmflask.states import State

CONFIG = Config(models={"a": Model(id="a", ttl=10), "b": Model(id="b", ttl=0)})


def lease(model: str = "a", idle_limit: int = 5, moved_at: int = 100) -> Any:
    """A lease of which only what the rule looks at is there; seconds."""
    live = SimpleNamespace(config=CONFIG)
    return SimpleNamespace(model=model, live=live, idle_limit=idle_limit * SECOND, moved_at=moved_at * SECOND)


@pytest.mark.parametrize(
    ("stream", "state", "count", "now", "cut"),
    [
        (lease(), State.DRAINING, 1, 106, True),
        (lease(), State.DRAINING, 9, 106, True),
        (lease(), State.DRAINING, 1, 104, False),
        (lease(idle_limit=0), State.DRAINING, 1, 999, False),
        (lease(), State.READY, 1, 106, False),
        (lease(), State.READY, 1, 110, True),
        (lease(), State.READY, 2, 110, False),
        (lease("b"), State.READY, 1, 999, False),
        (lease("b"), State.DRAINING, 1, 106, True),
        (lease("gone"), State.READY, 1, 999, False),
    ],
)
def test_idle_streams(stream: Any, state: State, count: int, now: int, cut: bool) -> None:
    found = idle_streams([stream], {stream.model: state}, {stream.model: count}, now * SECOND)
    assert found == ([stream] if cut else [])


def test_two_idle_streams_do_not_keep_each_other() -> None:
    pair = [lease(), lease()]
    assert idle_streams(pair, {"a": State.READY}, {"a": 2}, 120 * SECOND) == pair

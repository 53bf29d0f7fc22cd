"""What a requested name means now: the active profile's pin, then the selector's choice, then model or peer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from qmflask.config import ApiKey, Selector
from qmflask.configuration import Live
from qmflask.errors import ModelNotFound, NotFound, Unavailable
from qmflask.names import Resolved
from qmflask.policy import selectors
from qmflask.router import Router
from qmflask.web import auth

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """`asked`: the client's word. `name`: after profile and selector, what the body shall say. `meaning`: of that."""

    asked: str
    name: str
    meaning: Resolved
    selector: str | None = None


class NoTarget(Unavailable):
    """Raised when every target of a selector is on its way out."""

    code = "no_target"


class Choices:
    """The requests that selectors have sent in this process and that have not ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: Counter[tuple[str, str]] = Counter()
        self._made: Counter[str] = Counter()

    def choose(self, router: Router, live: Live, selector: Selector) -> tuple[selectors.Target, Callable[[], None]]:
        """A target for one request, and what to call when that has ended. Raises NoTarget."""
        targets = [_target(live, name) for name in selector.targets]
        view = router.load_of(selector.id) if selector.strategy != "pin" else None
        with self._lock:
            mine = {model: count for (name, model), count in self._open.items() if name == selector.id}
            reserved = Counter(view.others if view else {}) + Counter(mine)
            states = view.states if view else {}
            made = self._made[selector.id]
            chosen = selectors.choose(selector.strategy, targets, states, reserved, selector.spillover, made)
            if chosen is None:
                raise _no_target(selector)
            key = (selector.id, chosen.model)
            self._open[key] += 1
            self._made[selector.id] += 1

        def release() -> None:
            with self._lock:
                self._open[key] -= 1
                if not self._open[key]:
                    del self._open[key]

        return chosen, release


def in_newest(router: Router, live: Live, look: Callable[[Live], T]) -> tuple[Live, T]:
    """What `look` finds in `live`, or else in a configuration that another worker knows already; and in which.

    Nobody is told that a name means nothing before that. Raises like `look`.
    """
    try:
        return live, look(live)
    except NotFound:
        newest = router.newest()
        if newest is live:
            raise
        return newest, look(newest)


def find(
    router: Router, live: Live, choices: Choices, key: ApiKey | None, asked: str
) -> tuple[Target, Callable[[], None] | None]:
    """What `asked` means for this request, and what to call at its end if a selector chose.

    Raises ModelNotFound, Forbidden, NoTarget.
    """
    name = pinned(router, live, asked)
    meaning = live.names.resolve(name)
    if meaning is None:
        raise unknown(live, key, name)
    if meaning.kind != "selector":
        auth.check_model(key, live.config, asked, meaning)
        return Target(asked, name, meaning), None
    selector = live.config.selectors[meaning.id]
    auth.check_model(key, live.config, asked, meaning)
    chosen, release = choices.choose(router, live, selector)
    resolved = live.names.resolve(chosen.name)
    assert resolved is not None, "the configuration was checked"
    return Target(asked, chosen.name, resolved, selector.id), release


def destination(router: Router, live: Live, name: str) -> tuple[Resolved, str]:
    """Where a request for `name` would go now, and why in words ("" where it is plain); nothing is reserved.

    Raises ModelNotFound, NoTarget.
    """
    wanted = pinned(router, live, name)
    meaning = live.names.resolve(wanted)
    if meaning is None:
        raise unknown(live, None, wanted)
    words = [] if wanted == name else [f"the active profile puts {wanted!r} in place of {name!r}"]
    if meaning.kind == "selector":
        selector = live.config.selectors[meaning.id]
        load = router.load_of(selector.id, everybody=True)
        targets = [_target(live, target) for target in selector.targets]
        chosen = selectors.choose(selector.strategy, targets, load.states, load.others, selector.spillover)
        if chosen is None:
            raise _no_target(selector)
        words.append(f"the selector {selector.id!r} ({selector.strategy}) sends a request to {chosen.name!r} now")
        found = live.names.resolve(chosen.name)
        assert found is not None, "the configuration was checked"
        meaning = found
    return meaning, "; ".join(words)


def pinned(router: Router, live: Live, name: str) -> str:
    """The name that the active profile puts in place of `name`. Raises ModelNotFound where it disables it."""
    pins = pins_of(router, live)
    if pins is None or name not in pins:
        return name
    if not pins[name]:
        raise disabled(name)
    return pins[name]


def pins_of(router: Router, live: Live) -> dict[str, str] | None:
    """The active profile's pins; None without one. The store is asked only where profiles are configured."""
    active = router.active_profile(live)
    return live.config.profiles[active].pins if active is not None else None


def disabled(name: str) -> ModelNotFound:
    """The error for a pin without a target."""
    text = f"no model id could be identified: the active profile disables {name!r}; choose another model or profile"
    return ModelNotFound(text, param="model")


def unknown(live: Live, key: ApiKey | None, name: str) -> ModelNotFound:
    """The error for a name that means nothing, with the nearest ones that this key may see."""
    near = []
    for candidate in live.names.nearest(name, 8):
        meaning = live.names.resolve(candidate)
        if meaning is not None and auth.may_use(key, live.config, candidate, meaning):
            near.append(candidate)
    shown = name if len(name) <= 200 else name[:200] + "..."
    hint = f"; did you mean {' or '.join(near[:3])}?" if near else "; GET /v1/models lists the models"
    return ModelNotFound(f"no router for requested model {shown!r}{hint}", param="model")


def _no_target(selector: Selector) -> NoTarget:
    return NoTarget(f"{selectors.NO_TARGET} of {selector.id!r}: all are stopping; try again", retry_after=1)


def _target(live: Live, name: str) -> selectors.Target:
    meaning = live.names.resolve(name)
    if meaning is None:
        return selectors.Target(name, name, local=False)
    local = meaning.kind == "model"
    return selectors.Target(name, meaning.id if local else f"{meaning.peer}/{meaning.upstream_name}", local)

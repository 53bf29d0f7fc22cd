"""Process states and the table of allowed transitions; imports nothing of ours."""

from __future__ import annotations

from enum import Enum


class State(str, Enum):
    """State of one model's process tree, as stored in the `processes` table."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    FAILED = "failed"

    def __str__(self) -> str:
        return self.value


class Phase(str, Enum):
    """Phase of a swap; each is written before its work is done, and each can be repeated."""

    DRAINING = "draining"
    STOPPING = "stopping"
    RECLAIM = "reclaim"
    STARTING = "starting"
    PROBING = "probing"

    def __str__(self) -> str:
        return self.value


#: A process tree may live in these states, so its memory is taken.
RESIDENT = frozenset({State.STARTING, State.READY, State.DRAINING, State.STOPPING})

#: The model is loaded and answers; what drains may answer until its swap begins.
SERVING = frozenset({State.READY, State.DRAINING})

#: No process of the model's session lives in these.
DOWN = frozenset({State.STOPPED, State.FAILED})

#: from -> to. What is not here is a bug, and `check_transition` raises.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.STOPPED: frozenset({State.STARTING}),
    State.FAILED: frozenset({State.STARTING, State.STOPPED}),
    State.STARTING: frozenset({State.READY, State.STOPPING}),
    State.READY: frozenset({State.DRAINING, State.STOPPING}),
    State.DRAINING: frozenset({State.READY, State.STOPPING}),
    State.STOPPING: frozenset({State.STOPPED, State.FAILED}),
}


def check_transition(old: State, new: State) -> None:
    """Raise ValueError unless the table allows `old -> new`."""
    if new not in TRANSITIONS[old]:
        raise ValueError(f"no transition {old} -> {new}")

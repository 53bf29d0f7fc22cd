"""What `qmflask doctor` finds: one line of good or bad news each, and how to mend the bad."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Grade = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `mend` says what to do, and is empty for good news."""

    grade: Grade
    topic: str
    text: str
    mend: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def ok(topic: str, text: str) -> Finding:
    """Good news."""
    return Finding("ok", topic, text)


def warn(topic: str, text: str, mend: str) -> Finding:
    """It works, but not as it might be meant."""
    return Finding("warn", topic, text, mend)


def fail(topic: str, text: str, mend: str) -> Finding:
    """It does not work."""
    return Finding("fail", topic, text, mend)

"""The configuration: `load` turns the text of YAML files into a resolved `Config`, or says all that is wrong.

Only who asks for `load` or `analyse` imports them, and with them YAML and pydantic: a process that serves reads what
another has resolved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qmflask.config.problems import ConfigError, Problem
from qmflask.config.report import Loaded, Report, Source
from qmflask.config.resolved import (
    DEFAULT_GROUP,
    ApiKey,
    Config,
    Filters,
    Group,
    Launch,
    LaunchError,
    Matrix,
    Model,
    Peer,
    Profile,
    Selector,
    Timeouts,
)

if TYPE_CHECKING:
    from qmflask.config.pipeline import analyse, load

__all__ = [
    "DEFAULT_GROUP",
    "ApiKey",
    "Config",
    "ConfigError",
    "Filters",
    "Group",
    "Launch",
    "LaunchError",
    "Loaded",
    "Matrix",
    "Model",
    "Peer",
    "Problem",
    "Profile",
    "Report",
    "Selector",
    "Source",
    "Timeouts",
    "analyse",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in ("analyse", "load"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qmflask.config import pipeline

    return getattr(pipeline, name)

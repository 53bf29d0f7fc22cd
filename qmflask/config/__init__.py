"""The configuration: `load` turns the text of YAML files into a resolved `Config`, or says all that is wrong."""

from __future__ import annotations

from qmflask.config.load import Loaded, Report, Source, analyse, load
from qmflask.config.problems import ConfigError, Problem
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

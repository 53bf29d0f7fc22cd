"""What is read and what comes of it: sources, and what was made of them."""

from __future__ import annotations

from dataclasses import dataclass

from qmflask.config.problems import Problem
from qmflask.config.resolved import Config

#: Longest text of one file, in characters.
MAX_TEXT = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Source:
    """The text of one file; `name` is its path as messages show it."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration that can be used, and what is probably not meant in it."""

    config: Config
    warnings: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Everything found in the files. `config` is the best that could be made of them, also beside errors."""

    config: Config | None
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]

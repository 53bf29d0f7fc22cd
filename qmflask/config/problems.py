"""What is wrong in a configuration, and where: the one shape of every error and warning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

#: Values longer than this are cut in messages.
_SHOWN = 80
#: Errors, and warnings, of one report; nobody reads more, and a hostile file could make millions.
MAX_SHOWN = 1000
#: Names that one analysis compares in search of the nearest; some ten microseconds each.
MAX_COMPARED = 50_000


class Mark(NamedTuple):
    """A place in a file; line and column count from 1, 0 means unknown."""

    file: str
    line: int = 0
    column: int = 0


Path = tuple[str | int, ...]


def dotted(path: Sequence[str | int]) -> str:
    """`("models", "x", "env", 0)` as people write it: `models.x.env[0]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def shown(value: Any) -> str:
    """A value as a message shows it: on one line, cut when long."""
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def nearest(word: str, known: Iterable[str], limit: int = 1) -> list[str]:
    """The known words most like `word`, best first, case ignored; empty when none is close."""
    if len(word) > 200:
        return []
    lowered: dict[str, str] = {}
    for name in known:
        lowered.setdefault(name.lower(), name)
    return [lowered[hit] for hit in get_close_matches(word.lower(), lowered, n=limit, cutoff=0.6)]


@dataclass(frozen=True, slots=True)
class Problem:
    """One error or warning of a configuration.

    `path` is dotted (`models.x.ttl`); `value` is what stands there as text, or None where there is none or where it
    must not be shown; `allowed` says what may stand there; `hint` names the nearest known key or the way out.
    """

    severity: str
    message: str
    file: str = ""
    line: int = 0
    column: int = 0
    path: str = ""
    value: str | None = None
    allowed: str | None = None
    hint: str | None = None
    code: str = ""
    #: Where what it is about stands, if that is not where the problem was seen (a duplicate key's first use).
    near: Mark | None = None

    def text(self) -> str:
        """One printable line: `file:line:col: models.x.ttl: message (got ...; allowed: ...; hint)`."""
        where = ":".join(str(part) for part in (self.file, self.line, self.column) if part)
        message = self.message
        if self.path and not message.startswith(self.path):
            message = f"{self.path}: {message}"
        notes = [f"got {self.value!r}"] if self.value is not None and self.value not in message else []
        notes += [f"allowed: {self.allowed}"] if self.allowed else []
        notes += [self.hint] if self.hint else []
        tail = f" ({'; '.join(notes)})" if notes else ""
        line = f"{where}: {message}{tail}" if where else f"{message}{tail}"
        return line if line.isprintable() else line.encode("unicode_escape").decode("ascii")

    def as_dict(self) -> dict[str, Any]:
        """The JSON form that `qmflask check --json` prints."""
        return {
            "severity": self.severity,
            "code": self.code,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "path": self.path,
            "value": self.value,
            "message": self.message,
            "allowed": self.allowed,
            "hint": self.hint,
        }


class ConfigError(ValueError):
    """Raised when a configuration cannot be used; `problems` holds every error found, in file order."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(problem.text() for problem in problems))
        self.problems = tuple(problems)


@dataclass(slots=True)
class Problems:
    """Collects errors and warnings while a configuration is read; at most one error is kept for each place."""

    found: list[Problem] = field(default_factory=list)
    _places: set[tuple[str, str, str]] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)
    _above: set[str] = field(default_factory=set)
    _counts: dict[str, int] = field(default_factory=dict)
    _guesses: int = MAX_COMPARED

    def error(self, message: str, mark: Mark | None = None, path: Sequence[str | int] = (), **more: Any) -> None:
        """Note an error; `more` are the other fields of `Problem`."""
        self._add("error", message, mark, path, more)

    def warning(self, message: str, mark: Mark | None = None, path: Sequence[str | int] = (), **more: Any) -> None:
        """Note a warning; `more` are the other fields of `Problem`."""
        self._add("warning", message, mark, path, more)

    def _add(
        self, severity: str, message: str, mark: Mark | None, path: Sequence[str | int], more: dict[str, Any]
    ) -> None:
        place = (severity, dotted(path), message)
        if place in self._places:
            return
        self._places.add(place)
        if severity == "error":
            self.fail(path)
        count = self._counts[severity] = self._counts.get(severity, 0) + 1
        if count > MAX_SHOWN:
            return
        if count == MAX_SHOWN:
            message, path, more = f"there are more than {MAX_SHOWN} {severity}s; the rest is not shown", (), {}
        mark = mark or Mark("")
        if more.get("value") is not None:
            more["value"] = shown(more["value"])
        self.found.append(Problem(severity, message, mark.file, mark.line, mark.column, shown_path(path), **more))

    def guess(self, word: str, *known: Iterable[str], limit: int = 1) -> list[str]:
        """`nearest` among all of `known`, as long as this analysis has not compared too many names already."""
        if self._guesses <= 0:
            return []
        names = [name for names in known for name in names]
        self._guesses -= len(names) + 20
        return nearest(word, names, limit)

    def fail(self, path: Sequence[str | int]) -> None:
        """Remember that an error stands at `path`."""
        self._failed.add(dotted(path))
        self._above.update(dotted(path[:length]) for length in range(1, len(path)))

    def failed_at(self, path: Sequence[str | int]) -> bool:
        """Whether an error stands at this very path already, so that a second one would only repeat it."""
        return dotted(path) in self._failed

    def failed_under(self, path: Sequence[str | int]) -> bool:
        """Whether an error stands at this path or below it."""
        text = dotted(path)
        return text in self._failed or text in self._above

    @property
    def errors(self) -> tuple[Problem, ...]:
        """Errors in the order of their places."""
        return self._sorted("error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """Warnings in the order of their places."""
        return self._sorted("warning")

    def _sorted(self, severity: str) -> tuple[Problem, ...]:
        chosen = [problem for problem in self.found if problem.severity == severity]
        files = {problem.file: number for number, problem in reversed(list(enumerate(self.found)))}
        return tuple(sorted(chosen, key=lambda p: (files[p.file], p.line, p.column)))


def shown_path(path: Sequence[str | int]) -> str:
    """The dotted path, each over-long part cut, on one line."""
    return dotted(tuple(part if isinstance(part, int) else shown(part) for part in path))

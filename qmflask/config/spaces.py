"""Macros whose spaces split a command: replaced as text before the command is split, `${MODEL_ID}` may be two words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qmflask.config.command import split_command
from qmflask.config.macros import MODEL_ID, REFERENCE, Expander, Macros, text_of
from qmflask.config.problems import Mark
from qmflask.config.yaml12 import YamlError

#: Characters that no text has; one stands for the spaces of one macro.
_FIRST = 0xF0000
_LAST = 0xFFFFD


@dataclass(frozen=True, slots=True)
class Torn:
    """A reference outside quotes whose value surely means one argument, and becomes `count`."""

    name: str
    count: int


def torn_references(text: str, macros: Macros, mark: Mark) -> list[Torn]:
    """Those of a command, each macro once. Nothing is said of macros that hold several options, which is what the
    splitting is for."""
    spaced = [name for name in dict.fromkeys(REFERENCE.findall(text)) if _has_space(macros.values.get(name))]
    groups = [[MODEL_ID]] if _has_space(macros.values.get(MODEL_ID)) else []  # it may also stand in another macro
    groups += [[name for name in spaced if name != MODEL_ID]]
    if any(_FIRST <= ord(char) <= _LAST for char in text):
        return []
    try:
        found = [torn for names in groups if names for torn in _torn(text, names, macros, mark)]
    except (YamlError, ValueError):  # said elsewhere
        return []
    return list({torn.name: torn for torn in reversed(found)}.values())[::-1]


def _has_space(value: object) -> bool:
    """Whether a value may be torn; one of several lines is a list of options, with line ends of its own."""
    return isinstance(value, str) and " " in value.strip() and "\n" not in value


def _torn(text: str, names: list[str], macros: Macros, mark: Mark) -> Iterator[Torn]:
    """Compare the words with those that appear where a marked space separates: in quotes it does not."""
    spaces = {chr(_FIRST + number): name for number, name in enumerate(names)}
    marked = {name: _with_spaces(macros.values[name], space) for space, name in spaces.items()}
    changed = Macros({**macros.values, **marked}, macros.order)
    whole = text_of(Expander().text(text, changed, mark))
    every = "".join(spaces)
    pieces = iter(split_command(whole, every))
    before = ""
    for word in split_command(whole):
        parts = _parts(word, pieces, every)
        name = next((spaces[char] for char in word if char in spaces), "")
        if len(parts) > 1:
            alone = word in text_of(Expander().text(f"${{{name}}}", changed, mark))
            if name == MODEL_ID or _is_one(parts, before, alone):
                yield Torn(name, len(parts))
        before = word


def _with_spaces(value: str, space: str) -> str:
    bare = value.strip()
    return value.replace(bare, bare.replace(" ", space))


def _parts(word: str, pieces: Iterator[str], spaces: str) -> list[str]:
    """The next pieces, as many as make up `word`."""
    parts = [next(pieces)]
    rest = word.removeprefix(parts[0])
    while rest.strip(spaces):
        parts.append(next(pieces))
        rest = rest[rest.index(parts[-1]) + len(parts[-1]) :]
    return parts


def _is_one(parts: list[str], before: str, alone: bool) -> bool:
    """Whether what becomes several arguments was meant as one: glued to other text, or a path after an option."""
    first, *rest = parts
    if any(part.startswith("-") for part in rest):
        return False
    path = first.startswith(("/", "./", "../", "~")) and not any(part.startswith("/") for part in rest)
    return not alone or (before.startswith("-") and path)

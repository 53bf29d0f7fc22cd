"""`${env.NAME}` in the text of a file: pasted by the text rule, but never allowed to change the document's structure.

Each reference is first masked by a mask of the same length, so that the masked text parses with the
positions of the original, references in comments are seen to be dead, and the structure with and without a value can
be compared (compatibility 1.7).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qmflask.config.problems import Mark, Problems
from qmflask.config.yaml12 import Event, YamlError, events

_REFERENCE = re.compile(r"\$\{env\.([A-Za-z_][A-Za-z0-9_]*)\}")
#: A mask is a mark and digits, all of them code points that Unicode keeps out of texts for ever.
_MARK, _DIGIT = "\ufde1", 0xFDD0
_MASKED = re.compile("\ufde1[\ufdd0-\ufddf]+")
_RESERVED = re.compile("[\ufdd0-\ufdef]")
_MAX_REFERENCES = 20_000
_MAX_SUSPECTS = 30


@dataclass(frozen=True, slots=True)
class _Reference:
    name: str
    start: int
    end: int
    mask: str


def is_masked(text: str) -> bool:
    """Whether a text still holds a reference that could not be replaced; its value is then unknown."""
    return _MASKED.search(text) is not None


def unmasked(text: str) -> str:
    """The text with a word for people where a value is unknown."""
    return _MASKED.sub("${env.?}", text)


def read(text: str, file: str, environ: Mapping[str, str], problems: Problems) -> list[Event]:
    """The events of `text` with every live reference replaced.

    References that cannot be replaced are noted in `problems` and stay masked, so that reading can go on.
    Raises YamlError when the text is not YAML.
    """
    text = text.removeprefix("\ufeff")
    if _RESERVED.search(text):
        raise YamlError("the text holds characters that are no text (U+FDD0 to U+FDEF)")
    references = _references(text)
    if not references:
        return events(text)
    masked = _with(text, references, {})
    stream = events(masked)
    live = _live(stream, references)
    values = _values(text, references, live, file, environ, problems)
    return _paste(text, references, stream, values, file, problems)


def _references(text: str) -> list[_Reference]:
    found = []
    for number, match in enumerate(_REFERENCE.finditer(text)):
        if number >= _MAX_REFERENCES:
            raise YamlError("too many ${env...} references in one file")
        digits = f"{number:0{match.end() - match.start() - 1}x}"
        mask = _MARK + "".join(chr(_DIGIT + int(digit, 16)) for digit in digits)
        found.append(_Reference(match.group(1), match.start(), match.end(), mask))
    return found


def _with(text: str, references: Iterable[_Reference], values: Mapping[str, str]) -> str:
    """The text with the given values pasted and every other reference masked."""
    parts, at = [], 0
    for reference in references:
        parts += [text[at : reference.start], values.get(reference.name, reference.mask)]
        at = reference.end
    return "".join([*parts, text[at:]])


def _live(stream: list[Event], references: list[_Reference]) -> set[int]:
    """Which references stand outside comments."""
    seen: set[str] = set()
    for event in stream:
        if event.kind == "scalar" and not event.value.isascii():
            seen.update(_MASKED.findall(event.value))
    return {number for number, reference in enumerate(references) if reference.mask in seen}


def _values(
    text: str,
    references: list[_Reference],
    live: set[int],
    file: str,
    environ: Mapping[str, str],
    problems: Problems,
) -> dict[str, str]:
    """The escaped value of each live name that has a usable one."""
    dead_unset = [n for n, ref in enumerate(references) if n not in live and ref.name not in environ]
    if dead_unset and not _is_yaml(text):
        # Such a text (`[${env.K}]`) cannot be parsed to tell comments apart before it is filled in; llama-swap then
        # wants every variable, and so do we, lest a file mean different things in the two.
        live = live | set(dead_unset)
    values: dict[str, str] = {}
    places = _Places(text, file)
    for number in sorted(live):
        reference = references[number]
        try:
            values[reference.name] = _value(reference.name, environ)
        except LookupError as error:
            message = error.args[0]
            written = text[reference.start : reference.end]
            allowed = "a variable that is set, to one line of text"
            hint = _hint(reference.name, environ, problems)
            problems.error(message, places.mark(reference), value=written, allowed=allowed, hint=hint, code="env")
    return values


def _is_yaml(text: str) -> bool:
    try:
        events(text)
    except YamlError:
        return False
    return True


def _hint(name: str, environ: Mapping[str, str], problems: Problems) -> str:
    close = problems.guess(name, environ)
    return f"did you mean {close[0]}?" if close and name not in environ else "set it where qmflask is started"


def _value(name: str, environ: Mapping[str, str]) -> str:
    """The value as it is pasted; a reference inside it is followed once. Raises LookupError with the message."""
    return _REFERENCE.sub(lambda match: _escaped(match.group(1), environ), _escaped(name, environ))


def _escaped(name: str, environ: Mapping[str, str]) -> str:
    if name not in environ:
        raise LookupError(f"environment variable '{name}' is not set")
    value = environ[name]
    if any(char in value for char in "\n\r\0"):
        raise LookupError(f"environment variable '{name}' contains newlines or null bytes")
    return value.replace("\\", "\\\\").replace('"', '\\"')


class _Places:
    """Finds lines and columns of references that are asked for from front to back, reading the text once."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.at, self.line = 0, 1

    def mark(self, reference: _Reference) -> Mark:
        self.line += self.text.count("\n", self.at, reference.start)
        self.at = reference.start
        return Mark(self.file, self.line, reference.start - self.text.rfind("\n", 0, reference.start))


def _paste(
    text: str,
    references: list[_Reference],
    stream: list[Event],
    values: dict[str, str],
    file: str,
    problems: Problems,
) -> list[Event]:
    filled = _filled(text, references, stream, values)
    if filled is not None:
        return filled
    for number, name in enumerate(list(values)):
        # Beyond a handful it is not worth a parse of the file to tell the guilty from the rest.
        if number >= _MAX_SUSPECTS or _filled(text, references, stream, {name: values[name]}) is None:
            reference = next(ref for ref in references if ref.name == name)
            problems.error(
                f"environment variable '{name}' holds a value that changes the structure of the file here",
                _Places(text, file).mark(reference),
                value=text[reference.start : reference.end],
                allowed="a value that stays one piece of text",
                code="env",
                hint='quote the reference ("${env.' + name + '}"), or write the structure into the file',
            )
            del values[name]
    return _filled(text, references, stream, values) or stream


def _filled(
    text: str, references: list[_Reference], stream: list[Event], values: Mapping[str, str]
) -> list[Event] | None:
    """The events with the values in place and the positions of the original; None when the structure differs."""
    try:
        pasted = events(_with(text, references, values))
    except YamlError:
        return None
    if len(pasted) != len(stream):
        return None
    by_mask = {ref.mask: values[ref.name] for ref in references if ref.name in values}
    merged: list[Event] = []
    for before, after in zip(stream, pasted, strict=True):
        if before[0] != after[0] or before[2:6] != after[2:6]:
            return None
        if before.value != after.value and not _same(before, after, by_mask):
            return None
        merged.append(before._replace(value=after.value))
    return merged


def _same(before: Event, after: Event, by_mask: Mapping[str, str]) -> bool:
    """Whether the scalar holds just what was pasted; blanks may fold."""

    def put(match: re.Match[str]) -> str:
        text = by_mask.get(match.group(0), match.group(0))
        return text.replace('\\"', '"').replace("\\\\", "\\") if before.quoted == '"' else text

    return _MASKED.sub(put, before.value).split() == after.value.split()

"""YAML 1.2 values over PyYAML's event stream: typed nodes that know their place, within bounds.

PyYAML resolves YAML 1.1; the rules here are those of compatibility 1.2. Events are composed by hand, so that depth,
number of nodes and alias expansion are bounded before anything grows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from qmflask.config.problems import Mark, Problems, shown
from qmflask.config.report import MAX_TEXT

#: Nested collections deeper than this are refused; no sane file has a tenth of it.
MAX_DEPTH = 100
#: Nodes of one file, and of all files after anchors and merges are expanded (a model has about 20).
MAX_NODES = 100_000
#: Longest single value; the kernel takes no longer argument either.
MAX_VALUE = 128 * 1024

_TAG = "tag:yaml.org,2002:"
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **{sign + word: math.inf for sign in ("", "+") for word in (".inf", ".Inf", ".INF")},
    **{"-" + word: -math.inf for word in (".inf", ".Inf", ".INF")},
}
_NUMBER_START = frozenset("+-.0123456789")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_INT = re.compile(r"([-+]?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|[1-9][0-9]*|0)\Z")
_TIMESTAMP = re.compile(
    r"(\d{4})-(\d{1,2})-(\d{1,2})(?:(?:[Tt]|[ ])(\d{1,2}):(\d{1,2}):(\d{1,2})(\.\d{1,9})?(Z|[-+]\d\d:\d\d)?)?\Z"
)


class Timestamp(str):
    """A date or time written plain; its text is RFC 3339. Text fields take it, macros and numbers do not."""

    __slots__ = ()


class Event(NamedTuple):
    """One parser event: `kind` is one of `map seq end scalar alias more`; line and column count from 1."""

    kind: str
    value: str
    plain: bool
    quoted: str
    anchor: str | None
    tag: str | None
    line: int
    column: int


@dataclass(slots=True)
class Scalar:
    """A leaf: its typed value, the text it was written as, and whether it was written without quotes."""

    value: Any
    text: str
    plain: bool
    mark: Mark


@dataclass(slots=True)
class Seq:
    """A list of nodes."""

    items: list[Node]
    mark: Mark


@dataclass(slots=True)
class Map:
    """A mapping with text keys, in file order; `marks` holds the place of each key."""

    entries: dict[str, Node]
    marks: dict[str, Mark]
    mark: Mark

    def get(self, key: str) -> Node | None:
        """The node under `key`; None when it is absent or null."""
        node = self.entries.get(key)
        return None if node is None or is_null(node) else node


Node = Scalar | Seq | Map


def is_null(node: Node | None) -> bool:
    """Whether a node is absent or null."""
    return node is None or (isinstance(node, Scalar) and node.value is None)


def plain_data(node: Node) -> Any:
    """The node as Python values: dict, list, str, int, float, bool, None, Timestamp."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Seq):
        return [plain_data(item) for item in node.items]
    return {key: plain_data(value) for key, value in node.entries.items()}


def locate(root: Node, path: tuple[str | int, ...], key: bool = False) -> Mark:
    """The place of `path`, or of its nearest existing parent; with `key`, the place of its last key."""
    node: Node = root
    mark = root.mark
    for part in path:
        if isinstance(node, Map) and str(part) in node.entries:
            mark = node.marks[str(part)]
            node = node.entries[str(part)]
            mark = mark if key else node.mark
        elif isinstance(node, Seq) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
            mark = node.mark
        else:
            break
    return mark


class YamlError(ValueError):
    """Raised when a text is not YAML or too large to expand; `line` and `column` count from 1."""

    def __init__(self, message: str, line: int = 0, column: int = 0, file: str = "") -> None:
        super().__init__(message)
        self.line, self.column, self.file = line, column, file

    def mark(self, file: str) -> Mark:
        """Its place, in `file` unless it names its own."""
        return Mark(self.file or file, self.line, self.column)


def events(text: str) -> list[Event]:
    """The events of the first document. Raises YamlError on bad syntax, deep nesting or too many nodes."""
    if len(text) > MAX_TEXT:
        raise YamlError(f"the file is larger than {MAX_TEXT // 1024 // 1024} MiB")
    found: list[Event] = []
    depth = 0
    try:
        for event in _raw_events(text.removeprefix("\ufeff")):
            if event.kind in ("map", "seq"):
                depth += 1
                if depth > MAX_DEPTH:
                    raise YamlError(f"nested deeper than {MAX_DEPTH} levels", event.line, event.column)
            elif event.kind == "end":
                depth -= 1
            elif len(event.value) > MAX_VALUE:
                raise YamlError(f"a value longer than {MAX_VALUE // 1024} KiB", event.line, event.column)
            found.append(event)
            if len(found) > 2 * MAX_NODES:
                raise YamlError(f"more than {MAX_NODES} values in one file", event.line, event.column)
    except yaml.MarkedYAMLError as error:
        raise _syntax(error) from None
    except yaml.YAMLError as error:
        raise YamlError(_unreadable(error)) from None
    except UnicodeEncodeError:
        raise YamlError("the text holds characters that are not Unicode") from None
    return found


def _syntax(error: yaml.MarkedYAMLError) -> YamlError:
    mark = error.problem_mark or error.context_mark
    problem = error.problem or error.context or "not valid YAML"
    text = f"not valid YAML: {problem}" + (f" {error.context}" if error.context and error.problem else "")
    if "cannot start any token" in problem:
        text += "; YAML allows no tab for indentation"
    return YamlError(text, mark.line + 1, mark.column + 1) if mark else YamlError(text)


def _unreadable(error: yaml.YAMLError) -> str:
    return "not valid YAML: " + " ".join(str(error).split('in "<')[0].split())


def _raw_events(text: str) -> Iterator[Event]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        while loader.check_event():
            event = loader.get_event()
            line, column = event.start_mark.line + 1, event.start_mark.column + 1
            if isinstance(event, yaml.ScalarEvent):
                plain = event.style is None or event.style == ""
                yield Event("scalar", event.value, plain, event.style or "", event.anchor, event.tag, line, column)
            elif isinstance(event, yaml.AliasEvent):
                yield Event("alias", "", True, "", event.anchor, None, line, column)
            elif isinstance(event, yaml.MappingStartEvent):
                yield Event("map", "", True, "", event.anchor, event.tag, line, column)
            elif isinstance(event, yaml.SequenceStartEvent):
                yield Event("seq", "", True, "", event.anchor, event.tag, line, column)
            elif isinstance(event, yaml.CollectionEndEvent):
                yield Event("end", "", True, "", None, None, line, column)
            elif isinstance(event, yaml.DocumentEndEvent):
                more = _next_document(loader)
                if more:
                    yield Event("more", "", True, "", None, None, *more)
                return
    finally:
        loader.dispose()


def _next_document(loader: Any) -> tuple[int, int] | None:
    """Where a second document begins; what it holds is not looked at, not even whether it is YAML."""
    try:
        if loader.check_event(yaml.DocumentStartEvent):
            mark = loader.peek_event().start_mark
            return mark.line + 1, mark.column + 1
    except yaml.YAMLError:
        pass  # only the first document counts
    return None


def resolve_plain(text: str) -> Any:
    """The value of a plain scalar by the table of compatibility 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _NUMBER_START:
        return text
    stamp = _timestamp(text) if text[0].isdigit() else None
    if stamp is not None:
        return stamp
    digits = text.replace("_", "")
    match = _INT.match(digits) if len(digits) <= 70 else None
    if match:
        number = _integer(match)
        if -(2**63) <= number < 2**64:
            return number
    if len(digits) <= 400 and _FLOAT.match(digits):
        return whole(float(digits))
    return text


def _integer(match: re.Match[str]) -> int:
    sign, digits = match.groups()
    base = {"x": 16, "b": 2, "o": 8}.get(digits[1:2].lower(), 8 if len(digits) > 1 and digits[0] == "0" else 10)
    body = digits[2:] if digits[1:2].isalpha() else digits
    return int(sign + body, base)


def whole(number: float) -> int | float:
    """A float that prints as a short whole number becomes that number (5.0 is 5 after a round trip)."""
    return int(number) if number.is_integer() and abs(number) < 1e6 else number


def _timestamp(text: str) -> Timestamp | None:
    match = _TIMESTAMP.match(text) if len(text) < 45 and text[4:5] == "-" else None
    if not match:
        return None
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    if zone and " " in text:
        return None
    numbers = [int(part or 0) for part in (month, day, hour, minute, second)]
    last = [31, 29 if int(year) % 4 == 0 and (int(year) % 100 or int(year) % 400 == 0) else 28]
    last += [31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
    if not (1 <= numbers[0] <= 12 and 1 <= numbers[1] <= last[numbers[0] - 1]):
        return None
    if numbers[2] > 23 or numbers[3] > 59 or numbers[4] > 59:
        return None
    clock = "{:02}:{:02}:{:02}".format(*numbers[2:]) + (fraction or "").rstrip("0").rstrip(".")
    return Timestamp(f"{year}-{numbers[0]:02}-{numbers[1]:02}T{clock}{zone or 'Z'}")


def _scalar_value(event: Event, problems: Problems, mark: Mark) -> Any:
    tag = event.tag
    if tag is None:
        return resolve_plain(event.value) if event.plain else event.value
    if not tag.startswith(_TAG) or tag in (_TAG + "str", _TAG + "binary"):
        return event.value
    value = resolve_plain(event.value)
    kind = tag.removeprefix(_TAG)
    fits = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, int | float) and not isinstance(value, bool),
        "bool": isinstance(value, bool),
        "null": value is None,
        "timestamp": isinstance(value, Timestamp),
    }
    if not fits.get(kind, True):
        problems.error(
            f"{shown(event.value)!r} is not of the tagged type !!{kind}", mark, value=event.value, allowed=kind
        )
    return value


@dataclass(slots=True)
class _RawMap:
    pairs: list[tuple[Event, Any]] = field(default_factory=list)
    mark: Mark = field(default_factory=lambda: Mark(""))
    anchor_open: bool = True


@dataclass(slots=True)
class _RawSeq:
    items: list[Any] = field(default_factory=list)
    mark: Mark = field(default_factory=lambda: Mark(""))
    anchor_open: bool = True


class _Composer:
    """Builds nodes from events; aliases share nodes, which are copied for each use only when materialised."""

    def __init__(self, file: str, problems: Problems) -> None:
        self.file, self.problems = file, problems
        self.anchors: dict[str, Any] = {}

    def compose(self, stream: list[Event]) -> Any:
        root: Any = None
        stack: list[tuple[Any, list[Any]]] = []
        for event in stream:
            if event.kind == "more":
                text = "a second document begins here; only the first one of a file is read"
                self.problems.warning(
                    text, Mark(self.file, event.line, event.column), allowed="one document", code="documents"
                )
                continue
            if event.kind == "end":
                container, parts = stack.pop()
                self._close(container, parts)
                continue
            node = self._node(event)
            if stack:
                stack[-1][1].append((event, node))
            else:
                root = node
            if event.kind in ("map", "seq"):
                stack.append((node, []))
        return root

    def _node(self, event: Event) -> Any:
        mark = Mark(self.file, event.line, event.column)
        if event.kind == "alias":
            return self._alias(event, mark)
        node: Any
        if event.kind == "map":
            node = _RawMap(mark=mark)
        elif event.kind == "seq":
            node = _RawSeq(mark=mark)
        else:
            node = Scalar(_scalar_value(event, self.problems, mark), event.value, event.plain, mark)
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def _alias(self, event: Event, mark: Mark) -> Any:
        name = event.anchor or ""
        node = self.anchors.get(name)
        if node is None:
            self.problems.error(
                f"unknown anchor {name!r}: *{name} is used, but no &{name} stands above it in this file",
                mark,
                value=f"*{name}",
                allowed="anchors above",
            )
        elif getattr(node, "anchor_open", False):
            self.problems.error(f"anchor {name!r} contains itself", mark, value=f"*{name}", allowed="anchors above")
            node = None
        return Scalar(None, "", True, mark) if node is None else node

    def _close(self, container: Any, parts: list[Any]) -> None:
        container.anchor_open = False
        if isinstance(container, _RawSeq):
            container.items = [node for _event, node in parts]
            return
        seen: dict[str, Mark] = {}
        for (event, key), (_event, value) in zip(parts[::2], parts[1::2], strict=True):
            mark = Mark(self.file, event.line, event.column)
            if not isinstance(key, Scalar):
                self.problems.error("a mapping key must be plain text, not a list or mapping", mark, allowed="text")
                continue
            if key.text in seen:
                text = f"duplicate key {shown(key.text)!r}: mapping key already defined at line {seen[key.text].line}"
                self.problems.error(text, mark, value=key.text, allowed="each key once", near=seen[key.text])
                continue
            seen[key.text] = mark
            container.pairs.append((event._replace(value=key.text, plain=key.plain), value))


class _Materialiser:
    """Copies shared nodes for each use and applies `<<`, counting what it makes."""

    def __init__(self, problems: Problems, file: str) -> None:
        self.problems, self.file = problems, file
        self.made = 0
        self.flat: dict[int, dict[str, tuple[Mark, Any]]] = {}

    def build(self, node: Any, where: str, depth: int = 0) -> Node:
        self._count(1, depth, node.mark)
        if isinstance(node, Scalar):
            return Scalar(node.value, node.text, node.plain, node.mark)
        if isinstance(node, _RawSeq):
            return Seq([self.build(item, "", depth + 1) for item in node.items], node.mark)
        pairs = self._pairs(node) if where == "macros" else self._flatten(node)
        entries: dict[str, Node] = {}
        for key, (_mark, value) in pairs.items():
            entries[key] = self.build(value, _inside(where, key), depth + 1)
        return Map(entries, {key: mark for key, (mark, _value) in pairs.items()}, node.mark)

    def _count(self, number: int, depth: int, mark: Mark) -> None:
        self.made += number
        if self.made > MAX_NODES:
            raise YamlError(f"anchors and merges expand to more than {MAX_NODES} values", mark.line, mark.column)
        if depth > MAX_DEPTH:
            raise YamlError(f"nested deeper than {MAX_DEPTH} levels through anchors", mark.line, mark.column)

    def _pairs(self, node: _RawMap) -> dict[str, tuple[Mark, Any]]:
        return {event.value: (Mark(self.file, event.line, event.column), value) for event, value in node.pairs}

    def _flatten(self, node: _RawMap, depth: int = 0) -> dict[str, tuple[Mark, Any]]:
        done = self.flat.get(id(node))
        if done is not None:
            return done
        merges = [(event, value) for event, value in node.pairs if event.value == "<<" and event.plain]
        pairs = self._pairs(node)
        for event, value in merges:
            del pairs["<<"]
            mark = Mark(self.file, event.line, event.column)
            for base in value.items if isinstance(value, _RawSeq) else [value]:
                if not isinstance(base, _RawMap):
                    self.problems.error("<< takes a mapping or a list of mappings", mark, allowed="*anchor or [*a, *b]")
                    continue
                for key, pair in self._flatten(base, depth + 1).items():
                    pairs.setdefault(key, pair)
        self._count(len(pairs) if merges else 0, depth, node.mark)
        self.flat[id(node)] = pairs
        return pairs


def _inside(where: str, key: str) -> str:
    """Where a child stands: `<<` is an ordinary (and wrong) name inside macros, so they must be told apart."""
    if key == "macros" and where in ("root", "model"):
        return "macros"
    if where == "root" and key == "models":
        return "models"
    return "model" if where == "models" else ""


def build(stream: list[Event], file: str, problems: Problems) -> Node | None:
    """The tree of one file, anchors and merges expanded; None for an empty document.

    Duplicate keys, unknown anchors and the like are noted in `problems`; raises YamlError past the bounds.
    """
    raw = _Composer(file, problems).compose(stream)
    return None if raw is None else _Materialiser(problems, file).build(raw, "root")


def parse(text: str, file: str, problems: Problems) -> Node | None:
    """`events` and `build` in one; raises YamlError."""
    return build(events(text), file, problems)

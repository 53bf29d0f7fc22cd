"""The matrix's expression language: text to a tree of choices, never expanded (compatibility 5.5)."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

#: Deepest tree that is evaluated; a bound on recursion, far above what anybody writes.
MAX_DEPTH = 100
#: Nested choices and unions become one up to this many parts; beyond it sets that are named again and again would
#: double with each naming, where a nested one is shared.
_MAX_FLAT = 200
#: Most names in one expression; far above what anybody writes, and few enough to be weighed in a moment.
MAX_NAMES = 5000


class ExpressionError(ValueError):
    """Raised when an expression cannot be read; the message is the fragment of compatibility 5.5."""


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One node of a set's tree.

    `kind` is "name" (one model, `bit`), "or" (one of `children`), "and" (all of them united) or "ref" (the set
    `name`, replaced when the sets are linked). `mask` has the bit of every model below; `depth` bounds recursion.
    """

    kind: str
    name: str = ""
    bit: int = 0
    children: tuple[Node, ...] = ()
    mask: int = 0
    depth: int = 1


@dataclass(slots=True)
class _Tokens:
    """The token list with the parser's place in it; a token is (kind, text)."""

    items: list[tuple[str, str]]
    place: int = 0
    depth: int = 0
    unknown: str = ""  # the first name that means nothing; told only once the rest is known to be well formed

    @property
    def kind(self) -> str:
        return self.items[self.place][0] if self.place < len(self.items) else "end"

    def take(self) -> str:
        self.place += 1
        return self.items[self.place - 1][1]


def parse(text: str, names: Mapping[str, str], bits: Mapping[str, int]) -> Node:
    """Read one expression. `names` maps a var or model id to its model id, `bits` a model id to its bit.

    Raises ExpressionError.
    """
    tokens = _Tokens(list(_tokenize(text.strip())))
    if not tokens.items:
        raise ExpressionError("empty DSL expression")
    if sum(kind in ("name", "set") for kind, _ in tokens.items) > MAX_NAMES:
        raise ExpressionError(f"expression names more than {MAX_NAMES} models; split the set")
    tree = _choice(tokens, names, bits)
    if tokens.kind != "end":
        raise _unexpected(tokens)
    if tokens.unknown:
        raise ExpressionError(f'unknown var or model "{tokens.unknown}"')
    return tree


def choice(children: Sequence[Node]) -> Node:
    """One of the children; nested choices are one choice, in written order."""
    return _joined("or", children)


def union(children: Sequence[Node]) -> Node:
    """All of the children; nested unions are one union, in written order."""
    return _joined("and", children)


def _joined(kind: str, children: Sequence[Node]) -> Node:
    flat: list[Node] = []
    for child in children:
        flat.extend(child.children if child.kind == kind else (child,))
    if len(flat) > max(_MAX_FLAT, len(children)):
        flat = list(children)
    if len(flat) == 1:
        return flat[0]
    mask = 0
    for child in flat:
        mask |= child.mask
    return Node(kind, children=tuple(flat), mask=mask, depth=1 + max(child.depth for child in flat))


def references(tree: Node) -> Iterator[str]:
    """Names of the sets that a tree refers to, in written order."""
    if tree.kind == "ref":
        yield tree.name
    for child in tree.children:
        yield from references(child)


def link(tree: Node, sets: Mapping[str, Node]) -> Node:
    """The tree with every reference replaced by that set's (linked) tree. Raises ExpressionError when too deep."""
    linked = _link(tree, sets)
    if linked.depth > MAX_DEPTH:
        raise ExpressionError(f"expression is nested more than {MAX_DEPTH} deep")
    return linked


def _link(tree: Node, sets: Mapping[str, Node]) -> Node:
    if tree.kind == "ref":
        return sets[tree.name]
    if not tree.children:
        return tree
    return _joined(tree.kind, [_link(child, sets) for child in tree.children])


def _tokenize(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(text):
        char = text[place]
        if char in "&|()":
            yield char, char
        elif char == "+" or _in_name(char):
            start = place + (char == "+")
            end = _end_of_name(text, start)
            if end == start:
                raise ExpressionError("tokenize: expected set name after '+'")
            yield ("set" if char == "+" else "name"), text[start:end]
            place = end - 1
        elif not char.isspace():
            raise ExpressionError(f"tokenize: unexpected character '{char}' at position {place}")
        place += 1


def _end_of_name(text: str, start: int) -> int:
    end = start
    while end < len(text) and _in_name(text[end]):
        end += 1
    return end


def _in_name(char: str) -> bool:
    return char in "_-." or unicodedata.category(char)[0] == "L" or unicodedata.category(char) == "Nd"


def _unexpected(tokens: _Tokens) -> ExpressionError:
    if tokens.kind == "end":
        return ExpressionError("parse: unexpected token: the expression ends too early")
    return ExpressionError(f'parse: unexpected token "{tokens.items[tokens.place][1]}"')


def _choice(tokens: _Tokens, names: Mapping[str, str], bits: Mapping[str, int]) -> Node:
    return choice(_series(tokens, "|", lambda: _union(tokens, names, bits)))


def _union(tokens: _Tokens, names: Mapping[str, str], bits: Mapping[str, int]) -> Node:
    return union(_series(tokens, "&", lambda: _atom(tokens, names, bits)))


def _series(tokens: _Tokens, separator: str, part: Callable[[], Node]) -> list[Node]:
    parts = [part()]
    while tokens.kind == separator:
        tokens.take()
        parts.append(part())
    return parts


def _atom(tokens: _Tokens, names: Mapping[str, str], bits: Mapping[str, int]) -> Node:
    if tokens.kind == "name":
        return _name(tokens, names, bits)
    if tokens.kind == "set":
        return Node("ref", name=tokens.take())
    if tokens.kind != "(":
        raise _unexpected(tokens)
    tokens.take()
    tokens.depth += 1
    if tokens.depth > MAX_DEPTH:
        raise ExpressionError(f"expression is nested more than {MAX_DEPTH} deep")
    inner = _choice(tokens, names, bits)
    if tokens.kind != ")":
        raise ExpressionError("parse: missing closing parenthesis")
    tokens.take()
    tokens.depth -= 1
    return inner


def _name(tokens: _Tokens, names: Mapping[str, str], bits: Mapping[str, int]) -> Node:
    text = tokens.take()
    model = names.get(text)
    if model is None:
        tokens.unknown = tokens.unknown or text
        return Node("name", name=text)
    bit = bits[model]
    return Node("name", name=model, bit=bit, mask=bit)

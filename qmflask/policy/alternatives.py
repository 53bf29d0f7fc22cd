"""Alternatives of a matrix set, projected on the models that matter, without expanding the set (compatibility 5.5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from qmflask.policy.expression import Node

#: More alternatives than this are never kept at one point of the evaluation: those with the target stay, the dearest
#: to lose first. The result is always one that the sets permit; that it is the cheapest needs more only where many
#: parts of one union share more than ten running models.
_BEAM = 1024
#: The same once so many combinations have been looked at in one question: nobody waits seconds for a decision,
#: whatever an expression is like.
_NARROW, _MUCH = 16, 1 << 17


def bits_of(mask: int) -> Iterator[int]:
    """The single bits of a mask, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def expansions(node: Node) -> Iterator[int]:
    """Masks of all alternatives, leftmost choice slowest."""
    if node.kind == "name":
        yield node.bit
    elif node.kind == "or":
        for child in node.children:
            yield from expansions(child)
    else:
        yield from _products(node.children, 0)


def _products(children: tuple[Node, ...], mask: int) -> Iterator[int]:
    if not children:
        yield mask
        return
    for first in expansions(children[0]):
        yield from _products(children[1:], mask | first)


class Option(NamedTuple):
    """One alternative, projected on the models that matter.

    `key`: those that other parts may still name; `gain`, `vram`, `ram`: cost saved and bytes held by the others;
    `kept`: all of them.
    """

    key: int
    gain: int
    vram: int
    ram: int
    kept: int


class Query:
    """One question to the sets: only `relevant` models matter, each with (cost, vram, ram).

    A union is evaluated part by part. What no other part names is summed up and forgotten at once, so that
    independent parts never multiply, however many combinations they have on paper.
    """

    def __init__(self, relevant: int, weights: Mapping[int, tuple[int, int, int]]) -> None:
        self._relevant = relevant
        self._weights = weights
        self._known: dict[tuple[int, int, int], list[Option]] = {}
        self._work = 0

    def options(self, tree: Node) -> list[Option]:
        """Alternatives worth a look, in written order: the dearest to lose, and cheaper ones that need less memory."""
        return self._options(tree, self._relevant, 0)

    def _options(self, node: Node, relevant: int, open_: int) -> list[Option]:
        relevant &= node.mask
        open_ &= relevant
        if not relevant:
            return [_NOTHING]
        if node.kind == "name":
            return [self._close(Option(relevant, 0, 0, 0, relevant), relevant ^ open_)]
        place = (id(node), relevant, open_)  # the sets keep their nodes alive, so ids do not repeat
        found = self._known.get(place)
        if found is None:
            fold = self._choice if node.kind == "or" else self._union
            found = self._known[place] = fold(node, relevant, open_)
        return found

    def _choice(self, node: Node, relevant: int, open_: int) -> list[Option]:
        found: list[Option] = []
        for child in node.children:
            found += self._options(child, relevant, open_)
        return self._worthwhile(found)

    def _union(self, node: Node, relevant: int, open_: int) -> list[Option]:
        fixed = 0
        for child in node.children:
            if child.kind == "name":
                fixed |= child.bit
        fixed &= relevant
        # What every alternative has anyway makes no difference inside the other parts.
        rest = relevant & ~fixed
        parts = [child for child in node.children if child.kind != "name" and child.mask & rest]
        shared = _shared(parts, rest)
        states = [self._close(Option(fixed, 0, 0, 0, fixed), fixed & ~open_)]
        for part, later in zip(parts, _after(parts), strict=True):
            options = self._options(part, rest, open_ | shared)
            closing = part.mask & rest & ~open_ & ~later
            if len(states) * len(options) > _MUCH:
                states, options = self._narrowed(states, 256), self._narrowed(options, 256)
            self._work += len(states) * len(options)
            states = self._worthwhile(
                [self._close(_united(state, option), closing) for state in states for option in options]
            )
        return states

    def _worthwhile(self, options: list[Option]) -> list[Option]:
        """Without those that can never be chosen, in the same order; never more than the beam is wide."""
        return self._narrowed(_undominated(options), _BEAM if self._work < _MUCH else _NARROW)

    def _narrowed(self, options: list[Option], width: int) -> list[Option]:
        """The dearest of them, in the same order."""
        if len(options) <= width:
            return options
        best = sorted(enumerate(options), key=lambda pair: self._worth(pair[1]), reverse=True)
        return [option for _, option in sorted(best[:width], key=lambda pair: pair[0])]

    def _worth(self, option: Option) -> int:
        """Cost saved so far, that of models which other parts may still name included."""
        return option.gain + sum(self._weights[bit][0] for bit in bits_of(option.key))

    def _close(self, option: Option, closing: int) -> Option:
        """Sum up the models of `closing` that the alternative has; nothing after this looks at them."""
        having = option.key & closing
        if not having:
            return option
        gain, vram, ram = option.gain, option.vram, option.ram
        for bit in bits_of(having):
            weight = self._weights[bit]
            gain += weight[0]
            vram += weight[1]
            ram += weight[2]
        return Option(option.key ^ having, gain, vram, ram, option.kept)


_NOTHING = Option(0, 0, 0, 0, 0)


def _shared(parts: Sequence[Node], relevant: int) -> int:
    """Models that more than one part names."""
    seen = shared = 0
    for part in parts:
        shared |= seen & part.mask
        seen |= part.mask
    return shared & relevant


def _after(parts: Sequence[Node]) -> list[int]:
    """For each part, what those after it name."""
    later = [0]
    for part in reversed(parts[1:]):
        later.append(later[-1] | part.mask)
    return later[: len(parts)][::-1]


def _united(one: Option, two: Option) -> Option:
    return Option(
        one.key | two.key,
        one.gain + two.gain,
        one.vram + two.vram,
        one.ram + two.ram,
        one.kept | two.kept,
    )


def _undominated(options: list[Option]) -> list[Option]:
    """Without those that another one beats whatever follows, in the same order.

    With the same key, more cost saved in no more memory wins, and of equals the first in written order.
    """
    if len(options) < 2:
        return options
    kept: dict[int, list[tuple[int, Option]]] = {}
    for place, option in enumerate(options):
        front = kept.setdefault(option.key, [])
        if any(_beats(other, option, equal=True) for _, other in front):
            continue
        front[:] = [pair for pair in front if not _beats(option, pair[1], equal=False)]
        front.append((place, option))
    pairs = sorted((pair for front in kept.values() for pair in front), key=lambda pair: pair[0])
    return [option for _, option in pairs]


def _beats(one: Option, two: Option, *, equal: bool) -> bool:
    """Whether `one` saves more (or, with `equal`, as much) in no more memory."""
    if one.vram > two.vram or one.ram > two.ram:
        return False
    return one.gain >= two.gain if equal else one.gain > two.gain

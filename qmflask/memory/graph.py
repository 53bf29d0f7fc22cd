"""The compute buffer of a llama.cpp graph, by replaying its allocator over the layers' tensors; pure.

The scratch memory of a batch is not a sum: tensors die and their room is used again, and what fits where depends on
the order. Formulas of a few terms were up to 30 % off; the replay is exact for plain layers (docs/memory.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Bytes of the inputs of each token that are indices: token, position, output row and two cache rows.
_INDICES = 28
FLOAT = 4


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer's activations look like, in elements a token unless said otherwise."""

    query: int
    key: int
    value: int
    attended: int  # output of the attention, before it is projected back
    heads: int
    cells: int  # cache cells it looks at; 0: none (recurrent)
    up: int  # width of the (up or joint up and gate) product, times the experts used
    hidden: int  # width behind the activation, times the experts used
    gate: bool = True  # gate and up are two products
    experts: int = 0  # experts to choose from; 0: dense
    used: int = 0
    windowed: bool = False  # these layers have a cache and a mask of their own


@dataclass(frozen=True, slots=True)
class GraphShape:
    """A whole graph for one batch of `tokens`."""

    tokens: int
    width: int
    layers: Sequence[LayerShape]
    vocabulary: int = 0
    outputs: int = 1
    flash: bool = True


class _Item:
    """One tensor of the replay. `views` is the tensor whose memory it shows; `uses` and `shown` count what is left."""

    __slots__ = ("inplace", "offset", "owned", "shown", "size", "sources", "uses", "views")

    def __init__(self, size: int, sources: Sequence[_Item], inplace: bool, views: _Item | None) -> None:
        self.size = size
        self.sources = sources
        self.inplace = inplace
        self.views = views
        self.offset = self.uses = self.shown = 0
        self.owned = False


class _Room:
    """The allocator: the smallest hole that is large enough, else the end."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # holes (offset, size), in order
        self._end = 0
        self.peak = 0

    def take(self, size: int) -> int:
        fitting = [(hole, place) for place, (_, hole) in enumerate(self._free) if hole >= size]
        if not fitting:
            offset, self._end = self._end, self._end + size
            self.peak = max(self.peak, self._end)
            return offset
        _, place = min(fitting)
        offset, hole = self._free.pop(place)
        if hole > size:
            self._free.insert(place, (offset + size, hole - size))
        return offset

    def give(self, offset: int, size: int) -> None:
        joined: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (offset, size)]):
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        if joined and sum(joined[-1]) == self._end:
            self._end = joined.pop()[0]
        self._free = joined


class _Graph:
    """Tensors in the order in which they are computed."""

    def __init__(self) -> None:
        self.items: list[_Item] = []

    def add(self, size: int, *sources: _Item, inplace: bool = False) -> _Item:
        item = _Item(size, sources, inplace, None)
        self.items.append(item)
        return item

    def view(self, source: _Item) -> _Item:
        item = _Item(source.size, (source,), False, source.views or source)
        self.items.append(item)
        return item

    def peak(self) -> int:
        """Bytes at the fullest moment."""
        for item in self.items:
            for source in item.sources:
                source.uses += 1
            if item.views is not None:
                item.views.shown += 1
        room = _Room()
        for item in self.items:
            if item.views is None and item.size:
                self._place(item, room)
            for source in item.sources:
                source.uses -= 1
                if not source.uses and not source.shown:
                    self._drop(source, room)
        return room.peak

    def _place(self, item: _Item, room: _Room) -> None:
        """Compute in the place of an operand that nobody needs any more, or in new room."""
        for source in item.sources if item.inplace else ():
            owner = source.views or source
            alone = source.uses == 1 and (not owner.uses and owner.shown == 1 if source.views else not source.shown)
            if owner.owned and owner.size == item.size and alone:
                item.offset, item.owned, owner.owned = owner.offset, True, False
                return
        item.offset, item.owned = room.take(item.size), True

    def _drop(self, item: _Item, room: _Room) -> None:
        owner = item
        if item.views is not None:
            owner = item.views
            owner.shown -= 1
            if owner.uses or owner.shown:
                return
        if owner.owned:
            room.give(owner.offset, owner.size)
            owner.owned = False


def compute_bytes(shape: GraphShape) -> int:
    """Bytes of the compute buffer for this graph."""
    graph = _Graph()
    tokens = shape.tokens
    fixed = tokens * _INDICES + tokens * shape.width * FLOAT  # embeddings may come as input instead of tokens
    for cells, _ in {(layer.cells, layer.windowed) for layer in shape.layers if layer.cells}:
        fixed += cells * tokens * (2 if shape.flash else FLOAT)  # the mask of each cache
    if not shape.flash:
        fixed += tokens * max((layer.value for layer in shape.layers if layer.cells), default=0) * 8
    stream = graph.add(tokens * shape.width * FLOAT)
    for place, layer in enumerate(shape.layers):
        rows = shape.outputs if place == len(shape.layers) - 1 else tokens
        stream = _layer(graph, shape, layer, stream, rows)
    graph.add(shape.vocabulary * shape.outputs * FLOAT, _normed(graph, stream))
    return fixed + graph.peak()


def _normed(graph: _Graph, source: _Item) -> _Item:
    return graph.add(source.size, graph.add(source.size, source), inplace=True)


def _layer(graph: _Graph, shape: GraphShape, layer: LayerShape, stream: _Item, rows: int) -> _Item:
    """One layer; behind the last one's attention only `rows` tokens go on."""
    attended = _attention(graph, shape, layer, _normed(graph, stream))
    width = FLOAT * shape.width
    out = graph.add(shape.tokens * width, attended)
    if rows != shape.tokens:
        out, stream = graph.add(rows * width, out), graph.add(rows * width, stream)
    stream = graph.add(rows * width, out, stream, inplace=True)
    normed = _normed(graph, stream)
    fed = _experts(graph, layer, normed, rows, width) if layer.experts else _dense(graph, layer, normed, rows, width)
    return graph.add(rows * width, fed, stream, inplace=True)


def _attention(graph: _Graph, shape: GraphShape, layer: LayerShape, normed: _Item) -> _Item:
    unit = FLOAT * shape.tokens
    query = graph.view(graph.add(layer.query * unit, normed))
    query = graph.add(layer.query * unit, query, inplace=True)
    key = graph.view(graph.add(layer.key * unit, normed))
    key = graph.add(layer.key * unit, key, inplace=True)
    value = graph.view(graph.add(layer.value * unit, normed))
    graph.add(0, key)  # stored in the cache
    graph.add(0, value)
    if shape.flash or not layer.cells:
        return graph.view(graph.add(layer.attended * unit, graph.view(query)))
    scores = graph.add(layer.cells * layer.heads * unit, graph.view(query))
    scores = graph.add(scores.size, scores, inplace=True)
    # Measured: without flash attention the query and its source are not given back before the values are mixed.
    mixed = graph.add(layer.attended * unit, scores, query, normed)
    return graph.add(layer.attended * unit, graph.view(mixed))


def _dense(graph: _Graph, layer: LayerShape, normed: _Item, rows: int, width: int) -> _Item:
    up = graph.add(layer.up * rows * FLOAT, normed)
    parts = (graph.add(layer.up * rows * FLOAT, normed), up) if layer.gate else (up,)
    return graph.add(rows * width, graph.add(layer.hidden * rows * FLOAT, *parts))


def _experts(graph: _Graph, layer: LayerShape, normed: _Item, rows: int, width: int) -> _Item:
    """The router's choice, the chosen experts side by side, then their weighted sum."""
    chances = graph.add(layer.experts * rows * FLOAT, normed)
    chances = graph.add(chances.size, chances, inplace=True)
    chosen = graph.view(graph.add(chances.size, chances))
    weights = graph.add(layer.used * rows * FLOAT, graph.view(chances), chosen)
    up = graph.add(layer.up * rows * FLOAT, normed, chosen)
    parts = (graph.add(layer.up * rows * FLOAT, normed, chosen), up) if layer.gate else (up,)
    hidden = graph.add(layer.hidden * rows * FLOAT, *parts)
    each = graph.add(layer.used * rows * width, hidden, chosen)
    each = graph.add(each.size, each, weights, inplace=True)
    views = [graph.view(each) for _ in range(max(1, layer.used))]
    total = graph.add(rows * width, *views[:2])
    for view in views[2:]:
        total = graph.add(rows * width, total, view, inplace=True)
    return total

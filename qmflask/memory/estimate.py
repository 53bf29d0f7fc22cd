"""How much memory llama.cpp will take for a model and settings: weights, cache, compute buffer, projector, draft; pure.

Hints for people (`estimate`, `init`, `plan`), never what a model is charged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from qmflask.memory.architecture import Layer, Model, describe, is_expert
from qmflask.memory.gguf import Header, Tensor, block_elements, row_bytes
from qmflask.memory.graph import FLOAT, GraphShape, LayerShape, compute_bytes
from qmflask.memory.samples import GIB

#: Caches grow in steps of so many cells.
STEP = 256
#: What llama-server makes of `--parallel` when it is not given: so many slots in one cache.
AUTO_PARALLEL = 4
#: Tensor types that some processor's kernels want in another order; which ones depends on the machine.
_REPACKED = frozenset({"q2_k", "q4_0", "q4_k", "q5_k", "q6_k", "q8_0", "iq4_nl", "mxfp4"})


@dataclass(frozen=True, slots=True)
class Settings:
    """llama-server's options that decide about memory, with its defaults.

    `context` 0: the model's own; `parallel` None: automatic; `gpu_layers` None: all of them; `cpu_experts`: experts of
    so many first layers stay in system memory, -1 all; `overrides`: (pattern, to CPU) of `--override-tensor`.
    """

    context: int = 0
    parallel: int | None = None
    unified: bool | None = None
    cache_k: str = "f16"
    cache_v: str = "f16"
    batch: int = 2048
    micro_batch: int = 512
    gpu_layers: int | None = None
    flash: bool = True
    full_windows: bool = False
    cache_on_gpu: bool = True
    projector_on_gpu: bool = True
    cpu_experts: int = 0
    overrides: tuple[tuple[str, bool], ...] = ()

    @property
    def slots(self) -> int:
        """Sequences at once."""
        return AUTO_PARALLEL if self.parallel is None else max(1, self.parallel)

    @property
    def one_cache(self) -> bool:
        """Whether all slots share one cache."""
        return self.parallel is None if self.unified is None else self.unified


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table, in bytes."""

    name: str
    vram: int
    ram: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """The table and what it was made for. `notes` are for people: what is not counted, what was assumed."""

    model: str
    context: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def vram(self) -> int:
        """Bytes of VRAM."""
        return sum(row.vram for row in self.rows)

    @property
    def ram(self) -> int:
        """Bytes of system memory."""
        return sum(row.ram for row in self.rows)

    def yaml(self) -> str:
        """The configuration keys to paste, rounded up to a hundredth."""
        keys = (("estVramGB", self.vram), ("estRamGB", self.ram))
        return "\n".join(f"{key}: {math.ceil(size * 100 / GIB) / 100:g}" for key, size in keys if size)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where things go: layers from `first_gpu` on are on the card; `output` tells of the last step."""

    first_gpu: int
    output: bool

    @property
    def any_gpu(self) -> bool:
        return self.output

    def on_gpu(self, index: int) -> bool:
        return index >= self.first_gpu


def estimate(
    header: Header,
    settings: Settings,
    projector: Header | None = None,
    draft: Header | None = None,
    draft_settings: Settings | None = None,
) -> Estimate:
    """Estimate a model with its projector and draft model. Raises GGUFError for headers that are no models."""
    model = describe(header)
    context, rows = _model_rows(model, settings)
    if projector is not None:
        rows += _projector_rows(projector, settings)
    if draft is not None:
        small = describe(draft)
        _, draft_rows = _model_rows(small, draft_settings or settings)
        total = Row("draft model", sum(row.vram for row in draft_rows), sum(row.ram for row in draft_rows))
        rows.append(total)
    return Estimate(model.name or model.architecture, context, tuple(rows), tuple(_notes(model, settings, rows)))


def _model_rows(model: Model, settings: Settings) -> tuple[int, list[Row]]:
    place = _place(model, settings)
    context, per_slot = _contexts(model, settings)
    cells = {layer.window: _cells(layer, per_slot, settings) for layer in model.layers}
    rows = [
        _weights(model, settings, place),
        _cache(model, settings, place, cells, context // per_slot),
    ]
    if any(layer.state for layer in model.layers):
        rows.append(_states(model, settings, place))
    rows.append(_compute(model, settings, place, cells, per_slot))
    return context, rows


def _place(model: Model, settings: Settings) -> _Place:
    """llama.cpp fills the card from the end: the output first, then the last layers."""
    count = len(model.layers)
    if settings.gpu_layers is None or settings.gpu_layers > count:
        return _Place(0, True)
    if settings.gpu_layers <= 0:
        return _Place(count, False)
    return _Place(count + 1 - settings.gpu_layers, True)


def _contexts(model: Model, settings: Settings) -> tuple[int, int]:
    """Cells of the whole cache and of one slot's part of it."""
    wanted = settings.context or model.context or 4096
    if settings.one_cache:
        whole = _padded(wanted)
        return whole, whole
    part = _padded(max(1, wanted // settings.slots))
    return part * settings.slots, part


def _padded(cells: int) -> int:
    return -(-cells // STEP) * STEP


def _cells(layer: Layer, per_slot: int, settings: Settings) -> int:
    """Cells of one slot's cache for this layer: a sliding window needs its width and a batch, not the context."""
    if not layer.window or settings.full_windows:
        return per_slot
    sharing = settings.slots if settings.one_cache else 1
    return _padded(min(per_slot, layer.window * sharing + _tokens(settings, per_slot)))


def _tokens(settings: Settings, per_slot: int) -> int:
    return max(1, min(settings.micro_batch, settings.batch, per_slot))


def _weights(model: Model, settings: Settings, place: _Place) -> Row:
    """Tensors by where they are. Tokens are looked up in system memory even when all layers are on the card."""
    vram = ram = 0
    for index, layer in enumerate(model.layers):
        for tensor in layer.weights:
            if place.on_gpu(index) and not _kept_on_cpu(tensor, index, settings):
                vram += tensor.size
            else:
                ram += tensor.size
    ram += _sum(model.inputs)
    if place.output:
        vram += _sum(model.outputs)
        if model.tied:  # the output's own copy
            vram += _sum(tensor for tensor in model.inputs if tensor.name == "token_embd.weight")
    else:
        ram += _sum(model.outputs)
    return Row("weights", vram, ram)


def _kept_on_cpu(tensor: Tensor, index: int, settings: Settings) -> bool:
    for pattern, to_cpu in settings.overrides:
        if re.search(pattern, tensor.name):
            return to_cpu
    return is_expert(tensor) and (settings.cpu_experts < 0 or index < settings.cpu_experts)


def _sum(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.size for tensor in tensors)


def _cache(model: Model, settings: Settings, place: _Place, cells: dict[int, int], streams: int) -> Row:
    vram = ram = 0
    for index, layer in enumerate(model.layers):
        if not layer.heads_kv:
            continue
        row = row_bytes(settings.cache_k, layer.row_key) + row_bytes(settings.cache_v, layer.row_value)
        size = row * cells[layer.window] * streams
        if place.on_gpu(index) and settings.cache_on_gpu:
            vram += size
        else:
            ram += size
    return Row(f"cache {settings.cache_k}/{settings.cache_v}", vram, ram)


def _states(model: Model, settings: Settings, place: _Place) -> Row:
    """Recurrent layers keep one state for each slot."""
    vram = sum(layer.state for index, layer in enumerate(model.layers) if place.on_gpu(index))
    ram = sum(layer.state for index, layer in enumerate(model.layers) if not place.on_gpu(index))
    return Row("recurrent state", vram * settings.slots, ram * settings.slots)


def _compute(model: Model, settings: Settings, place: _Place, cells: dict[int, int], per_slot: int) -> Row:
    tokens = _tokens(settings, per_slot)
    shape = GraphShape(
        tokens=tokens,
        width=model.width,
        layers=[_shape(layer, cells[layer.window]) for layer in model.layers],
        vocabulary=model.vocabulary,
        outputs=1 if settings.parallel is not None and settings.slots == 1 else settings.slots,
        flash=settings.flash,
    )
    size = compute_bytes(shape)
    if not place.any_gpu:
        return Row("compute buffer", 0, size)
    # The host keeps what it hands over: embeddings and masks.
    masks = sum({layer.window: cells[layer.window] for layer in model.layers if layer.heads_kv}.values())
    host = tokens * (model.width * 4 + masks * (2 if settings.flash else 4))
    partly = place.first_gpu > 0 or settings.cpu_experts or any(to_cpu for _, to_cpu in settings.overrides)
    return Row("compute buffer", size, size if partly else host)


def _shape(layer: Layer, cells: int) -> LayerShape:
    if layer.state:
        # Close for Mamba and short convolutions (docs/memory.md); other kinds differ by a few rows of this width.
        inner = layer.inner or layer.up
        query, key, value, attended, cells = inner, inner // 2, inner, inner // 2, 0
    else:
        query, key = layer.heads * layer.key, layer.row_key
        value = layer.row_value
        attended = layer.heads * (layer.value or layer.key)
    return LayerShape(
        query=query,
        key=key,
        value=value,
        attended=attended,
        heads=layer.heads,
        cells=cells,
        windowed=layer.window > 0,
        up=layer.up,
        hidden=layer.hidden,
        gate=layer.gate,
        experts=layer.experts,
        used=layer.used,
    )


def _projector_rows(header: Header, settings: Settings) -> list[Row]:
    """A projector's tensors and the scratch memory for one picture of its own size.

    The latter is at its fullest behind the wide half of a layer: the picture itself, that half, and four times the
    stream (where llama.cpp's allocator finds good holes it is less, down to once).
    """
    weights = sum(tensor.size for tensor in header.tensors)
    side, patch = header.number("vision.image_size"), header.number("vision.patch_size")
    width, up = header.number("vision.embedding_length"), header.number("vision.feed_forward_length")
    compute = 0
    if width and patch:
        compute = FLOAT * ((side // patch) ** 2 * (up + 4 * width) + 3 * side**2)
    on_gpu = settings.projector_on_gpu and settings.gpu_layers != 0
    return [Row("projector", weights + compute if on_gpu else 0, 0 if on_gpu else weights + compute)]


def _notes(model: Model, settings: Settings, rows: list[Row]) -> list[str]:
    notes = []
    if any(row.vram for row in rows):
        notes.append("the driver's own context is not counted: 0.2 to 0.6 GiB of VRAM for each process and card")
    if any(layer.state for layer in model.layers):
        notes.append("recurrent layers: the compute buffer is an approximation")
    repacked = sum(
        tensor.size
        for index, layer in enumerate(model.layers)
        for tensor in layer.weights
        if tensor.type in _REPACKED and not _place(model, settings).on_gpu(index)
    )
    if repacked:
        notes.append(
            f"weights on the processor: llama-server may keep {repacked / GIB:.2f} GiB of them a second time, repacked"
            " to suit it, beside the mapped file (--no-repack keeps them once)"
        )
    for name, sizes in (
        (settings.cache_k, [layer.key for layer in model.layers if layer.heads_kv]),
        (settings.cache_v, [layer.value for layer in model.layers if layer.heads_kv]),
    ):
        if any(size % block_elements(name) for size in sizes):
            notes.append(f"llama-server refuses a {name} cache: the head size is no multiple of its block")
            break
    if model.layers and not any(layer.heads_kv or layer.state for layer in model.layers):
        notes.append("the header names no attention heads; the cache is not counted")
    return notes

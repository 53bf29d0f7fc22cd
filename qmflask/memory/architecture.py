"""What a model looks like, layer by layer, as far as memory is concerned: from a header to plain figures; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qmflask.memory.gguf import GGUFError, Header, Tensor

#: Architectures whose sliding window is not given layer by layer: every n-th layer looks at everything.
_WINDOW_EVERY = {
    "afmoe": 4,
    "cohere2": 4,
    "exaone-moe": 4,
    "exaone4": 4,
    "gemma-embedding": 6,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "llama4": 4,
    "olmo2": 4,
    "smallthinker": 4,
}
#: Architectures with a linear-attention layer for all but every n-th (`full_attention_interval` says which).
_LINEAR_EVERY = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
_LLAMA4_CHUNK = 8192
#: More experts at once than any model uses: a bound for broken headers.
_MOST_EXPERTS = 1024
_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch)?exps\b")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Head sizes in elements; `window` 0: looks at everything; `state` in bytes a sequence (recurrent)."""

    weights: tuple[Tensor, ...]
    heads: int
    heads_kv: int  # 0: no cache
    key: int
    value: int  # 0: the values are part of the keys
    window: int
    state: int
    up: int
    hidden: int
    gate: bool
    experts: int
    used: int
    inner: int  # width of a recurrent layer's input product

    @property
    def row_key(self) -> int:
        """Elements of one token's keys."""
        return self.heads_kv * self.key

    @property
    def row_value(self) -> int:
        """Elements of one token's values."""
        return self.heads_kv * self.value


@dataclass(frozen=True, slots=True)
class Model:
    """A whole model. `tied`: the input's matrix is also the output's, and is there twice once both are apart."""

    architecture: str
    name: str
    context: int
    width: int
    vocabulary: int
    layers: tuple[Layer, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    tied: bool

    @property
    def size(self) -> int:
        """Bytes of all tensors, each once."""
        layers = sum(tensor.size for layer in self.layers for tensor in layer.weights)
        return layers + sum(tensor.size for tensor in self.inputs + self.outputs)


def is_expert(tensor: Tensor) -> bool:
    """Whether a tensor holds experts, which `--cpu-moe` keeps in system memory."""
    return _EXPERTS.search(tensor.name) is not None


def describe(header: Header) -> Model:
    """The model of a (merged) header. Raises GGUFError when it lacks what every language model has."""
    count = header.number("block_count")
    width = header.number("embedding_length")
    if not header.architecture or count <= 0 or width <= 0:
        raise GGUFError("no language model: architecture, block_count or embedding_length is missing")
    if count > 10_000:
        raise GGUFError(f"the header is broken: {count} layers")
    by_layer: dict[int, list[Tensor]] = {}
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    for tensor in header.tensors:
        if tensor.layer is not None:
            by_layer.setdefault(tensor.layer, []).append(tensor)
        else:
            # Only what turns tokens into vectors is input; llama.cpp places all else with the output.
            (inputs if tensor.name.startswith(("token_", "position_", "per_layer_token_")) else outputs).append(tensor)
    embedding = next((t for t in inputs if t.name == "token_embd.weight"), None)
    return Model(
        architecture=header.architecture,
        name=str(header.metadata.get("general.name", "")),
        context=header.number("context_length"),
        width=width,
        vocabulary=embedding.shape[1] if embedding and len(embedding.shape) > 1 else header.number("vocab_size"),
        layers=_layers(header, count, width, by_layer),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        tied=embedding is not None and not any(tensor.name == "output.weight" for tensor in outputs),
    )


def _layers(header: Header, count: int, width: int, by_layer: dict[int, list[Tensor]]) -> tuple[Layer, ...]:
    heads = header.per_layer("attention.head_count", count)
    heads_kv = header.per_layer("attention.head_count_kv", count)
    if f"{header.architecture}.attention.head_count_kv" not in header.metadata:
        heads_kv = heads
    windows = _windows(header, count)
    recurrent = _recurrent(header, count, heads_kv)
    state = _state(header, width)
    cached = count - header.number("attention.shared_kv_layers")
    found = []
    for index in range(count):
        size = width // max(1, heads[index])
        key, value = _head_sizes(header, size, windows[index] > 0)
        tensors = tuple(by_layer.get(index, ()))
        own = 0 if recurrent[index] or index >= cached else heads_kv[index]
        feed = _feed_forward(header, tensors)
        inner = max((t.shape[1] for t in tensors if _is_recurrent_input(t)), default=0) if recurrent[index] else 0
        found.append(
            Layer(
                weights=tensors,
                heads=heads[index],
                heads_kv=own,
                key=key,
                value=value,
                window=windows[index],
                state=state if recurrent[index] else 0,
                up=feed[0],
                hidden=feed[1],
                gate=feed[2],
                experts=feed[3],
                used=feed[4],
                inner=inner,
            )
        )
    return tuple(found)


def _head_sizes(header: Header, default: int, windowed: bool) -> tuple[int, int]:
    """Elements of a key and of a value. With latent attention (MLA) the values are read from the keys."""
    key = header.number("attention.key_length", default)
    value = header.number("attention.value_length", default)
    if windowed:
        key = header.number("attention.key_length_swa", key)
        value = header.number("attention.value_length_swa", value)
    return key, 0 if header.number("attention.key_length_mla") else value


def _windows(header: Header, count: int) -> list[int]:
    """The sliding window of each layer, 0 where it looks at everything.

    Where a file has a window but neither it nor its architecture says which layers have it, none is assumed to: the
    estimate is then too high, never too low.
    """
    window = header.number("attention.sliding_window")
    if header.architecture == "llama4":
        window = header.number("attention.chunk_size", _LLAMA4_CHUNK)
    if window <= 0:
        return [0] * count
    pattern = header.metadata.get(f"{header.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        return [window if index < len(pattern) and pattern[index] else 0 for index in range(count)]
    every = pattern if isinstance(pattern, int) else _WINDOW_EVERY.get(header.architecture, 1)
    return [window if every > 0 and index % every < every - 1 else 0 for index in range(count)]


def _recurrent(header: Header, count: int, heads_kv: list[int]) -> list[bool]:
    """Which layers keep a state of fixed size instead of a cache."""
    every = _LINEAR_EVERY.get(header.architecture)
    if every is not None:
        every = max(1, header.number("full_attention_interval", every))
        return [(index + 1) % every != 0 for index in range(count)]
    if header.architecture.startswith(("mamba", "rwkv", "arwkv")):
        return [True] * count
    has_state = any(header.number(key) for key in ("ssm.state_size", "shortconv.l_cache", "wkv.head_size"))
    if header.architecture == "falcon-h1":
        return [False] * count  # every layer has both; its state is small beside its cache
    return [has_state and not heads_kv[index] for index in range(count)]


def _state(header: Header, width: int) -> int:
    """Bytes that one recurrent layer keeps of one sequence, in 32-bit floats."""
    if window := header.number("shortconv.l_cache"):
        return 4 * width * (window - 1)
    if head := header.number("wkv.head_size"):
        return 4 * (header.number("token_shift_count", 2) * width + head * width)
    convolution, inner, size = (header.number(f"ssm.{key}") for key in ("conv_kernel", "inner_size", "state_size"))
    if not size:
        return 0
    groups = header.number("ssm.group_count")
    return 4 * (max(0, convolution - 1) * (inner + 2 * groups * size) + size * inner)


def _is_recurrent_input(tensor: Tensor) -> bool:
    return len(tensor.shape) > 1 and any(
        part in tensor.name for part in (".ssm_in.", ".in_proj.", ".attn_qkv.", ".ssm_x.")
    )


def _feed_forward(header: Header, tensors: tuple[Tensor, ...]) -> tuple[int, int, bool, int, int]:
    """(width of up, width behind the activation, separate gate, experts, experts used) of one layer."""
    shapes = {tensor.name.split(".", 2)[2]: tensor.shape for tensor in tensors}
    for up_name, gate_name, down_name in (
        ("ffn_up_exps.weight", "ffn_gate_exps.weight", "ffn_down_exps.weight"),
        ("ffn_gate_up_exps.weight", "", "ffn_down_exps.weight"),
    ):
        if len(shapes.get(up_name, ())) == 3:
            _, up, experts = shapes[up_name]
            used = max(1, min(header.number("expert_used_count", 1), experts, _MOST_EXPERTS))
            return up * used, shapes.get(down_name, (up,))[0] * used, gate_name in shapes, experts, used
    up = shapes.get("ffn_up.weight", (0, 0))[-1]
    return up, shapes.get("ffn_down.weight", (up,))[0], "ffn_gate.weight" in shapes, 0, 0

"""Header reading and the estimate's arithmetic, on headers made here; the real server is asked in integration tests."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmflask.memory.architecture import describe
from qmflask.memory.estimate import Estimate, Row, Settings, estimate
from qmflask.memory.gguf import Elided, GGUFError, Header, Tensor, merged, read_header, row_bytes
from qmflask.memory.graph import GraphShape, LayerShape, compute_bytes
from qmflask.memory.llama import read_command, split_files
from qmflask.memory.samples import GIB, MIB

# --- bytes of a header ----------------------------------------------------------------------------------------------

KINDS = {int: 4, float: 6, bool: 7, str: 8}


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def encoded(value: Any) -> bytes:
    if isinstance(value, list):
        kind = KINDS[type(value[0])] if value else 4
        return struct.pack("<IQ", kind, len(value)) + b"".join(encoded(one) for one in value)
    if isinstance(value, str):
        return text(value)
    return struct.pack({bool: "<?", int: "<I", float: "<f"}[type(value)], value)


def header_bytes(metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int]], version: int = 3) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind = 9 if isinstance(value, list) else KINDS[type(value)]
        parts += [text(key), struct.pack("<I", kind), encoded(value)]
    for name, (shape, kind) in tensors.items():
        parts += [text(name), struct.pack("<I", len(shape)), struct.pack(f"<{len(shape)}Q", *shape)]
        parts += [struct.pack("<IQ", kind, 0)]
    return b"".join(parts)


WHOLE = header_bytes(
    {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.rope.freq_base": 10000.0,
        "llama.flag": True,
        "tokenizer.ggml.tokens": ["a", "bc", ""],
        "llama.attention.head_count_kv": [2, 4],
        "llama.scores": list(range(5000)),
    },
    {"token_embd.weight": ((64, 32), 1), "blk.1.attn_q.weight": ((64, 64), 8), "blk.0.x.weight": ((256, 2), 12)},
)


def test_a_header_is_read() -> None:
    header = read_header(WHOLE)
    assert header.architecture == "llama"
    assert header.metadata["llama.flag"] is True
    assert header.metadata["tokenizer.ggml.tokens"] == Elided(3)
    assert header.metadata["llama.scores"] == Elided(5000)
    assert header.metadata["llama.attention.head_count_kv"] == (2, 4)
    assert [(t.name, t.type, t.size, t.layer) for t in header.tensors] == [
        ("token_embd.weight", "f16", 64 * 32 * 2, None),
        ("blk.1.attn_q.weight", "q8_0", 64 * 64 // 32 * 34, 1),
        ("blk.0.x.weight", "q4_k", 2 * 144, 0),
    ]
    assert read_header(memoryview(WHOLE + b"data" * 100)) == header


def test_figures_are_given_once_or_for_each_layer() -> None:
    header = read_header(WHOLE)
    assert header.per_layer("attention.head_count_kv", 2) == [2, 4]
    assert header.per_layer("block_count", 3) == [2, 2, 2]
    assert header.per_layer("attention.head_count_kv", 4) == [2, 4, 4, 4]
    assert header.per_layer("nothing", 2, 7) == [7, 7]
    assert header.number("attention.head_count_kv", 5) == 5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF", "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not known"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "more entries than the file has bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62) + bytes(90), "cut short"),
        (header_bytes({"a": "b"}, {"x": ((4,), 999)}), "unknown type 999"),
        (header_bytes({}, {"x": (tuple(range(9)), 1)}), "9 dimensions"),
        (header_bytes({"k": 1}, {})[:-8] + struct.pack("<II", 77, 1), "value type 77"),
        (header_bytes({"k": 1}, {})[:-8] + struct.pack("<IIQ", 9, 8, 1 << 61), "array"),
    ],
)
def test_broken_headers_say_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        read_header(data)


def test_a_header_cut_anywhere_is_an_error() -> None:
    for length in range(4, len(WHOLE), 37):
        with pytest.raises(GGUFError):
            read_header(WHOLE[:length])


@settings(deadline=None)
@given(st.data())
def test_a_header_with_wrong_bytes_never_raises_anything_else(data: st.DataObject) -> None:
    broken = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 6))):
        broken[data.draw(st.integers(4, len(broken) - 1))] = data.draw(st.integers(0, 255))
    try:
        describe(read_header(bytes(broken)))
    except GGUFError:
        pass


def test_figures_that_are_no_numbers_are_the_default() -> None:
    header = read_header(header_bytes({"general.architecture": "a", "a.x": float("nan"), "a.y": float("inf")}, {}))
    assert (header.number("x", 3), header.number("y", 4), header.per_layer("x", 2, 5)) == (3, 4, [5, 5])


def test_row_bytes() -> None:
    assert row_bytes("f16", 128) == 256
    assert row_bytes("Q8_0", 128) == 4 * 34
    assert row_bytes("q4_0", 33) == 2 * 18
    assert row_bytes("f16", 0) == 0
    with pytest.raises(GGUFError, match='unknown tensor type "q99"'):
        row_bytes("q99", 32)


# --- models -------------------------------------------------------------------------------------------------------


def model(arch: str = "llama", layers: int = 4, tied: bool = False, **keys: Any) -> Header:
    """A model of width 256, 4 heads of 64, with the given keys (`__` for a dot)."""
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.block_count": layers,
        f"{arch}.embedding_length": 256,
        f"{arch}.context_length": 4096,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
    }
    metadata |= {f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()}
    tensors = [Tensor("token_embd.weight", (256, 1000), "f16", 1000), Tensor("output_norm.weight", (256,), "f32", 8)]
    if not tied:
        tensors.append(Tensor("output.weight", (256, 1000), "f16", 1000))
    for layer in range(layers):
        for name, shape in (("attn_q", (256, 256)), ("ffn_up", (256, 512)), ("ffn_gate", (256, 512))):
            tensors.append(Tensor(f"blk.{layer}.{name}.weight", shape, "f16", 100))
        tensors.append(Tensor(f"blk.{layer}.ffn_down.weight", (512, 256), "f16", 100))
    return Header(3, metadata, tuple(tensors))


def rows(found: Estimate) -> dict[str, tuple[int, int]]:
    return {row.name.split()[0]: (row.vram, row.ram) for row in found.rows}


TOKEN = 2 * 2 * 64 * 2  # keys and values of one token and layer: 2 heads of 64 halves


def test_layers_go_to_the_card_from_the_end() -> None:
    def weights(gpu_layers: int | None, header: Header | None = None) -> tuple[int, int]:
        return rows(estimate(header or model(), Settings(gpu_layers=gpu_layers)))["weights"]

    assert weights(None) == (1600 + 1008, 1000)
    assert weights(99) == (1600 + 1008, 1000)
    assert weights(0) == (0, 1600 + 2008)
    assert weights(1) == (1008, 1600 + 1000)
    assert weights(3) == (800 + 1008, 800 + 1000)
    assert weights(None, model(tied=True)) == (1600 + 8 + 1000, 1000), "the output has a copy of its own"
    assert weights(0, model(tied=True)) == (0, 1600 + 1008)


def test_the_cache_grows_with_context_heads_and_type() -> None:
    def cache(**more: Any) -> tuple[int, int]:
        return rows(estimate(model(), Settings(**{"context": 2048, "parallel": 1, **more})))["cache"]

    assert cache() == (2048 * TOKEN * 4, 0)
    assert cache(context=0) == (4096 * TOKEN * 4, 0)
    assert cache(context=2000) == (2048 * TOKEN * 4, 0), "in steps of 256"
    assert cache(gpu_layers=3) == (2048 * TOKEN * 2, 2048 * TOKEN * 2)
    assert cache(cache_on_gpu=False) == (0, 2048 * TOKEN * 4)
    assert cache(cache_k="q8_0", cache_v="q4_0") == (2048 * 4 * (4 * 34 + 4 * 18), 0)
    assert cache(parallel=4) == (2048 * TOKEN * 4, 0)
    assert cache(parallel=3) == (3 * 768 * TOKEN * 4, 0), "each slot has whole steps of its own"
    assert cache(parallel=None) == (2048 * TOKEN * 4, 0)


def test_heads_given_for_each_layer() -> None:
    header = model(attention__head_count_kv=(2, 1, 4, 2), attention__key_length=32, attention__value_length=16)
    found = rows(estimate(header, Settings(context=256, parallel=1)))["cache"]
    assert found == (256 * 9 * (32 + 16) * 2, 0)


@pytest.mark.parametrize(
    ("arch", "keys", "windowed"),
    [
        ("gemma3", {"attention__sliding_window": 512}, [0, 1, 2, 3, 4, 6, 7]),
        ("gemma2", {"attention__sliding_window": 512}, [0, 2, 4, 6]),
        ("gpt-oss", {"attention__sliding_window": 128}, [0, 2, 4, 6]),
        ("new", {"attention__sliding_window": 512, "attention__sliding_window_pattern": 4}, [0, 1, 2, 4, 5, 6]),
        (
            "new",
            {"attention__sliding_window": 512, "attention__sliding_window_pattern": (True, False, True)},
            [0, 2],
        ),
        ("new", {"attention__sliding_window": 512}, []),
        ("llama4", {}, [0, 1, 2, 4, 5, 6]),
        ("llama", {}, []),
    ],
)
def test_which_layers_have_a_window(arch: str, keys: dict[str, Any], windowed: list[int]) -> None:
    found = describe(model(arch, layers=8, **keys)).layers
    assert [index for index, layer in enumerate(found) if layer.window] == windowed


def test_a_window_needs_its_width_and_a_batch() -> None:
    header = model("gemma3", layers=6, attention__sliding_window=1024)

    def cells(**more: Any) -> int:
        return rows(estimate(header, Settings(**{"context": 8192, "parallel": 1, **more})))["cache"][0] // TOKEN

    assert cells() == 8192 + 5 * 1536
    assert cells(context=512) == 512 * 6
    assert cells(full_windows=True) == 8192 * 6
    assert cells(micro_batch=128) == 8192 + 5 * 1280
    assert cells(parallel=4) == 4 * (2048 + 5 * 1536)
    assert cells(parallel=None) == 8192 + 5 * 4608, "one cache for all slots has a window for each"


def test_recurrent_layers_keep_a_state_and_no_cache() -> None:
    header = model(
        "granitehybrid",
        attention__head_count_kv=(0, 2, 0, 0),
        ssm__conv_kernel=4,
        ssm__inner_size=512,
        ssm__state_size=16,
        ssm__group_count=1,
    )
    found = rows(estimate(header, Settings(context=1024, parallel=2)))
    assert found["cache"] == (1024 * TOKEN, 0)
    assert found["recurrent"] == (3 * 2 * 4 * (3 * (512 + 2 * 16) + 16 * 512), 0)
    linear = describe(model("qwen3next", layers=8, ssm__state_size=128, ssm__inner_size=64, ssm__conv_kernel=4)).layers
    assert [bool(layer.heads_kv) for layer in linear] == [False, False, False, True] * 2


def test_shared_caches_and_latent_attention() -> None:
    shared = describe(model("gemma3n", attention__shared_kv_layers=3)).layers
    assert [layer.heads_kv for layer in shared] == [2, 0, 0, 0]
    latent = model(
        "deepseek2",
        attention__head_count_kv=1,
        attention__key_length=576,
        attention__value_length=512,
        attention__key_length_mla=192,
    )
    assert rows(estimate(latent, Settings(context=256, parallel=1)))["cache"] == (256 * 576 * 2 * 4, 0)


def test_experts_can_stay_in_system_memory() -> None:
    header = model(expert_used_count=2)
    experts = tuple(Tensor(f"blk.{layer}.ffn_up_exps.weight", (256, 512, 8), "f16", 5000) for layer in range(4))
    header = Header(3, header.metadata, header.tensors + experts)

    def weights(**more: Any) -> tuple[int, int]:
        return rows(estimate(header, Settings(**more)))["weights"]

    assert weights() == (1600 + 1008 + 20000, 1000)
    assert weights(cpu_experts=-1) == (1600 + 1008, 1000 + 20000)
    assert weights(cpu_experts=3) == (1600 + 1008 + 5000, 1000 + 15000)
    assert weights(overrides=((r"\.ffn_up_exps\.", True),)) == (1600 + 1008, 1000 + 20000)
    assert weights(overrides=((r"blk\.[01]\.", True), ("exps", False)), cpu_experts=-1) == (
        800 + 1008 + 10000,
        800 + 1000 + 10000,
    )


def test_projector_and_draft_are_added() -> None:
    projector = Header(3, {"general.architecture": "clip"}, (Tensor("v.patch.weight", (9,), "f16", 700),))
    found = estimate(model(), Settings(context=256), projector, model(layers=1), Settings(context=256, gpu_layers=0))
    assert rows(found)["projector"] == (700, 0)
    vram, ram = rows(found)["draft"]
    assert vram == 0 and ram > 400 + 2008
    on_cpu = estimate(model(), Settings(context=256, projector_on_gpu=False), projector)
    assert rows(on_cpu)["projector"] == (0, 700)


def test_split_files_are_one_model() -> None:
    assert split_files("/m/big-00001-of-00003.gguf", 3) == [f"/m/big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for wrong in ("/m/big-00002-of-00003.gguf", "/m/big.gguf", "/m/big-00001-of-00002.gguf"):
        with pytest.raises(ValueError, match="name the first"):
            split_files(wrong, 3)
    first, second = (
        Header(3, {"split.count": 2}, (Tensor("a", (1,), "f32", 4),)),
        Header(3, {}, (Tensor("b", (1,), "f32", 4),)),
    )
    assert first.splits == 2 and second.splits == 1
    assert [tensor.name for tensor in merged([first, second]).tensors] == ["a", "b"]


def test_what_is_no_language_model_is_an_error() -> None:
    with pytest.raises(GGUFError, match="no language model"):
        estimate(Header(3, {"general.architecture": "clip"}), Settings())
    with pytest.raises(GGUFError, match="layers"):
        describe(model(layers=0, block_count=1_000_000))


def test_keys_to_paste_are_rounded_up() -> None:
    found = Estimate("m", 1, (Row("weights", 5 * GIB + 1, 0), Row("cache", GIB // 2, 100 * MIB)))
    assert found.yaml() == "estVramGB: 5.51\nestRamGB: 0.1"


def test_a_cache_type_that_the_server_refuses_is_noted() -> None:
    header = model(attention__key_length=16, attention__value_length=16)
    assert any("refuses" in note for note in estimate(header, Settings(cache_k="q8_0", cache_v="q8_0")).notes)
    assert not any("refuses" in note for note in estimate(header, Settings()).notes)


def test_weights_that_may_be_repacked_are_noted() -> None:
    header = model()
    quantised = Header(3, header.metadata, (*header.tensors, Tensor("blk.0.big.weight", (32,), "q4_0", GIB)))
    assert any("1.00 GiB of them a second time" in note for note in estimate(quantised, Settings(gpu_layers=0)).notes)
    assert not any("second time" in note for note in estimate(quantised, Settings()).notes)


# --- the compute buffer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feed", "key", "flash", "measured"),
    [
        (1024, 512, True, 9.51),
        (512, 256, True, 5.51),
        (1408, 256, True, 12.76),
        (4096, 256, True, 28.51),
        (256, 512, True, 7.01),
        (1024, 512, False, 16.01),
        (1536, 64, False, 14.26),
    ],
)
def test_compute_buffers_that_were_measured(feed: int, key: int, flash: bool, measured: float) -> None:
    """MiB that the pinned llama-server told for width 512, 8 heads, 3 layers, 512 tokens at a context of 512."""
    layer = LayerShape(512, key, key, 512, 8, 512, feed, feed)
    found = compute_bytes(GraphShape(512, 512, [layer] * 3, 480, 1, flash))
    assert found / MIB == pytest.approx(measured, abs=0.02)


def test_the_compute_buffer_does_not_depend_on_the_number_of_layers() -> None:
    layer = LayerShape(512, 128, 128, 512, 8, 4096, 1536, 1536)
    assert compute_bytes(GraphShape(512, 512, [layer] * 4)) == compute_bytes(GraphShape(512, 512, [layer] * 40))


# --- command lines --------------------------------------------------------------------------------------------------


COMMAND = """
llama-server --host 0.0.0.0 -m /m/big.gguf -c 16384 -np 2 -ngl 20 -ctk q8_0 --cache-type-v q4_0 -fa off
--mmproj /m/p.gguf -md /m/small.gguf -ngld 0 -ub 256 -ot exps=CPU --no-kv-offload --swa-full
"""


def test_a_command_line_is_read() -> None:
    found = read_command(COMMAND.split())
    assert found is not None
    assert (found.model, found.projector, found.draft) == ("/m/big.gguf", "/m/p.gguf", "/m/small.gguf")
    assert found.settings == Settings(
        context=16384,
        parallel=2,
        cache_k="q8_0",
        cache_v="q4_0",
        micro_batch=256,
        gpu_layers=20,
        flash=False,
        full_windows=True,
        cache_on_gpu=False,
        overrides=(("exps", True),),
    )
    assert (found.draft_settings.gpu_layers, found.draft_settings.cache_k) == (0, "f16")
    assert found.draft_settings.context == 16384


@pytest.mark.parametrize(
    ("words", "settings_"),
    [
        ("-m a.gguf", Settings()),
        ("--model=a.gguf --ctx-size=99", Settings(context=99)),
        ("-m a.gguf -ngl -1", Settings()),
        ("-m a.gguf -ngl auto -c -5 -np -1 -ub many", Settings()),
        ("-m a.gguf -fa", Settings()),
        ("-m a.gguf -fa --cpu-moe", Settings(cpu_experts=-1)),
        ("-m a.gguf --n-cpu-moe 7 -kvu -np 4", Settings(cpu_experts=7, unified=True, parallel=4)),
        ("docker run --gpus all image -m /models/a.gguf -c 512", Settings(context=512)),
    ],
)
def test_odd_command_lines(words: str, settings_: Settings) -> None:
    found = read_command(words.split())
    assert found is not None
    assert found.settings == settings_


def test_the_environment_counts_less_than_the_command_line() -> None:
    env = {"LLAMA_ARG_MODEL": "/m/a.gguf", "LLAMA_ARG_CTX_SIZE": "1000", "LLAMA_ARG_N_PARALLEL": "3"}
    found = read_command(["llama-server", "-c", "2000"], env)
    assert found is not None
    assert (found.model, found.settings.context, found.settings.parallel) == ("/m/a.gguf", 2000, 3)


@pytest.mark.parametrize("words", ["", "vllm serve meta/llama", "llama-server -hf org/model", "python -m server"])
def test_commands_without_a_gguf_file(words: str) -> None:
    assert read_command(words.split()) is None

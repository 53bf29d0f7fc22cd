"""Small models of other shapes than `make_tiny_gguf.py` makes: sliding windows, short convolutions, Mamba.

All weights are zero: a llama-server loads them and allocates what it would for real ones, which is all they are for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.parts.make_tiny_gguf import build_vocab

WIDTH, FEED, HEADS, HEADS_KV = 512, 1536, 8, 4
HEAD = WIDTH // HEADS


class _Writer:
    """A GGUF file with the keys and the vocabulary that every model has."""

    def __init__(self, path: Path, arch: str, layers: int, heads: int, heads_kv: Any, feed: int = FEED) -> None:
        self.file = gguf.GGUFWriter(str(path), arch)
        tokens, scores, types = build_vocab([])
        self.vocabulary = len(tokens)
        self.file.add_context_length(32768)
        self.file.add_embedding_length(WIDTH)
        self.file.add_block_count(layers)
        self.file.add_feed_forward_length(feed)
        self.file.add_head_count(heads)
        self.file.add_head_count_kv(heads_kv)
        self.file.add_layer_norm_rms_eps(1e-5)
        self.file.add_rope_freq_base(10000.0)
        self.file.add_vocab_size(self.vocabulary)
        self.file.add_tokenizer_model("llama")
        self.file.add_tokenizer_pre("default")
        self.file.add_token_list(tokens)
        self.file.add_token_scores(scores)
        self.file.add_token_types(types)
        self.file.add_bos_token_id(1)
        self.file.add_eos_token_id(2)

    def put(self, name: str, *shape: int, kind: Any = np.float16) -> None:
        """A tensor of zeros, the outer dimension first; vectors are 32-bit, as llama.cpp wants them."""
        self.file.add_tensor(name, np.zeros(shape, np.float32 if len(shape) == 1 else kind))

    def attention(self, prefix: str) -> None:
        self.put(prefix + "attn_q.weight", HEADS * HEAD, WIDTH)
        self.put(prefix + "attn_k.weight", HEADS_KV * HEAD, WIDTH)
        self.put(prefix + "attn_v.weight", HEADS_KV * HEAD, WIDTH)
        self.put(prefix + "attn_output.weight", WIDTH, HEADS * HEAD)
        self.put(prefix + "attn_q_norm.weight", HEAD)
        self.put(prefix + "attn_k_norm.weight", HEAD)

    def feed_forward(self, prefix: str) -> None:
        self.put(prefix + "ffn_gate.weight", FEED, WIDTH)
        self.put(prefix + "ffn_up.weight", FEED, WIDTH)
        self.put(prefix + "ffn_down.weight", WIDTH, FEED)

    def close(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def gemma3(path: Path, layers: int = 12, window: int = 1024) -> None:
    """Sliding windows in five of six layers; the input's matrix is the output's too."""
    model = _Writer(path, "gemma3", layers, HEADS, HEADS_KV)
    model.file.add_key_length(HEAD)
    model.file.add_value_length(HEAD)
    model.file.add_sliding_window(window)
    model.put("token_embd.weight", model.vocabulary, WIDTH)
    model.put("output_norm.weight", WIDTH)
    for layer in range(layers):
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            model.put(f"blk.{layer}.{norm}.weight", WIDTH)
        model.attention(f"blk.{layer}.")
        model.feed_forward(f"blk.{layer}.")
    model.close()


def lfm2(path: Path, layers: int = 6) -> None:
    """Attention in every third layer, short convolutions in the others."""
    model = _Writer(path, "lfm2", layers, HEADS, [HEADS_KV if n % 3 == 2 else 0 for n in range(layers)])
    model.file.add_uint32("lfm2.shortconv.l_cache", 3)
    model.put("token_embd.weight", model.vocabulary, WIDTH)
    model.put("token_embd_norm.weight", WIDTH)
    for layer in range(layers):
        prefix = f"blk.{layer}."
        model.put(prefix + "attn_norm.weight", WIDTH)
        model.put(prefix + "ffn_norm.weight", WIDTH)
        model.feed_forward(prefix)
        if layer % 3 == 2:
            model.attention(prefix)
        else:
            model.put(prefix + "shortconv.conv.weight", WIDTH, 3, kind=np.float32)
            model.put(prefix + "shortconv.in_proj.weight", 3 * WIDTH, WIDTH)
            model.put(prefix + "shortconv.out_proj.weight", WIDTH, WIDTH)
    model.close()


def deepseek2(path: Path, layers: int = 6, rank: int = 128, rope: int = 32, nope: int = 64, value: int = 64) -> None:
    """Latent attention (MLA): one narrow cache for all heads, and the values are read from the keys."""
    model = _Writer(path, "deepseek2", layers, HEADS, 1)
    numbers = {
        "attention.q_lora_rank": 192,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": value,
        "rope.dimension_count": rope,
        "leading_dense_block_count": layers,
        **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count", "expert_feed_forward_length"), 0),
    }
    for key, number in numbers.items():
        model.file.add_uint32(f"deepseek2.{key}", number)
    model.file.add_float32("deepseek2.expert_weights_scale", 1.0)
    for name in ("token_embd", "output"):
        model.put(f"{name}.weight", model.vocabulary, WIDTH)
    model.put("output_norm.weight", WIDTH)
    for layer in range(layers):
        prefix = f"blk.{layer}."
        model.put(prefix + "attn_norm.weight", WIDTH)
        model.put(prefix + "ffn_norm.weight", WIDTH)
        model.put(prefix + "attn_q_a.weight", 192, WIDTH)
        model.put(prefix + "attn_q_a_norm.weight", 192)
        model.put(prefix + "attn_q_b.weight", HEADS * (nope + rope), 192)
        model.put(prefix + "attn_kv_a_mqa.weight", rank + rope, WIDTH)
        model.put(prefix + "attn_kv_a_norm.weight", rank)
        model.put(prefix + "attn_k_b.weight", HEADS, rank, nope)
        model.put(prefix + "attn_v_b.weight", HEADS, value, rank)
        model.put(prefix + "attn_output.weight", WIDTH, HEADS * value)
        model.feed_forward(prefix)
    model.close()


def projector(path: Path, width: int, feed: int, layers: int, heads: int, side: int, patch: int, out: int) -> None:
    """A vision transformer with two matrices behind it, for pictures of `side` pixels."""
    file = gguf.GGUFWriter(str(path), "clip")
    file.add_bool("clip.has_vision_encoder", True)
    file.add_string("clip.projector_type", "mlp")
    file.add_bool("clip.use_gelu", True)
    numbers = {"image_size": side, "patch_size": patch, "embedding_length": width, "feed_forward_length": feed}
    for key, number in {**numbers, "projection_dim": out, "block_count": layers, "attention.head_count": heads}.items():
        file.add_uint32(f"clip.vision.{key}", number)
    file.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    file.add_array("clip.vision.image_mean", [0.5] * 3)
    file.add_array("clip.vision.image_std", [0.5] * 3)
    shapes: dict[str, tuple[int, ...]] = {
        "v.class_embd": (width,),
        "v.patch_embd.weight": (width, 3, patch, patch),
        "v.position_embd.weight": ((side // patch) ** 2 + 1, width),
        **_with_bias("v.pre_ln", width),
        **_with_bias("mm.0", out, width),
        **_with_bias("mm.2", out, out),
    }
    for layer in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes |= _with_bias(f"v.blk.{layer}.{name}", width, width)
        shapes |= _with_bias(f"v.blk.{layer}.ln1", width) | _with_bias(f"v.blk.{layer}.ln2", width)
        shapes |= _with_bias(f"v.blk.{layer}.ffn_up", feed, width) | _with_bias(f"v.blk.{layer}.ffn_down", width, feed)
    for name, shape in shapes.items():
        file.add_tensor(name, np.zeros(shape, np.float32 if len(shape) == 1 else np.float16))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def _with_bias(name: str, rows: int, *columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, *columns), f"{name}.bias": (rows,)}


def mamba(path: Path, layers: int = 6, inner: int = 1024, state: int = 16, rank: int = 32) -> None:
    """State-space layers only: no cache at all."""
    model = _Writer(path, "mamba", layers, 0, 0, feed=0)
    model.file.add_ssm_conv_kernel(4)
    model.file.add_ssm_inner_size(inner)
    model.file.add_ssm_state_size(state)
    model.file.add_ssm_time_step_rank(rank)
    model.put("token_embd.weight", model.vocabulary, WIDTH)
    model.put("output_norm.weight", WIDTH)
    for layer in range(layers):
        prefix = f"blk.{layer}."
        model.put(prefix + "attn_norm.weight", WIDTH)
        model.put(prefix + "ssm_in.weight", 2 * inner, WIDTH)
        model.put(prefix + "ssm_conv1d.weight", inner, 4, kind=np.float32)
        model.put(prefix + "ssm_conv1d.bias", inner)
        model.put(prefix + "ssm_x.weight", rank + 2 * state, inner)
        model.put(prefix + "ssm_dt.weight", inner, rank)
        model.put(prefix + "ssm_dt.bias", inner)
        model.put(prefix + "ssm_a", inner, state, kind=np.float32)
        model.put(prefix + "ssm_d", inner)
        model.put(prefix + "ssm_out.weight", WIDTH, inner)
    model.close()

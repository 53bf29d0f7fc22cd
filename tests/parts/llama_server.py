"""llama.cpp's own HTTP server inside a Python process, behind llama-server's command line (only what our tests use).

For processors that the prebuilt llama-server does not run on. Like the real one it listens before it has loaded
(answering 503), logs llama.cpp's own lines on stderr, ends with 1 if it cannot load, and with 0 on TERM; while it
loads, TERM ends it at once. Unlike the real one, a second TERM ends it by that signal.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import xllamacpp as x  # type: ignore[import-not-found, unused-ignore]

_POOLING = ("none", "mean", "cls", "last", "rank")
_CACHE = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def parser() -> argparse.ArgumentParser:
    """The flags, named and defaulted as llama-server's; an unknown one is an error."""
    flags = argparse.ArgumentParser("llama-server", allow_abbrev=False)
    add = flags.add_argument
    add("-m", "--model", required=True)
    add("-md", "--model-draft", default="")
    add("--mmproj", default="")
    add("-a", "--alias", default="")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8080)
    add("-c", "--ctx-size", type=int, default=0)
    add("-np", "--parallel", type=int, default=-1)
    add("-b", "--batch-size", type=int, default=2048)
    add("-ub", "--ubatch-size", type=int, default=512)
    add("-t", "--threads", type=int, default=-1)
    add("-ngl", "--n-gpu-layers", type=int, default=-1)
    add("-ngld", "--n-gpu-layers-draft", type=int, default=-1)
    add("-ctk", "--cache-type-k", choices=_CACHE, default="f16")
    add("-ctv", "--cache-type-v", choices=_CACHE, default="f16")
    add("-fa", "--flash-attn", choices=("on", "off", "auto"), default="auto")
    add("-lv", "--log-verbosity", type=int, default=3)
    add("--pooling", choices=_POOLING)
    add("--sse-ping-interval", type=int, default=30)
    for switch in ("--embeddings", "--rerank", "--swa-full", "--no-repack", "--no-warmup", "--metrics"):
        add(switch, action="store_true")
    add("--load-mode", choices=("none", "mmap"), default="mmap")
    add("--reranking", dest="rerank", action="store_true")
    add("-kvu", "--kv-unified", action="store_true")
    add("--jinja", action=argparse.BooleanOptionalAction, default=True)
    return flags


def params(flags: argparse.Namespace) -> x.CommonParams:
    """llama.cpp's settings for these flags."""
    p = x.CommonParams()
    p.model.path, p.mmproj.path = flags.model, flags.mmproj
    if flags.alias:
        p.model_alias = {flags.alias}
    p.hostnames, p.port = [flags.host], flags.port
    p.n_ctx, p.n_batch, p.n_ubatch = flags.ctx_size, flags.batch_size, flags.ubatch_size
    # Without a number of slots llama-server takes four, which share the context.
    automatic = flags.parallel < 0
    p.n_parallel, p.kv_unified = 4 if automatic else flags.parallel, automatic or flags.kv_unified
    p.cpuparams.n_threads, p.n_gpu_layers = flags.threads, flags.n_gpu_layers
    p.cache_type_k, p.cache_type_v = (_type(name) for name in (flags.cache_type_k, flags.cache_type_v))
    p.flash_attn_type = {"auto": -1, "off": 0, "on": 1}[flags.flash_attn]
    p.swa_full, p.no_extra_bufts, p.warmup = flags.swa_full, flags.no_repack, not flags.no_warmup
    if flags.load_mode == "none":
        p.load_mode = x.llama_load_mode.LLAMA_LOAD_MODE_NONE
    p.embedding = flags.embeddings or flags.rerank
    pooling = "rank" if flags.rerank else flags.pooling
    if pooling:
        p.pooling_type = _POOLING.index(pooling)
    p.use_jinja, p.endpoint_metrics = flags.jinja, flags.metrics
    p.sse_ping_interval, p.verbosity = flags.sse_ping_interval, flags.log_verbosity
    if flags.model_draft:
        draft = p.speculative.draft
        draft.mparams.path, draft.n_gpu_layers = flags.model_draft, flags.n_gpu_layers_draft
        p.speculative.types = [x.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    return p


def _type(name: str) -> int:
    return int(getattr(x.ggml_type, f"GGML_TYPE_{name.upper()}"))


def main() -> int:
    """Serve until TERM or INT."""
    settings = params(parser().parse_args())
    try:
        server = x.Server(settings)  # returns when the model is loaded
    except RuntimeError as error:  # llama.cpp has said why
        print(error, file=sys.stderr)
        return 1
    # A pipe, because a signal between a look and the wait would be slept over.
    asked, note = os.pipe()
    os.set_blocking(note, False)
    signal.set_wakeup_fd(note)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    os.read(asked, 1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    del server  # waits for answers that are still being sent
    return 0


if __name__ == "__main__":
    sys.exit(main())

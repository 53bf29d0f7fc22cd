"""llama-server's command line, as far as it decides about memory: which files, and which settings; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qmflask.memory.estimate import Settings

#: Option -> (name of what it sets, takes a value). Names that begin with "draft_" are the draft model's settings.
_OPTIONS: dict[str, tuple[str, bool]] = {}
for _names, _what, _takes in (
    (("-m", "--model"), "model", True),
    (("-mm", "--mmproj"), "projector", True),
    (("-md", "--model-draft", "--spec-draft-model"), "draft", True),
    (("-c", "--ctx-size"), "context", True),
    (("-cd", "--ctx-size-draft", "--spec-draft-ctx-size"), "draft_context", True),
    (("-np", "--parallel"), "parallel", True),
    (("-b", "--batch-size"), "batch", True),
    (("-ub", "--ubatch-size"), "micro_batch", True),
    (("-ngl", "--gpu-layers", "--n-gpu-layers"), "gpu_layers", True),
    (("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl"), "draft_gpu_layers", True),
    (("-ctk", "--cache-type-k"), "cache_k", True),
    (("-ctv", "--cache-type-v"), "cache_v", True),
    (("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"), "draft_cache_k", True),
    (("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v"), "draft_cache_v", True),
    (("-fa", "--flash-attn"), "flash", True),
    (("-ot", "--override-tensor"), "override", True),
    (("-ncmoe", "--n-cpu-moe"), "cpu_experts", True),
    (("-cmoe", "--cpu-moe"), "all_experts", False),
    (("--swa-full",), "full_windows", False),
    (("-nkvo", "--no-kv-offload"), "cache_on_cpu", False),
    (("-kvu", "--kv-unified"), "unified", False),
    (("-no-kvu", "--no-kv-unified"), "apart", False),
    (("--no-mmproj-offload",), "projector_on_cpu", False),
):
    _OPTIONS.update(dict.fromkeys(_names, (_what, _takes)))

#: The same as environment variables, where people use them.
_ENVIRONMENT = {
    "LLAMA_ARG_MODEL": "-m",
    "LLAMA_ARG_MMPROJ": "-mm",
    "LLAMA_ARG_CTX_SIZE": "-c",
    "LLAMA_ARG_N_PARALLEL": "-np",
    "LLAMA_ARG_BATCH": "-b",
    "LLAMA_ARG_UBATCH": "-ub",
    "LLAMA_ARG_N_GPU_LAYERS": "-ngl",
    "LLAMA_ARG_CACHE_TYPE_K": "-ctk",
    "LLAMA_ARG_CACHE_TYPE_V": "-ctv",
    "LLAMA_ARG_FLASH_ATTN": "-fa",
}
_ON_OFF = {"on": True, "off": False, "auto": True, "1": True, "0": False, "true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Command:
    """What a command line loads, and how."""

    model: str
    settings: Settings
    projector: str | None = None
    draft: str | None = None
    draft_settings: Settings = field(default_factory=Settings)


def read_command(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Command | None:
    """What a llama-server command line (or one that wraps it) loads; None when it names no GGUF file.

    A value that is no number is taken for the default, as this is for hints only.
    """
    given: dict[str, str] = {}
    overrides: list[str] = []
    words: list[str] = []
    for name, option in _ENVIRONMENT.items():
        if value := (env or {}).get(name):
            words += [option, value]
    words += argv  # what the command line says comes later, and wins
    place = 0
    while place < len(words):
        word, _, joined = words[place].partition("=")
        place += 1
        what, takes = _OPTIONS.get(word, ("", False))
        if not what:
            continue
        value = joined
        if takes and not joined and place < len(words) and not _is_option(words[place]):
            value = words[place]
            place += 1
        if what == "override":
            overrides.append(value)
        given[what] = value
    if not given.get("model", "").lower().endswith(".gguf"):
        return None
    settings = _settings(given, overrides)
    return Command(
        model=given["model"],
        settings=settings,
        projector=given.get("projector") or None,
        draft=given.get("draft") or None,
        draft_settings=_draft_settings(given, settings),
    )


def split_files(path: str, count: int) -> list[str]:
    """The files of a split model, given the first: `x-00001-of-00003.gguf` and so on. ValueError for another name."""
    first = f"-00001-of-{count:05d}.gguf"
    if not path.endswith(first):
        raise ValueError(f"{path} is one of {count} files; name the first, which ends in {first}")
    stem = path.removesuffix(first)
    return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def _is_option(word: str) -> bool:
    """`-1` is a value, `-fa` is not."""
    return word.startswith("-") and not word[1:].replace(".", "", 1).isdecimal()


def _settings(given: Mapping[str, str], overrides: Sequence[str]) -> Settings:
    default = Settings()
    unified = True if "unified" in given else False if "apart" in given else None
    return Settings(
        context=_number(given, "context", default.context, least=0),
        parallel=_positive(given, "parallel"),
        unified=unified,
        cache_k=given.get("cache_k") or default.cache_k,
        cache_v=given.get("cache_v") or default.cache_v,
        batch=_number(given, "batch", default.batch),
        micro_batch=_number(given, "micro_batch", default.micro_batch),
        gpu_layers=_layers(given, "gpu_layers"),
        flash=_ON_OFF.get(given.get("flash", "auto").lower(), True),
        full_windows="full_windows" in given,
        cache_on_gpu="cache_on_cpu" not in given,
        projector_on_gpu="projector_on_cpu" not in given,
        cpu_experts=-1 if "all_experts" in given else _number(given, "cpu_experts", 0, least=0),
        overrides=tuple(_override(one) for text in overrides for one in text.split(",") if "=" in one),
    )


def _draft_settings(given: Mapping[str, str], settings: Settings) -> Settings:
    return replace(
        settings,
        context=_number(given, "draft_context", 0, least=0) or settings.context,
        cache_k=given.get("draft_cache_k") or "f16",
        cache_v=given.get("draft_cache_v") or "f16",
        gpu_layers=_layers(given, "draft_gpu_layers"),
        cpu_experts=0,
        overrides=(),
    )


def _override(text: str) -> tuple[str, bool]:
    """`pattern=CPU` -> (pattern, True)."""
    pattern, _, where = text.rpartition("=")
    return pattern, where.strip().upper().startswith("CPU")


def _parsed(given: Mapping[str, str], what: str, convert: Callable[[str], Any]) -> Any:
    try:
        return convert(given.get(what, ""))
    except ValueError:
        return None


def _number(given: Mapping[str, str], what: str, default: int, least: int = 1) -> int:
    found = _parsed(given, what, int)
    return default if found is None or found < least else int(found)


def _positive(given: Mapping[str, str], what: str) -> int | None:
    found = _parsed(given, what, int)
    return None if found is None or found < 1 else int(found)


def _layers(given: Mapping[str, str], what: str) -> int | None:
    """A number of layers; None for all of them, which "auto", "all" and -1 mean."""
    found = _parsed(given, what, int)
    return None if found is None or found < 0 else int(found)

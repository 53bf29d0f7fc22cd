"""A first configuration from GGUF files: names, commands, sizes and budgets; decides and makes text, no more."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal

from qmflask.memory.estimate import Estimate, Settings, estimate
from qmflask.memory.gguf import Header
from qmflask.memory.samples import GIB

Kind = Literal["chat", "embedding", "reranker"]
Pool = Literal["vram", "ram"]

#: Below this many tokens a context is of little use: the model goes to the processor instead.
LEAST_CONTEXT = 4096
#: Embedding models up to this size stay loaded beside the others.
SMALL = 2 * GIB
#: Of system memory for the models; the rest is the machine's own.
RAM_SHARE = 0.75
#: VRAM left to the desktop and the driver.
VRAM_MARGIN = GIB // 2

_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_QUANT = re.compile(r"[-._](?:ud[-._])?(?:i?q\d\w*|t?q\d\w*|mxfp4\w*|bf16|fp?16|fp?32)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Found:
    """One model of the folder: its first file, what is in its header, and a projector that stands beside it."""

    path: str
    header: Header
    projector_path: str = ""
    projector: Header | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One model as it will be configured. `estimate` is None for a model that fits nowhere."""

    name: str
    found: Found
    kind: Kind
    pool: Pool
    context: int
    estimate: Estimate | None


def is_model(name: str) -> bool:
    """Whether a file is a model of its own: not a projector, and not a later part of a split model."""
    path = PurePath(name)
    part = _PART.search(path.stem)
    return path.suffix.lower() == ".gguf" and not is_projector(name) and (part is None or int(part[1]) == 1)


def is_projector(name: str) -> bool:
    """Whether a file is a projector for images or sound."""
    return PurePath(name).suffix.lower() == ".gguf" and "mmproj" in PurePath(name).name.lower()


def names_of(paths: Sequence[str]) -> list[str]:
    """A name for each file: without the quantisation where that is clear enough."""
    stems = [_PART.sub("", PurePath(path).stem).lower() for path in paths]
    short = [_QUANT.sub("", stem) or stem for stem in stems]
    times = Counter(short)
    names = [one if times[one] == 1 else stem for one, stem in zip(short, stems, strict=True)]
    taken: Counter[str] = Counter()
    unique = []
    for name in names:
        taken[name] += 1
        unique.append(name if taken[name] == 1 else f"{name}-{taken[name]}")
    return unique


def kind_of(header: Header) -> Kind:
    """What the model is for, by the way it pools."""
    architecture = str(header.metadata.get("general.architecture", ""))
    pooling = header.metadata.get(f"{architecture}.pooling_type")
    if pooling == 4:
        return "reranker"
    return "embedding" if pooling in (1, 2, 3) or architecture.endswith("bert") else "chat"


def budgets(vram_total: int, ram_total: int) -> tuple[int, int]:
    """Budgets in bytes for a machine, in halves of a GiB."""
    return _halves(max(0, vram_total - VRAM_MARGIN)), _halves(int(ram_total * RAM_SHARE))


def decide(name: str, found: Found, context: int, vram: int, ram: int) -> Entry:
    """Card or processor, and with which context: the card if some context of use fits, else the processor.

    Raises GGUFError for a header that is no model's.
    """
    kind = kind_of(found.header)
    for size in _contexts(found.header, context):
        measured = _estimate(found, size, on_card=True)
        if vram and measured.vram <= vram and (not ram or measured.ram <= ram):
            return Entry(name, found, kind, "vram", measured.context, measured)
    for size in _contexts(found.header, context):
        measured = _estimate(found, size, on_card=False)
        if not ram or measured.ram <= ram:
            return Entry(name, found, kind, "ram", measured.context, measured)
    return Entry(name, found, kind, "ram", context, None)


def _contexts(header: Header, wanted: int) -> Iterable[int]:
    architecture = str(header.metadata.get("general.architecture", ""))
    own = header.metadata.get(f"{architecture}.context_length")
    size = min(wanted, own) if isinstance(own, int) and own > 0 else wanted
    yield size
    while size > LEAST_CONTEXT:
        size = max(LEAST_CONTEXT, size // 2)
        yield size


def _estimate(found: Found, context: int, on_card: bool) -> Estimate:
    settings = Settings(context=context, gpu_layers=None if on_card else 0)
    if not on_card:
        settings = replace(settings, projector_on_gpu=False)
    return estimate(found.header, settings, found.projector)


def command(entry: Entry, server: str) -> str:
    """The model's `cmd`."""
    words = [server, "--host", "127.0.0.1", "--port", "${PORT}", "-m", entry.found.path, "-c", str(entry.context)]
    words += ["-ngl", "99" if entry.pool == "vram" else "0"]
    if entry.found.projector_path:
        words += ["--mmproj", entry.found.projector_path, *(["--no-mmproj-offload"] if entry.pool == "ram" else [])]
    words += {"chat": [], "embedding": ["--embeddings"], "reranker": ["--reranking"]}[entry.kind]
    return " ".join(word if word == "${PORT}" else shlex.quote(word) for word in words)


def text(entries: Sequence[Entry], server: str, vram: int, ram: int, unreadable: Sequence[str] = ()) -> str:
    """The configuration file."""
    lines = [
        "# Written by `qmflask init`; sizes are estimates from the files' headers. Check: qmflask check THIS_FILE",
        "# What is measured later counts where it is larger. All keys: qmflask example config",
        "",
    ]
    lines += [f"vramBudgetGB: {vram / GIB:g}    # what all models together may take of the cards"] if vram else []
    lines += [f"ramBudgetGB: {ram / GIB:g}    # and of system memory"] if ram else []
    lines += ["", "models:"]
    for entry in entries:
        lines += _model(entry, server)
    lines += [f"  # left out: {line}" for line in unreadable]
    groups = [
        *_group("cpu", entries, lambda e: e.pool == "ram", "pool: ram", "run on the processor, apart from the cards"),
        *_group("small", entries, _stays, "persistent: true", "small, and stay loaded beside any other"),
    ]
    return "\n".join([*lines, *(["", "groups:", *groups] if groups else []), ""])


def _model(entry: Entry, server: str) -> list[str]:
    if entry.estimate is None:
        return [
            f"  # {json.dumps(entry.name)} ({entry.found.path}) needs more than there is, on card and processor",
            "",
        ]
    lines = [f"  {json.dumps(entry.name, ensure_ascii=False)}:", f"    cmd: {_scalar(command(entry, server))}"]
    lines += [f"    {line}" for line in entry.estimate.yaml().splitlines()]
    if entry.found.projector_path:
        lines.append("    capabilities: {in: [text, image], out: [text]}")
    if entry.kind == "reranker":
        lines.append("    capabilities: {reranker: true}")
    return [*lines, ""]


def _scalar(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _stays(entry: Entry) -> bool:
    small = entry.estimate is not None and entry.estimate.vram <= SMALL
    return entry.kind != "chat" and entry.pool == "vram" and small


def _group(name: str, entries: Sequence[Entry], member: Callable[[Entry], bool], setting: str, why: str) -> list[str]:
    members = [json.dumps(e.name, ensure_ascii=False) for e in entries if e.estimate is not None and member(e)]
    if not members:
        return []
    return [
        f"  {name}:    # {why}",
        f"    {setting}",
        "    swap: false",
        "    exclusive: false",
        f"    members: [{', '.join(members)}]",
    ]


def _halves(size: int) -> int:
    return math.floor(size / GIB * 2) * GIB // 2

"""Sizes of models that nobody has told or measured: from the GGUF header, or else the size of the file.

They are hints for `estimate`, `init` and the plan, and never charged (spec/eviction.md, admission 1).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from qmflask.config import LaunchError, Model
from qmflask.memory.estimate import Estimate, estimate
from qmflask.memory.gguf import GGUFError
from qmflask.memory.llama import Command, read_command
from qmflask.modelfiles import read_model


@dataclass(frozen=True, slots=True)
class Hint:
    """Bytes in each pool, and where they come from: "header" or "file"."""

    vram: int
    ram: int
    origin: str


def command_of(model: Model, port: int | None = None) -> Command:
    """What a model's command says about memory; a model of the RAM pool has no layer on a card.

    Raises GGUFError where the command names no GGUF file, LaunchError where there is no command.
    """
    launch = model.launch(port)
    wanted = read_command(launch.argv, launch.env)
    if wanted is None:
        raise GGUFError("its command names no GGUF file (-m FILE.gguf)")
    if model.pool == "ram":
        cpu = replace(wanted.settings, gpu_layers=0)
        wanted = replace(wanted, settings=cpu, draft_settings=replace(wanted.draft_settings, gpu_layers=0))
    return wanted


def estimate_of(wanted: Command) -> Estimate:
    """Header arithmetic over the files of a command. Raises GGUFError."""
    return estimate(
        read_model(wanted.model),
        wanted.settings,
        read_model(wanted.projector) if wanted.projector else None,
        read_model(wanted.draft) if wanted.draft else None,
        wanted.draft_settings,
    )


def hint(model: Model) -> Hint | None:
    """The best guess there is for a model; None when its command names no file that is there."""
    try:
        wanted = command_of(model)
        found = estimate_of(wanted)
        return Hint(found.vram, found.ram, "header")
    except LaunchError:
        return None
    except GGUFError:
        return _by_file(model)


def _by_file(model: Model) -> Hint | None:
    """A file that is no readable GGUF is at least as large in memory as on disk."""
    words = [word.partition("=")[2] or word for word in model.launch().argv[1:]]
    sizes = [os.path.getsize(word) for word in words if os.path.isabs(word) and os.path.isfile(word)]
    if not sizes:
        return None
    size = max(sizes)
    return Hint(0, size, "file") if model.pool == "ram" else Hint(size, 0, "file")

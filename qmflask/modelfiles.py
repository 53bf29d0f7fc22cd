"""Model files on disk: opens them just long enough to read their headers."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from qmflask.memory.gguf import GGUFError, Header, merged, read_header
from qmflask.memory.llama import split_files


def read_model(path: str | os.PathLike[str]) -> Header:
    """The header of a GGUF model, of all its files if it is split. Raises GGUFError naming the file."""
    first = _read(Path(path))
    if first.splits == 1:
        return first
    try:
        names = split_files(os.fspath(path), first.splits)
    except ValueError as error:
        raise GGUFError(str(error)) from None
    return merged([first, *(_read(Path(name)) for name in names[1:])])


def _read(path: Path) -> Header:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            view = memoryview(mapped)
            try:
                return read_header(view)
            finally:
                view.release()
    except GGUFError as error:
        raise GGUFError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise GGUFError(f"{path}: {getattr(error, 'strerror', None) or error}") from None

"""Configuration files: reads what `QMFLASK_CONFIG` names, notices changes, and keeps the resolved configuration."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from qmflask.config import Config, ConfigError, Loaded, Problem, Source
from qmflask.config.report import MAX_TEXT

_SUFFIXES = (".yml", ".yaml")

#: What changes when a file is edited, replaced, or a link to it moved: path, mtime_ns, inode, size of each file.
Fingerprint = tuple[tuple[str, int, int, int], ...]


#: How many generations of the resolved configuration are kept.
_KEPT = 4


def read_sources(path: str | os.PathLike[str], config_dir: str | os.PathLike[str] | None = None) -> list[Source]:
    """The sources of a file, or of a folder's `*.yml` and `*.yaml` in byte order (compatibility 1.15).

    With `config_dir`, a file and a folder are merged, the file first. Raises ConfigError when there is nothing to
    read, or when it cannot be read.
    """
    main = Path(path)  # not `is_dir`, which may raise where the folder may not be searched: reading says it
    if config_dir is not None and not os.path.isdir(main):
        folder = Path(config_dir)
        _check_apart(main, folder)
        paths = [main, *_folder(folder)]
    elif os.path.isdir(main):
        paths = _folder(main)
        if not paths:
            raise _error("no configuration sources found: the folder holds no .yml or .yaml file", main)
    else:
        paths = [main]
    return [Source(str(entry), _read(entry)) for entry in paths]


def load_path(path: str | os.PathLike[str], environ: Mapping[str, str], *, strict: bool = False) -> Loaded:
    """Read and load in one, asking the file system about `store.path` too. Raises ConfigError."""
    from qmflask.config import load  # and only now what it needs

    return load(read_sources(path), environ, strict=strict, path_fault=path_fault)


def path_fault(path: str) -> str | None:
    """Why a file cannot be written at `path`, by access rights; None when it can."""
    if os.path.isdir(path):
        return f"{path!r} is a directory; name a file in it"
    target = path if os.path.lexists(path) else os.path.dirname(path) or "."
    try:
        usable = os.access(target, os.W_OK)
    except ValueError:
        usable = False
    return None if usable else f"{path!r} is not writable: check that {target!r} exists and may be written"


def fingerprint(path: str | os.PathLike[str]) -> Fingerprint:
    """What identifies the content behind a file or folder, links resolved; empty while nothing is there."""
    main = Path(path)
    try:
        paths = _folder(main) if os.path.isdir(main) else [main]
        found = [(os.path.realpath(entry), os.stat(entry)) for entry in paths]
    except (OSError, ConfigError):
        return ()
    return tuple((name, stats.st_mtime_ns, stats.st_ino, stats.st_size) for name, stats in found)


def mark_of(path: str | os.PathLike[str]) -> str:
    """The fingerprint as text, "" while it cannot be taken (an editor is renaming the file)."""
    try:
        return repr(fingerprint(path))
    except OSError:
        return ""


def resolved_path(folder: str | os.PathLike[str], generation: int) -> Path:
    """Where the resolved configuration of a generation is kept."""
    return Path(folder) / f"config-{generation}.json"


def write_resolved(folder: str | os.PathLike[str], generation: int, config: Config) -> Path:
    """Write the resolved configuration, readable by its owner only and whole or not at all. Raises OSError."""
    target = resolved_path(folder, generation)
    descriptor, name = tempfile.mkstemp(prefix=".config-", dir=folder)  # mkstemp makes it 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(config.to_json())
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
    return target


def read_resolved(folder: str | os.PathLike[str], generation: int) -> Config:
    """What `write_resolved` wrote. Raises OSError when it is gone, ValueError when it is not whole."""
    return Config.from_json(resolved_path(folder, generation).read_bytes())


def forget_resolved(folder: str | os.PathLike[str], generation: int) -> None:
    """Remove the resolved files that nobody will read any more, now that `generation` is in force: they may hold keys.

    Those just before it may still be asked for by a worker that is behind, the one after it may be being published.
    """
    for path in Path(folder).glob("config-*.json"):
        number = path.stem.removeprefix("config-")
        if number.isdigit() and not generation - _KEPT < int(number) <= generation + 1:
            path.unlink(missing_ok=True)


def _check_apart(main: Path, folder: Path) -> None:
    if main.resolve().parent == folder.resolve() and main.name in {entry.name for entry in _folder(folder)}:
        raise _error(f"{str(main)!r} is also present in -config-dir {str(folder)!r}: name it once", main)


def _folder(folder: Path) -> list[Path]:
    try:
        names = [name for name in os.listdir(folder) if name.endswith(_SUFFIXES)]
    except OSError as error:
        raise _error(f"the folder cannot be read: {error.strerror}", folder) from None
    paths = [folder / name for name in sorted(names, key=os.fsencode)]
    return [entry for entry in paths if not os.path.isdir(entry)]


def _read(path: Path) -> str:
    try:
        # Non-blocking, or a FIFO in the folder would stop the service for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _error("not a regular file", path)
            data = file.read(MAX_TEXT + 1)
    except OSError as error:
        raise _error(f"the file cannot be read: {error.strerror}", path) from None
    if len(data) > MAX_TEXT:
        raise _error(f"the file is larger than {MAX_TEXT // 1024 // 1024} MiB", path)
    try:
        return data.decode(_encoding(data))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError([Problem("error", "the file is not UTF-8 text", str(path), line, 1)]) from None


def _encoding(data: bytes) -> str:
    """UTF-8, or UTF-16 where a byte order mark says so, as YAML has it."""
    return "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8"


def _error(message: str, path: Path) -> ConfigError:
    return ConfigError([Problem("error", message, str(path))])

"""Where things are: the configuration's source and the state directory, by environment and default."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path


def is_there(path: Path) -> bool:
    """Whether something is at `path`. Raises PermissionError where that cannot be known; `exists` may say no then."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def find_our_commands() -> None:
    """Put the commands of this environment (`qmflask-demo`) into PATH, for models, although it is not activated.

    Last: they never hide a command of yours.
    """
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    ours = os.path.join(sys.prefix, "bin")
    if ours not in path:
        os.environ["PATH"] = os.pathsep.join([*path, ours])


def source_path() -> Path:
    """The configuration's file or folder: `QMFLASK_CONFIG`, else the demonstration."""
    given = os.environ.get("QMFLASK_CONFIG")
    return Path(given).expanduser().absolute() if given else demonstration()


def demonstration() -> Path:
    """The shipped configuration: the one of the repository, where its readers change it, else the package's."""
    package = Path(__file__).resolve().parent
    in_repository = package.parent / "conf" / "quartermaster.yaml"
    return in_repository if in_repository.exists() else package / "conf" / "quartermaster.yaml"


def state_path(source: Path) -> Path:
    """The state directory: `QMFLASK_STATE`, systemd's `$STATE_DIRECTORY`, else one for each configuration path."""
    for name in ("QMFLASK_STATE", "STATE_DIRECTORY"):
        given = os.environ.get(name)
        if given:
            return Path(given.split(":")[0]).expanduser().absolute()
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base / "qmflask" / hashlib.sha256(str(source).encode()).hexdigest()[:12]

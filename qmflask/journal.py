"""qmflask's own log: lines in one form, appended by all workers to one size-capped file and written to stdout."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from qmflask.logfiles import DEFAULT_CAP, ModelLog

#: Bytes between two looks at the file's size.
_LOOK_EVERY = 256 * 1024

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
_NAMES = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARN", logging.ERROR: "ERROR"}
_NAMES[logging.CRITICAL] = "ERROR"


def level_of(name: str) -> int:
    """The logging level of a `logLevel` value; unknown words mean info (compatibility 1.3)."""
    return LEVELS.get(name.strip().lower().replace("warning", "warn"), logging.INFO)


class ServiceLog(ModelLog):
    """The file of qmflask's own log; shortened in place like a model's, so that followers never lose their place."""

    def __init__(self, folder: str | os.PathLike[str], cap: int = DEFAULT_CAP) -> None:
        super().__init__(folder, "", cap)
        self.path = Path(folder) / "qmflask.log"  # no model's log: those end in a hash
        self.previous = self.path.with_name(self.path.name + ".1")


def timestamp(style: str, when: float) -> str:
    """The time stamp of a `logTimeFormat` value, with a space after it; "" for names that are not known."""
    make = _FORMATS.get(style.strip().lower())
    return make(datetime.fromtimestamp(when).astimezone()) + " " if make else ""


def _strftime(pattern: str) -> Callable[[datetime], str]:
    return lambda when: when.strftime(pattern)


def _offset(when: datetime) -> str:
    text = when.strftime("%z")
    return "Z" if text == "+0000" else f"{text[:3]}:{text[3:]}"


_FORMATS: dict[str, Callable[[datetime], str]] = {
    "ansic": _strftime("%a %b %e %H:%M:%S %Y"),
    "unixdate": _strftime("%a %b %e %H:%M:%S %Z %Y"),
    "rubydate": _strftime("%a %b %d %H:%M:%S %z %Y"),
    "rfc822": _strftime("%d %b %y %H:%M %Z"),
    "rfc822z": _strftime("%d %b %y %H:%M %z"),
    "rfc850": _strftime("%A, %d-%b-%y %H:%M:%S %Z"),
    "rfc1123": _strftime("%a, %d %b %Y %H:%M:%S %Z"),
    "rfc1123z": _strftime("%a, %d %b %Y %H:%M:%S %z"),
    "rfc3339": lambda when: when.strftime("%Y-%m-%dT%H:%M:%S") + _offset(when),
    "rfc3339nano": lambda when: when.strftime("%Y-%m-%dT%H:%M:%S.%f") + _offset(when),
    "kitchen": lambda when: when.strftime("%I:%M%p").lstrip("0"),
    "stamp": _strftime("%b %e %H:%M:%S"),
    "stampmilli": lambda when: when.strftime("%b %e %H:%M:%S.") + f"{when.microsecond // 1000:03}",
    "stampmicro": _strftime("%b %e %H:%M:%S.%f"),
    "stampnano": lambda when: when.strftime("%b %e %H:%M:%S.%f") + "000",
}


def one_line(text: str) -> str:
    """Text that cannot end its line or steer a terminal: control characters are written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, however much the descriptor takes at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Journal:
    """Appends whole lines to the log file and, if wanted, to stdout. Thread-safe; opens its file at the first line."""

    def __init__(self, folder: Path, *, stdout: bool = True, cap: int = DEFAULT_CAP) -> None:
        self._file = ServiceLog(folder, cap)
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._since_look = 0
        self._failed = False
        self.stdout = stdout

    def write(self, lines: bytes) -> None:
        """Append complete lines; other workers' lines never end up inside them."""
        if self.stdout:
            to_stdout(lines)
        with self._lock:
            try:
                self._append(lines)
                self._failed = False
            except OSError as error:
                if not self._failed:  # once, and not through logging: that is who calls
                    print(f"[WARN] {self._file.path} cannot be written: {error}", file=sys.stderr, flush=True)
                self._failed = True
                self._close()

    def _append(self, lines: bytes) -> None:
        if self._fd is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self._file.path, flags, 0o600)
        write_all(self._fd, lines)
        self._since_look += len(lines)
        if self._since_look > _LOOK_EVERY:
            self._since_look = 0
            self._file.trim()

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def to_stdout(lines: bytes) -> None:
    """Whole lines past Python's buffer; under mod_wsgi stdout is Apache's log, which has no descriptor."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:
        sys.stdout.write(lines.decode("utf-8", "replace"))
        return
    write_all(descriptor, lines)


class JournalHandler(logging.Handler):
    """The handler of the `qmflask` loggers: `[LEVEL] text`, or one JSON object a line."""

    def __init__(self, journal: Journal, *, as_json: bool = False) -> None:
        super().__init__()
        self.journal = journal
        self.as_json = as_json
        self.time_format = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; what goes wrong is told the way logging tells it."""
        try:
            self.journal.write(self.line(record))
        except Exception:
            self.handleError(record)

    def line(self, record: logging.LogRecord) -> bytes:
        """The record as bytes, with its line end."""
        level = _NAMES.get(record.levelno, record.levelname)
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
        message = record.getMessage()
        if self.as_json:
            row = {"time": record.created, "level": level.lower(), "pid": record.process, "message": message}
            text = json.dumps({**row, "trace": trace} if trace else row)
        else:
            text = f"{timestamp(self.time_format, record.created)}[{level}] {one_line(message)}"
            text += "\n" + trace if trace else ""
        return text.encode("utf-8", "backslashreplace") + b"\n"

    def close(self) -> None:
        """Close the journal with the handler."""
        self.journal.close()
        super().close()


def wants_json() -> bool:
    """Whether the log is JSON lines: `QMFLASK_LOG=json`."""
    return os.environ.get("QMFLASK_LOG", "").strip().lower() == "json"


def install(folder: Path, *, as_json: bool = False) -> None:
    """Give the `qmflask` loggers of this process their handler, once; gunicorn keeps its own."""
    root = logging.getLogger("qmflask")
    if not any(isinstance(handler, JournalHandler) for handler in root.handlers):
        root.addHandler(JournalHandler(Journal(folder), as_json=as_json))
        root.setLevel(logging.INFO)
        root.propagate = False


def configure(level: str, time_format: str, *, stdout: bool) -> None:
    """Apply `logLevel`, `logTimeFormat` and `logToStdout` to what `install` made; cheap when nothing has changed."""
    root = logging.getLogger("qmflask")
    if root.level != level_of(level):
        root.setLevel(level_of(level))
    for handler in root.handlers:
        if isinstance(handler, JournalHandler):
            handler.time_format = time_format
            handler.journal.stdout = stdout

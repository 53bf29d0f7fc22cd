"""How a line of the access log looks; pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from qmflask.journal import one_line, timestamp

#: One word that needs no quotes in a text line.
_PLAIN = re.compile(r"[\w.:/@+-]+")
#: Texts whose form in a line is remembered: most lines repeat routes, agents and names.
_REMEMBERED = 256


@dataclass(slots=True)
class Access:
    """One line of the access log; what is None in `more` is left out."""

    remote: str
    method: str
    target: str
    protocol: str
    status: int
    bytes: int
    agent: str
    duration_ms: float
    id: str
    more: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LineStyle:
    """How access lines look: text with `logTimeFormat`, or one JSON object a line."""

    time_format: str = ""
    as_json: bool = False

    def line(self, when: float, access: Access) -> bytes:
        """One whole line. The query is left out of neither form; bodies are in none."""
        if self.as_json:
            return _json_line(when, access)
        tail = "".join(
            [
                f" {name}={value:.1f}" if type(value) is float else f" {name}={_word(value)}"
                for name, value in access.more.items()
                if value is not None
            ]
        )
        stamp = timestamp(self.time_format, when) if self.time_format else ""
        text = (
            f"{stamp}[INFO] {one_line(access.remote)}"
            f" {_quoted(f'{access.method} {access.target} {access.protocol}')} {access.status}"
            f" {access.bytes} {_quoted(access.agent)} {access.duration_ms:.1f}ms id={access.id}{tail}\n"
        )
        return text.encode("utf-8", "backslashreplace")


def _json_line(when: float, access: Access) -> bytes:
    row = {
        "time": when,
        "level": "info",
        "id": access.id,
        "remote": access.remote,
        "method": access.method,
        "target": access.target,
        "status": access.status,
        "bytes": access.bytes,
        "agent": access.agent,
        "duration_ms": _short(access.duration_ms),
    }
    more = {name: _short(value) for name, value in access.more.items() if value is not None}
    return json.dumps({**row, **more}).encode() + b"\n"


def _short(value: Any) -> Any:
    return round(value, 1) if isinstance(value, float) else value


def _word(value: Any) -> str:
    """A value in a text line: bare where it is one plain word, else quoted."""
    return _text(value) if isinstance(value, str) else str(value)


@lru_cache(_REMEMBERED)
def _text(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else _quoted(text)


@lru_cache(_REMEMBERED)
def _quoted(text: str) -> str:
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return json.dumps(one_line(text), ensure_ascii=False)

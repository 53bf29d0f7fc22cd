"""Tables and small figures as the commands print them."""

from __future__ import annotations

from collections.abc import Sequence

import click

GIB = 1 << 30
#: Begins the end of its log in the failure of a model.
_LOG = "; last log lines: "


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns two spaces apart, the heads in bold; what could steer a terminal is escaped."""
    cells = [tuple(heads), *(tuple(plain(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [click.style(lines[0], bold=True), *lines[1:]]


def plain(text: str) -> str:
    """Text that cannot steer a terminal."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def size(count: int | None) -> str:
    """Bytes as GiB, `?` for an unknown size."""
    return f"{count / GIB:.1f}" if count else "?"


def brief(model: str, message: str) -> str:
    """The failure of a model in one line, without its name and its log, which stand elsewhere."""
    return plain(message.splitlines()[0] if message else "").removeprefix(f"model {model}: ").partition(_LOG)[0]


def plural(number: int, word: str) -> str:
    """`1 model`, `2 models`."""
    return f"{number} {word}" + ("" if number == 1 else "s")


def span(seconds: float | None) -> str:
    """A time as people say it: `7s`, `3m20s`, `2h05m`; `-` for none."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"

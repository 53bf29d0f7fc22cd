"""Inserts many rows with few statements: each statement gives up the interpreter's lock and has to get it back."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

#: Rows of one statement, the most first; times the columns of the widest table they stay below SQLite's old limit of
#: 999 values.
_SIZES = (32, 8, 1)


def insert(
    tx: sqlite3.Connection, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], conflict: str = ""
) -> None:
    """`INSERT INTO table (columns) VALUES ... conflict` of all rows, inside the caller's transaction."""
    done = 0
    for size in _SIZES:
        statement = _statement(table, tuple(columns), size, conflict)
        while len(rows) - done >= size:
            tx.execute(statement, list(chain.from_iterable(rows[done : done + size])))
            done += size


@lru_cache
def _statement(table: str, columns: tuple[str, ...], rows: int, conflict: str) -> str:
    values = f"({', '.join('?' * len(columns))})"
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES {', '.join([values] * rows)} {conflict}"

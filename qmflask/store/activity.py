"""`activity.db`: what was served, captures, counters and progress; never the state that scheduling depends on."""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from qmflask.store import bulk, counters
from qmflask.store.counters import Sum, Tally

VERSION = 2
_SIZES = ("page_count", "freelist_count", "page_size")
#: Records, and pages, that one step of a pruning removes.
_SLICE = 500

SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    time INTEGER NOT NULL,                         -- whole seconds since the epoch
    request TEXT NOT NULL, model TEXT NOT NULL, req_path TEXT NOT NULL, resp_status_code INTEGER NOT NULL,
    resp_content_type TEXT NOT NULL, prompt INTEGER NOT NULL, generated INTEGER NOT NULL, cached INTEGER NOT NULL,
    prompt_speed REAL NOT NULL, gen_speed REAL NOT NULL, drafted INTEGER NOT NULL, accepted INTEGER NOT NULL,
    duration INTEGER NOT NULL,                     -- ms, as are the next three; NULL where there was none
    wait REAL, load REAL, first_byte REAL, bytes INTEGER NOT NULL, key_name TEXT NOT NULL, remote TEXT NOT NULL,
    error_msg TEXT, metadata TEXT, has_capture INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS records_by_time ON records (time);
CREATE INDEX IF NOT EXISTS records_by_model ON records (model, id);
CREATE TABLE IF NOT EXISTS captures (
    record INTEGER PRIMARY KEY, size INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS progress (              -- requests in flight, only while somebody looks
    request TEXT PRIMARY KEY, worker TEXT NOT NULL, bytes INTEGER NOT NULL, headers TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS slots (                 -- of each worker, living or not
    worker TEXT NOT NULL, kind TEXT NOT NULL, total INTEGER NOT NULL, taken INTEGER NOT NULL,
    PRIMARY KEY (worker, kind)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS performance (time REAL PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
    + counters.SCHEMA
)

#: `sort` of `/api/metrics/activity` (compatibility 6.4) -> column.
SORTS = {name: name for name in ("id", "time", "model", "req_path", "resp_status_code", "resp_content_type", "cached")}
SORTS |= {name: name for name in ("prompt", "generated", "drafted", "prompt_speed", "gen_speed", "duration")}


class ActivityError(Exception):
    """Raised when the activity store cannot be read or written; nothing else is hurt."""


class Record(NamedTuple):
    """One served request, as its row. Times in ms; token counts and speeds are -1 where the answer did not say."""

    time: int
    request: str
    model: str
    req_path: str
    resp_status_code: int
    resp_content_type: str = ""
    prompt: int = 0
    generated: int = 0
    cached: int = 0
    prompt_speed: float = 0
    gen_speed: float = 0
    drafted: int = 0
    accepted: int = 0
    duration: int = 0
    wait: float | None = None
    load: float | None = None
    first_byte: float | None = None
    bytes: int = 0
    key_name: str = ""
    remote: str = ""
    error_msg: str | None = None
    metadata: str | None = None
    has_capture: int = 0
    id: int = 0


_COLUMNS = Record._fields[:-1]  # without the id
_SELECT = f"SELECT {', '.join(_COLUMNS)}, id FROM records"


@dataclass(frozen=True, slots=True)
class Filter:
    """Which records: `models` empty = all; times in whole seconds and ids are inclusive."""

    models: tuple[str, ...] = ()
    start: int | None = None
    end: int | None = None
    min_id: int | None = None
    max_id: int | None = None
    failed: bool = False

    def where(self) -> tuple[str, list[Any]]:
        """The condition and its parameters."""
        parts, values = ["1"], list[Any](self.models)
        if self.models:
            parts.append(f"model IN ({', '.join('?' * len(self.models))})")
        if self.failed:
            parts.append("resp_status_code >= 400")
        for column, operator, value in (
            ("time", ">=", self.start),
            ("time", "<=", self.end),
            ("id", ">=", self.min_id),
            ("id", "<=", self.max_id),
        ):
            if value is not None:
                parts.append(f"{column} {operator} ?")
                values.append(value)
        return " AND ".join(parts), values


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept: 0 means no limit."""

    records: int = 0
    days: float = 0
    bytes: int = 0
    capture_bytes: int = 0


class ActivityStore:
    """One connection to `activity.db`, shared by the threads of a process. Build it after fork.

    Every method raises ActivityError for whatever SQLite says; the next call opens the file anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                connection = self._connection = self._connection or self._open()
                connection.execute(begin)
                yield connection
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                self._drop()
                raise ActivityError(f"{self.path}: {error}") from error
            except BaseException:
                self._drop()
                raise

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=5, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA secure_delete=ON")  # captures hold prompts: deleted means gone
            self._migrate(connection)
            self.path.chmod(0o600)
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == VERSION:
            return
        if version > VERSION:
            raise ActivityError(f"{self.path} was written by a newer qmflask (version {version})")
        connection.execute("BEGIN IMMEDIATE")
        code = "\n".join(line.split("--", 1)[0] for line in SCHEMA.splitlines())
        for statement in code.split(";"):
            if statement.strip():
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version={VERSION}")
        connection.execute("COMMIT")

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()  # rolls back what was open

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._drop()

    def gone(self) -> bool:
        """True when the file was removed under us; the next call then makes a new one."""
        if self._connection is None or self.path.exists():
            return False
        self.close()
        return True

    # -- writing ----------------------------------------------------------------------------------------------

    def add(self, rows: Sequence[tuple[Record, bytes | None]], tally: Tally) -> None:
        """Write records, each with its packed capture if it has one, and their counters, in one transaction."""
        with self._transaction("BEGIN IMMEDIATE") as tx:
            ids = range(_last_id(tx) + 1, sys.maxsize)
            served = [(*record[:-1], at) for at, (record, _) in zip(ids, rows, strict=False)]
            kept = [(at, len(body), body) for at, (_, body) in zip(ids, rows, strict=False) if body is not None]
            bulk.insert(tx, "records", (*_COLUMNS, "id"), served)
            bulk.insert(tx, "captures", ("record", "size", "body"), kept)
            counters.write(tx, tally)

    def prune(self, keep: Retention, now: float) -> None:
        """Delete what is too old or too much, oldest first, and give the space back; in slices, so that neither
        writers nor readers wait for more than one of them."""
        with self._transaction("BEGIN IMMEDIATE") as tx:
            self._prune_captures(tx, keep.capture_bytes)
            tx.execute("DELETE FROM performance WHERE time < ?", (now - 3600,))
            upto = self._surplus(tx, keep)
        self._delete("id <= ?", upto)
        if keep.days:
            self._delete("time < ?", int(now - keep.days * 86400))
        while self._vacuum():
            pass

    def _surplus(self, tx: sqlite3.Connection, keep: Retention) -> int:
        """The newest record that is too much; 0 if none is."""
        oldest, newest = tx.execute("SELECT COALESCE(MIN(id), 1), COALESCE(MAX(id), 0) FROM records").fetchone()
        upto: int = newest - keep.records if keep.records else 0
        if keep.bytes and (size := self._size(tx)) > keep.bytes:
            part = min(1.0, (size - keep.bytes) / size + 0.1)
            upto = max(upto, oldest + int((newest - oldest + 1) * part) - 1)
        return upto

    def _delete(self, which: str, limit: int) -> None:
        slice_ = f"(SELECT id FROM records WHERE {which} ORDER BY id LIMIT {_SLICE})"
        while True:
            with self._transaction("BEGIN IMMEDIATE") as tx:
                tx.execute(f"DELETE FROM captures WHERE record IN {slice_}", (limit,))
                gone = tx.execute(f"DELETE FROM records WHERE id IN {slice_}", (limit,)).rowcount
            if gone < _SLICE:
                return

    def _vacuum(self) -> bool:
        """Give some free pages back; True while there are more."""
        with self._lock:
            try:
                if self._connection is None:
                    return False
                # Not execute(), which stops after the first page; outside any transaction, as this must be.
                self._connection.executescript(f"PRAGMA incremental_vacuum({_SLICE})")
                return bool(self._connection.execute("PRAGMA freelist_count").fetchone()[0])
            except sqlite3.Error as error:
                self._drop()
                raise ActivityError(f"{self.path}: {error}") from error

    @staticmethod
    def _size(tx: sqlite3.Connection) -> int:
        """Bytes in use, free pages left out."""
        pages, free, size = (tx.execute(f"PRAGMA {n}").fetchone()[0] for n in _SIZES)
        return int((pages - free) * size)

    @staticmethod
    def _prune_captures(tx: sqlite3.Connection, limit: int) -> None:
        too_much = tx.execute("SELECT COALESCE(SUM(size), 0) FROM captures").fetchone()[0] - limit
        if too_much <= 0:
            return
        oldest = upto = None
        for record, size in tx.execute("SELECT record, size FROM captures ORDER BY record"):
            oldest, upto, too_much = record if oldest is None else oldest, record, too_much - size
            if too_much <= 0:
                break
        tx.execute("DELETE FROM captures WHERE record <= ?", (upto,))
        tx.execute("UPDATE records SET has_capture = 0 WHERE id BETWEEN ? AND ?", (oldest, upto))

    def begin_service(self, master: str) -> None:
        """The first worker of a new master: captures hold prompts and are not kept over a restart of the service."""
        with self._transaction("BEGIN IMMEDIATE") as tx:
            row = tx.execute("SELECT value FROM meta WHERE name = 'master'").fetchone()
            if row is None or row["value"] != master:
                tx.execute("INSERT OR REPLACE INTO meta (name, value) VALUES ('master', ?)", (master,))
                tx.execute("DELETE FROM captures")
                tx.execute("UPDATE records SET has_capture = 0 WHERE has_capture <> 0")
                tx.execute("DELETE FROM progress")
                tx.execute("DELETE FROM slots")

    # -- progress of what is in flight ------------------------------------------------------------------------

    def watch(self, until: float) -> None:
        """Ask all workers to publish the progress of their requests until this time (monotonic seconds)."""
        with self._transaction("BEGIN IMMEDIATE") as tx:
            tx.execute("INSERT OR REPLACE INTO meta (name, value) VALUES ('watched', ?)", (str(until),))

    def watched_until(self) -> float:
        """Until when somebody looks (monotonic seconds; of another boot, if the file is that old)."""
        with self._transaction("BEGIN") as tx:
            row = tx.execute("SELECT value FROM meta WHERE name = 'watched'").fetchone()
            return float(row["value"]) if row else 0.0

    def publish(self, worker: str, rows: Mapping[str, tuple[int, str]]) -> None:
        """Replace the progress of one worker's requests: id -> (bytes, JSON of the answer's headers)."""
        with self._transaction("BEGIN IMMEDIATE") as tx:
            tx.execute("DELETE FROM progress WHERE worker = ?", (worker,))
            values = [(request, worker, size, headers) for request, (size, headers) in rows.items()]
            tx.executemany("INSERT INTO progress (request, worker, bytes, headers) VALUES (?, ?, ?, ?)", values)

    def publish_slots(self, worker: str, slots: Mapping[str, tuple[int, int]]) -> None:
        """Replace what is known of one worker's slots: kind -> (all, taken)."""
        with self._transaction("BEGIN IMMEDIATE") as tx:
            values = [(worker, kind, total, taken) for kind, (total, taken) in slots.items()]
            tx.executemany("INSERT OR REPLACE INTO slots (worker, kind, total, taken) VALUES (?, ?, ?, ?)", values)

    def slots(self) -> list[tuple[str, str, int, int]]:
        """Worker, kind, all and taken slots, of workers that may be gone."""
        with self._transaction("BEGIN") as tx:
            return [tuple(row) for row in tx.execute("SELECT worker, kind, total, taken FROM slots")]

    def progress(self) -> dict[str, tuple[int, str]]:
        """Bytes and answer headers (JSON) by request id, as far as published."""
        with self._transaction("BEGIN") as tx:
            return {row["request"]: (row["bytes"], row["headers"]) for row in tx.execute("SELECT * FROM progress")}

    # -- performance ------------------------------------------------------------------------------------------

    def add_performance(self, when: float, body: str) -> None:
        """Store one reading of host and cards (JSON); what was stored for later times is of a clock set back since."""
        with self._transaction("BEGIN IMMEDIATE") as tx:
            tx.execute("DELETE FROM performance WHERE time > ?", (when,))
            tx.execute("INSERT OR REPLACE INTO performance (time, body) VALUES (?, ?)", (when, body))

    def performance(self, after: float) -> list[tuple[float, str]]:
        """The readings after a time (wall seconds), oldest first."""
        with self._transaction("BEGIN") as tx:
            query = "SELECT time, body FROM performance WHERE time > ? ORDER BY time"
            return [(row["time"], row["body"]) for row in tx.execute(query, (after,))]

    def newest_performance(self) -> str | None:
        """The newest reading (JSON), None before the first."""
        with self._transaction("BEGIN") as tx:
            row = tx.execute("SELECT body FROM performance ORDER BY time DESC LIMIT 1").fetchone()
            return row["body"] if row else None

    # -- reading ----------------------------------------------------------------------------------------------

    def page(self, which: Filter, sort: str, descending: bool, limit: int, page: int) -> tuple[list[Record], int]:
        """One page of records and how many there are; `sort` is a key of SORTS, ties go by id the same way."""
        where, values = which.where()
        order = "DESC" if descending else "ASC"
        query = f"{_SELECT} WHERE {where} ORDER BY {SORTS[sort]} {order}, id {order} LIMIT ? OFFSET ?"
        with self._transaction("BEGIN") as tx:
            total = tx.execute(f"SELECT COUNT(*) FROM records WHERE {where}", values).fetchone()[0]
            rows = tx.execute(query, [*values, limit, (page - 1) * limit]).fetchall()
        return [Record(**dict(row)) for row in rows], total

    def last_id(self) -> int:
        """The id of the newest record ever written, 0 before the first."""
        with self._transaction("BEGIN") as tx:
            return _last_id(tx)

    def last_used(self, models: Iterable[str]) -> dict[str, int]:
        """When each model was asked last (wall seconds); those that were not, or so long ago, are left out."""
        query = "SELECT time FROM records WHERE model = ? ORDER BY id DESC LIMIT 1"
        with self._transaction("BEGIN") as tx:
            found = {model: tx.execute(query, (model,)).fetchone() for model in models}
        return {model: row[0] for model, row in found.items() if row is not None}

    def totals(self, model: str | None) -> dict[str, int]:
        """Number of requests and sums of their tokens; counts that are not known are left out."""
        names = ("prompt", "generated", "cached")
        sums = ", ".join(f"COALESCE(SUM(MAX({name}, 0)), 0) AS {name}" for name in names)
        where, values = Filter((model,) if model else ()).where()
        with self._transaction("BEGIN") as tx:
            return dict(
                tx.execute(f"SELECT COUNT(*) AS requests, {sums} FROM records WHERE {where}", values).fetchone()
            )

    def speeds(self, model: str | None, column: str) -> list[float]:
        """All known speeds (`prompt_speed` or `gen_speed`), lowest first."""
        assert column in ("prompt_speed", "gen_speed")
        where, values = Filter((model,) if model else ()).where()
        query = f"SELECT {column} FROM records WHERE {where} AND {column} > 0 ORDER BY {column}"
        with self._transaction("BEGIN") as tx:
            return [row[0] for row in tx.execute(query, values)]

    def capture(self, record: int) -> bytes | None:
        """A packed capture, None if there is none (any more)."""
        with self._transaction("BEGIN") as tx:
            row = tx.execute("SELECT body FROM captures WHERE record = ?", (record,)).fetchone()
            return row["body"] if row else None

    def counters(self) -> Sequence[Sum]:
        """Every counter."""
        with self._transaction("BEGIN") as tx:
            return list(counters.read(tx))

    def check(self) -> str:
        """SQLite's own word on the file's integrity: "ok"."""
        with self._transaction("BEGIN") as tx:
            return str(tx.execute("PRAGMA integrity_check").fetchone()[0])


def _last_id(tx: sqlite3.Connection) -> int:
    row = tx.execute("SELECT seq FROM sqlite_sequence WHERE name = 'records'").fetchone()
    return int(row[0]) if row else 0

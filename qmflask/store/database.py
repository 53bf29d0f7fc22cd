"""Opening `state.db`: connection, schema, boot check, and the only kind of write transaction there is."""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from qmflask import errors
from qmflask.store.schema import FORGET_ON_BOOT, SCHEMA, SCHEMA_VERSION, TRIGGERS

log = logging.getLogger(__name__)

#: An open transaction, as the functions of this package take it; made by `Store.write` and `Store.read`.
Transaction = sqlite3.Connection

#: How long a statement waits for another process's write transaction, in milliseconds.
BUSY_TIMEOUT_MS = 5000

#: Tells whether a database has exactly the tables of this code; kept in its `application_id`.
_TABLES = zlib.crc32(f"{SCHEMA}{TRIGGERS}".encode()) & 0x7FFFFFFF

_NETWORK_FILESYSTEMS = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "fuse.sshfs",
    "ceph",
    "glusterfs",
    "lustre",
}


class StoreError(Exception):
    """Raised when the state directory cannot be used; the message says what to do."""


class StoreTooNew(StoreError):
    """Raised when the database was written by a newer major version of qmflask."""


class Deposed(Exception):
    """Raised by a leader's write when the term in the store is no longer its own."""


def prepare_state_directory(path: Path) -> list[str]:
    """Create `path` (0700) with its sub-folders; returns warnings. Raises StoreError where it cannot serve.

    The directory must be local: SQLite's WAL and flock do not hold over a network file system.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o700)
        for name in ("spawn", "wake", "logs"):
            (path / name).mkdir(mode=0o700, exist_ok=True)
    except OSError as err:
        raise StoreError(
            f"state directory {path}: {err.strerror}; set QMFLASK_STATE to a writable local folder"
        ) from err
    return place_faults(path)


def place_faults(path: Path) -> list[str]:
    """Warnings about where an existing state directory is. Raises StoreError where locks do not hold."""
    kind = _filesystem_of(path)
    if kind in _NETWORK_FILESYSTEMS:
        raise StoreError(
            f"state directory {path} is on {kind}; locks do not hold there, set QMFLASK_STATE to a local folder"
        )
    if path.resolve().parts[:2] in (("/", "tmp"),) or path.resolve().parts[:3] == ("/", "var", "tmp"):
        return [f"state directory {path} is in a folder that is cleaned regularly; set QMFLASK_STATE to a lasting one"]
    return []


def _filesystem_of(path: Path) -> str:
    """Type of the file system that holds `path`, by the longest mount point in /proc/self/mounts."""
    best, kind = "", ""
    target = str(path.resolve())
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, mount, fstype, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fstype
    return kind


class Store:
    """One connection to `state.db`, shared by the threads of a process behind a lock.

    Build it after fork. `boot_id` is this boot's; rows of another boot are dropped on open.
    """

    def __init__(self, directory: Path, boot_id: str) -> None:
        self.directory = directory
        self.path = directory / "state.db"
        self.boot_id = boot_id
        self._lock = threading.RLock()
        #: Called when a write finds the disk full; the owner frees some room.
        self.on_full: Callable[[], None] = lambda: None
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        """Open, or set a damaged file aside and begin anew: what lives is then entered again (see `rebuild`)."""
        if not self.path.exists():
            with _alone(self.directory):
                if not self.path.exists():
                    set_aside(self.path)  # a WAL that was left is not the new file's
                return self._connect()
        try:
            return self._connect()
        except sqlite3.DatabaseError as err:
            if not _damaged(err):
                raise
        with _alone(self.directory):
            try:
                return self._connect()  # somebody else may have set it aside meanwhile
            except sqlite3.DatabaseError as err:
                if not _damaged(err):
                    raise
                log.error("%s is damaged (%s): setting it aside and beginning anew", self.path, err)
            set_aside(self.path)
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path,
            timeout=BUSY_TIMEOUT_MS / 1000,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        connection.row_factory = sqlite3.Row
        try:
            # Each transaction writes whole pages, a few bytes of each: small ones are checksummed and copied sooner.
            # It takes effect where the file is new.
            connection.execute("PRAGMA page_size=1024")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA wal_autocheckpoint=4000")  # 4 MB; each one syncs the disk twice
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise StoreTooNew(
                    f"{self.path} was written by a newer qmflask (version {version}, this one knows {SCHEMA_VERSION}); "
                    "upgrade, or set QMFLASK_STATE to another folder"
                )
            if not self._is_current(connection, version):
                self._migrate(connection)
            connection.execute("PRAGMA busy_timeout=0")  # from here on see `_patiently`
        except BaseException:
            connection.close()
            raise
        self.path.chmod(0o600)
        self._inode = _inode(self.path)
        return connection

    def _is_current(self, connection: sqlite3.Connection, version: int) -> bool:
        """Nothing to write: a worker must be able to come up while somebody else stands still in a write."""
        if version != SCHEMA_VERSION:
            return False
        row = connection.execute("SELECT boot_id FROM scheduler").fetchone()
        tables = connection.execute("PRAGMA application_id").fetchone()[0]
        return row is not None and row["boot_id"] == self.boot_id and tables == _TABLES

    def _migrate(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            _drop_indexes_and_triggers(connection)
            for statement in _statements(SCHEMA):
                connection.execute(statement)
            _add_missing_columns(connection)
            for name, action in TRIGGERS.items():
                connection.execute(f"CREATE TRIGGER {name} {action}")
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            connection.execute(f"PRAGMA application_id={_TABLES}")
            row = connection.execute("SELECT boot_id FROM scheduler").fetchone()
            if row is None:
                connection.execute("INSERT INTO scheduler (id, boot_id) VALUES (1, ?)", (self.boot_id,))
            elif row["boot_id"] != self.boot_id:
                for statement in _statements(FORGET_ON_BOOT):
                    connection.execute(statement)
                connection.execute("UPDATE scheduler SET boot_id = ?", (self.boot_id,))
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    @contextmanager
    def write(self, generation: int | None = None) -> Iterator[sqlite3.Connection]:
        """A write transaction (`BEGIN IMMEDIATE`); commits at the end, rolls back on any exception.

        With `generation` it is a leader's: Deposed is raised unless that is still the term. Raises errors.StoreBusy
        when another process keeps the lock, errors.StoreFull when the disk is full.
        """
        with self._lock:
            connection = self._connection
            try:
                _patiently(connection, "BEGIN IMMEDIATE")
                try:
                    if generation is not None:
                        _check_term(connection, generation)
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
            except sqlite3.DatabaseError as err:
                self._failed(err)

    def statement(self, sql: str, values: Sequence[Any]) -> list[sqlite3.Row]:
        """One statement that is a write transaction of its own; gives its rows. Raises like `write`."""
        with self._lock:
            try:
                return _patiently(self._connection, sql, values)[1]
            except sqlite3.DatabaseError as err:
                self._failed(err)

    def insert(self, sql: str, values: Sequence[Any]) -> int | None:
        """One INSERT of one row that is a write transaction of its own; the row's id, None if its condition failed."""
        with self._lock:
            try:
                cursor, _ = _patiently(self._connection, sql, values)
                return cursor.lastrowid if cursor.rowcount else None
            except sqlite3.DatabaseError as err:
                self._failed(err)

    def _failed(self, err: sqlite3.DatabaseError) -> NoReturn:
        try:
            _tell(err, self.path)
        except errors.StoreFull:
            self.on_full()
            raise

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A read transaction: all its statements see one state of the database.

        Inside this thread's own write it is that transaction, and sees what has been written.
        """
        with self._lock:
            connection = self._connection
            if connection.in_transaction:
                yield connection
                return
            try:
                connection.execute("BEGIN")
                try:
                    _patiently(connection, "SELECT 1 FROM scheduler")  # begins in earnest; waits for a recovery
                    yield connection
                finally:
                    if connection.in_transaction:
                        connection.execute("COMMIT")
            except sqlite3.DatabaseError as err:
                _tell(err, self.path)

    def check_term(self, generation: int) -> None:
        """Raise Deposed unless `generation` is still the term; before a deed that no transaction guards."""
        with self.read() as tx:
            _check_term(tx, generation)

    def replaced(self) -> bool:
        """True when the file at the path is no longer the one we have open (it was removed or replaced)."""
        return _inode(self.path) != self._inode

    def reopen(self) -> None:
        """Open the path anew, after `replaced()`; what is missing of the directory is made again."""
        prepare_state_directory(self.directory)
        with self._lock:
            old, self._connection = self._connection, self._open()
            old.close()

    def close(self) -> None:
        """Close the connection; the store cannot be used afterwards."""
        with self._lock:
            self._connection.close()


def _patiently(
    connection: sqlite3.Connection, sql: str, values: Sequence[Any] = ()
) -> tuple[sqlite3.Cursor, list[sqlite3.Row]]:
    """Execute, again and again while another process has the lock, for BUSY_TIMEOUT_MS.

    SQLite's own handler sleeps a millisecond at least, in which every thread of the process waits for this one;
    the transaction it waits for takes a twentieth of that.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    pause = 0.00005
    while True:
        try:
            cursor = connection.execute(sql, values)
            return cursor, cursor.fetchall()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= deadline:
                raise
        time.sleep(pause)
        pause = min(1.5 * pause, 0.005)


def _damaged(error: sqlite3.DatabaseError) -> bool:
    return any(words in str(error) for words in ("malformed", "not a database", "no such table", "no such column"))


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process at a time judges the database."""
    descriptor = os.open(directory / "state.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def set_aside(path: Path) -> None:
    """Rename a damaged database to `.damaged` (the last one is kept) with its WAL, so that a new one can begin."""
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        try:
            os.replace(part, path.with_name(f"{path.name}.damaged{suffix}"))
        except FileNotFoundError:
            continue


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


def _drop_indexes_and_triggers(connection: sqlite3.Connection) -> None:
    """Those of another version; ours are made again."""
    query = "SELECT type, name FROM sqlite_master WHERE type IN ('index', 'trigger') AND sql IS NOT NULL"
    for kind, name in connection.execute(query).fetchall():
        connection.execute(f"DROP {kind} {name}")


def _add_missing_columns(connection: sqlite3.Connection) -> None:
    """Bring the tables of an older qmflask of the same major version up to date; columns are only ever added."""
    wanted = sqlite3.connect(":memory:")
    try:
        wanted.executescript(SCHEMA)
        tables = [row[0] for row in wanted.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            there = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            for _, name, kind, required, default, _ in wanted.execute(f"PRAGMA table_info({table})"):
                if there and name not in there:
                    rule = f" NOT NULL DEFAULT {default}" if required else ""
                    connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}{rule}")
    finally:
        wanted.close()


def _statements(script: str) -> list[str]:
    """The single statements of a script without its comments; sqlite3's executescript would commit our transaction."""
    code = "\n".join(line.split("--", 1)[0] for line in script.splitlines())
    return [statement for statement in code.split(";") if statement.strip()]


def _check_term(connection: sqlite3.Connection, generation: int) -> None:
    current = connection.execute("SELECT generation FROM scheduler").fetchone()[0]
    if current != generation:
        raise Deposed(f"term {generation} is over, {current} leads")


def _tell(err: sqlite3.DatabaseError, path: Path) -> NoReturn:
    """Raise what a client can be told, or `err` where it is a fault of ours."""
    text = str(err)
    if isinstance(err, sqlite3.OperationalError):
        if "locked" in text or "busy" in text:
            raise errors.StoreBusy(f"the state store stayed locked ({path}); try again", retry_after=1) from err
        if "full" in text or "disk I/O" in text:
            raise errors.StoreFull(f"the disk with {path} is full; free some space", retry_after=10) from err
    if _damaged(err):
        _give_up(path, err)
    raise err


def _give_up(path: Path, err: sqlite3.DatabaseError) -> NoReturn:
    """The file is damaged while we use it: set it aside, so that everybody sees it replaced and opens anew."""
    log.error("%s is damaged (%s): setting it aside", path, err)
    with _alone(path.parent):
        if _is_damaged(path):
            set_aside(path)
    raise errors.StoreBusy(f"the state store was damaged and is being rebuilt ({path})", retry_after=2) from err


def _is_damaged(path: Path) -> bool:
    """Whether what is at the path now is damaged; somebody else may have begun anew."""
    if not path.exists():
        return False
    connection = sqlite3.connect(path, timeout=1)
    try:
        return bool(connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok")
    except sqlite3.OperationalError as err:
        return _damaged(err)
    except sqlite3.DatabaseError:
        return True
    finally:
        connection.close()

"""The tables of `state.db` and what they mean; no code."""

from qmflask.store.counters import SCHEMA as COUNTERS

#: Major version in `PRAGMA user_version`. Code that meets a higher one does not stand for election.
SCHEMA_VERSION = 1

#: Times named `*_at`, `*_until`, `*_since`, `deadline`, `arrival`, `heartbeat` are monotonic nanoseconds of this boot.
#: Times named `*_wall` are seconds since the epoch, for people only.
SCHEMA = """
CREATE TABLE IF NOT EXISTS scheduler (          -- exactly one row
    id                INTEGER PRIMARY KEY CHECK (id = 1),
    boot_id           TEXT    NOT NULL,
    schedule_version  INTEGER NOT NULL DEFAULT 1,  -- bumped by whatever changes what the policy sees
    config_generation INTEGER NOT NULL DEFAULT 0,  -- 0: nothing published yet
    config_fingerprint TEXT   NOT NULL DEFAULT '',
    config_source     TEXT    NOT NULL DEFAULT '', -- the file or folder it was read from
    config_error      TEXT,                        -- why the newest file was not taken
    config_wall       REAL    NOT NULL DEFAULT 0,
    master            TEXT    NOT NULL DEFAULT '', -- identity of the process that forks the workers
    preloaded_for     TEXT    NOT NULL DEFAULT '', -- master for which the preload list was queued
    generation        INTEGER NOT NULL DEFAULT 0,  -- the leader's term
    leader            TEXT,                        -- its worker id
    heartbeat         INTEGER NOT NULL DEFAULT 0,
    active_profile    TEXT
);
CREATE TABLE IF NOT EXISTS workers (
    id          TEXT PRIMARY KEY,                  -- pid-startticks
    pid         INTEGER NOT NULL,
    start_ticks INTEGER NOT NULL,
    master      TEXT    NOT NULL,
    draining    INTEGER NOT NULL DEFAULT 0,
    started_wall REAL   NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS processes (             -- one row a model that was ever started
    model        TEXT PRIMARY KEY,
    state        TEXT    NOT NULL DEFAULT 'stopped',
    generation   INTEGER NOT NULL DEFAULT 0,       -- term that wrote the state
    changed_wall REAL    NOT NULL DEFAULT 0,
    reason       TEXT,                             -- why it is in this state
    used_at      INTEGER NOT NULL DEFAULT 0,       -- last swap to it, grant by the leader or end of a lease
    hold_until   INTEGER NOT NULL DEFAULT 0,
    idle_since   INTEGER NOT NULL DEFAULT 0,       -- last answer's end, or ready
    asked_since  INTEGER NOT NULL DEFAULT 0,       -- first request after its launch settings changed
    token        TEXT,                             -- QMFLASK_TOKEN in its environment
    pid          INTEGER,
    start_ticks  INTEGER,
    port         INTEGER,
    proxy        TEXT,
    launch_hash  TEXT,
    cmd          TEXT,
    cmd_stop     TEXT,                             -- JSON: argv with ${PID} unresolved, env; or NULL
    unload_timeout REAL   NOT NULL DEFAULT 10,
    started_at   INTEGER NOT NULL DEFAULT 0,
    deadline     INTEGER NOT NULL DEFAULT 0,       -- starting: healthy by then; draining (unload), stopping: KILL then
    load_ms      REAL,                             -- how long the last load took
    stop_reason  TEXT,                             -- of its last stop
    stop_wall    REAL,
    exit_code    INTEGER,
    answered     INTEGER NOT NULL DEFAULT 0,       -- this start has answered a request: its size counts
    failure_pool TEXT,                             -- where a start ran out of memory,
    failure_free INTEGER,                          -- and the free bytes then
    failure_code TEXT,                             -- why a start failed, until a success or a change
    failure_message TEXT,
    retry_at     INTEGER NOT NULL DEFAULT 0,
    attempts     INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS swaps (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    target     TEXT    NOT NULL,
    victims    TEXT    NOT NULL,                   -- JSON list, in the order they stop
    blockers   TEXT    NOT NULL DEFAULT '[]',
    reason     TEXT    NOT NULL,
    phase      TEXT    NOT NULL,
    signalled  INTEGER NOT NULL DEFAULT 0,
    retried    INTEGER NOT NULL DEFAULT 0,         -- the one retry after out of memory was used
    created_at INTEGER NOT NULL,
    deadline   INTEGER NOT NULL DEFAULT 0,         -- of the phase, 0: none
    reclaim    TEXT,                               -- JSON: what the gate waits for, per pool
    generation INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS requests (              -- from arrival to end; granted = the lease
    id          INTEGER PRIMARY KEY,               -- when it was entered in ns: it never comes again
    public_id   TEXT    NOT NULL,
    worker      TEXT,                              -- NULL: owned by the leader (preload)
    kind        TEXT    NOT NULL DEFAULT 'infer',  -- infer, load, preload, unload, reload
    model       TEXT    NOT NULL,
    state       TEXT    NOT NULL,                  -- pending, queued, granted, done, failed
    arrival     INTEGER NOT NULL,
    arrival_wall REAL   NOT NULL,
    priority    INTEGER NOT NULL DEFAULT 0,
    patience_at INTEGER NOT NULL DEFAULT 0,
    granted_at  INTEGER,
    ended_at    INTEGER,                           -- written to end a lease: the row goes with it
    answered    INTEGER NOT NULL DEFAULT 0,        -- written then, too: whether the model has worked
    paid        INTEGER NOT NULL DEFAULT 0,        -- this request caused or waited for a load
    cancelled   INTEGER NOT NULL DEFAULT 0,
    error_code  TEXT,
    error_message TEXT,
    retry_after INTEGER,
    detail      TEXT                               -- JSON for the page: method, path, remote, key name
);
CREATE INDEX IF NOT EXISTS requests_waiting ON requests (state) WHERE state <> 'granted';
CREATE TABLE IF NOT EXISTS samples (               -- the newest memory sample
    id   INTEGER PRIMARY KEY CHECK (id = 1),
    at   INTEGER NOT NULL,
    body TEXT    NOT NULL
);
CREATE TABLE IF NOT EXISTS sizes (                 -- learned peaks, kept across restarts
    launch_hash TEXT PRIMARY KEY,
    model       TEXT    NOT NULL,
    vram        INTEGER NOT NULL DEFAULT 0,
    ram         INTEGER NOT NULL DEFAULT 0,
    seen_wall   REAL    NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS floors (                -- lowest trusted foreign use
    device  TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    floor   INTEGER NOT NULL,
    PRIMARY KEY (device, boot_id)
) WITHOUT ROWID;
"""
SCHEMA += COUNTERS

#: What belongs to the end of each lease, so that it is one statement: in a busy process each statement costs two
#: switches between threads. Each page written costs, too: a lease writes one at its beginning, two at its end.
TRIGGERS = {
    "lease_ended": """AFTER UPDATE OF ended_at ON requests BEGIN
        UPDATE processes SET used_at = NEW.ended_at, idle_since = NEW.ended_at, answered = MAX(answered, NEW.answered)
            WHERE model = NEW.model;
        DELETE FROM requests WHERE id = NEW.id;
    END""",
}

#: The id of a new row, bound to the time in monotonic ns. Later than any time before, it is an id that no row had: what
#: somebody still says of a row that has gone must not meet another one's.
NEW_ID = "MAX(?, COALESCE((SELECT MAX(id) FROM requests), 0) + 1)"

#: What another boot makes meaningless.
FORGET_ON_BOOT = """
DELETE FROM swaps; DELETE FROM requests; DELETE FROM workers; DELETE FROM samples;
UPDATE processes SET state = 'stopped', reason = 'the machine was restarted', used_at = 0, hold_until = 0,
    idle_since = 0, asked_since = 0, token = NULL, pid = NULL, start_ticks = NULL, port = NULL, started_at = 0,
    deadline = 0, failure_code = NULL, failure_message = NULL, retry_at = 0, attempts = 0;
UPDATE scheduler SET leader = NULL, heartbeat = 0, master = '', preloaded_for = '',
    schedule_version = schedule_version + 1;
"""

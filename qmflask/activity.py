"""Keeps what requests did: takes finished recordings and writes them in batches from one thread of the process.

Nothing here may hurt a request: its thread only appends to a queue, and a store that fails costs records, never an
answer.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from qmflask.accesslog import Access, LineStyle
from qmflask.captures import Allowance
from qmflask.config import Config
from qmflask.host import Host
from qmflask.journal import Journal, configure, level_of, to_stdout, wants_json
from qmflask.logfiles import ModelLog
from qmflask.logtail import Tail
from qmflask.recording import Recording, settle_all
from qmflask.store.activity import ActivityError, ActivityStore, Record, Retention
from qmflask.store.counters import Tally

log = logging.getLogger(__name__)
T = TypeVar("T")

#: How long records gather before they are written together. A killed worker loses at most these.
GATHER = 0.5
#: How often the thread looks at what has no event: configuration, watchers, samples, retention.
ROUND = 0.25
PRUNE_EVERY = 30.0
TELL_EVERY = 60.0
#: Finished requests that may wait for a store that does not answer; more are dropped, oldest first.
BACKLOG = 5000
#: Recordings that are worked on before other threads get their turn.
AT_ONCE = 32
#: `gc.set_threshold`: more than what waits to be written comes to.
GARBAGE = (20_000, 10, 10)
#: A page that looks at what is in flight says so this often (seconds).
WATCH_FOR = 5.0


@dataclass(frozen=True)
class Surroundings:
    """What the recorder needs of its worker."""

    worker: str
    master: str
    config: Callable[[], Config]
    leading: Callable[[], bool]
    load_ms: Callable[[str], float | None]
    sample: Callable[[], Mapping[str, Any]]
    #: Whether the disk is full: then nothing is recorded, what room there is belongs to the scheduler.
    full: Callable[[], bool] = lambda: False
    #: This worker's slots by kind: (all, taken).
    slots: Callable[[], Mapping[str, tuple[int, int]]] = dict


class Activity:
    """The recorder of one process: owns a thread, a connection to `activity.db` and a journal for access lines."""

    def __init__(self, state: Path, around: Surroundings) -> None:
        self._state = state
        self._around = around
        self._as_json = wants_json()
        self._journal = Journal(state / "logs")
        self._echo: Tail | None = None
        self._echoed: object = None
        self._finished: deque[Recording] = deque(maxlen=BACKLOG)
        self._captures = Allowance()
        self._lines: deque[tuple[float, Access]] = deque(maxlen=BACKLOG)
        self._inflight: dict[str, Recording] = {}
        self._some = threading.Event()
        self._stop = threading.Event()
        self._silent_until = 0.0
        self._host = Host()
        self._next_watch = 0.0
        self._next_progress = 0.0
        self._published = False
        self._slots: Mapping[str, tuple[int, int]] = {}
        self._next_slots = 0.0
        self._next_prune = 0.0
        self._next_sample = 0.0
        self.store = ActivityStore(self._path())
        self._thread = threading.Thread(target=self._run, name="qmflask-activity", daemon=True)

    def _path(self) -> Path:
        configured = self._around.config().store.path
        return Path(configured) if configured else self._state / "activity.db"

    def start(self) -> None:
        """Begin to write."""
        self._echo_models()  # before the first model can be started
        # What waits to be written makes for some twenty objects a request that no cycle holds; by default they would
        # all be searched for cycles, after every thirtieth request.
        gc.set_threshold(*GARBAGE)
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Write what is left and end the thread."""
        self._stop.set()
        self._some.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        self.store.close()
        self._journal.close()

    # -- in request threads -----------------------------------------------------------------------------------

    def record(self, environ: Mapping[str, Any]) -> Recording:
        """Begin to record one request on a model route; the access log leaves it to the recording."""
        if isinstance(environ, dict):
            environ["qmflask.recorded"] = True
        return Recording(self, environ, self._around.config().capture_buffer * 1024 * 1024)

    def started(self, recording: Recording) -> None:
        """Part of Recording's contract."""
        self._inflight[recording.id] = recording

    def finished(self, recording: Recording) -> None:
        """Part of Recording's contract."""
        self._inflight.pop(recording.id, None)
        self._finished.append(recording)
        if not self._some.is_set():
            self._some.set()

    def note_access(self, when: float, access: Access) -> None:
        """Queue the access line of a request that no recording is made of."""
        self._lines.append((when, access))
        if not self._some.is_set():
            self._some.set()

    def watch(self) -> None:
        """Somebody looks at what is in flight: have all workers publish its progress for some seconds."""
        now = time.monotonic()
        if now >= self._next_watch:
            self._next_watch = now + WATCH_FOR / 2
            self.store.watch(now + WATCH_FOR)

    def here(self) -> dict[str, Recording]:
        """What is in flight in this worker."""
        return dict(self._inflight)

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._try(lambda: self.store.begin_service(self._around.master))
        while not self._stop.is_set():
            if self._some.wait(ROUND):
                self._stop.wait(GATHER)
            self._some.clear()
            self._round()
        self._write()
        self._end_echo()

    def _round(self) -> None:
        try:
            self._write()
            self._follow_configuration()
            self._echo_models()
            self._try(self._publish_progress)
            self._try(self._publish_slots)
            self._try(self._sample)
            if time.monotonic() >= self._next_prune:
                self._next_prune = time.monotonic() + PRUNE_EVERY
                self._try(lambda: self.store.prune(retention(self._around.config()), time.time()))
        except Exception:  # what is recorded must go on with the next request, whatever this one held
            log.exception("recording activity failed")

    def _try(self, step: Callable[[], None]) -> None:
        """Do something with the store; failures are told once a minute. Nothing on a full disk."""
        if self._around.full():
            return
        try:
            step()
        except ActivityError as error:
            now = time.monotonic()
            if now >= self._silent_until:
                self._silent_until = now + TELL_EVERY
                log.warning("activity is not recorded: %s", error)

    def _write(self) -> None:
        """Write all that has ended since the last time: access lines, then records, counters and captures."""
        config, tally = self._around.config(), Tally()
        style = LineStyle(config.log_time_format, self._as_json) if self._shows_access(config) else None
        rows: list[tuple[Record, bytes | None]] = []
        lines = [style.line(*noted) for noted in drained(self._lines) if style is not None]
        while some := drained(self._finished, AT_ONCE):
            for recording in some:
                if recording.paid and recording.model is not None:
                    recording.load_ms = self._around.load_ms(recording.model)
            settled = settle_all(some, tally, style, self._captures)
            rows += settled.rows
            lines += settled.lines
            time.sleep(0)  # whoever waits for the interpreter has it now, not after all of them
        if lines:
            self._journal.write(b"".join(lines))
        if tally:
            self._try(lambda: self.store.add(rows, tally))

    def _shows_access(self, config: Config) -> bool:
        self._journal.stdout = config.log_to_stdout in ("proxy", "both")
        return level_of(config.log_level) <= logging.INFO and not self._around.full()

    def _follow_configuration(self) -> None:
        """Log settings and a changed `store.path` are taken up; a file that was removed is made anew."""
        config = self._around.config()
        configure(config.log_level, config.log_time_format, stdout=config.log_to_stdout in ("proxy", "both"))
        path = self._path()
        if path != self.store.path:
            old, self.store = self.store, ActivityStore(path)
            old.close()
            self._slots = {}
        elif self.store.gone():
            log.warning("%s was removed: beginning a new one", path)
            self._slots = {}

    def _echo_models(self) -> None:
        """`logToStdout: upstream` and `both`: the leader's worker passes what models write on to stdout.

        The others follow, too, and stay silent, so that whoever leads next goes on at the right place.
        """
        config = self._around.config()
        if config.log_to_stdout not in ("upstream", "both"):
            self._end_echo()
            return
        if self._echoed is not config:
            logs = [ModelLog(self._state / "logs", name) for name in config.models]
            self._echo = self._echo or Tail(logs, 0)
            self._echo.extend(logs)
            self._echoed = config
        assert self._echo is not None
        while data := self._echo.read():
            if self._around.leading():
                to_stdout(data)

    def _end_echo(self) -> None:
        if self._echo is not None:
            self._echo.close()
            self._echo = None
        self._echoed = None

    def _publish_progress(self) -> None:
        now = time.monotonic()
        if now >= self._next_progress or self._published:
            watched = now < self.store.watched_until() <= now + WATCH_FOR
            self._next_progress = now + 1.0
            if watched:
                rows = {r.id: (r.received, _headers_json(r)) for r in self.here().values()}
                self.store.publish(self._around.worker, rows)
            elif self._published:
                self.store.publish(self._around.worker, {})
            self._published = watched

    def _publish_slots(self) -> None:
        """Once a second at most, and only what has changed: scrapes of other workers read it."""
        slots = self._around.slots()
        if slots != self._slots and time.monotonic() >= self._next_slots:
            self.store.publish_slots(self._around.worker, slots)
            self._slots, self._next_slots = slots, time.monotonic() + 1.0

    def _sample(self) -> None:
        """The leader's worker reads the host every `performance.every`."""
        config = self._around.config()
        if config.performance.disabled or not self._around.leading() or time.monotonic() < self._next_sample:
            return
        self._next_sample = time.monotonic() + max(1.0, config.performance.every)
        now = time.time()
        body = {"sys": sys_reading(self._host, now), "gpu": gpu_readings(self._around.sample(), now)}
        self.store.add_performance(now, orjson.dumps(body).decode())


def drained(queue: deque[T], most: int = BACKLOG) -> list[T]:
    """Take what is at hand, in order."""
    found: list[T] = []
    with contextlib.suppress(IndexError):
        while len(found) < most:
            found.append(queue.popleft())
    return found


def retention(config: Config) -> Retention:
    """What is kept: without `store.path` the newest `metricsMaxInMemory` records, else by age and size."""
    captures = max(0, config.capture_buffer) * 1024 * 1024
    if config.store.path is None:
        kept = config.metrics_max_in_memory if config.metrics_max_in_memory > 0 else 1000
        return Retention(records=kept, capture_bytes=captures)
    return Retention(days=config.store.keep_days, bytes=config.store.max_mb * 1024 * 1024, capture_bytes=captures)


def _headers_json(recording: Recording) -> str:
    shown = {"req": recording.request_headers(), "resp": dict(recording.answer_headers)}
    return orjson.dumps(shown, option=orjson.OPT_NON_STR_KEYS).decode()


def sys_reading(host: Host, now: float) -> dict[str, Any]:
    """One reading of the host, in the form of compatibility 3.12."""
    seen = host.performance()
    memory = seen.memory
    return {
        "timestamp": now,
        "cpu_util_per_core": list(seen.cores),
        "mem_total_mb": memory.total >> 20,
        "mem_used_mb": memory.used >> 20,
        "mem_free_mb": memory.available >> 20,
        "swap_total_mb": memory.swap_total >> 20,
        "swap_used_mb": memory.swap_used >> 20,
        "load_avg_1": seen.load[0],
        "load_avg_5": seen.load[1],
        "load_avg_15": seen.load[2],
        "net_io": [{"name": n.name, "bytes_recv": n.received, "bytes_sent": n.sent} for n in seen.network],
    }


def gpu_readings(sample: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
    """The cards of the scheduler's newest memory sample, in the form of compatibility 3.12; unknown figures are 0."""
    cards = sample.get("cards")
    found = []
    for number, card in enumerate(cards if isinstance(cards, list) else []):
        found.append(
            {
                "timestamp": now,
                "id": card.get("index", number),
                "name": card.get("name") or "",
                "uuid": card.get("uuid") or "",
                "temp_c": card.get("temperature") or 0,
                "vram_temp_c": card.get("memory_temperature") or 0,
                "gpu_util_pct": card.get("utilisation") or 0,
                "mem_util_pct": card.get("memory_utilisation") or 0,
                "mem_used_mb": int(card.get("used") or 0) >> 20,
                "mem_total_mb": int(card.get("total") or 0) >> 20,
                "fan_speed_pct": card.get("fan") or 0,
                "power_draw_w": card.get("power") or 0,
            }
        )
    return found

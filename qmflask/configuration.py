"""The configuration in force: published by one process as a resolved file, taken up by all the others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qmflask import errors, processes
from qmflask.config import Config, ConfigError, Loaded, Problem
from qmflask.configfiles import forget_resolved, mark_of, read_resolved, write_resolved
from qmflask.configreader import ConfigReader, Turn
from qmflask.names import Names
from qmflask.policy.rules import Rules, make_rules
from qmflask.processes import Identity
from qmflask.store import Store, StoreError, admission, reading
from qmflask.store.rows import SchedulerRow

log = logging.getLogger(__name__)

SECOND = 1_000_000_000


@dataclass(frozen=True)
class Live:
    """One generation of the configuration with what is derived from it; a request keeps the one it began with."""

    generation: int
    config: Config
    names: Names
    rules: Rules


def serves_nothing(config: Config) -> bool:
    """Whether a configuration has neither models nor peers."""
    return not config.models and not config.peers


class Lost(errors.Unavailable):
    """Raised when the resolved file of the generation in force cannot be read."""


class Configuration:
    """Holds this process's `Live`, takes up new generations, and publishes them when asked to (by the leader)."""

    def __init__(self, source: Path, state: Path) -> None:
        self.source = source
        self._state = state
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._learned: Mapping[str, tuple[int, int]] = {}
        self.master = ""
        self._seen = ""
        self._doubted = ""
        self._reading: ConfigReader | None = None
        self._lost = 0  # the generation in force whose file we could not read
        self._next_look = 0

    @property
    def live(self) -> Live:
        """The generation this process serves with."""
        assert self._live is not None, "boot() comes first"
        return self._live

    def boot(self, store: Store, master: str, turn: Turn | None = None) -> Live:
        """Take up what is published for this master, else publish the source; raises ConfigError for a bad source.

        A worker forked again under the same master must come up though the file has been broken meanwhile; a new
        master must not start with a file that its user will not find in force. `turn`: maybe begun already.
        """
        self.master = master
        with turn or Turn(self._state) as mine:
            return self._published(store) or self._publish_first(store, mine.reader)

    def _published(self, store: Store) -> Live | None:
        """What a worker of our master has published, if it can still be read."""
        with store.read() as tx:
            row = reading.scheduler(tx)
        if not row.config_generation or row.master != self.master:
            return None
        try:
            return self.take_up(store, row.config_generation)
        except Lost as error:
            log.warning("%s: reading %s", error, self.source)
            return None

    def _publish_first(self, store: Store, reader: ConfigReader | None) -> Live:
        with store.read() as tx:
            row = reading.scheduler(tx)
        self._refuse_to_share(row)
        reader = reader or ConfigReader(self.source)
        loaded = reader.result()
        while self._publish(store, row.config_generation, reader.mark, loaded, self.master) is None:
            with store.read() as tx:
                row = reading.scheduler(tx)
            if row.master == self.master:
                break
        with store.read() as tx:
            generation = reading.scheduler(tx).config_generation
        return self.take_up(store, generation)

    def _refuse_to_share(self, row: SchedulerRow) -> None:
        """Two services of one configuration are one service; of two, each would serve the other's models."""
        pid, _, ticks = row.master.partition("-")
        if not ticks or not Identity(int(pid), int(ticks), processes.boot_id()).alive():
            return
        if row.config_source not in ("", str(self.source)):
            raise StoreError(
                f"the state directory {self._state} belongs to a running qmflask (pid {pid}) that serves"
                f" {row.config_source}, not {self.source}; give this one another QMFLASK_STATE"
            )
        log.info("joining the service of pid %s: both serve %s", pid, self.source)

    def take_up(self, store: Store, generation: int) -> Live:
        """Load the resolved file of `generation` unless it is in force already. Raises Lost when it cannot be read.

        Generation 0 is a store that was lost and begun anew: what we serve with is published there again.
        """
        with self._lock:
            if generation == 0 and self._live is not None:
                generation = self._publish_again(store, self._live)
            if self._live is None or self._live.generation != generation:
                config = self._read(generation)
                self._learned = self._read_learned(store)
                self._live = Live(generation, config, Names(config), make_rules(config, self._learned))
                log.info("configuration %d taken up: %d models", generation, len(config.models))
            self._lost = 0
            return self._live

    def _read(self, generation: int) -> Config:
        try:
            return read_resolved(self._state, generation)
        except (OSError, ValueError) as error:
            why = f"the resolved configuration {generation} cannot be read ({error})"
            raise Lost(why, retry_after=1) from error

    def refresh(self, store: Store) -> bool:
        """Take up the newest generation and the newest learned sizes; called once a second and when told to.

        False when the newest generation cannot be read: the one we have stays, until the leader has published anew.
        """
        with store.read() as tx:
            generation = reading.scheduler(tx).config_generation
        try:
            self.take_up(store, generation)
        except Lost as error:
            self._lose(generation, error)
        learned = self._read_learned(store)
        with self._lock:
            if learned != self._learned and self._live is not None:
                self._learned = learned
                live = self._live
                self._live = Live(live.generation, live.config, live.names, make_rules(live.config, learned))
        return not self._lost

    def _lose(self, generation: int, error: Lost) -> None:
        """Said once; the leader's next look reads the source, though it has not changed."""
        if self._lost != generation:
            log.error("%s: going on with configuration %d", error, self.live.generation)
            self._lost, self._seen, self._next_look = generation, "", 0

    def _read_learned(self, store: Store) -> Mapping[str, tuple[int, int]]:
        with store.read() as tx:
            return reading.learned_sizes(tx)

    def look(self, store: Store, now: int, *, wait: bool = False) -> str | None:
        """The leader's look at the source, once a second: has a changed one read, and publishes it if it is valid.

        That takes a moment, for which only `wait` waits: a later look brings the result.

        Returns an error text when a changed file is not valid, "" when the newest file is in force, None when there
        was nothing to do. A file that is wrong on its first second may be half written: it is judged on the next.
        Where the resolved file of what is in force is lost, what the source says now is published in its place.
        """
        if self._reading is None and now >= self._next_look:
            self._next_look = now + SECOND
            mark = mark_of(self.source)
            if mark not in ("", self._seen) and not self._is_in_force(store, mark):
                self._reading = ConfigReader(self.source)
        if self._reading is None or not (wait or self._reading.done()):
            return None
        reader, self._reading = self._reading, None
        if reader.mark != mark_of(self.source):  # it is not what stands there now: the next look reads that
            self._next_look = 0
            return None
        if self._is_in_force(store, reader.mark):
            return None
        return self._take(store, reader, patient=True)

    def _is_in_force(self, store: Store, mark: str) -> bool:
        with store.read() as tx:
            row = reading.scheduler(tx)
        if mark != row.config_fingerprint or row.config_error is not None or self._lost:
            return False
        self._seen = mark  # another worker has published it
        return True

    def reload(self, store: Store) -> str | None:
        """Validate the source and publish it; returns "" or the error."""
        return self._take(store, ConfigReader(self.source), patient=False)

    def _take(self, store: Store, reader: ConfigReader, *, patient: bool) -> str | None:
        """Publish what was read. `patient` gives a wrong file one second more."""
        mark = reader.mark
        try:
            loaded = reader.result()
            self._refuse_to_empty(loaded.config)
        except ConfigError as error:
            if patient and self._doubted != mark:
                self._doubted = mark
                return None
            self._seen = mark
            return str(error)
        self._seen = mark
        with store.read() as tx:
            generation = reading.scheduler(tx).config_generation
        published = self._publish(store, generation, mark, loaded, None)
        if published is None:
            return None
        self.take_up(store, published)
        return ""

    def _refuse_to_empty(self, config: Config) -> None:
        """An empty file is a slip of an editor or a full disk, not a wish to stop everything. Raises ConfigError."""
        if serves_nothing(config) and self._live is not None and not serves_nothing(self._live.config):
            message = (
                "there are no models in it any more, the file may be empty or cut off; what is in force stays in force"
                " (to serve nothing on purpose, stop the service; else keep one model)"
            )
            raise ConfigError([Problem("error", message, str(self.source), code="no_models")])

    def _publish_again(self, store: Store, live: Live) -> int:
        with store.read() as tx:
            generation = reading.scheduler(tx).config_generation
        if generation == 0:
            log.warning("the state store is new: publishing configuration %d again", live.generation)
            write_resolved(self._state, live.generation, live.config)
            mark, source = self._seen or mark_of(self.source), str(self.source)
            generation = admission.publish_configuration(store, 0, mark, self.master, source, live.generation) or 0
        if generation == 0:  # somebody else was faster
            with store.read() as tx:
                generation = reading.scheduler(tx).config_generation
        return generation

    def _publish(self, store: Store, generation: int, mark: str, loaded: Loaded, master: str | None) -> int | None:
        write_resolved(self._state, generation + 1, loaded.config)
        published = admission.publish_configuration(store, generation, mark, master, str(self.source))
        if published is not None:  # of several workers that have read the same, one says what is doubtful in it
            for problem in loaded.warnings:
                log.warning("%s", problem.text())
            forget_resolved(self._state, published)
        return published

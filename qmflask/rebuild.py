"""A store that was lost is filled again from what lives: trees by their spawn records; leases by their workers."""

from __future__ import annotations

import logging

from qmflask import spawnrecords
from qmflask.spawnrecords import SpawnRecord
from qmflask.states import State
from qmflask.store import Store, reading, scheduling

log = logging.getLogger(__name__)

#: How long a new leader on a fresh store waits for the workers to enter their leases again, in seconds.
GRACE = 1.0


def survivors(store: Store) -> list[SpawnRecord]:
    """Trees that live and have no row."""
    with store.read() as tx:
        known = reading.processes(tx)
    records = spawnrecords.living(store.directory / "spawn")
    return [record for record in records if record.model not in known]


def restore(store: Store, generation: int, records: list[SpawnRecord]) -> None:
    """Enter them: ready ones serve on, others are probed as if they had just been started."""
    with store.write(generation) as tx:
        for record in records:
            state = State.READY if record.ready else State.STARTING
            log.warning("model %s: process %d found again without a row: %s", record.model, record.pid, state)
            scheduling.restore(
                tx,
                record.model,
                state,
                "found again after the store was lost",
                token=record.token,
                pid=record.pid,
                start_ticks=record.start_ticks,
                port=record.port,
                proxy=record.proxy,
                launch_hash=record.launch_hash,
                cmd=record.cmd,
                cmd_stop=record.cmd_stop,
                unload_timeout=record.unload_timeout,
                started_at=record.started_at,
                deadline=0 if record.ready else record.deadline,
                load_ms=record.load_ms,
            )

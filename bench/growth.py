"""How times and sizes grow: `python -m bench.growth [requests]`; prints Markdown, takes two minutes for a million.

Lease and decision by number of models and of waiting requests, the activity store over many requests. In one process
and in a temporary folder; medians of processor time, since the machine may be shared, and wall time for stalls.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.decide import NOW, all_blocked, median
from qmflask.policy.eviction import GroupPolicy, Sizes
from qmflask.policy.rules import Rules
from qmflask.policy.schedule import ModelRule, decide
from qmflask.states import State
from qmflask.store import Store, admission, prepare_state_directory, scheduling
from qmflask.store.activity import ActivityStore, Filter, Record, Retention
from qmflask.store.admission import Admissions, Arrival, Granted
from qmflask.store.counters import Tally

GIB = 1 << 30
MIB = 1 << 20
SIZES = (10, 100, 1000)
LEASES = 200
#: Records that a worker's writer stores at once, and between two prunings, at some 1 000 requests a second.
BATCH, BETWEEN_PRUNES = 64, 64 * 200


def arrival(model: str, number: int) -> Arrival:
    """A request as the web layer enters it."""
    detail = '{"method":"POST","path":"/v1/chat/completions","remote":"127.0.0.1"}'
    return Arrival(f"{number:032x}", "1-1", "infer", model, NOW + number, 0.0, 0, NOW + 60 * 10**9, detail)


def filled(folder: Path, models: int, waiting: int) -> tuple[Store, Rules]:
    """A store with so many models, half of them ready, 200 leases and `waiting` requests for the others."""
    prepare_state_directory(folder)
    store = Store(folder, "bench")
    names = [f"model-{number:04d}" for number in range(models)]
    sizes = {name: Sizes(GIB, 0) for name in names}
    rules = Rules({name: ModelRule(name) for name in names}, GroupPolicy(sizes, [], models // 2 * GIB, 0), {})
    term = scheduling.take_office(store, "1-1", NOW)
    with store.write(term) as tx:
        for name in names[: models // 2]:
            scheduling.set_state(tx, name, State.STARTING, "asked", proxy="http://localhost:5800", cmd="x" * 200)
            scheduling.set_state(tx, name, State.READY, "loaded")
    for number in range(LEASES):
        admission.reinsert(store, arrival(names[number % (models // 2)], number), NOW)
    for number in range(waiting):
        admission.enqueue(store, arrival(names[models // 2 + number % (models // 2)], number), "queued")
    return store, rules


def lease_us(models: int, waiting: int, rounds: int = 2000) -> float:
    """Median processor time of one lease in and out, in us."""
    with tempfile.TemporaryDirectory() as folder:
        store, rules = filled(Path(folder), models, waiting)
        admissions, times = Admissions(store), []
        for number in range(rounds):
            begin = time.thread_time_ns()
            granted = admissions.admit(rules, 0, arrival("model-0001", 10**6 + number), NOW)
            assert isinstance(granted, Granted)
            admission.release(store, granted.id, "model-0001", NOW, None)
            times.append(time.thread_time_ns() - begin)
        store.close()
    return statistics.median(times) / 1000


def decision_ms(models: int, waiting: int) -> float:
    """Median processor time of a decision when everybody waits, in ms."""
    snapshot = all_blocked(models, waiting)
    return median(lambda: decide(snapshot, NOW), 21) * 1000


def records(folder: Path, count: int) -> Iterator[tuple[str, float]]:
    """The activity store over `count` requests with 50 MiB to keep: (what, value)."""
    store, keep = ActivityStore(folder / "activity.db"), Retention(bytes=50 * MIB)
    record = Record(0, "f" * 32, "model-0001", "/v1/chat/completions", 200, "application/json", 20, 200, duration=2500)
    adding, pruning, waits = [], [], [0.0]
    done = threading.Event()

    def read() -> None:
        while not done.wait(0.02):
            begin = time.monotonic()
            store.page(Filter(), "id", True, 25, 1)
            waits.append(time.monotonic() - begin)

    reader = threading.Thread(target=read)
    reader.start()
    for start in range(0, count, BATCH):
        record = record._replace(time=1_800_000_000 + start // 1000)
        batch = [(record, None)] * min(BATCH, count - start)
        begin = time.monotonic()
        store.add(batch, Tally())
        adding.append(time.monotonic() - begin)
        if start % BETWEEN_PRUNES == 0:
            begin = time.monotonic()
            store.prune(keep, record.time)
            pruning.append(time.monotonic() - begin)
    done.set()
    reader.join()
    store.close()
    size = sum(path.stat().st_size for path in folder.iterdir())
    yield "records kept by the file, MB (limit 52)", size / 1e6
    yield f"storing {BATCH} records, median, ms", statistics.median(adding) * 1e3
    yield "the same, longest, ms", max(adding) * 1e3
    yield "pruning, median, ms", statistics.median(pruning) * 1e3
    yield "the same, longest, ms", max(pruning) * 1e3
    yield "a page of 25 records read meanwhile, median, ms", statistics.median(waits) * 1e3
    yield "the same, longest, ms", max(waits) * 1e3


def table(title: str, cell: Callable[[int, int], float]) -> None:
    """Models down, waiting requests across."""
    print(f"| {title} | " + " | ".join(f"{waiting} waiting" for waiting in SIZES) + " |")
    print("| --- |" + " --- |" * len(SIZES))
    for models in SIZES:
        print(f"| {models} models | " + " | ".join(f"{cell(models, waiting):.3g}" for waiting in SIZES) + " |")
    print(flush=True)


def main(count: int) -> None:
    """Print the three tables."""
    table("lease in and out, us", lease_us)
    table("decision, ms", decision_ms)
    print(f"| activity over {count} requests | |\n| --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for title, value in records(Path(folder), count):
            print(f"| {title} | {value:.3g} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)

"""The threads that serve connections: one job wakes one thread, never more threads than allowed, and an end."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator

import pytest

from qmflask.worker import Threads, Worker

WAIT = 20


class Jobs:
    """Jobs that say which thread runs them, and go on when they are told to."""

    def __init__(self) -> None:
        self.running: queue.Queue[tuple[str, str]] = queue.Queue()
        self.gates: dict[str, threading.Event] = {}

    def run(self, job: str) -> None:
        self.gates[job] = threading.Event()
        self.running.put((job, threading.current_thread().name))
        assert self.gates[job].wait(WAIT)
        if job.startswith("bad"):
            raise RuntimeError(job)

    def seen(self) -> tuple[str, str]:
        return self.running.get(timeout=WAIT)


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    jobs = Jobs()
    yield jobs
    for gate in jobs.gates.values():
        gate.set()


def idle(threads: Threads, count: int) -> None:
    """Wait until `count` threads sit idle."""
    pause = threading.Event()
    for _ in range(2000):
        if len(threads._idle) == count:
            return
        pause.wait(0.01)
    raise AssertionError(f"{len(threads._idle)} idle threads, not {count}")


def test_a_thread_is_made_for_each_job_that_finds_none_idle(jobs: Jobs) -> None:
    threads = Threads(4, jobs.run)
    threads.submit("a")
    threads.submit("b")
    names = {jobs.seen()[1], jobs.seen()[1]}
    assert len(names) == 2
    jobs.gates["a"].set()
    idle(threads, 1)
    threads.submit("c")
    assert jobs.seen()[1] in names, "the idle one takes it"
    threads.shutdown()


def test_jobs_above_the_limit_wait_in_order(jobs: Jobs) -> None:
    threads = Threads(1, jobs.run)
    for job in ("a", "b", "c"):
        threads.submit(job)
    for job in ("a", "b", "c"):
        assert jobs.seen()[0] == job
        assert jobs.running.empty()
        jobs.gates[job].set()
    threads.shutdown()


def test_an_error_ends_neither_the_thread_nor_the_pool(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    threads = Threads(1, jobs.run)
    threads.submit("bad")
    name = jobs.seen()[1]
    jobs.gates["bad"].set()
    threads.submit("good")
    assert jobs.seen() == ("good", name)
    assert "nobody caught" in caplog.text
    threads.shutdown()


def test_shutdown_ends_idle_threads_at_once_and_busy_ones_after_their_job(jobs: Jobs) -> None:
    threads = Threads(2, jobs.run)
    threads.submit("a")
    threads.submit("b")
    jobs.seen(), jobs.seen()
    ours = [t for t in threading.enumerate() if t.name.startswith("request-")]
    assert len(ours) == 2
    jobs.gates["a"].set()
    idle(threads, 1)
    threads.shutdown()
    jobs.gates["b"].set()
    for thread in ours:
        thread.join(WAIT)
        assert not thread.is_alive()


def test_a_connection_that_cannot_be_closed_frees_its_place() -> None:
    class Broken:
        def close(self, graceful: bool = False) -> None:
            raise OSError("closed already")

    worker = Worker.__new__(Worker)
    worker._ended, worker._accepting = deque(), True
    worker.handle = lambda conn: False
    with pytest.raises(OSError, match="closed already"):
        worker._serve(Broken())
    assert len(worker._ended) == 1, "else the worker would be one short for ever, and never end a drain"


def test_a_worker_that_drains_does_not_wait_when_its_last_connection_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would wake it: each end of the service took up to a second more."""
    waits: list[float] = []
    worker = Worker.__new__(Worker)
    worker._ended, worker.nr_conns, worker._give_way_by, worker._accepting = deque([None]), 2, None, False
    monkeypatch.setattr(worker, "notify", lambda: None)
    monkeypatch.setattr(worker, "set_accept_enabled", lambda enabled: None)
    monkeypatch.setattr(worker, "murder_keepalived", lambda: None)
    monkeypatch.setattr(worker, "murder_pending", lambda: None)
    monkeypatch.setattr(worker, "wait_for_and_dispatch_events", lambda timeout: waits.append(timeout))
    worker._turn(accept=False)
    assert (worker.nr_conns, waits) == (1, [1.0]), "one is still served: its end wakes us"
    worker._ended.append(None)
    worker._turn(accept=False)
    assert (worker.nr_conns, waits) == (0, [1.0])

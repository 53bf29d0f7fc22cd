"""`python -m bench.failover`: from `kill -9` of the leader to the start of the next swap, over many kills.

A request for the other of two models that do not fit together is sent to a worker that lives on, at the moment of the
kill; the clock stops when the old model is told to go, by its own account, which is the swap's first deed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.service import Service, eventually

MODELS = ("alpha", "beta")


def make_service(folder: Path, workers: int) -> Service:
    """Two scripted models of which one fits."""
    service = Service(folder, {}, workers=workers)
    models = {name: {"cmd": service.fake(name), "estVramGB": 9} for name in MODELS}
    service.write_config({"vramBudgetGB": 16, "models": models})
    return service.start()


def leader_of(service: Service) -> int:
    """The leader's pid by the state database."""
    rows = service.query("SELECT w.pid FROM scheduler s JOIN workers w ON w.id = s.leader")
    return int(rows[0][0]) if rows else 0


def ask(service: Service, model: str, done: threading.Event) -> None:
    """Ask until there is an answer: a connection that the killed worker had taken is lost."""
    while not done.is_set():
        with contextlib.suppress(OSError, http.client.HTTPException):
            if service.chat(model, timeout=30).status == 200:
                return


def one_kill(service: Service, number: int) -> float:
    """Milliseconds from the kill to the swap's first deed."""
    target, victim = MODELS[number % 2], MODELS[(number + 1) % 2]
    ask(service, victim, threading.Event())
    eventually(lambda: len(service.registered_workers()) >= service.workers, "every worker is up", timeout=60)
    service.wait_idle()
    before = len(service.events("term", victim))
    done = threading.Event()
    client = threading.Thread(target=ask, args=(service, target, done))
    leader = eventually(lambda: leader_of(service), "somebody leads")
    killed = time.monotonic_ns()
    os.kill(leader, signal.SIGKILL)
    client.start()
    try:
        event = service.wait_event("term", victim, count=before + 1)
    finally:
        done.set()
        client.join()
    return float(event["t"] - killed) / 1e6


def main() -> int:
    """Kill, and print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.failover", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qmflask-failover-") as folder:
        service = make_service(Path(folder), options.workers)
        try:
            times = sorted(one_kill(service, number) for number in range(options.kills))
        finally:
            service.close()
    p99 = times[min(len(times) - 1, int(len(times) * 0.99))]
    print(f"{len(times)} kills: p50 {statistics.median(times):.0f} ms, p99 {p99:.0f} ms, worst {times[-1]:.0f} ms")
    return 0 if statistics.median(times) <= 300 and p99 <= 1000 else 1


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.activity`: what recording costs, as a ratio of processor time with it and without it.

Services that differ in this only are asked in turns, in short rounds, one at a time: in each round all of them there
and back again, so that a machine that becomes slower or faster meanwhile does so for all. What counts is the processor
time of both workers with all their threads, in nanoseconds; wall time and other work on the machine do not enter,
but for what it does to the processor's caches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import yaml

from bench.clients import exchange, ok, post
from bench.parts import Rig, load_model
from qmflask.activity import GATHER
from tests.service import Service

#: Longer than records gather before they are written: a round pays for its own.
SETTLE = GATHER + 0.1
#: way -> (application, additions to the configuration)
WAYS: dict[str, tuple[str, dict[str, object]]] = {
    "nothing recorded": ("bench.unrecorded:app", {}),
    "lines and counters only": ("bench.lines_only:app", {"captureBuffer": 0}),
    "as it comes": ("wsgi:app", {}),
    "no captures (`captureBuffer: 0`)": ("wsgi:app", {"captureBuffer": 0}),
}
NOTHING, LINES = "nothing recorded", "lines and counters only"


@dataclass
class Work:
    """One kind of request: how many a round has, and at how many clients at once."""

    name: str
    request: bytes
    count: int
    clients: int = 1
    #: way -> microseconds of processor time per request, one per round.
    cost: dict[str, list[float]] = field(default_factory=dict)


def works(scale: float) -> list[Work]:
    """Small answers and streams."""
    small, stream = post("m"), post("m", stream=True, chunks=200)
    return [
        Work("small JSON, one client", small, int(400 * scale)),
        Work("small JSON, eight clients", small, int(800 * scale), clients=8),
        Work("stream of 200 events, one client", stream, int(200 * scale)),
    ]


def cpu_ns(service: Service) -> int:
    """Processor time of all workers so far, ended threads included."""
    return sum(time.clock_gettime_ns((~pid << 3) | 2) for pid in service.worker_pids())


def one_round(service: Service, work: Work, idle: float) -> float:
    """Microseconds per request; `idle` is what the workers use when nobody asks, in ns per second."""
    before, began = cpu_ns(service), time.monotonic()
    ask(service.port, work)
    time.sleep(SETTLE)
    return (cpu_ns(service) - before - idle * (time.monotonic() - began)) / work.count / 1000


def ask(port: int, work: Work) -> None:
    """All requests of a round."""

    def some(count: int) -> None:
        for _ in range(count):
            ok(exchange(port, work.request))

    if work.clients == 1:
        some(work.count)
        return
    with ThreadPoolExecutor(work.clients) as pool:
        list(pool.map(some, [work.count // work.clients] * work.clients))


def idle_ns(service: Service, seconds: float) -> float:
    """What the workers use when nobody asks, in ns per second."""
    before, began = cpu_ns(service), time.monotonic()
    threading.Event().wait(seconds)
    return (cpu_ns(service) - before) / (time.monotonic() - began)


def configured(rig: Rig, app: str, more: dict[str, object]) -> Service:
    """A service of that application, with its model loaded."""
    service = rig.service({"m": 0}, start=False, app=app)
    service.write_config({**yaml.safe_load(service.config_path.read_text()), **more})
    service.start()
    load_model(service, "m")
    return service


def row(work: Work, way: str) -> str:
    """One line of the table."""
    cells = [work.name, way, f"{statistics.median(work.cost[way]):.0f} us"]
    return f"| {' | '.join([*cells, ratio(work, way, LINES), ratio(work, way, NOTHING)])} |"


def ratio(work: Work, way: str, base: str) -> str:
    """Median over the rounds, with quartiles."""
    ratios = sorted(mine / theirs for mine, theirs in zip(work.cost[way], work.cost[base], strict=True))
    quarter = len(ratios) // 4
    return f"**{statistics.median(ratios):.3f}** ({ratios[quarter]:.3f} .. {ratios[-1 - quarter]:.3f})"


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.activity", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="(%(default)s: about two minutes)")
    parser.add_argument("--scale", type=float, default=1, help="of the requests in a round (%(default)s)")
    parser.add_argument("--captures", action="store_true", help="also without them")
    options = parser.parse_args()
    todo = works(options.scale)
    with Rig() as rig:
        ways = list(WAYS) if options.captures else list(WAYS)[:3]
        services = {way: configured(rig, *WAYS[way]) for way in ways}
        idle = {way: idle_ns(service, 2) for way, service in services.items()}
        for work in todo * options.rounds:
            there = [one_round(services[way], work, idle[way]) for way in ways]
            back = [one_round(services[way], work, idle[way]) for way in reversed(ways)]
            for way, one, other in zip(ways, there, reversed(back), strict=True):
                work.cost.setdefault(way, []).append((one + other) / 2)
            ways.reverse()
        for service in services.values():
            rig.end(service)
    print(f"{options.rounds} rounds; load average {os.getloadavg()[0]:.1f}\n")
    print("| work | recorded | CPU per request | to lines and counters only (quartiles) | to nothing recorded |")
    print("| --- " * 5 + "|")
    for work in todo:
        for way in (way for way in WAYS if way in work.cost):
            print(row(work, way), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

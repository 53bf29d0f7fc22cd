"""`python -m bench.pages`: what open pages cost running streams, and how fast the service answers people meanwhile.

64 streams of 50 events a second go directly, through qmflask, and through qmflask with 8 pages open, in turns. A page
holds its event stream and asks what its view asks: the log every 0.7 s, the plan every 5 s, records at each new one.
Then every inference slot of both workers is taken, and the routes that people need are asked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from bench.clients import exchange, paced_delays
from bench.parts import Rig, load_model
from tests.service import Service

STREAMS, PAGES, INTERVAL_US = 64, 8, 20_000
ASKED = ("/health", "/running", "/api/status", "/v1/models", "/metrics")
#: What a view asks, and how often in seconds.
VIEWS = (("/api/logs/proxy?after=", 0.7), ("/api/plan?model=m", 5.0), ("/api/metrics/activity?limit=25", 2.0))


def get(path: str, close: bool = True) -> bytes:
    """The bytes of a GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: bench\r\nConnection: {'close' if close else 'keep-alive'}\r\n\r\n".encode()


def page(port: int, number: int, over: threading.Event) -> None:
    """One open page: its stream in a thread, its view's questions here."""
    import socket

    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(get("/api/events?types=status,activity", close=False))
    threading.Thread(target=read_all, args=(sock,), daemon=True).start()
    path, every = VIEWS[number % len(VIEWS)]
    while not over.wait(every):
        exchange(port, get(path))
    sock.close()


def read_all(sock: Any) -> None:
    """Read until it ends."""
    try:
        while sock.recv(65536):
            pass
    except OSError:
        pass


def visit(port: int) -> None:
    """The pages, in a process of their own, until stdin ends; prints what was seen of the service's answers."""
    over = threading.Event()
    pages = [threading.Thread(target=page, args=(port, n, over)) for n in range(PAGES)]
    for each in pages:
        each.start()
    print("open", flush=True)
    sys.stdin.read()
    over.set()
    for each in pages:
        each.join()


class Pages:
    """The pages of a service while this is entered."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-m", "bench.pages", "--visit", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Pages:
        assert self._process.stdout is not None
        self._process.stdout.readline()
        time.sleep(0.5)  # the first burst
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


class Asker:
    """Asks what people ask, ten times a second, while this is entered."""

    def __init__(self, port: int) -> None:
        self.seconds: dict[str, list[float]] = {path: [] for path in ASKED}
        self._port = port
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._over.wait(0.1):
            path = ASKED[number % len(ASKED)]
            number += 1
            answer = exchange(self._port, get(path))
            assert answer.status == 200, (path, answer.status)
            self.seconds[path].append(answer.total)


def delays(port: int, events: int) -> tuple[float, float]:
    """Median and 99th percentile of the delay per event, in ms."""
    found = sorted(1000 * delay for delay in paced_delays(port, "m", STREAMS, events, INTERVAL_US))
    return found[len(found) // 2], found[len(found) * 99 // 100]


def streams(rig: Rig, rounds: int, events: int) -> None:
    """The first table."""
    direct, service = rig.direct().start(), rig.service({"m": 0}, room=2)
    load_model(service, "m")
    rows: dict[str, list[tuple[float, float]]] = {"directly": [], "qmflask": [], f"qmflask, {PAGES} pages open": []}
    ways: list[Callable[[], tuple[float, float]]] = [
        lambda: delays(direct.port, events),
        lambda: delays(service.port, events),
        lambda: watched(service, events),
    ]
    asked: dict[str, list[float]] = {path: [] for path in ASKED}

    def watched(service: Service, events: int) -> tuple[float, float]:
        with Pages(service.port), Asker(service.port) as asker:
            found = delays(service.port, events)
        for path, seconds in asker.seconds.items():
            asked[path] += seconds
        return found

    for _ in range(rounds):
        for way, measured in zip(ways, rows.values(), strict=True):
            measured.append(way())
    print("| 64 streams of 50 events/s | delay per event, median | p99 | added: median | p99 |\n" + "| --- " * 5 + "|")
    base = rows["directly"]
    for name, found in rows.items():
        cells = [f"{statistics.median(value[at] for value in found):.3f} ms" for at in (0, 1)]
        more = [f"{statistics.median(a[at] - b[at] for a, b in zip(found, base, strict=True)):.3f} ms" for at in (0, 1)]
        print(f"| {name} | " + " | ".join(cells + more) + " |")
    print()
    answers("meanwhile, with the pages", asked)
    direct.stop()
    rig.end(service)


def full(rig: Rig, seconds: float) -> None:
    """The second table: no inference slot is free, and 8 pages are open."""
    service = rig.service({"m": 0, "slow": 600_000}, room=2, start=False)
    text = service.config_path.read_text().replace("slow:", "slow:\n    concurrencyLimit: 1000")
    service.write_config(text)
    service.start()
    load_model(service, "m")
    socks = [service.open("/v1/chat/completions", {"model": "slow"}) for _ in range(160)]
    time.sleep(2)  # more came than there are slots: the rest was refused
    print(f"{queued(service)} requests wait, {PAGES} pages are open\n")
    with Pages(service.port), Asker(service.port) as asker:
        time.sleep(seconds)
    answers("every slot waits for a load", asker.seconds)
    for sock in socks:
        sock.close()
    rig.end(service)


def queued(service: Service) -> int:
    """Requests that wait."""
    rows = json.loads(exchange(service.port, get("/api/status")).body)["requests"]
    return sum(row["state"] == "queued" for row in rows)


def answers(title: str, asked: dict[str, list[float]]) -> None:
    """A table of how long answers took."""
    print(f"| {title} | answers | median | p99 | longest |\n" + "| --- " * 5 + "|")
    for path, seconds in asked.items():
        found = sorted(1000 * each for each in seconds)
        high = found[min(len(found) - 1, len(found) * 99 // 100)]
        print(f"| `{path}` | {len(found)} | {found[len(found) // 2]:.1f} ms | {high:.1f} ms | {found[-1]:.1f} ms |")
    print(flush=True)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.pages", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--events", type=int, default=250, help="of each stream (%(default)s)")
    parser.add_argument("--visit", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.visit:
        visit(options.visit)
        return 0
    with Rig() as rig:
        streams(rig, options.rounds, options.events)
        full(rig, 10)
    print(f"load average {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.fronted`: how late events and websocket messages come, directly and through nginx."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

from websockets.sync.client import connect

from tests.integration.fronting import nginx
from tests.integration.test_websockets import talking
from tests.service import Service

#: Events of a stream and seconds between them, like tokens.
EVENTS, INTERVAL = 5, 0.02


@dataclass(frozen=True)
class Delays:
    """Milliseconds from the model server's write to the client's read, of first and of later events."""

    first: list[float]
    later: list[float]


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.fronted", description=__doc__)
    parser.add_argument("--streams", type=int, default=200, help="for each way (%(default)s)")
    streams = parser.parse_args().streams
    with tempfile.TemporaryDirectory() as name, ways(Path(name)) as (service, ports):
        service.chat("alpha")
        print(f"{streams} streams of {EVENTS} events each way; load average {os.getloadavg()[0]:.1f}\n")
        print("| way | first event: median | p99 | highest | later events: median | p99 |\n" + "| --- " * 6 + "|")
        for way, port in ports.items():
            service.port = port
            delays = measure(service, streams)
            first, later = sorted(delays.first), sorted(delays.later)
            cells = [middle(first), high(first), first[-1], middle(later), high(later)]
            print(f"| {way} | " + " | ".join(f"{value:.2f} ms" for value in cells) + " |", flush=True)
        print("\n| way | websocket round trip: median | p99 |\n" + "| --- " * 3 + "|")
        service.port = ports["direct"]
        service.post("/api/models/load/talk", b"")
        (own,) = (row["port"] for row in service.running() if row["model"] == "talk")
        paths = {"the model server itself": f"{own}/", **{way: f"{port}/upstream/talk/" for way, port in ports.items()}}
        for way, path in paths.items():
            trips = sorted(round_trips(f"ws://127.0.0.1:{path}", streams * 5))
            print(f"| {way} | {middle(trips):.2f} ms | {high(trips):.2f} ms |", flush=True)
    return 0


@contextlib.contextmanager
def ways(folder: Path) -> Iterator[tuple[Service, dict[str, int]]]:
    """A service, and the ports that lead to it."""
    behind = folder / "http.sock"
    service = Service(folder / "service", {}, args=("--bind", f"unix:{behind}"))
    models = {"alpha": {"cmd": service.fake("alpha")}, "talk": talking(service, "talk")}
    service.write_config({"models": models, "groups": {"both": {"swap": False, "members": list(models)}}})
    with contextlib.ExitStack() as stack:
        stack.callback(service.close)
        service.start()
        shipped = stack.enter_context(nginx(folder / "shipped", behind))
        buffering = stack.enter_context(
            nginx(folder / "buffering", behind, **{"proxy_buffering off": "proxy_buffering on"})
        )
        yield service, {"direct": service.port, "conf/nginx.conf": shipped, "the same, proxy_buffering on": buffering}


def measure(service: Service, streams: int) -> Delays:
    """One stream after another."""
    delays = Delays([], [])
    for _ in range(streams):
        done = len(service.events("sent"))
        with service.stream("alpha", headers={"X-Fake": f"chunks={EVENTS},interval={INTERVAL}"}) as stream:
            for _ in stream:
                pass
        sent = [event["t"] for event in service.events("sent")[done:]]
        found = [(arrival - at) / 1e6 for arrival, at in zip(stream.arrivals, sent, strict=True)]
        delays.first.append(found[0])
        delays.later.extend(found[1:])
    return delays


def round_trips(url: str, count: int) -> list[float]:
    """Milliseconds for a short message there and back, on one connection."""
    found = []
    with connect(url) as ws:
        for _ in range(count):
            begin = time.perf_counter()
            ws.send("hello")
            ws.recv()
            found.append((time.perf_counter() - begin) * 1000)
    return found


def middle(values: list[float]) -> float:
    """The median of sorted values."""
    return values[len(values) // 2]


def high(values: list[float]) -> float:
    """The 99th percentile."""
    return quantiles(values, n=100)[98]


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.workers`: the same load on 1, 2 and 4 workers; prints Markdown, takes half a minute."""

from __future__ import annotations

import statistics
import time

from bench.clients import exchange, ok, post, wrk
from bench.parts import Rig, load_model, worker_memory_mb

COUNTS = (1, 2, 4)
ROUNDS = 3


def main() -> None:
    """Measure in turns, and print."""
    small, stream = post("m"), post("m", stream=True, chunks=200)
    with Rig() as rig:
        services = {count: rig.service({"m": 0}, workers=count) for count in COUNTS}
        for service in services.values():
            load_model(service, "m")
        found: dict[int, list[tuple[float, ...]]] = {count: [] for count in COUNTS}
        for _ in range(ROUNDS):
            for count, service in services.items():
                times = [ok(exchange(service.port, small)).total * 1000 for _ in range(200)]
                rates = (wrk(service.port, rig.folder, small, 16, 2), wrk(service.port, rig.folder, stream, 50, 2))
                found[count].append((statistics.median(times), *rates, worker_memory_mb(service)))
                time.sleep(0.5)
    print(
        "| workers | small request, ms | requests a second, 16 clients | streams a second, 50 clients | MB a worker |"
    )
    print("| --- | --- | --- | --- | --- |")
    for count, rows in found.items():
        ms, rate, streams, mb = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {count} | {ms:.2f} | {rate:.0f} | {streams:.0f} | {mb:.0f} |")


if __name__ == "__main__":
    main()

"""`python -m bench.endurance --minutes 60`: memory, descriptors and threads of the workers under steady load.

Four clients, each with a pause after every answer: small answers, streams and hang-ups by turns; every tenth request of
one of them is for another model, which takes the room of the first. A line each tenth of the time, as Markdown.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import threading
import time
from pathlib import Path

from bench.clients import exchange, post
from bench.parts import Rig, load_model
from tests.service import Service

LINES = 10


class Load:
    """The clients; `stop` ends them."""

    def __init__(self, service: Service, clients: int, pause: float) -> None:
        self.requests = self.failed = 0
        self._service = service
        self._pause = pause
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End after the requests under way."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        while not self._over.wait(self._pause):
            model = "other" if rng.random() < 0.1 and number == 0 else "m"
            try:
                self._ask(model, rng.random())
            except (ConnectionError, RuntimeError):
                self.failed += 1
            self.requests += 1

    def _ask(self, model: str, kind: float) -> None:
        if kind < 0.6:
            status = exchange(self._service.port, post(model)).status
        elif kind < 0.9:
            status = exchange(self._service.port, post(model, stream=True, chunks=100)).status
        else:
            with socket.create_connection(("127.0.0.1", self._service.port), timeout=60) as sock:
                sock.sendall(post(model, stream=True, chunks=50, interval_us=2000))
                sock.recv(1024)
            return
        if status != 200:
            raise RuntimeError(str(status))


def line(service: Service, load: Load, minutes: float) -> str:
    """One row: what the workers hold now."""
    pids = service.worker_pids()
    page = os.sysconf("SC_PAGE_SIZE")
    rss = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page / 1e6 for pid in pids]
    fds = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    threads = [len(os.listdir(f"/proc/{pid}/task")) for pid in pids]
    state = sum(path.stat().st_size for path in service.state.rglob("*") if path.is_file()) / 1e6

    def row(values: list[float] | list[int]) -> str:
        return " / ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in values)

    cells = (f"{minutes:.0f}", str(load.requests), str(load.failed), row(rss), row(fds), row(threads), f"{state:.1f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.03, help="seconds a client waits after each answer")
    args = parser.parse_args()
    with Rig() as rig:
        service = rig.service({"m": 30, "other": 30}, room=1)
        load_model(service, "m")
        print("| minute | requests | failed | MB a worker | descriptors | threads | state directory, MB |")
        print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
        load = Load(service, args.clients, args.pause)
        begin = time.monotonic()
        try:
            for number in range(LINES + 1):
                time.sleep(max(0.0, begin + number * args.minutes * 60 / LINES - time.monotonic()))
                print(line(service, load, (time.monotonic() - begin) / 60), flush=True)
        finally:
            load.stop()


if __name__ == "__main__":
    main()

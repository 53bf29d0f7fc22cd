"""The figures of docs/performance.md: how each is measured, and what it must reach."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench import ideal
from bench.clients import exchange, mixed_work, ok, paced_delays, post, wrk
from bench.parts import DirectServer, Rig, load_model, worker_cpu_seconds, worker_memory_mb
from tests.service import Service, eventually

#: Loads of the swap figure in milliseconds.
LOADS = (30, 400, 1300, 3000)


@dataclass
class Figure:
    """One line of the result: samples of the model server alone, through qmflask and through a peer, one per round."""

    name: str
    unit: str
    kind: str  # "added" = via - direct; "ratio" = via / direct, more is better; "plain" = via alone
    must: str
    goal: str
    via: list[float] = field(default_factory=list)
    direct: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    def results(self) -> list[float]:
        """The figure itself, one per round."""
        return self._of(self.via)

    def _of(self, through: list[float]) -> list[float]:
        if self.kind == "added":
            return [v - d for v, d in zip(through, self.direct, strict=True)]
        return through

    def row(self) -> dict[str, object]:
        """For JSON: medians, spread and the ratio to the model server alone."""
        results = self.results()
        direct = statistics.median(self.direct) if self.direct else None
        via = statistics.median(self.via)
        return {
            "name": self.name,
            "unit": self.unit,
            "kind": self.kind,
            "direct": direct,
            "via": via,
            "ratio": via / direct if direct else None,
            "result": statistics.median(results),
            "lowest": min(results),
            "highest": max(results),
            "rounds": len(results),
            "peer": statistics.median(self._of(self.peer)) if self.peer else None,
            "must": self.must,
            "goal": self.goal,
        }


def _median_time(port: int, request: bytes, count: int, first: bool = False) -> float:
    answers = [ok(exchange(port, request)) for _ in range(count)]
    return 1000 * statistics.median(a.first_byte if first else a.total for a in answers)


def added_time(rig: Rig, quick: bool) -> Iterator[Figure]:
    """A small JSON request on a warm model, one client: what is added, and what it costs in CPU."""
    added = Figure("added time, small JSON", "ms", "added", "<= 0.7", "<= 0.4")
    cpu = Figure("CPU of the workers per small request", "ms", "plain", "<= 0.75", "")
    event = Figure("first event of a stream", "ms", "added", "<= 1.5", "<= 0.7")
    direct, service = rig.direct().start(), rig.service({"m": 0})
    load_model(service, "m")
    count = 300 if quick else 1000
    small, stream = post("m"), post("m", stream=True, chunks=3)
    for _ in range(5 if quick else 9):
        added.direct.append(_median_time(direct.port, small, count))
        before = worker_cpu_seconds(service)
        added.via.append(_median_time(service.port, small, count))
        cpu.via.append(1000 * (worker_cpu_seconds(service) - before) / count)
        event.direct.append(_median_time(direct.port, stream, count // 3, first=True))
        event.via.append(_median_time(service.port, stream, count // 3, first=True))
        if rig.peer is not None:
            added.peer.append(_median_time(rig.peer, small, count))
            event.peer.append(_median_time(rig.peer, stream, count // 3, first=True))
    direct.stop()
    rig.end(service)
    yield from (added, cpu, event)


def throughput(rig: Rig, quick: bool) -> Iterator[Figure]:
    """Requests and full-speed streams per second by wrk."""
    small = Figure("requests per second, 16 clients", "1/s", "ratio", ">= 1500", ">= 3500")
    full = Figure("SSE at full speed, 50 streams x 200 events", "streams/s", "ratio", ">= 1000", ">= 1450")
    direct, service = rig.direct().start(), rig.service({"m": 0})
    load_model(service, "m")
    seconds = 3 if quick else 5
    for _ in range(3 if quick else 7):
        for figure, body, clients in ((small, post("m"), 16), (full, post("m", stream=True, chunks=200), 50)):
            figure.direct.append(wrk(direct.port, rig.folder, body, clients, seconds))
            service.wait_idle()  # else what wrk cut off at its last end still takes slots
            figure.via.append(wrk(service.port, rig.folder, body, clients, seconds))
            if rig.peer is not None:
                figure.peer.append(wrk(rig.peer, rig.folder, body, clients, seconds))
    direct.stop()
    rig.end(service)
    yield from (small, full)


def paced_events(rig: Rig, quick: bool) -> Iterator[Figure]:
    """50 streams of 50 events a second: how much later an event arrives."""
    median = Figure("SSE at token pace, delay per event, median", "ms", "added", "<= 0.15", "<= 0.07")
    high = Figure("SSE at token pace, delay per event, p99", "ms", "added", "<= 3", "<= 1")
    direct, service = rig.direct().start(), rig.service({"m": 0})
    load_model(service, "m")
    chunks = 150 if quick else 400
    for _ in range(3 if quick else 7):
        sides = [(direct.port, median.direct, high.direct), (service.port, median.via, high.via)]
        if rig.peer is not None:
            sides.append((rig.peer, median.peer, high.peer))
        for port, mine, top in sides:
            delays = sorted(1000 * d for d in paced_delays(port, "m", 50, chunks, 20_000))
            mine.append(delays[len(delays) // 2])
            top.append(delays[len(delays) * 99 // 100])
    direct.stop()
    rig.end(service)
    yield from (median, high)


def _direct_swap(running: DirectServer, target: DirectServer, request: bytes) -> float:
    """Stop, start until healthy, answer: what a swap costs with nobody in between. Milliseconds."""
    start = time.monotonic()
    running.stop()
    target.start()
    ok(exchange(target.port, request))
    return 1000 * (time.monotonic() - start)


def swap_overhead(rig: Rig, quick: bool) -> Iterator[Figure]:
    """A request for a stopped model, less stopping, starting and asking by hand; two models, room for one."""
    for load in LOADS:
        figure = Figure(f"swap overhead, load {load} ms", "ms", "added", "<= 15", "<= 5")
        service = rig.service({"a": load, "b": load})
        pair = (rig.direct("a", load), rig.direct("b", load))
        load_model(service, "a")
        pair[0].start()
        rounds = {30: 12, 400: 8, 1300: 4, 3000: 3}[load] * (1 if quick else 3)
        for i in range(rounds):
            running, target = pair if i % 2 == 0 else pair[::-1]
            model = "ba"[i % 2]
            figure.direct.append(_direct_swap(running, target, post(model)))
            figure.via.append(1000 * ok(exchange(service.port, post(model))).first_byte)
        for server in pair:
            server.stop()
        rig.end(service)
        yield figure


def mixed(rig: Rig, quick: bool) -> Iterator[Figure]:
    """4 models, room for 2, 8 clients, 160 seeded requests; `direct` is the same schedule without any overhead."""
    load_ms, answer_ms, room = 400, 150, 2
    total = Figure("mixed work, all", "s", "plain", "<= 18", "<= 16.5")
    wait = Figure("mixed work, longest wait", "s", "plain", "<= 2", "")
    chance = random.Random(3)
    plans = [[chance.choice("abcd") for _ in range(20)] for _ in range(8)]
    best, shortest = ideal.mixed_work(plans, room, load_ms, answer_ms)
    service = rig.service(dict.fromkeys("abcd", load_ms), room=room)
    for _ in range(1 if quick else 3):
        seconds, longest = mixed_work(service.port, plans, answer_us=1000 * answer_ms)
        total.via.append(seconds)
        wait.via.append(longest)
        total.direct.append(best)
        wait.direct.append(shortest)
    rig.end(service)
    yield from (total, wait)


def footprint(rig: Rig, quick: bool) -> Iterator[Figure]:
    """Start of the service, memory with 100 open streams, and CPU while every slot waits for one long load."""
    start = Figure("process start to the first health answer", "s", "plain", "<= 1.5", "<= 0.8")
    memory = Figure("memory per worker, 100 open streams", "MB", "plain", "<= 60", "<= 45")
    waiting = Figure("CPU while every slot waits for one load", "% of a core", "plain", "< 2", "")
    for _ in range(3 if quick else 7):
        service = rig.service({"m": 0, "slow": 600_000}, room=2, start=False)
        began = time.monotonic()
        service.spawn()
        eventually(lambda s=service: _answers(s), "health", every=0.002)  # type: ignore[misc]
        start.via.append(time.monotonic() - began)
        if len(start.via) == 1:
            load_model(service, "m")
            memory.via.append(_memory_with_streams(service, 100))
            waiting.via.append(_cpu_while_waiting(service, 100, seconds=8 if quick else 30))
        rig.end(service)
    yield from (start, memory, waiting)


def _answers(service: Service) -> bool:
    try:
        return exchange(service.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").status == 200
    except ConnectionError:
        return False


def _memory_with_streams(service: Service, count: int) -> float:
    request = {"model": "m", "stream": True, "chunks": 1000, "interval_us": 100_000}
    socks = [service.open("/v1/chat/completions", request) for _ in range(count)]
    for sock in socks:
        sock.recv(1)
    used = worker_memory_mb(service)
    for sock in socks:
        sock.close()
    return used


def _cpu_while_waiting(service: Service, count: int, seconds: int) -> float:
    socks = [service.open("/v1/chat/completions", {"model": "slow"}) for _ in range(count)]
    quiet = threading.Event()
    quiet.wait(2)  # let every request arrive and queue
    before, began = worker_cpu_seconds(service), time.monotonic()
    quiet.wait(seconds)
    share = (worker_cpu_seconds(service) - before) / (time.monotonic() - began)
    for sock in socks:
        sock.close()
    return 100 * share


MEASURES: dict[str, Callable[[Rig, bool], Iterator[Figure]]] = {
    "added": added_time,
    "throughput": throughput,
    "paced": paced_events,
    "swap": swap_overhead,
    "mixed": mixed,
    "footprint": footprint,
}

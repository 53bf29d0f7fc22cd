"""`/metrics`: everything countable, in Prometheus' text form, the same from every worker.

Neither gauges nor counters live in a worker's memory. Workers add what they served to a table of `activity.db`, in the
transaction that stores the records; the leader adds what it did to one of `state.db`, in the transaction that does it.
A scrape reads both. So there are no files per process to merge or clean up (prometheus_client's multiprocess mode), a
worker's death takes nothing back, and counters go on after a restart; only `kill -9` costs its last 0.25 s.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import orjson
from flask import Blueprint, Response, request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from qmflask import __version__
from qmflask.config import Config
from qmflask.router import Router
from qmflask.states import DOWN, State
from qmflask.store.activity import ActivityError
from qmflask.store.counters import BOUNDS, Sum
from qmflask.store.reading import Status
from qmflask.web import auth

log = logging.getLogger(__name__)

MIB = 1 << 20

#: name in the tables -> (metric without `_total`, help, labels)
COUNTERS: dict[str, tuple[str, str, list[str]]] = {
    "requests": ("qmflask_requests", "Requests on model routes.", ["model", "route", "status", "key"]),
    "response_bytes": ("qmflask_response_bytes", "Bytes of answers passed on.", ["model"]),
    "tokens": ("qmflask_tokens", "Tokens as counted by the model servers.", ["model", "direction"]),
    "swaps": ("qmflask_swaps", "Swaps begun, by the model that was to be loaded.", ["model"]),
    "model_starts": ("qmflask_model_starts", "Starts of a model's command.", ["model"]),
    "model_start_failures": ("qmflask_model_start_failures", "Starts that failed, by code.", ["model", "code"]),
    "model_stops": (
        "qmflask_model_stops",
        "Stops of loaded or loading models: evicted, ttl, unload, pressure, crash, start_failed, ...",
        ["model", "cause"],
    ),
    "leader_changes": ("qmflask_leader_changes", "Terms of the scheduler's leader.", []),
}

HISTOGRAMS: dict[str, tuple[str, str, list[str]]] = {
    "request_duration_seconds": (
        "qmflask_request_duration_seconds",
        "From a request's arrival to its answer's end.",
        ["model", "route"],
    ),
    "time_to_first_byte_seconds": (
        "qmflask_time_to_first_byte_seconds",
        "From a request's arrival to its answer's first byte, waiting included.",
        ["model", "route"],
    ),
    "wait_seconds": ("qmflask_wait_seconds", "From a request's arrival to its grant, loads included.", ["model"]),
    "model_load_seconds": ("qmflask_model_load_seconds", "From a model's start to its being ready.", ["model"]),
}


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """`GET /metrics`."""
    routes = Blueprint("prometheus", __name__)

    @routes.get("/metrics")
    def metrics() -> Response:
        auth.require_all_models(router().live.config, request.environ)
        registry = CollectorRegistry()
        registry.register(Box(router()))
        return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)

    return routes


class Box(Collector):
    """Reads the stores once per scrape and turns what it finds into metric families."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are fixed here, so registering need not collect to learn them."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families."""
        status, config = self._router.status(), self._router.live.config
        yield GaugeMetricFamily("qmflask_up", "1 where the service answers.", 1)
        build = GaugeMetricFamily("qmflask_build_info", "The version that answers.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        yield from self._counted({worker.id for worker in status.workers})
        yield from requests_now(status)
        yield from service_now(status)
        yield from models_now(status, config)
        yield from memory_now(status, config)

    def _counted(self, workers: set[str]) -> Iterator[Metric]:
        sums = list(self._router.counters())
        up, performance, slots = 1, None, list[tuple[str, str, int, int]]()
        try:
            sums += self._router.activity.store.counters()
            performance = self._router.activity.store.newest_performance()
            slots = self._router.activity.store.slots()
        except ActivityError as error:
            up = 0
            log.warning("metrics of requests are missing: %s", error)
        yield GaugeMetricFamily("qmflask_activity_up", "0 while the activity store cannot be read.", up)
        yield from counted(sums)
        yield from slots_now(row for row in slots if row[0] in workers)
        if performance is not None:
            yield from host_now(orjson.loads(performance))


def counted(sums: Iterable[Sum]) -> Iterator[Metric]:
    """Counter and histogram families from the tables' sums; every declared family is there, also when empty."""
    by_name: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for name, labels, value in sums:
        by_name[name][labels] = by_name[name].get(labels, 0) + value
    for name, (metric, text, names) in COUNTERS.items():
        family = CounterMetricFamily(metric, text, labels=names)
        for key, value in by_name[name].items():
            family.add_metric(key, value)
        yield family
    for name, (metric, text, names) in HISTOGRAMS.items():
        yield _histogram(metric, text, names, by_name[f"{name}_bucket"], by_name[f"{name}_sum"])


def _histogram(
    metric: str,
    text: str,
    labels: list[str],
    buckets: Mapping[tuple[str, ...], float],
    totals: Mapping[tuple[str, ...], float],
) -> Metric:
    family = HistogramMetricFamily(metric, text, labels=labels)
    for key, total in totals.items():
        running, found = 0.0, []
        for bound in BOUNDS:
            running += buckets.get((*key, bound), 0)
            found.append((bound, running))
        family.add_metric(key, found, total)
    return family


def requests_now(status: Status) -> Iterator[Metric]:
    """In flight and queued."""
    counts = Counter((row.model, row.state) for row in status.requests if row.kind == "infer")
    for state, name, text in (
        ("granted", "qmflask_requests_in_flight", "Requests that hold a lease."),
        ("queued", "qmflask_requests_queued", "Requests that wait for their model."),
    ):
        family = GaugeMetricFamily(name, text, labels=["model"])
        for model in sorted({*status.processes, *(model for model, _ in counts)}):
            family.add_metric([model], counts[model, state])
        yield family
    family = GaugeMetricFamily("qmflask_swaps_open", "Swaps under way, by phase.", labels=["phase"])
    for phase, number in Counter(swap.phase.value for swap in status.swaps).items():
        family.add_metric([phase], number)
    yield family


def slots_now(rows: Iterable[tuple[str, str, int, int]]) -> Iterator[Metric]:
    """What the living workers can serve at once, and how much of it is taken: worker, kind, all, taken."""
    totals, taken = Counter[str](), Counter[str]()
    for _, kind, all_, used in rows:
        totals[kind] += all_
        taken[kind] += used
    for name, text, found in (
        ("qmflask_slots", "Requests (inference) and streams of pages (page) that all workers serve at once.", totals),
        ("qmflask_slots_taken", "How many of them are taken, as of the last second.", taken),
    ):
        family = GaugeMetricFamily(name, text, labels=["kind"])
        for kind, number in sorted(found.items()):
            family.add_metric([kind], number)
        yield family


def service_now(status: Status) -> Iterator[Metric]:
    """Workers, term and configuration."""
    yield GaugeMetricFamily("qmflask_workers", "Live worker processes.", len(status.workers))
    yield GaugeMetricFamily(
        "qmflask_has_leader", "1 while a worker schedules.", int(status.scheduler.leader is not None)
    )
    yield GaugeMetricFamily("qmflask_term", "The leader's term.", status.scheduler.generation)
    yield GaugeMetricFamily(
        "qmflask_config_generation", "The configuration in force.", status.scheduler.config_generation
    )
    yield GaugeMetricFamily(
        "qmflask_config_rejected", "1 while the newest file is not valid.", int(bool(status.scheduler.config_error))
    )


def models_now(status: Status, config: Config) -> Iterator[Metric]:
    """State and sizes of each configured model."""
    states = GaugeMetricFamily("qmflask_model_state", "1 for the model's state.", labels=["model", "state"])
    sizes = GaugeMetricFamily(
        "qmflask_model_size_bytes",
        "Memory of a model by origin: configured, learned (peak), measured (now).",
        labels=["model", "pool", "origin"],
    )
    measured = status.sample.get("models") or {}
    for model in config.models.values():
        row = status.processes.get(model.id)
        state = row.state if row else State.STOPPED
        for one in State:
            states.add_metric([model.id, one.value], int(one is state))
        learned = status.sizes.get(model.launch_hash, (0, 0))
        now = measured.get(model.id) or {}
        for number, (pool, configured) in enumerate((("vram", model.est_vram), ("ram", model.est_ram))):
            for origin, size in (("configured", configured), ("learned", learned[number])):
                if size:
                    sizes.add_metric([model.id, pool, origin], size)
            if now.get(pool) is not None and state not in DOWN:
                sizes.add_metric([model.id, pool, "measured"], now[pool])
    yield states
    yield sizes


def memory_now(status: Status, config: Config) -> Iterator[Metric]:
    """Budgets, ceilings, foreign use, floors and cards, as far as they are known."""
    sample = status.sample
    pools: dict[str, tuple[str, dict[str, Any]]] = {
        "qmflask_budget_bytes": ("Configured budget.", {"vram": config.vram_budget, "ram": config.ram_budget}),
        "qmflask_ceiling_bytes": (
            "What may be taken now.",
            {"vram": sample.get("vram_ceiling"), "ram": sample.get("ram_ceiling")},
        ),
        "qmflask_foreign_bytes": ("Used by others on the cards.", {"vram": sample.get("foreign")}),
        "qmflask_floor_bytes": ("Lowest trusted foreign use.", {"vram": sample.get("floor")}),
    }
    for name, (text, values) in pools.items():
        family = GaugeMetricFamily(name, text, labels=["pool"])
        for pool, value in values.items():
            if value:
                family.add_metric([pool], value)
        yield family
    host = sample.get("host") or {}
    if host.get("total"):
        yield GaugeMetricFamily("qmflask_host_memory_total_bytes", "System memory.", host["total"])
        yield GaugeMetricFamily("qmflask_host_memory_available_bytes", "What can be had of it.", host["available"])


def host_now(reading: Mapping[str, Any]) -> Iterator[Metric]:
    """The newest sample of host and cards under the names that dashboards for llama-swap know (compatibility 3.12)."""
    host = reading["sys"]
    cores = GaugeMetricFamily("llamaswap_cpu_util_percent", "Busy share of each core.", labels=["core"])
    for number, value in enumerate(host["cpu_util_per_core"]):
        cores.add_metric([str(number)], value)
    yield cores
    for kind, names in (("memory", ("total", "used", "free")), ("swap", ("total", "used"))):
        for name in names:
            value = host[f"{'mem' if kind == 'memory' else 'swap'}_{name}_mb"] * MIB
            yield GaugeMetricFamily(f"llamaswap_{kind}_{name}_bytes", f"{kind.title()} {name}.", value)
    load = GaugeMetricFamily("llamaswap_load_average", "Load average.", labels=["interval"])
    for minutes in (1, 5, 15):
        load.add_metric([f"{minutes}m"], host[f"load_avg_{minutes}"])
    yield load
    network = CounterMetricFamily(
        "llamaswap_network_bytes", "Bytes through each interface.", labels=["interface", "direction"]
    )
    for interface in host["net_io"]:
        network.add_metric([interface["name"], "recv"], interface["bytes_recv"])
        network.add_metric([interface["name"], "sent"], interface["bytes_sent"])
    yield network
    for field, (name, text, unit) in _GPU.items():
        family = GaugeMetricFamily(f"llamaswap_gpu_{name}", text, labels=["id", "name", "uuid"])
        for card in reading["gpu"]:
            family.add_metric([str(card["id"]), card["name"], card["uuid"]], card[field] * unit)
        yield family


_GPU = {
    "temp_c": ("temperature_celsius", "Temperature.", 1),
    "vram_temp_c": ("vram_temperature_celsius", "Temperature of the memory.", 1),
    "gpu_util_pct": ("util_percent", "Utilisation.", 1),
    "mem_util_pct": ("memory_util_percent", "Utilisation of the memory's bandwidth.", 1),
    "mem_used_mb": ("memory_used_bytes", "Memory in use.", MIB),
    "mem_total_mb": ("memory_total_bytes", "Memory.", MIB),
    "fan_speed_pct": ("fan_speed_percent", "Fan.", 1),
    "power_draw_w": ("power_draw_watts", "Power.", 1),
}

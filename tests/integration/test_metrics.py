"""`/metrics` through a real service: one truth from all workers, and none of it lost with a worker."""

from __future__ import annotations

import json
import os
import re
import signal

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.conftest import StartService
from tests.integration.survival import lives
from tests.service import REPO, Service, eventually

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(service: Service) -> Samples:
    """Every sample by name and labels; fails on what Prometheus would not read."""
    reply = service.get("/metrics")
    assert reply.status == 200
    families = list(text_string_to_metric_families(reply.body.decode()))
    assert len({f.name for f in families}) == len(families), "each family once"
    assert all(f.documentation for f in families)
    assert [bad for f in families for bad in unconventional(f)] == []
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def unconventional(family: Metric) -> list[str]:
    """What `promtool check metrics` would say of a family of ours: names, units, counters and their suffix."""
    found = []
    if not re.fullmatch(r"(qmflask|llamaswap)_[a-z0-9_]+", family.name):
        found.append(f"{family.name}: not in our namespace, or not in snake case")
    if family.type not in ("counter", "gauge", "histogram"):
        found.append(f"{family.name}: type {family.type}")
    if family.type != "counter" and family.name.endswith(("_total", "_count", "_sum", "_bucket")):
        # The names of llama-swap's gauges are not ours to choose.
        found.append(f"{family.name}: a suffix that says it were another type")
    if re.search(r"_(ms|milliseconds|minutes|hours|kb|mb|gb|mib|gib|kilobytes|megabytes|bits)(_|$)", family.name):
        found.append(f"{family.name}: not in base units")
    if family.type == "histogram" and not family.name.endswith("_seconds"):
        found.append(f"{family.name}: a histogram of no unit")
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    """The sum of the samples with that name and at least these labels."""
    return sum(v for (n, pairs), v in found.items() if n == name and labels.items() <= dict(pairs).items())


def two(service: Service) -> dict[str, object]:
    fakes = {name: {"cmd": service.fake(name, load_time=0.05), "estVramGB": 9} for name in ("alpha", "beta")}
    odd = {
        'q"uo\\te\nline': {"cmd": service.fake("odd"), "estVramGB": 1},
        "broken": {"cmd": "false ${PORT}", "estVramGB": 1},
    }
    return {"vramBudgetGB": 16, "models": {**fakes, **odd}, "performance": {"every": "5s"}}


def test_counts_are_the_same_from_every_worker_and_survive_deaths(start_service: StartService) -> None:
    service = start_service(two, workers=2)
    for name in ("alpha", "beta", "alpha", 'q"uo\\te\nline', "nope", "broken"):
        service.chat(name)
    label = {"route": "/v1/chat/completions"}

    def all_counted() -> Samples | None:
        found = scrape(service)
        sampled = value(found, "llamaswap_memory_total_bytes") > 0  # by a thread of the leader's, when it gets to it
        told = value(found, "qmflask_slots", kind="inference") == 2 * 12  # by each worker, once a second
        over = value(found, "qmflask_requests_in_flight") == 0  # a lease ends a moment after its answer
        return found if sampled and told and over and value(found, "qmflask_requests_total") == 6 else None

    found = eventually(all_counted, "six requests are counted")
    assert value(found, "qmflask_requests_total", model="alpha", status="200", **label) == 2
    assert value(found, "qmflask_requests_total", model='q"uo\\te\nline', status="200") == 1
    assert value(found, "qmflask_requests_total", model="", status="404") == 1
    assert value(found, "qmflask_tokens_total", model="alpha", direction="in") == 6
    assert value(found, "qmflask_swaps_total", model="alpha") == 2
    assert value(found, "qmflask_model_starts_total", model="beta") == 1
    assert value(found, "qmflask_model_start_failures_total", model="broken", code="model_start_failed") == 1
    assert value(found, "qmflask_model_stops_total", cause="evicted") == 2
    assert value(found, "qmflask_model_load_seconds_count", model="alpha") == 2
    assert value(found, "qmflask_wait_seconds_count", model="alpha") == 2
    assert value(found, "qmflask_time_to_first_byte_seconds_bucket", model="alpha", le="+Inf") == 2
    assert value(found, "qmflask_model_state", model="alpha", state="ready") == 1
    assert value(found, "qmflask_model_state", model="beta") == 1, "exactly one state"
    assert value(found, "qmflask_model_size_bytes", model="alpha", pool="vram", origin="configured") == 9 * 2**30
    assert value(found, "qmflask_budget_bytes", pool="vram") == 16 * 2**30
    assert (value(found, "qmflask_workers"), value(found, "qmflask_has_leader")) == (2, 1)
    eventually(lambda: value(scrape(service), "qmflask_slots_taken") == 0, "all slots are free: told once a second")
    leaders = value(found, "qmflask_leader_changes_total")

    leader = service.leader()
    os.kill(leader, signal.SIGKILL)
    eventually(lambda: not lives(leader), "it is dead: until then it may take a connection")
    assert service.chat("beta").status == 200
    after = eventually(lambda: (f := scrape(service)) and value(f, "qmflask_requests_total") == 7 and f, "the seventh")
    for (name, pairs), count in found.items():
        if name.endswith(("_total", "_count", "_bucket", "_sum")) and name.startswith("qmflask"):
            assert after.get((name, pairs), 0) >= count, f"{name}{pairs} went back"
    assert value(after, "qmflask_leader_changes_total") > leaders
    with service.stream("beta", headers={"X-Fake": "chunks=1000, interval=0.05"}) as stream:
        next(iter(stream))
        assert value(scrape(service), "qmflask_requests_in_flight", model="beta") == 1
        eventually(lambda: value(scrape(service), "qmflask_slots_taken", kind="inference") == 1, "one slot is taken")
    eventually(lambda: value(scrape(service), "qmflask_slots", kind="inference") == 2 * 12, "the dead one's are gone")
    assert_dashboard_and_page_agree(service)


def assert_dashboard_and_page_agree(service: Service) -> None:
    """The dashboard asks only for what is there, and the documentation names all of it."""
    eventually(lambda: "llamaswap_gpu_util_percent" in service.get("/metrics").body.decode(), "the first sample")
    families = text_string_to_metric_families(service.get("/metrics").body.decode())
    # A counter's family goes without its `_total`, a histogram's without `_bucket`.
    known = {name for f in families for name in (f.name, f"{f.name}_total", f"{f.name}_bucket")}
    dashboard = json.loads((REPO / "conf" / "grafana.json").read_text())
    asked = set(re.findall(r"\b(?:qmflask|llamaswap)_\w+", json.dumps(dashboard["panels"])))
    assert len(asked) > 20
    assert asked <= known
    table = (REPO / "docs" / "metrics.md").read_text()
    shown = set(re.findall(r"`(qmflask_\w+)`", table))
    assert shown <= known
    missing = {f for f in known if f.startswith("qmflask") and not f.endswith(("_bucket", "_total"))} - shown
    assert {m for m in missing if f"{m}_total" not in shown} <= {"qmflask_up", "qmflask_build_info"}

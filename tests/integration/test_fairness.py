"""Who gets the room, and when: agents between tool calls, streams of requests that never end, three busy models."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.conftest import StartService
from tests.service import Reply, Service, eventually

#: How much longer than promised a busy machine may make somebody wait. Who starves waits for ever.
SLACK = 10.0
LOAD = 0.1


def config_of(service: Service) -> dict[str, Any]:
    """One place of 15 GB for the pairs of 9, three for the others of 5; each pair with the patience its test needs."""

    def model(name: str, size: int, **more: Any) -> dict[str, Any]:
        return {"cmd": service.fake(name, load_time=LOAD), "estVramGB": size, **more}

    models = {name: model(name, 9, patienceMs=1500) for name in ("held-one", "held-two")}
    models |= {name: model(name, 9, patienceMs=1500, hold="never") for name in ("free-one", "free-two")}
    models |= {name: model(name, 9, patienceMs=400) for name in ("popular", "rare")}
    models["painter"] = model("painter", 5, capabilities={"out": ["image"]})
    models["writer"] = model("writer", 5, patienceMs=400)
    models |= {name: model(name, 5) for name in ("a", "b", "c", "d")}
    first = {"scheduler": {"settings": {"fifo": {"priority": {"popular": 10}}}}}
    return {"vramBudgetGB": 15, "routing": first, "models": models}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all: the next test's models stop the last one's."""
    service = Service(tmp_path_factory.mktemp("fairness"), {}, workers=2, threads=32)
    service.write_config(config_of(service))
    service.start()
    yield service
    print(service.log()[-20_000:])
    service.close()


# --- agents -----------------------------------------------------------------------------------------------


@dataclass
class Rounds:
    """How two agents work: so many rounds, each an answer that ends in a tool call and then the tool's time."""

    count: int
    answer: float
    tool: float


def agent(service: Service, model: str, rounds: Rounds) -> list[float]:
    """One agent's work; returns how long each of its requests took, in all shapes that a tool call comes in."""
    took = []
    for number in range(rounds.count):
        ending = "stop" if number == rounds.count - 1 else "tools"
        path, pauses = (("/v1/chat/completions", 1), ("/v1/messages", 5))[number % 2]
        streamed = number % 4 < 2
        body = {"model": model, "max_tokens": 9, "messages": [], "stream": streamed}
        interval = rounds.answer / pauses if streamed else rounds.answer
        headers = {"X-Fake": f"ending={ending}, interval={interval}, chunks=1"}
        began = time.monotonic()
        reply = service.post(path, body, headers=headers, timeout=300)
        assert reply.status == 200, reply.body
        took.append(time.monotonic() - began)
        time.sleep(rounds.tool)
    return took


def two_agents(service: Service, models: tuple[str, str], rounds: Rounds) -> tuple[int, float]:
    """Both at once; returns how many loads that took, and the longest request."""
    before = sum(len(service.events("start", name)) for name in models)
    with ThreadPoolExecutor(2) as pool:
        took = list(pool.map(lambda name: agent(service, name, rounds), models))
    starts = sum(len(service.events("start", name)) for name in models) - before
    return starts, max(max(each) for each in took)


def test_agents_are_not_interrupted_between_their_tool_calls(service: Service) -> None:
    rounds = Rounds(5, answer=0.05, tool=0.1)
    free, _ = two_agents(service, ("free-one", "free-two"), rounds)
    held, longest = two_agents(service, ("held-one", "held-two"), rounds)
    print(f"{held} loads with the hold, {free} without; longest request {longest:.1f} s")
    assert free >= 3 * held
    assert longest < 1.5 + rounds.answer + LOAD + SLACK


def test_a_request_may_ask_for_a_shorter_hold_not_for_a_longer_one(service: Service) -> None:
    def held() -> float:
        query = "SELECT (hold_until - idle_since) / 1e9 FROM processes WHERE model = 'held-one'"
        return float(service.query(query)[0][0])

    for asked, wanted in (("0", 0.0), ("2500", 2.5), ("99999", 10.0)):
        headers = {"X-Fake": "ending=tools", "X-QM-Hold-Ms": asked}
        assert service.chat("held-one", headers=headers).status == 200
        eventually(lambda wanted=wanted: held() == wanted, f"it is held for {wanted} s")  # type: ignore[misc]


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_agents_of_20_rounds_with_the_settings_as_they_come(start_service: StartService) -> None:
    """By hand: `pytest -m heavy -s -k 20_rounds tests/integration/test_fairness.py`; figures in docs/scheduling.md."""

    def config(service: Service) -> dict[str, Any]:
        kept = {name: {"cmd": service.fake(name, load_time=0.4), "estVramGB": 9} for name in ("alpha", "beta")}
        free = {name: {**kept["alpha"], "cmd": service.fake(name, load_time=0.4)} for name in ("gamma", "delta")}
        return {"vramBudgetGB": 15, "models": kept | {name: {**keys, "hold": "never"} for name, keys in free.items()}}

    service = start_service(config, workers=2)
    rounds = Rounds(20, answer=0.5, tool=3.5)
    free, without = two_agents(service, ("gamma", "delta"), rounds)
    held, longest = two_agents(service, ("alpha", "beta"), rounds)
    print(f"\n{held} loads with the hold, longest request {longest:.1f} s; {free} without, {without:.1f} s")
    assert free >= 5 * held
    assert longest < 60 + rounds.answer + 0.4 + SLACK


# --- streams of requests that never end -------------------------------------------------------------------


class Crowd:
    """Clients that ask one model on and on, their answers overlapping, until told to stop."""

    def __init__(self, ask: Callable[[], Reply], clients: int = 4) -> None:
        self.codes: list[int] = []
        self._ask, self._end = ask, threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def _run(self) -> None:
        while not self._end.is_set():
            self.codes.append(self._ask().status)

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
            self._end.wait(0.1)  # so that they do not end together
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()


ANSWER = 0.25


def test_a_stream_of_requests_of_higher_priority_starves_nobody(service: Service) -> None:
    headers = {"X-Fake": f"interval={ANSWER}"}
    assert service.chat("popular").status == 200
    with Crowd(lambda: service.chat("popular", headers=headers, timeout=60)) as crowd:
        began = time.monotonic()
        assert service.chat("rare", timeout=0.4 + ANSWER + LOAD + SLACK).status == 200
        print(f"rare waited {time.monotonic() - began:.2f} s")
        served = len(crowd.codes)
        eventually(lambda: len(crowd.codes) > served + 4, "the others are served again")
    assert set(crowd.codes) == {200}


def test_overlapping_renders_starve_nobody(service: Service) -> None:
    """The writer fits beside the painter, but nothing is started while an image is made."""
    body = {"model": "painter", "prompt": "a hat"}
    headers = {"X-Fake": f"interval={ANSWER}, size=100"}
    render = "/v1/images/generations"
    assert service.post(render, body, headers={"X-Fake": "size=100"}).status == 200
    stopped = len(service.events("term", "painter"))
    with Crowd(lambda: service.post(render, body, headers=headers, timeout=60)) as crowd:
        began = time.monotonic()
        assert service.chat("writer", timeout=0.4 + ANSWER + LOAD + SLACK).status == 200
        print(f"the writer waited {time.monotonic() - began:.2f} s")
    assert set(crowd.codes) == {200}
    assert len(service.events("term", "painter")) == stopped, "it was not in the way, only its work was"
    (start,) = service.events("start", "writer")
    asked = int(began * 1e9)
    assert min(in_flight(service.events(name="painter"), asked, start["t"])) == 0, "started while images were made"


def in_flight(events: list[dict[str, Any]], since: int, until: int) -> list[int]:
    """How many requests a server had in hand after each change within that time."""
    counts, count = [], 0
    for event in events:
        count += {"request": 1, "done": -1}.get(event["event"], 0)
        if since < event["t"] < until:
            counts.append(count)
    return counts


# --- three busy models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["a", "b", "c"])
def test_the_fourth_takes_the_place_of_whichever_is_idle_first(service: Service, first: str) -> None:
    streams = {name: service.stream(name, headers={"X-Fake": "chunks=2000, interval=0.05"}) for name in "abc"}
    try:
        for stream in streams.values():
            next(iter(stream))
        before = {name: len(service.events("term", name)) for name in "abc"}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(service.chat, "d")
            eventually(lambda: service.query("SELECT 1 FROM requests WHERE model = 'd' AND state = 'queued'"), "waits")
            streams[first].close()
            assert waiting.result().status == 200
        stopped = {name for name in "abc" if len(service.events("term", name)) > before[name]}
        assert stopped == {first}
        for name in set("abc") - {first}:
            next(iter(streams[name]))  # goes on
    finally:
        for stream in streams.values():
            stream.close()

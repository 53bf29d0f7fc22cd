"""The service's life: how it starts, reloads, is replaced and ends, and what becomes of its models and its waiters."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import StartService
from tests.integration.survival import lives, overlaps, persistent_chat
from tests.service import Service, eventually


def config_of(service: Service, *names: str, room: int = 2, **top: Any) -> dict[str, Any]:
    """Scripted models of 1 GB with room for `room`."""
    models = {name: {"cmd": service.fake(name, load_time=0.05), "estVramGB": 1, "unloadTimeout": 2} for name in names}
    return {"vramBudgetGB": room, **top, "models": models}


def server_pid(service: Service, model: str) -> int:
    """The pid of a model's newest server, by its own account."""
    return int(service.wait_event("start", model)["pid"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_ending_with_one_worker_stops_models_and_tells_waiters(
    start_service: StartService, number: signal.Signals
) -> None:
    def config(service: Service) -> dict[str, Any]:
        given = config_of(service, "alpha", "slow")
        given["models"]["slow"]["cmd"] = service.fake("slow", load_time=60)
        return given

    service = start_service(config, workers=1)
    assert service.chat("alpha").status == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(service.chat, "slow")
        service.wait_event("start", "slow")
        began = time.monotonic()
        service.signal(number)
        reply = waiting.result()
        assert (reply.status, reply.code) == (503, "shutting_down")
        assert reply.header("Retry-After")
        assert time.monotonic() - began < 10, "it is told as soon as the worker drains"
    assert service.process is not None
    service.process.wait(40)
    assert service.processes() == {}
    assert len(service.events("term", "alpha")) == 1


def refused(service: Service) -> bool:
    """Whether nobody listens at the service's address any more."""
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", service.port)) != 0


def test_a_service_that_ends_lets_nobody_in_while_its_last_stream_runs(start_service: StartService) -> None:
    service = start_service(lambda s: config_of(s, "alpha"), workers=2)
    with service.stream("alpha", headers={"X-Fake": "chunks=2000, interval=0.05"}) as stream:
        next(iter(stream))
        service.signal(signal.SIGTERM)
        eventually(lambda: refused(service), "the address is free", timeout=20)
        sent = len(service.events("sent"))
        eventually(lambda: len(service.events("sent")) > sent, "the stream runs on")
    assert service.process is not None
    service.process.wait(30)


def test_without_its_master_a_worker_ends_its_streams_and_leaves_the_address(start_service: StartService) -> None:
    service = start_service(lambda s: config_of(s, "alpha"), workers=2)
    with service.stream("alpha", headers={"X-Fake": "chunks=2000, interval=0.05"}) as stream:
        next(iter(stream))
        old = set(service.registered_workers())
        service.signal(signal.SIGKILL)
        assert service.process is not None
        service.process.wait()
        eventually(lambda: refused(service), "the address is free", timeout=20)
        service.start()
        sent = len(service.events("sent"))
        assert service.chat("alpha").status == 200
        eventually(lambda: len(service.events("sent")) > sent, "the old worker's stream runs on")
    eventually(lambda: not old & set(service.processes()), "the old workers end")
    assert len(service.events("start", "alpha")) == 1, "the next start adopts"


#: While there is a gate, workers wait in their boot, each for a sign of its own.
GATED = """
import pathlib, time
from qmflask import gunicorn_conf as shipped
from qmflask.gunicorn_conf import *

def post_worker_init(worker):
    gate = pathlib.Path({gate!r})
    (gate / f"{{worker.pid}}.waits").touch() if gate.exists() else None
    while gate.exists() and not (gate / f"{{worker.pid}}.may").exists():
        time.sleep(0.01)
    shipped.post_worker_init(worker)
"""


class Gate:
    """Holds up the boot of workers."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "gate"
        self.settings = folder / "gated.py"
        self.settings.write_text(GATED.format(gate=str(self._path)))

    def close(self) -> None:
        """From now on."""
        self._path.mkdir()

    def waiting(self) -> set[int]:
        """Who is held up, or was."""
        return {int(path.stem) for path in self._path.glob("*.waits")}

    def let_in(self, worker: int) -> None:
        """One of them."""
        (self._path / f"{worker}.may").touch()

    def open(self) -> None:
        """All of them."""
        self._path.rename(self._path.with_suffix(".open"))


def serves(service: Service, seconds: float = 1.0) -> bool:
    """Whether every request is answered for longer than a worker takes to hear that it is to end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if service.chat("alpha").status != 200:
            return False
    return True


def test_at_hup_the_old_workers_serve_until_the_new_ones_are_there(start_service: StartService, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    service = start_service(lambda s: config_of(s, "alpha"), workers=2, args=("-c", str(gate.settings)))
    old = set(service.registered_workers())
    gate.close()
    service.signal(signal.SIGHUP)
    eventually(lambda: len(gate.waiting()) == 2, "the new workers boot")
    assert serves(service)
    gate.let_in(min(gate.waiting()))
    eventually(lambda: len(service.registered_workers()) == 3, "one of them is up")
    assert serves(service)
    assert old < set(service.registered_workers()), "the other is not"
    gate.open()
    eventually(lambda: not old & set(service.processes()), "the old workers go", timeout=15)
    assert len(service.registered_workers()) == 2
    assert service.chat("alpha").status == 200


def test_hup_upon_hup_while_nobody_is_up_yet(start_service: StartService, tmp_path: Path) -> None:
    """Each HUP sends away those that the one before it has forked; they serve all the same until others can."""
    gate = Gate(tmp_path)
    service = start_service(lambda s: config_of(s, "alpha"), workers=1, args=("-c", str(gate.settings)))
    (first,) = service.registered_workers()
    gate.close()
    service.signal(signal.SIGHUP)
    (second,) = eventually(gate.waiting, "the second worker boots")
    os.kill(first, signal.SIGKILL)
    service.signal(signal.SIGHUP)
    (third,) = eventually(lambda: gate.waiting() - {second}, "the third worker boots")
    gate.let_in(second)
    eventually(lambda: service.registered_workers() == [second], "the second worker is up")
    assert serves(service)
    assert service.registered_workers() == [second]
    gate.let_in(third)
    eventually(lambda: second not in service.processes(), "it goes when the third is up", timeout=15)
    assert service.registered_workers() == [third]


def test_kept_models_are_adopted_by_the_next_start_and_preloaded_once(start_service: StartService) -> None:
    def config(service: Service, shutdown: str) -> dict[str, Any]:
        hooks = {"on_startup": {"preload": ["beta", "alpha"]}}
        return config_of(service, "alpha", "beta", onShutdown=shutdown, hooks=hooks)

    service = start_service(lambda s: config(s, "keep"), workers=3)
    eventually(lambda: len(service.events("ready")) == 2, "both are preloaded")
    assert [event["name"] for event in service.events("start")] == ["beta", "alpha"]
    first = service.events("ready", "beta")[0]["t"]
    assert service.events("start", "alpha")[0]["t"] > first, "in list order, each when the one before it is healthy"
    service.hup()
    service.wait_idle()
    pids = {event["name"]: event["pid"] for event in service.events("start")}
    service.stop()
    assert all(map(lives, pids.values()))
    service.start()
    eventually(lambda: len(service.running()) == 2, "both are adopted")
    assert {row["model"]: row["pid"] for row in service.running()} == pids
    assert service.chat("alpha").status == 200
    assert len(service.events("start")) == 2
    service.write_config(config(service, "stop"))
    assert service.post("/api/config/reload").status == 200


def test_a_preload_goes_on_under_the_next_leader(start_service: StartService) -> None:
    def config(service: Service) -> dict[str, Any]:
        given = config_of(service, "alpha", "beta", hooks={"on_startup": {"preload": ["alpha", "beta"]}})
        given["models"]["alpha"]["cmd"] = service.fake("alpha", load_time=1)
        return given

    service = start_service(config, workers=2)
    service.wait_event("start", "alpha")
    os.kill(service.leader(), signal.SIGKILL)
    eventually(lambda: len(service.events("ready")) == 2, "both are loaded")
    eventually(lambda: {row["state"] for row in service.running()} == {"ready"}, "and known to be")
    assert [event["name"] for event in service.events("start")] == ["alpha", "beta"], "each once, in list order"


PLAIN = """
worker_class = "gthread"
graceful_timeout = 30
timeout = 60
"""


def test_without_hooks_the_last_worker_stops_the_models(start_service: StartService, tmp_path: Path) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text(PLAIN)
    service = start_service(lambda s: config_of(s, "alpha"), up=False, workers=2)
    service.args = ("-c", str(plain))
    service.spawn()
    service.wait_until_up()
    assert service.chat("alpha").status == 200

    def both_serve() -> bool:  # without hooks a worker enters itself at its first request
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: service.running(), range(8)))
        return len(service.registered_workers()) == 2

    eventually(both_serve, "both workers serve")
    first, _ = service.registered_workers()
    os.kill(first, signal.SIGKILL)  # not the last one: nothing is stopped
    assert persistent_chat(service, "alpha")[0].status == 200
    assert len(service.events("start", "alpha")) == 1
    service.stop()
    assert len(service.events("term", "alpha")) == 1
    assert service.processes() == {}


def test_two_masters_at_once_after_usr2(start_service: StartService) -> None:
    """Started by `python -m gunicorn`: a new master by gunicorn's own `sys.argv` would not find Python's `http`."""
    service = start_service(lambda s: config_of(s, "alpha", "beta", room=1), workers=2)
    assert service.chat("alpha").status == 200
    alpha, old = server_pid(service, "alpha"), set(service.registered_workers())
    service.signal(signal.SIGUSR2)

    def new_workers() -> set[int]:
        return set(service.registered_workers()) - old

    eventually(lambda: len(new_workers()) == 2, "the new master's workers serve beside the old ones")
    with ThreadPoolExecutor(4) as pool:
        for name, (reply, tries) in zip(
            ("alpha", "beta") * 4, pool.map(lambda n: persistent_chat(service, n), ("alpha", "beta") * 4), strict=True
        ):
            assert (reply.text, tries) == (f"I am {name}.", [])
    master = int(Path(f"/proc/{next(iter(new_workers()))}/stat").read_text().rpartition(")")[2].split()[1])
    running = {row["pid"] for row in service.running()}
    assert service.process is not None
    try:
        service.signal(signal.SIGQUIT)
        service.process.wait(30)
        assert service.chat("alpha").status == 200
        assert running & {event["pid"] for event in service.events("start")} == running
        assert not service.events("term") or overlaps(service.events(), 1) == []
        assert all(lives(pid) for pid in running) or not lives(alpha)
    finally:
        os.kill(master, signal.SIGTERM)
        eventually(lambda: not lives(master), "the new master ends", timeout=40)
    assert service.processes() == {}


def test_draining_leader_hands_over_at_once_also_with_preload(start_service: StartService) -> None:
    service = start_service(lambda s: config_of(s, "alpha", "beta"), workers=2, args=("--preload",))
    assert service.chat("alpha").status == 200
    old = set(service.registered_workers())
    with service.stream("alpha", headers={"X-Fake": "chunks=200, interval=0.05"}) as stream:
        events: Iterator[str] = iter(stream)
        next(events)
        service.signal(signal.SIGHUP)

        def leader() -> list[tuple[Any, ...]]:
            rows = service.query("SELECT w.pid FROM scheduler s JOIN workers w ON w.id = s.leader")
            return [row for row in rows if row[0] not in old]

        eventually(leader, "a new worker leads while an old one still streams")
        assert service.chat("beta").status == 200
        assert list(events)[-1] == "[DONE]"
    assert len(service.events("start")) == 2


def test_unload_never_blocks_and_answers_when_the_group_is_gone(start_service: StartService) -> None:
    def config(service: Service) -> dict[str, Any]:
        given = config_of(service, "alpha", "beta", "gamma")
        given["models"]["alpha"]["unloadTimeout"] = 60  # it is we who end its stream
        given["models"]["gamma"]["unloadTimeout"] = 1
        return given

    service = start_service(config, workers=2)
    assert service.chat("alpha").status == service.chat("beta").status == 200
    with (
        service.stream("alpha", headers={"X-Fake": "chunks=1000, interval=0.05"}) as stream,
        ThreadPoolExecutor(8) as pool,
    ):
        events = iter(stream)
        next(events)
        alpha = server_pid(service, "alpha")
        unloads = [pool.submit(service.post, "/api/models/unload/alpha") for _ in range(3)]
        eventually(lambda: service.query("SELECT 1 FROM processes WHERE model='alpha' AND state='draining'"), "drains")
        begun = "SELECT 1 FROM requests WHERE kind='unload' AND state='queued'"  # each sends away who came before it
        eventually(lambda: len(service.query(begun)) == 3, "all three are under way")
        waiting = pool.submit(service.chat, "alpha")
        eventually(lambda: service.query("SELECT 1 FROM requests WHERE state='queued' AND kind='infer'"), "one waits")
        assert service.chat("beta").status == 200, "others are served meanwhile"
        again = pool.submit(service.post, "/api/models/unload")
        assert (waiting.result().status, waiting.result().code) == (503, "model_unloaded")
        assert next(events) and lives(alpha) and not any(future.done() for future in unloads), "alpha has its time"
        stream.close()
        assert [future.result().status for future in (*unloads, again)] == [200] * 4
        assert not lives(alpha), "answered when the process is gone"
    assert service.running() == []
    assert service.post("/api/models/unload/alpha").status == 200, "idempotent"
    assert service.chat("alpha").status == 200

    with service.stream("gamma", headers={"X-Fake": "chunks=1000, interval=0.05"}) as stream:
        events = iter(stream)
        next(events)
        began = time.monotonic()
        assert service.post("/api/models/unload/gamma").status == 200
        assert time.monotonic() - began > 0.9, "it had its unloadTimeout, and no more"
        assert not lives(server_pid(service, "gamma"))
        with pytest.raises(Exception, match=r"IncompleteRead|reset"):
            assert list(events)[-1] == "[DONE]"


def test_ttl_counts_from_the_end_of_the_last_answer(start_service: StartService) -> None:
    def config(service: Service) -> dict[str, Any]:
        given = config_of(service, "alpha")
        given["models"]["alpha"]["ttl"] = 1
        return given

    service = start_service(config, workers=2)
    with service.stream("alpha", headers={"X-Fake": "chunks=30, interval=0.1"}) as stream:
        assert list(stream)[-1] == "[DONE]"
    ended = time.monotonic_ns()
    gone = service.wait_event("term", "alpha")["t"]
    assert (gone - ended) / 1e9 > 0.8
    assert len(service.events("term")) == 1

"""`python -m bench.soak`: random clients against a real service whose workers are killed and reloaded meanwhile.

It fails if an answer comes from another model, if more models ran than the budget has room for, if one model ran
twice, or if leases, processes, descriptors or memory do not come back to where they were.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from tests.service import Service, Stream, eventually

MODELS = ("alpha", "beta", "gamma")
ROOM = 2


def make_service(folder: Path) -> Service:
    """Three scripted models of 1 GiB with room for two."""
    service = Service(folder, {}, workers=3, threads=32)
    flags = {"load_time": 0.2, "chunks": 20, "interval": 0.01}
    models = {m: {"cmd": service.fake(m, **flags), "estVramGB": 1, "ttl": 20} for m in MODELS}
    service.write_config({"vramBudgetGB": ROOM, "models": models})
    return service.start()


class Clients:
    """Threads that ask, stream, hang up and unload at random, and count what came of it."""

    def __init__(self, service: Service, count: int, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._service, self._end, self._lock = service, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(seed + i),)) for i in range(count)]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each finish its request."""
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _run(self, chance: random.Random) -> None:
        while not self._end.is_set():
            model = chance.choice(MODELS)
            act = chance.choices((self._chat, self._stream, self._hang_up, self._unload), (6, 6, 4, 1))[0]
            try:
                outcome = f"{act.__name__.strip('_')} {act(model, chance)}"
            except (OSError, http.client.HTTPException) as e:
                outcome = f"connection lost: {e!r:.100}"  # a worker was killed
            with self._lock:
                self.outcomes[outcome] += 1

    def _check(self, model: str, said: str) -> None:
        if f"I am {model}." not in said:
            self.wrong.append(f"{model} was asked, and this came: {said[:200]}")

    def _chat(self, model: str, chance: random.Random) -> str:
        reply = self._service.chat(model, timeout=120)
        if reply.status == 200:
            self._check(model, reply.text)
            return "200"
        return f"{reply.status} {reply.code}"

    def _open(self, model: str) -> Stream:
        return self._service.stream(model, timeout=120)

    def _stream(self, model: str, chance: random.Random) -> str:
        with self._open(model) as stream:
            payloads = list(stream)
            if stream.status != 200:
                return str(stream.status)
            self._check(model, payloads[0])
            return "200 whole" if payloads[-1] == "[DONE]" else "200 cut"

    def _hang_up(self, model: str, chance: random.Random) -> str:
        body = {"model": model, "messages": [], "stream": True}
        with self._service.open("/v1/chat/completions", body):
            self._end.wait(chance.expovariate(5))
        return "done"

    def _unload(self, model: str, chance: random.Random) -> str:
        return str(self._service.post(f"/api/models/unload/{model}", timeout=60).status)


def disturb(service: Service, until: float, chance: random.Random) -> Counter[str]:
    """Kill a worker, or reload, every few seconds; half of the kills hit the leader."""
    done: Counter[str] = Counter()
    pause = threading.Event()
    while time.monotonic() < until:
        pause.wait(chance.uniform(3, 8))
        if chance.random() < 0.2:
            service.signal(signal.SIGHUP)
            done["reloads"] += 1
            continue
        try:
            view = service.workers_view()
            pids = [w["pid"] for w in view["workers"]]
            pid = view["leader"] if view["leader"] and chance.random() < 0.5 else chance.choice(pids)
            os.kill(pid, signal.SIGKILL)
            done["leaders killed" if pid == view["leader"] else "workers killed"] += 1
        except (OSError, http.client.HTTPException):
            continue  # the worker that answered was itself just gone
    return done


def overlaps(service: Service) -> list[str]:
    """What must never have been, by the servers' own account: more of them than fit, or two of one model."""
    found = []
    alive: dict[str, int] = {}
    for event in service.events():
        name, pid = event["name"], event["pid"]
        if event["event"] == "start":
            if name in alive:
                found.append(f"{name}: pid {pid} started while {alive[name]} lived")
            alive[name] = pid
            if len(alive) > ROOM:
                found.append(f"{len(alive)} models at once: {sorted(alive)}")
        elif event["event"] == "exit" and alive.get(name) == pid:
            del alive[name]
    return found


def main() -> int:
    """Run for the given time and judge."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    problems: list[str] = []
    disturbed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="qmflask-soak-") as folder:
        service = make_service(Path(folder))
        clients = Clients(service, options.clients, options.seed)
        try:
            clients.start()
            disturbed = disturb(service, time.monotonic() + 60 * options.minutes, random.Random(options.seed))
            clients.stop()
            service.wait_idle()
            eventually(lambda: not service.running(), "every model is unloaded by its TTL", timeout=60)
            problems += clients.wrong + overlaps(service)
        except (AssertionError, OSError, http.client.HTTPException) as e:
            problems.append(f"{type(e).__name__}: {e}")
        finally:
            clients.stop()
            try:
                service.close()
            except AssertionError as e:
                problems.append(str(e))
        for what, count in sorted((clients.outcomes + disturbed).items()):
            print(f"{count:7} {what}")
        if problems:
            log = Path("build/soak.log")
            log.parent.mkdir(exist_ok=True)
            log.write_text(service.log())
            print(f"the service's log is in {log}")
    print("\n".join(problems) or "nothing was lost, doubled or left behind")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""A storm over a real service: random clients, and a monkey that kills, stops, reloads and unloads meanwhile.

Judged by the model servers, who bear witness of one another with locks that only their deaths free, by the clients,
who know what a whole answer is, and by what is left when it is over.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qmflask.logfiles import ModelLog
from tests.service import Service, eventually

MODELS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
ROOM = 2
#: Honest errors that asking again cures. A model that the monkey kills while it loads has failed to start.
CURED = {"model_unloaded", "shutting_down", "overloaded", "no_scheduler", "store_busy", "upstream_unreachable"}
CURED |= {"model_start_failed"}


def config_of(service: Service, generation: int) -> dict[str, Any]:
    """Six models of 1 GB with room for two; `generation` changes what touches no running model."""
    models = {}
    for number, name in enumerate(MODELS):
        cmd = service.fake(name, load_time=0.1 + 0.1 * number, chunks=20, interval=0.01, witness=ROOM)
        models[name] = {"cmd": cmd, "estVramGB": 1, "ttl": 20, "description": f"generation {generation}"}
    patience = {"scheduler": {"settings": {"fifo": {"patienceMs": 2000}}}}
    return {
        "logTimeFormat": "stampmilli",
        "vramBudgetGB": ROOM,
        "unloadTimeout": 5,
        "routing": patience,
        "models": models,
    }


class Clients:
    """Threads that ask, stream and hang up at random, and count what came of it."""

    def __init__(self, service: Service, count: int, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest, self.longest_what = 0.0, ""
        self.stall = 0.0  # the longest time without any answer at all, while all of them were asking
        self._answered_at = 0.0
        self._service, self._end, self._lock = service, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(seed + i),)) for i in range(count)]

    def start(self) -> None:
        """Begin."""
        self._answered_at = time.monotonic()
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
            act = chance.choices((self._chat, self._stream, self._hang_up), (5, 5, 4))[0]
            began = time.monotonic()
            try:
                outcome = act(model, chance)
            except (OSError, http.client.HTTPException) as error:
                outcome = f"connection lost ({type(error).__name__})"  # its worker was killed
                self._end.wait(0.1)
            self._count(outcome, model, began)

    def _count(self, outcome: str, model: str, began: float) -> None:
        with self._lock:
            now = time.monotonic()
            self.outcomes[outcome] += 1
            if now - began > self.longest:
                self.longest, self.longest_what = now - began, f"{model}, {outcome}, until {time.strftime('%X')}"
            if outcome.startswith("whole"):
                self.stall = max(self.stall, now - self._answered_at)
                self._answered_at = now

    def _error(self, status: int, body: Any) -> str:
        code = body["error"]["code"]
        if code not in CURED:
            self.wrong.append(f"{status} {body}")
        self._end.wait(0.05)
        return f"{status} {code}"

    def _check(self, model: str, said: str) -> None:
        if f"I am {model}." not in said:
            self.wrong.append(f"{model} was asked, and this came: {said[:300]}")

    def _chat(self, model: str, chance: random.Random) -> str:
        reply = self._service.chat(model, timeout=120)
        if reply.status != 200:
            return self._error(reply.status, reply.json())
        self._check(model, reply.text)
        return "whole answers"

    def _stream(self, model: str, chance: random.Random) -> str:
        headers = {"X-Fake": f"chunks={chance.randint(1, 60)}"}
        with self._service.stream(model, timeout=120, headers=headers) as stream:
            if stream.status != 200:
                return self._error(stream.status, stream.json())
            payloads: list[str] = []
            try:
                for payload in stream:
                    payloads.append(payload)
            except (OSError, http.client.HTTPException):
                return "streams cut, and seen to be cut"  # model or worker was killed, or unloaded
            if payloads:
                self._check(model, payloads[0])
            if not payloads or payloads[-1] != "[DONE]":
                self.wrong.append(f"a stream of {model} ended as if it were whole: {payloads[-1:]}")
        return "whole streams"

    def _hang_up(self, model: str, chance: random.Random) -> str:
        body = {"model": model, "messages": [], "stream": True}
        with self._service.open("/v1/chat/completions", body):
            self._end.wait(chance.expovariate(5))
        return "hang-ups"


class Monkey:
    """Does one thing at a time to a service; `done` counts them."""

    def __init__(self, service: Service, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self._service, self._chance, self._generation = service, random.Random(seed), 0
        self._acts: list[tuple[str, int, Callable[[], None]]] = [
            ("workers killed", 3, lambda: self._kill(self._chance.choice(self._workers()))),
            ("leaders killed", 3, lambda: self._kill(self._leader())),
            ("models killed", 3, lambda: self._kill(self._model())),
            ("workers stopped for a while", 2, self._pause),
            ("HUPs", 1, lambda: self._service.signal(signal.SIGHUP)),
            ("reloads", 2, self._reload),
            ("unloads of all", 2, lambda: void(self._service.post("/api/models/unload", timeout=60))),
            ("logs filled", 1, self._fill_log),
        ]

    def run(self, seconds: float, every: float) -> None:
        """Go on for so long."""
        pause, end = threading.Event(), time.monotonic() + seconds
        while time.monotonic() < end:
            pause.wait(every)
            name, _, act = self._chance.choices(self._acts, [weight for _, weight, _ in self._acts])[0]
            # Whoever answered may have been killed just now, or there is nobody to kill.
            with contextlib.suppress(OSError, http.client.HTTPException, IndexError, ProcessLookupError):
                act()
                self.done[name] += 1

    def _workers(self) -> list[int]:
        return self._service.registered_workers()

    def _leader(self) -> int:
        rows = self._service.query("SELECT w.pid FROM scheduler s JOIN workers w ON w.id = s.leader")
        return int(rows[0][0])

    def _model(self) -> int:
        rows = self._service.query("SELECT pid FROM processes WHERE pid IS NOT NULL")
        return int(self._chance.choice(rows)[0])

    @staticmethod
    def _kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def _pause(self) -> None:
        pid = self._chance.choice(self._workers())
        os.kill(pid, signal.SIGSTOP)
        try:
            threading.Event().wait(self._chance.uniform(0.1, 2.0))
        finally:
            os.kill(pid, signal.SIGCONT)

    def _reload(self) -> None:
        self._generation += 1
        self._service.write_config(config_of(self._service, self._generation))

    def _fill_log(self) -> None:
        log = ModelLog(self._service.state / "logs", self._chance.choice(MODELS))
        with log.path.open("ab") as file:
            file.write(b"the monkey was here\n" * (log.cap // 19))


class Storm:
    """One storm and what is found after it."""

    def __init__(self, folder: Path, seed: int, clients: int = 16) -> None:
        self.service = Service(folder, {}, workers=4, threads=32)
        self.service.write_config(config_of(self.service, 0))
        self.clients = Clients(self.service, clients, seed)
        self.monkey = Monkey(self.service, seed)
        self.problems: list[str] = []

    def run(self, seconds: float, every: float = 1.0) -> list[str]:
        """Start, storm, and look; returns what is wrong."""
        self.service.start(60)
        try:
            before = self._sizes()
            self.clients.start()
            try:
                self.monkey.run(seconds, every)
            finally:
                self.clients.stop()
            self._look_after(before)
        except (AssertionError, OSError, http.client.HTTPException) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        finally:
            try:
                self.service.close()
            except AssertionError as error:
                self.problems.append(str(error))
        self.problems += self.clients.wrong[:20]
        self.problems += [f"{e['event']}: {e['name']} pid {e['pid']}" for e in self.service.events("twice")]
        self.problems += [f"{e['event']}: {e['name']} pid {e['pid']}" for e in self.service.events("crowd")]
        self.problems += [line for line in self.service.log().splitlines() if "Traceback" in line][:5]
        return self.problems

    def _look_after(self, before: tuple[int, int]) -> None:
        """Every worker is there, every model answers, and nothing is held that was not held at the start."""
        service = self.service
        eventually(lambda: len(service.registered_workers()) >= 4, "every worker is up again", timeout=60)
        eventually(lambda: not service.leases(), "no lease is left")
        for name in MODELS:
            eventually(lambda name=name: self._answers(name), f"{name} answers", timeout=30)  # type: ignore[misc]
        eventually(lambda: not service.query("SELECT 1 FROM requests"), "no row of a request is left")
        eventually(lambda: not service.query("SELECT 1 FROM swaps"), "no swap is open")
        after = self._sizes()
        # The server's thread pool grows up to its size and stays there.
        if after[0] > before[0] + 12 or after[1] > before[1] + service.threads + 4:
            self.problems.append(f"descriptors and threads of a worker: {before} at the start, {after} after the storm")
        zombies = [pid for pid in self.service.registered_workers() for pid in _zombies_of(pid)]
        if zombies:
            eventually(lambda: not [z for z in zombies if _state(z) == "Z"], "zombies are reaped", timeout=5)

    def _answers(self, name: str) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.service.chat(name, timeout=30).status == 200
        return False

    def _sizes(self) -> tuple[int, int]:
        """Most descriptors and threads that a worker has."""
        pids = self.service.registered_workers()
        return (
            max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
            max(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
        )

    def result(self) -> dict[str, Any]:
        """What happened, as JSON values. A failover is a change of leaders that the service did not ask for."""
        outcomes = self.clients.outcomes
        return {
            "requests": sum(outcomes.values()),
            "outcomes": dict(sorted(outcomes.items())),
            "errors": {what: count for what, count in sorted(outcomes.items()) if what[0].isdigit()},
            "acts": dict(sorted(self.monkey.done.items())),
            "failovers": max(0, self.service.log().count("[INFO] leading: term") - 1),
            "starts": len(self.service.events("start")),
            "longest_request_s": round(self.clients.longest, 2),
            "longest_request": self.clients.longest_what,
            "longest_stall_s": round(self.clients.stall, 2),
            "problems": self.problems,
        }

    def figures(self) -> str:
        """The same for people, in two lines."""
        found = self.result()
        errors = ", ".join(f"{count} {what}" for what, count in found["errors"].items()) or "none"
        acts = ", ".join(f"{count} {what}" for what, count in found["acts"].items())
        whole = f"{self.clients.outcomes['whole answers']} answers and {self.clients.outcomes['whole streams']} streams"
        cut = self.clients.outcomes["streams cut, and seen to be cut"]
        lost = sum(count for what, count in self.clients.outcomes.items() if what.startswith("connection lost"))
        return (
            f"{found['requests']} requests: {whole} whole, {self.clients.outcomes['hang-ups']} hang-ups, {cut} cut,"
            f" {lost} connections lost; errors: {errors}; {found['failovers']} failovers, {found['starts']} starts;"
            f" longest stall {found['longest_stall_s']} s, longest request {found['longest_request_s']} s"
            f" ({found['longest_request']})\n  the monkey: {acts}"
        )


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _zombies_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [child for child in map(int, (task / "children").read_text().split()) if _state(child) == "Z"]
    return found


def void(_: object) -> None:
    """Drop a value, where a callback must return nothing."""

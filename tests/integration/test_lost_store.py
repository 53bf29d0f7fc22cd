"""The state directory is removed, damaged, of another boot or full: what runs goes on, and nothing runs twice."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qmflask.router import Router
from tests.integration.conftest import StartService
from tests.integration.survival import lives, overlaps, persistent_chat
from tests.service import Service, eventually


def two_models(**flags: object) -> Callable[[Service], dict[str, object]]:
    """Two models that do not fit together."""

    def config(service: Service) -> dict[str, object]:
        models = {
            name: {"cmd": service.fake(name, load_time=0.05, **flags), "estVramGB": 9} for name in ("alpha", "beta")
        }
        return {"vramBudgetGB": 16, "models": models}

    return config


def server_pid(service: Service, model: str) -> int:
    """The pid of a model's newest server, by its own account."""
    return int(service.events("start", model)[-1]["pid"])


def damage(path: Path) -> None:
    """Overwrite the database with noise, and its WAL, in which all of it may still be."""
    for part in (path, path.with_name(path.name + "-wal")):
        if part.exists():
            with part.open("r+b") as file:
                file.write(os.urandom(part.stat().st_size))


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_store_lost_while_a_stream_runs_and_a_request_waits(start_service: StartService, how: str) -> None:
    service = start_service(two_models(), workers=2)
    with (
        service.stream("alpha", headers={"X-Fake": "chunks=100, interval=0.05"}) as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        events = iter(stream)
        next(events)
        alpha = server_pid(service, "alpha")
        waiting = pool.submit(persistent_chat, service, "beta", timeout=60)
        eventually(lambda: service.query("SELECT 1 FROM requests WHERE state = 'queued'"), "beta waits")
        if how == "removed":
            (service.state / "state.db").unlink()
        else:
            damage(service.state / "state.db")
            eventually(lambda: "is damaged" in service.log(), "the damage is noticed")
        eventually(lambda: ("alpha",) in [row[:1] for row in safe_leases(service)], "the lease is entered again")
        assert list(events)[-1] == "[DONE]"  # its model was not stopped although beta waits
        assert waiting.result()[0].text == "I am beta."
    assert len(service.events("start", "alpha")) == 1
    assert not lives(alpha)
    assert overlaps(service.events(), 1) == []
    assert persistent_chat(service, "alpha")[0].text == "I am alpha."


def safe_leases(service: Service) -> list[tuple[object, ...]]:
    """The leases; [] while the database is being replaced."""
    try:
        return service.leases()
    except sqlite3.Error:
        return []


def test_a_worker_that_drains_is_draining_in_a_new_store_too(tmp_path: Path) -> None:
    """Else those that end with it would think that somebody takes over, and leave their answers no time."""
    (tmp_path / "config.yaml").write_text("models: {}\n")
    alive = [True]
    router = Router(tmp_path / "config.yaml", tmp_path / "state", lambda: alive[0], 4)
    path = tmp_path / "state" / "state.db"

    def entered() -> list[tuple[str, int]]:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
                return db.execute("SELECT id, draining FROM workers").fetchall()
        except sqlite3.Error:
            return []

    try:
        assert entered() == [(router.worker, 0)]
        alive[0] = False
        router.start()
        eventually(lambda: entered() == [(router.worker, 1)], "it drains")
        path.unlink()
        eventually(lambda: entered() == [(router.worker, 1)], "it drains in the new one", timeout=10)
    finally:
        router.stop()


@pytest.mark.parametrize("fate", ["kept", "damaged", "another boot"])
def test_models_after_kill_9_of_the_master(start_service: StartService, fate: str) -> None:
    service = start_service(two_models(), workers=2)
    assert service.chat("alpha").status == 200
    alpha = server_pid(service, "alpha")
    workers = service.worker_pids()
    service.signal(signal.SIGKILL)
    assert service.process is not None
    service.process.wait(30)
    eventually(lambda: not any(map(lives, workers)), "the workers end by themselves", timeout=60)
    assert lives(alpha), "the model runs on"
    if fate == "damaged":
        damage(service.state / "state.db")
    elif fate == "another boot":
        with sqlite3.connect(service.state / "state.db") as db:
            db.execute("UPDATE scheduler SET boot_id = 'another'")
        db.close()
    service.start()
    assert service.chat("alpha").text == "I am alpha."
    (row,) = service.running()
    assert (row["pid"] == alpha) or fate == "another boot"
    assert overlaps(service.events(), 1) == [] or fate == "another boot"
    assert sum(lives(event["pid"]) for event in service.events("start")) == 1
    assert service.chat("beta").text == "I am beta."
    assert not lives(alpha)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_refuses_what_is_new_and_hurts_nothing_that_runs(
    small_disk: Path, start_service: StartService
) -> None:
    service = start_service(two_models(), up=False)
    service.state = small_disk / "state"
    service.state.mkdir(mode=0o700)
    service.start()
    assert service.chat("alpha").status == 200
    assert (service.state / "ballast").exists()
    filler = small_disk / "filler"
    with service.stream("alpha", headers={"X-Fake": "chunks=80, interval=0.05"}) as stream:
        events = iter(stream)
        next(events)
        fill(filler)

        def refused() -> bool:
            fill(filler)  # also what is given up for others: the disk stays full
            reply = service.chat("alpha")
            assert reply.status == 200 or reply.code in ("store_full", "store_busy"), reply.body
            return reply.status != 200 and reply.code == "store_full"

        eventually(refused, "a new request is refused", every=0.05)
        assert not (service.state / "ballast").exists()
        assert service.get("/health").status == 200
        assert service.running()[0]["state"] == "ready"
        assert list(events)[-1] == "[DONE]"
    filler.unlink()
    assert persistent_chat(service, "beta")[0].text == "I am beta."
    eventually(lambda: (service.state / "ballast").exists(), "there is ballast again")
    eventually(lambda: not service.leases(), "the lease of the stream is written off")
    assert len(service.events("start", "alpha")) == 1


def fill(path: Path) -> None:
    """Take all the room there is."""
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue

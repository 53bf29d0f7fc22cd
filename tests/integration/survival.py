"""What tests of survival share: a judge of the servers' event log, and clients that ask again after an honest error."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.service import Reply, Service

#: Errors that say "ask again"; everything else is no honest outcome for a request that is valid.
RETRIED = {"model_unloaded", "shutting_down", "overloaded", "no_scheduler", "store_busy", "store_full"}
RETRIED |= {"upstream_unreachable"}


def lives(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def killed(events: Iterable[Mapping[str, Any]], deaths: Mapping[int, int]) -> list[dict[str, Any]]:
    """The events with an `exit` for each server that was killed, at the latest time it can have lived."""
    rows = [dict(event) for event in events]
    ended = {row["pid"] for row in rows if row["event"] == "exit"}
    return rows + [
        {"event": "exit", "name": row["name"], "pid": row["pid"], "t": deaths[row["pid"]]}
        for row in rows
        if row["event"] == "start" and row["pid"] in deaths and row["pid"] not in ended
    ]


def overlaps(events: Iterable[Mapping[str, Any]], room: int) -> list[str]:
    """What must never have been, by the servers' own account: two of one model, or more models than there is room."""
    found: list[str] = []
    alive: dict[int, str] = {}
    for event in sorted(events, key=lambda row: int(row["t"])):
        name, pid = event["name"], event["pid"]
        if event["event"] == "start":
            if name in alive.values():
                found.append(f"{name}: pid {pid} started while another lived: {alive}")
            alive[pid] = name
            if len(alive) > room:
                found.append(f"{len(alive)} models at once: {alive}")
        elif event["event"] == "exit":
            alive.pop(pid, None)
    return found


def persistent_chat(service: Service, model: str, seconds: float = 30.0, **more: Any) -> tuple[Reply, list[str]]:
    """Ask until there is an answer; the tries that failed honestly, or lost their worker, are named beside it."""
    tries: list[str] = []
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            reply = service.chat(model, **more)
            if reply.status == 200:
                return reply, tries
            assert reply.code in RETRIED, reply.body
            tries.append(reply.code)
            assert time.monotonic() < deadline, f"no answer from {model} within {seconds} s: {tries}"
            time.sleep(0.05)
            continue
        tries.append("connection lost")
        assert time.monotonic() < deadline, f"no answer from {model} within {seconds} s: {tries}"
        time.sleep(0.05)

"""What a start writes down: its address, its stop command, its record."""

from __future__ import annotations

import orjson

from qmflask import probes
from qmflask.config import LaunchError, Model
from qmflask.config.command import split_command
from qmflask.spawnrecords import SpawnRecord
from qmflask.states import State
from qmflask.store.rows import ProcessRow, StopCall


def record(row: ProcessRow, boot_id: str) -> SpawnRecord | None:
    """What is kept of a spawned tree outside of the store; None before its pid is known."""
    if row.pid is None or row.start_ticks is None or row.token is None:
        return None
    return SpawnRecord(
        model=row.model,
        ready=row.state is State.READY,
        boot_id=boot_id,
        token=row.token,
        pid=row.pid,
        start_ticks=row.start_ticks,
        port=row.port,
        proxy=row.proxy,
        launch_hash=row.launch_hash,
        cmd=row.cmd,
        cmd_stop=row.cmd_stop.text() if row.cmd_stop else None,
        unload_timeout=row.unload_timeout,
        started_at=row.started_at,
        deadline=row.deadline,
        load_ms=row.load_ms,
    )


def proxy(model: Model, port: int | None) -> str:
    """Where the model will answer; "" for one that cannot be started as configured."""
    try:
        return model.launch(port).proxy
    except LaunchError:
        return ""


def stop_call(model: Model, port: int | None) -> str | None:
    """`cmdStop` with the model's own environment, as the row keeps it."""
    text = model.cmd_stop_template or ""
    try:
        argv = split_command(text if port is None else text.replace("${PORT}", str(port)))
    except ValueError:  # none, or nothing but comments
        return None
    try:
        env = model.launch(port).env
    except LaunchError:
        env = {}
    return StopCall(tuple(argv), env).text()


def warm_up(model: Model, proxy: str) -> probes.WarmUp | None:
    """The request that must succeed before the model is ready, if it has one."""
    if model.warmup is None:
        return None
    body = None if model.warmup.body is None else orjson.dumps(model.warmup.body)
    return probes.WarmUp(proxy.rstrip("/") + model.warmup.path, body)

"""The leader's hands: starts, adopts, watches and stops process trees; each step is in the store before it is done."""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qmflask import errors, probes, processes, spawnrecords, starts
from qmflask.config import LaunchError, Model
from qmflask.endings import exit_words
from qmflask.host import Host
from qmflask.logfiles import ModelLog
from qmflask.memory import oom
from qmflask.memory.oom import OutOfMemory
from qmflask.processes import Children, Identity, SpawnError, SpawnLock
from qmflask.siege import Siege, end
from qmflask.states import DOWN, Phase, State
from qmflask.store import Store, reading, scheduling
from qmflask.store.rows import ProcessRow, SwapRow

log = logging.getLogger(__name__)

SECOND = 1_000_000_000
MILLISECOND = 1_000_000
#: A failed start is not tried again for 1, 2, 4 ... 30 s (DESIGN section 3).
BACK_OFF_CAP = 30 * SECOND
#: How often the rest of a tree is looked at after its first process ended: 1, 2, 4 ... 50 ms.
LOOK_CAP = 50 * MILLISECOND


def name_hash(text: str) -> str:
    """A short file-name-safe name for a model id or a directory."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Tree:
    """What the leader holds in memory of one model that is not down; the row in the store is what counts."""

    model: str
    token: str
    identity: Identity | None = None
    pidfd: int | None = None
    prober: probes.Prober | None = None
    stopper: threading.Thread | None = None
    next_look: int = 0
    pause: int = MILLISECOND
    exit_code: int | None = None
    killed: bool = False
    oom_kills: int = 0  # the kernel's counter when it was started


@dataclass(frozen=True)
class Probed:
    """What a prober found for the tree with this token."""

    model: str
    token: str
    ok: bool
    detail: str


class Trees:
    """All process trees of one term. `wake` makes the leader's loop turn; `watch`/`unwatch` are its selector."""

    def __init__(
        self,
        store: Store,
        generation: int,
        children: Children,
        wake: Callable[[], None],
        watch: Callable[[int, str], None],
        unwatch: Callable[[int], None],
    ) -> None:
        self._store = store
        self._generation = generation
        self._children = children
        self._wake = wake
        self._watch = watch
        self._unwatch = unwatch
        self._host = Host()
        self._trees: dict[str, Tree] = {}
        self.woken: set[str] = set()  # workers with an answer from `start`; `poll` hands them on
        self._probed: queue.SimpleQueue[Probed] = queue.SimpleQueue()
        #: Asked when a start ran out of memory; True: it is tried again with more room. The term sets both.
        self.on_out_of_memory: Callable[[str, OutOfMemory, int], bool] = lambda model, found, now: False
        self.free_now: Callable[[str], int | None] = lambda pool: None
        #: Called when a tree is gone: its memory is worth a look.
        self.on_down: Callable[[], None] = lambda: None
        self._models: Mapping[str, Model] = {}
        self._unrecorded: list[str] = []  # ready since the last `record_ready`
        self._owner = name_hash(str(store.directory.resolve()))
        self._siege = Siege()

    # -- starting ---------------------------------------------------------------------------------------------

    def start(self, swap: SwapRow, model: Model, rows: Mapping[str, ProcessRow], now: int) -> bool:
        """Spawn the swap's target; False while its spawn lock is taken by a tree that is not gone yet.

        A command that cannot be spawned is a failed start like any other: written to the row, told to the waiters.
        """
        lock = SpawnLock(self._lock_path(model.id))
        if not lock.try_acquire():
            self._clear_strangers(model.id, now)
            return False
        self._siege.lift(lock.path)
        try:
            tree = Tree(model.id, f"{self._owner}.{name_hash(model.id)}.{secrets.token_hex(8)}")
            port = self._choose_port(model, rows)
            self._write_starting(swap, model, tree, port, now)
            self._trees[model.id] = tree
            try:
                self._spawn(swap, model, tree, port, lock)
            except (SpawnError, LaunchError) as err:
                error = errors.ModelStartFailed(f"model {model.id} cannot be started: failed to start command: {err}")
                self.woken |= self._fail_start(tree, error, now)
        finally:
            lock.close()
        return True

    def _write_starting(self, swap: SwapRow, model: Model, tree: Tree, port: int | None, now: int) -> None:
        with self._store.write(self._generation) as tx:
            scheduling.set_phase(tx, swap.id, Phase.STARTING, deadline=0)
            scheduling.set_state(
                tx,
                model.id,
                State.STARTING,  # stopped, failed -> starting
                swap.reason,
                token=tree.token,
                pid=None,
                start_ticks=None,
                port=port,
                proxy=starts.proxy(model, port),
                launch_hash=model.launch_hash,
                cmd=model.cmd,
                cmd_stop=starts.stop_call(model, port),
                unload_timeout=model.unload_timeout,
                started_at=now,
                deadline=now + model.health_check_timeout * SECOND,
                hold_until=0,
                asked_since=0,
                answered=0,
            )

    def _spawn(self, swap: SwapRow, model: Model, tree: Tree, port: int | None, lock: SpawnLock) -> None:
        launch = model.launch(port)
        logfile = ModelLog(self._store.directory / "logs", model.id)
        logfile.rotate()
        env = {**os.environ, **launch.env}
        child = processes.spawn(launch.argv, env, tree.token, logfile.path, lock.fd)
        self._children.add(child)
        tree.identity = child.identity
        tree.oom_kills = self._host.oom_kills() or 0
        with self._store.write(self._generation) as tx:
            scheduling.update_process(tx, model.id, pid=child.identity.pid, start_ticks=child.identity.start_ticks)
            scheduling.set_phase(tx, swap.id, Phase.PROBING)
        self._record(model.id)
        self._observe(tree)
        self._probe(tree, model, port)

    def _record(self, model: str) -> None:
        """Note the tree beside its spawn lock."""
        with self._store.read() as tx:
            row = reading.process(tx, model)
        record = starts.record(row, self._store.boot_id) if row is not None else None
        if record is not None:
            spawnrecords.write(self._lock_path(model).with_suffix(".json"), record)

    def _probe(self, tree: Tree, model: Model, port: int | None) -> None:
        launch = model.launch(port)
        with self._store.read() as tx:
            row = reading.process(tx, model.id)
        assert row is not None
        if launch.check_url is None:
            self._report(tree, True, "no check")
            return
        tree.prober = probes.Prober(
            model.id,
            launch.check_url,
            lambda _, ok, detail: self._report(tree, ok, detail),
            deadline_ns=row.deadline,
            started_ns=row.started_at,
            host_header=launch.check_host,
            warmup=starts.warm_up(model, launch.proxy),
            expected_ns=int((row.load_ms or 0) * MILLISECOND),
        ).start()

    def _report(self, tree: Tree, ok: bool, detail: str) -> None:
        self._probed.put(Probed(tree.model, tree.token, ok, detail))
        self._wake()

    def _choose_port(self, model: Model, rows: Mapping[str, ProcessRow]) -> int | None:
        """The nominal port, or the next free one above it where a live row owns it or it cannot be bound."""
        if model.port is None:
            return None
        taken = scheduling.live_ports(row for row in rows.values() if row.model != model.id)
        port = model.port
        while port in taken or not processes.port_is_free(port):
            port += 1
            if port > 65535:
                raise ValueError(f"no free port above {model.port}")
        return port

    def _clear_strangers(self, model: str, now: int) -> None:
        """Kill what still lives of an earlier tree of this model that no row knows; its end frees the spawn lock.

        Looked for before the term is checked: what a later leader has started can then not be among them.
        """
        strangers = [identity for identity, _ in processes.tokens(f"{self._owner}.{name_hash(model)}.")]
        lock = self._lock_path(model)
        holders = [] if strangers else self._siege.press(lock, self._worker_pids(), now)
        self._store.check_term(self._generation)
        end(strangers, f"it is left over from an earlier start of model {model}")
        end(holders, f"it holds the spawn lock of model {model}")

    def _worker_pids(self) -> set[int]:
        with self._store.read() as tx:
            return {row.pid for row in reading.workers(tx)}

    def _lock_path(self, model: str) -> Path:
        return self._store.directory / "spawn" / f"{name_hash(model)}.lock"

    # -- taking over ------------------------------------------------------------------------------------------

    def adopt(self, rows: Mapping[str, ProcessRow], models: Mapping[str, Model], now: int) -> None:
        """Take up the trees that an earlier leader left, each at its state; orphans that no row knows are killed."""
        self._models = models
        for row in rows.values():
            if row.state in (State.STOPPED, State.FAILED) or row.token is None:
                continue
            tree = self._trees[row.model] = Tree(row.model, row.token)
            tree.identity = self._find(row)
            if row.state is State.STARTING:
                self.woken |= self._adopt_starting(tree, row, models.get(row.model), now)
            elif row.state is State.STOPPING:
                end(processes.token_members(f"stop:{row.token}"), "a stop command of an earlier leader, run anew")
                self._observe(tree)
                self.signal_stop(row)
            elif tree.identity is None or not tree.identity.alive():
                self._main_exited(tree, now)  # ready, draining -> stopping
            else:
                log.info("model %s: adopted process %d", row.model, tree.identity.pid)
                self._observe(tree)
        self._end_orphans()

    def _end_orphans(self) -> None:
        """Kill trees that no row knows, and stop commands of an earlier term: theirs are run anew."""
        found = processes.tokens(f"{self._owner}.")
        commands = processes.tokens(f"stop:{self._owner}.")
        with self._store.read() as tx:  # after the look: what a later leader started has its row by now
            known = {row.token for row in reading.processes(tx).values() if row.state not in DOWN}
        self._store.check_term(self._generation)
        end([identity for identity, token in found if token not in known], "it belongs to no model that is known")
        end([who for who, token in commands if token[5:] not in known], "a stop command of an earlier leader")

    def _find(self, row: ProcessRow) -> Identity | None:
        if row.pid is not None and row.start_ticks is not None:
            return Identity(row.pid, row.start_ticks, self._store.boot_id)
        assert row.token is not None
        members = processes.token_members(row.token)
        leaders = [member for member in members if processes.session_of(member.pid) == member.pid]
        return next(iter(leaders or members), None)

    def _adopt_starting(self, tree: Tree, row: ProcessRow, model: Model | None, now: int) -> set[str]:
        """Take up a start at whatever point its leader left it; returns the workers to wake."""
        tree.identity = tree.identity or self._find(row)
        lock = self._lock_path(row.model)
        if tree.identity is None and processes.is_held(lock):
            # An earlier leader stands just before its spawn: the tree appears, or the lock is freed.
            end(self._siege.press(lock, self._worker_pids(), now), f"it holds the spawn lock of model {row.model}")
            tree.next_look = now + tree.pause
            tree.pause = min(tree.pause * 2, LOOK_CAP)
            return set()
        self._siege.lift(lock)
        if tree.identity is None and (found := self._find(row)) is None:
            return self._start_lost(tree, row, now)
        tree.identity = tree.identity or found
        if tree.identity is None or not tree.identity.alive() or model is None:
            return self._main_exited(tree, now)
        with self._store.write(self._generation) as tx:
            scheduling.update_process(tx, row.model, pid=tree.identity.pid, start_ticks=tree.identity.start_ticks)
            for swap in reading.swaps(tx):
                if swap.target == row.model:
                    scheduling.set_phase(tx, swap.id, Phase.PROBING)
        log.info("model %s: adopted process %d, which is starting", row.model, tree.identity.pid)
        self._observe(tree)
        self._probe(tree, model, row.port)
        return set()

    def _start_lost(self, tree: Tree, row: ProcessRow, now: int) -> set[str]:
        """The leader died between the row and the spawn: no fault of the model's, so its swap starts it again."""
        log.info("model %s: its start was lost with the leader; starting again", row.model)
        with self._store.write(self._generation) as tx:  # starting -> stopping
            scheduling.set_state(tx, row.model, State.STOPPING, "its start was lost with the leader", deadline=now)
        return self._look(tree, now)

    def _observe(self, tree: Tree) -> None:
        if tree.identity is None or tree.pidfd is not None:
            return
        tree.pidfd = processes.pidfd(tree.identity)
        if tree.pidfd is not None:
            self._watch(tree.pidfd, tree.model)
        else:
            tree.next_look = time.monotonic_ns()  # it has ended already

    # -- stopping ---------------------------------------------------------------------------------------------

    def signal_stop(self, row: ProcessRow) -> None:
        """Begin to stop a tree whose row says `stopping`: its stop command, else TERM to the tree."""
        tree = self._trees.get(row.model)
        if tree is None:
            tree = self._trees[row.model] = Tree(row.model, row.token or "")
        self._end_probe(tree)
        tree.next_look, tree.pause = time.monotonic_ns(), MILLISECOND
        if row.cmd_stop and tree.identity is not None:
            self._run_stop_command(tree, row)
        elif tree.identity is not None:
            processes.signal_tree(tree.identity.pid, tree.token, signal.SIGTERM, tree.identity)

    def _run_stop_command(self, tree: Tree, row: ProcessRow) -> None:
        assert row.cmd_stop is not None and tree.identity is not None
        pid = tree.identity.pid
        argv = [part.replace("${PID}", str(pid)) for part in row.cmd_stop.argv]
        env = {**os.environ, **row.cmd_stop.env}
        logfile = ModelLog(self._store.directory / "logs", row.model)

        bound = row.unload_timeout
        if row.state is State.STOPPING:  # a successor runs it anew, but the deadline stays
            bound = min(bound, max(1.0, (row.deadline - time.monotonic_ns()) / SECOND))

        def run() -> None:
            result = processes.run_stop_command(argv, env, bound, logfile.path, tree.token)
            if not result.ok:
                log.warning("model %s: %s; TERM follows", row.model, result.error)
                processes.signal_tree(pid, tree.token, signal.SIGTERM, tree.identity)
            self._wake()

        tree.stopper = threading.Thread(target=run, name=f"stop {row.model}", daemon=True)
        tree.stopper.start()

    def _end_probe(self, tree: Tree) -> None:
        if tree.prober is not None:
            tree.prober.stop()
            tree.prober.join(1.0)
            tree.prober = None

    # -- events -----------------------------------------------------------------------------------------------

    def poll(self, exited: set[str], now: int) -> set[str]:
        """Handle exits, probe results and stops that are due; returns the workers to wake."""
        self._children.reap()
        woken, self.woken = self.woken, set()
        for model in exited:
            tree = self._trees.get(model)
            if tree is not None:
                woken |= self._main_exited(tree, now)
        while not self._probed.empty():
            woken |= self._probe_result(self._probed.get(), now)
        for tree in list(self._trees.values()):
            if tree.next_look and tree.next_look <= now:
                woken |= self._look(tree, now)
        return woken

    def record_ready(self) -> None:
        """Note what `poll` found ready beside its spawn lock; a file that nobody who waits should wait for."""
        while self._unrecorded:
            self._record(self._unrecorded.pop())

    def next_look(self) -> int | None:
        """When `poll` must run again though nothing happens (monotonic ns); None: no need."""
        return min((tree.next_look for tree in self._trees.values() if tree.next_look), default=None)

    def _main_exited(self, tree: Tree, now: int) -> set[str]:
        """The first process of a tree ended by itself or because it was told to."""
        self._forget_pidfd(tree)
        self._children.reap()
        if tree.identity is not None:
            tree.exit_code = self._children.returncode(tree.identity.pid)
        with self._store.read() as tx:
            row = reading.process(tx, tree.model)
        if row is None:
            return set()
        if row.state is State.STARTING:
            return self._start_died(tree, row, now)
        if row.state in (State.READY, State.DRAINING):
            reason = f"exited by itself with {exit_words(tree.exit_code)}"
            log.warning("model %s %s", row.model, reason)
            with self._store.write(self._generation) as tx:  # ready, draining -> stopping
                scheduling.set_state(
                    tx, row.model, State.STOPPING, reason, deadline=now + int(row.unload_timeout * SECOND)
                )
            self.signal_stop(row)
        tree.next_look, tree.pause = now, MILLISECOND
        return self._look(tree, now)

    def _start_died(self, tree: Tree, row: ProcessRow, now: int) -> set[str]:
        """A start that ended by itself: out of memory is tried once more with more room, all else has failed."""
        self._end_probe(tree)
        lines = ModelLog(self._store.directory / "logs", row.model).last_lines(200)
        kills = (self._host.oom_kills() or 0) - tree.oom_kills
        found = oom.diagnose(lines, tree.exit_code, tree.killed, kills)
        if found is None:
            return self._fail_start(tree, self._exited_early(tree, row), now)
        if self.on_out_of_memory(row.model, found, now):
            return set()
        message = f"model {row.model} ran out of memory while loading ({found.who}): {found.line}"
        return self._fail_start(tree, errors.InsufficientMemory(message), now, found.pool)

    def _exited_early(self, tree: Tree, row: ProcessRow) -> errors.QmflaskError:
        lines = ModelLog(self._store.directory / "logs", row.model).last_lines(8)
        code = exit_words(tree.exit_code)
        message = f"model {row.model}: upstream command exited prematurely with {code}, before it was healthy"
        if row.port is not None and (holder := processes.holder_of(row.port)):
            message += f"; at {time.strftime('%H:%M:%S')} port {row.port} was held by {holder}"
        if lines:
            message += "; last log lines: " + " | ".join(" ".join(line.split()) for line in lines)
        return errors.ModelStartFailed(message)

    def _probe_result(self, probed: Probed, now: int) -> set[str]:
        tree = self._trees.get(probed.model)
        with self._store.read() as tx:
            row = reading.process(tx, probed.model)
        if tree is None or row is None or tree.token != probed.token or row.state is not State.STARTING:
            return set()  # a late result of an earlier start changes nothing
        self._end_probe(tree)
        if tree.identity is None or not tree.identity.alive():
            return self._main_exited(tree, now)
        if not probed.ok:
            lines = ModelLog(self._store.directory / "logs", row.model).last_lines(8)
            seconds = (row.deadline - row.started_at) // SECOND
            error = errors.ModelStartTimeout(
                f"model {row.model}: health check timed out after {seconds}s ({probed.detail});"
                f" raise healthCheckTimeout or look at its log{': ' + ' | '.join(lines) if lines else ''}"
            )
            return self._fail_start(tree, error, now)
        if row.port is not None and processes.listens(tree.identity.pid, tree.token, row.port, tree.identity) is False:
            holder = processes.holder_of(row.port) or "another process"
            return self._fail_start(
                tree,
                errors.ModelStartFailed(
                    f"model {row.model} does not listen on its port {row.port}, {holder} does; stop that, or give"
                    " the model another port"
                ),
                now,
            )
        return self._ready(tree, row, now)

    def _ready(self, tree: Tree, row: ProcessRow, now: int) -> set[str]:
        """Ready and all grants are one transaction."""
        load_ms = (now - row.started_at) / MILLISECOND
        log.info("model %s: ready after %.0f ms on port %s", row.model, load_ms, row.port)
        with self._store.write(self._generation) as tx:
            scheduling.set_state(
                tx,
                row.model,
                State.READY,
                "loaded",
                idle_since=now,
                load_ms=load_ms,
                deadline=0,
                retry_at=0,
                failure_code=None,
                failure_message=None,
                attempts=0,
            )  # starting -> ready
            for swap in reading.swaps(tx):
                if swap.target == row.model:
                    scheduling.close_swap(tx, swap.id)
            woken = scheduling.grant(tx, scheduling.waiting_for(tx, row.model), row.model, now, paid=True)
        self._unrecorded.append(row.model)
        return woken

    def _fail_start(self, tree: Tree, error: errors.QmflaskError, now: int, pool: str | None = None) -> set[str]:
        """Stop what there is of a failed start; its waiters get the error now, others until the back-off ends."""
        self._end_probe(tree)
        log.warning("%s", error.message)
        with self._store.write(self._generation) as tx:
            row = reading.process(tx, tree.model)
            assert row is not None
            wait = oom.PAUSE if pool else min(BACK_OFF_CAP, SECOND << min(row.attempts, 6))
            scheduling.set_state(
                tx,
                tree.model,
                State.STOPPING,
                "its start failed",
                deadline=now + int(row.unload_timeout * SECOND),
                failure_code=error.code,
                failure_message=error.message,
                retry_at=now + wait,
                attempts=row.attempts + 1,
                failure_pool=pool,
                failure_free=self.free_now(pool) if pool else None,
            )  # starting -> stopping
            for swap in reading.swaps(tx):
                if swap.target == tree.model:
                    scheduling.close_swap(tx, swap.id)
            error.retry_after = max(1, wait // SECOND)
            woken = scheduling.fail(tx, scheduling.waiting_for(tx, tree.model), error)
        self.signal_stop(row)
        return woken | self._look(tree, now)

    def _look(self, tree: Tree, now: int) -> set[str]:
        """See whether the tree is gone; escalate when its time is over."""
        with self._store.read() as tx:
            row = reading.process(tx, tree.model)
        tree.next_look = 0
        if row is None:
            return set()
        if row.state is State.STARTING and tree.identity is None:
            return self._adopt_starting(tree, row, self._models.get(row.model), now)
        if row.state is not State.STOPPING:
            ended = tree.identity is not None and not tree.identity.alive()
            return self._main_exited(tree, now) if ended else set()
        stopping = tree.stopper is not None and tree.stopper.is_alive()
        if not stopping and not self._alive(tree):
            self._down(tree, row)
            return set()
        if now >= row.deadline:
            if not tree.killed:
                log.warning("model %s: still there after %.0f s, killing it", row.model, row.unload_timeout)
            tree.killed = True
            if tree.identity is not None:
                processes.signal_tree(tree.identity.pid, tree.token, signal.SIGKILL, tree.identity)
            else:
                self._clear_strangers(row.model, now)
        tree.next_look = now + tree.pause
        tree.pause = min(tree.pause * 2, LOOK_CAP)
        return set()

    def _alive(self, tree: Tree) -> bool:
        """Whether anything of the tree lives, or an earlier leader stands just before its spawn."""
        if tree.identity is not None and processes.session_alive(tree.identity.pid, tree.identity):
            return True
        if tree.token and processes.token_members(tree.token):
            return True
        # One look at the pids can miss a process that is between two of them; the tree's lock cannot be missed.
        return processes.is_held(self._lock_path(tree.model))

    def _down(self, tree: Tree, row: ProcessRow) -> None:
        """No process of the session lives: stopping -> stopped, or failed when a start failed."""
        self._forget_pidfd(tree)
        if tree.identity is not None:
            tree.exit_code = self._children.returncode(tree.identity.pid)
        with self._store.write(self._generation) as tx:
            scheduling.set_state(
                tx,
                row.model,
                State.FAILED if row.failure_code else State.STOPPED,
                row.reason,
                pid=None,
                start_ticks=None,
                port=None,
                exit_code=tree.exit_code,
                stop_wall=time.time(),
                deadline=0,
                hold_until=0,
            )
        del self._trees[row.model]
        log.info("model %s: stopped, %s", row.model, row.reason)
        self.on_down()

    def _forget_pidfd(self, tree: Tree) -> None:
        if tree.pidfd is not None:
            self._unwatch(tree.pidfd)
            os.close(tree.pidfd)
            tree.pidfd = None

    def trim_logs(self) -> None:
        """Keep the logs of live models below their cap; any thread may call it."""
        for model in list(self._trees):
            ModelLog(self._store.directory / "logs", model).trim()

    def close(self) -> None:
        """End probers and descriptors; the trees live on."""
        for tree in self._trees.values():
            self._end_probe(tree)
            self._forget_pidfd(tree)
        self._trees.clear()

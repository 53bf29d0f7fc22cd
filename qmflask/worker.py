"""gunicorn's threaded worker, where connections are closed by the threads that serve them; drains see answers out."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from gunicorn.workers.gthread import TConn, ThreadWorker

log = logging.getLogger(__name__)

#: How often a worker proves to the master that it lives, in seconds; gthread does it for every event.
_BEAT_SECONDS = 0.5
#: How long a worker that is replaced serves on at most until its successors are up, and how often it looks. They are
#: usually up within a second; the master gives up on one that boots for longer than `timeout`.
_HANDOVER_SECONDS = 60.0
_LOOK_SECONDS = 0.1


class Worker(ThreadWorker):  # type: ignore[misc]  # gunicorn has no types
    """What differs from `gthread` (gunicorn 27; field notes A2, A3, A5):

    - A served connection is closed by its own thread. There, the main thread does it, which costs two switches between
      threads, and accepts nothing while a client keeps its side open, up to 2 s.
    - A connection wakes one thread, the one that was busy last.
    - At HUP a worker serves on until its successors are up; gthread's stops at once, and nobody serves meanwhile.
    - A worker that drains closes its listening sockets, so that clients who come now are refused at once and not left
      in the queue of a socket nobody serves; and it lives, with heartbeat, until its last answer has ended. On TERM the
      master's `graceful_timeout` bounds that; after HUP nothing does.
    """

    alive: bool  # until TERM, or until the master is gone

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ended: deque[None] = deque()  # connections closed by their threads, not yet taken off nr_conns
        self._beaten = 0.0
        self.told_early = False  # to end, while we were still booting
        self._give_way_by: float | None = None  # when we end at the latest, once we are being replaced
        #: Whether our successors are up; without an application that knows we do not wait for them.
        self.may_go: Callable[[], bool] | None = None

    def get_thread_pool(self) -> Threads:
        """Called by gunicorn before the application is loaded."""
        return Threads(self.cfg.threads, self._serve)

    def notify(self) -> None:
        """The heartbeat, at most every half second."""
        now = time.monotonic()
        if now - self._beaten >= _BEAT_SECONDS:
            self._beaten = now
            super().notify()

    def run(self) -> None:
        """The main thread: accept, beat, and see the connections out at the end."""
        self.poller.register(self.method_queue.fileno(), selectors.EVENT_READ, self.method_queue.run_callbacks)
        if self.told_early:
            self.handle_exit(signal.SIGTERM, None)
        while self.alive and self.is_parent_alive():
            self._turn(accept=True)
            self._give_way()
        self.alive = False
        self.set_accept_enabled(False)
        for listener in self.sockets:
            listener.close()
        while self.nr_conns > 0:
            self._turn(accept=False)
        self.tpool.shutdown(wait=False)
        self.poller.close()
        self.method_queue.close()

    # -- being replaced ---------------------------------------------------------------------------------------

    def handle_exit(self, sig: int, frame: Any) -> None:
        """TERM. It runs in the main thread between any two steps: so it takes no lock.

        Who is replaced while it boots boots all the same: after HUP upon HUP nobody else may be there to serve.
        """
        if not self.booted:
            self.told_early = True
        elif self.may_go is None or not self._is_replaced():
            super().handle_exit(sig, frame)
        elif self._give_way_by is None:  # the master repeats itself
            self._give_way_by = time.monotonic() + _HANDOVER_SECONDS
            self.method_queue.defer(_nothing)

    def _is_replaced(self) -> bool:
        """Whether the service goes on without us: a master that ends closes its listening sockets before all else."""
        try:
            ours = {f"socket:[{os.fstat(listener.fileno()).st_ino}]" for listener in self.sockets}
            folder = f"/proc/{self.ppid}/fd"
            return any(_link(f"{folder}/{name}") in ours for name in os.listdir(folder))
        except (OSError, AttributeError, ValueError):
            return False

    def _give_way(self) -> None:
        """Go when those are up that were forked after us, or when our time is over."""
        if self._give_way_by is None:
            return
        if time.monotonic() >= self._give_way_by or self._are_successors_up():
            self.alive = False

    def _are_successors_up(self) -> bool:
        try:
            return self.may_go is None or self.may_go()
        except Exception as error:  # the application's business; our time ends anyway
            log.warning("it is not known whether the successors of this worker are up: %s", error)
            return False

    # -- connections ------------------------------------------------------------------------------------------

    def accept(self, listener: Any) -> None:
        """Called by the poller when a client has come."""
        try:
            sock, address = listener.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED, errno.EWOULDBLOCK):
                raise
            return
        self.nr_conns += 1
        self.enqueue_req(_Connection(self.cfg, sock, address, listener.getsockname()))

    def enqueue_req(self, conn: Any) -> None:
        """Have a thread serve the next request of a connection."""
        self.tpool.submit(conn)

    def _turn(self, *, accept: bool) -> None:
        self.notify()
        while self._ended:
            self._ended.pop()
            self.nr_conns -= 1
        if not accept and self.nr_conns <= 0:
            return  # seen out: nothing would wake us
        self.set_accept_enabled(accept and self.nr_conns < self.worker_connections)
        if self._accepting or not self._ended:  # an end that came meanwhile makes room: no need to wait for events
            self.wait_for_and_dispatch_events(timeout=1.0 if self._give_way_by is None else _LOOK_SECONDS)
        self.murder_keepalived()
        self.murder_pending()

    def _serve(self, conn: Any) -> None:
        """In a thread of the pool: one request."""
        again = self.handle(conn)
        if again:  # kept alive, or nothing has come yet: the main thread watches it
            result: Future[Any] = Future()
            result.set_result(again)
            self.method_queue.defer(self.finish_request, conn, result)
            return
        try:
            conn.close(graceful=True)
        finally:  # a socket that is closed already cannot be closed gracefully; its place is free all the same
            self._ended.append(None)
            if not self._accepting:  # full, or draining: the main thread waits for this
                self.method_queue.defer(_nothing)


class Threads:
    """Up to `limit` threads that `run` jobs. Each waits on a lock of its own, so that a job wakes exactly one."""

    def __init__(self, limit: int, run: Callable[[Any], None]) -> None:
        self._limit = limit
        self._run = run
        self._lock = threading.Lock()
        self._idle: list[_Seat] = []
        self._waiting: deque[Any] = deque()
        self._count = 0
        self._closed = False

    def submit(self, job: Any) -> None:
        """Run `job` in an idle thread, a new one, or the next that has time."""
        with self._lock:
            if self._idle:
                self._idle.pop().give(job)
            elif self._count < self._limit:
                self._count += 1
                # Daemons: a stopped worker's last threads must not keep its process alive.
                threading.Thread(target=self._work, args=(job,), name=f"request-{self._count}", daemon=True).start()
            else:
                self._waiting.append(job)

    def shutdown(self, wait: bool = False) -> None:
        """Let the idle threads end; busy ones end after their job. Jobs that wait are dropped."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            while self._idle:
                self._idle.pop().give(None)

    def _work(self, job: Any) -> None:
        seat = _Seat()
        while job is not None:
            try:
                self._run(job)
            except Exception:
                log.exception("A connection ended in an error that nobody caught.")
            job = self._next(seat)

    def _next(self, seat: _Seat) -> Any:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            if self._closed:
                return None
            self._idle.append(seat)
        return seat.take()


class _Seat:
    """Where an idle thread waits for its next job."""

    def __init__(self) -> None:
        self._job: Any = None
        self._full = threading.Lock()
        self._full.acquire()

    def give(self, job: Any) -> None:
        self._job = job
        self._full.release()

    def take(self) -> Any:
        self._full.acquire()
        job, self._job = self._job, None
        return job


class _Connection(TConn):  # type: ignore[misc]
    """A connection whose first byte is waited for with one system call instead of four."""

    data_ready: bool

    def wait_for_data(self, timeout: float) -> bool:
        """True when something can be read within `timeout` seconds."""
        if not self.data_ready:
            poller = select.poll()
            with contextlib.suppress(ValueError):  # closed meanwhile
                poller.register(self.sock, select.POLLIN)
                self.data_ready = bool(poller.poll(timeout * 1000))
        return self.data_ready


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def _nothing() -> None:
    """Wakes the main thread, that is all."""

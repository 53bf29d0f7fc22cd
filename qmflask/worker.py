"""gunicorn's threaded worker, whose threads accept and serve by themselves; drains see answers out."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import select
import signal
import socket
import ssl
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from gunicorn import SERVER
from gunicorn.http.wsgi import WSGIErrorsWrapper, base_environ
from gunicorn.util import close_graceful
from gunicorn.workers.gthread import STOP_KEEPALIVE_LINGER, TConn, ThreadWorker

from qmflask import plain
from qmflask.crew import ClientSocket, Crew, Door

log = logging.getLogger(__name__)

#: How often a worker proves to the master that it lives, and looks whether it may end, in seconds.
_BEAT_SECONDS = 0.5
#: How long a worker that is replaced serves on at most until its successors are up, and how often it looks. They are
#: usually up within a second; the master gives up on one that boots for longer than `timeout`.
_HANDOVER_SECONDS = 60.0
_LOOK_SECONDS = 0.1
#: How long a client may be silent before its first bytes (browsers connect ahead, and may never ask), and later on;
#: the latter is also the time for a request's head as a whole.
_FIRST_SECONDS = 10.0
_SILENT_SECONDS = 60.0
#: Bytes read at first: nearly every request whole.
_BLOCK = 64 * 1024
#: Settings that make every request gunicorn's own business, unless they are as they come (or as we ship them).
_GENERAL_ONLY = (
    *("certfile", "keyfile", "proxy_protocol", "accesslog", "logconfig", "logconfig_dict", "logconfig_json", "syslog"),
    *("statsd_host", "logger_class", "pre_request", "post_request"),
)
#: How a client's leaving shows.
_LEFT = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)


class Worker(ThreadWorker):  # type: ignore[misc]  # gunicorn has no types
    """What differs from `gthread` (gunicorn 27; field notes A2, A3, A5):

    - The threads accept connections, serve and close them, each by itself. There, the main thread accepts and closes,
      which costs four switches between threads, wakes every worker for each connection, and lets nobody in while a
      client keeps its side open, up to 2 s.
    - A plain request (`plain`) is served without gunicorn's parser and response, which cost a third of a small request.
    - At HUP a worker serves on until its successors are up; gthread's stops at once, and nobody serves meanwhile.
    - A worker that drains closes its listening sockets, so that clients who come now are refused at once and not left
      in the queue of a socket nobody serves; and it lives, with heartbeat, until its last answer has ended. On TERM the
      master's `graceful_timeout` bounds that; after HUP nothing does.
    - `worker_connections` means nothing here: a connection has a thread from beginning to end, a kept one too.
    """

    alive: bool  # until TERM, or until the master is gone

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.told_early = False  # to end, while we were still booting
        self._ends = False  # `alive` ends later: what comes until nobody accepts any more is served like all before
        self._give_way_by: float | None = None  # when we end at the latest, once we are being replaced
        self._terms = _terms(self.cfg)
        self._is_trusted = lru_cache(maxsize=1024)(self._is_allowed)
        #: Whether our successors are up; without an application that knows we do not wait for them.
        self.may_go: Callable[[], bool] | None = None

    @classmethod
    def check_config(cls, cfg: Any, log: Any) -> None:
        """gthread's advice is about `worker_connections`."""

    def get_thread_pool(self) -> Crew:
        """Called by gunicorn before the application is loaded."""
        return Crew(self.cfg.threads, self._serve)

    def run(self) -> None:
        """The main thread: beat, and see the connections out at the end."""
        if self.told_early:
            self.handle_exit(signal.SIGTERM, None)
        self.tpool.open([Door(listener.sock, _FIRST_SECONDS, _SILENT_SECONDS) for listener in self.sockets])
        while self.alive and not self._ends and self.is_parent_alive():
            self.notify()
            self._sleep(_BEAT_SECONDS if self._give_way_by is None else _LOOK_SECONDS)
            self._give_way()
        self.tpool.close()
        self.tpool.wait_for_doors(_BEAT_SECONDS)
        for listener in self.sockets:
            listener.close()
        self.alive = False  # the application begins to drain: from here on it would refuse newcomers
        while not self.tpool.wait(_BEAT_SECONDS):
            self.notify()
        self.poller.close()
        self.method_queue.close()

    def _sleep(self, seconds: float) -> None:
        """Until a signal comes, at most so long; Python writes each one to the pipe (`signal.set_wakeup_fd`)."""
        poller = select.poll()
        poller.register(self.PIPE[0], select.POLLIN)
        if poller.poll(seconds * 1000):
            os.read(self.PIPE[0], 4096)

    # -- being replaced ---------------------------------------------------------------------------------------

    def handle_exit(self, sig: int, frame: Any) -> None:
        """TERM. It runs in the main thread between any two steps: so it takes no lock.

        Who is replaced while it boots boots all the same: after HUP upon HUP nobody else may be there to serve.
        """
        if not self.booted:
            self.told_early = True
        elif self.may_go is None or not self._is_replaced():
            self._ends = True
        elif self._give_way_by is None:  # the master repeats itself
            self._give_way_by = time.monotonic() + _HANDOVER_SECONDS

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
            self._ends = True

    def _are_successors_up(self) -> bool:
        try:
            return self.may_go is None or self.may_go()
        except Exception as error:  # the application's business; our time ends anyway
            log.warning("it is not known whether the successors of this worker are up: %s", error)
            return False

    # -- connections ------------------------------------------------------------------------------------------

    def _serve(self, sock: ClientSocket, client: Any, server: Any) -> None:
        """In a thread of the crew: one connection, from its first bytes to its end."""
        if self._terms is None:
            self._serve_generally(sock, client, server, b"")
            return
        try:
            data = sock.recv(_BLOCK)
        except OSError:  # silent, or gone
            data = b""
        if not data:
            sock.close()
            return
        environ = plain.environ_of(data, self._terms, not isinstance(client, tuple) or self._is_trusted(client[0]))
        if environ is None:
            self._serve_generally(sock, client, server, data)
        else:
            self._serve_plainly(environ, sock, client, server)

    def _is_allowed(self, address: str) -> bool:
        """Whether this peer may say which scheme its own client used: gunicorn's `forwarded_allow_ips`."""
        if "*" in self.cfg.forwarded_allow_ips:
            return True
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(ip in network for network in self.cfg.forwarded_allow_networks())

    def _serve_plainly(self, environ: dict[str, Any], sock: ClientSocket, client: Any, server: Any) -> None:
        environ["gunicorn.socket"] = sock
        plain.enter_addresses(environ, client, server)
        self._count()
        answer = plain.Answer(environ["REQUEST_METHOD"], sock.sendall, SERVER)
        whole = False
        try:
            pieces = self.wsgi(environ, answer.start_response)
            try:
                for piece in pieces:
                    answer.write(piece)
                answer.close()
                whole = True
            finally:
                if hasattr(pieces, "close"):
                    pieces.close()
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _LEFT:
                pass
            elif answer.begun:
                log.exception("an answer to %s was cut", environ["RAW_URI"])
            else:
                self.handle_error(None, sock, client, error)
        finally:
            if whole and not sock.unread():  # else our close would be a reset, and take what is still under way with it
                sock.close()
            else:
                close_graceful(sock)

    def _serve_generally(self, sock: ClientSocket, client: Any, server: Any, read: bytes) -> None:
        """By gunicorn: TLS, HTTP/2, kept connections, large and unusual requests. `read` has been read already."""
        sock.settimeout(_SILENT_SECONDS)
        conn = TConn(self.cfg, sock, client, server)
        try:
            if read:
                conn.init()
                conn.data_ready = True
                conn.parser.unreader.unread(read)
            asks = True
            while asks:
                sock.hasten(_SILENT_SECONDS)
                asks = self.handle(conn) is True and self._asks_again(conn)
        finally:
            conn.close(graceful=True)

    def handle_request(self, req: Any, conn: TConn) -> bool:
        """gunicorn's, once a request's head is whole."""
        _leave_time(conn.sock)
        return bool(super().handle_request(req, conn))

    def handle_http2(self, conn: TConn) -> bool:
        """gunicorn's, for as long as the connection lasts."""
        _leave_time(conn.sock)
        return bool(super().handle_http2(conn))

    def _asks_again(self, conn: TConn) -> bool:
        """Whether another request comes on a kept connection; part of it may have been read with the one before."""
        if conn.parser.unreader.buf.getvalue() or (isinstance(conn.sock, ssl.SSLSocket) and conn.sock.pending()):
            return True
        left: float = self.cfg.keepalive
        while left > 0:
            if _readable(conn.sock, min(left, _BEAT_SECONDS)):
                return True
            left -= _BEAT_SECONDS
            if not self.alive:  # as gthread: what is already on its way is answered, and told that it is the last
                left = min(left, STOP_KEEPALIVE_LINGER)
        return False

    def _count(self) -> None:
        self.nr += 1
        if self.nr >= self.max_requests and not self._ends:
            self.log.info("Autorestarting worker after current request.")
            self._ends = True


def _leave_time(sock: socket.socket) -> None:
    if isinstance(sock, ClientSocket):  # TLS has one of its own
        sock.hasten(None)


def _readable(sock: socket.socket, seconds: float) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def _terms(cfg: Any) -> plain.Terms | None:
    """What the settings say of plain requests; None when gunicorn is to handle them all."""
    odd = any(cfg.settings[name].get() != cfg.settings[name].default for name in _GENERAL_ONLY if name in cfg.settings)
    if odd or cfg.keepalive or cfg.http_protocols != ["h1"] or os.environ.get("SCRIPT_NAME"):
        return None
    base = {
        **base_environ(cfg),
        "wsgi.errors": _Errors(cfg),
        "wsgi.multithread": True,
        "SERVER_PROTOCOL": "HTTP/1.1",
        "SCRIPT_NAME": "",
    }
    secure = {f"HTTP_{name.replace('-', '_')}": value for name, value in cfg.secure_scheme_headers.items()}
    limits = (cfg.limit_request_line, cfg.limit_request_fields, cfg.limit_request_field_size)
    line, fields, size = (limit if limit > 0 else plain.MAX_HEAD for limit in limits)
    return plain.Terms(base, secure, line, fields, size)


class _Errors:
    """`wsgi.errors`, which goes to wherever gunicorn's own log goes at that moment."""

    def __init__(self, cfg: Any) -> None:
        self._cfg = cfg

    def write(self, text: str) -> None:
        WSGIErrorsWrapper(self._cfg).write(text)

    def flush(self) -> None:
        """Every write is flushed."""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""

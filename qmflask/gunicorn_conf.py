"""gunicorn's settings for qmflask, each with its reason: `gunicorn -c python:qmflask.gunicorn_conf`, from any folder.

`qmflask serve` uses them, and so does plain `gunicorn` in the repository's folder, through its gunicorn.conf.py.
Command line flags and GUNICORN_CMD_ARGS win. With another number of threads give both, `--threads N
--worker-connections N`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

wsgi_app = "qmflask.app:app"

# Loopback; PORT changes the port only (gunicorn by itself would then listen on all addresses). gunicorn is not made
# to face the world: put nginx in front (conf/nginx.conf), then this may be a unix socket (unix:/run/...).
bind = [f"127.0.0.1:{os.environ.get('PORT') or 8080}"]

# Threads, because a stream or a request that waits for a model holds one, doing nothing, for minutes. Ours accept and
# serve by themselves, and a drain sees the answers out. Plain `gthread` works too.
worker_class = "qmflask.worker.Worker"

# Cores, but two at least: the second serves on, and takes over the scheduling, when the first dies. More than
# four only add memory, since nearly all the time is spent in the model servers.
workers = int(os.environ.get("WEB_CONCURRENCY") or min(max(len(os.sched_getaffinity(0)), 2), 4))

# A waiting thread costs some ten kilobytes. Above this number a worker answers 503 `overloaded`.
threads = 64

# For plain `gthread`, our worker needs no telling: never accept what no thread is free for. With gunicorn's default of
# 1000 a full worker takes connections that then stall, while the other workers stand idle. With this the kernel's
# backlog is one fair queue for all.
worker_connections = threads

# An idle client connection would hold a thread. nginx keeps them for us.
keepalive = 0

# TERM: answers that still run after this long are cut. At HUP an old worker serves on until the new ones are up, and
# sees its answers out, however long they take.
graceful_timeout = 30

# A worker whose main thread shows no life for this long is killed. Threads that stream do not count, so this is
# no limit for a request.
timeout = 60

# The proof of life is a file's time stamp; kept in memory, so that a slow disk never looks like a dead worker.
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

# Restarting workers after so many requests would cut streams, and there is no leak to hide.
max_requests = 0

# Threads and connections do not survive a fork; each worker makes its own (and --preload works all the same: it starts
# sooner and shares memory, but HUP then takes up no new code).
preload_app = False

# nginx writes an access log, qmflask records activity; gunicorn's costs a dictionary of all headers per request.
accesslog = None

# HTTP/1.1 only, and room for long query strings under /upstream (gunicorn: 4094 bytes).
http_protocols = "h1"
limit_request_line = 8190

# gunicorn 25 and later open a control socket under one path per user, which two services would steal from each
# other. Older versions do not know the setting and ignore it.
control_socket_disable = True


# Imports stand inside the hooks: this module is read by the master, which needs none of the application until then.
def post_worker_init(worker: Any) -> None:
    """In a new worker: store, election, wake-ups and the other threads of this process begin."""
    from qmflask.app import start_worker

    start_worker(worker)


def worker_exit(server: Any, worker: Any) -> None:
    """In a worker that ends by itself: give up the leadership and the leases, close the store."""
    from qmflask.app import stop_worker

    stop_worker(worker)


def pre_exec(server: Any) -> None:
    """USR2, in the process that becomes the new master: start it by the very command line that started this one.

    gunicorn would repeat `sys.argv`, which after `python -m gunicorn` is a file of its own folder; run like that,
    Python finds gunicorn's `http` before its own.
    """
    server.START_CTX["args"] = [sys.executable, *sys.orig_argv[1:]]


# No `child_exit`: the leader sees a worker's end at once, whatever killed it, and frees its leases.


def on_exit(server: Any) -> None:
    """In the master, last of all: stop the models, unless `onShutdown: keep` or a new master has taken over."""
    from qmflask.shutdown import stop_service

    stop_service()

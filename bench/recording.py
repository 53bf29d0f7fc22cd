"""`python -m bench.recording`: what one recorded request costs its own thread and the writer's, in one process.

The recorder is the real one with its thread and its database; requests are played to it as `web.visit` does, in
bursts as they come at some thousand a second.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qmflask.activity import GATHER, Activity, Surroundings
from qmflask.config import Config
from qmflask.headers import Header
from qmflask.relay import Outcome

JSON = [("Content-Type", "application/json"), ("Content-Length", "54")]
EVENTS = [("Content-Type", "text/event-stream")]
ANSWER = (
    b'{"choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8}}'
)
EVENT = b'data: {"id":"x","model":"m","choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":200}}\n\ndata: [DONE]\n\n'
ASKED = [("Host", "127.0.0.1:5801"), ("Content-Type", "application/json"), ("User-Agent", "OpenAI/Python 2.8.1")]
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
ENVIRON: dict[str, Any] = {
    "REQUEST_METHOD": "POST",
    "PATH_INFO": "/v1/chat/completions",
    "RAW_URI": "/v1/chat/completions",
    "SERVER_PROTOCOL": "HTTP/1.1",
    "REMOTE_ADDR": "127.0.0.1",
    "HTTP_USER_AGENT": "OpenAI/Python 2.8.1",
    "HTTP_HOST": "127.0.0.1:8080",
}


def play(activity: Activity, number: int, headers: list[Header], pieces: list[bytes]) -> None:
    """One request from arrival to end."""
    environ = {**ENVIRON, "qmflask.request_id": f"{number:032x}"}
    recording = activity.record(environ)
    recording.named("m", None)
    recording.named("m", "m")
    recording.granted(0.3, False)
    recording.sent("/v1/chat/completions", ASKED, BODY)
    recording.begin(200, headers)
    now = time.monotonic_ns()
    outcome = Outcome(200, 0, True, content_type=headers[0][1], begin_ns=now, first_byte_ns=now)
    for piece in pieces:
        recording.feed(piece)
    recording.end(outcome)


KINDS: dict[str, tuple[list[Header], list[bytes]]] = {
    "small JSON": (JSON, [ANSWER]),
    "200 events": (EVENTS, [EVENT] * 200 + [LAST]),
}


def around(config: Config) -> Surroundings:
    """A worker that leads nothing."""

    def nothing() -> Mapping[str, Any]:
        return {}

    return Surroundings("1-1", "1-1", lambda: config, lambda: False, lambda model: None, nothing)


def measure(activity: Activity, kind: str, bursts: int, burst: int) -> tuple[float, float]:
    """Microseconds per request in the request's thread and in the writer's."""
    writer = time.pthread_getcpuclockid(activity._thread.ident or 0)
    headers, pieces = KINDS[kind]
    began = time.clock_gettime_ns(writer)
    mine: list[float] = []
    number = 0
    for _ in range(bursts):
        before = time.thread_time_ns()
        for _ in range(burst):
            number += 1
            play(activity, number, headers, pieces)
        mine.append((time.thread_time_ns() - before) / burst / 1000)
        time.sleep(GATHER + 0.05)
    return statistics.median(mine), (time.clock_gettime_ns(writer) - began) / number / 1000


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.recording", description=__doc__)
    parser.add_argument("--bursts", type=int, default=15, help="of each kind (%(default)s)")
    parser.add_argument("--burst", type=int, default=100, help="requests at once (%(default)s)")
    parser.add_argument("--profile", action="store_true", help="show where the writer's time goes")
    options = parser.parse_args()
    print("| request | captures | its thread | the writer's |\n" + "| --- " * 4 + "|")
    for kind in KINDS:
        for capture in (5, 0):
            config = Config(capture_buffer=capture, log_to_stdout="none")
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "logs").mkdir()
                activity = Activity(Path(folder), around(config))
                if options.profile:
                    profiled(activity, kind, options)
                    continue
                activity.start()
                measure(activity, kind, 11, options.burst)  # past the first thousand records, which prune nothing
                mine, writers = measure(activity, kind, options.bursts, options.burst)
                activity.stop()
                print(f"| {kind} | {capture} MB | {mine:.1f} us | {writers:.1f} us |", flush=True)
    return 0


def profiled(activity: Activity, kind: str, options: argparse.Namespace) -> None:
    """The same in this thread under a profiler."""
    headers, pieces = KINDS[kind]
    watch = cProfile.Profile()
    for _ in range(options.bursts):
        for number in range(options.burst):
            play(activity, number, headers, pieces)
        watch.enable()
        activity._round()
        watch.disable()
    pstats.Stats(watch).sort_stats("tottime").print_stats(28)


if __name__ == "__main__":
    sys.exit(main())

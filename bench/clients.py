"""Our own clients: bare sockets, so that what is timed is the service and not a library; and wrk for throughput."""

from __future__ import annotations

import json
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NS = 1_000_000_000


@dataclass(frozen=True)
class Exchange:
    """One request's answer: status, whole bytes, and seconds to the first body byte and to the end."""

    status: int
    body: bytes
    first_byte: float
    total: float


def post(model: str, **more: Any) -> bytes:
    """The bytes of a small chat completion request."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}], **more}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def exchange(port: int, request: bytes, timeout: float = 60) -> Exchange:
    """One request on a new connection. Raises ConnectionError if the peer refuses or closes early."""
    start = time.monotonic_ns()
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(request)
        data, first = bytearray(), 0
        while not _complete(data):
            part = sock.recv(65536)
            if not part:
                raise ConnectionResetError("closed before the answer was whole")
            data += part
            if not first and data.partition(b"\r\n\r\n")[2]:
                first = time.monotonic_ns()
    end = time.monotonic_ns()
    status, body = int(data.split(b" ", 2)[1]), bytes(data.partition(b"\r\n\r\n")[2])
    return Exchange(status, body, (first - start) / NS, (end - start) / NS)


def _complete(data: bytearray) -> bool:
    head, end, body = data.partition(b"\r\n\r\n")
    if not end:
        return False
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n")


def ok(answer: Exchange) -> Exchange:
    """The answer, if it was a success."""
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.body[:500]!r}")
    return answer


# --- events at token pace ---------------------------------------------------------------------------------


def paced_delays(port: int, model: str, streams: int, chunks: int, interval_us: int) -> list[float]:
    """Seconds from the model server's write of each event to our read of it, over so many streams at once."""
    request = post(model, stream=True, chunks=chunks, interval_us=interval_us)
    socks = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(streams)]
    poller = select.epoll()
    rest = {sock.fileno(): b"" for sock in socks}
    for i, sock in enumerate(socks):
        sock.sendall(request)
        poller.register(sock.fileno(), select.EPOLLIN)
        if i + 1 < streams:
            time.sleep(interval_us / 1e6 / streams)  # spread over one interval, as independent clients are
    by_fd = {sock.fileno(): sock for sock in socks}
    delays: list[float] = []
    while by_fd:
        for fd, _ in poller.poll(30):
            data = by_fd[fd].recv(65536)
            now = time.monotonic_ns()
            whole, _, rest[fd] = (rest[fd] + data).rpartition(b"\n")
            delays += [(now - int(t)) / NS for t in re.findall(rb'"t":(\d+),', whole)]
            if not data or b"[DONE]" in whole:
                poller.unregister(fd)
                by_fd.pop(fd).close()
    poller.close()
    if len(delays) != streams * chunks:
        raise RuntimeError(f"{len(delays)} events of {streams * chunks} arrived")
    return delays


# --- many clients -----------------------------------------------------------------------------------------


def mixed_work(port: int, plans: list[list[str]], answer_us: int) -> tuple[float, float]:
    """Each plan is one client's models, asked one after the other: (seconds for all, longest single wait)."""
    waits: list[float] = []
    failures: list[BaseException] = []

    def client(models: list[str]) -> None:
        try:
            for model in models:
                waits.append(ok(exchange(port, post(model, answer_us=answer_us), timeout=120)).total)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=client, args=(plan,)) for plan in plans]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.monotonic() - start, max(waits)


def wrk(port: int, folder: Path, body: bytes, connections: int, seconds: int) -> float:
    """Successful requests per second by wrk with one thread. Raises RuntimeError if one in twenty fails."""
    if not shutil.which("wrk"):
        raise RuntimeError("wrk is missing: apt-get install wrk")
    script = folder / "post.lua"
    text = body.partition(b"\r\n\r\n")[2].decode().replace("\\", "\\\\").replace("'", "\\'")
    script.write_text(
        f"wrk.method = 'POST'\nwrk.body = '{text}'\nwrk.headers['Content-Type'] = 'application/json'\n"
        "done = function(summary)\n  local e = summary.errors\n"
        "  print(string.format('RESULT %d %d %d %d', summary.requests, summary.duration, e.status,"
        " e.connect + e.read + e.write + e.timeout))\nend\n"
    )
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s", "-s", str(script)]
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    output = subprocess.run([*command, url], check=True, capture_output=True, text=True).stdout
    found = re.search(r"RESULT (\d+) (\d+) (\d+) (\d+)", output)
    if not found:
        raise RuntimeError(f"wrk said:\n{output}")
    requests, micros, bad, broken = map(int, found.groups())
    # On a busy machine a worker that happens to get most of the clients refuses some; only successes count.
    if bad or broken:
        print(f"  {bad} answers were no success, {broken} connections failed, of {requests}", file=sys.stderr)
    if bad + broken > requests / 20:
        raise RuntimeError("too many requests failed")
    return (requests - bad) / micros * 1e6

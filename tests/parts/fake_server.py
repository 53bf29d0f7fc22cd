#!/usr/bin/env python3
"""A scripted model server for tests: it misbehaves on request and notes what it saw, one JSON line per event.

Standard library only, one thread per connection, answers about 50 ms after it was started:

    python fake_server.py --port 5801 --name alpha --load-time 0.4 --chunks 20 --interval 0.02 --events FILE

It answers /health, /v1/models, /v1/chat/completions, /v1/completions, /v1/messages, /v1/embeddings,
/v1/images/generations, and echoes any other path (method, path, headers, body hash and length).
A request may override the command line with a header: `X-Fake: chunks=3, interval=0.5, framing=close`.

Events (all carry `event`, `name`, `pid`, `t` = monotonic_ns): start, ready, term, exit (code);
request (id, method, path, headers, body_sha256, length), headers (id, status), sent (id, n), done (id),
client_gone (id, n), cut (id, n); booked, partly, released. Lines are single O_APPEND writes, so that several servers
may share one file.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

POLLRDHUP = 0x2000
MAX_LINE = 65536
#: Every flag: its default (which also gives its type) and what it does.
OPTIONS: dict[str, tuple[Any, str]] = {
    "host": ("127.0.0.1", "address to listen on"),
    "name": ("fake", "what the answers say"),
    "events": ("", "append one JSON line per event to this file"),
    "witness": (0, "how many servers with this event log may live at once: see bear_witness"),
    # loading
    "load_time": (0.0, "seconds until /health is 200"),
    "listen_late": (False, "refuse connections while loading (else 503)"),
    "health": ("ok", "ok, never (503 for ever), hang (no answer) or a status"),
    "health_delay": (0.0, "seconds each health answer takes"),
    "no_health": (False, "/health is an echo like any other path"),
    "warm_only": (False, "healthy at once, loads at the first POST"),
    # ending
    "exit_after": (-1.0, "exit by itself so many seconds after start"),
    "exit_code": (1, "and with this code"),
    "exit_message": ("", "printed on stderr just before that exit"),
    "ignore_term": (False, "TERM is noted, nothing more"),
    "term_delay": (0.0, "seconds from TERM to the exit"),
    "term_code": (0, "exit code after TERM"),
    # process tree, log, memory
    "tree": ("none", "none, wrapper, helper or detached: see grow_tree"),
    "log_flood": (0, "bytes written to stderr at start"),
    "log_rate": (0, "bytes a second written to stderr afterwards"),
    "ledger": ("", "shared JSON file in which memory is booked"),
    "memory_mb": (0, "how much"),
    "ledger_total_mb": (0, "above this sum: out of memory, exit 1"),
    "release_delay": (0.0, "book out so long after the death"),
    "release_when": ("", "book out no more than the share that this file names (0.5 ... 1), once it is there"),
}
#: The answers; each may also be set per request with X-Fake.
ANSWER: dict[str, tuple[Any, str]] = {
    "chunks": (5, "events of a stream"),
    "interval": (0.0, "seconds between events, or one whole answer's time"),
    "header_delay": (0.0, "silence before the headers"),
    "first_delay": (0.0, "silence between the headers and the first event"),
    "die_after": (-1, "SIGKILL itself after event K (0: before the headers)"),
    "cut_after": (-1, "reset this connection after event K"),
    "stall_after": (-1, "send nothing more after event K"),
    "framing": ("chunked", "chunked, length or close"),
    "ending": ("stop", "stop, length or tools"),
    "status": (200, "anything else becomes an error body"),
    "size": (64 * 1024, "bytes of an image or of /bytes"),
    "pad": (0, "extra bytes in each event"),
    "content_type": ("", "instead of the usual one"),
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; every flag has a default that behaves well."""
    parser = argparse.ArgumentParser(description="a scripted model server")
    parser.add_argument("--port", type=int, required=True)
    for name, (default, text) in {**OPTIONS, **ANSWER}.items():
        flag = "--" + name.replace("_", "-")
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=text)
    return parser.parse_args(argv)


# --- the event log -----------------------------------------------------------------------------------------


class EventLog:
    """Appends one JSON line per event; a line is one write, so several processes may share the file."""

    def __init__(self, path: str, name: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if path else -1
        self._name = name

    def note(self, event: str, **fields: Any) -> None:
        """Write one event; a no-op without a file."""
        if self._fd < 0:
            return
        row = {"event": event, "name": self._name, "pid": os.getpid(), "t": time.monotonic_ns(), **fields}
        os.write(self._fd, json.dumps(row).encode() + b"\n")


# --- the memory ledger: {"<pid>": {"name": ..., "mb": ...}} under a lock ------------------------------------


@contextlib.contextmanager
def open_ledger(path: str) -> Iterator[dict[str, dict[str, Any]]]:
    """The ledger's entries, locked; changes are written back by a rename."""
    lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with open(path, encoding="utf-8") as f:
                entries = json.load(f)
        except FileNotFoundError:
            entries = {}
        before = json.dumps(entries)
        yield entries
        if json.dumps(entries) != before:
            temporary = f"{path}.{os.getpid()}.tmp"
            with open(temporary, "w", encoding="utf-8") as f:
                json.dump(entries, f)
            os.replace(temporary, path)
    finally:
        os.close(lock)


def booked_mb(path: str) -> int:
    """The sum booked in a ledger, in MiB; 0 if there is no such file yet."""
    with open_ledger(path) as entries:
        return sum(int(e["mb"]) for e in entries.values())


def book(options: argparse.Namespace, events: EventLog) -> None:
    """Book this process's memory and leave a releaser behind, which books it out after our death."""
    with open_ledger(options.ledger) as entries:
        total = sum(int(e["mb"]) for e in entries.values()) + options.memory_mb
        over = 0 < options.ledger_total_mb < total
        if not over:
            entries[str(os.getpid())] = {"name": options.name, "mb": options.memory_mb}
    events.note("booked", mb=options.memory_mb, total=total, over=over)
    if over:
        print("ggml_cuda: CUDA error: out of memory", file=sys.stderr, flush=True)
        events.note("exit", code=1)
        os._exit(1)
    import subprocess  # late: it costs a tenth of the start, and few tests book memory

    # Own session, empty environment: what frees late is the driver, no process of the model's tree.
    args = [str(os.getpid()), str(options.release_delay), options.ledger, options.events, options.name]
    args += [options.release_when]
    subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, "--release", *args],
        env={},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def release(pid: int, delay: float, ledger: str, events: str, name: str, when: str) -> None:
    """Wait for the end of `pid`, then `delay` seconds, then book its memory out: at once, or as `when` says."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.poll()
    time.sleep(delay)
    log = EventLog(events, name)
    share, wanted = 0.0, 1.0
    # A test that is over may have removed the folder: then nobody reads the ledger any more.
    with contextlib.suppress(FileNotFoundError):
        while share < 1:
            wanted = share_of(when) if when else 1.0
            if wanted > share:
                book_out(ledger, str(pid), (1 - wanted) / (1 - share))
                log.note("released" if wanted == 1 else "partly", of=pid, share=wanted)
            share = max(share, wanted)
            time.sleep(0.01 if share < 1 else 0)


def share_of(path: str) -> float:
    """The number in a file; 0 while there is none. Raises FileNotFoundError when its folder is gone."""
    try:
        with open(path, encoding="ascii") as file:
            return float(file.read() or 0)
    except FileNotFoundError:
        os.stat(os.path.dirname(path))
        return 0.0


def book_out(ledger: str, pid: str, left: float) -> None:
    """Leave only the share `left` of what is booked for `pid`."""
    with open_ledger(ledger) as entries:
        if pid in entries and left > 0:
            entries[pid]["mb"] = round(entries[pid]["mb"] * left)
        else:
            entries.pop(pid, None)


# --- HTTP --------------------------------------------------------------------------------------------------


class Gone(Exception):
    """The client has left."""


class Cut(Exception):
    """This connection is to be cut."""


class Request:
    """One parsed request and the connection to answer on."""

    def __init__(self, conn: socket.socket, reader: BinaryIO, number: int) -> None:
        self.conn, self.reader, self.number = conn, reader, number
        self.method = self.path = ""
        self.headers: list[tuple[str, str]] = []
        self.body = b""

    def read(self) -> bool:
        """Fill in one request; False at the end of the connection."""
        line = self.reader.readline(MAX_LINE)
        if not line.strip():
            return False
        self.method, self.path = line.decode("latin-1").split(" ")[:2]
        while True:
            line = self.reader.readline(MAX_LINE)
            if line in (b"\r\n", b"\n", b""):
                break
            key, _, value = line.decode("latin-1").partition(":")
            self.headers.append((key, value.strip()))
        self.body = self._read_body()
        return True

    def header(self, name: str, default: str = "") -> str:
        """The first header of that name."""
        return next((v for k, v in self.headers if k.lower() == name), default)

    def _read_body(self) -> bytes:
        if self.header("transfer-encoding").lower() != "chunked":
            return self.reader.read(int(self.header("content-length", "0")))
        parts = []
        while size := int(self.reader.readline(MAX_LINE).split(b";")[0], 16):
            parts.append(self.reader.read(size))
            self.reader.readline(MAX_LINE)
        while self.reader.readline(MAX_LINE).strip():
            pass
        return b"".join(parts)

    def json(self) -> dict[str, Any]:
        """The body as a JSON object, or an empty one."""
        try:
            value = json.loads(self.body or b"{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


class Server:
    """Accepts, answers, and ends as the options say."""

    def __init__(self, options: argparse.Namespace, events: EventLog) -> None:
        self.options, self.events = options, events
        self._ready = threading.Event()
        self._count = 0
        self._lock = threading.Lock()

    # --- life

    def run(self) -> None:
        """Load, listen, serve until a signal or the scripted end."""
        o = self.options
        if o.exit_after >= 0:
            self._later(o.exit_after, self.scripted_exit)
        if not o.ignore_term:
            signal.signal(signal.SIGTERM, self._on_term)
        else:
            signal.signal(signal.SIGTERM, lambda *_: self.events.note("term"))
        if o.ledger and o.memory_mb:
            book(o, self.events)
        self._log_flood()
        if o.listen_late and o.load_time:
            time.sleep(o.load_time)
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((o.host, o.port))
        except OSError as e:
            print(f"cannot bind {o.host}:{o.port}: {e}", file=sys.stderr, flush=True)
            self.exit(1)
        listener.listen(512)
        print(f"{o.name}: listening on http://{o.host}:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
        if o.listen_late or not o.load_time:
            self._become_ready()
        elif not o.warm_only:
            self._later(o.load_time, self._become_ready)
        while True:
            conn, _ = listener.accept()
            threading.Thread(target=self._serve, args=(conn,), daemon=True).start()

    def _become_ready(self) -> None:
        self._ready.set()
        self.events.note("ready")

    def _later(self, seconds: float, action: Any) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()

    def _on_term(self, *_: Any) -> None:
        self.events.note("term")
        if self.options.term_delay:
            self._later(self.options.term_delay, lambda: self.exit(self.options.term_code))
        else:
            self.exit(self.options.term_code)

    def scripted_exit(self) -> None:
        """The end that --exit-after asks for."""
        if self.options.exit_message:
            print(self.options.exit_message, file=sys.stderr, flush=True)
        self.exit(self.options.exit_code)

    def exit(self, code: int) -> None:
        """Note it and end at once; no thread is waited for."""
        self.events.note("exit", code=code)
        os._exit(code)

    def _log_flood(self) -> None:
        line = (self.options.name + " floods its log. ").encode() * 4 + b"\n"
        left = self.options.log_flood
        while left > 0:
            left -= os.write(2, line * max(1, min(64, left // len(line))))
        if self.options.log_rate:
            threading.Thread(target=self._log_slowly, args=(line,), daemon=True).start()

    def _log_slowly(self, line: bytes) -> None:
        while True:
            os.write(2, line)
            time.sleep(len(line) / self.options.log_rate)

    # --- one connection

    def _serve(self, conn: socket.socket) -> None:
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with conn, conn.makefile("rb") as reader, contextlib.suppress(OSError, Gone):
            while True:
                with self._lock:
                    self._count += 1
                    number = self._count
                request = Request(conn, reader, number)
                if not request.read() or not Answer(self, request).give():
                    return

    def wait_ready(self) -> bool:
        """Whether the model is loaded; with --warm-only the first caller loads it."""
        if self.options.warm_only and not self._ready.is_set():
            time.sleep(self.options.load_time)
            self._become_ready()
        return self._ready.is_set()

    @property
    def ready(self) -> bool:
        """Whether the model is loaded."""
        return self._ready.is_set()


class Answer:
    """The answer to one request: which one, and how it misbehaves."""

    def __init__(self, server: Server, request: Request) -> None:
        self.server, self.request, self.events = server, request, server.events
        self.o = argparse.Namespace(**vars(server.options))
        for pair in filter(None, (p.strip() for p in request.header("x-fake").split(","))):
            key, _, value = pair.partition("=")
            setattr(self.o, key, type(ANSWER[key][0])(value))
        self.poller = select.poll()
        self.poller.register(request.conn, POLLRDHUP)
        self.sent = 0

    def give(self) -> bool:
        """Answer; True if the connection stays open."""
        r = self.request
        path = r.path.split("?")[0]
        if path != "/health":
            digest = hashlib.sha256(r.body).hexdigest()
            self.events.note(
                "request",
                id=r.number,
                method=r.method,
                path=r.path,
                headers=r.headers,
                body_sha256=digest,
                length=len(r.body),
            )
        try:
            return self._route(path)
        except Cut:
            self.events.note("cut", id=r.number, n=self.sent)
            return False
        except (Gone, OSError):
            self.events.note("client_gone", id=r.number, n=self.sent)
            return False

    def _route(self, path: str) -> bool:
        o = self.o
        if path == "/health" and not o.no_health:
            return self._health()
        if path == "/v1/models":
            return self._json(200, {"object": "list", "data": [{"id": o.name, "object": "model", "owned_by": "fake"}]})
        if not self.server.wait_ready():
            return self._json(503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
        self._wait(o.header_delay)
        if o.status != 200:
            return self._json(o.status, {"error": {"message": f"{o.name} was told to say {o.status}"}})
        if path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
            if self.request.json().get("stream"):
                return self._stream(path)
            self._wait(o.interval)
            return self._json(200, self._whole(path))
        self._wait(o.interval)
        if path == "/v1/embeddings":
            return self._json(200, self._embeddings())
        if path == "/v1/images/generations":
            return self._json(200, {"created": 0, "data": [{"b64_json": "A" * (o.size // 4 * 4)}]})
        if path == "/bytes":
            return self._plain(200, os.urandom(o.size), o.content_type or "application/octet-stream")
        return self._echo()

    def _health(self) -> bool:
        o = self.o
        if o.health == "hang":
            self._wait(3600)
        self._wait(o.health_delay)
        if o.health == "never" or not (self.server.ready or o.warm_only):
            return self._json(503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})
        return self._json(200 if o.health == "ok" else int(o.health), {"status": "ok"})

    def _echo(self) -> bool:
        r = self.request
        return self._json(
            200,
            {
                "name": self.o.name,
                "method": r.method,
                "path": r.path,
                "headers": r.headers,
                "body_sha256": hashlib.sha256(r.body).hexdigest(),
                "length": len(r.body),
            },
        )

    def _embeddings(self) -> dict[str, Any]:
        given = self.request.json().get("input", "")
        texts = given if isinstance(given, list) else [given]
        rows = [
            {
                "object": "embedding",
                "index": i,
                "embedding": [b / 255 for b in hashlib.sha256(str(t).encode()).digest()[:8]],
            }
            for i, t in enumerate(texts)
        ]
        return {
            "object": "list",
            "model": self.o.name,
            "data": rows,
            "usage": {"prompt_tokens": 3, "total_tokens": 3},
        }

    # --- whole answers

    def _whole(self, path: str) -> dict[str, Any]:
        o, text = self.o, f"I am {self.o.name}."
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        if path == "/v1/messages":
            tool = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": o.name}}
            content = tool if o.ending == "tools" else {"type": "text", "text": text}
            reason = {"tools": "tool_use", "length": "max_tokens", "stop": "end_turn"}[o.ending]
            head = {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": o.name,
                "stop_sequence": None,
            }
            used = {"input_tokens": 3, "output_tokens": 4}
            return {**head, "content": [content], "stop_reason": reason, "usage": used}
        head = {"id": "fake-1", "created": 0, "model": o.name, "usage": usage}
        reason = "tool_calls" if o.ending == "tools" else o.ending
        if path == "/v1/completions":
            return {
                **head,
                "object": "text_completion",
                "choices": [{"index": 0, "text": text, "finish_reason": reason}],
            }
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if o.ending == "tools":
            message = {"role": "assistant", "content": None, "tool_calls": [_call(o.name)]}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {**head, "object": "chat.completion", "choices": [choice]}

    # --- streams

    def _stream(self, path: str) -> bool:
        events = list(self._messages_events() if path == "/v1/messages" else self._chat_events(path))
        blocks = [(e + b"\n\n") for e in events]
        headers = [
            ("Content-Type", self.o.content_type or "text/event-stream"),
            ("Cache-Control", "no-store"),
        ]
        if self.o.framing == "length":
            headers.append(("Content-Length", str(sum(map(len, blocks)))))
        elif self.o.framing == "chunked":
            headers.append(("Transfer-Encoding", "chunked"))
        else:
            headers.append(("Connection", "close"))
        self._misbehave(0)
        self._head(200, headers)
        self._wait(self.o.first_delay)
        for n, block in enumerate(blocks, 1):
            if n > 1:
                self._wait(self.o.interval)
            self._send(b"%x\r\n%s\r\n" % (len(block), block) if self.o.framing == "chunked" else block)
            self.sent = n
            self.events.note("sent", id=self.request.number, n=n)
            self._misbehave(n)
        if self.o.framing == "chunked":
            self._send(b"0\r\n\r\n")
        self.events.note("done", id=self.request.number)
        return bool(self.o.framing != "close")

    def _misbehave(self, n: int) -> None:
        if n == self.o.die_after:
            self.events.note("dies", id=self.request.number, n=n)
            os.kill(os.getpid(), signal.SIGKILL)
        if n == self.o.cut_after:
            self.request.conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise Cut
        if n == self.o.stall_after:
            self._wait(3600)

    def _chat_events(self, path: str) -> Iterator[bytes]:
        chat = path == "/v1/chat/completions"
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": "fake-1", "object": kind, "created": 0, "model": self.o.name}
        for n in range(1, self.o.chunks + 1):
            last = n == self.o.chunks
            text = f"I am {self.o.name}." if n == 1 else f" {n}" + "." * self.o.pad
            delta: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            if last and chat and self.o.ending == "tools":
                delta = {"delta": {"tool_calls": [{"index": 0, **_call(self.o.name)}]}}
            reason = None if not last else "tool_calls" if self.o.ending == "tools" else self.o.ending
            choice = {"index": 0, **delta, "finish_reason": reason}
            chunk: dict[str, Any] = {**head, "choices": [choice]}
            if last:
                chunk["usage"] = {"prompt_tokens": 3, "completion_tokens": n, "total_tokens": n + 3}
            yield b"data: " + json.dumps(chunk).encode()
        yield b"data: [DONE]"

    def _messages_events(self) -> Iterator[bytes]:
        def event(kind: str, **fields: Any) -> bytes:
            return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}".encode()

        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": self.o.name, "content": []}
        yield event("message_start", message={**message, "usage": {"input_tokens": 3, "output_tokens": 0}})
        tools = self.o.ending == "tools"
        block: dict[str, Any] = {"type": "text", "text": ""}
        if tools:
            block = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
        yield event("content_block_start", index=0, content_block=block)
        for n in range(1, self.o.chunks + 1):
            delta = {
                "type": "text_delta",
                "text": f"I am {self.o.name}." if n == 1 else f" {n}" + "." * self.o.pad,
            }
            if tools:
                delta = {"type": "input_json_delta", "partial_json": '{"at": 1}' if n == 1 else ""}
            yield event("content_block_delta", index=0, delta=delta)
        yield event("content_block_stop", index=0)
        reason = {"tools": "tool_use", "length": "max_tokens", "stop": "end_turn"}[self.o.ending]
        yield event("message_delta", delta={"stop_reason": reason}, usage={"output_tokens": self.o.chunks})
        yield event("message_stop")

    # --- bytes

    def _wait(self, seconds: float) -> None:
        """Wait, but no longer than the client stays."""
        if seconds > 0 and self.poller.poll(seconds * 1000):
            raise Gone

    def _send(self, data: bytes) -> None:
        if self.poller.poll(0):
            raise Gone
        self.request.conn.sendall(data)

    def _head(self, status: int, headers: list[tuple[str, str]], body: bytes = b"") -> None:
        head = f"HTTP/1.1 {status} Fake\r\nServer: fake-server\r\nX-Fake-Name: {self.o.name}\r\n"
        lines = "".join(f"{k}: {v}\r\n" for k, v in headers)
        self._send((head + lines + "\r\n").encode("latin-1") + body)
        if self.request.path != "/health":
            self.events.note("headers", id=self.request.number, status=status)

    def _plain(self, status: int, body: bytes, kind: str) -> bool:
        self._misbehave(0)
        headers = [("Content-Type", kind), ("Content-Length", str(len(body)))]
        self._head(status, headers, b"" if self.request.method == "HEAD" else body)
        if self.request.path != "/health":
            self.events.note("done", id=self.request.number)
        return bool(self.request.header("connection").lower() != "close")

    def _json(self, status: int, value: dict[str, Any]) -> bool:
        return self._plain(status, json.dumps(value).encode(), self.o.content_type or "application/json")


def _call(name: str) -> dict[str, Any]:
    return {
        "id": "call_1",
        "type": "function",
        "function": {"name": "look", "arguments": json.dumps({"at": name})},
    }


# --- process trees -----------------------------------------------------------------------------------------


def grow_tree(kind: str, events: EventLog) -> None:
    """Fork as the option says; returns only in the process that serves.

    wrapper: the child serves, the first process waits for it and passes nothing on (a shell without exec).
    helper: a child that ignores TERM stays in our session, as the workers of some servers do.
    detached: the same in a session of its own, found only by its environment.
    """
    if kind == "none":
        return
    pid = os.fork()
    if kind == "wrapper":
        if pid:
            _, status = os.waitpid(pid, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        return
    if pid:
        return
    if kind == "detached":
        os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    events.note("helper", of=os.getppid())
    while True:
        signal.pause()


def bear_witness(options: argparse.Namespace, events: EventLog) -> None:
    """Note `twice` if another server of our name lives, `crowd` if all places are taken.

    Told by locks that the kernel frees at a process's death, however it dies; they are never given up before.
    """
    folder = options.events + ".witness"
    os.makedirs(folder, exist_ok=True)

    def take(name: str) -> bool:
        lock = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        return True

    if not take(options.name):
        events.note("twice")
    if not any(take(f"place {number}") for number in range(options.witness)):
        events.note("crowd")


def main() -> None:
    """Run as told by the command line."""
    if sys.argv[1:2] == ["--release"]:
        pid, delay, ledger, path, name, when = sys.argv[2:8]
        release(int(pid), float(delay), ledger, path, name, when)
        return
    options = parse_arguments()
    events = EventLog(options.events, options.name)
    grow_tree(options.tree, events)
    events.note("start", port=options.port, ppid=os.getppid(), sid=os.getsid(0), cwd=os.getcwd())
    if options.witness:
        bear_witness(options, events)
    Server(options, events).run()


if __name__ == "__main__":
    main()

"""A real qmflask for tests: gunicorn on loopback with its own state directory, ports, configuration and log."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

REPO = Path(__file__).resolve().parent.parent
FAKE = REPO / "tests" / "parts" / "fake_server.py"
T = TypeVar("T")

#: Generous: two cores are shared by a whole test run, and a failure is a bug, not a slow machine.
PATIENCE = 30.0


def eventually(probe: Callable[[], T], what: str, timeout: float = PATIENCE, every: float = 0.01) -> T:
    """The first true answer of `probe`; AssertionError naming `what` and the last answer after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what}; last answer: {value!r}")
        time.sleep(every)


# --- ports ------------------------------------------------------------------------------------------------


class PortBlock:
    """A run of ports that no other test process takes: its first port is bound, unused, for as long as we live.

    Below the kernel's ephemeral range, so that no outgoing connection lands on them.
    """

    SIZE = 40

    def __init__(self) -> None:
        for _ in range(1000):
            first = random.randrange(10_000, 32_000, self.SIZE)
            self._guard = socket.socket()
            try:
                self._guard.bind(("127.0.0.1", first))
            except OSError:
                self._guard.close()
                continue
            self.first = first
            self._next = first + 1
            return
        raise AssertionError("no free block of ports")

    def take(self) -> int:
        """One more port of the block."""
        self._next += 1
        assert self._next < self.first + self.SIZE, "the block of ports is used up"
        return self._next - 1

    def close(self) -> None:
        """Give the block back."""
        self._guard.close()


# --- model commands ---------------------------------------------------------------------------------------


def fake(name: str, events: Path | str = "", **flags: Any) -> str:
    """The `cmd` of a scripted model server: `fake("alpha", events=..., load_time=0.4, ignore_term=True)`."""
    words = [sys.executable, "-S", "-E", str(FAKE), "--port", "${PORT}", "--name", name]
    if events:
        words += ["--events", str(events)]
    for key, value in flags.items():
        flag = "--" + key.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, str(value)]
    return " ".join(word if word == "${PORT}" else shlex.quote(word) for word in words)


def llama(binary: Path | str, gguf: Path | str, *, context: int = 512, slots: int = 1, extra: str = "") -> str:
    """The `cmd` of a real llama-server with one thread, which is what tiny models are fastest with."""
    return (
        f"{binary} -m {gguf} --host 127.0.0.1 --port ${{PORT}} -c {context} -np {slots} -t 1 --no-warmup {extra}"
    ).strip()


def read_events(path: Path, event: str = "", name: str = "") -> list[dict[str, Any]]:
    """What the scripted servers noted, in order of time; optionally of one kind and one server."""
    if not path.exists():
        return []
    # A line still being appended has no newline yet: the next look has it.
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    rows = [r for r in rows if event in ("", r["event"]) and name in ("", r["name"])]
    return sorted(rows, key=lambda r: int(r["t"]))


# --- answers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """One whole answer."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        """The first header of that name."""
        return next((v for k, v in self.headers if k.lower() == name.lower()), None)

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """The words of a chat completion."""
        return str(self.json()["choices"][0]["message"]["content"])

    @property
    def code(self) -> str:
        """The code of an error body."""
        return str(self.json()["error"]["code"])


class Stream:
    """An answer that is still arriving; iterate over its SSE payloads."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        self._connection, self._response = connection, response
        self.status = response.status
        self.headers = response.getheaders()
        self.arrivals: list[int] = []  # monotonic_ns of each payload

    def __iter__(self) -> Iterator[str]:
        """Each `data:` payload as it arrives, `[DONE]` included. Raises http.client.IncompleteRead if it is cut."""
        while line := self._readline():
            if line.startswith(b"data:"):
                self.arrivals.append(time.monotonic_ns())
                yield line[5:].strip().decode()

    def _readline(self) -> bytes:
        # Byte by byte: http.client's own readline() takes a cut chunked body for its end.
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = self._response.read(1)
            if not byte:
                if self._response.length:
                    raise http.client.IncompleteRead(bytes(line), self._response.length)
                break
            line += byte
        return bytes(line)

    def json(self) -> Any:
        """The whole body of an answer that is no stream, parsed."""
        return json.loads(self._response.read())

    def local_port(self) -> int:
        """Our end's port, by which the worker that serves this can be found."""
        sock = self._response.fp.raw._sock if self._connection.sock is None else self._connection.sock  # type: ignore
        return int(sock.getsockname()[1])

    def close(self) -> None:
        """Hang up."""
        self._response.close()
        self._connection.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- the service ------------------------------------------------------------------------------------------


class Service:
    """One gunicorn with qmflask in it. `start()` returns when it answers; `stop()` ends it and its models."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any] | str,
        *,
        workers: int = 2,
        threads: int = 16,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        app: str = "wsgi:app",
    ) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.config_path = folder / "config.yaml"
        self.events_path = folder / "events.jsonl"
        self.log_path = folder / "gunicorn.log"
        self.workers, self.threads, self.args, self.app = workers, threads, tuple(args), app
        self.extra_env = dict(env or {})
        self.ports = PortBlock()
        self.port = self.ports.take()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.state.mkdir(mode=0o700, exist_ok=True)
        self.write_config(config)

    # --- configuration

    def write_config(self, config: Mapping[str, Any] | str) -> None:
        """Write the configuration file by a rename; `startPort` is filled in unless it is there."""
        if isinstance(config, str):
            text = config if "startPort" in config else f"startPort: {self.ports.first + 3}\n{config}"
        else:
            text = yaml.safe_dump({"startPort": self.ports.first + 3, **config}, sort_keys=False)
        temporary = self.config_path.with_suffix(".tmp")
        temporary.write_text(text)
        os.replace(temporary, self.config_path)

    def environment(self) -> dict[str, str]:
        """Ours, less what would steer gunicorn or qmflask, plus where this service's things are."""
        unwanted = ("GUNICORN_", "QMFLASK_", "LISTEN_", "WEB_CONCURRENCY", "PORT", "STATE_DIRECTORY")
        env = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
        return {**env, "QMFLASK_STATE": str(self.state), "QMFLASK_CONFIG": str(self.config_path), **self.extra_env}

    # --- life

    def command(self) -> list[str]:
        """gunicorn's command line: the shipped settings with this service's port and sizes."""
        sizes = ["--workers", str(self.workers), "--threads", str(self.threads)]
        sizes += ["--worker-connections", str(self.threads)]
        where = ["-c", str(REPO / "gunicorn.conf.py"), "--bind", f"127.0.0.1:{self.port}"]
        return [sys.executable, "-m", "gunicorn", *where, *sizes, *self.args, self.app]

    def start(self, timeout: float = PATIENCE) -> Service:
        """Start gunicorn and wait for the first answered /health, and until every worker serves."""
        self.spawn()
        self.wait_until_up(timeout)
        if (self.state / "state.db").exists():
            eventually(lambda: len(self.registered_workers()) >= self.workers, "every worker is up", timeout)
        return self

    def spawn(self) -> None:
        """Start gunicorn without waiting."""
        assert self.process is None or self.process.poll() is not None, "it runs already"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                cwd=REPO,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_up(self, timeout: float = PATIENCE) -> None:
        """Wait until /health answers; AssertionError with the log if gunicorn ends first."""

        def up() -> bool:
            assert self.process is not None and self.process.poll() is None, f"gunicorn ended:\n{self.log()}"
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self.get("/health", timeout=5).status == 200
            return False

        try:
            eventually(up, "the service answers /health", timeout)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.log()}") from None

    @property
    def master(self) -> int:
        """gunicorn's master process."""
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Signal the master: SIGHUP reloads, SIGTERM stops, SIGKILL is a crash."""
        assert self.process is not None
        self.process.send_signal(number)

    def hup(self) -> None:
        """Reload, and wait until a worker that was not there before answers."""
        before = set(self.worker_pids())
        self.signal(signal.SIGHUP)
        eventually(lambda: set(self.worker_pids()) - before, "a new worker after HUP")

    def stop(self, timeout: float = 60.0) -> int:
        """TERM, wait for the end, and return gunicorn's exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout)

    def close(self) -> None:
        """Stop if it runs, kill what is left, give the ports back. Raises AssertionError if anything was left."""
        left: list[str] = []
        try:
            if self.process is not None and self.process.poll() is None:
                left += self._leases_left()
                self.stop()
        except subprocess.TimeoutExpired:
            left.append("gunicorn did not end within 60 s after TERM")
        finally:
            left += [f"pid {pid}: {command}" for pid, command in self.processes().items()]
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.process is not None:
                self.process.wait(10)
            self.ports.close()
        assert not left, "left running after the service ended:\n" + "\n".join(left)

    def _leases_left(self) -> list[str]:
        try:
            eventually(lambda: not self.leases(), "", timeout=5)
        except AssertionError:
            return [f"leases: {self.leases()}"]
        return []

    # --- what can be seen from outside

    def leases(self) -> list[tuple[Any, ...]]:
        """(model, path or id) of every request that holds a lease, by the state database; [] if there is none."""
        return self.query("SELECT model, coalesce(detail, public_id) FROM requests WHERE state = 'granted'")

    def registered_workers(self) -> list[int]:
        """Pids of the workers that serve and do not drain, by the state database."""
        return [pid for (pid,) in self.query("SELECT pid FROM workers WHERE NOT draining") if pid in self.processes()]

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of the state database; [] if there is none."""
        path = self.state / "state.db"
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as db:
            return db.execute(sql).fetchall()

    def processes(self) -> dict[int, str]:
        """Live processes that carry our state directory in their environment: pid -> command line."""
        return processes_with(f"QMFLASK_STATE={self.state}")

    def log(self) -> str:
        """gunicorn's output so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def events(self, event: str = "", name: str = "") -> list[dict[str, Any]]:
        """What this service's scripted model servers noted."""
        return read_events(self.events_path, event, name)

    def wait_event(self, event: str, name: str = "", count: int = 1, timeout: float = PATIENCE) -> dict[str, Any]:
        """The `count`-th event of that kind, waited for."""

        def seen() -> list[dict[str, Any]]:
            found = self.events(event, name)
            return found if len(found) >= count else []

        return eventually(seen, f"event {event} number {count} of {name or 'any server'}", timeout)[count - 1]

    def fake(self, name: str, **flags: Any) -> str:
        """The `cmd` of a scripted model server that notes its events for this service."""
        return fake(name, events=self.events_path, **flags)

    def workers_view(self) -> dict[str, Any]:
        """GET /api/workers."""
        view = self.get("/api/workers").json()
        assert isinstance(view, dict)
        return view

    def worker_pids(self) -> list[int]:
        """Pids of the live workers, by the service's own account."""
        return [int(w["pid"]) for w in self.workers_view()["workers"]]

    def leader(self, timeout: float = PATIENCE) -> int:
        """The pid of the worker that leads now, waited for."""
        return int(eventually(lambda: self.workers_view()["leader"], "there is a leader", timeout))

    def running(self) -> list[dict[str, Any]]:
        """GET /running: the models that are not stopped."""
        return list(self.get("/running").json()["running"])

    def wait_idle(self, timeout: float = PATIENCE) -> None:
        """Wait until no request holds a lease or waits for one."""
        eventually(
            lambda: all(not m.get("inflight") and not m.get("queued") for m in self.running()),
            "no request is left in flight",
            timeout,
        )

    # --- requests

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = PATIENCE,
    ) -> Reply:
        """One request on a connection of its own; `body` is bytes or becomes JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, _encode(body), _headers(body, headers))
            response = connection.getresponse()
            return Reply(response.status, response.getheaders(), response.read())
        finally:
            connection.close()

    def get(self, path: str, **more: Any) -> Reply:
        """GET."""
        return self.request("GET", path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> Reply:
        """POST."""
        return self.request("POST", path, body, **more)

    def chat(self, model: str, text: str = "hi", timeout: float = PATIENCE, **more: Any) -> Reply:
        """A chat completion that is not streamed; `headers=` and further body keys may be given."""
        headers = more.pop("headers", None)
        body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
        return self.post("/v1/chat/completions", body, headers=headers, timeout=timeout)

    def stream(
        self,
        model: str,
        path: str = "/v1/chat/completions",
        headers: Mapping[str, str] | None = None,
        timeout: float = PATIENCE,
        **more: Any,
    ) -> Stream:
        """A streamed completion, returned when its headers are here. Use it in a `with`."""
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": True, **more}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", path, _encode(body), _headers(body, headers))
            return Stream(connection, connection.getresponse())
        except BaseException:
            connection.close()
            raise

    def open(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, port: int = 0
    ) -> socket.socket:
        """A bare socket on which one request was sent: for clients that hang up or do not read."""
        data = _encode(body) or b""
        lines = [f"{'POST' if body is not None else 'GET'} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}"]
        lines += [f"{k}: {v}" for k, v in {**_headers(body, headers), "Content-Length": str(len(data))}.items()]
        sock = socket.create_connection(("127.0.0.1", port or self.port), timeout=PATIENCE)
        sock.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        return sock


def _encode(body: Any) -> bytes | None:
    if body is None or isinstance(body, bytes):
        return body
    return json.dumps(body).encode()


def _headers(body: Any, headers: Mapping[str, str] | None) -> dict[str, str]:
    kind = {} if body is None else {"Content-Type": "application/json"}
    return {**kind, **(headers or {})}


def processes_with(marker: str) -> dict[int, str]:
    """Live (not zombie) processes of ours whose environment holds the entry `marker`: pid -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to somebody else
            if marker.encode() not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found[int(entry.name)] = command.strip()
    return found

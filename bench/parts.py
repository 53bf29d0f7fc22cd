"""What is measured: our fast model server alone, and the same behind a real qmflask service."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.clients import exchange
from tests.service import PortBlock, Service, eventually

SOURCE = Path(__file__).with_name("model_server.c")
GIB_EACH = 1


class Rig:
    """A temporary folder with the compiled model server, ports of our own, and what runs on them.

    `peer`: the port of another proxy on this machine that serves a model `m` by the same model server.
    """

    def __init__(self, peer: int | None = None) -> None:
        self.peer = peer
        self._folder = tempfile.TemporaryDirectory(prefix="qmflask-bench-")
        self.folder = Path(self._folder.name)
        self.ports = PortBlock()
        self.binary = self.folder / "model_server"
        compile_to(self.binary)
        self._services: list[Service] = []
        self._direct: list[DirectServer] = []

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._direct:
            server.stop()
        try:
            for service in self._services:
                service.close()
        finally:
            self.ports.close()
            self._folder.cleanup()

    def direct(self, name: str = "direct", load_ms: int = 0) -> DirectServer:
        """A model server without qmflask, not yet started."""
        server = DirectServer(self.binary, name, self.ports.take(), load_ms)
        self._direct.append(server)
        return server

    def service(self, loads_ms: dict[str, int], room: int = 1, start: bool = True, **options: Any) -> Service:
        """A qmflask whose models (name -> load time) take 1 GiB each, with room for `room` of them."""
        models = {
            name: {"cmd": f"{self.binary} ${{PORT}} {name} {load}", "estVramGB": GIB_EACH}
            for name, load in loads_ms.items()
        }
        config = {"vramBudgetGB": room * GIB_EACH, "models": models}
        sizes: dict[str, Any] = {"workers": 2, "threads": 64, **options}
        service = Service(self.folder / f"service{len(self._services)}", config, **sizes)
        self._services.append(service)
        return service.start() if start else service

    def end(self, service: Service) -> None:
        """Stop a service before the rig ends."""
        self._services.remove(service)
        service.close()


def compile_to(binary: Path) -> None:
    """Make the model server."""
    subprocess.run(["gcc", "-O2", "-Wall", "-pthread", "-o", str(binary), str(SOURCE)], check=True)


class DirectServer:
    """The model server as a plain child process."""

    def __init__(self, binary: Path, name: str, port: int, load_ms: int) -> None:
        self.port = port
        self._command = [str(binary), str(port), name, str(load_ms)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> DirectServer:
        """Start it, and return as soon as it is healthy: it is asked every half millisecond."""
        self._process = subprocess.Popen(self._command)
        while not self._healthy():
            time.sleep(0.0005)
        return self

    def stop(self) -> None:
        """TERM and wait."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def _healthy(self) -> bool:
        try:
            return exchange(self.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").status == 200
        except ConnectionError:
            return False


def worker_cpu_seconds(service: Service) -> float:
    """User and system time of all workers' threads so far, in seconds; their own nanoseconds, not the kernel's ticks.

    A thread that ends takes its time with it, so measure while none does.
    """
    total = 0
    for pid in service.worker_pids():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def worker_memory_mb(service: Service) -> float:
    """The largest resident set of a worker, in MB."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in service.worker_pids()]
    return max(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


def load_model(service: Service, model: str) -> None:
    """Have a model loaded before anything is timed, and every worker have served a request."""
    eventually(lambda: service.chat(model).status == 200, f"{model} answers")
    for _ in range(20):
        service.chat(model)

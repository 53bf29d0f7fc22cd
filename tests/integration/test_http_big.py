"""Large uploads and downloads pass through a worker; they never lie in its memory."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.echoing import echo_model, shared
from tests.service import Service

MIB = 1024 * 1024
#: Of each body. QMFLASK_BIG=300 is what issue 6 asks for; this is enough to tell "held" from "passed".
SIZE = int(os.environ.get("QMFLASK_BIG", "64")) * MIB
#: More than a worker may grow by, whatever the size.
ALLOWED = 40 * MIB


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One worker, so that it is known whose memory to look at."""
    config = {"models": {"echo": echo_model()}}
    env = {"TMPDIR": str(tmp_path_factory.mktemp("spool"))}
    with shared(tmp_path_factory.mktemp("big"), config, workers=1, env=env) as service:
        service.chat("echo")
        yield service


class Peak:
    """The most memory that the worker held while this was open."""

    def __init__(self, service: Service) -> None:
        (pid,) = service.worker_pids()
        self._process = psutil.Process(pid)
        self._before = self._process.memory_info().rss
        self._most = self._before
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self._most = max(self._most, self._process.memory_info().rss)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        """Bytes above what it had before."""
        return self._most - self._before


def upload(service: Service, path: str, content_type: str, before: bytes, after: bytes) -> dict[str, object]:
    """Send `before`, SIZE bytes, `after`; what the echo server saw."""
    block = bytes(range(256)) * 4096
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
    connection.putrequest("POST", path)
    connection.putheader("Content-Type", content_type)
    connection.putheader("Content-Length", str(len(before) + SIZE + len(after)))
    connection.endheaders(before)
    for _ in range(SIZE // MIB):
        connection.send(block)
    connection.send(after)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    assert response.status == 200, data
    found = json.loads(data)
    assert isinstance(found, dict)
    return found


FIELD = b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\necho\r\n'
FILE = b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'


@pytest.mark.parametrize("first", [True, False], ids=["model first", "model last"])
def test_a_big_multipart_upload(service: Service, first: bool) -> None:
    before, after = (FIELD + FILE, b"\r\n--XX--\r\n") if first else (FILE, b"\r\n" + FIELD + b"--XX--\r\n")
    kind = "multipart/form-data; boundary=XX"
    with Peak(service) as peak:
        seen = upload(service, "/v1/audio/transcriptions", kind, before, after)
    print(f"upload of {SIZE // MIB} MiB: the worker grew by {peak.growth / MIB:.1f} MiB")
    assert seen["length"] == len(before) + SIZE + len(after)
    assert peak.growth < ALLOWED


def test_a_big_upload_under_upstream(service: Service) -> None:
    with Peak(service) as peak:
        seen = upload(service, "/upstream/echo/any", "application/octet-stream", b"", b"")
    assert seen["length"] == SIZE
    assert peak.growth < ALLOWED


def test_a_big_answer(service: Service) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
    with Peak(service) as peak:
        connection.request("GET", f"/upstream/echo/bytes?{SIZE}")
        response = connection.getresponse()
        length = 0
        while piece := response.read(MIB):
            length += len(piece)
    connection.close()
    print(f"answer of {SIZE // MIB} MiB: the worker grew by {peak.growth / MIB:.1f} MiB")
    assert length == SIZE
    assert peak.growth < ALLOWED


def test_nothing_is_left_on_disk(service: Service) -> None:
    folder = Path(service.extra_env["TMPDIR"])
    service.wait_idle()
    assert [p for p in folder.iterdir() if p.is_file()] == []

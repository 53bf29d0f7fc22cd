"""A GET stream under /upstream that moves nothing keeps its model only as long as nobody wants it gone."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator

import pytest

from tests.integration.echoing import echo_model, shared
from tests.service import REPO, Service, eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Models that stop when idle, when another one is wanted, or not at all."""
    config = {
        "idleStreamTimeout": 1,
        "routing": {"scheduler": {"settings": {"fifo": {"patienceMs": 100}}}},
        "models": {
            "short": echo_model(ttl=1),
            "kept": echo_model(ttl=0),
            "never": echo_model(ttl=1, idleStreamTimeout=0),
            "other": echo_model(),
        },
        "groups": {"a": {"members": ["short", "never"], "swap": False, "exclusive": False}},
    }
    folder = tmp_path_factory.mktemp("idle")
    # The same application, but for a client that stalls in its body it waits one second, not sixty.
    (folder / "impatient.py").write_text(
        "import qmflask.web.visit\nqmflask.web.visit.READ_SECONDS = 1\nfrom wsgi import application\n"
    )
    more = {"app": "impatient:application", "env": {"PYTHONPATH": f"{folder}:{REPO}"}}
    with shared(folder / "service", config, **more) as service:
        yield service


def test_a_client_that_stalls_in_its_body_gives_its_slot_back(service: Service) -> None:
    for kind in (b"application/json", b"multipart/form-data; boundary=X"):
        with socket.create_connection(("127.0.0.1", service.port), timeout=20) as sock:
            head = b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\nContent-Type: " + kind
            sock.sendall(head + b"\r\n\r\n{")
            assert sock.recv(12) == b"HTTP/1.1 400"


def listen(service: Service, model: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """An open page: one answer that has begun and says nothing more."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
    connection.request("GET", f"/upstream/{model}/silence")
    response = connection.getresponse()
    assert response.read(6) == b"listen"
    return connection, response


def test_an_idle_stream_does_not_outlive_the_ttl(service: Service) -> None:
    connection, response = listen(service, "short")
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        assert response.read() is None
    connection.close()
    eventually(lambda: "short" not in [m["model"] for m in service.running()], "its model was unloaded")


def test_an_idle_stream_is_cut_when_its_model_drains(service: Service) -> None:
    connection, response = listen(service, "kept")
    assert service.chat("other").status == 200
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        assert response.read() is None
    connection.close()


def test_an_idle_stream_that_nobody_minds_stays(service: Service) -> None:
    connection, response = listen(service, "never")
    time.sleep(3.5)  # three looks of the worker: that nothing happens has no event
    assert [m["inflight"] for m in service.running() if m["model"] == "never"] == [1]
    connection.close()
    response.close()

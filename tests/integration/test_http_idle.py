"""A GET stream under /upstream that moves nothing keeps its model only as long as nobody wants it gone."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator

import pytest

from tests.integration.echoing import echo_model, shared
from tests.service import Service, eventually


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
    with shared(tmp_path_factory.mktemp("idle"), config) as service:
        yield service


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

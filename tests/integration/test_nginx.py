"""Behind the shipped conf/nginx.conf: streams pass as they come, hang-ups are seen, breaks look like breaks."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import StartService
from tests.integration.fronting import nginx
from tests.service import Service, eventually


@pytest.fixture
def fronted(start_service: StartService, tmp_path: Path) -> Iterator[Service]:
    """A service whose requests go through nginx on a unix socket."""
    socket_path = tmp_path / "http.sock"
    service = start_service(
        lambda s: {"models": {"alpha": {"cmd": s.fake("alpha")}}}, args=("--bind", f"unix:{socket_path}")
    )
    with nginx(tmp_path / "nginx", socket_path) as port:
        direct, service.port = service.port, port
        yield service
        service.port = direct


def test_events_are_not_held_back(fronted: Service) -> None:
    fronted.chat("alpha")
    with fronted.stream("alpha", headers={"X-Fake": "chunks=5,interval=0.2"}) as stream:
        assert list(stream)[-1] == "[DONE]"
    sent = [e["t"] for e in fronted.events("sent")]
    delays = [arrival - t for arrival, t in zip(stream.arrivals, sent, strict=True)]
    # Held back, the first would come with the last, 0.8 s late.
    assert max(delays) < 150_000_000, delays


def test_a_hang_up_reaches_the_model_server(fronted: Service) -> None:
    fronted.chat("alpha")
    with fronted.stream("alpha", headers={"X-Fake": "chunks=1000,interval=0.02"}) as stream:
        next(iter(stream))
    left = time.monotonic_ns()
    gone = fronted.wait_event("client_gone")
    assert gone["t"] - left < 1_000_000_000
    eventually(lambda: not any(m.get("inflight") for m in fronted.running()), "its lease is gone")


def test_a_broken_stream_is_seen_as_broken(fronted: Service) -> None:
    fronted.chat("alpha")
    with (
        fronted.stream("alpha", headers={"X-Fake": "chunks=10,cut_after=2"}) as stream,
        pytest.raises((http.client.IncompleteRead, ConnectionError)),
    ):
        payloads = []
        for payload in stream:
            payloads.append(payload)
    assert "[DONE]" not in payloads


def test_large_bodies_pass(fronted: Service) -> None:
    body = b'{"model": "alpha", "pad": "' + b"x" * 20_000_000 + b'"}'
    assert fronted.post("/v1/chat/completions", body).status == 200
    assert fronted.events("request")[-1]["length"] == len(body)

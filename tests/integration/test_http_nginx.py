"""Through nginx as it is by default: events pass at once, breaks are seen, odd paths arrive as they were sent."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from tests.integration.echoing import echo_model, shared
from tests.integration.fronting import nginx
from tests.service import Service


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, int]]]:
    """A service, and the ports of two nginx before it: as shipped, and with nginx's own buffering."""
    folder = tmp_path_factory.mktemp("fronted")
    socket_path = folder / "http.sock"

    def config(service: Service) -> dict[str, object]:
        return {"models": {"alpha": {"cmd": service.fake("alpha")}, "echo": echo_model()}}

    with (
        shared(folder / "service", config, args=("--bind", f"unix:{socket_path}")) as service,
        nginx(folder / "shipped", socket_path) as shipped,
        nginx(folder / "buffering", socket_path, **{"proxy_buffering off": "proxy_buffering on"}) as buffering,
    ):
        direct = service.port
        yield service, {"shipped": shipped, "buffering": buffering}
        service.port = direct


@pytest.fixture(params=["shipped", "buffering"])
def fronted(fronts: tuple[Service, dict[str, int]], request: pytest.FixtureRequest) -> Service:
    """The service, reached through nginx."""
    service, ports = fronts
    service.port = ports[request.param]
    return service


def test_events_pass_at_once(fronted: Service) -> None:
    fronted.chat("alpha")
    delays: list[int] = []
    for _ in range(5):
        done = len(fronted.events("sent"))
        with fronted.stream("alpha", headers={"X-Fake": "chunks=4,interval=0.15"}) as stream:
            assert list(stream)[-1] == "[DONE]"
        sent = [event["t"] for event in fronted.events("sent")[done:]]
        delays += [arrival - at for arrival, at in zip(stream.arrivals, sent, strict=True)]
    # Held back, an event would come with the next one, 150 ms later; the best of them show what the way costs.
    assert sorted(delays)[len(delays) // 2] < 75_000_000, delays


def test_a_death_in_the_middle_is_visible(fronted: Service) -> None:
    fronted.chat("alpha")
    payloads: list[str] = []
    with (
        fronted.stream("alpha", headers={"X-Fake": "chunks=9,cut_after=2,interval=0.05"}) as stream,
        pytest.raises((http.client.IncompleteRead, ConnectionError)),
    ):
        payloads.extend(stream)
    assert "[DONE]" not in payloads


def test_exact_paths(fronted: Service) -> None:
    reply = fronted.get("/upstream/echo/a%2Fb/%7Ec%20d?x=%2F&y=%zz")
    assert reply.json()["path"] == "/a%2Fb/%7Ec%20d?x=%2F&y=%zz"
    assert fronted.get("/upstream/echo//x").header("Location") == "/upstream/echo/x"


def test_refusals_of_bodies_still_coming(fronted: Service) -> None:
    reply = fronted.post("/v1/chat/completions?x", b'{"model": "nobody", "pad": "' + b"x" * 3_000_000 + b'"}')
    assert (reply.status, reply.code) == (404, "model_not_found")
    assert fronted.post("/v1/nothing", b"x" * 3_000_000).status == 404

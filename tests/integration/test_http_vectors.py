"""The cases of compatibility.json that are about HTTP, filters, paths and names, through a real service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.echoing import ECHO, echo_model, echo_server, shared
from tests.service import REPO, Reply, Service, eventually

VECTORS: list[dict[str, Any]] = json.loads((REPO / "tests" / "data" / "compatibility.json").read_text())

#: Where qmflask means to differ: vector -> (what is expected instead, why).
DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "ht-014": (
        {"body_json_subset": {"error": {"code": "model_not_found", "param": "model"}}},
        "DESIGN section 6: unknown models have a code of their own, and the message lists the nearest names",
    ),
    "ht-032": (
        {"body_json_subset": {"error": {"code": "upstream_unreachable", "param": None}}},
        "DESIGN section 6: one code for every server that cannot be reached, peers included",
    ),
    "ht-061": (
        {"body_json_subset": {"error": {"param": "min_id"}}},
        "DESIGN promise 9: an error says what is at fault; here it is a parameter",
    ),
    "ht-063": (
        {"models": {"record:caps": {"owned_by": "qmflask"}}},
        "what we do differently: owned_by is qmflask",
    ),
}


def of(*areas: str) -> list[Any]:
    """The vectors of these areas as parameters."""
    return [pytest.param(v, id=v["id"]) for v in VECTORS if v["area"] in areas]


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    """The port of what stands for a peer."""
    with echo_server() as port:
        yield port


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, echo: int) -> Iterator[Service]:
    """The service that the `http` vectors are about."""
    (fixture,) = [v for v in VECTORS if v["id"] == "HTTP_BASE"]
    text = fixture["given"]["config_yaml"].replace("@ECHO@", ECHO).replace("@PEERPORT@", str(echo))
    with shared(tmp_path_factory.mktemp("vectors"), text) as service:
        yield service


@pytest.mark.parametrize("vector", of("http"))
def test_http(base: Service, vector: dict[str, Any]) -> None:
    request = vector["given"]["request"]
    headers = {"Authorization": "Bearer key-one"}
    if vector["expect"].get("body_json") == {"running": []}:
        assert base.get("/unload", headers=headers).status == 200
    body = request["body"].encode("latin-1") if "body" in request else None
    reply = base.request(request["method"], request["path"], body, {"Content-Type": "", **request["headers"]})
    expected = merged(vector["expect"], DIFFERENT.get(vector["id"], ({}, ""))[0])
    assert reply.status == expected["status"], reply.body
    for name, value in expected.get("headers", {}).items():
        assert (reply.header(name) or "").startswith(value), (name, reply.headers)
    if "body_text" in expected:
        assert reply.body.decode().startswith(expected["body_text"])
    if "body_text_contains" in expected:
        assert expected["body_text_contains"] in reply.body.decode()
    if "message_contains" in expected:
        assert expected["message_contains"] in reply.body.decode()
    if "body_json" in expected:
        assert reply.json() == expected["body_json"]
    if "body_json_subset" in expected:
        assert_subset(expected["body_json_subset"], reply.json())
    if "upstream" in expected:
        assert_upstream(expected["upstream"], reply)
    if "models" in expected:
        assert_models(expected["models"], reply)


def assert_upstream(expected: dict[str, Any], reply: Reply) -> None:
    """What the echo server saw."""
    seen = reply.json()
    for name in ("method", "path", "body"):
        if name in expected:
            assert seen[name] == expected[name]
    if "body_json" in expected:
        assert json.loads(seen["body"]) == expected["body_json"]
    for piece in expected.get("body_contains", ()):
        assert piece in seen["body"]
    headers = {name.lower(): value for name, value in seen["headers"]}
    for name, value in expected.get("headers_subset", {}).items():
        assert headers[name.lower()] == value
    for name in expected.get("headers_absent", ()):
        assert name.lower() not in headers
    assert "key-one" not in str(headers), "our key is for us alone"


def assert_models(expected: dict[str, Any], reply: Reply) -> None:
    """The list of models."""
    data = reply.json()["data"]
    assert [record["id"] for record in data] == expected["ids"]
    records = {record["id"]: record for record in data}
    for name, record in expected.items():
        if name.startswith("record:"):
            assert_subset(record, records[name.removeprefix("record:")])
    assert all(record["meta"]["qmflask"] == record["meta"]["llamaswap"] for record in data)


def assert_subset(expected: Any, given: Any) -> None:
    """Every member that is expected is there with that value."""
    if isinstance(expected, dict):
        assert isinstance(given, dict)
        for name, value in expected.items():
            assert_subset(value, given.get(name))
    else:
        assert given == expected


def merged(first: Any, second: Any) -> Any:
    """Two nested mappings, the second's values winning."""
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return second
    return {**first, **{name: merged(first.get(name), value) for name, value in second.items()}}


@pytest.mark.parametrize(
    ("model", "status", "code", "fragment"),
    [
        ("falls", 502, "model_start_failed", "upstream command exited prematurely"),
        ("nofile", 502, "model_start_failed", "failed to start command"),
        ("blind", 502, "upstream_unreachable", "model blind at http://127.0.0.1:1"),
    ],
)
def test_starts_that_fail(base: Service, model: str, status: int, code: str, fragment: str) -> None:
    reply = base.chat(model, headers={"Authorization": "Bearer key-one"})
    assert (reply.status, reply.code) == (status, code)
    assert fragment in reply.json()["error"]["message"]


def test_the_concurrency_limit(base: Service) -> None:
    headers = {"Authorization": "Bearer key-one"}
    assert base.chat("tight", headers=headers).status == 200
    # The answer is there a moment before its lease has ended, and the limit is one.
    eventually(lambda: not base.query("SELECT 1 FROM requests WHERE model = 'tight'"), "the first one is over")
    first = base.open("/upstream/tight/silence", None, headers)
    assert first.recv(12) == b"HTTP/1.1 200"
    reply = base.chat("tight", headers={**headers, "Accept": "text/html"})
    assert (reply.status, reply.code, reply.header("Retry-After")) == (429, "concurrency_limit", "1")
    assert "Too many requests" in reply.json()["error"]["message"]
    first.close()


# --- filters ----------------------------------------------------------------------------------------------


def named(vector: dict[str, Any], name: str) -> str:
    """A name of a filter vector that is its own among those of all of them."""
    return f"{vector['id']}/{name}"


@pytest.fixture(scope="module")
def filtering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One model for each filter vector."""
    models: dict[str, Any] = {}
    for vector in [v for v in VECTORS if v["area"] == "filters"]:
        given = vector["given"]
        filters = dict(given["filters"])
        if "setParamsByID" in filters:
            filters["setParamsByID"] = {named(vector, name): v for name, v in filters["setParamsByID"].items()}
        requested = named(vector, given["requested_model"])
        model = echo_model(filters=filters, aliases=[requested])
        if given["useModelName"]:
            model["useModelName"] = given["useModelName"]
        models[vector["id"]] = model
    with shared(tmp_path_factory.mktemp("filters"), {"models": models}, workers=1) as service:
        yield service


@pytest.mark.parametrize("vector", of("filters"))
def test_filters(filtering: Service, vector: dict[str, Any]) -> None:
    given, expected = vector["given"], vector["expect"]
    old, new = given["requested_model"], named(vector, given["requested_model"])
    body = given["body"].replace(f'"model":"{old}"', f'"model":"{new}"')
    reply = filtering.post("/v1/chat/completions", body.encode(), headers={"Content-Type": given["content_type"]})
    if expected["result"] == "error":
        assert reply.status == expected["status"]
        assert expected["message_contains"] in reply.json()["error"]["message"]
        return
    wanted = expected["body_json"]
    if wanted["model"] == old:
        wanted = {**wanted, "model": new}
    assert json.loads(reply.json()["body"]) == wanted


# --- names and paths --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pathed(tmp_path_factory: pytest.TempPathFactory, echo: int) -> Iterator[Service]:
    """The models and peers of the path vectors, which are the same in all of them."""
    given = next(v["given"] for v in VECTORS if v["area"] == "upstream-path")
    models: dict[str, Any] = {name: echo_model() for name in given["local_models"]}
    for alias, model in given["aliases"].items():
        models[model]["aliases"] = [alias]
    peers = {name: {"proxy": f"http://127.0.0.1:{echo}", "models": offers} for name, offers in given["peers"].items()}
    with shared(tmp_path_factory.mktemp("paths"), {"models": models, "peers": peers}, workers=1) as service:
        yield service


@pytest.mark.parametrize("vector", of("upstream-path"))
def test_upstream_paths(pathed: Service, vector: dict[str, Any]) -> None:
    expected = vector["expect"]
    reply = pathed.get("/upstream" + vector["given"]["path_after_upstream"])
    if not expected["found"]:
        assert (reply.status, reply.code) == (404, "not_found")
        return
    assert reply.status == 200
    assert reply.json()["path"] == expected["remaining"]
    assert reply.header("X-QM-Model") == expected["model_id"]


def test_peer_names(tmp_path: Path, echo: int) -> None:
    (vector,) = [v for v in VECTORS if v["id"] == "peer-001"]
    config = yaml.safe_load(vector["given"]["config_yaml"])
    for model in config["models"].values():
        model |= echo_model()
    for peer in config["peers"].values():
        peer["proxy"] = f"http://127.0.0.1:{echo}"
    with shared(tmp_path, config, workers=1) as service:
        for name, meaning in vector["expect"]["resolve"].items():
            reply = service.post("/v1/completions", {"model": name})
            if meaning is None:
                assert (reply.status, reply.code) == (404, "model_not_found")
                continue
            assert reply.status == 200
            # A bare name is its peer's; the answer's header says whose.
            model = reply.header("X-QM-Model") or ""
            assert model == meaning or model.partition("/")[2] == meaning
            if "/" in model:
                assert json.loads(reply.json()["body"])["model"] == model.partition("/")[2]

"""Keys: who may use which model, who may stop one, and that no key ever leaves."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from tests.integration.conftest import StartService
from tests.integration.echoing import echo_model, shared
from tests.service import Service

CONFIG = {
    "apiKeys": [
        {"key": "root-key-1", "name": "root", "admin": True},
        {"key": "chat-key-2", "name": "chats", "models": ["chat-*", "front", "choose"]},
        {"key": "schlüssel", "name": "umlaut", "models": ["*"], "admin": False},
    ],
    "models": {
        "chat-small": echo_model(aliases=["small"]),
        "big": echo_model(aliases=["chat-big"]),
        "secret": echo_model(upstreamKey="for-the-server"),
    },
    "groups": {"all": {"swap": False, "members": ["chat-small", "big", "secret"]}},
    "selectors": {
        "choose": {"strategy": "pin", "targets": ["secret"]},
        "hidden": {"strategy": "pin", "targets": ["big"]},
    },
    "profiles": {"work": {"pins": {"front": "secret"}}},
    "peers": {"far": {"proxy": "http://127.0.0.1:1", "models": ["chat-far", "other"]}},
}
ROOT = {"Authorization": "Bearer root-key-1"}
CHATS = {"x-api-key": "chat-key-2"}
ADMIN_ROUTES = [
    ("GET", "/unload"),
    ("POST", "/api/models/unload"),
    ("POST", "/api/models/unload/big"),
    ("POST", "/api/models/load/big"),
    ("POST", "/api/config/reload"),
    ("POST", "/api/inflight/1/cancel"),
    ("PUT", "/api/profiles/active"),
    ("POST", "/api/memory/relearn"),
    ("GET", "/logs"),
    ("GET", "/logs/stream/big"),
    ("GET", "/api/logs/proxy"),
    ("GET", "/api/events"),
    ("GET", "/api/status"),
    ("GET", "/api/config"),
    ("GET", "/api/memory"),
    ("GET", "/api/plan?model=big"),
    ("GET", "/api/metrics/activity"),
    ("GET", "/api/metrics/stats"),
    ("GET", "/api/inflight"),
    ("GET", "/api/captures/1"),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Echo models behind three keys."""
    with shared(tmp_path_factory.mktemp("keys"), CONFIG) as service:
        yield service


def test_scopes_are_globs_over_names(service: Service) -> None:
    for name, status in (("chat-small", 200), ("small", 200), ("big", 200), ("chat-big", 200), ("secret", 403)):
        # `big` goes by the name chat-big, too: a scope is about models, not about spellings.
        assert service.chat(name, headers=CHATS).status == status, name
    assert service.chat("secret", headers=ROOT).status == 200
    reply = service.chat("secret", headers=CHATS)
    assert (reply.code, reply.json()["error"]["type"]) == ("forbidden", "authentication_error")
    assert service.chat("choose", headers=CHATS).status == 200, "the selector is in the key's scope"
    assert service.chat("hidden", headers=CHATS).status == 403
    assert service.get("/upstream/secret/x", headers=CHATS).status == 403
    assert service.get("/upstream/small/x", headers=CHATS).status == 200
    assert service.chat("far/other", headers=CHATS).status == 403
    assert service.chat("chat-far", headers=CHATS).code == "upstream_unreachable"


def test_lists_show_what_a_key_may_use(service: Service) -> None:
    def ids(headers: dict[str, str]) -> list[str]:
        return [record["id"] for record in service.get("/v1/models", headers=headers).json()["data"]]

    assert ids(CHATS) == ["big", "chat-small", "choose", "far/chat-far"]
    assert "secret" in ids(ROOT) and "far/other" in ids(ROOT)
    service.chat("secret", headers=ROOT)
    service.chat("big", headers=ROOT)
    running = service.get("/running", headers=CHATS).json()["running"]
    assert "secret" not in [row["model"] for row in running]
    assert all(row["cmd"] == "" for row in running), "commands are an admin's to see"
    message = service.chat("secre", headers=CHATS).json()["error"]["message"]
    assert "secret" not in message


def test_admin_routes_need_an_admin(service: Service) -> None:
    for method, path in ADMIN_ROUTES:
        body = None if method == "GET" else b"{}"
        assert service.request(method, path, body).status == 401, path
        assert service.request(method, path, body, CHATS).code == "forbidden", path
        if "stream" not in path and "events" not in path:  # which would not end
            assert service.request(method, path, body, ROOT).status in (200, 400, 404), path


def test_what_names_every_model_is_for_keys_that_may_use_them(service: Service) -> None:
    every = {"x-api-key": "schlüssel".encode().decode("latin-1")}
    assert [service.get("/metrics", headers=h).status for h in (CHATS, every, ROOT)] == [403, 200, 200]
    for path in ("/api/version", "/api/hardware", "/api/performance", "/api/profiles", "/api/workers"):
        assert service.get(path).status == 401, path
        assert service.get(path, headers=CHATS).status == 200, path


def test_browsers_of_other_sites(service: Service) -> None:
    basic = {"Authorization": "Basic " + base64.b64encode(b"any:root-key-1").decode()}
    cross = {"Sec-Fetch-Site": "cross-site", "Origin": "http://evil.example"}
    here = {"Sec-Fetch-Site": "same-origin", "Origin": service.url}
    assert service.post("/api/models/unload", b"", headers={**basic, **cross}).status == 403
    assert service.post("/api/models/unload", b"", headers={**basic, "Origin": "null"}).status == 403
    assert service.post("/api/models/unload", b"", headers={**basic, **here}).status == 200
    assert service.post("/api/models/unload", b"", headers={**ROOT, **cross}).status == 200


def test_keys_of_any_letters(service: Service) -> None:
    basic = {"Authorization": "Basic " + base64.b64encode("x:schlüssel".encode()).decode()}
    assert service.get("/running", headers=basic).status == 200
    bearer = {"Authorization": b"Bearer " + "schlüssel".encode()}
    assert service.get("/running", headers=bearer).status == 200


@pytest.mark.parametrize(
    "offered",
    [
        {"Authorization": "Bearer root-key-1"},
        {"x-api-key": "root-key-1"},
        {"Authorization": "Basic " + base64.b64encode(b"a:root-key-1").decode()},
    ],
)
def test_the_accepted_key_is_not_forwarded(service: Service, offered: dict[str, str]) -> None:
    seen = str(service.chat("big", headers=offered).json()["headers"])
    assert "root-key-1" not in seen and "Basic" not in seen
    seen = str(service.chat("secret", headers=offered).json()["headers"])
    assert "Bearer for-the-server" in seen and "root-key-1" not in seen
    seen = service.get("/upstream/big/x", headers={**offered, "Cookie": "mine=1"}).json()["headers"]
    assert ["Cookie", "mine=1"] in seen
    assert "root-key-1" not in str(seen)


def test_keys_are_in_no_log_and_no_store(service: Service) -> None:
    service.chat("nobody", headers=ROOT)
    service.chat("big", headers={"Authorization": "Bearer wrong-key-9"})
    for path in service.state.rglob("*"):
        if path.is_file() and not path.name.startswith("config-"):
            data = path.read_bytes()
            assert b"root-key-1" not in data and b"wrong-key-9" not in data, path
    assert "root-key-1" not in service.log()


def test_open_to_every_address_is_warned_of_once(start_service: StartService) -> None:
    service = start_service({"models": {}}, workers=2, args=("--bind", "0.0.0.0:0"))
    assert service.log().count("no apiKeys are configured") == 1
    assert service.get("/unload").status == 200
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}, {"Origin": "null"}):
        reply = service.post("/api/models/unload", b"", headers={**headers, "Authorization": "Bearer x"})
        assert (reply.status, reply.code) == (403, "forbidden")
    assert service.post("/api/models/unload", b"", headers={"Origin": service.url}).status == 200

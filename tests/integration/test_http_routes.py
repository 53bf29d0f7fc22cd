"""Routes, bodies, names and headers: what the model server gets and what the client sees."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

import pytest

from qmflask.web.inference import GET_ROUTES, POST_ROUTES
from tests.integration.echoing import echo_model, shared
from tests.service import Reply, Service, eventually

NAMES = ["org/with/slashes", "tag:7b", "with space", "ünï-cödé-猫", "per%20cent", "plus+and&", "q?#"]


@pytest.fixture(scope="module", params=["1", "0"], ids=["ahead", "flask"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Echo models of all kinds of names, in one group without swapping; ahead of Flask's dispatch and behind it."""
    models = {name: echo_model() for name in NAMES}
    models["echo"] = echo_model(aliases=["other"])
    models["renamed"] = echo_model(useModelName="real", filters={"stripParams": "drop", "setParams": {"add": 1}})
    models["comfyui_auto"] = echo_model()
    models["asleep"] = echo_model()
    config = {
        "models": models,
        "maxBodyMB": 1,
        "groups": {"all": {"swap": False, "members": list(models)}},
    }
    with shared(tmp_path_factory.mktemp("routes"), config, env={"QMFLASK_AHEAD": request.param}) as service:
        yield service


def raw(service: Service, request: bytes, timeout: float = 10) -> bytes:
    """Send bytes, half-close nothing, and give back all bytes of the answer."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=timeout) as sock:
        sock.sendall(request)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
        return answer


def sent(reply: Reply) -> dict[str, Any]:
    """The body that the echo server got, parsed."""
    found = json.loads(reply.json()["body"])
    assert isinstance(found, dict)
    return found


# --- routes -----------------------------------------------------------------------------------------------


def test_every_post_route(service: Service) -> None:
    for public, path in POST_ROUTES.items():
        reply = service.post(public + "?x=%2F", {"model": "echo"})
        assert (public, reply.status, reply.json()["path"]) == (public, 200, path + "?x=%2F")


def test_every_get_route(service: Service) -> None:
    for public, path in GET_ROUTES.items():
        reply = service.get(public + "?a=%2f&model=other&b")
        assert (reply.status, reply.json()["path"]) == (200, path + "?a=%2f&model=other&b")
        head = service.request("HEAD", public + "?model=echo")
        assert (head.status, head.body) == (200, b"")
        assert int(head.header("Content-Length") or 0) > 0


def test_prefixes_are_removed(service: Service) -> None:
    assert service.post("/v/chat/completions", {"model": "echo"}).json()["path"] == "/chat/completions"
    assert service.post("/audioapi/v1/tasks/run", {"model": "echo"}).json()["path"] == "/v1/tasks/run"


def test_wrong_methods_and_unknown_paths(service: Service) -> None:
    reply = service.get("/v1/chat/completions")
    assert (reply.status, reply.header("Allow"), reply.body) == (405, "POST", b"Method Not Allowed")
    assert "text/plain" in (reply.header("Content-Type") or "")
    assert service.post("/v1/models", b"").header("Allow") == "GET, HEAD"
    assert service.request("PUT", "/v1/audio/voices", b"").header("Allow") == "GET, HEAD, POST"
    reply = service.get("/v1/nothing")
    assert (reply.status, reply.body) == (404, b"404 page not found")


def test_head_of_what_never_ends(service: Service) -> None:
    for _ in range(6):  # more often than there are streams for pages
        for path in ("/logs/stream", "/api/events"):
            reply = service.request("HEAD", path)
            assert (reply.status, reply.body) == (200, b"")


def test_the_machine(service: Service) -> None:
    found = service.get("/api/hardware").json()
    assert found["cpu"]["threads"] >= 1 and found["system"]["os"] == "Linux" and found["accelerators"] == []


def test_preflights(service: Service) -> None:
    headers = {"Access-Control-Request-Headers": "X-One, bad header, authorization", "Origin": "http://a.example"}
    reply = service.request("OPTIONS", "/no/such/path", headers=headers)
    assert (reply.status, reply.body) == (204, b"")
    assert reply.header("Access-Control-Allow-Origin") == "*"
    assert reply.header("Access-Control-Allow-Headers") == "X-One, authorization"
    assert reply.header("Access-Control-Max-Age") == "86400"


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("//v1/models", "/v1/models"),
        ("/v1/./models?a=b", "/v1/models?a=b"),
        ("/v1/x/../models", "/v1/models"),
        ("/upstream/echo//a%2F%2Fb/", "/upstream/echo/a%2F%2Fb/"),
        ("//evil.example/..//x", "/x"),
        ("/./\\evil.example", "/evil.example"),
    ],
)
def test_paths_are_cleaned(service: Service, path: str, clean: str) -> None:
    reply = service.get(path)
    assert (reply.status, reply.header("Location")) == (307, clean)


def test_the_way_to_the_page(service: Service) -> None:
    found = [(reply.status, reply.header("Location")) for reply in map(service.get, ("/", "/ui"))]
    assert found == [(302, "/ui"), (307, "/ui/")]


def test_upstream_passes_everything_as_it_is(service: Service) -> None:
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "PROPFIND"):
        reply = service.request(method, "/upstream/echo/a%2Fb/%7e?q=%20", b'{"model":  "zz"}', {"Content-Type": "a/b"})
        seen = reply.json()
        assert (seen["method"], seen["path"], seen["body"]) == (method, "/a%2Fb/%7e?q=%20", '{"model":  "zz"}')
    assert service.get("/upstream/").status == 404
    assert service.get("/upstream/nobody/x").code == "not_found"
    assert service.get("/upstream").header("Location") == "/ui/models"
    assert (service.get("/upstream/echo?a=b").status, service.post("/upstream/echo", b"").status) == (301, 308)
    assert service.get("/upstream/echo?a=b").header("Location") == "/upstream/echo/?a=b"


def test_what_is_recorded_below_upstream(service: Service) -> None:
    """Requests on the model routes, by the path that the model server sees."""
    for path in ("/v/rerank", "/v1/rerank", "/v1/other", "/rerank/more"):
        assert service.post(f"/upstream/echo{path}", b"{}").status == 200
    assert service.get("/upstream/echo/infill").status == 200

    def recorded() -> set[str]:
        return {row["req_path"] for row in service.get("/api/metrics/activity?limit=999").json()["data"]}

    eventually(lambda: {"/v/rerank", "/v1/rerank"} <= recorded(), "both are stored")
    assert not {"/v1/other", "/rerank/more"} & recorded()


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("POST", {"Connection": "Upgrade", "Upgrade": "websocket"}),
        ("GET", {"Upgrade": "websocket"}),
        ("GET", {"Connection": "Upgrade", "Upgrade": "h2c"}),
        ("GET", {"Connection": "Upgrade", "Upgrade": "websocket"}),
    ],
)
def test_what_only_a_websocket_may_ask_of_the_server(service: Service, method: str, headers: dict[str, str]) -> None:
    """The model server here knows none, and answers as usual."""
    reply = service.request(method, "/upstream/echo/ws", headers=headers)
    assert reply.status == 200
    seen = {name.lower() for name, _ in reply.json()["headers"]}
    assert ("upgrade" in seen) == (method == "GET" and len(headers) == 2 and headers["Upgrade"] == "websocket")


def test_ignored_paths_load_nothing(service: Service) -> None:
    reply = service.get("/upstream/asleep/app.js")
    assert (reply.status, reply.code) == (409, "conflict")
    assert "path matches upstream.ignorePaths" in reply.json()["error"]["message"]
    assert "asleep" not in [row["model"] for row in service.running()]
    service.get("/upstream/echo/")
    assert service.get("/upstream/echo/app.js").status == 200


def test_comfyui(service: Service) -> None:
    assert (service.get("/comfyui").status, service.get("/comfyui").header("Location")) == (301, "/comfyui/")
    reply = service.get("/comfyui/deep")
    assert reply.status == 409
    assert "only /comfyui/ can start it" in reply.json()["error"]["message"]
    assert service.get("/comfyui/").json()["path"] == "/"
    assert service.get("/comfyui/a%2Fb?c").json()["path"] == "/a%2Fb?c"


# --- bodies -----------------------------------------------------------------------------------------------


def test_an_untouched_body_is_forwarded_byte_for_byte(service: Service) -> None:
    body = b'{ "messages" : [ 1.0, 1e2 , "\\u00e9" ],\n\t"model":"other", "model":"echo" }'
    for kind in ("application/json", "application/json; charset=utf-8", "", "text/plain"):
        reply = service.post("/v1/chat/completions", body, headers={"Content-Type": kind})
        assert reply.json()["body"].encode("latin-1") == body


def test_edits_keep_the_rest_of_the_bytes(service: Service) -> None:
    body = b'{ "drop":[{"x":1}] , "t" : 1.50,"model":  "renamed" }'
    reply = service.post("/v1/chat/completions", body)
    assert sent(reply) == {"t": 1.5, "model": "real", "add": 1}
    assert '"t" : 1.50,"model":  "real"' in reply.json()["body"]


def multipart(*parts: tuple[str, str]) -> bytes:
    """A body of fields and one file (the part named `file`)."""
    out = b""
    for name, value in parts:
        file = '; filename="a.wav"\r\nContent-Type: audio/wav' if name == "file" else ""
        out += f'--XX\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n{value}\r\n'.encode()
    return out + b"--XX--\r\n"


@pytest.mark.parametrize("parts", [[("model", "M"), ("file", "RIFF")], [("file", "RIFF" * 9), ("model", "M")]])
def test_multipart_with_the_model_first_or_last(service: Service, parts: list[tuple[str, str]]) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=XX"}
    for name, seen in (("echo", "echo"), ("renamed", "real")):
        body = multipart(*[(k, v.replace("M", name)) for k, v in parts])
        reply = service.post("/v1/audio/transcriptions", body, headers=headers)
        expected = multipart(*[(k, v.replace("M", seen)) for k, v in parts])
        assert reply.json()["body"].encode("latin-1") == expected


def test_models_named_in_forms_and_queries(service: Service) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert service.post("/v1/images/edits", b"a=1&model=org%2Fwith%2Fslashes", headers=form).status == 200
    reply = service.post(
        "/v1/audio/speech?model=echo", b"\x00raw", headers={"Content-Type": "application/octet-stream"}
    )
    assert reply.json()["body"] == "\x00raw"


def test_bodies_that_name_no_model(service: Service) -> None:
    for body in (b"", b"{}", b'{"model": null}', b'{"model": ""}', b'{"model": {}}', b"[]"):
        reply = service.post("/v1/chat/completions", body, headers={"Content-Type": "application/json"})
        assert (body, reply.status) == (body, 400)
        assert reply.code == ("missing_model" if body else "invalid_json")


def test_invalid_json_says_where(service: Service) -> None:
    reply = service.post("/v1/chat/completions", b'{"model": "echo", }')
    assert (reply.status, reply.code) == (400, "invalid_json")
    assert "column 19" in reply.json()["error"]["message"]


def test_chunked_bodies(service: Service) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = raw(service, head + b'8\r\n{"model"\r\n8\r\n:"echo"}\r\n0\r\n\r\n')
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert b'{\\"model\\":\\"echo\\"}' in answer


def test_expect_100_continue(service: Service) -> None:
    body = b'{"model":"echo"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as sock:
        sock.sendall(head)
        assert sock.recv(100).startswith(b"HTTP/1.1 100")
        sock.sendall(body)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"Expect" not in answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{\r\n",
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=XX\r\n"
        b"Content-Length: 9999\r\n\r\n" + multipart(("model", "echo"))[:60],
    ],
)
def test_a_truncated_body_is_an_error(service: Service, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as sock:
        sock.sendall(request_bytes)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    # A client that is already gone may read nothing; what it never reads is a success.
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 499")), answer


def test_bodies_above_the_limit(service: Service) -> None:
    reply = service.post("/v1/chat/completions", b'{"model":"echo","x":"' + b"x" * 2_000_000 + b'"}')
    assert (reply.status, reply.code) == (413, "body_too_large")
    reply = service.post("/upstream/echo/", b"x" * 2_000_000)
    assert reply.status == 413
    chunk = b"40000\r\n" + b"x" * 0x40000 + b"\r\n"
    head = b"POST /v1/audio/speech?model=echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    head += b"Content-Type: a/b\r\n\r\n"
    assert b" 413 " in raw(service, head + chunk * 8 + b"0\r\n\r\n").split(b"\r\n")[0]
    assert service.post("/v1/chat/completions", b'{"model":"echo","x":"' + b"x" * 1_000_000 + b'"}').status == 200


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_names_of_all_kinds(service: Service, name: str) -> None:
    reply = service.post("/v1/completions", {"model": name})
    assert reply.status == 200
    assert sent(reply) == {"model": name}
    assert unquote(reply.header("X-QM-Model") or "") == name
    assert service.get(f"/props?model={quote(name, safe='')}").status == 200
    reply = service.get(f"/upstream/{quote(name, safe='')}/a%20b")
    assert (reply.status, reply.json()["path"]) == (200, "/a%20b")
    assert service.post(f"/api/models/unload/{quote(name)}", b"").status == 200
    assert name not in [row["model"] for row in service.running()]


def test_unknown_names_list_the_nearest(service: Service) -> None:
    reply = service.post("/v1/completions", {"model": "echoo"})
    assert (reply.status, reply.code) == (404, "model_not_found")
    assert "no router for requested model 'echoo'; did you mean echo?" in reply.json()["error"]["message"]


# --- headers ----------------------------------------------------------------------------------------------


def test_answers_say_what_served_them(service: Service) -> None:
    service.post("/api/models/unload/echo", b"")
    first, second = service.chat("other"), service.chat("other")
    assert [r.header("X-QM-Model") for r in (first, second)] == ["echo", "echo"]
    assert [r.header("X-QM-Loaded") for r in (first, second)] == ["1", "0"]
    assert int(first.header("X-QM-Wait-Ms") or 0) > int(second.header("X-QM-Wait-Ms") or 0)


def test_request_ids(service: Service) -> None:
    assert service.chat("echo", headers={"X-Request-Id": "abc-1.2"}).header("X-QM-Request-Id") == "abc-1.2"
    for bad in ("", "a b", "x" * 200, 'a"b', "é"):
        found = service.chat("echo", headers={"X-Request-Id": bad}).header("X-QM-Request-Id")
        assert found and found != bad
    error = service.chat("nobody", headers={"X-Request-Id": "abc-2"})
    assert error.header("X-QM-Request-Id") == "abc-2"


def test_hop_by_hop_headers_stay_here(service: Service) -> None:
    headers = {"Connection": "X-Mine", "X-Mine": "1", "X-Other": "2", "TE": "trailers", "X-Forwarded-For": "9.9.9.9"}
    seen = {k.lower(): v for k, v in service.chat("echo", headers=headers).json()["headers"]}
    assert "x-mine" not in seen and "te" not in seen and "connection" not in seen
    assert seen["x-other"] == "2"
    assert seen["x-forwarded-for"] == "9.9.9.9, 127.0.0.1"
    assert seen["host"] == f"127.0.0.1:{service.port}"


@pytest.mark.parametrize("header", ["X-QM-Patience-Ms", "X-QM-Hold-Ms"])
def test_waits_that_are_no_numbers(service: Service, header: str) -> None:
    reply = service.chat("echo", headers={header: "soon"})
    assert (reply.status, reply.code) == (400, "bad_request")
    assert service.chat("echo", headers={header: "100000"}).status == 200


@pytest.mark.parametrize(("accept", "start"), [("text/plain", b"qmflask: "), ("text/html", b"<!doctype html>")])
def test_errors_in_the_form_that_is_asked_for(service: Service, accept: str, start: bytes) -> None:
    reply = service.chat("<b>nobody</b>", headers={"Accept": accept})
    assert reply.status == 404
    assert reply.body.startswith(start)
    assert accept == "text/plain" or b"<b>" not in reply.body

"""Random requests on every route: no 500 of our own, no hang, nothing left. QMFLASK_FUZZ=600 makes it ten minutes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from qmflask.app import create_app
from tests.integration.echoing import echo_model, shared
from tests.integration.test_websockets import talking
from tests.service import Service, eventually

SECONDS = float(os.environ.get("QMFLASK_FUZZ", "8"))
SEED = int(os.environ.get("QMFLASK_FUZZ_SEED", "0")) or random.randrange(1 << 30)
#: Answers must begin within this time; the slowest, an unload of everything, takes a fraction of it.
PATIENCE = 30.0

METHODS = [*["GET"] * 6, *["POST"] * 8, "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "PROPFIND", "get", "X-ODD"]
NAMES = [
    "echo",
    "ws",
    "al/ias",
    "ünï",
    "pick",
    "warm",
    "gone/m",
    "pin",
    "nobody",
    "",
    "a" * 300,
    "../x",
    "%00",
    "None",
    "1",
]
ODD = [
    "%",
    "%zz",
    "%00",
    "\u00e9",
    "//",
    "/./",
    "/../",
    "?",
    ";",
    "\\",
    "%2F",
    "%2e%2e",
    "'\"",
    "<b>",
    "\x7f",
    "*",
    "{}",
]
HEADERS = [
    "Authorization",
    "X-Api-Key",
    "Accept",
    "Accept-Encoding",
    "Origin",
    "Sec-Fetch-Site",
    "X-Request-Id",
    "X-QM-Patience-Ms",
    "X-QM-Hold-Ms",
    "X-Forwarded-For",
    "Forwarded",
    "Range",
    "Cookie",
    "Connection",
    "Upgrade",
    "TE",
    "If-None-Match",
    "Last-Event-ID",
    "Access-Control-Request-Headers",
    "X-Session-Id",
]
VALUES = ["", "0", "-1", "5", "99999999999999999999", "Basic eDp5", "Basic !!", "Bearer x", "text/html", "text/plain"]
VALUES += [
    "gzip, br;q=0",
    "null",
    "http://[",
    "cross-site",
    "close",
    "websocket",
    "x" * 3000,
    "a, b, ,",
    "\u00ff\u00fe",
    "bytes=0-1",
]
KINDS = ["application/json", "application/json; charset=x", "multipart/form-data; boundary=XX", "text/plain", ""]
KINDS += ["multipart/form-data", 'multipart/form-data; boundary=""', "application/x-www-form-urlencoded", "\u00ff"]
QUERIES = [
    "",
    "model=echo",
    "model=",
    "model=%ff",
    "stream=true&model=pick",
    "limit=x",
    "limit=9999",
    "page=0",
    "page=99999999999999999999",
    "page=4611686018427387904&limit=999",
]
QUERIES += [
    "after=zz",
    "after=2020-01-01T00:00:00Z",
    "start=1&end=0",
    "sort=id&order=asc",
    "no-history",
    "min_id=-1",
    "%",
    "&&=&",
    "types=x",
]


def routes() -> list[str]:
    """Every rule of the application, plus the two prefixes that are no rules."""

    def never() -> Any:
        raise AssertionError

    rules = {rule.rule for rule in create_app(never).url_map.iter_rules()}
    return sorted(rules | {"/upstream/<path:name>", "/comfyui/", "/comfyui/<path:name>", "/nothing"})


#: What makes a websocket of a GET, if its method and path are right.
HANDSHAKE = [
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: " + "A" * 22 + "==",
]


class Maker:
    """Makes random requests."""

    def __init__(self, seed: int, rules: list[str]) -> None:
        self.random = random.Random(seed)
        self.rules = rules

    def path(self) -> str:
        """A path that is right more often than not."""
        pick = self.random
        rule = pick.choice(self.rules)
        while "<" in rule:
            before, _, rest = rule.partition("<")
            rule = before + pick.choice([*NAMES, *ODD, "5", "99999999999999999999", "\u0663"]) + rest.partition(">")[2]
        if pick.random() < 0.15:
            at = pick.randrange(len(rule) + 1)
            rule = rule[:at] + pick.choice(ODD) + rule[at:]
        query = pick.choice(QUERIES)
        return rule + (f"?{query}" if query else "")

    def body(self) -> bytes:
        """A body, often one that means something."""
        pick = self.random
        document: Any = {"model": pick.choice([*NAMES, None, 5, [], {}]), "stream": pick.choice([True, False, "x", 1])}
        text = json.dumps(document, ensure_ascii=pick.random() < 0.5).encode("utf-8", "surrogatepass")
        field = b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\necho\r\n--XX--\r\n'
        form = b"model=echo&a=%zz&model=%ff"
        choices = [
            text,
            text,
            text,
            field,
            field[:-9],
            form,
            b"",
            b"{",
            b"[]",
            b"null",
            b"\xff" * 9,
            b'{"name": "day"}',
        ]
        choices += [b'{"name": 5}', b'{"model":' * 3000, b"[" * 100_000, b'{"model":"echo","x":' + b"9" * 5000 + b"}"]
        found = pick.choice(choices)
        if found and pick.random() < 0.1:
            at = pick.randrange(len(found))
            found = found[:at] + bytes([pick.randrange(256)]) + found[at + 1 :]
        return found

    def request(self) -> tuple[bytes, bool]:
        """The bytes of a request, and whether they are all that is promised."""
        pick = self.random
        lines = [
            f"{pick.choice(METHODS)} {self.path().replace(' ', '%20')} HTTP/1.{int(pick.random() < 0.9)}",
            "Host: x",
        ]
        lines += [f"{pick.choice(HEADERS)}: {pick.choice(VALUES)}" for _ in range(pick.randrange(5))]
        if pick.random() < 0.08:
            lines += HANDSHAKE
            lines[0] = pick.choice([lines[0], "GET /upstream/ws/push?5 HTTP/1.1"])
        kind = pick.choice(KINDS)
        lines += [f"Content-Type: {kind}"] if kind else []
        body, whole = self.body(), True
        if pick.random() < 0.2:
            lines.append("Transfer-Encoding: chunked")
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        else:
            lines.append(f"Content-Length: {len(body)}")
        if pick.random() < 0.05 and body:
            body, whole = body[: pick.randrange(len(body))], False
        return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass") + body, whole


def exchange(port: int, request: bytes, whole: bool) -> bytes:
    """Send a request; the head of the answer and what comes with it. Raises TimeoutError for a hang."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock:
        with contextlib.suppress(OSError):  # refused before it was sent
            sock.sendall(request)
            if not whole:
                sock.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := sock.recv(65536):
                answer += piece
                head, _, body = answer.partition(b"\r\n\r\n")
                lower = head.lower()
                endless = b"content-length:" not in lower
                if b"\r\n\r\n" in answer and (endless or len(body) > 4096):
                    break
        return answer


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One of each kind of name."""

    def config(service: Service) -> dict[str, Any]:
        return {
            "maxBodyMB": 1,
            "models": {
                "echo": echo_model(aliases=["al/ias"], filters={"setParams": {"a.b": 1}, "stripParams": "x"}),
                "ünï": echo_model(useModelName="u"),
                "comfyui_auto": echo_model(),
                "ws": talking(service, "ws"),
                "fake": {"cmd": service.fake("fake", load_time=0.3), "sendLoadingState": "comments"},
            },
            "groups": {"all": {"swap": False, "members": ["echo", "ünï", "comfyui_auto", "ws", "fake"]}},
            "selectors": {
                "pick": {"strategy": "pin", "targets": ["echo"]},
                "warm": {"strategy": "warm", "targets": ["fake", "echo"]},
            },
            "peers": {"gone": {"proxy": "http://127.0.0.1:1", "models": ["m"]}},
            "profiles": {"day": {"pins": {"pin": "echo", "shut": None}}},
        }

    with shared(tmp_path_factory.mktemp("fuzz"), config, threads=32) as service:
        yield service


@pytest.mark.timeout(SECONDS + 120)
def test_random_requests(service: Service) -> None:
    print(f"seed {SEED}")
    rules = routes()
    statuses: Counter[str] = Counter()
    faults: list[tuple[bytes, bytes]] = []
    deadline = time.monotonic() + SECONDS
    descriptors = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in service.worker_pids()}

    def run(number: int) -> None:
        make = Maker(SEED + number, rules)
        while time.monotonic() < deadline and not faults:
            request, whole = make.request()
            try:
                answer = exchange(service.port, request, whole)
            except OSError as error:  # a hang, above all
                faults.append((request, repr(error).encode()))
                return
            status = answer.split(b" ", 2)[1:2]
            statuses[status[0].decode("latin-1") if status else "none"] += 1
            if status == [b"500"] or (answer and not answer.startswith(b"HTTP/1.")):
                faults.append((request, answer))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(statuses)
    assert SECONDS < 60 or statuses["101"], "no websocket was opened"
    assert faults == [], faults[:3]
    _, mark, trace = service.log().partition("Traceback")
    assert not mark, trace[:5000]
    eventually(lambda: service.get("/api/inflight").json()["requests"] == [], "no request is left")
    eventually(
        lambda: all(len(os.listdir(f"/proc/{p}/fd")) <= n + 12 for p, n in descriptors.items()),
        "descriptors are closed",
    )
    assert set(service.worker_pids()) == set(descriptors), "a worker was replaced"
    assert service.chat("echo").status == 200

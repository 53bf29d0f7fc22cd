"""The demonstration model server: what it says, and that it can be talked to while it loads."""

from __future__ import annotations

import base64
import http.client
import json
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from qmflask.config import Source, load
from qmflask.demo import words
from qmflask.demo.server import DemoServer
from tests.service import REPO


@pytest.fixture
def server() -> Iterator[DemoServer]:
    server = DemoServer(("127.0.0.1", 0), words.Voice("aspen", 6), pace=0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server: DemoServer, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


CHAT = {"model": "x", "messages": [{"role": "system", "content": "be nice"}, {"role": "user", "content": "hello"}]}


def test_it_loads_before_it_answers(server: DemoServer) -> None:
    assert ask(server, "/health")[0] == 503
    assert ask(server, "/v1/chat/completions", CHAT)[0] == 503
    server.load(0)
    assert ask(server, "/health")[0] == 200
    assert ask(server, "/v1/chat/completions", CHAT)[0] == 200


def test_the_answer_names_the_model_and_what_was_asked(server: DemoServer) -> None:
    server.load(0)
    answer = json.loads(ask(server, "/v1/chat/completions", CHAT)[1])
    text = answer["choices"][0]["message"]["content"]
    assert "aspen" in text and "hello" in text and "be nice" not in text and "first answer" in text
    assert answer["usage"]["completion_tokens"] == len(text.split(" "))
    again = json.loads(ask(server, "/v1/chat/completions", CHAT)[1])
    assert "answer number 2" in again["choices"][0]["message"]["content"]


def test_a_stream_says_the_same_in_pieces(server: DemoServer) -> None:
    server.load(0)
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
    status, raw = ask(server, "/v1/chat/completions", {**CHAT, **options})
    payloads = [line[6:] for line in raw.decode().split("\n\n") if line]
    assert status == 200 and payloads[-1] == "[DONE]"
    chunks = [json.loads(p) for p in payloads[:-1]]
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == "I am aspen,"
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_completions_and_models(server: DemoServer) -> None:
    server.load(0)
    answer = json.loads(ask(server, "/v1/completions", {"prompt": "hello"})[1])
    assert answer["object"] == "text_completion" and "aspen" in answer["choices"][0]["text"]
    assert json.loads(ask(server, "/v1/models")[1])["data"][0]["id"] == "aspen"
    assert ask(server, "/v1/nothing", {})[0] == 404


def test_embeddings_as_numbers_and_as_base64(server: DemoServer) -> None:
    server.load(0)
    plain = json.loads(ask(server, "/v1/embeddings", {"input": ["a", "b"]})[1])["data"]
    coded = json.loads(ask(server, "/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"})[1])["data"]
    assert plain[0]["embedding"] != plain[1]["embedding"]
    for one, other in zip(plain, coded, strict=True):
        raw = base64.b64decode(other["embedding"])
        assert struct.unpack(f"<{words.DIMENSIONS}f", raw) == pytest.approx(one["embedding"])
    assert sum(v * v for v in plain[0]["embedding"]) == pytest.approx(1)


@pytest.mark.parametrize("body", [b"{", b"[]", b'"text"'])
def test_a_body_that_is_no_object_is_refused(server: DemoServer, body: bytes) -> None:
    server.load(0)
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("POST", "/v1/chat/completions", body)
    assert connection.getresponse().status == 400
    connection.close()


def test_chunked_bodies_are_read(server: DemoServer) -> None:
    server.load(0)
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    parts = iter([b'{"prompt": ', b'"in pieces"}'])
    connection.request("POST", "/v1/completions", parts, encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
    assert b"in pieces" in connection.getresponse().read()
    connection.close()


@pytest.mark.parametrize(
    ("body", "heard"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "seen"}, {"type": "image_url"}]}]},
            "seen",
        ),
        ({"messages": []}, ""),
        ({"messages": [{"role": "user", "content": 5}]}, ""),
        ({"prompt": ["a", "b"]}, "a b"),
        ({}, ""),
    ],
)
def test_prompts_of_every_shape(body: dict[str, Any], heard: str) -> None:
    assert words.last_prompt(body) == heard


def test_the_shipped_models_swap_and_the_small_one_stays() -> None:
    path = REPO / "conf" / "quartermaster.yaml"
    loaded = load([Source(str(path), path.read_text())], {})
    assert not loaded.warnings
    config = loaded.config
    aspen, birch, cedar = (config.models[name].est_vram for name in ("aspen", "birch", "cedar"))
    assert aspen + birch > config.vram_budget
    assert max(aspen, birch) + cedar <= config.vram_budget
    assert all(m.launch().argv[0] == "qmflask-demo" for m in config.models.values())

"""Token counts: the shared cases, streams cut anywhere, compressed answers, and servers that lie."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from qmflask import usage
from qmflask.usage import NOTHING, Tokens, UsageReader, error_message, tokens_of, tokens_of_stream

CASES = json.loads((Path(__file__).parents[1] / "data" / "compatibility.json").read_text())


def cases(area: str) -> Any:
    """The shared cases of one area as parameters."""
    chosen = [case for case in CASES if case["area"] == area]
    assert chosen
    return pytest.mark.parametrize("case", chosen, ids=[case["id"] for case in chosen])


def check(tokens: Tokens, expected: dict[str, Any] | None) -> None:
    found = tokens._asdict()
    found.pop("reported_ms")
    assert found == pytest.approx(expected if expected is not None else dict.fromkeys(found, 0))


@cases("metrics-stream")
@pytest.mark.parametrize("block", [1, 3, 50, 10_000])
def test_stream(case: dict[str, Any], block: int) -> None:
    body = case["given"]["body"].encode()
    reader = UsageReader("/v1/chat/completions", case["given"]["content_type"])
    for start in range(0, len(body), block):
        reader.feed(body[start : start + block])
    check(reader.tokens(), case["expect"]["tokens"])
    check(tokens_of_stream(body), case["expect"]["tokens"])


@cases("metrics-body")
def test_body(case: dict[str, Any]) -> None:
    asked = case["given"]
    check(tokens_of(asked["path"], asked["body"].encode()), case["expect"]["tokens"])
    reader = UsageReader(asked["path"], "application/json")
    for byte in asked["body"].encode():
        reader.feed(bytes([byte]))
    check(reader.tokens(), case["expect"]["tokens"])


@cases("metrics-error")
def test_error(case: dict[str, Any]) -> None:
    assert error_message(case["given"]["status"], case["given"]["body"].encode()) == case["expect"]["error_msg"]


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (500, b'{"error":{"message":" deep "},"message":"shallow"}', "deep"),
        (500, b'{"error":"","message":"shallow"}', "shallow"),
        (502, b"<html>", "502 Bad Gateway"),
        (599, b"", "HTTP 599"),
        (400, json.dumps({"error": "x" * 600}).encode(), "x" * 500 + "..."),
    ],
)
def test_error_messages(status: int, body: bytes, expected: str) -> None:
    assert error_message(status, body) == expected


def test_anthropic_stream_adds_up_over_its_events() -> None:
    stream = (
        b'event: message_start\ndata: {"message":{"usage":{"input_tokens":9,"output_tokens":1,'
        b'"cache_read_input_tokens":4}}}\n\n'
        b'event: message_delta\r\ndata:{"usage":{"output_tokens":"33"}}\r\n\r\n'
    )
    found = tokens_of_stream(stream)
    assert (found.input_tokens, found.output_tokens, found.cache_tokens) == (9, 33, 4)


def test_llama_timings_override_usage_and_report_their_time() -> None:
    body = {
        "usage": {"prompt_tokens": 1, "completion_tokens": 1},
        "timings": {"prompt_n": 5, "predicted_n": 6, "prompt_ms": 10, "predicted_ms": 20.5, "cache_n": 3, "draft_n": 2},
    }
    found = tokens_of("/v1/completions", json.dumps(body).encode())
    assert (found.input_tokens, found.output_tokens, found.cache_tokens) == (5, 6, 3)
    assert (found.draft_tokens, found.reported_ms) == (-1, 30.5)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"[1]",
        b"{",
        b'{"usage":[]}',
        b'{"usage":null,"timings":7}',
        b"\xff",
        b'"usage"',
    ],
)
def test_answers_without_counters(body: bytes) -> None:
    assert tokens_of("/infill", body) == NOTHING
    assert tokens_of_stream(b"data: " + body) == NOTHING


def test_absurd_counters_do_no_harm() -> None:
    usage = {"prompt_tokens": "1e999", "completion_tokens": True, "input_tokens": -5, "output_tokens": []}
    body = json.dumps({"usage": usage, "timings": {}}).encode()
    assert tokens_of("/x", body).input_tokens == 0


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_answers(coding: str, pack: Any) -> None:
    packed = pack(b'data: {"usage":{"prompt_tokens":4,"completion_tokens":5}}\n\n')
    reader = UsageReader("/x", "text/event-stream", coding)
    for byte in packed:
        reader.feed(bytes([byte]))
    assert reader.tokens().output_tokens == 5
    broken = UsageReader("/x", "application/json", coding)
    broken.feed(b"not compressed at all")
    assert broken.decode_failed and broken.tokens() == NOTHING


def test_an_endless_line_is_not_kept() -> None:
    reader = UsageReader("/x", "text/event-stream")
    for _ in range(20):
        reader.feed(b"data: " + b"x" * 1_000_000)
    assert len(reader._rest) <= 8 * 1024 * 1024 + 1_000_006


@pytest.mark.parametrize(("kind", "kept"), [("application/json", 8_000_000), ("audio/wav", 64 * 1024), ("", 64 * 1024)])
def test_long_answers_are_not_kept(kind: str, kept: int) -> None:
    reader = UsageReader("/x", kind)
    for _ in range(20):
        reader.feed(b"x" * 1_000_000)
    assert reader.tokens() == NOTHING
    assert len(reader.body()) == 64 * 1024
    short = UsageReader("/x", kind)
    short.feed(b"x" * kept)
    assert len(short.body()) == kept


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_counters_are_found_wherever_they_stand(end: str, size: int) -> None:
    lines = ['data: {"choices": []}', 'data: {"usage": {"prompt_tokens": 4}}', ': "usage" in a comment', ""]
    lines += [
        'data: {"timings": {"prompt_n": 5, "predicted_n": 6}, "usage": {}}',
        'event: "metrics"',
        "data: [DONE]",
        "",
    ]
    last = 'data: {"timings": {"prompt_n": 8, "predicted_n": 9}}'
    text = end.join([*lines * 3, last, ""]).encode()
    reader = UsageReader("/x", "text/event-stream")
    for at in range(0, len(text), size):
        reader.feed(text[at : at + size])
    assert (reader.tokens().input_tokens, reader.tokens().output_tokens) == (8, 9)


@pytest.mark.parametrize("block", [97, 4096, 5000, 20_000, 10**6])
@pytest.mark.parametrize("filler", [0, 1, 50, 100, 3000])
def test_counters_at_both_ends_of_a_long_stream_are_found_however_it_comes(block: int, filler: int) -> None:
    events = [{"type": "message_start", "message": {"usage": {"input_tokens": 11, "output_tokens": 1}}}]
    events += [{"type": "delta", "text": "x" * 40}] * filler
    events += [{"type": "done", "output": "y" * 30_000, "usage": {"output_tokens": 22}}, {"type": "stop"}]
    body = b"".join(b"event: e\ndata: " + json.dumps(event).encode() + b"\n\n" for event in events)
    reader = UsageReader("/v1/messages", "text/event-stream")
    for start in range(0, len(body), block):
        reader.feed(body[start : start + block])
    found = reader.tokens()
    assert (found.input_tokens, found.output_tokens) == (11, 22), "also in one event that is longer than what is kept"
    assert len(reader._tail) == 0


def test_of_a_long_stream_little_is_kept() -> None:
    reader = UsageReader("/v1/messages", "text/event-stream")
    for _ in range(10_000):
        reader.feed(b'data: {"text": "' + b"x" * 200 + b'"}\n\n')
        assert reader._tail_size < 2 * usage.STREAM_TAIL
    reader = UsageReader("/v1/messages", "text/event-stream")
    for _ in range(20):
        reader.feed(b"z" * 1024 * 1024)
    assert reader._tail_size <= usage.MAX_KEPT, "a line without end"

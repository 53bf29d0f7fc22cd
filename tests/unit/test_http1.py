"""The response parser: every framing at every split, and servers that no parser should trust."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmflask import http1
from qmflask.http1 import ChunkedBody, Head, HeadReader, Malformed, SizedBody, UntilClose


def head(data: bytes, block: int = 10**6) -> Head:
    reader = HeadReader()
    for start in range(0, len(data), block):
        found = reader.feed(data[start : start + block])
        if found is not None:
            return found
    raise AssertionError("incomplete")


@pytest.mark.parametrize("block", [1, 2, 7, 1000])
def test_a_head_at_any_split(block: int) -> None:
    data = b"HTTP/1.1 200 All good\r\nSet-Cookie: a\r\nset-cookie:  b \r\nX-Empty:\r\nX-Bytes: caf\xe9\r\n\r\nbody"
    found = head(data, block)
    assert (found.status, found.reason, found.version) == (200, "All good", (1, 1))
    assert found.headers == [("Set-Cookie", "a"), ("set-cookie", "b"), ("X-Empty", ""), ("X-Bytes", "caf\xe9")]
    assert data.endswith(b"\r\n\r\n" + b"body") and b"body".startswith(found.rest)


@pytest.mark.parametrize("line", [b"HTTP/1.0 200", b"HTTP/1.1 200 ", b"HTTP/1.1 200  OK", b"HTTP/1.1  200 OK"])
def test_status_lines_with_and_without_a_reason(line: bytes) -> None:
    assert head(line + b"\n\n").status == 200


def test_informational_responses_are_dropped() -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 201 Made\r\nA: b\r\n\r\n"
    for block in (1, 1000):
        found = head(data, block)
        assert (found.status, found.headers) == (201, [("A", "b")])


@pytest.mark.parametrize(
    ("data", "fragment"),
    [
        (b"SSH-2.0-x\r\n", "did not answer in HTTP"),
        (b"\x16\x03\x01", "did not answer in HTTP"),
        (b"HTTP/2 200 OK\r\n\r\n", "status line"),
        (b"HTTP/2.0 200 OK\r\n\r\n", "status line"),
        (b"HTTP/1.1 20 OK\r\n\r\n", "status line"),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "status line"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "header line"),
        (b"HTTP/1.1 200 OK\r\nA: b\r\n folded\r\n\r\n", "header line"),
        (b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n", "header line"),
        (b"HTTP/1.1 200 OK\r\nA: b\x00c\r\n\r\n", "header line"),
        (b"HTTP/1.1 200 OK\r\nA: b\rSet-Cookie: x\r\n\r\n", "header line"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "status 101"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 17, "status 100"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 30_000, "bytes of headers"),
        (b"HTTP/1.1 200 " + b"A" * 140_000, "bytes of headers"),
        (b"HTTP/1.1 200 " + b"A" * 140_000 + b"\r\n\r\n", "bytes of headers"),
    ],
)
def test_what_is_no_response(data: bytes, fragment: str) -> None:
    with pytest.raises(Malformed, match=fragment):
        head(data)


def test_begun_tells_a_stale_connection_from_a_failed_answer() -> None:
    reader = HeadReader()
    assert not reader.begun
    reader.feed(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert reader.begun


def make(*headers: tuple[str, str], status: int = 200) -> Head:
    return Head(status, "", (1, 1), list(headers), b"")


def test_framings() -> None:
    sized = http1.body_of("POST", make(("Content-Length", "5"), ("content-length", "5, 5")))
    assert isinstance(sized, SizedBody) and sized.length == 5
    assert isinstance(http1.body_of("POST", make()), UntilClose)
    both = make(("Content-Length", "5"), ("Transfer-Encoding", "Chunked"))
    assert isinstance(http1.body_of("GET", both), ChunkedBody)
    for bodiless in (make(("Content-Length", "9"), status=204), make(status=304)):
        assert http1.body_of("GET", bodiless).done
    assert http1.body_of("HEAD", make(("Transfer-Encoding", "chunked"))).done


@pytest.mark.parametrize(
    "headers",
    [
        [("Content-Length", "5"), ("Content-Length", "6")],
        [("Content-Length", "-5")],
        [("Content-Length", "+5")],
        [("Content-Length", "0x5")],
        [("Content-Length", "٥")],
        [("Content-Length", "")],
        [("Content-Length", "9" * 30)],
        [("Transfer-Encoding", "gzip")],
        [("Transfer-Encoding", "gzip, chunked")],
        [("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "chunked")],
    ],
)
def test_framings_that_two_readers_could_understand_differently(headers: list[tuple[str, str]]) -> None:
    with pytest.raises(Malformed):
        http1.body_of("GET", make(*headers))


def run(body: http1.Body, data: bytes, block: int) -> list[bytes]:
    return [body.feed(data[start : start + block]) for start in range(0, len(data), block)]


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.integers(1, 30),
    st.sampled_from([b"\r\n", b"\n"]),
    st.sampled_from([b"", b";name=value", b" "]),
    st.sampled_from([b"", b"Trailer: x\r\n", b"A: b\nC: d\n"]),
)
def test_chunks_at_any_split(pieces: list[bytes], block: int, newline: bytes, ext: bytes, trailers: bytes) -> None:
    data = b"".join(b"%X%b%b%b%b" % (len(p), ext, newline, p, newline) for p in pieces)
    body = ChunkedBody()
    out = run(body, data + b"0" + newline + trailers + newline, block)
    assert b"".join(out) == b"".join(pieces)
    assert body.done and not body.surplus
    body.end()


def test_everything_at_hand_comes_at_once_and_nothing_waits() -> None:
    body = ChunkedBody()
    assert body.feed(b"5\r\nhello\r\n6\r\n world\r\n9\r\npar") == b"hello worldpar"
    assert body.feed(b"tial") == b"tial"
    assert body.feed(b"ly\r\n0\r") == b"ly"
    assert not body.done
    assert body.feed(b"\n\r\nHTTP/1.1 200 OK") == b""
    assert body.done and body.surplus


@given(
    st.lists(
        st.sampled_from([b"data: x\n\n", b"data: yy\r\n\r\n", b"\r\n", b"5\r\nhello\r\n", b"z" * 300, b"3"]),
        max_size=60,
    ),
    st.sampled_from([1, 700, 1500, 5000, 100_000]),
    st.sampled_from([b"0\r\n\r\n", b"0\r\nX: 1\r\n\r\n", b"", b"1"]),
)
def test_rows_of_whole_chunks_are_what_they_are_one_by_one(pieces: list[bytes], block: int, end: bytes) -> None:
    wire = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + end
    body, seen = ChunkedBody(), []
    for start in range(0, len(wire), block):
        seen.append(body.feed(wire[start : start + block]))
    assert b"".join(seen) == b"".join(pieces) and body.done == end.endswith(b"\r\n\r\n")


#: Read line by line this is no chunk, split at CRLF alone it is two.
TWO_WAYS = b"5;x\nAAAAA\r\n00003\r\n01e\r\n" + b"e" * 30


@given(st.integers(0, 59), st.sampled_from([b"x", b"-1", b"", b"1;", b"\x00", TWO_WAYS]))
def test_a_row_does_not_hide_a_chunk_that_is_none(at: int, bad: bytes) -> None:
    chunks = [b"1e\r\n" + b"e" * 30 + b"\r\n"] * 60
    wire = b"".join(chunks[:at]) + bad + b"\r\n" + b"".join(chunks[at:])
    body = ChunkedBody()
    with pytest.raises(Malformed):
        body.feed(wire)


def test_a_huge_chunk_is_not_collected() -> None:
    body = ChunkedBody()
    assert body.feed(b"FFFFFFFFFFFF\r\n") == b""
    block = b"x" * 65536
    assert body.feed(block) is block


@pytest.mark.parametrize(
    "data",
    [
        b"xyz\r\n",
        b"-5\r\n",
        b"0x5\r\nhello\r\n",
        b"\r\n",
        b"5\r\nhelloworld\r\n",
        b"F" * 17 + b"\r\n",
        b"5" + b" " * 5000,
        b"5\r\nhello" + b"\r" * 5000,
        b"0\r\n" + b"A: b\r\n" * 30_000,
        b"0\r\n" + b"A" * 5000,
    ],
)
@pytest.mark.parametrize("block", [1, 10**6])
def test_chunks_that_are_none(data: bytes, block: int) -> None:
    with pytest.raises(Malformed):
        run(ChunkedBody(), data, block)


def test_early_ends() -> None:
    sized, chunked, until = SizedBody(5), ChunkedBody(), UntilClose()
    sized.feed(b"abc")
    chunked.feed(b"5\r\nhello\r\n")
    until.feed(b"abc")
    with pytest.raises(Malformed, match="2 bytes before"):
        sized.end()
    with pytest.raises(Malformed, match="before the end"):
        chunked.end()
    until.end()
    assert until.done


def test_surplus_is_dropped_and_spoils_the_connection() -> None:
    body = SizedBody(3)
    assert body.feed(b"abcdef") == b"abc"
    assert not http1.keeps_alive(make(), body)
    clean = SizedBody(3)
    clean.feed(b"abc")
    assert http1.keeps_alive(make(), clean)
    assert not http1.keeps_alive(make(("Connection", "close")), clean)
    assert not http1.keeps_alive(Head(200, "", (1, 0), [], b""), clean)
    assert http1.keeps_alive(Head(200, "", (1, 0), [("Connection", "Keep-Alive")], b""), clean)


@given(
    st.lists(
        st.sampled_from(
            [b"HTTP/1.1 ", b"200", b" OK", b"\r\n", b"\n", b"A: b", b"Content-Length: 5", b"Transfer-Encoding: "]
        )
        | st.sampled_from([b"chunked", b"5", b"0", b"hello", b"\x00", b":", b"100", b" "])
    ),
    st.integers(1, 20),
)
def test_responses_are_read_or_refused_whatever_comes(shreds: list[bytes], block: int) -> None:
    data = b"".join(shreds)
    reader, body = HeadReader(), None
    try:
        for start in range(0, len(data), block):
            piece = data[start : start + block]
            if body is not None:
                body.feed(piece)
            elif (found := reader.feed(piece)) is not None:
                body = http1.body_of("GET", found)
                body.feed(found.rest)
        if body is not None:
            body.end()
    except Malformed:
        return
    assert body is None or body.done


def test_a_head_that_drips_is_parsed_in_time_that_grows_with_its_length() -> None:
    reader = HeadReader()
    for byte in b"HTTP/1.1 200 OK\r\n" + b"A: bcd\r\n" * 10_000:
        assert reader.feed(bytes([byte])) is None
    assert reader.feed(b"\r\n") is not None

"""Finding the model: JSON, forms, queries, multipart; and that nothing else of a body is touched."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmflask import bodies, intake
from qmflask.bodies import Wanted
from qmflask.errors import BadRequest, BodyTooLarge, InvalidJSON, Unavailable
from qmflask.multipart import FieldFinder, boundary_of


@pytest.mark.parametrize(
    ("body", "model", "stream"),
    [
        (b'{"model":"finch"}', "finch", False),
        (b'  {"model" : "finch", "stream": true}', "finch", True),
        (b'{"stream":1,"model":"a"}', "a", True),
        (b'{"stream":"1","model":"a"}', "a", True),
        (b'{"stream":"yes","model":"a"}', "a", False),
        (b'{"stream":0,"model":"a"}', "a", False),
        (b'{"stream":null,"model":"a"}', "a", False),
        (b'{"model":"first","model":"second"}', "first", False),
        (b'{"m\\u006fdel":"first","model":"second"}', "first", False),
        (b'{"tools":[{"model":"inner"}],"model":"outer"}', "outer", False),
        (b'{"x":{"model":"inner"}}', None, False),
        (b'{"x":"\\"model\\":\\"no\\"","model":"yes"}', "yes", False),
        (b'{"model":7}', "7", False),
        (b'{"model":1.50}', "1.50", False),
        (b'{"model":true}', "true", False),
        (b'{"model":null}', None, False),
        (b'{"model":""}', None, False),
        (b'{"model":{"a":1}}', None, False),
        (b'{"model":"caf\\u00e9 \\ud83d\\ude00"}', "café 😀", False),
        ('{"model":"org/heron:tiefer Bau 鳥"}'.encode(), "org/heron:tiefer Bau 鳥", False),
        (b'{"stream":true,"stream":false,"model":"m","model":"n"}', "m", True),
        (b"[1]", None, False),
        (b'"model"', None, False),
        (b'{"x":"\\ud83d","model":"lone surrogates are grammatical"}', "lone surrogates are grammatical", False),
    ],
)
def test_model_and_stream_in_json(body: bytes, model: str | None, stream: bool) -> None:
    assert bodies.from_json(body) == Wanted(model, stream)


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        (b"", "line 1, column 1 (byte 0 of 0)"),
        (b'{"model":"x"', "byte 12 of 12"),
        (b'{\n "model": x}', "line 2, column 11"),
        ('{"é": x}'.encode(), "byte 7 of"),
        (b'{"model":NaN}', "NaN"),
        (b'{"model":"\xff"}', "byte 10 is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model":"x"} trailing', "byte 14"),
        (b'{"model":"a\\ud83d"}', "surrogate"),
    ],
)
def test_invalid_json_names_the_position(body: bytes, fragment: str) -> None:
    with pytest.raises(InvalidJSON) as caught:
        bodies.from_json(body)
    assert fragment in caught.value.message
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_large_body_with_nested_models_is_scanned_without_recursion() -> None:
    tools = [{"model": "x", "text": "{[" * 50} for _ in range(20_000)]
    body = json.dumps({"tools": tools, "image": "A" * 5_000_000, "model": "outer"}).encode()
    assert bodies.from_json(body).model == "outer"


@pytest.mark.parametrize(
    ("query", "model", "stream"),
    [
        ("model=bird&a=b", "bird", False),
        ("a=b&model=org%2Fheron&stream=true", "org/heron", True),
        ("model=a+b&model=c&stream=True", "a b", False),
        ("m%6Fdel=x", "x", False),
        ("models=x", None, False),
        ("model=", None, False),
        ("", None, False),
    ],
)
def test_forms_and_queries(query: str, model: str | None, stream: bool) -> None:
    assert bodies.from_query(query) == Wanted(model, stream)
    assert bodies.from_form(query.encode()) == Wanted(model, stream)


def test_renaming_keeps_every_other_byte() -> None:
    body = b'{ "a" : 1.50e2,\t"model":"old" , "z":"\\u00e9","model":"dup"}\n'
    assert bodies.rename_in_json(body, "new/é") == body.replace(b'"old"', '"new/é"'.encode())
    assert bodies.rename_in_form(b"a=%7e&model=old&model=x", "a b") == b"a=%7e&model=a+b&model=x"


def form(*parts: tuple[str, str], boundary: str = "XYZ") -> bytes:
    """A multipart body of (header parameters, content) parts."""
    out = [f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n{content}\r\n" for head, content in parts]
    return "".join([*out, f"--{boundary}--\r\n"]).encode()


FORMS = {
    "first": form(('name="model"', "bird"), ('name="file"; filename="a.wav"', "RIFF" * 50)),
    "last": form(('name="file"; filename="a.wav"', "RIFF\r\n--XY\r\n\r\n--" * 50), ('name="model"', "bird")),
    "unquoted": form(("name=model", "bird")),
    "after a file called model": form(('name="model"; filename="m"', "no"), ('name="model"', "bird")),
    "named in a file name": form(('filename="x; name=\\"model\\""; name="f"', "no"), ('name="model"', "bird")),
    "twice": form(('name="model"', "bird"), ('name="model"', "second")),
    "preamble": b"hello\r\n" + form(('name="model"', "bird")),
}


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64, 10_000])
@pytest.mark.parametrize("name", FORMS)
def test_multipart_model_at_any_place_and_any_split(name: str, block: int) -> None:
    body = FORMS[name]
    finder = FieldFinder(b"XYZ", "model")
    for start in range(0, len(body), block):
        if finder.feed(body[start : start + block]):
            break
    assert finder.found is not None
    assert finder.found.value == "bird"
    assert body[finder.found.start : finder.found.end] == b"bird"


@pytest.mark.parametrize("block", [1, 5, 1000])
def test_multipart_edges(block: int) -> None:
    def find(body: bytes) -> FieldFinder:
        finder = FieldFinder(b"XYZ", "model")
        for start in range(0, len(body), block):
            finder.feed(body[start : start + block])
        return finder

    empty = find(form(('name="model"', "")))
    assert empty.found is not None and empty.found.value == ""
    missing = find(form(('name="other"', "x")))
    assert missing.found is None and missing.ended
    unfinished = find(b'--XYZ\r\nContent-Disposition: form-data; name="model"\r\n\r\nbir')
    assert unfinished.found is None and not unfinished.ended


@pytest.mark.parametrize(
    "body",
    [
        b"--XYZ\r\nA: " + b"b" * 20_000,
        form(('name="model"', "x" * 70_000)),
        form(*[('name="f"', "x")] * 1001),
        b"--XYZ" + b" " * 1000,
        b'--XYZ\r\nContent-Disposition: form-data; name="model"\r\n\r\n\xff\r\n--XYZ--',
    ],
)
def test_multipart_that_no_parser_should_accept(body: bytes) -> None:
    with pytest.raises(BadRequest):
        FieldFinder(b"XYZ", "model").feed(body)


def test_boundaries() -> None:
    assert boundary_of('multipart/form-data; charset=x; boundary="a b"') == b"a b"
    assert boundary_of("multipart/form-data; BOUNDARY=XYZ; x=y") == b"XYZ"
    for bad in ("multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=" + "x" * 300):
        with pytest.raises(BadRequest):
            boundary_of(bad)


class Input(io.BytesIO):
    """A `wsgi.input` that counts what was asked of it."""

    largest = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.largest = max(self.largest, size or 0)
        return super().read(size)


def environ(body: bytes, content_type: str = "", **more: Any) -> dict[str, Any]:
    """The part of a WSGI environ that intake reads."""
    base = {"REQUEST_METHOD": "POST", "CONTENT_TYPE": content_type, "CONTENT_LENGTH": str(len(body))}
    return {**base, "wsgi.input": Input(body), "QUERY_STRING": "", **more}


def sent(taken: intake.Intake) -> bytes:
    """What would go upstream."""
    payload = taken.payload()
    data = payload if isinstance(payload, bytes) else b"".join(payload or ())
    assert taken.length in (None, len(data))
    return data


@pytest.mark.parametrize("content_type", ["application/json", "", "text/plain", "application/octet-stream"])
def test_json_with_or_without_its_content_type(content_type: str) -> None:
    body = b' {"model": "finch",  "n": 1.0}'
    taken = intake.take(environ(body, content_type))
    assert (taken.kind, taken.wanted.model) == ("json", "finch")
    assert sent(taken) == body


def test_form_falls_back_to_the_query() -> None:
    kind = "application/x-www-form-urlencoded"
    assert intake.take(environ(b"model=a", kind, QUERY_STRING="model=b")).wanted.model == "a"
    assert intake.take(environ(b"x=1", kind, QUERY_STRING="model=b")).wanted.model == "b"
    assert intake.take(environ(b"", "", QUERY_STRING="model=b")).wanted.model == "b"
    assert intake.take(environ(b"", "", REQUEST_METHOD="GET", QUERY_STRING="model=b")).wanted.model == "b"


def test_raw_bytes_take_the_model_from_the_query_and_pass() -> None:
    body = b"RIFF" * 200_000
    taken = intake.take(environ(body, "audio/wav", QUERY_STRING="model=ear"))
    assert (taken.kind, taken.wanted.model) == ("raw", "ear")
    assert sent(taken) == body


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("size", [0, 3_000_000])
def test_uploads_pass_byte_for_byte_and_renamed(name: str, size: int) -> None:
    body = FORMS[name].replace(b"RIFF", b"RIFF" + b"\0" * (size // 50))
    kind = "multipart/form-data; boundary=XYZ"
    taken = intake.take(environ(body, kind))
    assert taken.wanted.model == "bird"
    assert sent(taken) == body
    renamed = intake.take(environ(body, kind))
    renamed.rename("served-name")
    assert sent(renamed) == body.replace(b"bird", b"served-name", 1)


def test_an_upload_with_the_model_first_is_not_read_before_it_is_forwarded() -> None:
    body = form(('name="model"', "bird"), ('name="file"; filename="a"', "x" * 5_000_000))
    given = environ(body, "multipart/form-data; boundary=XYZ")
    taken = intake.take(given)
    assert given["wsgi.input"].tell() == intake.BLOCK
    assert sent(taken) == body
    assert given["wsgi.input"].largest <= intake.BLOCK


def test_what_waits_for_the_model_lies_in_a_file_that_is_removed(tmp_path: Any) -> None:
    body = form(('name="file"; filename="a"', "x" * 5_000_000), ('name="model"', "bird"))
    taken = intake.take(environ(body, "multipart/form-data; boundary=XYZ"), spool_dir=str(tmp_path))
    assert taken.held is not None and taken.held._rolled  # type: ignore[attr-defined]
    held = taken.held
    taken.close()
    taken.close()
    assert held.closed and not list(tmp_path.iterdir())


def test_no_room_for_what_waits_is_said(tmp_path: Any) -> None:
    body = form(('name="file"; filename="a"', "x" * 5_000_000), ('name="model"', "bird"))
    with pytest.raises(Unavailable, match="send the field `model` before the file"):
        intake.take(environ(body, "multipart/form-data; boundary=XYZ"), spool_dir=str(tmp_path / "missing"))


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=XYZ", "", "audio/wav"])
def test_a_body_shorter_than_announced_is_an_error(kind: str) -> None:
    given = environ(b'{"model":"x"}', kind)
    given["CONTENT_LENGTH"] = "100"
    with pytest.raises(BadRequest, match="13 of 100"):
        sent(intake.take(given))


def test_a_chunked_body_that_breaks_is_an_error() -> None:
    class Broken:
        def read(self, size: int) -> bytes:
            raise OSError("No more data after: b''")

    given = environ(b"", "application/json", HTTP_TRANSFER_ENCODING="chunked")
    given |= {"wsgi.input": Broken(), "wsgi.input_terminated": True, "CONTENT_LENGTH": ""}
    with pytest.raises(BadRequest, match="broke off"):
        intake.take(given)


def test_a_chunked_body_has_no_length_and_is_read_to_its_end() -> None:
    more = {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True, "CONTENT_LENGTH": ""}
    taken = intake.take({**environ(b'{"model":"x"}', "application/json"), **more})
    assert taken.wanted.model == "x" and taken.length == 13
    upload = intake.take({**environ(FORMS["first"], "multipart/form-data; boundary=XYZ"), **more})
    assert upload.length is None and sent(upload) == FORMS["first"]


def test_max_body() -> None:
    body = json.dumps({"model": "x", "pad": "y" * 1000}).encode()
    assert intake.take(environ(body, "application/json"), max_body=len(body)).wanted.model == "x"
    with pytest.raises(BodyTooLarge):
        intake.take(environ(body, "application/json"), max_body=len(body) - 1)
    more = {"HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True, "CONTENT_LENGTH": ""}
    with pytest.raises(BodyTooLarge):
        intake.take({**environ(body, "application/json"), **more}, max_body=100)


def test_upstream_bodies_pass_unread() -> None:
    given = environ(b"not { json", "application/json")
    taken = intake.passing(given)
    assert given["wsgi.input"].tell() == 0
    assert sent(taken) == b"not { json"
    assert intake.passing(environ(b"", REQUEST_METHOD="GET")).payload() is None


SHREDS = st.lists(
    st.sampled_from([*b'{}[]":,\\ntfu0-.e+ ', *b"model"]).map(lambda byte: bytes([byte])) | st.binary(max_size=3)
)


@given(SHREDS.map(b"".join))
def test_json_is_read_or_refused_whatever_comes(body: bytes) -> None:
    for text in (body, b'{"model":' + body, b'{"model":"x","a":' + body + b"}"):
        try:
            bodies.from_json(text)
        except InvalidJSON:
            continue
        json.loads(text)  # what was accepted is JSON to others too


@given(
    st.lists(
        st.sampled_from([b"--XYZ", b"\r\n", b"--", b'Content-Disposition: form-data; name="model"', b"x", b";", b'"'])
    ),
    st.integers(1, 40),
)
def test_multipart_is_read_or_refused_whatever_comes(shreds: list[bytes], block: int) -> None:
    body = b"".join(shreds)
    finder = FieldFinder(b"XYZ", "model")
    try:
        for start in range(0, len(body), block):
            if finder.feed(body[start : start + block]):
                break
    except BadRequest:
        return
    if finder.found is not None:
        assert body[finder.found.start : finder.found.end].decode() == finder.found.value
        assert body[finder.found.end :].startswith((b"\r\n--XYZ", b"--XYZ"))

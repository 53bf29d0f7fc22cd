"""What is recorded of a request: records, counters, captures, access lines, and the store that keeps them."""

from __future__ import annotations

import gzip
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qmflask.accesslog import LineStyle
from qmflask.activity import Activity, Surroundings, gpu_readings, retention
from qmflask.captures import Allowance, decoded, pack_capture, redacted, unpack_capture
from qmflask.config import Config
from qmflask.config.resolved import Store
from qmflask.errors import ClientGone, ModelNotFound, UpstreamUnreachable
from qmflask.journal import Journal, JournalHandler, ServiceLog, level_of, one_line, timestamp
from qmflask.recording import Recording, settle_all
from qmflask.relay import Outcome
from qmflask.store.activity import ActivityError, ActivityStore, Filter, Record, Retention
from qmflask.store.counters import Tally
from qmflask.web.metrics import histogram
from qmflask.web.prometheus import counted

MEGABYTE = 1024 * 1024


class Keeper:
    """Takes recordings and does nothing with them."""

    def started(self, recording: Recording) -> None:
        self.recording = recording

    def finished(self, recording: Recording) -> None:
        self.done = recording


def environ(**more: Any) -> dict[str, Any]:
    found = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/v1/chat/completions",
        "RAW_URI": "/v1/chat/completions",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "HTTP_USER_AGENT": "test/1",
        "HTTP_AUTHORIZATION": "Bearer secret",
    }
    return {**found, **more}


def recording(capture: int = MEGABYTE, **more: Any) -> Recording:
    found = Recording(Keeper(), environ(**more), capture)
    found.named("alias", "alpha")
    found.granted(12.5, True, 3)
    headers = [("Authorization", "Bearer secret"), ("Content-Type", "application/json")]
    found.sent("/v1/chat/completions", headers, b'{"model": "alpha"}')
    return found


def settle(
    found: Recording,
    answer: bytes,
    *,
    status: int = 200,
    kind: str = "application/json",
    coding: str = "",
    style: LineStyle = LineStyle(),
    **outcome: Any,
) -> tuple[Settled, Tally]:
    headers = [("Content-Type", kind), ("Set-Cookie", "a=b")]
    found.begin(status, [*headers, ("Content-Encoding", coding)] if coding else headers)
    if answer:
        found.feed(answer)
    first = time.monotonic_ns() if answer else None
    found.end(Outcome(status=status, content_type=kind, first_byte_ns=first, **{"complete": True, **outcome}))
    tally = Tally()
    return settled_alone(found, tally, style), tally


class Settled(NamedTuple):
    """What is written of one request; no record where only its line shows it."""

    record: Record | None
    capture: bytes | None
    line: bytes


def settled_alone(found: Recording, tally: Tally | None = None, style: LineStyle = LineStyle()) -> Settled:
    rows, lines = settle_all([found], Tally() if tally is None else tally, style, Allowance())
    record, capture = rows[0] if rows else (None, None)
    return Settled(record, capture, lines[0])


def record(**more: Any) -> Record:
    values: dict[str, Any] = {"time": 1000, "request": "r", "model": "alpha", "req_path": "/v1/x"}
    return Record(**{**values, "resp_status_code": 200, **more})


# -- recordings -----------------------------------------------------------------------------------------------


def test_a_served_request_leaves_record_counters_capture_and_line() -> None:
    body = {"usage": {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}}
    settled, tally = settle(recording(), json.dumps(body).encode())
    assert settled.record is not None
    assert (settled.record.model, settled.record.prompt, settled.record.generated) == ("alpha", 5, 7)
    assert (settled.record.cached, settled.record.wait, settled.record.has_capture) == (2, 12.5, 1)
    assert json.loads(settled.record.metadata or "") == {"fifo_priority": 3}
    sums = {(row.name, row.labels): row.value for row in tally.rows()}
    assert sums["requests", ("alpha", "/v1/chat/completions", "200", "")] == 1
    assert sums["tokens", ("alpha", "out")] == 7
    assert sums["tokens", ("alpha", "cached")] == 2
    assert settled.capture is not None
    path, asked, sent, answered, answer = unpack_capture(settled.capture)
    assert (path, sent, json.loads(answer)) == ("/v1/chat/completions", b'{"model": "alpha"}', body)
    assert asked["Authorization"] == answered["Set-Cookie"] == "[REDACTED]"
    line = settled.line.decode()
    assert line.startswith('[INFO] 127.0.0.1 "POST /v1/chat/completions HTTP/1.1" 200 ')
    assert '"test/1"' in line
    assert " model=alpha wait_ms=12.5" in line
    assert line.endswith("tokens_in=5 tokens_out=7 tokens_cached=2 asked=alias\n")
    assert "secret" not in line


def test_in_a_rush_only_some_captures_are_kept_and_all_of_failures() -> None:
    allowance = Allowance(burst=2, a_second=10)
    assert [allowance.take(int(at * 1e9)) for at in (5, 5, 5, 5.05, 5.11, 5.12, 4, 90, 90, 90)] == (
        [True, True, False, False, True, False, False, True, True, False]
    )
    served = []
    for status in (200, 200, 200, 500, 500):
        served.append(recording())
        served[-1].begin(status, [("Content-Type", "application/json")])
        served[-1].end(Outcome(status=status, complete=True))
    rows, _ = settle_all(served, Tally(), None, Allowance(burst=1, a_second=0))
    assert [capture is not None for _, capture in rows] == [True, False, False, True, True]
    assert [record.has_capture for record, _ in rows] == [1, 0, 0, 1, 1]


def test_requests_that_end_together_are_counted_by_their_own_labels() -> None:
    given = [("a", "/x", 200), ("b", "/x", 200), ("a", "/x", 200), ("a", "/upstream/a/y", 200), ("a", "/x", 502)]
    served = []
    for model, path, status in given:
        found = Recording(Keeper(), environ(PATH_INFO=path), 0)
        found.named(model, model)
        found.granted(20.0, False)
        found.begin(status, [("Content-Type", "application/json")])
        found.feed(b'{"usage": {"prompt_tokens": 5}}')
        found.end(Outcome(status=status, complete=True))
        served.append(found)
    nameless = Recording(Keeper(), environ(PATH_INFO="/x"), 0)
    nameless.named("unknown", None)
    nameless.fail(ModelNotFound("unknown"))
    tally = Tally()
    rows, _ = settle_all([*served, nameless], tally, None, Allowance())
    assert [row.model for row, _ in rows] == ["a", "b", "a", "a", "a", "unknown"]
    sums = {(row.name, row.labels): row.value for row in tally.rows()}
    assert {labels: value for (name, labels), value in sums.items() if name == "requests"} == {
        ("a", "/x", "200", ""): 2,
        ("b", "/x", "200", ""): 1,
        ("a", "/upstream", "200", ""): 1,
        ("a", "/x", "502", ""): 1,
        ("", "/x", "404", ""): 1,
    }
    assert (sums["tokens", ("a", "in")], sums["tokens", ("b", "in")]) == (15, 5)
    assert (sums["wait_seconds_bucket", ("a", "0.025")], sums["wait_seconds_sum", ("b",)]) == (4, 0.02)
    assert ("tokens", ("a", "cached")) not in sums
    assert ("wait_seconds_sum", ("",)) not in sums


def test_what_waits_to_be_written_does_not_keep_the_request_alive() -> None:
    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    found = recording(**{"wsgi.input": held})
    assert found.request_headers() == {"User-Agent": "test/1", "Authorization": "[REDACTED]"}
    del held
    assert gone() is not None
    found.end(Outcome(status=200, complete=True))
    assert gone() is None
    assert found.request_headers() == {}  # for a page that looks at this very moment


def test_headers_are_shown_once_and_without_keys() -> None:
    given = [("X-Api-KEY", "secret"), ("A", "1"), ("content-encoding", "gzip"), ("A", "2"), ("set-cookie", "secret")]
    shown = {"X-Api-KEY": "[REDACTED]", "A": "1", "set-cookie": "[REDACTED]"}
    assert redacted(given, "content-encoding") == shown
    assert redacted(given) == {**shown, "content-encoding": "gzip"}


def test_json_lines_have_the_same_fields() -> None:
    settled, _ = settle(recording(), b'{"usage": {"prompt_tokens": 5}}', style=LineStyle(as_json=True))
    row = json.loads(settled.line)
    assert (row["model"], row["status"], row["tokens_in"], row["wait_ms"]) == ("alpha", 200, 5, 12.5)
    assert row["target"] == "/v1/chat/completions"


def test_a_line_cannot_be_forged() -> None:
    evil = 'x" 200\n[INFO] forged \x1b[2J'
    found = Recording(Keeper(), environ(HTTP_USER_AGENT=evil, RAW_URI="/a\x0bb"), 0)
    found.named(evil, None)
    found.fail(ModelNotFound("no\nsuch"))
    settled = settled_alone(found)
    assert settled.line.count(b"\n") == 1
    assert b"\x1b" not in settled.line
    assert settled.record is not None
    assert settled.record.resp_status_code == 404


@pytest.mark.parametrize(
    ("fail", "status", "message"),
    [
        (lambda r: r.fail(ModelNotFound("no such model")), 404, "no such model"),
        (lambda r: r.fail(ClientGone("gone")), 499, "the client is gone"),
        (lambda r: settle(r, b"", complete=False, gone="cancelled"), 499, "cancelled"),
        (lambda r: settle(r, b"data: x", complete=False, error=UpstreamUnreachable("it died")), 502, "it died"),
        (lambda r: settle(r, b'{"error": {"message": "too long"}}', status=400), 400, "too long"),
        (lambda r: settle(r, b"\0garbage", coding="gzip"), 200, "response decode failed"),
    ],
)
def test_failures_are_recorded_as_such(fail: Callable[[Recording], Any], status: int, message: str) -> None:
    found = recording()
    fail(found)
    settled = settled_alone(found)
    assert settled.record is not None
    assert (settled.record.resp_status_code, settled.record.error_msg) == (status, message)


def test_requests_that_name_no_model_and_gets_are_no_records() -> None:
    nameless = Recording(Keeper(), environ(), 0)
    nameless.fail(ModelNotFound("x"))
    assert settled_alone(nameless).record is None
    read = recording(REQUEST_METHOD="GET")
    settled, _ = settle(read, b"{}")
    assert settled.record is None
    assert settled.capture is None


def test_captures_are_bounded_decoded_and_only_of_what_the_path_allows() -> None:
    assert settle(recording(capture=0), b"{}")[0].capture is None
    settled, _ = settle(recording(capture=100), b"x" * 101, kind="text/plain")
    assert settled.capture is None or unpack_capture(settled.capture)[4] == b""
    packed = settle(recording(), gzip.compress(b'{"a": 1}'), coding="gzip")[0].capture
    assert packed is not None
    assert unpack_capture(packed)[4] == b'{"a": 1}'
    assert "Content-Encoding" not in unpack_capture(packed)[3]
    speech = recording()
    speech.path = "/v1/audio/speech"
    packed = settle(speech, b"RIFF", kind="audio/wav")[0].capture
    assert packed is not None
    assert (unpack_capture(packed)[2], unpack_capture(packed)[4]) == (b'{"model": "alpha"}', b"")


@pytest.mark.parametrize("size", [0, 10, 100_000])
def test_captures_survive_packing(size: int) -> None:
    given = ("/p", {"a": "b"}, b"q" * size, {"c": "d"}, b"r" * size)
    assert unpack_capture(pack_capture(*given)) == given


def test_a_capture_that_swells_when_decoded_is_left_out() -> None:
    bomb = gzip.compress(b"0" * 5 * MEGABYTE)
    assert decoded(bomb, "gzip", MEGABYTE) == b""
    assert decoded(gzip.compress(b"x"), "gzip", MEGABYTE) == b"x"
    packed = settle(recording(), bomb, coding="gzip")[0].capture
    assert packed is not None
    assert unpack_capture(packed)[4] == b""


def test_an_answer_of_many_pieces_is_read_and_kept_whole() -> None:
    found = recording()
    found.begin(200, [("Content-Type", "text/event-stream")])
    pieces = [b"data: %d\n\n" % n for n in range(5000)] + [b'data: {"usage": {"prompt_tokens": 9}}\n\n']
    for piece in pieces:
        found.feed(piece)
    found.end(Outcome(status=200, complete=True, content_type="text/event-stream"))
    settled = settled_alone(found)
    assert settled.record is not None
    assert settled.capture is not None
    assert (settled.record.prompt, settled.record.bytes) == (9, sum(map(len, pieces)))
    assert unpack_capture(settled.capture)[4] == b"".join(pieces)


def test_a_failed_answer_without_a_body_tells_its_status() -> None:
    settled, _ = settle(recording(), b"", status=502)
    assert settled.record is not None
    assert settled.record.error_msg == "502 Bad Gateway"


# -- store ----------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ActivityStore]:
    found = ActivityStore(tmp_path / "activity.db")
    yield found
    found.close()


def test_pages_sort_filter_and_count(store: ActivityStore) -> None:
    rows = [record(time=100 + n, model=("a", "b")[n % 2], duration=n % 3) for n in range(10)]
    store.add([(row, None) for row in rows], Tally())
    found, total = store.page(Filter(), "id", True, 3, 2)
    assert ([row.id for row in found], total) == ([7, 6, 5], 10)
    found, total = store.page(Filter(models=("b",), start=103, end=107, max_id=7), "duration", False, 10, 1)
    assert ([(row.duration, row.id) for row in found], total) == ([(0, 4), (2, 6)], 2)
    assert store.page(Filter(min_id=99), "id", True, 5, 1) == ([], 0)


def test_totals_and_speeds_leave_out_what_is_not_known(store: ActivityStore) -> None:
    rows = [record(prompt=5, generated=-1, cached=-1, gen_speed=9.0), record(prompt=-1, generated=2, gen_speed=-1)]
    store.add([(row, None) for row in rows], Tally())
    assert store.totals(None) == {"requests": 2, "prompt": 5, "generated": 2, "cached": 0}
    assert store.totals("other")["requests"] == 0
    assert store.speeds("alpha", "gen_speed") == [9.0]


def test_retention_by_number_age_and_captures(store: ActivityStore) -> None:
    rows = [(record(time=n * 86400, has_capture=1), b"c" * 100) for n in range(1, 21)]
    store.add(rows, Tally())
    store.prune(Retention(records=15, capture_bytes=500), now=21 * 86400)
    found, total = store.page(Filter(), "id", False, 99, 1)
    assert (total, [row.id for row in found if row.has_capture]) == (15, [16, 17, 18, 19, 20])
    assert [store.capture(n) for n in (15, 16)] == [None, b"c" * 100]
    store.prune(Retention(days=3, capture_bytes=500), now=21 * 86400)
    assert store.page(Filter(), "id", False, 99, 1)[1] == 3
    assert store.capture(17) is None
    assert store.capture(18) == b"c" * 100


def test_retention_by_size_gives_the_space_back(store: ActivityStore) -> None:
    long = "x" * 1000
    for _ in range(40):
        store.add([(record(error_msg=long), None) for _ in range(100)], Tally())
    store.close()  # checkpoints
    before = store.path.stat().st_size
    for _ in range(4):
        store.prune(Retention(bytes=MEGABYTE), now=2000)
    left = store.page(Filter(), "id", True, 1, 1)
    assert left[0][0].id == 4000
    assert 100 < left[1] < 1500
    store.close()
    assert before > 4 * MEGABYTE > 2 * MEGABYTE > store.path.stat().st_size


def test_the_newest_reading_is_the_last_one_also_when_the_clock_is_set_back(store: ActivityStore) -> None:
    for when in (100.0, 500.0, 150.0):
        store.add_performance(when, f"at {when:.0f}")
    assert store.newest_performance() == "at 150"
    assert [body for _, body in store.performance(0)] == ["at 100", "at 150"]


def test_captures_end_with_the_service_and_records_do_not(store: ActivityStore) -> None:
    store.begin_service("one")
    store.add([(record(has_capture=1), b"a secret")], Tally())
    store.begin_service("one")
    assert store.capture(1) == b"a secret"
    store.begin_service("two")
    assert store.capture(1) is None
    assert not store.page(Filter(), "id", True, 1, 1)[0][0].has_capture
    store.close()
    assert b"a secret" not in store.path.read_bytes()


def test_any_number_of_rows_is_stored_with_its_own_capture(store: ActivityStore) -> None:
    for count in (0, 1, 9, 77):
        rows = [(record(duration=n), b"%d" % n if n % 2 else None) for n in range(count)]
        store.add(rows, Tally())
        page = store.page(Filter(), "id", True, count or 1, 1)[0][::-1][-count:] if count else []
        assert [store.capture(row.id) for row in page] == [capture for _, capture in rows]
        assert [row.duration for row in page] == [row.duration for row, _ in rows]


def test_a_broken_store_says_so_and_recovers(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "activity.db"
    store = ActivityStore(path)
    with pytest.raises(ActivityError):
        store.add([(record(), None)], Tally())
    path.parent.mkdir()
    store.add([(record(), None)], Tally())
    assert store.last_id() == 1
    path.unlink()
    assert store.gone()
    store.add([(record(), None)], Tally())
    assert store.last_id() == 1
    store.close()


def test_kill_9_while_writing_leaves_a_sound_file(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from qmflask.store.activity import ActivityStore, Record
from qmflask.store.counters import Tally
store = ActivityStore(Path(sys.argv[1]))
while True:
    tally = Tally()
    tally.add("requests", ("a",), 10)
    rows = [(Record(time=1, request="r", model="a", req_path="/", resp_status_code=200), b"c") for _ in range(10)]
    store.add(rows, tally)
    print("x", flush=True)
"""
    path = tmp_path / "activity.db"
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        for _ in range(20):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    store = ActivityStore(path)
    assert store.check() == "ok"
    counted_requests = sum(row.value for row in store.counters())
    assert counted_requests == store.page(Filter(), "id", True, 1, 1)[1] >= 600
    store.close()


# -- histograms -----------------------------------------------------------------------------------------------


def test_histograms_of_speeds() -> None:
    assert histogram([]) is None
    assert histogram([4.0, 4.0]) == {
        "bins": [2],
        "min": 4.0,
        "max": 4.0,
        "binSize": 0,
        "p50": 4.0,
        "p95": 4.0,
        "p99": 4.0,
    }
    values = [float(n) for n in range(1, 101)]
    found = histogram(values)
    assert found is not None
    assert (len(found["bins"]), sum(found["bins"]), found["binSize"]) == (8, 100, 99 / 8)
    assert (found["p50"], found["p95"]) == (50.5, pytest.approx(95.05))


def test_prometheus_histograms_are_cumulative() -> None:
    tally = Tally()
    for seconds in (0.004, 0.3, 0.3, 9999):
        tally.observe("wait_seconds", ("a",), seconds)
    family = next(f for f in counted(tally.rows()) if f.name == "qmflask_wait_seconds")
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert (buckets["0.005"], buckets["0.25"], buckets["0.5"], buckets["600.0"], buckets["+Inf"]) == (1, 1, 3, 3, 4)
    assert [s.value for s in family.samples if s.name.endswith("_count")] == [4]


# -- the recorder ---------------------------------------------------------------------------------------------


def recorder(state: Path, config: Config | None = None) -> Activity:
    (state / "logs").mkdir(exist_ok=True)
    found = config or Config(log_to_stdout="none")
    around = Surroundings("w", "m", lambda: found, lambda: False, lambda _model: 77.0, dict)
    return Activity(state, around)


def test_the_recorder_writes_what_has_ended_and_the_rest_at_its_end(tmp_path: Path) -> None:
    activity = recorder(tmp_path)
    activity.start()
    seen = activity.record(environ())
    seen.named("a", "alpha")
    seen.granted(80.0, True)
    assert list(activity.here().values()) == [seen]
    seen.fail(ModelNotFound("x"))
    assert activity.here() == {}
    activity.stop()
    store = ActivityStore(tmp_path / "activity.db")
    (row,) = store.page(Filter(), "id", True, 5, 1)[0]
    assert (row.model, row.load) == ("alpha", 77.0)
    store.close()
    assert "model=alpha" in (tmp_path / "logs" / "qmflask.log").read_text()


def test_a_store_that_fails_costs_records_not_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config(log_to_stdout="none", store=Store(path=str(tmp_path / "missing" / "a.db")))
    activity = recorder(tmp_path, config)
    with caplog.at_level(logging.WARNING):
        activity.start()
        for _ in range(3):
            activity.record(environ()).fail(ModelNotFound("x"))
        activity.stop()
    assert len([r for r in caplog.records if "not recorded" in r.message]) <= 1
    assert (tmp_path / "logs" / "qmflask.log").read_text().count(" 404 ") == 3


def test_what_is_kept_by_default_and_with_a_file() -> None:
    assert retention(Config()) == Retention(records=1000, capture_bytes=5 * MEGABYTE)
    kept = Config(store=Store(path="/x.db", keep_days=30, max_mb=100), capture_buffer=-1)
    assert retention(kept) == Retention(days=30, bytes=100 * MEGABYTE)


def test_cards_of_a_sample() -> None:
    assert gpu_readings({}, 1.0) == []
    card = {"index": 1, "name": "X", "uuid": "u", "used": 3 << 20, "total": 9 << 20, "temperature": None}
    (found,) = gpu_readings({"cards": [card]}, 1.0)
    assert (found["id"], found["mem_used_mb"], found["mem_total_mb"], found["temp_c"]) == (1, 3, 9, 0)


# -- the log --------------------------------------------------------------------------------------------------


def test_lines_of_the_log(tmp_path: Path) -> None:
    handler = JournalHandler(Journal(tmp_path, stdout=False))
    made = logging.LogRecord("qmflask", logging.WARNING, "", 0, "model %s\nx", ("a\x1b[31m",), None)
    assert handler.line(made) == b"[WARN] model a\\x1b[31m\\nx\n"
    handler.time_format = "rfc3339"
    assert b"T" in handler.line(made).split(b" ")[0]
    as_json = JournalHandler(Journal(tmp_path, stdout=False), as_json=True)
    assert json.loads(as_json.line(made))["message"] == "model a\x1b[31m\nx"
    assert (level_of(" Debug "), level_of("nonsense")) == (logging.DEBUG, logging.INFO)
    assert one_line("ok") == "ok"


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("", ""),
        ("nonsense", ""),
        ("ansic", "Fri Jan  2 03:04:05 1970 "),
        ("rfc3339", "1970-01-02T03:04:05Z "),
        ("RFC1123", "Fri, 02 Jan 1970 03:04:05 UTC "),
        ("kitchen", "3:04AM "),
        ("stampMilli", "Jan  2 03:04:05.500 "),
        ("stampnano", "Jan  2 03:04:05.500000000 "),
    ],
)
def test_time_formats(style: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert timestamp(style, 86400 + 3 * 3600 + 4 * 60 + 5.5) == text


def test_lines_of_many_writers_stay_whole_and_the_file_stays_small(tmp_path: Path) -> None:
    cap = 512 * 1024

    def write(number: int) -> None:
        journal = Journal(tmp_path, stdout=False, cap=cap)
        for _ in range(40):
            journal.write(b"%d %s\n" % (number, b"x" * 10_000))
        journal.close()

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = ServiceLog(tmp_path, cap)
    assert log.size <= cap + 4 * 300_000
    lines = log.tail_bytes(200_000).split(b"\n")[1:-1]
    assert {len(line) for line in lines} == {10_002}
    assert oct(os.stat(log.path).st_mode & 0o777) == "0o600"

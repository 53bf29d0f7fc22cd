"""`/api/metrics/*` and `/api/captures/*`: what was served, with its totals and speeds (compatibility 6.3, 6.4)."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import orjson
from flask import Blueprint, Response, request

from qmflask.captures import unpack_capture
from qmflask.errors import BadRequest, NotFound, Unavailable
from qmflask.router import Router
from qmflask.store.activity import SORTS, ActivityError, Filter, Record
from qmflask.web import auth
from qmflask.web.answers import json_answer

DEFAULT_LIMIT, MAX_LIMIT = 25, 999
MIN_BINS, MAX_BINS = 5, 20


def blueprint(router: Callable[[], Router]) -> Blueprint:
    """Records, totals and captures."""
    routes = Blueprint("metrics", __name__)

    @routes.before_request
    def check_key() -> None:  # records tell of everybody's requests, with names of keys and addresses
        auth.require_admin(router().live.config, request.environ)

    @routes.errorhandler(ActivityError)
    def unreadable(error: ActivityError) -> Response:
        return json_answer(Unavailable(f"activity cannot be read: {error}").body(), 503)

    @routes.get("/api/metrics/activity")
    def activity() -> Response:
        which = _filter()
        limit, page = _number("limit", DEFAULT_LIMIT), _number("page", 1)
        if limit is None or not 1 <= limit <= MAX_LIMIT:
            raise BadRequest(f"limit must be between 1 and {MAX_LIMIT}", param="limit")
        if page is None or page < 1:
            raise BadRequest("page must be >= 1", param="page")
        sort, order = request.args.get("sort") or "id", (request.args.get("order") or "desc").lower()
        if sort not in SORTS:
            raise BadRequest(f"invalid sort column {sort!r}: use one of {', '.join(SORTS)}", param="sort")
        if order not in ("asc", "desc"):
            raise BadRequest("order must be asc or desc", param="order")
        rows, total = router().activity.store.page(which, sort, order == "desc", limit, page)
        return json_answer(
            {
                "data": [record_json(row) for row in rows],
                "page": page,
                "limit": limit,
                "total": total,
                "total_pages": math.ceil(total / limit),
            }
        )

    @routes.get("/api/metrics/stats")
    def stats() -> Response:
        store = router().activity.store
        model = request.args.get("model") or None
        totals = store.totals(model)
        return json_answer(
            {
                "total_requests": totals["requests"],
                "total_input_tokens": totals["prompt"],
                "total_output_tokens": totals["generated"],
                "total_cache_tokens": totals["cached"],
                "prompt_histogram": histogram(store.speeds(model, "prompt_speed")),
                "gen_histogram": histogram(store.speeds(model, "gen_speed")),
            }
        )

    @routes.get("/api/captures/<record>")
    def capture(record: str) -> Response:
        if not record.isdecimal() or len(record) > 18:
            raise BadRequest(f"invalid capture ID {record!r}: it must be a number")
        packed = router().activity.store.capture(int(record))
        if packed is None:
            raise NotFound(f"capture not found: {record} (the oldest go when captureBuffer is full)")
        path, request_headers, body, answer_headers, answer = unpack_capture(packed)
        return json_answer(
            {
                "id": int(record),
                "req_path": path,
                "req_headers": request_headers,
                "req_body": base64.b64encode(body).decode(),
                "resp_headers": answer_headers,
                "resp_body": base64.b64encode(answer).decode(),
            },
            headers=[("Cache-Control", "no-store")],
        )

    return routes


def _filter() -> Filter:
    lowest, highest = _number("min_id"), _number("max_id")
    for name, value in (("min_id", lowest), ("max_id", highest)):
        if value is not None and value < 1:
            raise BadRequest(f"{name} must be >= 1", param=name)
    if lowest is not None and highest is not None and lowest > highest:
        raise BadRequest("min_id must be <= max_id", param="min_id")
    start, end = _time("start"), _time("end")
    if start is not None and end is not None and start > end:
        raise BadRequest("start must be before end", param="start")
    models = tuple(name for name in request.args.getlist("model") if name)
    return Filter(models, start, end, lowest, highest, request.args.get("failed", "") not in ("", "0"))


def _number(name: str, default: int | None = None) -> int | None:
    text = request.args.get(name, "")
    if not text:
        return default
    try:
        number = int(text)
    except ValueError:
        raise BadRequest(f"invalid {name} {text!r}: it must be a whole number", param=name) from None
    if abs(number) > 2**53:  # times a page's length it must still fit SQLite's 64 bits
        raise BadRequest(f"invalid {name}: it is too large", param=name)
    return number


def _time(name: str) -> int | None:
    text = request.args.get(name, "")
    if not text:
        return None
    return int(rfc3339(text, name))


def rfc3339(text: str, name: str) -> float:
    """Seconds since the epoch of an RFC 3339 time; raises BadRequest naming the parameter."""
    try:
        # A query's "+" arrives as a space.
        when = datetime.fromisoformat(text.strip().replace(" ", "+").replace("Z", "+00:00").replace("z", "+00:00"))
        if when.tzinfo is None:
            raise ValueError("no time zone")
        return when.timestamp()
    except (ValueError, OverflowError):
        raise BadRequest(
            f"invalid '{name}' timestamp {text!r}: use RFC 3339, like 2026-01-31T12:00:00Z", param=name
        ) from None


def iso(when: float) -> str:
    """A time for people and programs, UTC."""
    return datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def record_json(row: Record) -> dict[str, Any]:
    """One record as clients know it, and what we know besides."""
    found: dict[str, Any] = {
        "id": row.id,
        "timestamp": iso(row.time),
        "model": row.model,
        "req_path": row.req_path,
        "resp_content_type": row.resp_content_type,
        "resp_status_code": row.resp_status_code,
        "tokens": {
            "input_tokens": row.prompt,
            "output_tokens": row.generated,
            "cache_tokens": row.cached,
            "prompt_per_second": row.prompt_speed,
            "tokens_per_second": row.gen_speed,
            "draft_tokens": row.drafted,
            "draft_acc_tokens": row.accepted,
        },
        "duration_ms": row.duration,
        "has_capture": bool(row.has_capture),
        "request_id": row.request,
        "wait_ms": row.wait,
        "load_ms": row.load,
        "first_byte_ms": row.first_byte,
        "bytes": row.bytes,
        "key_name": row.key_name,
        "remote": row.remote,
    }
    if row.error_msg:
        found["error_msg"] = row.error_msg
    if row.metadata:
        found["metadata"] = orjson.loads(row.metadata)
    return found


def histogram(values: Sequence[float]) -> dict[str, Any] | None:
    """Bins and percentiles of sorted positive values; None without any (compatibility 6.4)."""
    if not values:
        return None
    low, high = values[0], values[-1]
    shares = {f"p{share}": _percentile(values, share / 100) for share in (50, 95, 99)}
    if low == high:
        return {"bins": [len(values)], "min": low, "max": high, "binSize": 0, **shares}
    count = min(MAX_BINS, max(MIN_BINS, math.ceil(math.log2(len(values))) + 1))
    size = (high - low) / count
    bins = [0] * count
    for value in values:
        bins[min(count - 1, int((value - low) / size))] += 1
    return {"bins": bins, "min": low, "max": high, "binSize": size, **shares}


def _percentile(values: Sequence[float], share: float) -> float:
    place = share * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)

"""Numbers with units as people write them: sizes, durations, and the shortest spelling of a float."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction

GIB = 1024**3

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kmgt]?i?b?)\s*\Z", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_SECONDS = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "μs": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}

#: More than any machine has; keeps sums inside SQLite's integers.
MAX_BYTES = 2**60


def parse_size(value: object, up: bool) -> int:
    """A size in bytes. Numbers (also as text) are GiB; text may carry a unit, and GB means GiB (memory.md).

    Rounded to a byte, up for budgets and down for charges, so that figures that add up exactly on paper fit.
    Raises ValueError with the reason.
    """
    amount = _size_fraction(value)
    if amount < 0:
        raise ValueError("a size must be >= 0")
    if amount > MAX_BYTES:
        raise ValueError("a size must be below 1 EiB")
    return math.ceil(amount) if up else math.floor(amount)


def _size_fraction(value: object) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("expected a size")
    if isinstance(value, str):
        match = _SIZE.match(value) if len(value) < 60 else None
        if not match and value.lstrip().startswith("-"):
            raise ValueError("a size must be >= 0")
        if not match:
            raise ValueError("expected a size")
        number, unit = match.groups()
        power = _POWER[unit[0].lower() if unit and unit[0].lower() != "b" else ""] if unit else 3
        return Fraction(number) * Fraction(1024) ** power
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite size")
    return Fraction(repr(value) if isinstance(value, float) else value) * GIB


def show_size(size: int) -> str:
    """A size for people, in GiB or MiB: `8 GiB`, `7.25 GiB`, `300 MiB`."""
    unit, name = (GIB, "GiB") if size >= GIB or size == 0 else (1024**2, "MiB")
    return f"{round(size / unit, 2):g} {name}"


def gib(size: int) -> float | int:
    """Bytes as the number of GiB a configuration would hold."""
    value = size / GIB
    return int(value) if value.is_integer() else round(value, 6)


def parse_duration(text: str) -> float:
    """Seconds of a duration with units (`5s`, `1m30s`, `6000ms`; a bare `0` is allowed). Raises ValueError."""
    body = text[1:] if text[:1] in ("+", "-") else text
    if body == "0":
        return 0.0
    total, at = Fraction(0), 0
    while at < len(body) and len(body) < 100:
        match = _DURATION.match(body, at)
        if not match:
            break
        total += Fraction(match.group(1)) * _SECONDS[match.group(2)]
        at = match.end()
    if not body or at < len(body) or total > 2**63 // 10**9:
        raise ValueError("expected a duration with a unit, such as 5s, 1m30s or 6000ms")
    return float(-total if text[0] == "-" else total)


def show_duration(seconds: float) -> str:
    """Seconds as `1h2m3.5s`, the way durations are written in the file."""
    if seconds == 0:
        return "0s"
    if seconds < 1:
        return f"{seconds * 1000:g}ms"
    minutes, rest = divmod(Fraction(repr(float(seconds))), 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{hours}h" if hours else ""
    text += f"{minutes}m" if hours or minutes else ""
    return f"{text}{float(rest):g}s"


def show_float(number: float) -> str:
    """A float as a macro's text: shortest form, exponent from 1e+06 on (compatibility 1.6)."""
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits)).lstrip("0") or "0"
    kept = text.rstrip("0") or "0"
    point = len(text) + exponent - 1 if text != "0" else 0
    minus = "-" if sign else ""
    if point < -4 or point >= 6:
        mantissa = kept[0] + (f".{kept[1:]}" if len(kept) > 1 else "")
        return f"{minus}{mantissa}e{'-' if point < 0 else '+'}{abs(point):02}"
    if point < 0:
        return f"{minus}0.{'0' * (-point - 1)}{kept}"
    padded = kept.ljust(point + 1, "0")
    return minus + padded[: point + 1] + (f".{padded[point + 1 :]}" if len(padded) > point + 1 else "")

"""The page's colours can be read: contrast ratios of WCAG 2, from the style sheet itself, in both themes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

CSS = Path(__file__).resolve().parents[2] / "qmflask" / "web" / "static" / "page.css"
#: What WCAG AA asks of text, and of bars, dots and lines.
TEXT, SHAPE = 4.5, 3.0
Colours = dict[str, str]


def blocks(css: str) -> list[Colours]:
    """The custom properties of each `:root` rule, in order."""
    found = re.findall(r":root[^{]*\{([^}]*)\}", css)
    return [dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{3,6})\s*;", block)) for block in found]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def too_faint(colours: Colours, ansi: Colours) -> list[str]:
    """Pairs that are too close, as text."""
    grounds = ("bg", "surface", "raised", "sunken")
    texts = ("text", "soft", "faint", "accent", "good", "warn", "bad")
    pairs = [(text, ground, TEXT) for text, ground in itertools.product(texts, grounds)]
    pairs += [(word, f"{word}-soft", TEXT) for word in ("accent", "good", "warn", "bad")]
    pairs += [("text", f"{word}-soft", TEXT) for word in ("accent", "warn", "bad")]
    pairs += [("soft", "bad-soft", TEXT), ("accent-text", "accent", TEXT)]
    pairs += [(f"m{n}", ground, SHAPE) for n, ground in itertools.product(range(8), ("surface", "sunken"))]
    known = colours | ansi
    pairs += [(name, "sunken", TEXT) for name in ansi]
    found = [(one, other, contrast(known[one], known[other]), least) for one, other, least in pairs]
    return [f"{one} on {other}: {ratio:.2f} < {least}" for one, other, ratio, least in found if ratio < least]


def ansi(css: str, prefix: str) -> Colours:
    """The terminal's colours for text."""
    return dict(re.findall(rf"(?m)(?:^|\}} ){prefix}\.(f\d) \{{ color: (#[0-9a-f]{{6}})", css))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_colour_that_carries_meaning_can_be_read(theme: str) -> None:
    css = CSS.read_text()
    light, dark, automatic = blocks(css)
    assert dark == automatic, "dark by choice and dark by the system are one theme"
    assert light.keys() == dark.keys()
    colours = light if theme == "light" else dark
    terminal = ansi(css, "" if theme == "light" else r"\[data-dark\] ")
    assert len(terminal) == 8
    assert not too_faint(colours, terminal)


def test_the_ratio_is_wcags() -> None:
    assert contrast("#000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#fff") == pytest.approx(4.54, abs=0.01)

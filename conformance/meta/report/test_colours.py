"""The colours of the report, read from its style: every text has contrast to its background, in dark and in light."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from megamoe.contract import STATUSES
from megamoe.report.measures import LEVELS
from megamoe.report.page import asset

PAIR = re.compile(r"--([\w-]+): light-dark\(#([0-9a-f]{6}), #([0-9a-f]{6})\)")
TEXT, GRAPHIC = 4.5, 3.0  # WCAG 2.2, success criteria 1.4.3 and 1.4.11


def colours(style: str) -> list[dict[str, str]]:
    """Name -> colour, of the light theme and of the dark one."""
    return [{name: pair[at] for name, *pair in PAIR.findall(style)} for at in (0, 1)]


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.2, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


LEVEL_NAMES = [f"level{at}" for at in range(LEVELS)]
TEXTS = [
    *((name, ground) for name in ("text", "muted", "link", "failed", "series0") for ground in ("page", "panel")),
    *((f"{name}-text", name) for name in (*LEVEL_NAMES, *STATUSES)),
    ("page", "text"),
]
GRAPHICS = [(f"series{at}", ground) for at in range(8) for ground in ("page", "panel")] + [
    ("strong-line", "page"),
    ("focus", "page"),
    ("bar-over", "page"),
]


def unreadable(style: str) -> list[str]:
    """A sentence for each pair with too little contrast."""
    found: list[str] = []
    for theme, known in zip(("light", "dark"), colours(style), strict=True):
        known["bar-over"] = known["failed"]
        for pairs, least in ((TEXTS, TEXT), (GRAPHICS, GRAPHIC)):
            for one, other in pairs:
                if contrast(known[one], known[other]) < least:
                    found.append(f"{theme}: {one} on {other} is {contrast(known[one], known[other]):.2f}, not {least}")
    return found


def test_text_and_graphics_can_be_read() -> None:
    assert not unreadable(asset("report.css"))


@pytest.mark.parametrize(("name", "colour"), [("muted", "#b0b0b0, #9aa4ae"), ("level4-text", "#1b1f24, #c08020")])
def test_a_pale_colour_is_noticed(name: str, colour: str) -> None:
    style = re.sub(rf"--{name}: light-dark\([^)]*\)", f"--{name}: light-dark({colour})", asset("report.css"))
    assert any(name in sentence for sentence in unreadable(style)), f"{name} of {colour} cannot be read"


def test_levels_are_steps_of_lightness() -> None:
    for known in colours(asset("report.css")):
        steps = [luminance(known[name]) for name in LEVEL_NAMES]
        assert steps in (sorted(steps), sorted(steps, reverse=True)), "who sees no colour sees the order"
        ratios = [max(one / other, other / one) for one, other in pairwise(steps)]
        assert min(ratios) > 1.05, "a level can hardly be told from the next"


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("000000", "ffffff") == pytest.approx(21)
    assert contrast("777777", "ffffff") == pytest.approx(4.48, abs=0.01)

"""Whatever is in a spec file or a case id, the answer is a value or a SpecError: no traceback of another kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megamoe.contract import AxisValue
from megamoe.spec.expression import ExpressionError, parse_expression
from megamoe.spec.load import build_spec, load_specs
from megamoe.spec.marked_yaml import SpecError, parse_marked_yaml

FMHA = load_specs()["fmha"]
LINES = FMHA.file.read_text(encoding="utf-8").splitlines(keepends=True)
SHARDS = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ": ",
    "- ",
    "&a ",
    "*a",
    "!!int ",
    "null",
    "1",
    "-1",
    "1.5",
    "true",
    "|\n",
    "'",
    "\t",
    "x",
    "\n",
]
unhurried = settings(deadline=None, derandomize=True, database=None)


@st.composite
def spoilt_specs(draw: st.DrawFn) -> str:
    """fmha.yaml with one to three lines dropped, doubled, or with a piece cut out and another put in."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        line = lines[at]
        start = draw(st.integers(0, len(line)))
        end = draw(st.integers(start, len(line)))
        cut = line[:start] + draw(st.sampled_from([*SHARDS, ""])) + line[end:]
        lines[at] = draw(st.sampled_from(["", line + line, cut, cut]))
    return "".join(lines)


def refusal_of(text: str) -> SpecError | None:
    try:
        build_spec(parse_marked_yaml(text, Path("spoilt.yaml")))
    except SpecError as refusal:
        return refusal
    return None


@settings(unhurried, max_examples=60)
@given(spoilt_specs())
def test_spoilt_spec_is_read_or_refused_with_a_line(text: str) -> None:
    if refusal := refusal_of(text):
        assert refusal.line is not None, f"this refusal has no line: {refusal}"
        assert 1 <= refusal.line <= text.count("\n") + 1
        assert str(refusal).startswith(f"spoilt.yaml:{refusal.line}: ")


@settings(unhurried, max_examples=300)
@given(st.text(max_size=60) | st.text("fmha:d=t,s_k0123456789.-+e", max_size=60).map("fmha:hd=64,t=1,s_k=".__add__))
@example("fmha:hd=64,t=1,s_k=1,scale=1e-400")
@example("fmha:hd=64,t=1,s_k=\u0661")
def test_any_text_is_a_case_or_is_refused(text: str) -> None:
    try:
        case = FMHA.parse_case(text)
    except SpecError:
        return
    assert FMHA.parse_case(case.id) == case


@settings(unhurried, max_examples=300)
@given(st.text("abt 0123()+-*/%<>=!nor\x00", max_size=40), st.integers(0, 9), st.integers(0, 9))
@example("(" * 150, 1, 1)
@example("-" * 159 + "1", 1, 1)
@example("1or 2", 1, 1)
@example("a if b else t", 1, 1)
def test_any_text_is_an_expression_or_is_refused(text: str, a: int, b: int) -> None:
    try:
        value = parse_expression(text, ("a", "b", "t")).value({"a": a, "b": b, "t": 1})
    except ExpressionError:
        return
    assert type(value) in (int, bool, type(None))


@pytest.mark.parametrize(
    ("text", "axes", "value"),
    [
        ("(a + 127) // 128 * 128", {"a": 129}, 256),
        ("a % b == 0", {"a": 6, "b": 4}, False),
        ("1 <= a < b", {"a": 1, "b": 2}, True),
        ("w == null or w <= a", {"a": 1, "w": None}, True),
        ("w == null or w <= a", {"a": 1, "w": 2}, False),
        ("not flag or a != 3", {"a": 3, "flag": True}, False),
        ("-a * 2 - 1", {"a": 3}, -7),
        ("flag == true", {"flag": True}, True),
    ],
)
def test_expression_means_what_it_says(text: str, axes: dict[str, AxisValue], value: int | bool) -> None:
    found = parse_expression(text, axes).value(axes)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "axes", "sentence"),
    [("w <= a", {"w": None, "a": 1}, "guard it with 'w == null or ...'"), ("1 // a", {"a": 0}, "divides by zero")],
)
def test_expression_without_a_value_says_why(text: str, axes: dict[str, AxisValue], sentence: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse_expression(text, axes).value(axes)
    assert sentence in str(caught.value)

"""Any text is parsed, or refused with a sentence and its position, in linear time; no other exception escapes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.vm.ptx.ast import Module
from backends.vm.ptx.parser import PtxSyntaxError, parse

HEADER = ".version 8.6\n.target sm_90a\n"
SOURCES = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.ptx"))]


BODY = HEADER + ".visible .entry k(.param .u64 y)\n{\n .reg .b32 %r<4>;\n .reg .b64 %rd<4>;\n"


@pytest.mark.parametrize(
    ("text", "place", "sentence"),
    [
        (
            BODY + " st.global.u32 [%rd3, %r1;\n ret;\n}",
            (7, 23),
            "'%r1' stands where ']' should; the ']' of the '[' in column 16 is missing",
        ),
        (
            BODY + " ld.global.u32 %r1, [%rd3 // ]\n ret;\n}",
            (8, 2),
            "'ret' stands where ']' should; the ']' of the '[' in line 7, column 21 is missing",
        ),
        (
            BODY + " mov.b64 %rd1, {%r1, %r2;\n}",
            (7, 25),
            "';' stands where '}' should; the '}' of the '{' in column 16 is missing",
        ),
        (
            BODY + " mov.u32 %r1, (1+2;\n}",
            (7, 19),
            "';' stands where ')' should; the ')' of the '(' in column 15 is missing",
        ),
        (BODY + " ret;\n", (8, 1), "the text ends where '}' should; the '}' of entry k (line 3) is missing"),
        (
            BODY + " { ret;\n}\n.func (.param .b32 q) m()\n{\n ret;\n}",
            (9, 1),
            "'.func' stands where '}' should; the '}' of entry k (line 3) is missing",
        ),
        (
            HEADER + ".func (.param .b32 q) m()\n{\n ret;\n",
            (6, 1),
            "the text ends where '}' should; the '}' of function m (line 3) is missing",
        ),
        (
            HEADER + ".entry k(.param .u64 y\n{\n ret;\n}",
            (4, 1),
            "'{' stands where ')' should; the ')' of the '(' in line 3, column 9 is missing",
        ),
        # What has its end is not said to lack it.
        (BODY + " st.global.u32 [%rd3, %r1];\n}", (7, 23), "'%r1' stands where '{' should"),
        (HEADER + ".entry k() {\n bra a b;\n}", (4, 8), "'b' stands where '+' or '-', ',', ';' or '|' should"),
    ],
)
def test_a_bracket_without_an_end_is_named(text: str, place: tuple[int, int], sentence: str) -> None:
    with pytest.raises(PtxSyntaxError) as caught:
        parse(text)
    first = caught.value
    assert ((first.line, first.column), first.problem) == (place, sentence), "the bracket is not named"


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", (1, 1), ["the text ends", "'.version'"]),
        ("hello", (1, 1), ["'hello'", "'.version'"]),
        ("\x7fELF\x02\x00", (1, 1), ["\\x7fELF"]),
        (".version 8.6", (1, 13), ["'.target'"]),
        (".version 99.0\n.target sm_90a\n", (1, 10), [".version is 99.0", "the latest is 9.x"]),
        (".version 8.9\n.target sm_90a\n", (1, 10), [".version is 8.9", "the last 8.x is 8.8"]),
        (".version 0.1\n.target sm_90a\n", (1, 10), [".version is 0.1"]),
        (HEADER + ".address_size 32\n", (3, 15), [".address_size is 32", "addresses of 64 bits only"]),
        (HEADER + ".entry f() {\n add.s32 %r1, 2;\n}", (4, 10), ["%r1 is not declared"]),
        (HEADER + ".entry f() {\n .reg .b32 %r<2>;\n mov.b32 %r2, 1;\n}", (5, 10), ["%r2 is not declared"]),
        (HEADER + ".entry f() {\n .reg .b32 a;\n mov.b32 a 1;\n}", (5, 12), ["'1'", "','", "';'"]),
        (
            HEADER + ".entry f() {\n .reg .b32 a;\n mov.b32 a, 1 // one\n\n // two\n mov.b32 a, 2;\n}",
            (8, 2),
            ["';'", "; line 5 ends without a ';'"],
        ),
        (HEADER + ".entry f() {\n .reg .b32 a\n mov.b32 a, 2;\n}", (5, 2), ["; line 4 ends without a ';'"]),
        (
            HEADER + ".entry f() {\n .reg .b32 a /* which\n is */ // a word\n /* used */ mov.b32 a, 2;\n}",
            (6, 13),
            ["; line 4 ends without a ';'"],
        ),
        (HEADER + ".entry f() {\n ret;", (4, 6), ["the text ends", "'}'"]),
        (HEADER + ".entry f() { bra L; }", (3, 18), ["the label L does not exist"]),
        (HEADER + ".entry f() { { L: ret; } bra L; }", (3, 30), ["the label L does not exist"]),
        (HEADER + ".entry f() { L: ret; L: ret; }", (3, 22), ["L is declared twice"]),
        (HEADER + ".entry f() { .reg .b32 a<3>; .reg .f32 a2; }", (3, 40), ["a2 is declared twice"]),
        (HEADER + ".entry f() { .reg .b32 a<30>, a1<2>; }", (3, 31), ["a1<2>", "a<30>"]),
        (HEADER + ".entry f() { .reg .b32 a1<2>, a<30>; }", (3, 31), ["a<30>", "a1<2>"]),
        (HEADER + ".entry f() { .reg .b32 a7, a<30>; }", (3, 28), ["a<30>", "a7"]),
        (HEADER + ".entry f() { .reg .b32 a<2>, a<3>; }", (3, 30), ["a<3>", "a<2>"]),
        (HEADER + ".entry f() { .reg .b32 a<9>; mov.b32 a01, 1; }", (3, 38), ["a01 is not declared"]),
        (HEADER + ".entry f() { .reg .b32 a; a: ret; }", (3, 24), ["a is declared twice"]),
        (HEADER + ".entry f(.param .b32 p) { .reg .b32 p; }", (3, 37), ["p is declared twice"]),
        (HEADER + ".entry f() { .reg .b32 a; @a ret; }", (3, 27), ["a stands where a predicate should"]),
        (HEADER + ".entry f() { ret; }\n.entry f() { ret; }", (4, 8), ["f is declared twice"]),
        (HEADER + ".global .b32 g;\n.global .b32 g;", (4, 14), ["g is declared twice", "line 3"]),
        (HEADER + ".entry f() { .reg .b64 a; mov.b64 a, g; }\n.global .b32 g;", (3, 38), ["g is not declared"]),
        (
            HEADER + ".entry f() {\n .reg .b32 %tid;\n mov.u32 %tid, %tid.x;\n}",
            (5, 16),
            ["%tid.x is no component of the %tid declared here", "another name"],
        ),
        (
            HEADER + ".entry f() { .reg .v4 .b32 %tid, r; mov.u32 r, %tid.b; mov.u32 %laneid, r; %ctaid:\n"
            "mov.u32 r, %ctaid.y; }",
            (4, 12),
            ["hides the special register %ctaid"],
        ),
        (HEADER + ".entry f() { .reg .b32 WARP_SZ; }", (3, 24), ["WARP_SZ", "the constant 32"]),
        (HEADER + ".entry f() { .reg .b32 WARP_SZ<4>; }", (3, 24), ["WARP_SZ", "another name"]),
        (HEADER + ".entry f() { _: bra _; }", (3, 14), ["_ is declared", "discarded"]),
        (HEADER + ".entry f() { .shared .b32 _; }", (3, 27), ["_ is declared"]),
        (HEADER + ".entry _() { ret; }", (3, 8), ["_ is declared"]),
        (HEADER + ".global .b32 WARP_SZ;", (3, 14), ["WARP_SZ is declared"]),
        (HEADER + ".global .b32 %clock64;", (3, 14), ["%clock64", "special register"]),
        (HEADER + ".func %laneid() { ret; }", (3, 7), ["%laneid", "special register"]),
        (HEADER + ".entry f() { ret;; }", (3, 18), ["';'"]),
        (HEADER + ".global .u32 x = 1/0;", (3, 19), ["divided by zero"]),
        (HEADER + ".global .u32 x = 1 << 64;", (3, 20), ["shifted by 64"]),
        (HEADER + ".global .u32 x = 0x1FFFFFFFFFFFFFFFF;", (3, 18), ["does not fit 64 bits"]),
        (HEADER + f".global .u32 x = {'9' * 5000};", (3, 18), ["5000 digits"]),
        (HEADER + ".global .u32 x = 019;", (3, 18), ["not an integer of base 8"]),
        (HEADER + ".global .u32 x = -0f3F800000;", (3, 18), ["takes no sign"]),
        (HEADER + ".global .u32 x = 1.0;", (3, 14), ["floating-point value initialises type .u32"]),
        (HEADER + ".global .f32 x = 1;", (3, 14), ["write 1.0"]),
        (HEADER + ".global .b8 x[2] = {1, 2, 3};", (3, 13), ["3 items for an array of 2"]),
        (HEADER + ".global .f32 x[2][2] = {1.0, 2.0};", (3, 14), ["list in { }"]),
        (HEADER + ".global .b32 y; .global .b32 x = y;", (3, 30), ["an address needs 64 bits"]),
        (HEADER + ".global .b8 x[];", (3, 13), ["x[] has no size"]),
        (HEADER + ".global .b8 x[1 << 50];", (3, 13), ["2**40"]),
        (HEADER + ".global .b8 x[1 << 30] = {1};", (3, 13), ["too large"]),
        (HEADER + ".global .align 3 .b8 x[4];", (3, 22), ["power of two"]),
        (HEADER + ".shared .b32 x = 3;", (3, 14), ["cannot be initialised"]),
        (HEADER + "/* never closed", (3, 1), ["a comment begins here and has no end"]),
        (HEADER + ".entry f() { foo " + "{" * 50 + "1" + "}" * 50 + "; }", (3, 51), ["nested more than 16 deep"]),
        (HEADER + ".entry f() " + "{" * 500 + "}" * 500, (3, 113), ["nested more than 100 deep"]),
    ],
)
def test_a_refusal_says_where_and_what(text: str, place: tuple[int, int], words: list[str]) -> None:
    with pytest.raises(PtxSyntaxError) as caught:
        parse(text, "kernel.ptx")
    error = caught.value
    assert (error.line, error.column) == place, f"the sentence was: {error}"
    assert str(error).startswith(f"kernel.ptx, line {place[0]}, column {place[1]}: ")
    for word in words:
        assert word in str(error), f"{word!r} is not in: {error}"


def attempt(text: str) -> None:
    refusal = None
    try:
        assert isinstance(parse(text), Module)
    except PtxSyntaxError as error:
        refusal = str(error)
    if refusal is not None:
        assert re.fullmatch(r"<ptx>, line [0-9]+, column [0-9]+: .+", refusal), f"no sentence with a place: {refusal}"


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    attempt(text)


@given(st.text(alphabet='%r1 ,;{}[]()<>|!@:.+-*/?0fx_"\n\tLab$=UP'))
def test_any_body_of_ptx_characters_is_parsed_or_refused(text: str) -> None:
    attempt(f"{HEADER}.entry f() {{ .reg .b32 %r<9>; .reg .pred P; {text} }}")


@given(st.sampled_from(SOURCES), st.data())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_damaged_ptx_is_parsed_or_refused(source: str, data: st.DataObject) -> None:
    tokens = re.findall(r"\s+|[%\w$.:]+|.", source)
    for _ in range(data.draw(st.integers(1, 3), label="damages")):
        at = data.draw(st.integers(0, len(tokens) - 1), label="at")
        kind = data.draw(st.sampled_from(["cut", "drop", "swap", "repeat"]), label="kind")
        if kind == "cut":
            tokens = tokens[: max(at, 1)]
        elif kind == "drop":
            tokens[at] = ""
        elif kind == "swap":
            tokens[at] = data.draw(st.sampled_from(tokens), label="with")
        else:
            tokens[at] *= 2
    attempt("".join(tokens))


@given(st.sampled_from([source for source in SOURCES if ".section" not in source]), st.data())
def test_cut_off_ptx_is_refused(source: str, data: st.DataObject) -> None:
    end = data.draw(st.integers(source.index(".entry") + 1, source.rstrip().rindex("}")), label="end")
    with pytest.raises(PtxSyntaxError):
        parse(source[:end])


def kernel(body: str) -> str:
    return f"{HEADER}.entry f() {{ .reg .b32 %q<4>; {body} ret; }}\n"


def numbered(count: int, text: str) -> str:
    """`text` once for each number, with the number in place of its `#`."""
    return "".join(text.replace("#", str(number)) for number in range(count))


GROWING: dict[str, Callable[[int], str]] = {
    "a name of $": lambda n: kernel(f".reg .b32 %{'$' * n}0; mov.b32 %{'$' * n}0, 1;"),
    "a range of $": lambda n: kernel(f".reg .b32 %{'$' * n}<4>; mov.b32 %{'$' * n}0, 1;"),
    "a name of $ and scopes": lambda n: kernel(f".reg .b32 %{'$' * n}0;" + numbered(n, "{ .reg .b32 a; }")),
    "a number's digits": lambda n: kernel(f".reg .b32 %r{'1' * n}; mov.b32 %r{'1' * n}, 1;"),
    "blanks of a guard": lambda n: kernel(f"@{' ' * n};"),
    "an open comment": lambda n: kernel("/*" + "*a" * n),
    "an open attribute": lambda n: f"{HEADER}.global .attribute({'(a)' * n} .b32 g;",
    "functions": lambda n: HEADER + numbered(n, ".func f#() { ret; }"),
    "globals": lambda n: HEADER + numbered(n, ".global .b32 g#;"),
    "parameters": lambda n: f"{HEADER}.entry f(.param .b32 p{numbered(n, ', .param .b32 p#')}) {{ ret; }}",
    "ranges": lambda n: kernel(numbered(n, ".reg .b32 a#x<2>; mov.b32 a#x0, 1;")),
    "registers and ranges": lambda n: kernel(numbered(n, ".reg .b32 a#, b#x<2>;")),
    "labels": lambda n: kernel(numbered(n, "L#:")),
    "labels of no instruction": lambda n: f"{HEADER}.entry f() {{ {numbered(n, 'L#:')} }}",
    "scopes": lambda n: kernel(numbered(n, "{ .reg .b32 a; L: bra L; }")),
    "instructions": lambda n: kernel("mov.b32 %q0, %q1;" * n),
    "operands": lambda n: kernel(f"mov.b32 %q0, {{{','.join(['%q1'] * n)}}};"),
    "operators": lambda n: kernel(f"mov.b32 %q0, {'1+' * n}1;"),
    "parentheses": lambda n: kernel(f"mov.b32 %q0, {'(' * n}1{')' * n};"),
    "initial values": lambda n: f"{HEADER}.global .b32 g[] = {{{','.join(['1'] * n)}}};",
    "branch targets": lambda n: kernel(f"L: T: .branchtargets {','.join(['L'] * n)};"),
}

SEEN_FROM = {"functions": 4000, "ranges": 3000}
"""Sizes to start from where 1,000 is too small for a quadratic part to show."""


MAX_GROWTH = 8.0


def growth(do: Callable[[str], object], text: Callable[[int], str], size: int) -> float:
    """How many times longer `do` takes for four times the `text`: 4 if it is linear. Less than 2 ms is noise.

    A busy machine stretches one of two measurements by half, so twice the text could not tell 2 from 4.
    """

    def seconds(size: int) -> float:
        given, taken = text(size), []
        for _ in range(2):
            began = time.process_time()
            do(given)
            taken.append(time.process_time() - began)
        return min(taken)

    times = seconds(2 * size) / max(seconds(size // 2), 0.002)
    # A busy machine can double one measurement, but not four in a row.
    for _ in range(3):
        if times >= MAX_GROWTH:
            times = min(times, seconds(2 * size) / max(seconds(size // 2), 0.002))
    return times


@pytest.mark.parametrize("what", GROWING)
def test_time_grows_as_the_text_does(what: str) -> None:
    attempt(kernel(""))
    times = growth(attempt, GROWING[what], SEEN_FROM.get(what, 1000))
    assert times < MAX_GROWTH, f"four times as many of {what!r} take {times:.1f} times as long; a parser is linear"


def test_quadratic_work_is_seen() -> None:
    def quadratic(text: str) -> None:
        for _ in text:
            list(text)

    assert growth(quadratic, lambda n: "a" * n, 2000) > MAX_GROWTH, "to read all for each letter goes unseen"


def test_a_name_of_4000_dollars_takes_a_moment() -> None:
    began = time.process_time()
    attempt(GROWING["a name of $"](4000))
    assert (taken := time.process_time() - began) < 1, f"it took {taken:.1f} s; once it took 13"

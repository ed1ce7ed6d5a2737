"""Runs of plain statements that are read as one token give the same tree as the grammar gives token by token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lark import Lark

from backends.ptx import BACKEND
from backends.vm.ptx import plain
from backends.vm.ptx.ast import Module
from backends.vm.ptx.parser import grammar, module_of, parse
from backends.vm.ptx.tree import PtxSyntaxError, RawBlock, RawFunction, RawInstruction, RawModule
from megamoe.contract import Program
from megamoe.spec.load import load_specs

HEADER = ".version 8.6\n.target sm_90a\n"
REGISTERS = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>; .reg .v2 .b32 v;"
SOURCES = {path.stem: path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.ptx"))}


def program_text(target: str, case: str) -> str:
    op = case.partition(":")[0]
    program = BACKEND.build(load_specs()[op].parse_case(case), target)  # pyright: ignore[reportArgumentType]
    return cast(Program, program).ptx


def exact(text: str) -> Module:
    return module_of(text, grammar())


def by_runs(text: str) -> Module:
    return module_of(text, grammar(plain.EXTENSION))


def instructions(block: RawBlock) -> Iterator[RawInstruction]:
    for statement in block.statements:
        if isinstance(statement, RawBlock):
            yield from instructions(statement)
        elif isinstance(statement, RawInstruction):
            yield statement


def share_of_runs(text: str, read: Lark) -> float:
    """The share of the instructions of `text` that come from runs: their tokens have no positions."""
    tree = cast(RawModule, cast(object, read.parse(text)))
    bodies = [one.body for one in tree.items if isinstance(one, RawFunction) and one.body is not None]
    found = [one.opcode.line is None for body in bodies for one in instructions(body)]
    return sum(found) / len(found)


@pytest.mark.parametrize("name", SOURCES)
def test_runs_give_the_tree_of_the_grammar(name: str) -> None:
    assert by_runs(SOURCES[name]) == exact(SOURCES[name])


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    "case", ["fmha:hd=64,t=3,s_k=1100,causal=true", "nvfp4_moe:hidden=128,intermediate=128,num_experts=2,tokens=3"]
)
def test_runs_are_most_of_a_program(target: str, case: str) -> None:
    text = program_text(target, case)
    assert by_runs(text) == exact(text)
    share = share_of_runs(text, grammar(plain.EXTENSION))
    assert share > 0.9, f"{share:.0%} of the instructions of {case} on {target} are read in runs"
    assert share_of_runs(text, grammar()) == 0


NAMES = ["%r1", "%r8", "%rd2", "%p1", "v.x", "%tid.x", "_", "L", "g", "WARP_SZ", "%r9", "call", "f0"]
NUMBERS = ["0", "-0", "7", "-1", "010", "09", "0x1F", "0XfU", "12U", "0xFFFFFFFFFFFFFFFF", "-0x8000000000000000",
           "0b101", "0f3F800000", "0D3FF0000000000000", "-0f3F800000", "1.5", "1e3", "9223372036854775808",
           "0x12345678123456781", "- 1", "+1", "~1", "(1)", "1+2"]  # fmt: skip
ONE = st.sampled_from([*NAMES, *NUMBERS])
OPERAND = st.one_of(
    ONE,
    st.sampled_from(["[%rd1]", "[%rd1+4]", "[%rd1+-4]", "[ %rd1 ]", "[%rd1-4]", "[%rd1+0x4]", "[g+010]", "[%rd1 + 4]",
                     "[4]", "[%rd1, {%r1, %r2}]", "[%rd1+9999999999999999999]", "%r1|%p1", "%r1 | %p1", "!%p1", "g+4",
                     "-%r1", "%r1.b0", "%r1.foo0"]),
    st.lists(ONE, max_size=3).map(lambda items: f"{{{', '.join(items)}}}"),
)  # fmt: skip
OPCODE = st.sampled_from(["mov.b32", "bra", "bra.uni", "ret", "call", "call.uni", "calls", "call.x", "callx.y",
                          "add.s32", "cp.async.bulk.shared::cta.global", "add .s32", "add. s32", "a::b", "generic",
                          "f0.b32", "st.shared::cluster.v2.b32", "M: mov.b32", ".reg"])  # fmt: skip
GUARD = st.sampled_from(["", "", "@%p1 ", "@!%p1 ", "@ %p1 ", "@! %p1 ", "@%p1\n", "@%p9 ", "@%r1 ", "@%p1"])
BETWEEN = st.sampled_from([" ", ", ", ",", " , ", ",\n", ", // a\n", "  ", "\t,\t"])
END = st.sampled_from([";", ";\n", " ;\n\n", ";;", "", "; // a;\n", "; /* b; */", "\n;\f", ";\r\n\t"])


@st.composite
def statements(draw: st.DrawFn) -> str:
    operands = draw(st.lists(OPERAND, max_size=3))
    text = draw(GUARD) + draw(OPCODE) + draw(st.sampled_from([" ", " ", "\t", "", "\n"]))
    for number, operand in enumerate(operands):
        text += (draw(BETWEEN) if number else "") + operand
    return text + draw(END)


def answer(text: str, *, with_runs: bool) -> Module | str:
    """The module of `text`, or the message about it. Without runs, the grammar alone reads the text."""
    with pytest.MonkeyPatch.context() as patch:
        if not with_runs:
            patch.setattr(plain, "EXTENSION", "")
        try:
            return parse(text)
        except PtxSyntaxError as error:
            return str(error)


OTHERS = st.sampled_from(
    [
        ".reg .b32 %q<3>, %w;",
        ".reg .v2 .b32 %u;",
        ".reg .pred %q1",
        ".reg .b33 %q;",
        ".reg .b32 %q<010>;",
        ".shared .align 8 .b8 tile[16];",
        ".local .b32 own;\n",
        ".shared .pred no;",
        ".param .b8 g[0];",
        ".shared .align 3 .b8 odd[4];",
        ".shared .b8 two[2][2];",
        "M:",
        "M: N:\n",
        "L: // a;\n",
        "M: _",
        "M: .branchtargets L;",
        "M: { ret; }",
        "M: .reg .b32 %q;",
        "// a; b\n",
        "/* a; */",
    ]
)


@given(st.lists(st.one_of(statements(), OTHERS), min_size=1, max_size=4))
def test_whatever_stands_in_a_body_is_read_or_refused_alike(body: list[str]) -> None:
    text = f"{HEADER}.global .b32 g[9];\n.visible .entry f() {{ {REGISTERS}\nL: {''.join(body)} ret; }}"
    assert answer(text, with_runs=True) == answer(text, with_runs=False)


def test_a_variable_is_declared_in_its_line() -> None:
    """Only variables remember their lines, so only these need them in runs."""
    text = f"{HEADER}.entry f() {{ ret;\n// a; b\n.shared .b32 a;\n.local .b8 b[4]; ret; }}"
    assert [one.line for one in by_runs(text).functions["f"].variables] == [5, 6]


@pytest.mark.parametrize("statement", ["mov.b32 %r1, -1;", "st.b32 [%rd1], -0x1;", "mov.v2.b32 {%r1, %r2}, {-1, 2};"])
def test_a_number_that_loses_its_sign_is_noticed(
    statement: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The planted fault, and which statements show it: those read in runs."""
    text = f"{HEADER}.entry f() {{ {REGISTERS} {statement} }}"
    assert by_runs(text) == exact(text)
    whole = plain.operand
    plain.statement.cache_clear()
    request.addfinalizer(plain.statement.cache_clear)
    monkeypatch.setattr(plain, "operand", lambda text: whole(text.replace("-", "")))
    assert (by_runs(text) == exact(text)) == ("-0x1" in statement)

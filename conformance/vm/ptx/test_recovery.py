"""All syntax errors of a text are told at once, and nothing is told that follows from another of them."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from backends.vm.faults import MOST_TOLD, UnknownInstructionError
from backends.vm.load import load
from backends.vm.ptx.parser import PtxSyntaxError, parse

HEAD = """.version 8.7
.target sm_90a
.address_size 64
.extern .func (.param .b32 r) other(.param .b32 a);
.func (.param .b32 r) itself(.param .b32 a) {
.param .b32 q; .param .b32 v;
call (v), itself, (q);
ret;
}
.visible .entry k(.param .u64 p) {
.reg .b32 %r<8>; .reg .b64 %l<3>; .reg .pred %p;
.param .b32 x; .param .b32 y;
"""
FIRST = HEAD.count("\n") + 1
SOURCES = sorted(Path(__file__).parent.glob("*.ptx"))
_INSTRUCTION = re.compile(r"^\t+(?:@!?[\w%]+ )?[a-z][\w.:]*[\w] .*;$")
BREAKS = {
    "an operand that is none": lambda line: f"{line[:-1]}, ];",
    "a comma too many": lambda line: line.replace(" ", " , ", 1) if "@" not in line else f"{line[:-1]},;",
    "a foreign letter": lambda line: f"{line[:-1]} & ;",
}


def lines_told(text: str) -> list[int]:
    """The line of each error of a text."""
    with pytest.raises(PtxSyntaxError) as caught:
        parse(text)
    return [one.line or 0 for one in (caught.value, *caught.value.others)]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
@pytest.mark.parametrize("how", BREAKS)
def test_each_broken_instruction_is_told_once_and_no_other_line(source: Path, how: str) -> None:
    text = source.read_text("utf-8").split("\n")
    parse("\n".join(text))
    places = [number for number, line in enumerate(text) if _INSTRUCTION.match(line)]
    draw = Random(how)
    for count in (1, 2, 5):
        chosen = draw.sample(places, min(count, len(places)))
        broken = [BREAKS[how](line) if number in chosen else line for number, line in enumerate(text)]
        assert lines_told("\n".join(broken)) == sorted(number + 1 for number in chosen), "\n".join(broken)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        # The label before a broken instruction is there, and so is what the next lines name.
        ("L: mov.u32 %r1, ];\nbra L;\nmov.u32 %r2, %r1;", [(0, "']' stands")]),
        ("{ .reg .b32 t; mov.u32 t, ]; mov.u32 %r1, t; }\nmov.u32 %r1, t;", [(0, "']' stands"), (1, "t is not decl")]),
        ("mov.u32 %r1, 5\nadd.u32 %r1, %r1, 1;\nmov.u32 %r1, ];", [(1, "line 13 ends without a ';'"), (2, "']'")]),
        ("mov.u32 %r1, ];\nmov.u32 %r1, ];", [(0, "']' stands"), (1, "']' stands")]),
        ("mov.u32 %r1, ];\nmov.u32 %r1, nobody;\nmov.u32 %r1, nobody;\nfrob.u32 %r1;",
         [(0, "']'"), (1, "nobody is not declared"), (3, "the opcode `frob`")]),
        ("mov.u32 %r1, 99999999999999999999999;\nmov.u32 %r1, ];", [(0, "does not fit 64 bits"), (1, "']' stands")]),
        ("mov.u32 %r1, ];\nfrob.u32 %r1;\nfrob.u32 %r1;",
         [(0, "']'"), (1, "the opcode `frob`"), (2, "the opcode `frob`")]),
        # Errors outside of instructions may lead to any other.
        (".reg .b32 %z<2\nmov.u32 %z1, 5;\nmov.u32 %z1, ];", [(1, "'mov.u32' stands where '>' should")]),
        ("mov.u32 %r1, ];\n.reg .b32 %z<2;;\nmov.u32 %z1, ];", [(0, "']' stands"), (1, "';' stands")]),
        ("mov.u32 %r1, ]; }\nadd.u32 %r1, ];", [(0, "']' stands"), (1, "'add.u32' stands")]),
        ("mov.u32 %r1, 5\n.reg .b32 %z;\nmov.u32 %z, 1;", [(1, "'.reg' stands")]),
        ("mov.u32 %r1, 5\nL: bra L;\nbra L;", [(1, "'L:' stands")]),
        ("call (x), itself, (\nmov.u32 %r1, 1;\ny);\nmov.u32 %r1, ];", [(1, "'%r1' stands")]),
        ("mov.u32 %r1, ] .reg .b32 %z;\nmov.u32 %z, 1;", [(0, "']' stands")]),
        # Calls that cannot be followed, guarded or not, and in what is called
        ("call (x), other, (y);\nfrob.u32 %r1;\n@%p call (x), other, (y);",
         [(0, "other, which has no body"), (1, "the opcode `frob`"), (2, "other, which has no body")]),
        ("call (x), itself, (y);\ncall (x), itself, (y);\nfrob.u32 %r1;",
         [(-6, "itself, which calls itself"), (2, "the opcode `frob`")]),
        ("mov.u64 %l1, itself;\ncall (x), %l1, (y), itself;",
         [(0, "`itself`, which is code"), (1, "an indirect call")]),
        ("call (x), other, (y);\nmov.u32 %r1, ];", [(0, "other, which has no body"), (1, "']' stands")]),
        ("call (x), other, (y);\nld.param.u32 %r1, [x];\nld.global.u32 %r1, [x];",
         [(0, "other, which has no body"), (2, "in .global; name its")]),
    ],
)  # fmt: skip
def test_what_is_told_of_a_kernel(body: str, told: list[tuple[int, str]]) -> None:
    with pytest.raises((PtxSyntaxError, UnknownInstructionError)) as caught:
        load(f"{HEAD}{body}\nret;\n}}\n").entry("k")
    said = str(caught.value).splitlines()
    assert len(said) == len(told), said
    for sentence, (line, words) in zip(said, told, strict=True):
        assert f"line {FIRST + line}" in sentence, sentence
        assert words in sentence, sentence


def test_a_text_of_errors_ends() -> None:
    text = f"{HEAD}{'mov.u32 %r1, ];' * 50}\nret;\n}}\n"
    with pytest.raises(PtxSyntaxError) as caught:
        load(text)
    assert len(str(caught.value).splitlines()) == MOST_TOLD

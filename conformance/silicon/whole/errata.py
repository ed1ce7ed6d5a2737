"""Classes of faults of ptxas 13.0 in random programs: the minimal programs that show them on an H200.

`least.json` has, for each program that smallest.py shrank on an H200, the remaining statements, a word of the output
that differs between levels of ptxas, its value with -O0 (`right`) and at the level of the program (`left`).

`python -m conformance.silicon.whole.errata` runs all of them on the machine; `.. --page` writes docs/ptxas.md.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from conformance import ROOT
from conformance.silicon.whole.drawn import drawn
from conformance.silicon.whole.on_device import level_of
from conformance.silicon.whole.on_machine import answer
from conformance.silicon.whole.smallest import pieces_of

LEAST = Path(__file__).with_name("least.json")
PAGE = ROOT / "docs" / "ptxas.md"
_FRAME = re.compile(r"mad\.wide\.u32 %u0|st\.global\.v\d\.b\d+ \[%u0|(selp|or)\.b32 %t[01], |mov\.u32 %t0, 0;")


@dataclass(frozen=True, slots=True)
class Least:
    """Program `number` with the statements `kept` (places of smallest.pieces_of)."""

    number: int
    kept: tuple[int, ...]
    word: int
    right: int
    left: int

    @property
    def statements(self) -> tuple[str, ...]:
        """The remaining statements, without those that order threads."""
        pieces = pieces_of(drawn(self.number)).pieces
        return tuple(pieces[at].strip(" \n{}") for at in self.kept)

    @property
    def shown(self) -> str:
        """The statements that compute, without those that store registers at the end."""
        return " ".join(one for one in self.statements if not _FRAME.match(one))

    @property
    def on_machine(self) -> tuple[int, list[str]]:
        """The machine's value of the word, and its findings."""
        program = drawn(self.number)
        found = answer(replace(program, text=pieces_of(program).text(self.kept)))
        return int(found.output.view(np.uint32)[self.word]), found.found


@dataclass(frozen=True, slots=True)
class Erratum:
    """`signs`: patterns that must all occur in the statements of a minimal program. The first class that fits
    counts."""

    name: str
    does: str
    signs: tuple[str, ...]


_LOOP = r"sub\.u32 %l\d, %l\d, 1;"
ERRATA = (
    Erratum(
        "an expression is reused",
        "In programs with `wgmma`, an expression over a register reuses the result of an earlier equal expression, "
        "although the register or that result was overwritten in between.",
        (r"wgmma\.mma_async", r"(and|mov)\.b32 %t\d"),
    ),
    Erratum(
        "the sign of the least integer",
        "`neg.s32` and `abs.s32` wrap: for 0x80000000 they return 0x80000000. The instructions after them are compiled "
        "as if the result had the opposite sign, or none.",
        (r"(neg|abs)\.s32", r"slct|cvt\.sat"),
    ),
    Erratum(
        "two approximations become one",
        "A division by `rcp(a)` becomes a multiplication by `a`. A division by `ex2(a)`, or its reciprocal, uses "
        "`ex2(-a)`. The last bits differ.",
        (r"(rcp|ex2)\.approx\.ftz\.f32 (%r\d+), [^;]*;.*(div|rcp)\.approx\.ftz\.f32 [^;]*\2;",),
    ),
    Erratum(
        "abs of a result of set",
        "`abs.f32` of the -1 that `set` returns should be 0x7fffffff.",
        (r"set\.gtu\.u32\.f32", r"\babs\.f32"),
    ),
    Erratum(
        "a NaN keeps its bits",
        "`abs.f32` becomes a modifier of the instruction that reads its result, or of a select where another "
        "instruction overwrites its result under a guard. A NaN should become 0x7fffffff.",
        (r"(?<![.\w])abs\.f32",),
    ),
    Erratum(
        "abs of halves is dropped",
        "`abs.f16x2` of a result of `ex2` or saturation is dropped. An f32 without a sign can still have one in its "
        "lower half.",
        (r"abs\.f16x2 %r\d+, (%r\d+);", r"ex2\.approx|\.sat"),
    ),
    Erratum(
        "one comparison for two iterations",
        "In an unrolled loop, the comparison at the start of an iteration becomes one with the next iteration's, on "
        "the values that the first of the two leaves.",
        (r"setp\.\w+\.f16x2 .*mad\.hi\.u32", _LOOP),
    ),
    Erratum(
        "an addition of a loop is lost",
        "In an unrolled loop, a `mad.hi.u32` that adds to its own result adds too few times.",
        (r"mad\.hi\.u32 (%r\d+), (%r\d+), (%r\d+), (%r\d+);", _LOOP, r"^(?!.*testp)(?!.*xor\.pred)"),
    ),
    Erratum(
        "the second of two comparisons",
        "Only the second predicate of a `setp` of two halves is used, and an operand comes from a narrow load: the "
        "operand's lower half is used as its upper half too.",
        (r"setp\.\w+\.b?f16x2 %p\d\|%p\d", r"ld\.\w+(\.nc)?\.[us](8|16)"),
    ),
    Erratum(
        "a vote of the lanes that are left",
        "`elect.sync` or `vote.sync.uni` of all lanes is moved into a loop that lanes leave in different iterations, "
        "and covers only the lanes that are still in the loop.",
        (r"(elect|vote)\.sync.*@%p\d bra L\d+; sub\.u32 %l\d", _LOOP),
    ),
    Erratum(
        "a guard that a loop changes",
        "A loop that follows a branch on a predicate changes that predicate. It is compiled as if the predicate stayed "
        "the same, both for what the predicate guards and for the value that it keeps where its own guard is false.",
        (r"@!?%p\d bra", _LOOP, r"(setp|testp|(and|xor|not)\.pred|lop3)\S* %"),
    ),
    Erratum(
        "an unordered comparison after a branch",
        "The predicate of `setp.gtu.ftz.f32` is combined with a branch's predicate (FSETP.GTU.AND, without .FTZ), and "
        "subnormal operands are no longer flushed.",
        (r"setp\.gtu\.ftz\.f32 (%p\d), [^;]*;.* @!?\1 ",),
    ),
    Erratum(
        "a transposed matrix of equal registers",
        "If all lanes have the same operand of `movmatrix`, such as a ballot, its result is assumed to be the same in "
        "all lanes, and a `shfl` of it is dropped. But the rows of the result are the operand's columns.",
        (r"movmatrix", r"shfl"),
    ),
    Erratum(
        "an instruction after a join",
        "An instruction is moved after the join of a branch, although one arm of the branch has overwritten its "
        "operand or its guard.",
        (r"@%q1 bra",),
    ),
)


@cache
def least() -> tuple[Least, ...]:
    """Returns all programs of least.json, by their numbers."""
    return tuple(Least(**{**row, "kept": tuple(row["kept"])}) for row in json.loads(LEAST.read_text("utf-8")))


def class_of(one: Least) -> Erratum | None:
    """Returns the class of a minimal program; None if it has none."""
    text = " ".join(one.statements)
    return next((kind for kind in ERRATA if all(re.search(sign, text) for sign in kind.signs)), None)


def wrong(some: Sequence[Least]) -> list[str]:
    """Lists differences between the machine and the H200 with -O0."""
    said: list[str] = []
    for one in some:
        mine, found = one.on_machine
        if found or mine != one.right or one.left == one.right:
            silicon = f"by -O0 {one.right:#x}, by {level_of(one.number)} {one.left:#x}"
            said.append(f"{one.number}: {mine:#x}, {silicon}; {found[:1]}")
    return said


def page() -> str:
    """Returns Markdown: by class how many, what ptxas does, and the smallest of its minimal programs."""
    of: dict[str, list[Least]] = {}
    for one in least():
        kind = class_of(one)
        of.setdefault(kind.name if kind else "", []).append(one)
    lines = [
        "# What ptxas does to programs",
        "",
        "`python -m conformance.silicon.whole.errata --page` writes this page; a test keeps it current. Of 100,000",
        "random programs without undefined behaviour, some produce different bytes on an H200 with -O1 or -O3 of ptxas",
        "13.0 than with -O0. The -O0 bytes are the machine's. [The record](../results/records/random_programs.txt)",
        "counts these programs. For each one that ran to its end, a change of its text is known that makes the machine",
        "produce the H200's bytes too; [conformance/silicon](../conformance/silicon/README.md) lists the frequent",
        f"faults. `whole/smallest.py` there shrank {len(least())} programs with rare faults on the H200, and",
        "`conformance/silicon/whole/least.json` has the results: the machine finds nothing undefined in any of them,",
        "and produces the -O0 bytes. This page shows the smallest program of each class, without labels and without",
        "the statements that order threads, or load or store registers.",
        "",
    ]
    for kind in ERRATA:
        some = of.get(kind.name, [])
        if some:
            lines += _section(kind.name, kind.does, some)
    if nameless := of.get("", []):
        lines += _section("no name", "It is not known what the optimiser did to these.", nameless)
    return "\n".join([*lines, *HANGS])


HANGS = (
    "## Programs that hang",
    "",
    "166 programs hang or end in an illegal instruction on the H200: 156 with -O1 and 10 with -O3, and none of those",
    "drawn for -O0. Their SASS (`conformance/silicon/whole/hung.py`) shows four faults:",
    "",
    "- 154: the loop counter is a uniform register, one per warp, although lanes diverge in the loop. The loop begins",
    "  with an atomic operation that is made of `ATOMS.CAST.SPIN`, such as `atom.shared.add.f32`, `.add.u64` and",
    "  `.max.u64`: a lane repeats it if it fails. Lanes that are done do not wait for the others, each group of lanes",
    "  decrements the counter, and it passes zero. Of 173 programs with -O1 that ran to their end, two have this.",
    "- 10: a `bar.red` whose result only one arm of a branch reads is executed in its place and again in that arm,",
    "  where the other warps do not arrive.",
    "- 88238 (-O3): a `shfl.sync` of all lanes before a loop is executed again in each iteration, for the predicate",
    "  that the loop tests. Lanes leave the loop in different iterations, and the remaining lanes wait for them.",
    "- 42668 (-O1): a transposed matrix of equal registers is assumed to be the same in all lanes (above). It counts",
    "  the iterations of a loop, so lanes leave one by one and share the uniform registers of the code after it. If",
    "  the second wait for the mbarrier is removed, an address is misaligned.",
    "",
    "If the misjudged value passes through volatile shared memory, so that ptxas cannot know it, these two programs",
    "end with their -O0 result ([record](../results/records/h200-hung.json), 15 changes of their text).",
    "",
)


def _section(name: str, does: str, some: Sequence[Least]) -> list[str]:
    first = min(some, key=lambda one: (len(one.kept), one.number))
    levels = sorted({level_of(one.number) for one in some})
    shown = "\n".join(part.strip() for part in re.findall(r"[^;]*;", first.shown))
    told = textwrap.wrap(f"{len(some)} program{'s'[: len(some) > 1]}, {' and '.join(levels)}. {does}", 120)
    numbers = textwrap.wrap(f"All: {', '.join(str(one.number) for one in some)}.", 120)
    return [
        f"## {name[0].upper()}{name[1:]}",
        "",
        *told,
        "",
        "```text",
        shown,
        "```",
        "",
        f"Program {first.number}, {level_of(first.number)}: a word is {first.left:#x}, with -O0 {first.right:#x}.",
        *numbers,
        "",
    ]


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; see the module."""
    if list(arguments) == ["--page"]:
        PAGE.write_text(page(), "utf-8")
        return 0
    with np.errstate(all="ignore"):
        said = wrong(least())
    print("\n".join([*said, f"{len(said)} of {len(least())} differ from -O0 on the H200"]))
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

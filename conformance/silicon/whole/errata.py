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
        "Beside `wgmma`, an expression over a register is taken for an equal one before it, although the register, or "
        "the result of the first, was overwritten in between.",
        (r"wgmma\.mma_async", r"(and|mov)\.b32 %t\d"),
    ),
    Erratum(
        "the sign of the least integer",
        "`neg.s32` and `abs.s32` wrap: of 0x80000000 they are 0x80000000. What follows is made as if the result had "
        "the opposite sign, or none.",
        (r"(neg|abs)\.s32", r"slct|cvt\.sat"),
    ),
    Erratum(
        "two approximations become one",
        "What divides by `rcp(a)` multiplies by `a`, and what divides by `ex2(a)` or inverts it takes `ex2(-a)`: "
        "the last bits differ.",
        (r"(rcp|ex2)\.approx\.ftz\.f32 (%r\d+), [^;]*;.*(div|rcp)\.approx\.ftz\.f32 [^;]*\2;",),
    ),
    Erratum(
        "abs of what set left",
        "`abs.f32` of the -1 of `set` should be 0x7fffffff.",
        (r"set\.gtu\.u32\.f32", r"\babs\.f32"),
    ),
    Erratum(
        "a NaN keeps its bits",
        "`abs.f32` becomes a modifier of what reads it, or of a select where another instruction overwrites its result "
        "under a guard. A NaN should become 0x7fffffff.",
        (r"(?<![.\w])abs\.f32",),
    ),
    Erratum(
        "abs of halves is dropped",
        "`abs.f16x2` of what `ex2` or saturation left: an f32 without a sign still has one in its lower half.",
        (r"abs\.f16x2 %r\d+, (%r\d+);", r"ex2\.approx|\.sat"),
    ),
    Erratum(
        "one comparison for two turns",
        "In an unrolled loop the comparison that a turn begins with is made with that of the next one, of what the "
        "turn itself leaves.",
        (r"setp\.\w+\.f16x2 .*mad\.hi\.u32", _LOOP),
    ),
    Erratum(
        "an addition of a loop is lost",
        "`mad.hi.u32` that adds to its own result in an unrolled loop adds less often.",
        (r"mad\.hi\.u32 (%r\d+), (%r\d+), (%r\d+), (%r\d+);", _LOOP, r"^(?!.*testp)(?!.*xor\.pred)"),
    ),
    Erratum(
        "the second of two comparisons",
        "`setp` of two halves, of whose predicates only the second is used, with an operand of a narrow load: its "
        "lower half is taken for the upper one, too.",
        (r"setp\.\w+\.b?f16x2 %p\d\|%p\d", r"ld\.\w+(\.nc)?\.[us](8|16)"),
    ),
    Erratum(
        "a question to the lanes that are left",
        "`elect.sync` or `vote.sync.uni` of all lanes is moved into a loop that lanes leave at different turns, and "
        "asks those alone that are still there.",
        (r"(elect|vote)\.sync.*@%p\d bra L\d+; sub\.u32 %l\d", _LOOP),
    ),
    Erratum(
        "a guard that a loop changes",
        "In a loop behind a branch on a predicate, what this predicate guards, and what it keeps where its guard does "
        "not hold, is made as if it stayed as it was, although the loop sets it anew.",
        (r"@!?%p\d bra", _LOOP, r"(setp|testp|(and|xor|not)\.pred|lop3)\S* %"),
    ),
    Erratum(
        "an unordered comparison behind a branch",
        "The predicate of `setp.gtu.ftz.f32` becomes one with that of a branch (FSETP.GTU.AND, without .FTZ), and "
        "subnormal operands are no longer flushed.",
        (r"setp\.gtu\.ftz\.f32 (%p\d), [^;]*;.* @!?\1 ",),
    ),
    Erratum(
        "a transposed matrix of equal registers",
        "`movmatrix` of what all lanes have the same of, such as a ballot, is taken for the same in all lanes: a "
        "`shfl` of it is dropped. But its rows are the operand's columns.",
        (r"movmatrix", r"shfl"),
    ),
    Erratum(
        "an instruction behind a join",
        "An instruction is moved behind the join of a branch, one of whose arms has overwritten its operand or its "
        "guard.",
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
        "Made by `python -m conformance.silicon.whole.errata --page`; a test keeps it current. Of 100,000 random",
        "programs without undefined behaviour some leave other bytes on an H200 by -O1 or -O3 of ptxas 13.0 than by",
        "-O0, and by -O0 those that the machine leaves. [The record](../results/records/random_programs.txt) counts",
        "them. Of each that ran to its end a change of its text is known with which the machine leaves the H200's",
        "bytes, too; [conformance/silicon](../conformance/silicon/README.md) lists the frequent ones. Of the rare ones",
        f"{len(least())} programs were made small on the H200 by `smallest.py` there. What is left of each is in",
        "`conformance/silicon/whole/least.json`: the machine finds nothing undefined in any, and leaves what -O0 left.",
        "Here is the least of each kind, without labels, what orders threads, and what loads and stores registers.",
        "",
    ]
    for kind in ERRATA:
        some = of.get(kind.name, [])
        if some:
            lines += _section(kind.name, kind.does, some)
    if nameless := of.get("", []):
        lines += _section("no name", "What the optimiser did to these is not known.", nameless)
    return "\n".join([*lines, *HANGS])


HANGS = (
    "## Programs that hang",
    "",
    "166 programs hang or end in an illegal instruction on the H200, 156 of them under -O1 and 10 under -O3; none that",
    "was drawn for -O0 does. Their SASS (`conformance/silicon/whole/hung.py`) shows four faults:",
    "",
    "- 154: the turns of a loop are counted in a uniform register, one for a warp, although lanes part in it. The loop",
    "  begins with an atomic operation that is made of `ATOMS.CAST.SPIN`, which a lane does again where it failed, as",
    "  `atom.shared.add.f32`, `.add.u64` and `.max.u64`. Lanes that are done do not wait for the others, each group of",
    "  them decrements the counter, and it passes zero. Of 173 programs under -O1 that ran to their ends two have it.",
    "- 10: a `bar.red` whose result only one arm of a branch reads is done where it stands and once more in that arm,",
    "  where the other warps do not come.",
    "- 88238 (-O3): a `shfl.sync` of all lanes before a loop is done again in each turn, for the predicate that the",
    "  loop asks. Lanes leave the loop at different turns, and those that are left wait for them.",
    "- 42668 (-O1): a transposed matrix of equal registers is taken for the same in all lanes (above). It counts the",
    "  turns of a loop, so that lanes leave one by one, and share the uniform registers of what follows: without its",
    "  second wait for the mbarrier an address is misaligned.",
    "",
    "Where ptxas cannot know the value that it misjudges, as it passes through volatile shared memory, these two end,",
    "and leave what they leave by -O0 ([record](../results/records/h200-hung.json), 15 changes of their text).",
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
        f"Program {first.number}, {level_of(first.number)}: a word is {first.left:#x}, and by -O0 {first.right:#x}.",
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

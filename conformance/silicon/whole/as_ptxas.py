"""What ptxas 13.0 makes of a drawn program when it departs from the program.

These departures were found because an H200 left other bytes than the machine. Each is a change of the program's text. A
program that leaves the H200's bytes once it is changed is explained: hashes meet by chance once in 2^64 trials. Rare
departures, for which a place or two have to be searched, are in rewrites.py, reused.py and by_hand.py. This describes
what ptxas does to the random programs. It is no model of ptxas.

`python -m conformance.silicon.whole.as_ptxas NUMBER ..` prints it for programs of drawn.npz.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, count
from typing import Final

import numpy as np

from backends.vm.faults import Fault, UnknownInstructionError
from conformance.silicon.whole.by_hand import BY_HAND
from conformance.silicon.whole.cuts import PIECE
from conformance.silicon.whole.drawn import Drawn, drawn
from conformance.silicon.whole.merge import DRAWN, DrawnAnswers
from conformance.silicon.whole.on_device import level_of
from conformance.silicon.whole.on_machine import answer, schedule_of
from conformance.silicon.whole.reused import reused_by_name
from conformance.silicon.whole.rewrites import ABS_OF_SET, rewritten
from conformance.silicon.whole.statements import INSTRUCTION

DROPPED_GUARD: Final = "the guard of testp.normal or testp.subnormal is dropped"
KEPT_NAN: Final = "abs.f32 under a guard keeps the bits of a NaN"
SAME_MIN: Final = "min of a register and itself keeps the bits of a NaN"
CONVERTED: Final = "st.u8 or st.b16 of a register with the result of an f32 instruction stores it as an integer"
HALVES: Final = "abs.f16x2 of what is no negative f32 is dropped"
TWICE: Final = "rcp.approx.ftz of rcp.approx.ftz is the operand"
SWAPPED: Final = "operands of an f64 instruction are swapped, so that of two NaN the other one is left"
REUSED: Final = "an expression is reused although its operand was overwritten"
_GUARDED_TESTP = re.compile(r"@!?%p\d (testp\.(?:normal|subnormal))")
_GUARDED_ABS = re.compile(r"(@!?%p\d) abs\.f32 (%r\d+), (%r\d+);")
_SAME_MIN = re.compile(r"min\.f(32|64) (%[rd]\d+), (%[rd]\d+), \3;")
_ABS, _ABS_OF_HALVES = re.compile(r"abs\.f32$"), re.compile(r"abs\.f16x2$")
_RECIPROCAL = re.compile(r"(@!?%p\d )?rcp\.approx\.ftz\.f32 (%r\d+), (%r\d+);")
_DOUBLES = re.compile(r"((?:add|mul|fma)\.rn|min)\.f64 (%d\d), (%d\d), (?!\3)(%d\d)")
_NARROW = re.compile(r"\bst\.\w+\.(u8|b16) (\[[^]]*\]), (%r\d+);")
_BLOCK_ENDS = re.compile(
    r"bra|brx|bar|barrier|call|fence|div\.[us]|rem|mma|ldmatrix|stmatrix|movmatrix|wgmma|vote|shfl|match|redux|"
    r"rcp\.rn|sqrt\.rn|lg2|rsqrt"
)
_NOT_ONE_SINGLE = re.compile(r"copysign|div\.full|lg2|rsqrt|mma|setp|testp|set\.\w+\.u32")
_NO_RESULT = ("st.", "red.", "bra", "brx", "bar.sync", "bar.arrive", "bar.warp", "barrier", "fence", "cp.", "wgmma")
_NOT_PURE = re.compile(
    r"ld|st|atom|red|bar|mbarrier|cp|vote|shfl|match|elect|call|bra|brx|wgmma|mma|add\.cc|addc|sub\.cc|subc|mad\S*\.cc"
)
_MOST_PLACES: Final = 8
_NOT_EVERYWHERE: Final = (REUSED, TWICE)
"""True at some places and wrong at others, so later changes are tried without them."""
Key = tuple[str, str]
Change = Callable[[str, frozenset[int] | None], tuple[str, int]]
"""Text, and which of its places to change (None: all), to the changed text and the number of places."""


def dropped_guard(text: str, only: frozenset[int] | None = None) -> tuple[str, int]:
    """At all levels, also in ptxas 13.5."""
    return _substituted(_GUARDED_TESTP, r"\1", text, only)


def kept_nan(text: str, only: frozenset[int] | None = None) -> tuple[str, int]:
    """With -O3 and -O1, which turn it into a select of |a| (FSEL): NaN should become 0x7fffffff."""
    return _substituted(_GUARDED_ABS, r"\1 and.b32 \2, \3, 0x7FFFFFFF;", text, only)


def same_min(text: str, only: frozenset[int] | None = None) -> tuple[str, int]:
    """With -O3 and -O1, which replace min(a, a) by a: NaN should become 0x7fffffff."""
    return _substituted(_SAME_MIN, r"mov.b\1 \2, \3;", text, only)


def converted(text: str, only: frozenset[int] | None = None) -> tuple[str, int]:
    """At all levels of ptxas 13.0; fixed in 13.5. It knows the type of a register's last result in a basic block, and
    treats a narrow store of an f32 as a conversion, with saturation and towards zero."""
    singles, places, out = set[str](), 0, list[str]()
    for piece in PIECE.findall(text):
        found = INSTRUCTION.match(piece)
        if re.fullmatch(r"L\d+:", piece) or (found and _ends_block(found)):
            singles.clear()
        if found and (narrow := _NARROW.search(piece)) and narrow[3] in singles:
            places += 1
            if only is None or places - 1 in only:
                kind, _, register = narrow.groups()
                store = narrow[0].replace(register + ";", "%narrow;").replace(f".{kind} ", f".b{kind[1:]} ")
                piece = piece.replace(narrow[0], f"cvt.rzi.u{kind[1:]}.f32 %narrow, {register}; {store}")
        elif found and not found[2].startswith(_NO_RESULT):
            into = set(re.findall(r"%r\d+", found[3]))
            singles = singles | into if _leaves_single(found[2]) else singles - into
        out.append(piece)
    return "".join(out).replace(".reg .b32", ".reg .b32 %narrow,", 1) if places else text, places


def _ends_block(instruction: re.Match[str]) -> bool:
    guard, opcode = instruction[1], instruction[2]
    return bool(_BLOCK_ENDS.match(opcode) or (guard and opcode.startswith(("st.", "ld.", "red.", "atom."))))


def _leaves_single(opcode: str) -> bool:
    parts = opcode.split(".")
    return (parts[-2] if parts[0] == "cvt" else parts[-1]) == "f32" and not _NOT_ONE_SINGLE.match(opcode)


def halves(text: str, only: frozenset[int] | None = None) -> tuple[str, int]:
    """With -O3 and -O1: a result of abs.f32 or saturation counts as having no sign, but an f16x2 has two."""
    return _by_last_result(_ABS_OF_HALVES, re.compile(r"abs\.f32|\S*\.sat\S*\.f32"), "mov.b32", text, only)


def abs_of_set(text: str, only: frozenset[int] | None = None) -> tuple[str, int]:
    """With -O1, and once with -O3 (rewrites.py): the -1 of set is a NaN to abs.f32."""
    return _by_last_result(_ABS, re.compile(r"set\.\w+\.u32"), "abs.s32", text, only)


def twice(text: str, only: frozenset[int] | None = None) -> tuple[str, int]:
    """With -O3 and -O1, mostly in unrolled loops: 1 / a flushed subnormal is an infinity."""
    known = (
        r"rcp.approx.ftz.f32 %once, \3; setp.eq.u32 %again, \3, %left; selp.b32 %once, %given, %once, %again; "
        r"\1mov.b32 %given, \3; \1mov.b32 %left, %once; \1mov.b32 \2, %once;"
    )
    changed, places = _substituted(_RECIPROCAL, known, text, only)
    if changed == text:
        return text, places
    declared = changed.replace(".reg .b32", ".reg .pred %again; .reg .b32 %once, %given, %left,", 1)
    return declared.replace("mov.u32 %tx,", "mov.b32 %given, 0; mov.b32 %left, 0x7FC00123; mov.u32 %tx,", 1), places


def _by_last_result(
    what: re.Pattern[str], last: re.Pattern[str], by: str, text: str, only: frozenset[int] | None
) -> tuple[str, int]:
    """Replaces `what`, an instruction of one operand, by `by` if the operand's last result has opcode `last`."""
    opcodes, places, out = dict[str, str](), 0, list[str]()
    for piece in PIECE.findall(text):
        found = INSTRUCTION.match(piece)
        if found and what.match(found[2]) and last.match(opcodes.get(found[4], "")):
            places += 1
            if only is None or places - 1 in only:
                piece = piece.replace(found[2], by, 1)
        if found and not found[2].startswith(_NO_RESULT):
            opcodes |= dict.fromkeys(re.findall(r"%r\d+", found[3]), found[2])
        out.append(piece)
    return "".join(out), places


def swapped(text: str, only: frozenset[int] | None = None) -> tuple[str, int]:
    """With -O3 and -O1: the result is the first operand's NaN."""
    return _substituted(_DOUBLES, r"\1.f64 \2, \4, \3", text, only)


def _substituted(pattern: re.Pattern[str], by: str, text: str, only: frozenset[int] | None) -> tuple[str, int]:
    places = count()

    def one(found: re.Match[str]) -> str:
        here = next(places)
        return found.expand(by) if only is None or here in only else found.group()

    return pattern.sub(one, text), next(places)


@dataclass
class _Values:
    """Value numbers of registers as ptxas sees them, and its available expressions.

    `at_hand`: where an expression was computed, the register that keeps it, the number of its value.
    """

    numbers: dict[str, int] = field(default_factory=dict[str, int])
    at_hand: dict[Key, tuple[int, str, int]] = field(default_factory=dict[Key, tuple[int, str, int]])
    defined: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    overwritten: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    fresh: Iterator[int] = field(default_factory=count)

    def of(self, register: str) -> int:
        return self.numbers.setdefault(register, next(self.fresh))

    def define(self, at: int, register: str, number: int | None = None) -> int:
        self.numbers[register] = next(self.fresh) if number is None else number
        self.defined.append((at, register))
        return self.numbers[register]

    def join(self, branch: int) -> None:
        """Paths that parted at `branch` meet: expressions computed since are not available."""
        self.at_hand = {key: one for key, one in self.at_hand.items() if one[0] < branch}
        for register in {register for at, register in self.defined if at > branch}:
            self.numbers[register] = next(self.fresh)


def reused(text: str, only: frozenset[int] | None = None) -> tuple[str, int]:
    """With -O1, in programs with wgmma: ptxas does not see that a vector of results (of wgmma, mma, ldmatrix, a load)
    or an atomic defines its registers, and takes an earlier result for the same expression of their new contents."""
    start = text.index("\n", text.index("mbarrier.init"))
    pieces = PIECE.findall(text[start:])
    values, out, places, saved = _Values(), list[str](), 0, 0
    parted: dict[str, int] = {}
    for at, piece in enumerate(pieces):
        if re.fullmatch(r"L\d+:", piece):
            _meet(values, pieces, at, parted)
        for label in re.findall(r"\bL\d+\b", piece) if "bra" in piece else ():
            parted.setdefault(label, at)
        found = INSTRUCTION.match(piece)
        if found is None:
            out.append(piece)
            continue
        guard, opcode, _, operands = found.groups()
        into = re.findall(r"%\w+", found[3])
        if _unseen(found):
            values.overwritten += [(at, register) for register in into]
        elif opcode.startswith(_NO_RESULT):
            pass
        elif guard or operands is None or _NOT_PURE.match(opcode) or len(into) != 1:
            for register in into:
                values.define(at, register)
        elif opcode.startswith("mov.") and re.fullmatch(r"%\w+", operands):
            values.define(at, into[0], values.of(operands))
        else:
            key = opcode, re.sub(r"%\w+", lambda one: f"#{values.of(one.group())}", operands)
            if (known := values.at_hand.get(key)) and _stale(values, known[0], operands):
                places += 1
                if only is None or places - 1 in only:
                    out.append(piece.replace(found.group().lstrip(" \n{}"), f"mov.b32 {into[0]}, {known[1]};"))
                    values.define(at, into[0], known[2])
                    continue
                known = None
            number = values.define(at, into[0], known[2] if known else None)
            if known is None and into[0][1] in "rt":
                values.at_hand[key] = at, f"%kept{saved}", number
                piece += f" mov.b32 %kept{saved}, {into[0]};"
                saved += 1
        out.append(piece)
    return text[:start].replace(".reg .b32", f".reg .b32 %kept<{saved + 1}>,", 1) + "".join(out), places


def _meet(values: _Values, pieces: list[str], label: int, parted: dict[str, int]) -> None:
    """At a label: a loop's registers have values of any iteration, and paths that parted before meet."""
    name = pieces[label][:-1]
    back = [at for at in range(label, len(pieces)) if re.search(rf"\bbra {name}\b", pieces[at])]
    for piece in pieces[label : back[-1]] if back else ():
        found = INSTRUCTION.match(piece)
        if found and not _unseen(found) and not found[2].startswith(_NO_RESULT):
            for register in re.findall(r"%\w+", found[3]):
                values.define(label, register)
    if name in parted:
        values.join(parted[name])


def _unseen(instruction: re.Match[str]) -> bool:
    return (instruction[3].startswith("{") and not instruction[2].startswith("st")) or instruction[2].startswith("atom")


def _stale(values: _Values, since: int, operands: str) -> bool:
    return any(at > since and re.search(rf"{register}\b", operands) for at, register in values.overwritten)


def departures(number: int) -> Iterator[tuple[str, Drawn]]:
    """Yields what ptxas may have made of program `number`, with the name of the last change."""
    program, level = drawn(number), level_of(number)
    text = program.text
    changes: list[tuple[str, Change]] = [(DROPPED_GUARD, dropped_guard), (CONVERTED, converted)]
    if level != "-O0":
        changes += [(SAME_MIN, same_min), (KEPT_NAN, kept_nan), (HALVES, halves)]
        if level == "-O1":
            changes += [(ABS_OF_SET, abs_of_set), *[(REUSED, reused)][: "wgmma" in text]]
        changes += [(TWICE, twice), (SWAPPED, swapped)]
    for name, change in changes:
        yield from ((name, replace(program, text=one)) for one in _some(change, text))
        if name not in _NOT_EVERYWHERE:
            text = change(text, None)[0]
    bare = dropped_guard(program.text)[0]
    yield from ((one.fault, replace(program, text=one.changed(bare))) for one in BY_HAND if one.number == number)
    if level == "-O1" and "wgmma" in text:
        yield from ((REUSED, replace(program, text=one)) for one in reused_by_name(bare))
    elif level != "-O0":
        yield from ((name, replace(program, text=one)) for name, one in rewritten(bare))


def _some(change: Change, text: str) -> Iterator[str]:
    """All places changed; then one; then two of them."""
    everywhere, places = change(text, None)
    if places:
        yield everywhere
    if places <= _MOST_PLACES:
        for size in range(1, min(places, 3)):
            yield from (change(text, frozenset(some))[0] for some in combinations(range(places), size))


def explained(number: int, left: int) -> str:
    """Names what ptxas did, if the machine then leaves the H200's output, whose hash is `left`; else ""."""
    for name, changed in departures(number):
        with suppress(Fault, UnknownInstructionError):
            if answer(changed, schedule_of(number)).hash == left:
                return name
    return ""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; see the module. Returns 1 if some program has no known change."""
    held, unknown = DrawnAnswers.read(DRAWN), 0
    with np.errstate(all="ignore"):
        for number in map(int, arguments):
            said = explained(number, held.left(number))
            unknown += not said
            print(f"{number} ({level_of(number)}): {said or 'no change is known'}", flush=True)
    return int(bool(unknown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

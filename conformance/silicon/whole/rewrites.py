"""How rare faults of ptxas 13.0 change single places of a drawn program.

errata.py shows the minimal program of each fault. Here each is a Rewrite of a few pieces (cuts.PIECE) of a whole
program. The places that ptxas got wrong are unknown, so `rewritten` offers combinations of a few, and as_ptxas.py
checks which one leaves the H200's bytes in the machine. by_hand.py has the changes of single programs that took reading
SASS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from typing import Final

from conformance.silicon.whole.statements import Instruction, Program, instructions, joined, parted

LEAST_INTEGER: Final = "neg.s32 or abs.s32 of the least integer is taken for a positive one"
RECIPROCALS: Final = "two approximations become one"
ANY_NAN: Final = "abs.f32 becomes a modifier, and a NaN keeps its bits"
ANY_HALVES: Final = "abs.f16x2 is dropped"
ABS_OF_SET: Final = "abs.f32 of the -1 of a set is 1"
LOST_ADDITION: Final = "mad.hi of an unrolled loop runs less often"
CROSSED: Final = "the upper half of one operand is compared with the lower half of the other"
LOOP_GUARD: Final = "a guard in a loop is taken for what it was before"
NO_FLUSH: Final = "setp.gtu.ftz, combined with another predicate, flushes no subnormal"
SUNK: Final = "an instruction runs behind a join, where its operand or guard was overwritten"
UNIFORM: Final = "movmatrix of a register that is the same in all lanes is taken for the same in all lanes"
_MEETS = re.compile(r"ld|st|atom|red|bar|mbarrier|cp|vote|shfl|match|elect|call|bra|brx|wgmma|\S*mma|\S*\.cc|addc|subc")
_LABEL = re.compile(r"(L\d+):")
_MOST_PLACES: Final = 3
_MOST_TRIES: Final = 1500
_FARTHEST_LABELS: Final = 6
SCRATCH: Final = ".reg .b32 %seen, %other, %turns, %left, %given<400>; .reg .pred %ahead, %upper, %plain; .reg .b32 "
"""Registers of the rewrites."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """`instead`: the replacement of each piece, by its place."""

    fault: str
    instead: tuple[tuple[int, str], ...]


Loops = Sequence[tuple[int, int]]
"""For each loop, the place of its label and of the branch back."""


def _behind_last(program: Program, result: str, opcode: str) -> Iterator[tuple[Instruction, Instruction]]:
    """Yields instructions of opcode `opcode`, each after the one, of opcode `result`, that wrote its last operand."""
    last: dict[str, Instruction] = {}
    for one in program:
        source = last.get(one.rest.split(",")[-1].strip())
        if source and re.match(opcode, one.opcode) and re.match(result, source.opcode):
            yield source, one
        last |= dict.fromkeys(one.results, one)


def least_integer(program: Program) -> Iterator[Rewrite]:
    """The -2^31 of neg.s32 and abs.s32 counts as positive if it is the last operand."""
    wrapped = frozenset[str]().union(*(one.results for one in program if one.opcode in ("neg.s32", "abs.s32")))
    for one in program:
        *others, last = one.rest.split(", ")
        if last in wrapped and re.match(r"cvt\.sat\.[su]\d+\.s32|slct\.\w+\.s32", one.opcode):
            positive = f"setp.eq.u32 %ahead, {last}, 0x80000000; selp.b32 %seen, 0x7fffffff, {last}, %ahead; "
            by = f"{positive}{one.guard}{one.opcode} {one.into}, {', '.join([*others, '%seen'])};"
            yield Rewrite(LEAST_INTEGER, ((one.at, by),))


def reciprocals(program: Program) -> Iterator[Rewrite]:
    """b / rcp(a) is b * a; b / ex2(a) and 1 / ex2(a) use ex2(-a)."""
    pairs = _behind_last(program, r"(rcp|ex2)\.approx\.ftz\.f32", r"(div|rcp)\.approx\.ftz\.f32")
    for number, (first, second) in enumerate(pairs):
        given = f"%given{number}"
        known = f"{first.guard}mov.b32 {given}, {first.rest}; "
        if first.opcode.startswith("ex2"):
            known = f"neg.f32 {given}, {first.rest}; ex2.approx.ftz.f32 {given}, {given}; "
        by = f"mul.ftz.f32 {second.into}, {second.rest.split(',')[0]}, {given};"
        if second.opcode.startswith("rcp"):
            by = f"mov.b32 {second.into}, {given};"
        yield Rewrite(RECIPROCALS, ((first.at, known + first.text), (second.at, second.guard + by)))


def any_nan(program: Program) -> Iterator[Rewrite]:
    """abs.f32 only clears the sign: for all readers, where another instruction writes under a guard, or for one
    reader."""
    for place, one in enumerate(program):
        if one.opcode != "abs.f32":
            continue
        cleared = f"and.b32 %given{place}, {one.rest}, 0x7FFFFFFF;"
        yield Rewrite(ANY_NAN, ((one.at, f"{one.guard}and.b32 {one.into}, {one.rest}, 0x7FFFFFFF;"),))
        for other in program:
            if other is one or one.into not in re.findall(r"%\w+", other.text):
                continue
            if other.guard and one.into in other.results and other.at > one.at:
                kept = (other.at, f"{other.unless}mov.b32 {one.into}, %given{place}; {other.text}")
                yield Rewrite(ANY_NAN, ((one.at, f"{one.text} {cleared}"), kept))
            if one.into in other.rest:
                seen = f"setp.eq.b32 %ahead, {one.into}, %left; selp.b32 %seen, %given{place}, {one.into}, %ahead; "
                operands = re.sub(rf"{one.into}\b", "%seen", other.rest)
                read = f"{other.guard}{other.opcode} {other.into}, {operands};"
                noted = f"{one.text} {one.guard}mov.b32 %left, {one.into}; {one.guard}{cleared}"
                yield Rewrite(ANY_NAN, ((one.at, noted), (other.at, seen + read)))


def any_halves(program: Program, loops: Loops) -> Iterator[Rewrite]:
    """abs.f16x2 is a copy; in a loop, only with an even number of iterations."""
    for one in program:
        if one.opcode != "abs.f16x2":
            continue
        copy = f"{one.guard}mov.b32 {one.into}, {one.rest};"
        yield Rewrite(ANY_HALVES, ((one.at, copy),))
        if not one.guard and (turns := _turns(program, loops, one.at)):
            even = "and.b32 %seen, %turns, 1; setp.eq.u32 %ahead, %seen, 0;"
            yield Rewrite(ANY_HALVES, (turns.noted, (one.at, f"{one.text} {even} @%ahead {copy}")))


def any_set(program: Program) -> Iterator[Rewrite]:
    """abs.f32 treats the result of set as an integer."""
    for _, one in _behind_last(program, r"set\.\w+\.u32", r"abs\.f32"):
        yield Rewrite(ABS_OF_SET, ((one.at, f"{one.guard}abs.s32 {one.into}, {one.rest};"),))


def crossed(program: Program) -> Iterator[Rewrite]:
    """The second predicate of setp of two halves, with the halves of one operand exchanged."""
    for one in program:
        if re.match(r"setp\.\w+\.b?f16x2", one.opcode) and "|" in one.into:
            (a, b), second = one.rest.split(", ")[:2], one.into.split("|")[1]
            for turned, (left, right) in ((b, (a, "%other")), (a, ("%other", b))):
                turn = f"prmt.b32 %other, {turned}, {turned}, 0x1032; "
                compare = f"{one.guard}{one.opcode} %ahead|%upper, {left}, {right}; "
                write = f"{one.guard}and.pred {second}, %upper, %upper;"
                yield Rewrite(CROSSED, ((one.at, f"{turn}{compare}{one.text} {write}"),))


def doubled(program: Program) -> Iterator[Rewrite]:
    """A narrow load yields its lower half twice."""
    for one in program:
        if re.match(r"ld\.\w+(\.nc)?\.[us](8|16)", one.opcode):
            twice = f"{one.guard}prmt.b32 {one.into}, {one.into}, {one.into}, 0x1010;"
            yield Rewrite(CROSSED, ((one.at, f"{one.text} {twice}"),))


def no_flush(program: Program) -> Iterator[Rewrite]:
    """The flush is lost for every instruction guarded by the predicate of setp.gtu.ftz, with or without setp itself, or
    for one."""
    for place, one in enumerate(program):
        if one.opcode != "setp.gtu.ftz.f32":
            continue
        plain = one.text.replace(".ftz", "")
        yield Rewrite(NO_FLUSH, ((one.at, plain),))
        other = one.at, f"{plain.replace(one.into, '%plain', 1)} {one.text}"
        users: list[tuple[int, str]] = []
        for user in program[place + 1 :]:
            if one.into in user.guard:
                users.append((user.at, user.guard.replace(one.into, "%plain") + user.unguarded))
            if one.into in user.results:
                break
        yield from (Rewrite(NO_FLUSH, (other, user)) for user in users)
        yield Rewrite(NO_FLUSH, (other, *users))


def uniform(program: Program) -> Iterator[Rewrite]:
    """The result of movmatrix is not exchanged."""
    last: dict[str, str] = {}
    for one in program:
        source = one.rest.split(",")[0].strip()
        if one.opcode.startswith("shfl.sync") and last.get(source, "").startswith("movmatrix"):
            yield Rewrite(UNIFORM, ((one.at, f"{one.text} mov.b32 {one.into.split('|')[0]}, {source};"),))
        last |= dict.fromkeys(one.results, one.opcode)


def _loops(pieces: Sequence[str]) -> Iterator[tuple[int, int]]:
    labels = {one[1]: at for at, piece in enumerate(pieces) if (one := _LABEL.fullmatch(piece.strip()))}
    for at, piece in enumerate(pieces):
        back = re.search(r"\bbra (L\d+)", piece)
        if back and labels.get(back[1], at) < at:
            yield labels[back[1]], at


@dataclass(frozen=True, slots=True)
class _Turns:
    """A loop's down counter, and a rewrite that keeps its initial value in %turns."""

    counter: str
    noted: tuple[int, str]


def _turns(program: Program, loops: Loops, at: int) -> _Turns | None:
    for first, last in loops:
        counters = [one.into for one in program if first < one.at < last and one.into.startswith("%l")]
        starts = [one for one in program if one.at < first and counters and one.into == counters[-1]]
        if first < at < last and starts:
            return _Turns(counters[-1], (starts[-1].at, f"{starts[-1].text} mov.u32 %turns, {counters[-1]};"))
    return None


def loop_guard(program: Program, loops: Loops) -> Iterator[Rewrite]:
    """In a loop, a guarded instruction always runs, or never; or the predicate that it writes gets a constant where it
    does not run."""
    for one in program:
        if not re.match(r"@!?%p\d ", one.guard) or not any(first < one.at <= last for first, last in loops):
            continue
        for by in ("", one.unguarded):
            yield Rewrite(LOOP_GUARD, ((one.at, by),))
        for result, compare in product(sorted(one.results), ("eq", "ne")):
            if result.startswith("%p"):
                yield Rewrite(LOOP_GUARD, ((one.at, f"{one.unless}setp.{compare}.u32 {result}, 0, 0; {one.text}"),))


def lost_addition(program: Program, loops: Loops) -> Iterator[Rewrite]:
    """mad.hi is skipped in the last or first iterations of a loop; how many depends on the number of iterations."""
    for one in program:
        turns = _turns(program, loops, one.at) if one.opcode.startswith("mad.hi") else None
        if turns is None:
            continue
        for lost in product(range(2), range(3), range(4)):
            skipped = "mov.u32 %seen, 0; " + "".join(
                f"setp.eq.u32 %ahead, %turns, {number}; selp.b32 %seen, {some}, %seen, %ahead; "
                for number, some in zip((2, 3, 4), lost, strict=True)
            )
            last = f"setp.gt.u32 %ahead, {turns.counter}, %seen; "
            first = f"sub.u32 %seen, %turns, %seen; setp.le.u32 %ahead, {turns.counter}, %seen; "
            for runs in (last, first) if any(lost) else ():
                by = f"{skipped}{runs}{_both(one.guard)}@%ahead {one.unguarded}"
                yield Rewrite(LOST_ADDITION, (turns.noted, (one.at, by)))


def _both(guard: str) -> str:
    """Combines %ahead with the guard."""
    name = guard.strip(" @!")
    if not guard:
        return ""
    negated = f"not.pred %upper, {name}; and.pred %ahead, %ahead, %upper; "
    return negated if "!" in guard else f"and.pred %ahead, %ahead, {name}; "


def sunk(program: Program, pieces: Sequence[str]) -> Iterator[Rewrite]:
    """An instruction runs after a later label, if its operands have been overwritten before that but its results have
    not."""
    tables = {at - 1 for at, piece in enumerate(pieces) if ".branchtargets" in piece}
    labels = [at for at, piece in enumerate(pieces) if _LABEL.fullmatch(piece.strip()) and at not in tables]
    for place, one in enumerate(program):
        if not one.results or _MEETS.match(one.opcode) or not all(name[1] in "rd" for name in one.results):
            continue
        for label in [at for at in labels if at > one.at][:_FARTHEST_LABELS]:
            between = [other for other in program[place + 1 :] if other.at < label]
            written = frozenset[str]().union(*(other.results for other in between))
            if written & one.results:
                break
            if written & one.reads:
                again = (label, f"{pieces[label].strip()} {one.text}")
                yield Rewrite(SUNK, ((one.at, ""), again))
                if not one.results & one.reads:
                    yield Rewrite(SUNK, (again,))


def rewrites_of(pieces: Sequence[str]) -> list[Rewrite]:
    """Returns all rewrites of a program."""
    program, loops = instructions(pieces), list(_loops(pieces))
    plain: tuple[Callable[[Program], Iterator[Rewrite]], ...] = (
        least_integer,
        reciprocals,
        any_nan,
        any_set,
        crossed,
        doubled,
        no_flush,
        uniform,
    )
    in_loops = (any_halves, lost_addition, loop_guard)
    found = [one for rewrites in plain for one in rewrites(program)]
    return [*found, *(one for rewrites in in_loops for one in rewrites(program, loops)), *sunk(program, pieces)]


def rewritten(text: str) -> Iterator[tuple[str, str]]:
    """Yields texts with few places rewritten, the fewest first, each with the names of its faults."""
    head, pieces = parted(text)
    head = head.replace(".reg .b32 ", SCRATCH, 1).replace("mov.u32 %tx,", "mov.b32 %left, 0x7FC00123; mov.u32 %tx,", 1)
    for some in islice(_some(rewrites_of(pieces)), _MOST_TRIES):
        changed = joined(pieces, dict(place for one in some for place in one.instead))
        yield "; ".join(dict.fromkeys(one.fault for one in some)), head + changed


def _some(rewrites: Sequence[Rewrite]) -> Iterator[tuple[Rewrite, ...]]:
    for size in range(1, _MOST_PLACES + 1):
        for some in combinations(rewrites, size):
            places = [at for one in some for at, _ in one.instead]
            if len(places) == len(set(places)):
                yield some

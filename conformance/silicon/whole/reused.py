"""A fault of ptxas 13.0 with -O1 beside wgmma: it replaces an `and` of a register by an earlier one of its old
contents.

as_ptxas.reused tracks what ptxas knows about registers, and misses some places; this file compares only operand names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, islice, product
from typing import Final

from conformance.silicon.whole.statements import Instruction, Program, instructions, joined, parted

_MOST_TRIES: Final = 1500
Sources = Sequence[Instruction]


def reused_by_name(text: str) -> Iterator[str]:
    """Yields texts in which an `and` takes the result of an earlier one with the same operands, although an operand was
    overwritten in between: at all such places, then at few, or at all but few."""
    head, pieces = parted(text)
    places = list(_same(instructions(pieces)))
    all_of_them = range(len(places))
    few = [frozenset(some) for size in range(len(places) // 2 + 2) for some in combinations(all_of_them, size)]
    everywhere = frozenset(all_of_them)
    some_places = [one for one in dict.fromkeys(chain([everywhere], *((one, everywhere - one) for one in few))) if one]
    declared = head.replace(".reg .b32 ", f".reg .b32 %first<{len(pieces)}>, ", 1)
    for pick in (_all_first, _all_last, _mixed):
        for some in some_places[:_MOST_TRIES]:
            chosen = [places[place] for place in sorted(some)]
            for sources in pick([sources for _, sources in chosen]):
                yield declared + joined(pieces, _taken([one for one, _ in chosen], sources))


def _all_first(sources: Sequence[Sources]) -> Iterator[Sources]:
    yield [one[0] for one in sources]


def _all_last(sources: Sequence[Sources]) -> Iterator[Sources]:
    yield [one[-1] for one in sources]


def _mixed(sources: Sequence[Sources]) -> Iterator[Sources]:
    yield from islice(product(*sources), 2 ** len(sources))


def _taken(some: Sequence[Instruction], sources: Sources) -> dict[int, str]:
    """Replaces each by a copy of its source's result, and makes the source save it."""
    instead = {one.at: f"mov.b32 {one.into}, %first{source.at};" for one, source in zip(some, sources, strict=True)}
    for source in {source.at: source for source in sources}.values():
        instead[source.at] = f"{instead.get(source.at, source.text)} mov.b32 %first{source.at}, {source.into};"
    return instead


def _same(program: Program) -> Iterator[tuple[Instruction, list[Instruction]]]:
    """Yields each `and` of registers, with the first and the last earlier one of the same operands, if those are
    stale."""
    seen: dict[str, list[Instruction]] = {}
    written: dict[str, int] = {}
    for one in program:
        if one.opcode == "and.b32" and not one.guard and one.into != "%t6":
            known = seen.setdefault(one.rest, [])
            stale = [old for old in known if any(written.get(name, -1) > old.at for name in one.reads)]
            if stale:
                yield one, list(dict.fromkeys([stale[0], stale[-1]]))
            known.append(one)
        written |= dict.fromkeys(one.results, one.at)

"""Rewrites of random programs: texts stay programs, and the rest of the text stays as it is."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from backends.vm.ptx.parser import parse
from conformance.silicon.whole.by_hand import BY_HAND, ByHand
from conformance.silicon.whole.drawn import FUNCTIONS, HEAD, drawn
from conformance.silicon.whole.on_device import level_of
from conformance.silicon.whole.reused import reused_by_name
from conformance.silicon.whole.rewrites import rewrites_of, rewritten
from conformance.silicon.whole.statements import instructions, joined, parted

NUMBERS = (44, 552, 637, 3035, 10113, 22619, 34225, 75707, 90091)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_program_is_the_same_once_taken_apart_and_joined(number: int) -> None:
    text = drawn(number).text
    head, pieces = parted(text)
    assert head + joined(pieces, {}) == text, f"program {number} lost something"
    as_they_are = {one.at: one.text for one in instructions(pieces)}
    assert head + joined(pieces, as_they_are) == text, f"program {number}: an instruction is not what it was read from"


@pytest.mark.parametrize("number", NUMBERS)
def test_a_rewritten_program_is_a_program(number: int) -> None:
    text = drawn(number).text
    count = len(rewrites_of(parted(text)[1]))
    assert count, f"program {number} has no place to rewrite, but ptxas found one"
    for name, changed in islice(rewritten(text), count):
        assert changed != text, f"program {number}: {name} changes nothing"
        parse(HEAD + FUNCTIONS + changed)


def test_places_where_an_expression_may_be_reused_are_those_with_an_overwritten_operand() -> None:
    before = "mbarrier.init.shared.b64 [gate], 128; bar.sync 0;"
    same = "and.b32 %t0, %r0, 7; {} and.b32 %t1, %r0, 7;"
    declared = f".reg .b32 %r<12>, %t<8>;\n{before}\n"
    assert not list(reused_by_name(declared + same.format("mov.u32 %r1, 0;"))), "nothing was overwritten"
    changed = next(reused_by_name(declared + same.format("mov.u32 %r0, 0;")))
    assert re.search(r"mov\.b32 %t1, %first\d+;", changed), f"an overwritten operand is not seen: {changed}"


@pytest.mark.parametrize("hand", BY_HAND, ids=lambda hand: str(hand.number))
def test_changes_by_hand_are_of_programs_that_ptxas_optimised(hand: ByHand) -> None:
    assert level_of(hand.number) != "-O0", f"program {hand.number} was assembled as it is"
    with pytest.raises(ValueError, match="stands 2 times"):
        hand.changed(drawn(hand.number).text * 2)

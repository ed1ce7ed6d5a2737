"""Why random programs hang: each cause is found in SASS that has it, and not in SASS without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.silicon.whole.drawn import drawn
from conformance.silicon.whole.hung import BARRIER_TWICE, ENDED, UNIFORM_COUNTER, causes
from conformance.silicon.whole.on_machine import answer, schedule_of

SPINS = """
.L_x_5:
        /*0500*/                   LDS R2, [R24] ;
        /*0520*/                   ATOMS.CAST.SPIN R3, [R24], R2, R3 ;
        /*0530*/                   ISETP.EQ.U32.AND P3, PT, R3, 0x1, PT ;
        /*0540*/              @!P3 BRA `(.L_x_5) ;
        /*0550*/                   {count} ;
        /*0570*/               @P3 BRA `({outer}) ;
"""


def test_a_uniform_counter_behind_a_spin_is_seen() -> None:
    uniform = SPINS.format(count="UIADD3 UR4, UR4, -0x1, URZ", outer=".L_x_5")
    assert causes("", uniform) == [UNIFORM_COUNTER]
    by_lane = SPINS.format(count="VIADD R4, R4, 0xffffffff", outer=".L_x_5")
    assert not causes("", by_lane), "a counter of each lane is none of a warp"
    alone = SPINS.format(count="UIADD3 UR4, UR4, -0x1, URZ", outer=".L_x_9")
    assert not causes("", alone), "the counter is outside of the spin's loop, and no loop leads back"


def test_a_barrier_that_is_done_again_is_seen() -> None:
    ptx, sass = "bar.red.and.pred %p0, 0, %p1;", "BAR.RED.AND.DEFER_BLOCKING 0x0, !P0 ;\n"
    assert not causes(ptx, sass), "as many as in the text"
    assert causes(ptx, sass * 2) == [BARRIER_TWICE]


@pytest.mark.parametrize("number", ENDED)
def test_a_change_with_which_a_program_ends_changes_nothing_that_it_leaves(number: int) -> None:
    program = drawn(number)
    for text in (program.text, ENDED[number].changed(program.text)):
        left = answer(replace(program, text=text), schedule_of(number))
        assert not left.found, f"the machine finds {left.found[0]}"
        assert left.hash == ENDED[number].left, f"{left.hash:#x}, where the H200 leaves {ENDED[number].left:#x} by -O0"

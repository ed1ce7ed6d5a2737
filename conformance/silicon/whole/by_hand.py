"""Changes that ptxas 13.0 made to single random programs, read from their SASS; no rule here finds them.

Changed like this, each program leaves the H200's bytes in the machine. %l1 counts a loop's iterations down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from conformance.silicon.whole.rewrites import SUNK

LEFT_ALONE: Final = "elect or vote is moved into a loop, where it asks those lanes alone that are still there"
ONE_COMPARISON: Final = "comparisons of two turns of an unrolled loop become one, of what the first turn leaves"


@dataclass(frozen=True, slots=True)
class ByHand:
    """Changes of program `number`: parts that occur once in its text, and their replacements."""

    number: int
    fault: str
    changes: tuple[tuple[str, str], ...]

    def changed(self, text: str) -> str:
        """Returns the changed text. ValueError unless each part occurs exactly once."""
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(
                    f"program {self.number}: {old!r} stands {text.count(old)} times in its text, where it should once"
                )
            text = text.replace(old, new)
        return text


def _declared(registers: str) -> tuple[str, str]:
    return ".reg .b32 %r<12>,", f"{registers} .reg .b32 %r<12>,"


_LANES = _declared(".reg .pred %go; .reg .b32 %of<5>, %here, %asked, %next, %turn;")
_LANES_OF_TURNS = "".join(
    f"setp.ge.u32 %go, %l1, {turn}; vote.sync.ballot.b32 %of{turn}, %go, 0xFFFFFFFF; " for turn in (1, 2, 3, 4)
)
_NEXT_TURN = "add.u32 %turn, %turn, 1; mov.u32 %next, 0; " + "".join(
    f"setp.eq.u32 %go, %turn, {turn}; selp.b32 %next, %of{turn}, %next, %go; " for turn in (2, 3, 4)
)
"""Sets %next: the lanes whose loops have a next iteration."""

BY_HAND: Final = (
    ByHand(
        10113,
        LEFT_ALONE,
        (
            _LANES,
            ("L5:\n", f"{_LANES_OF_TURNS} mov.u32 %here, 0xFFFFFFFF; mov.u32 %turn, 1; L5:\n"),
            (
                "@%p2 bra L6;",
                "neg.s32 %next, %here; and.b32 %asked, %here, %next; shr.u32 %next, %asked, %lane; "
                "and.b32 %next, %next, 1; setp.eq.u32 %go, %next, 1; @%go bra L6; xor.b32 %here, %here, %asked; "
                f"{_NEXT_TURN} and.b32 %here, %here, %next;",
            ),
        ),
    ),
    ByHand(
        37161,
        SUNK,
        (
            _declared(".reg .pred %then; .reg .b32 %before, %late;"),
            (
                "selp.b32 %r3, %r10, %r1, %p3;",
                "selp.b32 %r3, %r10, %r1, %p3; mov.b32 %before, %r1; and.pred %then, %p3, %p3;",
            ),
            (
                "L13: bar.sync 0;",
                "L13: bar.sync 0; selp.b32 %late, %r10, %before, %then; sub.u32 %r2, %r4, %late;",
            ),
        ),
    ),
    ByHand(
        66713,
        LEFT_ALONE,
        (
            _LANES,
            (
                "L3:\n",
                f"{_LANES_OF_TURNS} vote.sync.ballot.b32 %asked, %p2, 0xFFFFFFFF; "
                "mov.u32 %here, 0xFFFFFFFF; mov.u32 %turn, 1; L3:\n",
            ),
            (
                "@%p3 bra L4;",
                "and.b32 %next, %asked, %here; setp.eq.u32 %go, %next, 0; setp.eq.or.u32 %go, %next, %here, %go; "
                f"@%go bra L4; {_NEXT_TURN} mov.b32 %here, %next;",
            ),
        ),
    ),
    ByHand(
        84054,
        ONE_COMPARISON,
        (
            _declared(".reg .pred %go, %third; .reg .b32 %turns;"),
            ("L7:\n", "mov.u32 %turns, %l1; L7:\n"),
            (
                "@%p2 mad.hi.u32 %r0, %r4, %r1, %r8;",
                "@%p2 mad.hi.u32 %r0, %r4, %r1, %r8; setp.eq.u32 %go, %turns, %l1; "
                "setp.gt.and.u32 %go, %turns, 1, %go; setp.eq.u32 %third, %turns, 4; "
                "setp.eq.and.u32 %third, %l1, 2, %third; or.pred %go, %go, %third; "
                "@%go setp.lt.f16x2 %p0|%p1, %r8, %r0;",
            ),
        ),
    ),
)

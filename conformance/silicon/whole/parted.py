"""Where silicon and the machine part: `python -m conformance.silicon.whole.parted OUT [NUMBER ..]`.

`ask.py .. tell` wrote OUT/told/NUMBER.npz for a random program: its output at each level of ptxas, and the outputs of
its cuts (cuts.py) at its level in drawn.npz. For each program this prints the levels at which the machine agrees, the
first statement with which a cut differs from it, and the registers that differ. A cut is assembled anew, so that a
fault of ptxas may come and go between two of them: the statement is where to look, not the proof.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from backends.vm.faults import Fault, UnknownInstructionError
from conformance.silicon.whole.as_ptxas import dropped_guard
from conformance.silicon.whole.cuts import every_cut, statements
from conformance.silicon.whole.drawn import Drawn, drawn
from conformance.silicon.whole.on_device import LEVELS, level_of
from conformance.silicon.whole.on_machine import answer, schedule_of
from conformance.silicon.whole.programs import Bytes

_NAMES = [*(f"r{i}" for i in range(12)), *(f"d{i // 2}.{'lo' if i % 2 == 0 else 'hi'}" for i in range(8)), "predicates"]
_WORDS = 24
"""Words of a thread's own part of the output; the last ones are not written."""


@dataclass(frozen=True)
class Parting:
    """`kept`: statements of the first cut that differs, 0 for none; `places`: words of the output that differ, as
    (thread, register, the machine's, the H200's)."""

    kept: int
    places: list[tuple[int, str, int, int]]


def parting(silicon: list[Bytes], machine: Callable[[int], Bytes]) -> Parting:
    """Finds the first cut that differs, by bisection: all later cuts are assumed to differ too."""
    if np.array_equal(machine(len(silicon) - 1), silicon[-1]):
        return Parting(0, [])
    agrees, differs = -1, len(silicon) - 1
    while differs - agrees > 1:
        between = (agrees + differs) // 2
        same = np.array_equal(machine(between), silicon[between])
        agrees, differs = (between, differs) if same else (agrees, between)
    mine, theirs = machine(differs).view(np.uint32), silicon[differs].view(np.uint32)
    return Parting(differs, [_place(int(at), int(mine[at]), int(theirs[at])) for at in np.flatnonzero(mine != theirs)])


def _place(at: int, mine: int, theirs: int) -> tuple[int, str, int, int]:
    word = at % _WORDS
    return at // _WORDS, _NAMES[word] if word < len(_NAMES) else f"word {word}", mine, theirs


def _left(program: Drawn, number: int) -> Bytes:
    changed = replace(program, text=dropped_guard(program.text)[0])
    try:
        return answer(changed, schedule_of(number)).output
    except (Fault, UnknownInstructionError):
        return np.zeros(0, np.uint8)


def told(out: Path, number: int) -> str:
    """Returns a line about program `number`. ValueError if its file was made with another version of cuts.py."""
    found, whole = np.load(out / "told" / f"{number}.npz"), drawn(number)
    levels = [level for level in sorted(set(LEVELS)) if level in found.files]
    mine = _left(whole, number)
    like = ", ".join(f"{level} {'agrees' if np.array_equal(found[level], mine) else 'differs'}" for level in levels)
    line = f"{number} ({level_of(number)}): {like}"
    if "cuts" not in found.files:
        return f"{line}; no cuts were told"
    cuts, names = list(every_cut(whole)), statements(whole)
    silicon = list(np.bitwise_xor.accumulate(found["cuts"], axis=0))
    if len(silicon) != len(cuts):
        raise ValueError(
            f"program {number} was told with {len(silicon)} cuts, and cuts.py makes {len(cuts)}; ask again"
        )
    one = parting(silicon, lambda kept: _left(cuts[kept], number))
    if not one.places:
        return f"{line}; no cut differs"
    shown = ", ".join(f"thread {t} {name} {mine:#x} not {theirs:#x}" for t, name, mine, theirs in one.places[:3])
    named = names[one.kept - 1] if one.kept else "before any statement"
    return f"{line}; {one.kept} of {len(names)}: {named} [{len(one.places)} words: {shown}]"


def main() -> None:
    """Runs the command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("numbers", type=int, nargs="*", help="all that were told, if none")
    asked = parser.parse_args()
    out: Path = asked.out
    with np.errstate(all="ignore"):
        for number in asked.numbers or sorted(int(file.stem) for file in (out / "told").glob("*.npz")):
            print(told(out, number), flush=True)


if __name__ == "__main__":
    main()

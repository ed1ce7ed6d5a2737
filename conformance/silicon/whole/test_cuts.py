"""A cut of a random program is a program, and the first differing cut names where two answers part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conformance.silicon.whole import parted
from conformance.silicon.whole.cuts import cut, every_cut, statements
from conformance.silicon.whole.drawn import Drawn, drawn
from conformance.silicon.whole.on_device import LEVELS, level_of
from conformance.silicon.whole.on_machine import answer, schedule_of
from conformance.silicon.whole.parted import parting, told
from conformance.silicon.whole.programs import Bytes

NUMBERS = (1, 10, 30, 91, 12066)
"""Programs with no engine, with wgmma, with TMA, and with a call before an atomic."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def left(program: Drawn) -> Bytes:
    number = int(program.entry.split("_")[1])
    found = answer(program, schedule_of(number))
    assert not found.found, f"{program.entry}: the machine finds {found.found[0]}"
    return found.output


@pytest.mark.parametrize("number", NUMBERS)
def test_a_cut_is_the_program_without_its_last_statements(number: int) -> None:
    program = drawn(number)
    names = statements(program)
    assert cut(program, len(names)).text == program.text, "the cut that keeps all statements is the program"
    for kept in (0, len(names) // 2, len(names) - 1):
        shorter = cut(program, kept)
        assert statements(shorter) == names[:kept], f"cut {kept} of program {number} keeps other statements"
        assert shorter.text.count("{") == shorter.text.count("}"), f"cut {kept} of program {number} loses a brace"


def test_cuts_are_programs_without_findings_and_end_at_the_whole_one() -> None:
    program = drawn(30)
    cuts = list(every_cut(program))
    assert len({one.entry for one in cuts}) == len(cuts), "cuts share a module, so that their entries differ"
    assert not np.array_equal(left(cuts[0]), left(cuts[len(cuts) // 2])), "a statement more changes what is left"
    assert np.array_equal(left(cuts[-1]), left(program))


@pytest.mark.parametrize("first", [1, 2, 5, 9])
def test_the_first_cut_that_differs_is_found(first: int) -> None:
    mine = [np.full(192, kept, np.uint8) for kept in range(10)]
    theirs = [one.copy() for one in mine]
    for one in theirs[first:]:
        one[96 + 4 * 13] ^= 255
    found = parting(theirs, mine.__getitem__)
    assert found.kept == first, f"they part at {first}, not at {found.kept}"
    word = first * 0x01010101
    assert found.places == [(1, "d0.hi", word, word ^ 255)]
    assert parting(mine, mine.__getitem__).places == [], "nothing differs"


def test_a_told_program_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = [np.full(192, kept, np.uint8) for kept in range(len(statements(drawn(1))) + 1)]
    monkeypatch.setattr(parted, "_left", lambda program, _: cuts[int((program.entry + "_-1").split("_")[2])])
    silicon = np.stack(cuts)
    silicon[3:, 0] ^= 1
    silicon[1:] ^= silicon[:-1].copy()
    (tmp_path / "told").mkdir()
    levels = {level: cuts[-1] ^ (level == level_of(1)) for level in set(LEVELS)}
    np.savez(tmp_path / "told" / "1.npz", allow_pickle=False, cuts=silicon, **levels)
    line = told(tmp_path, 1)
    assert f"{level_of(1)} differs" in line
    assert line.count("agrees") == 2, line
    assert f"; 3 of {len(cuts) - 1}: {statements(drawn(1))[2]} [1 words: thread 0 r0 0x3030303 not 0x3030302]" in line
    np.savez(tmp_path / "told" / "1.npz", allow_pickle=False, cuts=silicon[1:], **levels)
    with pytest.raises(ValueError, match="ask again"):
        told(tmp_path, 1)

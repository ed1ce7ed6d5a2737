"""Minimal programs on which levels of ptxas differ: the machine leaves the -O0 result; and how they are made small."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conformance.silicon.whole import as_ptxas
from conformance.silicon.whole.drawn import drawn
from conformance.silicon.whole.errata import ERRATA, PAGE, class_of, least, page, wrong
from conformance.silicon.whole.on_device import level_of
from conformance.silicon.whole.on_machine import answer
from conformance.silicon.whole.smallest import Pieces, pieces_of, smallest


def test_the_machine_leaves_what_an_h200_left_without_the_optimiser() -> None:
    with np.errstate(all="ignore"):
        said = wrong(least())
    assert not said, "\n".join(said)


def test_another_word_is_noticed() -> None:
    one = least()[0]
    with np.errstate(all="ignore"):
        assert wrong([replace(one, right=one.right ^ 1)]), "a word that no level left is not noticed"


def test_each_class_has_a_program_and_no_program_is_of_o0() -> None:
    found = {kind.name for one in least() if (kind := class_of(one))}
    assert found == {kind.name for kind in ERRATA}, "a class without a program"
    assert not [one.number for one in least() if class_of(one) is None], "a program without a class"
    assert not [one.number for one in least() if level_of(one.number) == "-O0"]


def test_the_page_is_current() -> None:
    assert PAGE.read_text("utf-8") == page(), "python -m conformance.silicon.whole.errata --page"


def _made_small(number: int, kept: list[int]) -> tuple[Pieces, list[int]]:
    """Shrinks `kept` of a program in which abs.f32 under a guard keeps a NaN, as with ptxas."""
    program = drawn(number)
    pieces = pieces_of(program)

    def disagrees(text: str) -> bool:
        mine, changed = (answer(replace(program, text=one)) for one in (text, as_ptxas.kept_nan(text)[0]))
        assert not mine.found, f"a statement went that another one needs: {mine.found[0]}"
        return bool((mine.output != changed.output).any())

    with np.errstate(all="ignore"):
        return pieces, smallest(pieces, kept, disagrees, lambda _: None)


def test_what_stays_is_what_parts_the_two() -> None:
    pieces = pieces_of(drawn(234))
    assert pieces.text(pieces.droppable) == drawn(234).text, "with all of its statements it is another program"
    pieces, left = _made_small(234, pieces.droppable)
    stays = [pieces.pieces[at].strip() for at in left]
    assert len(left) < 8, f"{len(left)} statements stay: {stays}"
    assert any("abs.f32" in one for one in stays), f"the statement that parts them went: {stays}"


def test_a_statement_does_not_stay_without_what_it_needs() -> None:
    pieces = pieces_of(drawn(1620))
    users = [at for at in pieces.droppable if pieces.needs[at] - pieces.stays]
    assert users, "no statement of this program needs another"
    for at in users[:20]:
        need = next(iter(pieces.needs[at] - pieces.stays))
        closed = pieces.closed(set(pieces.droppable) - {need})
        assert at not in (closed or {at}), f"{pieces.pieces[at]!r} stays without {pieces.pieces[need]!r}"


@pytest.mark.parametrize("number", [0, 10, 44, 5580])
def test_what_orders_threads_stays(number: int) -> None:
    pieces = pieces_of(drawn(number))
    text = pieces.text(())
    for word in ("bar.sync", "mbarrier.try_wait", "wgmma.wait_group", "fence.proxy"):
        assert text.count(word) == drawn(number).text.count(word), f"program {number} without statements lost a {word}"

"""The machine leaves the same bytes as an H200: programs of all forms that are not lane-wise, and random ones."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest

from backends.vm.isa import memory_access
from backends.vm.numerics import accumulate
from backends.vm.numerics.f32 import Float32
from backends.vm.numerics.formats import Float64
from conformance.silicon.whole import as_ptxas, by_hand, rewrites
from conformance.silicon.whole.drawn import MIN_INSTRUCTIONS, drawn
from conformance.silicon.whole.forms import answers, difference, identity, programs
from conformance.silicon.whole.merge import DRAWN, DrawnAnswers
from conformance.silicon.whole.on_machine import answer, schedule_of

PROGRAMS = list(programs())
PARTS = 8
MATRICES = ("mma.", "wmma.", "wgmma.")
SUM = memory_access._single_sum
DRAWN_ANSWERS = DrawnAnswers.read(DRAWN)
RANDOM = (1, 2, 3, 10, 17, 20, 30, 33, 50, 1234, 2060, 2538, 15440, 23960, 30240)


def _cut(total: Float64, bits: int) -> Float32:
    """A sum that is truncated before it is rounded to f16."""
    cut = accumulate._truncate(total, np.zeros(total.shape, np.int64), bits)
    return cut.astype(np.float16).astype(np.float32) + np.float32(0)


CHANGES = (
    as_ptxas.dropped_guard,
    as_ptxas.kept_nan,
    as_ptxas.same_min,
    as_ptxas.halves,
    as_ptxas.abs_of_set,
    as_ptxas.twice,
    as_ptxas.swapped,
)

FAULTS = [
    (
        "backends.vm.numerics.accumulate._LEAST_EXPONENTS",
        {"tf32": -1000},
        "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 special",
    ),
    (
        "backends.vm.numerics.accumulate._to_half",
        lambda total: _cut(total, 14),
        "wgmma.mma_async.sync.aligned.m64n96k32.f16.e4m3",
    ),
    ("backends.vm.tensor.tma_box._NAN_FILL", {16: 0x7FFF, 32: 0x7FFFFFFF, 64: 0x7FF8 << 48}, "tensor load 42 f64"),
    ("backends.vm.isa.memory_access._single_sum", lambda *, flush: SUM(flush=False), "atomics global"),
]
"""A rule of the machine, its faulty replacement, and a program that must notice."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def test_every_program_has_the_answer_to_itself() -> None:
    held = answers()
    assert {program.entry for program in PROGRAMS} == set(held), "ask the H200 again: see README.md"
    changed = [program.name for program in PROGRAMS if identity(program) != held[program.entry][0]]
    assert not changed, f"these are no longer the programs that the H200 ran: {changed[:5]}"


@pytest.mark.parametrize("part", range(PARTS))
def test_the_machine_leaves_what_an_h200_left(part: int) -> None:
    """All programs except matrix products, and every sixth product; `python -m conformance.silicon.whole.forms` runs
    all."""
    products = [program for program in PROGRAMS if program.name.startswith(MATRICES)]
    others = [program for program in PROGRAMS if not program.name.startswith(MATRICES)]
    some = [*products[5::6], *others][part::PARTS]
    wrong = [said for program in some if (said := difference(program))]
    assert not wrong, "\n".join(wrong[:8])


@pytest.mark.parametrize(("what", "planted", "named"), FAULTS, ids=[named for *_, named in FAULTS])
def test_an_altered_rule_of_the_machine_is_noticed(
    monkeypatch: pytest.MonkeyPatch, what: str, planted: object, named: str
) -> None:
    program = next(program for program in PROGRAMS if program.name.startswith(named))
    assert difference(program) is None
    monkeypatch.setattr(what, planted)
    assert (said := difference(program)) is not None, f"{what} altered: {named} does not notice"
    assert program.name in said


@pytest.mark.parametrize("number", RANDOM)
def test_random_programs_leave_what_an_h200_left(number: int) -> None:
    left = answer(drawn(number), schedule_of(number))
    assert not left.found, f"program {number}: the machine finds {left.found[0]}"
    assert left.hash == DRAWN_ANSWERS.left(number), f"program {number} leaves other bytes than on an H200"


@pytest.mark.parametrize(
    ("number", "what", "planted"),
    [
        (2060, "_LEAST_OF_ALL", -134),
        (2060, "_LEAST_OF_ALL", -131),
        (30240, "_to_half", lambda total: total.astype(np.float16).astype(np.float32)),
        (23960, "_to_half", lambda total: _cut(total, 24)),
    ],
)
def test_random_programs_notice_an_altered_rule(
    monkeypatch: pytest.MonkeyPatch, number: int, what: str, planted: object
) -> None:
    monkeypatch.setattr(accumulate, what, planted)
    left = answer(drawn(number), schedule_of(number)).hash
    assert left != DRAWN_ANSWERS.left(number), f"accumulate.{what} altered: program {number} does not notice"


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (0, as_ptxas.DROPPED_GUARD),
        (85, as_ptxas.SAME_MIN),
        (234, as_ptxas.KEPT_NAN),
        (3835, as_ptxas.CONVERTED),
        (54389, as_ptxas.CONVERTED),
        (35674, as_ptxas.SAME_MIN),
        (1151, as_ptxas.SWAPPED),
        (4613, as_ptxas.HALVES),
        (15665, as_ptxas.ABS_OF_SET),
        (12031, as_ptxas.TWICE),
        (1620, as_ptxas.REUSED),
        (2500, as_ptxas.REUSED),
        (91600, as_ptxas.REUSED),
        (552, rewrites.LEAST_INTEGER),
        (637, rewrites.LOOP_GUARD),
        (3035, rewrites.NO_FLUSH),
        (20718, rewrites.ANY_HALVES),
        (22619, rewrites.RECIPROCALS),
        (34225, rewrites.CROSSED),
        (44206, rewrites.ANY_NAN),
        (50144, rewrites.LOST_ADDITION),
        (54707, rewrites.SUNK),
        (75707, rewrites.UNIFORM),
        (88049, rewrites.ABS_OF_SET),
        (10113, by_hand.LEFT_ALONE),
        (37161, rewrites.SUNK),
        (84054, by_hand.ONE_COMPARISON),
    ],
)
def test_what_ptxas_made_of_a_program_leaves_what_an_h200_left(number: int, name: str) -> None:
    left = DRAWN_ANSWERS.left(number)
    assert answer(drawn(number), schedule_of(number)).hash != left, (
        f"program {number} agrees as it is: it shows nothing of ptxas"
    )
    assert as_ptxas.explained(number, left) == name, f"program {number} is not explained by: {name}"


@pytest.mark.parametrize("number", [552, 3835, 69560])
def test_bytes_that_no_h200_left_are_not_explained(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Uses few texts of the rare faults: hundreds take a minute."""
    monkeypatch.setattr(rewrites, "_MOST_TRIES", 10)
    left = DRAWN_ANSWERS.left(number)
    assert as_ptxas.explained(number, left), f"program {number} is not explained by few texts"
    assert not as_ptxas.explained(number, left ^ 1), f"program {number}: bytes that no H200 left are explained"


def test_a_change_of_no_place_changes_nothing() -> None:
    for number in range(0, 2000, 61):
        text = drawn(number).text
        for change in CHANGES:
            assert change(text, frozenset())[0] == text, f"program {number}: {change.__name__} of no place"
        narrow, _ = as_ptxas.converted(text, frozenset())
        assert narrow.replace(" %narrow,", "") == text, f"program {number}: converted"
        copied, _ = as_ptxas.reused(text, frozenset())
        assert re.sub(r" mov\.b32 %kept\d+, %\w+;| %kept<\d+>,", "", copied) == text, f"program {number}: reused"


def test_random_programs_are_of_the_promised_size() -> None:
    for number in range(0, 2000, 7):
        program = drawn(number)
        assert program.text.count(";") >= MIN_INSTRUCTIONS, f"program {number} has too few instructions"
        assert program.threads >= 128, f"program {number} has fewer than four warps"
        assert (number % 10 == 0) == bool(program.engine), f"program {number}: every tenth has wgmma or TMA"
    assert drawn(5).text == drawn(5).text

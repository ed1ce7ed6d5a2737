"""Modifiers in another order: those that ptxas takes mean the same, and none ends in a traceback."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from backends.vm.bind import forms
from backends.vm.bind.forms import in_order
from conformance.acceptance.answers import read_answers
from conformance.acceptance.machine import why_not_bound
from conformance.acceptance.spellings import Question


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """A planted fault must not stay in what is remembered."""
    yield
    forms._kind_of.cache_clear()
    forms._in_order.cache_clear()
    forms._lookup.cache_clear()


def parts_of(opcode: str) -> tuple[str, ...]:
    return tuple(opcode.split("."))


def shuffled(parts: tuple[str, ...], draw: random.Random) -> tuple[str, ...]:
    """The words in another order that ptxas takes: the name in front, words of one kind in their order."""
    first, *rest = parts
    kinds = [forms._kind_of(first, part) or f"{at}" for at, part in enumerate(rest)]
    left = {kind: [part for part, one in zip(rest, kinds, strict=True) if one == kind] for kind in kinds}
    name = left.pop("the name", [])
    places = [kind for kind in kinds if kind != "the name"]
    draw.shuffle(places)
    return (first, *name, *(left[kind].pop(0) for kind in places))


def astray() -> list[str]:
    """The spellings that ptxas and the machine take whose words, shuffled, are put into another order."""
    draw = random.Random(0)
    found: list[str] = []
    for question, since in read_answers().since.items():
        if not since or why_not_bound(question) is not None:
            continue
        other = Question(".".join(shuffled(parts_of(question.opcode), draw)), question.operands)
        if in_order(other.instruction()).parts != in_order(question.instruction()).parts:
            found.append(f"{other.opcode} is not taken as {question.opcode}")
    return found


def test_words_in_another_order_are_put_into_that_of_their_form() -> None:
    left = astray()
    assert not left, f"{len(left)} spellings: {left[:10]}"


def test_a_kind_that_is_forgotten_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types would trade places: cvt.f16.f32 and cvt.f32.f16."""
    monkeypatch.setattr(forms, "_IN_ORDER", ())
    forms._kind_of.cache_clear()
    assert len(astray()) > 100, "types in any order would not be noticed"


@pytest.mark.parametrize("seed", range(2))
def test_no_order_ends_in_a_traceback(seed: int) -> None:
    """Any order at all, and any word left out: bound, or refused in a sentence."""
    draw = random.Random(seed)
    told = Counter[bool]()
    for question in draw.sample(list(read_answers().since), 3000):
        first, *rest = parts_of(question.opcode)
        draw.shuffle(rest)
        words = rest[draw.random() < 0.3 :]
        reason = why_not_bound(Question(".".join((first, *words)), question.operands))
        told[reason is None] += 1
        assert reason is None or "PTX line 1" in reason, f"{question.opcode}: {reason}"
    assert min(told[True], told[False]) > 300, f"few are bound, or few refused: {told}"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("red.add.f32.global", "red.global.add.f32"),
        ("ld.f32.global", "ld.global.f32"),
        ("atom.global.v4.f32.add", "atom.global.add.v4.f32"),
        ("setp.u32.eq", "setp.eq.u32"),
        ("add.f32.rn.ftz", "add.rn.ftz.f32"),
        ("fence.cluster.acq_rel", "fence.acq_rel.cluster"),
        ("cvt.f32.f16.ftz", "cvt.ftz.f32.f16"),
        ("tcgen05.mma.kind::f16.cta_group::1", "tcgen05.mma.cta_group::1.kind::f16"),
        ("wgmma.fence.sync", "wgmma.fence.sync"),
        ("no.such.opcode", "no.such.opcode"),
    ],
)
def test_the_order_of_a_spelling(written: str, meant: str) -> None:
    assert in_order(Question(written, "").instruction()).parts == parts_of(meant)

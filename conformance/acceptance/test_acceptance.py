"""The machine takes nothing that ptxas refuses, for any target or PTX version; the committed page lists the
differences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from backends.vm import coverage
from backends.vm.bind import availability
from backends.vm.bind.availability import Feature, Version
from backends.vm.bind.forms import REFUSED, Form, all_forms, find
from backends.vm.faults import UnknownInstructionError
from backends.vm.load import load
from backends.vm.ptx.ast import Instruction
from conformance.acceptance import answers
from conformance.acceptance.answers import DATA, TABLE, Answers, Comparison, as_markdown, asked, compared, read_answers
from conformance.acceptance.machine import why_not_bound
from conformance.acceptance.spellings import Question, questions
from megamoe.contract.counted import counted


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compared(read_answers())


def test_every_question_was_asked() -> None:
    """A new form brings new spellings, and ptxas must be asked about them."""
    missing = [one.text() for one in questions() if one not in read_answers().since]
    assert not missing, (
        f"{DATA.name} lacks {counted(len(missing), 'question')}, such as {' '.join(missing[:5])} "
        "Run python -m conformance.acceptance"
    )


def test_what_was_answered_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the same ptxas are kept, those of another are not; what is no question any more goes."""
    put: list[Question] = []

    def since(ptxas: Path, every: Sequence[Question]) -> dict[Question, dict[str, Version]]:
        put.extend(every)
        return {one: {"sm_90a": (9, 0)} for one in every}

    monkeypatch.setattr(answers, "_since", since)
    old, gone, new = (Question(opcode, "r; r; r") for opcode in ("add.u32", "add.nothing", "sub.u32"))
    first = asked([old])
    assert put == [old], "without answers everything is asked"
    kept = replace(first, since={old: {"sm_100a": (8, 6)}, gone: {}})
    assert asked([new, old], kept).since == {new: {"sm_90a": (9, 0)}, old: {"sm_100a": (8, 6)}}
    assert put == [old, new], "an answer of the same ptxas was asked for again"
    asked([old], replace(kept, ptxas="1.0"))
    assert put == [old, new, old], "an answer of another ptxas was kept"


def test_the_machine_takes_nothing_that_ptxas_refuses(found: Comparison) -> None:
    assert not found.only_ours, f"{len(found.only_ours)} are taken by the machine alone: " + "\n".join(
        found.only_ours[:20]
    )
    assert not found.refused_there, f"{len(found.refused_there)} are refused where ptxas takes them: " + "\n".join(
        found.refused_there[:20]
    )
    assert found.both, "no spelling is taken by both"


def test_the_committed_page_is_current(found: Comparison) -> None:
    assert TABLE.read_text(encoding="utf-8") == as_markdown(read_answers(), found), (
        "regenerate it: python -m conformance.acceptance --table"
    )


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_is_refused_by_name_is_something_that_ptxas_takes(pattern: str, found: Comparison) -> None:
    assert not [one for one in found.both if re.match(pattern, one)], "the machine takes what it says that it refuses"
    refused = [one for one in found.only_ptxas if re.match(pattern, one)]
    assert refused, "nothing that ptxas was asked for has that beginning"
    question = next(one for one in questions() if one.opcode == refused[0])
    assert REFUSED[pattern] in str(why_not_bound(question)), "the refusal does not give the reason"


@pytest.mark.parametrize("opcode", ["add.rn.f32x2", "wgmma.fence.sync.aligned"])
def test_a_forgotten_target_would_be_noticed(opcode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = read_answers()
    one = next(question for question in held.since if question.opcode == opcode)
    few = Answers(held.ptxas, {one: held.since[one]})
    assert not compared(few).only_ours
    lax = tuple(replace(feature, since=0, only="") for feature in availability.FEATURES)
    monkeypatch.setattr(availability, "FEATURES", lax)
    availability._known.cache_clear()
    try:
        assert compared(few).only_ours, f"{opcode} was taken everywhere and nobody noticed"
    finally:
        availability._known.cache_clear()


def test_a_target_that_is_refused_too_often_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Question("add.f32", "r; r; r")
    few = Answers("", {one: read_answers().since[one]})
    assert not compared(few).refused_there
    monkeypatch.setattr(availability, "FEATURES", (*availability.FEATURES, Feature(r"add\.f32", since=100)))
    availability._known.cache_clear()
    try:
        assert compared(few).refused_there
    finally:
        availability._known.cache_clear()


@pytest.mark.parametrize(
    ("target", "version", "instruction", "clause"),
    [
        ("sm_90a", "9.2", "add.rn.f32x2 %l, %l, %l", "needs target sm_100 or higher, and the module is for sm_90a"),
        ("sm_90a", "9.2", "add.f32.bf16 %r, %h, %r", "needs target sm_100 or higher"),
        ("sm_90a", "9.2", "redux.sync.min.f32 %r, %r, -1", "needs target sm_100a or sm_103a"),
        ("sm_90a", "9.2", "cvt.rn.satfinite.e2m3x2.f32 %h, %r, %r", "needs target sm_100 or higher"),
        ("sm_100a", "9.2", "wgmma.fence.sync.aligned", "needs target sm_90a, and the module is for sm_100a"),
        ("sm_100a", "8.6", "cvt.rn.satfinite.e4m3x2.bf16x2 %h, %r", "needs PTX version 9.1 or later"),
        (
            "sm_90a",
            "9.2",
            "cp.async.bulk.tensor.2d.tile::gather4.shared::cta.global.mbarrier::complete_tx::bytes "
            "[%r], [%l, {%r, %r, %r, %r, %r}], [%r]",
            "needs target sm_100 or higher",
        ),
        (
            "sm_100",
            "9.2",
            "cp.async.bulk.tensor.2d.global.tile::scatter4.shared::cta.bulk_group [%l, {%r, %r, %r, %r, %r}], [%r]",
            "needs target sm_100a",
        ),
        (
            "sm_90a",
            "9.2",
            "tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%r], 13",
            "needs target sm_100 or higher",
        ),
        ("sm_100a", "9.2", "tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%r], 4", "needs target sm_103a"),
        ("sm_100a", "9.2", "red.acquire.gpu.global.add.u32 [%l], %r", "red has no .acquire"),
    ],
)
def test_a_module_is_refused_with_what_it_would_need(target: str, version: str, instruction: str, clause: str) -> None:
    registers = ".reg .b16 %h; .reg .b32 %r; .reg .b64 %l;"
    module = load(
        f".version {version}\n.target {target}\n.address_size 64\n.visible .entry k() {{\n{registers}\n"
        f"mov.b32 %r, 0; mov.b16 %h, 0; mov.b64 %l, 0;\n{instruction};\nret;\n}}"
    )
    with pytest.raises(UnknownInstructionError, match="PTX line 7") as refusal:
        module.entry("k")
    assert clause in str(refusal.value)


def unwitnessed() -> list[str]:
    """Forms that ptxas takes in some spelling for sm_90a, with neither a witness on hardware nor a stated reason."""
    taken: set[Form] = set()
    for question, since in read_answers().since.items():
        if "sm_90a" in since:
            with suppress(UnknownInstructionError):
                taken.add(find(Instruction(tuple(question.opcode.split(".")), (), None, 1, question.opcode))[0])
    left = [form.spelling for form in taken if form not in coverage.hardware()]
    return [one for one in left if not one.startswith(tuple(coverage.NOT_ASKED))]


def test_hardware_witnesses_what_ptxas_takes_for_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exceptions are in a list with reasons, and each reason names a form without a witness."""
    left = unwitnessed()
    assert not left, f"ask an H200 (conformance/silicon/README.md), or say why not: {sorted(left)}"
    bare = [form.spelling for form in all_forms() if form not in coverage.hardware()]
    idle = [one for one in coverage.NOT_ASKED if not any(spelling.startswith(one) for spelling in bare)]
    assert not idle, f"hardware witnesses these, so that no reason is needed: {idle}"
    monkeypatch.setattr(coverage, "NOT_ASKED", {"brkpt": ""})
    assert "trap" in unwitnessed(), "a form without a witness and without a reason is not noticed"

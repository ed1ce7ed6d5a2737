"""What is said of a spelling that no form lists: the wrong word, the word that was meant, and the nearest forms."""

from __future__ import annotations

import re

import pytest

from backends.vm import isa  # noqa: F401  (registers every instruction family)
from backends.vm.bind.forms import all_forms, find
from backends.vm.bind.spelling import far
from backends.vm.faults import UnknownInstructionError
from backends.vm.ptx.ast import Instruction


def _refusal(opcode: str) -> tuple[str, list[str]]:
    """What is said of an instruction, and the forms that it lists."""
    with pytest.raises(UnknownInstructionError) as caught:
        find(Instruction(tuple(opcode.split(".")), (), None, 1, f"{opcode};"))
    told, _, listed = str(caught.value).partition("he nearest are ")
    return told, re.findall(r"`([^`]*)` \(PTX ISA", listed)


@pytest.mark.parametrize(
    ("opcode", "said", "nearest"),
    [
        (
            "cp.async.bulk.commit_grp",
            "`.commit_grp` is no modifier of `cp`; did you mean `.commit_group`?",
            "cp.async.bulk.commit_group",
        ),
        (
            "cp.async.wait_grup",
            "`.wait_grup` is no modifier of `cp`; did you mean `.wait_group`?",
            "cp.async.wait_group",
        ),
        ("st.globl.u32", "`.globl` is no modifier of `st`; did you mean `.global`?", "st{.mmio}"),
        ("st.globl.u31", "did you mean `.global`? `.u31` is no modifier of `st`; did you mean `.u32`?", "st{.mmio}"),
        (
            "cvt.rn.f32.f46",
            "`.f46` is no modifier of `cvt`; did you mean `.f64`?",
            "cvt{.<rnd>}{.ftz}{.sat}.<dst>.<src>",
        ),
        ("setp.gremlin.u32", "`.gremlin` is no modifier of `setp`; t", "setp.<cmp>{.<bool>}.<type>"),
        ("mul.wide.f32", "no form of `mul.wide.f32` is known; t", "mul.wide.<type>"),
    ],
)
def test_the_wrong_word_is_named_and_the_nearest_form_is_first(opcode: str, said: str, nearest: str) -> None:
    told, listed = _refusal(opcode)
    assert said in told, told
    assert listed[0].startswith(nearest), listed


def test_every_form_is_found_behind_a_wrong_letter_and_told_once() -> None:
    """The last required word of each form is misspelt. Forms of other spellings may be as near."""
    checked = 0
    for form in all_forms():
        parts = tuple(sorted(slot.choices)[0] for slot in form.slots if not slot.optional)
        wrong = (*parts[:-1], f"{parts[-1]}q")
        if len(parts) == 1:
            continue
        assert far(form, parts) == 0 < far(form, wrong) < 1, f"{form.spelling} is far from {'.'.join(wrong)}"
        told, listed = _refusal(".".join(wrong))
        assert f"`.{wrong[-1]}` is no modifier of `{parts[0]}`" in told, told
        assert len(listed) == len(set(listed)), f"{'.'.join(wrong)} lists a form twice: {listed}"
        nearest = min(far(one, wrong) for one in all_forms() if one.spelling == listed[0])
        assert nearest <= far(form, wrong), f"{form.spelling} is nearer to {'.'.join(wrong)}: {listed}"
        checked += 1
    assert checked > 300, "hardly a form was checked"

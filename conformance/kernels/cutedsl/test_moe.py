"""The CuTeDSL MoE kernels beyond the harness's cases: pairs and single CTAs, few CTAs, planted faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backends.cutedsl.sm100_moe.program import compiled, moe_program
from conformance.kernels.cutedsl.execution import SCHEDULES, made, outputs, without
from conformance.kernels.laws.law import inputs_of, spec_of
from megamoe.contract import Case, HostProgram
from megamoe.judge.judge import compared, expected_of
from megamoe.ops import reference

CTA_GROUPS = (1, 2)


def program_of(case: Case, *, cta_group: int, max_ctas: int = 148) -> HostProgram:
    return made(lambda: moe_program(case, cta_group, max_ctas))


def case_of(text: str) -> Case:
    return spec_of("nvfp4_moe").parse_case(f"nvfp4_moe:{text}")


def hold_to_reference(case: Case, seen: dict[str, torch.Tensor], what: str) -> None:
    verdict = compared(spec_of(case.op), expected_of(case, inputs_of(case)), seen)
    assert verdict.passed, f"{case.id} with {what}: {verdict.sentence}"


def same_rows(case: Case, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str | None:
    """The first output that differs in a bit, padding rows aside, or None."""
    free = reference(case.op).free(case, inputs_of(case))
    for name, tensor in one.items():
        differs = tensor.view(torch.uint8) != other[name].view(torch.uint8)
        if name in free:
            wide = tensor.element_size() // free[name].element_size()
            differs &= ~free[name].repeat_interleave(wide, dim=-1)
        if bool(differs.any()):
            return name
    return None


@pytest.mark.parametrize("interleave", [8, 64])
@pytest.mark.parametrize("cta_group", CTA_GROUPS)
def test_no_kernel_uses_local_memory(cta_group: int, interleave: int) -> None:
    artifact = made(lambda: compiled("layer", cta_group, interleave))
    assert len(artifact.resources) == 5, f"routing, gather, L1, L2 and combine expected: {sorted(artifact.resources)}"
    for kernel, resources in artifact.resources.items():
        assert resources.stack == 0, f"{kernel} has {resources.stack} bytes of stack a thread"


# Experts of three tiles of rows and of one, K and W that end within a tile, and a stage each that is stored by itself.
@pytest.mark.parametrize(
    "text",
    [
        "hidden=128,intermediate=128,num_experts=2,tokens=150,topk=2,load=skewed,clamp=0.5",
        "hidden=384,intermediate=128,num_experts=2,tokens=260,topk=1,weight=before,interleave=16,stage=l1",
        "hidden=384,intermediate=384,num_experts=3,tokens=40,topk=2,load=skewed,stage=l2,inputs=poisoned_padding",
    ],
)
def test_neither_pairs_nor_the_number_of_ctas_change_a_bit(text: str) -> None:
    """Persistent CTAs and pairs take any number of tiles in turn, under every schedule."""
    case = case_of(text)
    wanted, broken = outputs(case, program_of(case, cta_group=1))
    assert broken is None, f"{case.id}: {broken}"
    hold_to_reference(case, wanted, "a CTA a tile")
    ways = ((1, 1, "random:1"), (1, 3, "lazy"), (2, 148, "eager"), (2, 2, "random:2"), (2, 4, "lazy"))
    for cta_group, max_ctas, schedule in ways:
        seen, broken = outputs(case, program_of(case, cta_group=cta_group, max_ctas=max_ctas), schedule)
        how = f"in CTA groups of {cta_group} on {max_ctas} CTAs under {schedule}"
        assert broken is None, f"{case.id} {how}: {broken}"
        differs = same_rows(case, wanted, seen)
        assert differs is None, f"{case.id} {how}: {differs} differs from one CTA a tile"


@pytest.mark.parametrize("cta_group", CTA_GROUPS)
def test_a_kernel_for_another_interleave_is_noticed(cta_group: int) -> None:
    """Gate and up of other rows of W1 meet in the registers: no row of h may look right by chance."""
    case = case_of("hidden=128,intermediate=128,num_experts=2,tokens=20,interleave=16,stage=l1")
    program = program_of(case_of("hidden=128,intermediate=128,num_experts=2,tokens=20,stage=l1"), cta_group=cta_group)
    seen, broken = outputs(case, program)
    assert broken is None, f"{case.id}: {broken}"
    verdict = compared(spec_of(case.op), expected_of(case, inputs_of(case)), seen)
    assert not verdict.passed, f"{case.id}: the kernel for an interleave of 8 gives the outputs of 16"


L1 = "hidden=256,intermediate=128,num_experts=2,tokens=20,stage=l1"
L2 = "hidden=256,intermediate=128,num_experts=2,tokens=20,stage=l2"
FAULTS = {
    "rows through shared memory without a proxy fence": (L2, without(r"fence\.proxy\.async")),
    "rows overwritten in shared memory while they are stored": (
        "hidden=512,intermediate=128,num_experts=1,tokens=20,stage=l2",
        without(r"cp\.async\.bulk\.wait_group\.read"),
    ),
    "no scales in tensor memory": (L2, without(r"tcgen05\.cp")),
    "no deallocation of tensor memory": (L2, without(r"tcgen05\.dealloc")),
    "no arrivals of threads on barriers": (
        "hidden=512,intermediate=128,num_experts=2,tokens=20,stage=l2",
        without(r"mbarrier\.arrive\."),
    ),
    "no commits of the tensor core": (L1, without(r"tcgen05\.commit")),
    "no barrier between counting and placing routes": (L1, without(r"bar(rier)?\.sync")),
}


@pytest.mark.parametrize("cta_group", CTA_GROUPS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name: str, cta_group: int) -> None:
    text, mutate = FAULTS[name]
    case = case_of(text)
    program = program_of(case, cta_group=cta_group, max_ctas=2)
    faulty = replace(program, ptx=mutate(program.ptx))
    assert faulty.ptx != program.ptx, f"{name}: the kernel has no such instruction any more"
    for schedule in SCHEDULES:
        if outputs(case, faulty, schedule)[1]:
            return
    pytest.fail(f"{name}: no schedule of {', '.join(SCHEDULES)} noticed")

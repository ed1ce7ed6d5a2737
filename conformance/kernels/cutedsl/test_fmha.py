"""The CuTeDSL attention kernel beyond the harness's cases: few CTAs, forced splits, planted faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backends.cutedsl.sm100_fmha.program import compiled, fmha_program
from conformance.kernels.cutedsl.execution import SCHEDULES, made, outputs, without
from conformance.kernels.laws.law import inputs_of, spec_of
from megamoe.contract import Case, HostProgram
from megamoe.judge.tolerance import compare
from megamoe.ops import reference

HEAD_DIMENSIONS = (64, 128, 256, 512)


def program_of(case: Case, *, splits: int | None = None, max_ctas: int = 148) -> HostProgram:
    return made(lambda: fmha_program(case, splits, max_ctas))


def case_of(text: str) -> Case:
    return spec_of("fmha").parse_case(f"fmha:{text}")


def hold_to_reference(case: Case, seen: dict[str, torch.Tensor], what: str) -> None:
    room, inputs, spec = reference(case.op), inputs_of(case), spec_of(case.op)
    verdict = compare(
        case, seen, room.oracle(case, inputs), room.simulated(case, inputs), spec.tolerance, published=False
    )
    assert verdict.passed, f"{case.id} with {what}: {verdict.sentence}"


@pytest.mark.parametrize("hd", HEAD_DIMENSIONS)
def test_no_kernel_uses_local_memory(hd: int) -> None:
    artifact = made(lambda: compiled(hd))
    assert len(artifact.resources) == 2, f"hd {hd}: attention and combine expected, found {sorted(artifact.resources)}"
    for kernel, resources in artifact.resources.items():
        assert resources.stack == 0, f"{kernel} has {resources.stack} bytes of stack a thread"


# An odd number of tiles an item makes the two softmax warpgroups change places from item to item; the second case has
# items that see no key at all between items that do.
@pytest.mark.parametrize(
    "text",
    [
        "hd=64,t=3,s_k=300,batch=2,heads=6,kv_heads=3",
        "hd=128,t=128,s_k=140,heads=4,causal=true",
        "hd=128,t=100,s_k=30,heads=4,causal=true",
        "hd=256,t=5,s_k=130,batch=3",
        "hd=512,t=4,s_k=200,batch=2",
    ],
)
def test_the_number_of_ctas_changes_no_bit(text: str) -> None:
    """Persistent CTAs take any number of work items in turn, under every schedule."""
    case = case_of(text)
    wanted, broken = outputs(case, program_of(case))
    assert broken is None, f"{case.id}: {broken}"
    hold_to_reference(case, wanted, "a CTA an item")
    for schedule, max_ctas in zip(SCHEDULES, (1, 2, 3, 1), strict=True):
        seen, broken = outputs(case, program_of(case, max_ctas=max_ctas), schedule)
        assert broken is None, f"{case.id} on {max_ctas} CTAs under {schedule}: {broken}"
        for name, tensor in wanted.items():
            same = torch.equal(seen[name].view(torch.uint8), tensor.view(torch.uint8))
            assert same, f"{case.id} on {max_ctas} CTAs under {schedule}: {name} differs from one CTA an item"


@pytest.mark.parametrize("splits", [2, 3, 7, 32])
@pytest.mark.parametrize(
    "text",
    [
        "hd=64,t=3,s_k=700,heads=4,kv_heads=2,inputs=large_logits",
        "hd=128,t=40,s_k=520,causal=true,window=200",
        "hd=256,t=100,s_k=30,causal=true",
        "hd=512,t=2,s_k=300,heads=3",
    ],
)
def test_any_number_of_splits_gives_attention(text: str, splits: int) -> None:
    """More splits than key tiles leave parts that saw nothing; they have no weight."""
    case = case_of(text)
    seen, broken = outputs(case, program_of(case, splits=splits), "random:5")
    assert broken is None, f"{case.id} in {splits} splits: {broken}"
    hold_to_reference(case, seen, f"{splits} splits")


FAULTS = {
    "P through shared memory without a proxy fence": ("hd=256,t=4,s_k=300", without(r"fence\.proxy\.async")),
    "P through tensor memory without waiting for the stores": ("hd=128,t=4,s_k=300", without(r"tcgen05\.wait::st")),
    "no deallocation of tensor memory": ("hd=64,t=4,s_k=128", without(r"tcgen05\.dealloc")),
    "no arrivals of threads on barriers": ("hd=64,t=4,s_k=300", without(r"mbarrier\.arrive\.shared")),
    "no commits of the tensor core": ("hd=64,t=4,s_k=300", without(r"tcgen05\.commit")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name: str) -> None:
    text, mutate = FAULTS[name]
    case = case_of(text)
    program = program_of(case)
    faulty = replace(program, ptx=mutate(program.ptx))
    assert faulty.ptx != program.ptx, f"{name}: the kernel has no such instruction any more"
    sentences = [outputs(case, faulty, schedule)[1] for schedule in SCHEDULES]
    assert any(sentences), f"{name}: no schedule of {', '.join(SCHEDULES)} noticed"

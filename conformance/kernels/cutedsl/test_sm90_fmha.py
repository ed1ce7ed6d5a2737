"""The CuTeDSL attention kernel for sm_90a where the harness's cases do not reach it.

Every way to share an item, few CTAs, forced splits, schedules, planted faults.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backends.cutedsl.device import H200_SM_COUNT
from backends.cutedsl.sm90_fmha.plan import Share, Sm90FmhaPlan
from backends.cutedsl.sm90_fmha.program import compiled, fmha_program
from conformance.kernels.cutedsl.execution import SCHEDULES, outputs, without
from conformance.kernels.cutedsl.test_fmha import case_of, hold_to_reference
from conformance.kernels.cutedsl.test_sm90_fmha_plan import PLANS
from megamoe.contract import Case, HostProgram, UnsupportedError


def program_of(
    case: Case, share: Share | None = None, *, splits: int | None = None, max_ctas: int = H200_SM_COUNT
) -> HostProgram:
    """`fmha_program`. Skips the test where CuTeDSL is missing."""
    plan = None if share is None else Sm90FmhaPlan(case.int("hd"), share)
    try:
        return fmha_program(case, plan, splits, max_ctas)
    except UnsupportedError as missing:
        pytest.skip(f"unsupported: {missing}")


@pytest.mark.parametrize(("hd", "share"), PLANS)
def test_no_kernel_uses_local_memory(hd: int, share: Share) -> None:
    try:
        artifact = compiled(Sm90FmhaPlan(hd, share))
    except UnsupportedError as missing:
        pytest.skip(f"unsupported: {missing}")
    names = sorted(artifact.resources)
    assert len(names) == 3, f"hd {hd}, {share}: attention and combine for few and many parts expected, found {names}"
    for kernel, resources in artifact.resources.items():
        assert resources.stack == 0, f"{kernel} has {resources.stack} bytes of stack a thread"


# Two row tiles, several key tiles a warpgroup, a ragged end, and items that see no key between items that do.
@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("hd=64,t=128,s_k=450,causal=true", "rows"),
        ("hd=64,t=70,s_k=500,causal=true,window=150", "keys"),
        ("hd=128,t=100,s_k=30,heads=2,causal=true", "rows"),
        ("hd=128,t=3,s_k=400,batch=2,heads=6,kv_heads=3", "keys"),
        ("hd=256,t=5,s_k=130,batch=3", "keys"),
        ("hd=512,t=4,s_k=200,batch=2", "columns"),
    ],
)
def test_ctas_and_schedules_change_no_bit(text: str, share: Share) -> None:
    """Persistent CTAs take any number of work items in turn, under every schedule."""
    case = case_of(text)
    wanted, broken = outputs(case, program_of(case, share, splits=1))
    assert broken is None, f"{case.id}: {broken}"
    hold_to_reference(case, wanted, f"{share}, a CTA an item")
    for schedule, max_ctas in zip(SCHEDULES, (1, 2, 3, 1), strict=True):
        seen, broken = outputs(case, program_of(case, share, splits=1, max_ctas=max_ctas), schedule)
        assert broken is None, f"{case.id} on {max_ctas} CTAs under {schedule}: {broken}"
        for name, tensor in wanted.items():
            same = torch.equal(seen[name].view(torch.uint8), tensor.view(torch.uint8))
            assert same, f"{case.id} on {max_ctas} CTAs under {schedule}: {name} differs from one CTA an item"


# One warp combines up to 32 parts; eight warps combine more.
@pytest.mark.parametrize("splits", [2, 7, 32, 40])
@pytest.mark.parametrize(
    "text",
    [
        "hd=64,t=3,s_k=700,heads=4,kv_heads=2,inputs=large_logits",
        "hd=128,t=40,s_k=520,causal=true,window=200",
        "hd=512,t=2,s_k=300,heads=3",
    ],
)
def test_any_number_of_splits_gives_attention(text: str, splits: int) -> None:
    """With more splits than key tiles some parts see no key. They have no weight."""
    case = case_of(text)
    seen, broken = outputs(case, program_of(case, splits=splits), "random:5")
    assert broken is None, f"{case.id} in {splits} splits: {broken}"
    hold_to_reference(case, seen, f"{splits} splits")


FAULTS = {
    "no wait of the MMAs for registers": ("hd=128,t=40,s_k=600", without(r"wgmma\.wait_group")),
    "no arrivals on empty stages": ("hd=128,t=4,s_k=500", without(r"mbarrier\.arrive\.shared")),
    "no barrier around the merge": ("hd=64,t=4,s_k=300", without(r"bar\.sync\s+1,")),
    "a combine kernel that does not wait": ("hd=64,t=4,s_k=1100", without(r"griddepcontrol\.wait")),
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

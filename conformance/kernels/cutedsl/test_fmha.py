"""The CuTeDSL attention kernels beyond the harness's cases: every way to share an item, few CTAs, splits, faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.sm90_fmha import program as sm90
from backends.cutedsl.sm90_fmha.plan import Share, Sm90FmhaPlan, standard_plan
from backends.cutedsl.sm100_fmha import program as sm100
from conformance.kernels.cutedsl.execution import SCHEDULES, made, outputs, without
from conformance.kernels.cutedsl.test_fmha_plan import HEAD_DIMENSIONS, PLANS
from conformance.kernels.laws.law import inputs_of, spec_of
from megamoe.contract import Case, HostProgram, Target
from megamoe.judge.tolerance import compare
from megamoe.ops import reference

THREE_GROUPS = Sm90FmhaPlan(64, "rows", 128, 3)


def program_of(target: Target, case: Case, way: Share | Sm90FmhaPlan | None = None, **ways: int) -> HostProgram:
    """`fmha_program` of a kernel; `ways`: splits and max_ctas. Skips the test where CuTeDSL is missing."""
    if target == "sm_100a":
        return made(lambda: sm100.fmha_program(case, **ways))
    plan = standard_plan(case.int("hd"), way) if isinstance(way, str) else way
    return made(lambda: sm90.fmha_program(case, plan, **ways))


def case_of(text: str) -> Case:
    return spec_of("fmha").parse_case(f"fmha:{text}")


def hold_to_reference(case: Case, seen: dict[str, torch.Tensor], what: str) -> None:
    room, inputs, spec = reference(case.op), inputs_of(case), spec_of(case.op)
    verdict = compare(
        case, seen, room.oracle(case, inputs), room.simulated(case, inputs), spec.tolerance, published=False
    )
    assert verdict.passed, f"{case.id} with {what}: {verdict.sentence}"


def hold_to_registers(what: str, artifact: Artifact, kernels: int) -> None:
    names = sorted(artifact.resources)
    assert len(names) == kernels, f"{what}: attention and {kernels - 1} to combine expected, found {names}"
    for kernel, resources in artifact.resources.items():
        assert resources.stack == 0, f"{kernel} has {resources.stack} bytes of stack a thread"


@pytest.mark.parametrize("hd", HEAD_DIMENSIONS)
def test_no_kernel_of_sm_100a_uses_local_memory(hd: int) -> None:
    hold_to_registers(f"hd {hd}", made(lambda: sm100.compiled(hd)), 2)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_no_kernel_of_sm_90a_uses_local_memory(plan: Sm90FmhaPlan) -> None:
    hold_to_registers(str(plan), made(lambda: sm90.compiled(plan)), 3)


# sm_100a: an odd number of tiles an item makes the two softmax warpgroups change places from item to item; the second
# case has items that see no key at all between items that do. sm_90a: two row tiles, several key tiles a warpgroup, a
# ragged end, and items that see no key between items that do; with three warpgroups, row tiles by pairs and one by one,
# and a row tile whose second head sees fewer tiles than its first. With columns, CTAs run in clusters of two.
@pytest.mark.parametrize(
    ("target", "text", "way"),
    [
        ("sm_100a", "hd=64,t=3,s_k=300,batch=2,heads=6,kv_heads=3", None),
        ("sm_100a", "hd=128,t=128,s_k=140,heads=4,causal=true", None),
        ("sm_100a", "hd=128,t=100,s_k=30,heads=4,causal=true", None),
        ("sm_100a", "hd=256,t=5,s_k=130,batch=3", None),
        ("sm_100a", "hd=512,t=4,s_k=200,batch=2", None),
        ("sm_90a", "hd=64,t=128,s_k=450,causal=true", "rows"),
        ("sm_90a", "hd=64,t=1536,s_k=250,heads=3,causal=true", THREE_GROUPS),
        ("sm_90a", "hd=64,t=200,s_k=300,batch=2,heads=2,window=150", THREE_GROUPS),
        ("sm_90a", "hd=256,t=130,s_k=200,heads=2,causal=true", "rows"),
        ("sm_90a", "hd=64,t=70,s_k=500,causal=true,window=150", "keys"),
        ("sm_90a", "hd=128,t=100,s_k=30,heads=2,causal=true", "rows"),
        ("sm_90a", "hd=128,t=3,s_k=400,batch=2,heads=6,kv_heads=3", "keys"),
        ("sm_90a", "hd=256,t=5,s_k=130,batch=3", "keys"),
        ("sm_90a", "hd=64,t=150,s_k=330,heads=2,kv_heads=1,causal=true", THREE_GROUPS),
        ("sm_90a", "hd=512,t=4,s_k=200,batch=2", "columns"),
        ("sm_90a", "hd=512,t=70,s_k=150,causal=true", "columns"),
    ],
)
def test_ctas_and_schedules_change_no_bit(target: Target, text: str, way: Share | Sm90FmhaPlan | None) -> None:
    """Persistent CTAs take any number of work items in turn, whatever completes first."""
    case = case_of(text)
    wanted, broken = outputs(case, program_of(target, case, way, splits=1))
    assert broken is None, f"{case.id}: {broken}"
    hold_to_reference(case, wanted, f"{way or target}, a CTA an item")
    for schedule, max_ctas in (("lazy", 1), ("random:1", 3)):
        seen, broken = outputs(case, program_of(target, case, way, splits=1, max_ctas=max_ctas), schedule)
        assert broken is None, f"{case.id} on {max_ctas} CTAs under {schedule}: {broken}"
        for name, tensor in wanted.items():
            same = torch.equal(seen[name].view(torch.uint8), tensor.view(torch.uint8))
            assert same, f"{case.id} on {max_ctas} CTAs under {schedule}: {name} differs from one CTA an item"


# On sm_90a one warp combines up to 32 parts; eight warps combine more.
SPLITS: dict[Target, tuple[int, ...]] = {"sm_100a": (2, 3, 7, 32), "sm_90a": (2, 7, 32, 40)}
SPLIT_CASES: dict[Target, tuple[str, ...]] = {
    "sm_100a": (
        "hd=64,t=3,s_k=700,heads=4,kv_heads=2,inputs=large_logits",
        "hd=128,t=40,s_k=520,causal=true,window=200",
        "hd=256,t=100,s_k=30,causal=true",
        "hd=512,t=2,s_k=300,heads=3",
    ),
    "sm_90a": (
        "hd=64,t=3,s_k=700,heads=4,kv_heads=2,inputs=large_logits",
        "hd=128,t=40,s_k=520,causal=true,window=200",
        "hd=512,t=2,s_k=300,heads=3",
    ),
}


@pytest.mark.parametrize(
    ("target", "text", "splits"),
    [(target, text, splits) for target in SPLITS for text in SPLIT_CASES[target] for splits in SPLITS[target]],
)
def test_any_number_of_splits_gives_attention(target: Target, text: str, splits: int) -> None:
    """With more splits than key tiles some parts see no key. They have no weight."""
    case = case_of(text)
    seen, broken = outputs(case, program_of(target, case, splits=splits), "random:5")
    assert broken is None, f"{case.id} in {splits} splits: {broken}"
    hold_to_reference(case, seen, f"{splits} splits")


# The sink belongs to one of the warpgroups that share keys, and to one part. Rows that see no key; heads share a tile.
@pytest.mark.parametrize(
    ("text", "way", "splits"),
    [
        ("hd=64,t=3,s_k=300,heads=4,kv_heads=2,causal=true,window=150,sinks=true", "keys", 3),
        ("hd=64,t=150,s_k=100,heads=2,causal=true,sinks=true", "rows", 1),
        ("hd=512,t=3,s_k=150,heads=2,sinks=true,kv=latent", "columns", 2),
    ],
)
def test_a_sink_counts_once(text: str, way: Share, splits: int) -> None:
    case = case_of(text)
    seen, broken = outputs(case, program_of("sm_90a", case, way, splits=splits), "random:3")
    assert broken is None, f"{case.id}: {broken}"
    hold_to_reference(case, seen, f"{way}, {splits} splits")


FAULTS: dict[str, tuple[Target, str, str]] = {
    "P through shared memory without a proxy fence": ("sm_100a", "hd=256,t=4,s_k=300", r"fence\.proxy\.async"),
    "P through tensor memory without waiting for the stores": ("sm_100a", "hd=128,t=4,s_k=300", r"tcgen05\.wait::st"),
    "no deallocation of tensor memory": ("sm_100a", "hd=64,t=4,s_k=128", r"tcgen05\.dealloc"),
    "no arrivals of threads on barriers": ("sm_100a", "hd=64,t=4,s_k=300", r"mbarrier\.arrive\.shared"),
    "no commits of the tensor core": ("sm_100a", "hd=64,t=4,s_k=300", r"tcgen05\.commit"),
    "no wait of the MMAs for registers": ("sm_90a", "hd=128,t=40,s_k=600", r"wgmma\.wait_group"),
    "no arrivals on empty stages": ("sm_90a", "hd=128,t=4,s_k=500", r"mbarrier\.arrive\.shared"),
    "P through shared memory without a proxy fence on sm_90a": ("sm_90a", "hd=512,t=4,s_k=300", r"fence\.proxy\.async"),
    "no barrier around the merge": ("sm_90a", "hd=64,t=4,s_k=300", r"bar\.sync\s+1,"),
    "a combine kernel that does not wait": ("sm_90a", "hd=64,t=4,s_k=1100", r"griddepcontrol\.wait"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name: str) -> None:
    target, text, pattern = FAULTS[name]
    case = case_of(text)
    program = program_of(target, case)
    faulty = replace(program, ptx=without(pattern)(program.ptx))
    assert faulty.ptx != program.ptx, f"{name}: the kernel has no such instruction any more"
    noticed = any(outputs(case, faulty, schedule)[1] for schedule in SCHEDULES)
    assert noticed, f"{name}: no schedule of {', '.join(SCHEDULES)} noticed"

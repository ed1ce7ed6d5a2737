"""The CuTeDSL attention kernels beyond the harness's cases: every way to share an item, few CTAs, splits, faults."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.sm90_fmha import program as sm90
from backends.cutedsl.sm90_fmha.plan import ROW_KEYS, OneRowPlan, Share, Sm90FmhaPlan, standard_plan
from backends.cutedsl.sm100_fmha import program as sm100
from conformance.kernels.cutedsl.execution import SCHEDULES, made, outputs, without
from conformance.kernels.cutedsl.test_fmha_plan import HEAD_DIMENSIONS, LONE, ONE_ROW_TILE, PLANS, RAGGED
from conformance.kernels.laws.law import inputs_of, spec_of
from megamoe.contract import Case, HostProgram, Target
from megamoe.judge.tolerance import compare
from megamoe.ops import reference
from megamoe.ops.fmha import key_rows

THREE_GROUPS = Sm90FmhaPlan(64, "rows", 128, 3)
COPIED = "hd=64,t=3,s_k=60,batch=2,ragged=true,total_q=4,total_k=90"


def program_of(target: Target, case: Case, way: Share | Sm90FmhaPlan | None = None, **ways: int) -> HostProgram:
    """Builds `fmha_program` with a kernel; `ways`: splits and max_ctas. Skips the test if CuTeDSL is missing."""
    if target == "sm_100a":
        return made(lambda: sm100.fmha_program(case, **ways))
    plan = standard_plan(case.int("hd"), way) if isinstance(way, str) else way
    return made(lambda: sm90.fmha_program(case, plan, **ways))


def case_of(text: str) -> Case:
    return spec_of("fmha").parse_case(f"fmha:{text}")


def hold_to_reference(
    case: Case, seen: dict[str, torch.Tensor], what: str, inputs: dict[str, torch.Tensor] | None = None
) -> None:
    room, inputs, spec = reference(case.op), inputs or dict(inputs_of(case)), spec_of(case.op)
    verdict = compare(
        case, seen, room.oracle(case, inputs), room.simulated(case, inputs), spec.tolerance, published=False
    )
    assert verdict.passed, f"{case.id} with {what}: {verdict.sentence}"


def hold_to_attention(
    case: Case, program: HostProgram, what: str, *schedules: str, inputs: dict[str, torch.Tensor] | None = None
) -> None:
    """Runs `program` under each of `schedules` and checks it; `inputs`: None for the reference's."""
    for schedule in schedules:
        seen, broken = outputs(case, program, schedule, inputs)
        assert broken is None, f"{case.id} with {what} under {schedule}: {broken}"
        hold_to_reference(case, seen, f"{what} under {schedule}", inputs)


def hold_to_registers(what: str, artifact: Artifact, kernels: int) -> None:
    names = sorted(artifact.resources)
    assert len(names) == kernels, f"{what}: attention and {kernels - 1} to combine expected, found {names}"
    for kernel, resources in artifact.resources.items():
        assert resources.stack == 0, f"{kernel} has {resources.stack} bytes of stack a thread"


@pytest.mark.parametrize("hd", HEAD_DIMENSIONS)
def test_no_kernel_of_sm_100a_uses_local_memory(hd: int) -> None:
    hold_to_registers(f"hd {hd}", made(lambda: sm100.compiled(hd)), 2)


# Skip the ragged plan of hd 64: it holds less in registers than the plan of 224 keys, whose stack
# test_a_sequence_has_the_bits_of_a_batch_of_one checks.
STACKS = (
    *(plan for plan in (*PLANS, *LONE) if plan not in RAGGED),
    *(replace(plan, ragged=True) for plan in RAGGED if plan.hd != 64),
)


@pytest.mark.parametrize("plan", STACKS, ids=str)
def test_no_kernel_of_sm_90a_uses_local_memory(plan: Sm90FmhaPlan) -> None:
    hold_to_registers(str(plan), made(lambda: sm90.compiled(plan)), 2 if plan.share == "lone" else 3)


@pytest.mark.parametrize("keys", ROW_KEYS)
@pytest.mark.parametrize("hd", [64, 128])
def test_no_kernel_of_one_row_uses_local_memory(hd: int, keys: int) -> None:
    hold_to_registers(f"hd {hd}, {keys} keys", made(lambda: sm90.compiled_row(OneRowPlan(hd, keys))), 1)


# sm_100a: with an odd number of tiles an item, the two softmax warpgroups change places from item to item; in the
# second case, items that see no key at all lie between items that do. sm_90a: two row tiles, several key tiles a
# warpgroup, a partial last tile, and items that see no key between items that do; with three warpgroups, row tiles in
# pairs and singly, and a row tile whose second head sees fewer tiles than its first; with two, heads of two row tiles
# in whole rounds. With columns, CTAs run in clusters of two.
@pytest.mark.parametrize(
    ("target", "text", "way"),
    [
        ("sm_100a", "hd=64,t=3,s_k=300,heads=6,kv_heads=3", None),
        ("sm_100a", "hd=128,t=128,s_k=140,heads=4,causal=true", None),
        ("sm_100a", "hd=128,t=100,s_k=30,heads=4,causal=true", None),
        ("sm_100a", "hd=256,t=5,s_k=130,batch=3", None),
        ("sm_100a", "hd=512,t=4,s_k=200,batch=2", None),
        ("sm_90a", "hd=128,t=256,s_k=450,heads=2,causal=true", "rows"),
        ("sm_90a", "hd=64,t=1536,s_k=250,heads=3,causal=true", THREE_GROUPS),
        ("sm_90a", "hd=64,t=200,s_k=300,batch=2,heads=2,window=150", THREE_GROUPS),
        ("sm_90a", "hd=256,t=130,s_k=200,heads=2,causal=true", "rows"),
        ("sm_90a", "hd=64,t=70,s_k=500,causal=true,window=150", "keys"),
        ("sm_90a", "hd=128,t=100,s_k=30,heads=2,causal=true", "rows"),
        ("sm_90a", "hd=256,t=3,s_k=200,heads=6,kv_heads=3", "keys"),
        ("sm_90a", "hd=256,t=5,s_k=130,batch=3", "keys"),
        ("sm_90a", "hd=64,t=150,s_k=330,heads=2,kv_heads=1,causal=true", THREE_GROUPS),
        ("sm_90a", "hd=512,t=4,s_k=200,batch=2", None),
        ("sm_90a", "hd=512,t=70,s_k=150,causal=true", "columns"),
        ("sm_90a", "hd=512,t=70,s_k=150,causal=true", ONE_ROW_TILE),
    ],
)
def test_ctas_and_schedules_change_no_bit(target: Target, text: str, way: Share | Sm90FmhaPlan | None) -> None:
    """Persistent CTAs take any number of work items in turn, in any order of completion."""
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
SPLITS: dict[Target, tuple[int, ...]] = {"sm_100a": (2, 3, 7, 32), "sm_90a": (2, 7, 32, 33)}
SPLIT_CASES: dict[Target, tuple[str, ...]] = {
    "sm_100a": (
        "hd=64,t=3,s_k=520,heads=2,kv_heads=1,inputs=large_logits",
        "hd=128,t=40,s_k=520,causal=true,window=200",
        "hd=256,t=100,s_k=30,causal=true",
        "hd=512,t=2,s_k=300,heads=2",
    ),
    "sm_90a": (
        "hd=64,t=3,s_k=520,heads=2,kv_heads=1,inputs=large_logits",
        "hd=128,t=129,s_k=520,causal=true,window=200",
        "hd=512,t=2,s_k=300,heads=2",
    ),
}


@pytest.mark.parametrize(
    ("target", "text", "splits"),
    [(target, text, splits) for target in SPLITS for text in SPLIT_CASES[target] for splits in SPLITS[target]],
)
def test_any_number_of_splits_gives_attention(target: Target, text: str, splits: int) -> None:
    """With more splits than key tiles, some parts see no key and have no weight."""
    case = case_of(text)
    hold_to_attention(case, program_of(target, case, splits=splits), f"{splits} splits", "random:5")


@pytest.mark.parametrize("splits", [3, 33])
def test_halves_of_columns_and_short_parts_give_attention(splits: int) -> None:
    case = case_of("hd=512,t=2,s_k=330,heads=8,kv_heads=1")
    program = program_of("sm_90a", case, ONE_ROW_TILE, splits=splits)
    hold_to_attention(case, program, f"{ONE_ROW_TILE}, {splits} splits", "random:5")


# A whole round of keys and a partial one; keys hidden by a window, before the end of the first round and within it; two
# heads of a KV head; large scores; no lse.
@pytest.mark.parametrize(
    "text",
    [
        "hd=64,t=1,s_k=128",
        "hd=64,t=1,s_k=333,causal=true,window=100,batch=2",
        "hd=128,t=1,s_k=65,heads=4,kv_heads=2,inputs=large_logits",
        "hd=128,t=1,s_k=512,lse=false,window=500",
    ],
)
def test_one_row_gives_attention(text: str) -> None:
    case = case_of(text)
    program = program_of("sm_90a", case)
    assert "sm90_fmha_row" in program.ptx, f"{case.id} is computed in tiles"
    hold_to_attention(case, program, "a CTA a row", "eager", "random:4")


# Rows of two heads in a row tile; row tiles in which one row sees no key of a part; parts hidden from all rows by a
# window; a part of one key; large scores; no lse; one latent tensor.
@pytest.mark.parametrize(
    "text",
    [
        "hd=64,t=100,s_k=200,heads=2,kv_heads=1,causal=true,inputs=large_logits",
        "hd=64,t=3,s_k=513,batch=2,causal=true,window=90,lse=false",
        "hd=64,t=128,s_k=128,causal=true,sinks=true",
        "hd=128,t=5,s_k=257,heads=4,kv_heads=2,kv=latent",
    ],
)
def test_a_lone_warpgroup_gives_attention(text: str) -> None:
    case = case_of(text)
    program = program_of("sm_90a", case)
    assert "_lone_" in program.ptx, f"{case.id} has another kernel"
    hold_to_attention(case, program, "a tile a CTA", "lazy", "random:4")


# The sink belongs to one of the warpgroups that share keys, and to one part. Rows that see no key; heads share a tile.
@pytest.mark.parametrize(
    ("text", "way", "splits"),
    [
        ("hd=64,t=3,s_k=300,heads=4,kv_heads=2,causal=true,window=150,sinks=true", "keys", 3),
        ("hd=64,t=150,s_k=100,heads=2,causal=true,sinks=true", THREE_GROUPS, 1),
        ("hd=512,t=3,s_k=150,heads=2,sinks=true,kv=latent", "columns", 2),
    ],
)
def test_a_sink_counts_once(text: str, way: Share | Sm90FmhaPlan, splits: int) -> None:
    case = case_of(text)
    hold_to_attention(case, program_of("sm_90a", case, way, splits=splits), f"{way}, {splits} splits", "random:3")


def rising(case: Case, factor: float) -> dict[str, torch.Tensor]:
    """Inputs whose scores are `factor` times as large in the second half of the keys, in every other head."""
    inputs = {name: tensor.clone() for name, tensor in inputs_of(case).items()}
    inputs["k"][:, ::2, case.int("s_k") // 2 :] *= factor
    return inputs


SCALED, AGAIN = r"div\.rn\.f32", r"ld\.shared\.b16"
"""Instructions that only rows above their earlier maxima need. The first finds the maximum by which a row is rescaled,
after a rise of 2^8 to 2^100. The others read Q and K where a row is computed again, after a larger rise."""
RISES: tuple[tuple[str, Share | Sm90FmhaPlan, float, str], ...] = (
    ("hd=64,t=4,s_k=300,heads=2,kv_heads=1,window=290,causal=true", "keys", 8.0, SCALED),
    ("hd=64,t=4,s_k=260", THREE_GROUPS, 256.0, AGAIN),
    ("hd=128,t=4,s_k=460", "rows", 8.0, SCALED),
    ("hd=128,t=4,s_k=260,causal=true", "rows", 256.0, AGAIN),
)


@pytest.mark.parametrize(("text", "way", "factor", "fault"), RISES)
def test_scores_may_rise_above_the_maxima_before_them(
    text: str, way: Share | Sm90FmhaPlan, factor: float, fault: str
) -> None:
    """The case needs the instructions that `fault` removes: without them the kernel breaks a rule."""
    case = case_of(text)
    inputs = rising(case, factor)
    program = program_of("sm_90a", case, way, splits=1)
    hold_to_attention(case, program, f"scores {factor} times as large", "random:2", inputs=inputs)
    faulty = replace(program, ptx=without(fault)(program.ptx))
    assert outputs(case, faulty, inputs=inputs)[1], f"{case.id}: no row needs {fault}, scores {factor} times as large"


# Warpgroups that share keys, rows, columns. One of the two sequences has no keys for some rows of the other's length.
@pytest.mark.parametrize(
    ("text", "way", "splits"),
    [
        ("hd=64,t=3,s_k=150,batch=2,heads=2,ragged=true,total_q=4,total_k=190", "keys", 2),
        ("hd=64,t=70,s_k=300,batch=2,causal=true,ragged=true,total_q=90,total_k=640,page_size=64", "rows", 1),
        ("hd=512,t=2,s_k=150,batch=2,heads=3,kv=latent,ragged=true,total_q=3,total_k=384,page_size=64", "columns", 1),
    ],
)
def test_a_sequence_has_the_bits_of_a_batch_of_one(text: str, way: Share, splits: int) -> None:
    """At equal plans, whichever warps load Q, K and V, and whether or not keys are in pages."""
    case = case_of(text)
    inputs = inputs_of(case)
    program = program_of("sm_90a", case, way, splits=splits)
    together, broken = outputs(case, program, "random:3")
    assert broken is None, f"{case.id}: {broken}"
    plan = replace(standard_plan(case.int("hd"), way), ragged=True, page_size=case.int("page_size"))
    hold_to_registers(str(plan), sm90.compiled(plan), 3)
    for number, (start, end) in enumerate(pairwise(inputs["cu_seqlens_q"].tolist())):
        rows = key_rows(case, inputs, number)
        if start == end or not len(rows):
            continue
        sizes = {"ragged": False, "total_q": 0, "total_k": 0, "page_size": 0, "batch": 1, "t": end - start}
        alone = spec_of("fmha").vary(case, s_k=len(rows), **sizes)
        own = {name: inputs[name][rows].transpose(0, 1)[None] for name in ("k", "v") if name in inputs}
        own["q"] = inputs["q"][start:end].transpose(0, 1)[None]
        single = program_of("sm_90a", alone, way, splits=splits)
        wanted, broken = outputs(alone, single, inputs=own)
        assert broken is None, f"{alone.id}: {broken}"
        for name, tensor in wanted.items():
            same = torch.equal(together[name][start:end], tensor[0].transpose(0, 1))
            assert same, f"{case.id}: {name} of sequence {number} differs from that of {alone.id}"


FAULTS: dict[str, tuple[Target, str, str]] = {
    "P through shared memory without a proxy fence": ("sm_100a", "hd=256,t=4,s_k=300", r"fence\.proxy\.async"),
    "P through tensor memory without waiting for the stores": ("sm_100a", "hd=128,t=4,s_k=300", r"tcgen05\.wait::st"),
    "no deallocation of tensor memory": ("sm_100a", "hd=64,t=4,s_k=128", r"tcgen05\.dealloc"),
    "no arrivals of threads on barriers": ("sm_100a", "hd=64,t=4,s_k=300", r"mbarrier\.arrive\.shared"),
    "no commits of the tensor core": ("sm_100a", "hd=64,t=4,s_k=300", r"tcgen05\.commit"),
    "no wait of the MMAs for registers": ("sm_90a", "hd=128,t=129,s_k=600", r"wgmma\.wait_group"),
    "no arrivals on empty stages": ("sm_90a", "hd=256,t=4,s_k=500", r"mbarrier\.arrive\.shared"),
    "P through shared memory without a proxy fence on sm_90a": ("sm_90a", "hd=512,t=4,s_k=300", r"fence\.proxy\.async"),
    "no barrier around the merge": ("sm_90a", "hd=256,t=4,s_k=300", r"bar\.sync\s+1,"),
    "no barrier before one is waited for": ("sm_90a", "hd=64,t=2,s_k=128", r"(bar|barrier)\.sync"),
    "a lone warpgroup does not wait for the MMAs": ("sm_90a", "hd=64,t=2,s_k=128", r"wgmma\.wait_group"),
    "no barrier before warps are added up": ("sm_90a", "hd=64,t=1,s_k=128", r"(bar|barrier)\.sync"),
    "Q copied without a wait": ("sm_90a", COPIED, r"cp\.async\.wait_group"),
    "Q copied without a proxy fence": ("sm_90a", COPIED, r"fence\.proxy\.async"),
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

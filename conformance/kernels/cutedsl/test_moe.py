"""The CuTeDSL MoE kernels: plans that fit the machine, pairs and single CTAs, few CTAs, planted faults."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from backends.cutedsl import BACKEND, CTA_PAIRS, SINGLE_CTAS
from backends.cutedsl.device import TMEM_COLUMNS
from backends.cutedsl.moe.layout import SF_VEC_SIZE, TILE_M
from backends.cutedsl.sm100_moe.plan import (
    H_COLUMNS,
    HALF_N,
    Sm100MoePlan,
    half_of_tile,
    pays_as_pair,
    swiglu_registers,
)
from backends.cutedsl.sm100_moe.program import compiled, moe_program
from conformance.kernels.cutedsl.execution import SCHEDULES, made, outputs, without
from conformance.kernels.laws.law import inputs_of, spec_of
from megamoe.codec.nvfp4 import deinterleave, interleave
from megamoe.contract import Case, HostProgram
from megamoe.judge.comparison import compared, expected_of
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
    """The first output that differs in a bit outside padding rows, or None."""
    free = reference(case.op).free(case, inputs_of(case))
    for name, tensor in one.items():
        differs = tensor.view(torch.uint8) != other[name].view(torch.uint8)
        if name in free:
            wide = tensor.element_size() // free[name].element_size()
            differs &= ~free[name].repeat_interleave(wide, dim=-1)
        if bool(differs.any()):
            return name
    return None


# Only L1 has the interleave compiled in, so compile the layer with one and L1 with another.
@pytest.mark.parametrize(("stage", "interleave", "kernels"), [("layer", 8, 5), ("l1", 64, 3)])
@pytest.mark.parametrize("cta_group", CTA_GROUPS)
def test_no_kernel_uses_local_memory(cta_group: int, stage: str, interleave: int, kernels: int) -> None:
    artifact = made(lambda: compiled(stage, cta_group, interleave))
    assert len(artifact.resources) == kernels, f"{kernels} kernels expected of {stage}: {sorted(artifact.resources)}"
    for kernel, resources in artifact.resources.items():
        assert resources.stack == 0, f"{kernel} has {resources.stack} bytes of stack a thread"


# Experts of one and of three row tiles, K and W that end within a tile, and each stage stored alone.
@pytest.mark.parametrize(
    "text",
    [
        "hidden=128,intermediate=128,num_experts=2,tokens=150,topk=2,load=skewed,clamp=0.5",
        "hidden=384,intermediate=128,num_experts=2,tokens=260,topk=1,weight=before,interleave=64,stage=l1",
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
    """Gate and up from different rows of W1 meet in the registers: no row of h may look right by chance."""
    case = case_of("hidden=128,intermediate=128,num_experts=2,tokens=20,stage=l1")
    program = program_of(spec_of(case.op).vary(case, interleave=64), cta_group=cta_group)
    seen, broken = outputs(case, program)
    assert broken is None, f"{case.id}: {broken}"
    verdict = compared(spec_of(case.op), expected_of(case, inputs_of(case)), seen)
    assert not verdict.passed, f"{case.id}: the kernel for an interleave of 64 gives the outputs of 8"


L1 = "hidden=256,intermediate=128,num_experts=2,tokens=20,interleave=64,stage=l1"
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


MAX_SMEM = 227 * 1024
PLANS = [Sm100MoePlan(cta_group, swiglu) for cta_group in (1, 2) for swiglu in (True, False)]


def columns_of(cta_group: int, turn: int) -> dict[int, set[int]]:
    """Columns of tensor memory that the epilogue reads of a CTA's tile, by step."""
    steps = range(Sm100MoePlan(cta_group, swiglu=True).halves)
    first = {step: half_of_tile(cta_group, step, turn)[0] for step in steps}
    return {step: set(range(column, column + HALF_N)) for step, column in first.items()}


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_tensor_memory_holds_accumulators_and_scales(plan: Sm100MoePlan) -> None:
    read = set[int]().union(*columns_of(plan.cta_group, 0).values(), *columns_of(plan.cta_group, 1).values())
    assert max(read) < plan.tmem_sf, f"{plan}: accumulators reach column {max(read)}, scales begin at {plan.tmem_sf}"
    end = plan.tmem_sf + plan.sf_slots * plan.sf_columns
    assert end <= TMEM_COLUMNS, f"{plan}: {plan.sf_slots} slots of scales end at column {end}"
    assert plan.sf_slots >= 2, f"{plan}: with one slot no scales are copied while others are read"


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_shared_memory_fits(plan: Sm100MoePlan) -> None:
    barriers = 16 * (plan.ring_stages + plan.acc_stages + 1)
    total = plan.ring_stages * plan.stage_bytes + plan.store_bytes + barriers
    assert total + 1024 <= MAX_SMEM, f"{plan}: {total} bytes of shared memory, {MAX_SMEM} exist"
    assert plan.ring_stages >= 4, f"{plan}: a ring of {plan.ring_stages} stages cannot hide a load"


@pytest.mark.parametrize("cta_group", [1, 2])
@pytest.mark.parametrize("turn", [0, 1])
def test_the_next_tile_overwrites_nothing_that_is_still_to_be_read(cta_group: int, turn: int) -> None:
    """A pair's next tile begins after the epilogue's first step of the previous one; a single CTA's begins at once."""
    following = set[int]().union(*columns_of(cta_group, 1 - turn).values())
    read = 1 if cta_group == 2 else 0
    unread = [columns for step, columns in columns_of(cta_group, turn).items() if step >= read]
    assert unread, f"CTA group {cta_group}: nothing is left to be read, so that nothing is shown"
    for columns in unread:
        assert not columns & following, f"CTA group {cta_group}: columns {min(columns)}.. are overwritten unread"


@pytest.mark.parametrize("turn", [0, 1])
def test_a_pair_reads_the_halves_of_its_own_accumulator(turn: int) -> None:
    begin = turn * HALF_N
    for step in (0, 1):
        column, half = half_of_tile(2, step, turn)
        assert column == begin + half * HALF_N, f"turn {turn}, step {step}: half {half} is not at column {column}"


@pytest.mark.parametrize("granularity", [8, 16, 32, 64])
def test_gate_and_up_of_an_h_column_are_in_the_registers_that_the_plan_names(granularity: int) -> None:
    """Gate rows count from 0, up rows from 1000, interleaved: register r holds column r, row r of W1."""
    gate, up = torch.arange(H_COLUMNS)[:, None], torch.arange(1000, 1000 + H_COLUMNS)[:, None]
    registers = interleave(gate, up, granularity).flatten().tolist()
    for column in range(H_COLUMNS):
        seen = tuple(registers[register] for register in swiglu_registers(granularity, column))
        assert seen == (column, 1000 + column), f"interleave {granularity}: h column {column} is made of rows {seen}"
    again = deinterleave(torch.tensor(registers)[:, None], granularity)[0].flatten().tolist()
    assert again == gate.flatten().tolist(), f"interleave {granularity} cannot be undone"


@pytest.mark.parametrize("granularity", [8, 16, 32, 64])
def test_every_register_of_a_half_is_used_once_and_a_block_lies_in_one_thread(granularity: int) -> None:
    pairs = [swiglu_registers(granularity, column) for column in range(H_COLUMNS)]
    used = sorted(itertools.chain.from_iterable(pairs))
    assert used == list(range(HALF_N)), f"interleave {granularity}: registers {used}"
    assert H_COLUMNS % SF_VEC_SIZE == 0, "a block of 16 would need columns of two threads"


def test_pairs_are_for_experts_of_more_than_one_tile_of_rows() -> None:
    assert not pays_as_pair(TILE_M * 4, num_experts=4), "128 rows an expert leave the second CTA nothing to do"
    assert pays_as_pair(TILE_M * 4 + 1, num_experts=4), "more than 128 rows an expert are two tiles"


def test_the_backends_say_which_way_they_compute() -> None:
    names = {backend.name for backend in (BACKEND, SINGLE_CTAS, CTA_PAIRS)}
    assert len(names) == 3, f"backends that compute differently share a name: {names}"
    for backend in (BACKEND, SINGLE_CTAS, CTA_PAIRS):
        assert backend.targets("nvfp4_moe") == ("sm_90a", "sm_100a"), (
            f"{backend.name} has nvfp4_moe for {backend.targets('nvfp4_moe')}"
        )

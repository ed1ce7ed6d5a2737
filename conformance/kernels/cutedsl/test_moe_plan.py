"""The plan of the CuTeDSL MoE kernels fits the machine. Needs no CuTeDSL."""

from __future__ import annotations

import itertools

import pytest
import torch

from backends.cutedsl import BACKEND, CTA_PAIRS, SINGLE_CTAS
from backends.cutedsl.device import TMEM_COLUMNS
from backends.cutedsl.sm100_moe.plan import (
    H_COLUMNS,
    HALF_N,
    SF_VEC_SIZE,
    TILE_M,
    Sm100MoePlan,
    half_of_tile,
    pays_as_pair,
    swiglu_registers,
)
from megamoe.codec.nvfp4 import deinterleave, interleave

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
    """A pair's tile begins when the epilogue has read the first step of the one before; a single CTA's at once."""
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
    """Rows of gate numbered from 0 and of up from 1000, interleaved: register r holds column r, that is row r of W1."""
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
        assert backend.targets("nvfp4_moe") == ("sm_100a",), (
            f"{backend.name} has nvfp4_moe for {backend.targets('nvfp4_moe')}"
        )

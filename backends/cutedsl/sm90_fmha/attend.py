# ruff: noqa: N815
# pyright: reportMissingImports=false
"""A consumer warpgroup: S = Q K^T, softmax, O += P V over the key tiles of a work item, all in registers."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from backends.cutedsl.sm90_fmha.operands import make_pv_mma, make_qk_mma
from backends.cutedsl.sm90_fmha.plan import GROUP_M, GROUPS, Sm90FmhaPlan
from backends.cutedsl.sm90_fmha.ring import Barriers, Place, advanced, advanced_by, release, wait_full


class Operands(NamedTuple):
    """Descriptors of Q, K and V in shared memory, as wgmma takes them: (MMA, MMA_M or N, MMA_K, stage)."""

    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrV: cute.Tensor


class Registers(NamedTuple):
    """S (64, tile_n) and O (64, o_columns) f32 as flat accumulators, P bf16."""

    rS: cute.Tensor
    rP: cute.Tensor
    rO: cute.Tensor


def make_operands(plan: Sm90FmhaPlan, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor) -> Operands:
    """The views of all stages."""
    qk_thread, pv_thread = make_qk_mma(plan).get_slice(0), make_pv_mma(plan).get_slice(0)
    return Operands(
        qk_thread.make_fragment_A(qk_thread.partition_A(sQ)),
        qk_thread.make_fragment_B(qk_thread.partition_B(sK)),
        pv_thread.make_fragment_B(pv_thread.partition_B(sV)),
    )


def make_registers(plan: Sm90FmhaPlan) -> Registers:
    """Accumulators, flat, and P."""
    return Registers(
        cute.make_rmem_tensor(GROUP_M * plan.tile_n // 128, Float32),
        cute.make_rmem_tensor(GROUP_M * plan.tile_n // 128, BFloat16),
        cute.make_rmem_tensor(GROUP_M * plan.o_columns // 128, Float32),
    )


@cute.jit
def issue_qk(
    plan: Sm90FmhaPlan,
    operands: Operands,
    rS: cute.Tensor,
    q_stage: Int32,
    kv: Barriers,
    place: Place,
    first: Int32,
    drain: cutlass.Constexpr,
):
    """Issue S = Q K^T of the tile whose first slab is at `place`. With `drain`, wait for it, and release each slab."""
    qk_mma = make_qk_mma(plan)
    qk_thread = qk_mma.get_slice(0)
    tSrS = cute.make_tensor(
        rS.iterator, qk_thread.make_fragment_C(qk_thread.partition_shape_C((GROUP_M, plan.tile_n))).layout
    )
    k_blocks = cute.size(operands.tSrK, mode=[2])
    before = place.stage
    warpgroup.fence()
    for slab in cutlass.range_constexpr(plan.slabs):
        wait_full(kv, place)
        for k_block in cutlass.range_constexpr(k_blocks):
            qk_mma.set(warpgroup.Field.ACCUMULATE, slab != 0 or k_block != 0)
            cute.gemm(
                qk_mma,
                tSrS,
                operands.tSrQ[None, None, slab * k_blocks + k_block, q_stage],
                operands.tSrK[None, None, k_block, place.stage],
                tSrS,
            )
        warpgroup.commit_group()
        if cutlass.const_expr(drain and slab > 0):
            warpgroup.wait_group(1)
            release(kv, before)
        before = place.stage
        place = advanced(place, first, plan.ring_stages)
    if cutlass.const_expr(drain):
        warpgroup.wait_group(0)
        release(kv, before)
    return place


@cute.jit
def issue_pv(
    plan: Sm90FmhaPlan, operands: Operands, registers: Registers, kv: Barriers, place: Place, first: Int32, group: Int32
):
    """Issue O += P V of the tile whose first slab is at `place`, this warpgroup's columns. Returns the next place."""
    pv_mma = make_pv_mma(plan)
    pv_mma.set(warpgroup.Field.ACCUMULATE, True)
    pv_thread = pv_mma.get_slice(0)
    n = cutlass.const_expr(min(plan.o_columns, plan.slab_columns))
    layout_o = pv_thread.make_fragment_C(pv_thread.partition_shape_C((GROUP_M, n))).layout
    tOrP = cute.make_tensor(
        registers.rP.iterator,
        pv_thread.make_fragment_A(pv_thread.partition_shape_A((GROUP_M, plan.tile_n))).layout,
    )
    own = own_slab(plan, place, first, group)
    warpgroup.fence()
    for part in cutlass.range_constexpr(plan.o_columns // n):
        wait_full(kv, own)
        tOrO = cute.make_tensor(registers.rO.iterator + part * (GROUP_M * n // 128), layout_o)
        for k_block in cutlass.range_constexpr(plan.tile_n // 16):
            cute.gemm(
                pv_mma,
                tOrO,
                tOrP[None, None, k_block],
                operands.tOrV[None, None, k_block, own.stage],
                tOrO,
            )
        own = advanced(own, first, plan.ring_stages)
    warpgroup.commit_group()
    return advanced_by(place, first, plan.ring_stages, plan.slabs)


def own_slab(plan: Sm90FmhaPlan, place: Place, first: Int32, group: Int32) -> Place:
    """The first slab of a V tile that this warpgroup reads."""
    if plan.share != "columns":
        return place
    return advanced_by(place, first, plan.ring_stages, group * (plan.slabs // GROUPS))


@cute.jit
def release_v(plan: Sm90FmhaPlan, kv: Barriers, place: Place, first: Int32):
    """Release the V tile whose first slab is at `place`. Slabs of the other warpgroup are waited for first: an arrival
    before the slab is full could count for the round before."""
    for _ in cutlass.range_constexpr(plan.slabs):
        if cutlass.const_expr(plan.share == "columns"):
            wait_full(kv, place)
        release(kv, place.stage)
        place = advanced(place, first, plan.ring_stages)

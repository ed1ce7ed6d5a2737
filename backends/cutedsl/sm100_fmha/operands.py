# ruff: noqa: N815
# pyright: reportMissingImports=false
"""Tiled MMAs of the attention kernel, the shared-memory layouts of their operands, and their fragments.

All of it is known at compile time. But a CuTeDSL value belongs to the region that makes it, and setting ACCUMULATE on
an MMA rebinds it. So every user makes its own, which costs nothing in the kernel.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers

from backends.cutedsl.sm100_fmha.plan import S_STAGES, SLAB_COLUMNS, TILE_M, TILE_N, Sm100FmhaPlan


class FmhaSmem(NamedTuple):
    """Tensors in shared memory.

    sK and sV are the same ring, as K slabs and as V slabs. sP exists only if P has no columns in tensor memory. The
    rest are row statistics, (row, stage) f32: sStat has the factor of O, or the row sum at the end of an item; sMax the
    row maximum at the end; sBase the maximum for the other softmax warpgroup, if there are two.
    """

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sP: cute.Tensor | None
    sStat: cute.Tensor
    sMax: cute.Tensor
    sBase: cute.Tensor | None


class Fragments(NamedTuple):
    """Operands of one product's instructions, stages last: the accumulator in tensor memory, A and B."""

    tCtC: cute.Tensor
    tCrA: cute.Tensor
    tCrB: cute.Tensor


QK_TILER = (TILE_M, TILE_N, SLAB_COLUMNS)


def pv_tiler(plan: Sm100FmhaPlan) -> tuple[int, int, int]:
    """(rows, columns of O, keys) of one V slab."""
    return (TILE_M, plan.pv_tile_n, plan.pv_tile_k)


def make_qk_mma() -> cute.TiledMma:
    """S = Q K^T, both from shared memory, K-major."""
    k_major = OperandMajorMode.K
    return blackwell_helpers.make_trivial_tiled_mma(
        BFloat16, BFloat16, k_major, k_major, Float32, tcgen05.CtaGroup.ONE, QK_TILER[:2]
    )


def make_pv_mma(plan: Sm100FmhaPlan) -> cute.TiledMma:
    """O = P V, with P from tensor or shared memory and V in memory order, MN-major."""
    p_source = tcgen05.OperandSource.TMEM if plan.p_in_tmem else tcgen05.OperandSource.SMEM
    return blackwell_helpers.make_trivial_tiled_mma(
        BFloat16,
        BFloat16,
        OperandMajorMode.K,
        OperandMajorMode.MN,
        Float32,
        tcgen05.CtaGroup.ONE,
        pv_tiler(plan)[:2],
        p_source,
    )


def layout_q(plan: Sm100FmhaPlan) -> cute.ComposedLayout:
    """sQ: a stage is a slab of 64 columns."""
    stages = plan.q_stages * plan.k_slabs
    return blackwell_helpers.make_smem_layout_a(make_qk_mma(), QK_TILER, BFloat16, stages)


def layout_k(plan: Sm100FmhaPlan) -> cute.ComposedLayout:
    """The ring as K slabs."""
    return blackwell_helpers.make_smem_layout_b(make_qk_mma(), QK_TILER, BFloat16, plan.ring_stages)


def layout_v(plan: Sm100FmhaPlan) -> cute.ComposedLayout:
    """The ring as V slabs."""
    return blackwell_helpers.make_smem_layout_b(make_pv_mma(plan), pv_tiler(plan), BFloat16, plan.ring_stages)


def layout_p(plan: Sm100FmhaPlan) -> cute.ComposedLayout:
    """P as the A operand of a whole key tile: its layout in shared memory, or its shape in tensor memory."""
    tiler = (TILE_M, plan.pv_tile_n, TILE_N)
    return blackwell_helpers.make_smem_layout_a(make_pv_mma(plan), tiler, BFloat16, plan.p_stages)


def make_fragments(plan: Sm100FmhaPlan, tmem_ptr: cute.Pointer, smem: FmhaSmem) -> tuple[Fragments, Fragments]:
    """The fragments of S = Q K^T and of O = P V."""
    qk_thread, pv_thread = make_qk_mma().get_slice(0), make_pv_mma(plan).get_slice(0)
    tStS = qk_thread.make_fragment_C(cute.append(qk_thread.partition_shape_C(QK_TILER[:2]), S_STAGES))
    tStS = cute.make_tensor(tmem_ptr, tStS.layout)
    tOtO = pv_thread.make_fragment_C(pv_thread.partition_shape_C(pv_tiler(plan)[:2]))
    tOtO = cute.make_tensor(tmem_ptr + plan.tmem_o, tOtO.layout)
    if plan.p_in_tmem:
        tOrP = pv_thread.make_fragment_A(cute.make_tensor(tmem_ptr, layout_p(plan).outer))
        tOrP = cute.make_tensor(cute.recast_ptr(tmem_ptr + plan.tmem_p, dtype=BFloat16), tOrP.layout)
    else:
        tOrP = pv_thread.make_fragment_A(smem.sP)
    qk = Fragments(tStS, qk_thread.make_fragment_A(smem.sQ), qk_thread.make_fragment_B(smem.sK))
    return qk, Fragments(tOtO, tOrP, pv_thread.make_fragment_B(smem.sV))

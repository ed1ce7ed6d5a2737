# ruff: noqa: N815
# pyright: reportMissingImports=false
"""Operands of a grouped GEMM: tiled MMA, shared-memory layouts, TMA views, accumulators and scales in tensor memory.

A CTA loads plain tiles into its own shared memory: rows of A, its part of the rows of W, and the block scales of both,
four atoms of 512 bytes, 2 KiB contiguous in memory. Each CTA of a pair has the scales of W for all rows of the tile
(facts.md 2.4).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float4E2M1FN, Float8E4M3FN, Int32, Int64, memory
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers, blockscaled_layout

from backends.cutedsl.moe.layout import SF_VEC_SIZE, TILE_M
from backends.cutedsl.moe.nvfp4 import Nvfp4
from backends.cutedsl.sm100_moe.plan import HALF_N, TILE_K, Sm100MoePlan
from backends.cutedsl.tcgen05 import CHUNK, load_row
from backends.cutedsl.tma import TmaTensor, TmaViews, tma_views

SF_WORDS = TILE_M * TILE_K // SF_VEC_SIZE // 8
"""64-bit words of the scales of 128 rows in a ring stage."""


class Operand(NamedTuple):
    """Codes (row, K, expert) and scales (word, row tile) of one operand for TMA."""

    codes: TmaTensor
    scales: TmaTensor


class GroupedGemm(NamedTuple):
    """One product for all experts: operands, the schedule, rows of an expert's W, tiles of K."""

    a: Operand
    w: Operand
    mUnits: cute.Tensor
    w_rows: Int32
    k_tiles: Int32


class RingSmem(NamedTuple):
    """The ring: codes of A and W, swizzled, (MMA, rows, K blocks, stage); their scales, (words, row tile, stage)."""

    sA: cute.Tensor
    sW: cute.Tensor
    sSFA: cute.Tensor
    sSFW: cute.Tensor


def cta_group_of(plan: Sm100MoePlan) -> tcgen05.CtaGroup:
    """The CTA group as CuTeDSL names it."""
    return tcgen05.CtaGroup.TWO if plan.cta_group == 2 else tcgen05.CtaGroup.ONE


def tiler(plan: Sm100MoePlan) -> tuple[int, int, int]:
    """(rows, columns, K) of a tile of one CTA or pair."""
    return (TILE_M * plan.cta_group, plan.tile_n, TILE_K)


def make_mma(plan: Sm100MoePlan) -> cute.TiledMma:
    """kind::mxf4nvf4 with a ue4m3 scale per 16 elements, both operands from shared memory, K-major."""
    k_major = OperandMajorMode.K
    return blackwell_helpers.make_blockscaled_trivial_tiled_mma(
        Float4E2M1FN, Float4E2M1FN, k_major, k_major, Float8E4M3FN, SF_VEC_SIZE, cta_group_of(plan), tiler(plan)[:2]
    )


def layout_a(plan: Sm100MoePlan) -> cute.ComposedLayout:
    """The ring of A's codes as the MMA reads it."""
    return blackwell_helpers.make_smem_layout_a(make_mma(plan), tiler(plan), Float4E2M1FN, plan.ring_stages)


def layout_w(plan: Sm100MoePlan) -> cute.ComposedLayout:
    """The ring of W's codes as the MMA reads it."""
    return blackwell_helpers.make_smem_layout_b(make_mma(plan), tiler(plan), Float4E2M1FN, plan.ring_stages)


def plain_rows() -> cute.Layout:
    """(rows, K) of one stage, with the codes of a row contiguous: layout_a and layout_w without nesting."""
    return cute.make_layout((TILE_M, TILE_K), stride=(TILE_K, 1))


def make_operand(plan: Sm100MoePlan, matrix: Nvfp4, sf_tiles: int, layout: cute.ComposedLayout) -> Operand:
    """TMA loads of 128 rows of codes, and of scales of `sf_tiles` times 128 rows.

    Past the end of K, TMA fills in zeros: zero codes under zero scales add nothing. Past the rows of an expert of W,
    zeros or the scales of the next expert only reach columns that are not stored.
    """
    mCodes, mSF = matrix
    experts = mCodes.shape[0] if cutlass.const_expr(cute.rank(mCodes) == 3) else 1
    row_count, row_bytes = mCodes.shape[-2], mCodes.shape[-1]
    k = cute.assume(Int64(row_bytes) * 2, divby=128)
    stride = (k, 1, cute.assume(Int64(row_count) * k, divby=128))
    pointer = cute.recast_ptr(mCodes.iterator, dtype=Float4E2M1FN)
    mCodes = cute.make_tensor(pointer, cute.make_layout((row_count, row_bytes * 2, experts), stride=stride))
    row_words = mSF.shape[-2] * 64
    tiles = experts * ((row_count + TILE_M - 1) // TILE_M)
    sf_stride = (1, cute.assume(Int64(row_words), divby=128))
    sf_pointer = cute.recast_ptr(mSF.iterator, dtype=Int64)
    mSF = cute.make_tensor(sf_pointer, cute.make_layout((row_words, tiles), stride=sf_stride))
    load = cpasync.CopyBulkTensorTileG2SOp(cta_group_of(plan))
    plain = cute.make_composed_layout(layout.inner, 0, plain_rows())
    codes = TmaTensor(*cpasync.make_tiled_tma_atom(load, mCodes, plain, (TILE_M, TILE_K)))
    box = (SF_WORDS, sf_tiles)
    return Operand(codes, TmaTensor(*cpasync.make_tiled_tma_atom(load, mSF, cute.make_layout(box), box)))


def codes_views(codes: TmaTensor, sCodes: cute.Tensor, stages: int) -> TmaViews:
    """The views of an operand's codes; a tile is (row tile, K tile, expert)."""
    gCodes = cute.flat_divide(codes.coordinates, (TILE_M, TILE_K))
    stage = cute.append(plain_rows(), cute.make_layout(stages, stride=TILE_M * TILE_K))
    return tma_views(codes.atom, gCodes, cute.make_tensor(sCodes.iterator, stage), 2)


def scales_views(scales: TmaTensor, sSF: cute.Tensor) -> TmaViews:
    """The views of an operand's scales; a tile is (K tile, row tile), with the scales of one row tile or of two."""
    return tma_views(scales.atom, cute.flat_divide(scales.coordinates, sSF.shape[:2]), sSF, 2)


def allocate_ring(plan: Sm100MoePlan, smem: memory.SmemAllocator) -> RingSmem:
    """The ring in shared memory."""

    def codes(layout: cute.ComposedLayout) -> cute.Tensor:
        return smem.allocate_tensor(Float4E2M1FN, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def scales(tiles: int) -> cute.Tensor:
        return smem.allocate_tensor(Int64, cute.make_layout((SF_WORDS, tiles, plan.ring_stages)), byte_alignment=128)

    return RingSmem(codes(layout_a(plan)), codes(layout_w(plan)), scales(1), scales(plan.cta_group))


def make_accumulators(plan: Sm100MoePlan, tmem_ptr: cute.Pointer) -> cute.Tensor:
    """(MMA, rows, columns) of the first accumulator; the second begins 128 columns further, in a pair or not."""
    thread = make_mma(plan).get_slice(0)
    return cute.make_tensor(tmem_ptr, thread.make_fragment_C(thread.partition_shape_C(tiler(plan)[:2])).layout)


@cute.jit
def load_half(tmem_ptr: cute.Pointer, rAcc: cute.Tensor, thread: Int32):
    """Load rAcc (128) f32: 128 columns from `tmem_ptr` on of this thread's accumulator row. Waits for the load."""
    for column in cutlass.range_constexpr(0, HALF_N, CHUNK):
        rChunk = cute.make_tensor(rAcc.iterator + column, cute.make_layout(CHUNK))
        load_row(tmem_ptr + column, rChunk, thread)
    cute.arch.fence_view_async_tmem_load()


class ScaleCopy(NamedTuple):
    """tcgen05.cp of one operand's scales: the copy, and the descriptors that it reads, stages last."""

    copy: cute.TiledCopy
    source: cute.Tensor
    layout: cute.Layout
    first_column: int


@cute.jit
def scale_copy(plan: Sm100MoePlan, sSF: cute.Tensor, of_a: cutlass.Constexpr, tmem_ptr: cute.Pointer) -> ScaleCopy:
    """The copy of a stage's scales of A or of W from shared memory to all four quarters of lanes in tensor memory."""
    shape = make_mma(plan), tiler(plan), SF_VEC_SIZE
    if cutlass.const_expr(of_a):
        staged = blockscaled_layout.make_smem_layout_sfa(*shape, plan.ring_stages)
        layout = blockscaled_layout.make_tmem_layout_sfa(*shape, cute.slice_(staged, (None, None, None, 0)))
    else:
        staged = blockscaled_layout.make_smem_layout_sfb(*shape, plan.ring_stages)
        layout = blockscaled_layout.make_tmem_layout_sfb(*shape, cute.slice_(staged, (None, None, None, 0)))
    first_column = plan.tmem_sf if of_a else plan.tmem_sf + plan.sfa_columns
    tSF = cute.filter_zeros(cute.make_tensor(cute.recast_ptr(tmem_ptr, dtype=Float8E4M3FN), layout))
    sScales = cute.make_tensor(cute.recast_ptr(sSF.iterator, dtype=Float8E4M3FN), staged)
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(cta_group_of(plan)), Float8E4M3FN)
    copy = tcgen05.make_s2t_copy(atom, tSF)
    source = copy.get_slice(0).partition_S(cute.filter_zeros(sScales))
    return ScaleCopy(copy, tcgen05.get_s2t_smem_desc_tensor(copy, source), layout, first_column)


@cute.jit
def copy_scales(plan: Sm100MoePlan, scales: ScaleCopy, tmem_ptr: cute.Pointer, stage: Int32, slot: Int32):
    """Queue the copy of one stage's scales into a slot; returns the tensor that the MMA takes."""
    pointer = cute.recast_ptr(tmem_ptr + scales.first_column + slot * plan.sf_columns, dtype=Float8E4M3FN)
    tSF = cute.make_tensor(pointer, scales.layout)
    target = scales.copy.get_slice(0).partition_D(cute.filter_zeros(tSF))
    cute.copy(scales.copy, scales.source[None, None, None, None, stage], target)
    return tSF

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Forward attention for sm_100a in CuTeDSL: warp-specialised, persistent, one compiled kernel a head dimension.

    softmax      one warpgroup, or two in turn (hd 64, 128): a thread a row; S from tensor memory, P to the MMA warp
    correction   one warpgroup: rescales O in tensor memory, stores it; owns the allocation of tensor memory
    MMA, TMA     a warp each, in a last warpgroup whose other two warps only give up their registers

A CTA walks over work items (batch x kv head, split of the keys, tile of 128 rows, half of O) with a fixed stride. The
query heads of a kv head are folded into rows: q viewed as [batch * kv_heads, heads / kv_heads * t, hd] needs no copy,
because heads of one group lie next to each other. All sizes, the mask and the scale are run-time values; a tile whose
keys are all visible skips the mask. sm100_fmha_plan says what lies where in shared and tensor memory, and why.

Seven pipelines, each a ring of (full, empty) mbarriers:

    q      TMA -> MMA                a Q tile
    kv     TMA -> MMA                a slab of K or V, 16 KiB
    s      MMA -> softmax            an S accumulator
    p      softmax -> MMA            a P tile
    chain  softmax -> softmax        the row maximum, from one warpgroup to the other
    stat   softmax -> correction     the factor for O before a tile; (row sum, row maximum) at the end of an item
    o      MMA -> correction         O: the MMA warp adds to it, the correction rescales or stores it, in turn

A tile, with S one tile ahead of P V:

    TMA      K[i+1] .. V[i]                          K[i+2] .. V[i+1]
    MMA      S[i+1] = Q K[i+1]    O += P[i] V[i]     S[i+2] = Q K[i+2]    O += P[i+1] V[i+1]
    softmax  P[i] = 2^(S[i] - m)                     P[i+1] = 2^(S[i+1] - m)
    correct  O *= 2^(m_old - m_new) if a row of the warp needs it

With more than one split, items write partials to a workspace and a second kernel, sm100_fmha_combine, merges them.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, memory, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05

from backends.cutedsl.sm100_fmha.combine import WARPS as COMBINE_WARPS
from backends.cutedsl.sm100_fmha.combine import combine_kernel
from backends.cutedsl.sm100_fmha.correction import Outputs, correction_warpgroup
from backends.cutedsl.sm100_fmha.load import load_warp
from backends.cutedsl.sm100_fmha.mma import mma_warp
from backends.cutedsl.sm100_fmha.operands import (
    QK_TILER,
    Shared,
    layout_k,
    layout_p,
    layout_q,
    layout_v,
    make_fragments,
    make_pv_mma,
    make_qk_mma,
    partition_tma,
    pv_tiler,
)
from backends.cutedsl.sm100_fmha.plan import (
    S_STAGES,
    SLAB_BYTES,
    SLAB_COLUMNS,
    STAT_STAGES,
    TILE_M,
    TILE_N,
    TMEM_COLUMNS,
    WARPGROUP,
    Sm100FmhaPlan,
)
from backends.cutedsl.sm100_fmha.softmax import softmax_warpgroup
from backends.cutedsl.sm100_fmha.tiles import Problem

LOG2_E = 1.4426950408889634


class Sm100Fmha:
    """The host function: tensor maps, launch of the attention kernel, launch of the combine kernel."""

    def __init__(self, hd: int) -> None:
        self.plan = Sm100FmhaPlan(hd)
        self.correction_warp = 4 * self.plan.softmax_groups
        self.mma_warp = self.correction_warp + 4
        self.load_warp = self.mma_warp + 1

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mO_part: cute.Tensor,
        mLSE_part: cute.Tensor,
        t: Int32,
        left: Int32,
        right: Int32,
        scale: Float32,
        splits: Int32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """Queue attention on `stream`.

        mQ, mO (batch * kv_heads, heads / kv_heads * t, hd) bf16; mK, mV (batch * kv_heads, s_k, hd) bf16;
        mLSE (batch * kv_heads * heads / kv_heads * t) f32, natural logarithm; mO_part and mLSE_part the workspaces of
        `splits` partials, f32, unused when `splits` is 1. `t`: query tokens. A query at p sees keys j with
        p - left < j <= p + right. At most `max_ctas` CTAs share the work.
        """
        hd, s_k = self.plan.hd, mK.shape[1]
        kv_batches, rows, _ = mQ.shape
        tma_q, tQ, tma_k, tK, tma_v, tV = self._make_tma(mQ, mK, mV)
        self.kernel.set_name_prefix(f"sm100_fmha_hd{hd}", remove_cutlass_symbol=True, keep_mangled_name=False)
        combine_kernel.set_name_prefix(
            f"sm100_fmha_combine_hd{hd}", remove_cutlass_symbol=True, keep_mangled_name=False
        )
        row_tiles = (rows + TILE_M - 1) // TILE_M
        work_items = kv_batches * splits * row_tiles * self.plan.o_halves
        self.kernel(
            tma_q, tQ, tma_k, tK, tma_v, tV, mO, mLSE, mO_part, mLSE_part,
            rows, t, s_k, row_tiles, splits, left, right, work_items, scale * LOG2_E,
        ).launch(
            grid=[cutlass.min(work_items, max_ctas), 1, 1],
            block=[self.plan.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip
        if splits > 1:
            all_rows = kv_batches * rows
            combine_kernel(hd, mO, mLSE, mO_part, mLSE_part, all_rows, splits).launch(
                grid=[(all_rows + COMBINE_WARPS - 1) // COMBINE_WARPS, 1, 1],
                block=[32 * COMBINE_WARPS, 1, 1],
                stream=stream,
            )

    def _make_tma(self, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor):
        """A TMA atom and its coordinates, for Q (rows, hd, batch), K (s_k, hd, batch) and V (hd, s_k, batch)."""
        plan, hd = self.plan, self.plan.hd
        kv_batches, rows, _ = mQ.shape
        s_k = mK.shape[1]
        q_batch = cute.assume(Int64(rows) * hd, divby=hd)
        kv_batch = cute.assume(Int64(s_k) * hd, divby=hd)
        mQ = cute.make_tensor(mQ.iterator, cute.make_layout((rows, hd, kv_batches), stride=(hd, 1, q_batch)))
        mK = cute.make_tensor(mK.iterator, cute.make_layout((s_k, hd, kv_batches), stride=(hd, 1, kv_batch)))
        mV = cute.make_tensor(mV.iterator, cute.make_layout((hd, s_k, kv_batches), stride=(1, hd, kv_batch)))

        tma = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        qk_mma, pv_mma = make_qk_mma(), make_pv_mma(plan)
        cluster = cute.tiled_divide(cute.make_layout((1, 1, 1)), (qk_mma.thr_id.shape,)).shape
        make_tma_a, make_tma_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        one_stage = [0, 1, 2]
        return (
            *make_tma_a(tma, mQ, cute.select(layout_q(plan), one_stage), QK_TILER, qk_mma, cluster),
            *make_tma_b(tma, mK, cute.select(layout_k(plan), one_stage), QK_TILER, qk_mma, cluster),
            *make_tma_b(tma, mV, cute.select(layout_v(plan), one_stage), pv_tiler(plan), pv_mma, cluster),
        )

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mO_part: cute.Tensor,
        mLSE_part: cute.Tensor,
        rows: Int32,
        t: Int32,
        s_k: Int32,
        row_tiles: Int32,
        splits: Int32,
        left: Int32,
        right: Int32,
        work_items: Int32,
        scale_log2: Float32,
    ):
        """Dispatch the warps to their roles."""
        plan = self.plan
        split_tiles = ((s_k + TILE_N - 1) // TILE_N + splits - 1) // splits
        problem = Problem(rows, t, s_k, row_tiles, splits, split_tiles, left, right, work_items)
        outputs = Outputs(mO, mLSE, mO_part, mLSE_part)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.load_warp:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_k)
            cpasync.prefetch_descriptor(tma_v)

        smem = memory.SmemAllocator()
        shared = self._allocate(smem)
        q, kv, s, p, stat, chain, o = self._make_pipelines(smem)
        tmem = memory.TmemAllocator(
            smem.allocate_array(Int32, 1),
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=plan.threads - 3 * 32),
            allocator_warp_id=self.correction_warp,
        )
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        softmax_registers, correction_registers, other_registers = plan.registers
        if warp >= self.mma_warp:
            cute.arch.setmaxregister_decrease(other_registers)
        if warp == self.load_warp:
            qk_thread, pv_thread = make_qk_mma().get_slice(0), make_pv_mma(plan).get_slice(0)
            tQ = partition_tma(tma_q, mQ, (TILE_M, SLAB_COLUMNS), qk_thread.partition_A, shared.sQ)
            tK = partition_tma(tma_k, mK, (TILE_N, SLAB_COLUMNS), qk_thread.partition_B, shared.sK)
            tV = partition_tma(tma_v, mV, pv_tiler(plan)[1:], pv_thread.partition_B, shared.sV)
            load_warp(plan, problem, tma_q, tma_k, tma_v, tQ, tK, tV, q[0], kv[0])
        if warp == self.mma_warp:
            tmem.wait_for_alloc()
            tmem_ptr = tmem.retrieve_ptr(Float32)
            qk_tensors, pv_tensors = make_fragments(plan, tmem_ptr, shared)
            mma_warp(plan, problem, qk_tensors, pv_tensors, q[1], kv[1], s[0], p[1], o[0])
        if warp < self.correction_warp:
            cute.arch.setmaxregister_increase(softmax_registers)
            tmem.wait_for_alloc()
            tmem_ptr = tmem.retrieve_ptr(Float32)
            softmax_warpgroup(plan, problem, scale_log2, tmem_ptr, shared, s[1], p[0], stat[0], chain[1], chain[0])
        if warp >= self.correction_warp and warp < self.mma_warp:
            cute.arch.setmaxregister_decrease(correction_registers)
            tmem.allocate(TMEM_COLUMNS)
            tmem.wait_for_alloc()
            tmem_ptr = tmem.retrieve_ptr(Float32)
            correction_warpgroup(plan, problem, scale_log2, tmem_ptr, shared, outputs, stat[1], o[1])
            tmem.relinquish_alloc_permit()
            # Every other use of tensor memory lies before the last O, which this warpgroup has just read.
            pipeline.NamedBarrier(barrier_id=2, num_threads=WARPGROUP).arrive_and_wait()
            tmem.free(tmem_ptr)

    def _make_pipelines(self, smem: memory.SmemAllocator):
        """(producer, consumer) of q, kv, s, p, stat, chain, o."""
        plan = self.plan

        def threads(count: int) -> pipeline.CooperativeGroup:
            return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)

        def make(kind, stages: int, producers: int, consumers: int, **tx_count: int):
            return kind.create(
                num_stages=stages,
                producer_group=threads(producers),
                consumer_group=threads(consumers),
                barrier_storage=smem.allocate_array(Int64, 2 * stages),
                defer_sync=True,
                **tx_count,
            ).make_participants()

        tma, to_mma, from_mma = pipeline.PipelineTmaUmma, pipeline.PipelineAsyncUmma, pipeline.PipelineUmmaAsync
        return (
            make(tma, plan.q_stages, 1, 1, tx_count=TILE_M * plan.hd * 2),
            make(tma, plan.ring_stages, 1, 1, tx_count=SLAB_BYTES),
            make(from_mma, S_STAGES, 1, WARPGROUP),
            make(to_mma, plan.p_stages, WARPGROUP, 1),
            make(pipeline.PipelineAsync, STAT_STAGES, WARPGROUP, WARPGROUP),
            make(pipeline.PipelineAsync, plan.softmax_groups, WARPGROUP, WARPGROUP),
            make(from_mma, 1, 1, WARPGROUP),
        )

    def _allocate(self, smem: memory.SmemAllocator) -> Shared:
        plan = self.plan

        def operand(layout: cute.ComposedLayout) -> cute.Tensor:
            return smem.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)

        def statistic(stages: int) -> cute.Tensor:
            return smem.allocate_tensor(Float32, cute.make_layout((TILE_M, stages)), byte_alignment=16)

        sQ, sK = operand(layout_q(plan)), operand(layout_k(plan))
        sV = cute.make_tensor(cute.recast_ptr(sK.iterator, layout_v(plan).inner), layout_v(plan).outer)
        return Shared(
            sQ=sQ,
            sK=sK,
            sV=sV,
            sP=None if plan.p_in_tmem else operand(layout_p(plan)),
            sStat=statistic(STAT_STAGES),
            sMax=statistic(plan.max_stages),
            sBase=statistic(2) if plan.softmax_groups == 2 else None,
        )

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Forward attention for sm_100a in CuTeDSL: warp-specialised, persistent, one compiled kernel per head dimension.

    softmax      one warpgroup, or two in turn (hd 64, 128): a thread per row; S from tensor memory, P to the MMA warp
    correction   one warpgroup: rescales O in tensor memory, stores it; owns the allocation of tensor memory
    MMA, TMA     a warp each, in the last warpgroup; its other two warps only give up their registers

A CTA walks over work items (batch x kv head, split of the keys, tile of 128 rows, half of O) with a fixed stride. The
query heads of a kv head are folded into rows: heads of one group are adjacent in memory, so q can be viewed as
[batch * kv_heads, heads / kv_heads * t, hd] without a copy. All sizes, the mask and the scale are run-time values; a
tile whose keys are all visible skips the mask. plan.py lays out shared and tensor memory and says why.

Seven pipelines, each a ring of (full, empty) mbarriers:

    q      TMA -> MMA                a Q tile
    kv     TMA -> MMA                a slab of K or V, 16 KiB
    s      MMA -> softmax            an S accumulator
    p      softmax -> MMA            a P tile
    chain  softmax -> softmax        the row maximum, from one warpgroup to the other
    stat   softmax -> correction     the factor for O before a tile; (row sum, row maximum) at the end of an item
    o      MMA -> correction         O, in turn: the MMA warp adds to it, the correction rescales or stores it

One tile, with S one tile ahead of P V:

    TMA      K[i+1] .. V[i]                          K[i+2] .. V[i+1]
    MMA      S[i+1] = Q K[i+1]    O += P[i] V[i]     S[i+2] = Q K[i+2]    O += P[i+1] V[i+1]
    softmax  P[i] = 2^(S[i] - m)                     P[i+1] = 2^(S[i+1] - m)
    correct  O *= 2^(m_old - m_new) if a row of the warp needs it

With more than one split, items write partials to a workspace and a second kernel (correction.py) merges them.
"""

from types import SimpleNamespace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, memory, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05

from backends.cutedsl.attention_tiles import Inputs, Outputs, Problem, allocate_operand, problem_of, tma_tensors
from backends.cutedsl.device import WARPGROUP
from backends.cutedsl.sm100_fmha.correction import CorrectionRings, correction_warpgroup, launch_combine
from backends.cutedsl.sm100_fmha.issue import MmaRings, load_warp, mma_warp
from backends.cutedsl.sm100_fmha.operands import (
    QK_TILER,
    FmhaSmem,
    layout_k,
    layout_p,
    layout_q,
    layout_v,
    make_pv_mma,
    make_qk_mma,
    pv_tiler,
)
from backends.cutedsl.sm100_fmha.plan import S_STAGES, SLAB_BYTES, STAT_STAGES, TILE_M, Sm100FmhaPlan
from backends.cutedsl.sm100_fmha.softmax import SoftmaxRings, softmax_warpgroup
from backends.cutedsl.tcgen05 import Ring, address_of_tmem, allocate_tmem, free_tmem, make_ring, make_tmem
from backends.cutedsl.tma import TmaTensor


class FmhaRings(NamedTuple):
    """The seven pipelines of a CTA."""

    q: Ring
    kv: Ring
    s: Ring
    p: Ring
    stat: Ring
    chain: Ring
    o: Ring


class Sm100Fmha:
    """The host function: tensor maps, launch of the attention kernel, launch of the combine kernel."""

    def __init__(self, hd: int) -> None:
        self.plan = Sm100FmhaPlan(hd)
        self.correction_warp = 4 * self.plan.softmax_groups
        self.mma_warp = self.correction_warp + 4
        self.load_warp = self.mma_warp + 1

    @cute.jit
    def __call__(self, **arguments):
        """Queue attention on `stream`. `arguments`: the PARAMETERS of attention.py, by name."""
        call = SimpleNamespace(**arguments)
        hd = self.plan.hd
        inputs = self._make_tma(call)
        outputs = Outputs(call.mO, call.mLSE, call.mO_part, call.mLSE_part)
        self.kernel.set_name_prefix(f"sm100_fmha_hd{hd}", remove_cutlass_symbol=True, keep_mangled_name=False)
        problem = problem_of(call, self.plan)
        self.kernel(inputs, outputs, problem).launch(
            grid=[cutlass.min(problem.work_items, call.max_ctas), 1, 1],
            block=[self.plan.threads, 1, 1],
            stream=call.stream,
            min_blocks_per_mp=1,
        )
        if call.splits > 1:
            launch_combine(hd, outputs, call.mQ.shape[0] * problem.rows, call.splits, call.stream)

    def _make_tma(self, call: SimpleNamespace) -> Inputs:
        plan = self.plan
        mQ, mK, mV = tma_tensors(plan.hd, call.mQ, call.mK, call.mV)
        tma = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        qk_mma, pv_mma = make_qk_mma(), make_pv_mma(plan)
        cluster = cute.tiled_divide(cute.make_layout((1, 1, 1)), (qk_mma.thr_id.shape,)).shape
        make_tma_a, make_tma_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        one_stage = [0, 1, 2]
        return Inputs(
            TmaTensor(*make_tma_a(tma, mQ, cute.select(layout_q(plan), one_stage), QK_TILER, qk_mma, cluster)),
            TmaTensor(*make_tma_b(tma, mK, cute.select(layout_k(plan), one_stage), QK_TILER, qk_mma, cluster)),
            TmaTensor(*make_tma_b(tma, mV, cute.select(layout_v(plan), one_stage), pv_tiler(plan), pv_mma, cluster)),
        )

    @cute.kernel
    def kernel(self, inputs: Inputs, outputs: Outputs, problem: Problem):
        """Dispatch the warps to their roles."""
        plan, problem = self.plan, problem.with_tiles(self.plan)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == self.load_warp:
            for tensor in inputs:
                cpasync.prefetch_descriptor(tensor.atom)

        allocator = memory.SmemAllocator()
        smem = self._allocate(allocator)
        rings = self._make_rings(allocator)
        tmem = make_tmem(allocator, self.correction_warp, users=plan.threads - 3 * 32)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()

        softmax_registers, correction_registers, other_registers = plan.registers
        if warp >= self.mma_warp:
            cute.arch.setmaxregister_decrease(other_registers)
        if warp == self.load_warp:
            load_warp(plan, problem, inputs, smem, rings.q.producer, rings.kv.producer)
        if warp == self.mma_warp:
            tmem_ptr = address_of_tmem(tmem)
            ends = MmaRings(
                kv=rings.kv.consumer, s=rings.s.producer, p=rings.p.consumer, o=rings.o.producer, q=rings.q.consumer
            )
            mma_warp(plan, problem, tmem_ptr, smem, ends)
        if warp < self.correction_warp:
            cute.arch.setmaxregister_increase(softmax_registers)
            tmem_ptr = address_of_tmem(tmem)
            ends = SoftmaxRings(
                s=rings.s.consumer,
                p=rings.p.producer,
                stat=rings.stat.producer,
                chain_in=rings.chain.consumer,
                chain_out=rings.chain.producer,
            )
            softmax_warpgroup(plan, problem, tmem_ptr, smem, ends)
        if warp >= self.correction_warp and warp < self.mma_warp:
            cute.arch.setmaxregister_decrease(correction_registers)
            tmem_ptr = allocate_tmem(tmem)
            ends = CorrectionRings(stat=rings.stat.consumer, o=rings.o.consumer)
            correction_warpgroup(plan, problem, tmem_ptr, smem, outputs, ends)
            free_tmem(tmem, tmem_ptr)

    def _make_rings(self, allocator: memory.SmemAllocator) -> FmhaRings:
        plan = self.plan
        tma, to_mma, from_mma = pipeline.PipelineTmaUmma, pipeline.PipelineAsyncUmma, pipeline.PipelineUmmaAsync
        threads = pipeline.PipelineAsync
        return FmhaRings(
            q=make_ring(tma, allocator, plan.q_stages, 1, 1, tx_count=TILE_M * plan.hd * 2),
            kv=make_ring(tma, allocator, plan.ring_stages, 1, 1, tx_count=SLAB_BYTES),
            s=make_ring(from_mma, allocator, S_STAGES, 1, WARPGROUP),
            p=make_ring(to_mma, allocator, plan.p_stages, WARPGROUP, 1),
            stat=make_ring(threads, allocator, STAT_STAGES, WARPGROUP, WARPGROUP),
            chain=make_ring(threads, allocator, plan.softmax_groups, WARPGROUP, WARPGROUP),
            o=make_ring(from_mma, allocator, 1, 1, WARPGROUP),
        )

    def _allocate(self, allocator: memory.SmemAllocator) -> FmhaSmem:
        plan = self.plan

        def statistic(stages: int) -> cute.Tensor:
            return allocator.allocate_tensor(Float32, cute.make_layout((TILE_M, stages)), byte_alignment=16)

        sQ, sK = allocate_operand(allocator, layout_q(plan)), allocate_operand(allocator, layout_k(plan))
        sV = cute.make_tensor(cute.recast_ptr(sK.iterator, layout_v(plan).inner), layout_v(plan).outer)
        return FmhaSmem(
            sQ=sQ,
            sK=sK,
            sV=sV,
            sP=None if plan.p_in_tmem else allocate_operand(allocator, layout_p(plan)),
            sStat=statistic(STAT_STAGES),
            sMax=statistic(plan.max_stages),
            sBase=statistic(2) if plan.softmax_groups == 2 else None,
        )

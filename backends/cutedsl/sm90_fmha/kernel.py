# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Forward attention for sm_90a in CuTeDSL: warp-specialised, persistent, one compiled kernel a plan.

    warpgroup 0      the producer: one warp a ring issues TMA loads; its registers go to the others
    warpgroups 1, 2  the consumers: S = Q K^T by wgmma from shared memory, softmax in registers, O += P V with P as it
                     lies in the accumulator

A CTA walks over work items (batch x kv head, split of the keys, tile of query rows) with a fixed stride. The query
heads of a kv head are folded into rows: q viewed as [batch * kv_heads, heads / kv_heads * t, hd] needs no copy, because
heads of one group lie next to each other. All sizes, the mask and the scale are run-time values; a tile whose keys are
all visible skips the mask. plan.py says how the two consumers share an item, and why.

A tile, with S one tile ahead of P V:

    tensor core  S[i+1] = Q K[i+1]    O += P[i] V[i]      S[i+2] = Q K[i+2]
    softmax                           P[i+1] = 2^(S[i+1] - m)   O *= 2^(m_old - m_new)

With more than one split, items write partials to a workspace and a second kernel merges them. It is a programmatic
dependent launch: it is there when the last item ends (384 ns from end to start on an H200, not 736).
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, memory
from cutlass.cute.nvgpu import cpasync, warpgroup

from backends.cutedsl.sm90_fmha.attend import (
    Operands,
    Registers,
    issue_pv,
    issue_qk,
    make_operands,
    make_registers,
    release_v,
)
from backends.cutedsl.sm90_fmha.combine import FEW_SPLITS, combine_kernel, launch_combine
from backends.cutedsl.sm90_fmha.combine import WARPS as COMBINE_WARPS
from backends.cutedsl.sm90_fmha.epilogue import Outputs, finish_item
from backends.cutedsl.sm90_fmha.load import Loads, load_warp
from backends.cutedsl.sm90_fmha.operands import Shared, layout_k, layout_q, layout_v, make_tma, partition_tma
from backends.cutedsl.sm90_fmha.plan import (
    CONSUMER_REGISTERS,
    GROUP_M,
    GROUPS,
    MERGE_REGISTERS,
    PRODUCER_REGISTERS,
    THREADS,
    WARPGROUP,
    Sm90FmhaPlan,
)
from backends.cutedsl.sm90_fmha.ring import (
    Barriers,
    Place,
    advanced,
    allocate_barriers,
    init_barriers,
    release,
    ring_start,
    wait_full,
)
from backends.cutedsl.sm90_fmha.softmax import (
    ROWS,
    RowState,
    make_row_state,
    mask_scores,
    rescale,
    reset,
    round_p,
    softmax_tile,
)
from backends.cutedsl.sm90_fmha.tiles import Problem, WorkItem, work_item

LOG2_E = 1.4426950408889634
TURN_BARRIER = 2
"""Named barriers: warpgroup g waits for its turn at TURN_BARRIER + g."""


class Sm90Fmha:
    """The host function: tensor maps, launch of the attention kernel, launch of the combine kernel."""

    def __init__(self, plan: Sm90FmhaPlan) -> None:
        self.plan = plan

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
        plan = self.plan
        kv_batches, rows, _ = mQ.shape
        tma_q, tQ, tma_k, tK, tma_v, tV = self._make_tma(mQ, mK, mV)
        name = f"hd{plan.hd}_{plan.share}"
        self.kernel.set_name_prefix(f"sm90_fmha_{name}", remove_cutlass_symbol=True, keep_mangled_name=False)
        combine_kernel.set_name_prefix(f"sm90_fmha_combine_{name}", remove_cutlass_symbol=True, keep_mangled_name=False)
        row_tiles = (rows + plan.tile_m - 1) // plan.tile_m
        work_items = kv_batches * splits * row_tiles
        # Few enough CTAs that each has the same number of items. On an H200, 128 CTAs with two items each read 32
        # caches of 8 heads in 243 us; 132 CTAs, eight of them with one item, took 247 us.
        rounds = (work_items + max_ctas - 1) // max_ctas
        self.kernel(
            tma_q, tQ, tma_k, tK, tma_v, tV, mO, mLSE, mO_part, mLSE_part,
            rows, t, mK.shape[1], row_tiles, splits, left, right, work_items, scale * LOG2_E,
        ).launch(
            grid=[(work_items + rounds - 1) // rounds, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip
        if splits > 1:
            all_rows = kv_batches * rows
            if splits <= FEW_SPLITS:
                launch_combine(plan.hd, 1, mO, mLSE, mO_part, mLSE_part, all_rows, splits, stream)
            else:
                launch_combine(plan.hd, COMBINE_WARPS, mO, mLSE, mO_part, mLSE_part, all_rows, splits, stream)

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
        return (
            *make_tma(mQ, layout_q(plan), (GROUP_M, hd)),
            *make_tma(mK, layout_k(plan), (plan.tile_n, plan.slab_columns)),
            *make_tma(mV, layout_v(plan), (plan.slab_columns, plan.tile_n)),
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
        key_tiles = (s_k + plan.tile_n - 1) // plan.tile_n
        problem = Problem(rows, t, s_k, row_tiles, splits, key_tiles, left, right, work_items)
        outputs = Outputs(mO, mLSE, mO_part, mLSE_part)
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tma in (tma_q, tma_k, tma_v):
                cpasync.prefetch_descriptor(tma)

        smem = memory.SmemAllocator()
        shared = self._allocate(smem)
        stages = cutlass.const_expr(plan.ring_stages * plan.rings)
        q = allocate_barriers(smem, plan.q_stages)
        kv = allocate_barriers(smem, stages)
        if thread == 0:
            init_barriers(q, plan.q_stages, 4 * GROUPS)
            init_barriers(kv, stages, plan.ring_consumers)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()

        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp < plan.rings:
                tQgQ, tQsQ = partition_tma(tma_q, mQ, (GROUP_M, plan.hd), shared.sQ)
                tKgK, tKsK = partition_tma(tma_k, mK, (plan.tile_n, plan.slab_columns), shared.sK)
                tVgV, tVsV = partition_tma(tma_v, mV, (plan.slab_columns, plan.tile_n), shared.sV)
                loads = Loads(tma_q, tQgQ, tQsQ, tma_k, tKgK, tKsK, tma_v, tVgV, tVsV)
                load_warp(plan, problem, loads, q, kv, warp)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            group = cute.arch.make_warp_uniform((warp - 4) // 4)
            consumer_warpgroup(plan, problem, shared, outputs, q, kv, scale_log2, group, thread % WARPGROUP)

    def _allocate(self, smem: memory.SmemAllocator) -> Shared:
        plan = self.plan

        def operand(layout: cute.ComposedLayout) -> cute.Tensor:
            return smem.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)

        sQ, sK = operand(layout_q(plan)), operand(layout_k(plan))
        sV = cute.make_tensor(cute.recast_ptr(sK.iterator, layout_v(plan).inner), layout_v(plan).outer)
        sMerge = sStat = None
        if plan.share == "keys":
            vectors = cute.make_layout((4, WARPGROUP, MERGE_REGISTERS // 4))
            sMerge = smem.allocate_tensor(Float32, vectors, byte_alignment=16)
            sStat = smem.allocate_tensor(Float32, cute.make_layout((WARPGROUP, 2 * ROWS)), byte_alignment=16)
        return Shared(sQ, sK, sV, sMerge, sStat)


@cute.jit
def consumer_warpgroup(
    plan: Sm90FmhaPlan,
    problem: Problem,
    shared: Shared,
    outputs: Outputs,
    q: Barriers,
    kv: Barriers,
    scale_log2: Float32,
    group: Int32,
    thread: Int32,
):
    """The work loop of consumer warpgroup `group`."""
    start, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    ring = group if cutlass.const_expr(plan.rings > 1) else Int32(0)
    first = ring * plan.ring_stages
    kv_place = ring_start(first, False)
    q_place = ring_start(Int32(0), False)
    operands = make_operands(plan, shared.sQ, shared.sK, shared.sV)
    registers = make_registers(plan)
    state = make_row_state()
    if cutlass.const_expr(plan.turns):  # noqa: SIM102 (one is decided at compile time, one at run time)
        if group == 1:
            give_turn(plan, group)
    for index in cutlass.range(start, problem.work_items, step, unroll=1):
        item = work_item(plan, problem, index)
        reset(state)
        registers.rO.fill(0.0)
        if item.tiles > 0:
            q_stage = q_place.stage
            if cutlass.const_expr(plan.share == "rows"):
                q_stage = q_stage * GROUPS + group
            wait_full(q, q_place)
            kv_place = attend(
                plan, problem, item, operands, registers, state, q_stage, kv, kv_place, scale_log2, group, thread
            )
            release(q, q_place.stage)
            q_place = advanced(q_place, Int32(0), plan.q_stages)
        finish_item(plan, problem, outputs, shared, item, registers.rO, state, scale_log2, group, thread)


@cute.jit
def attend(
    plan: Sm90FmhaPlan,
    problem: Problem,
    item: WorkItem,
    operands: Operands,
    registers: Registers,
    state: RowState,
    q_stage: Int32,
    kv: Barriers,
    place,
    scale_log2: Float32,
    group: Int32,
    thread: Int32,
):
    """This warpgroup's tiles of an item; O stays unnormalised. Returns the place in the ring after them."""
    ring = group if cutlass.const_expr(plan.rings > 1) else Int32(0)
    first = ring * plan.ring_stages
    keys = visible_keys(plan, problem, item, group, thread)
    lane_key = 2 * (thread % 4)
    drain = cutlass.const_expr(plan.slabs > 1)
    if ring < item.tiles:
        take_turn(plan, group)
        place = issue_qk(plan, operands, registers.rS, q_stage, kv, place, first, True)
        give_turn(plan, group)
        tile_softmax(plan, item, registers, state, item.first_tile + ring, keys, lane_key, scale_log2)
        round_p(registers.rS, registers.rP)
        for i in cutlass.range(ring + plan.rings, item.tiles, plan.rings, unroll=1):
            k_stage = place.stage
            take_turn(plan, group)
            place = issue_qk(plan, operands, registers.rS, q_stage, kv, place, first, drain)
            v_place = place
            place = issue_pv(plan, operands, registers, kv, place, first, group)
            give_turn(plan, group)
            if cutlass.const_expr(not drain):
                warpgroup.wait_group(1)
                release(kv, k_stage)
            tile_softmax(plan, item, registers, state, item.first_tile + i, keys, lane_key, scale_log2)
            after_sums(state, kv, v_place)
            warpgroup.wait_group(0)
            release_v(plan, kv, v_place, first)
            rescale(registers.rO, state)
            round_p(registers.rS, registers.rP)
        v_place = place
        place = issue_pv(plan, operands, registers, kv, place, first, group)
        warpgroup.wait_group(0)
        release_v(plan, kv, v_place, first)
    return place


@cute.jit
def after_sums(state: RowState, kv: Barriers, place: Place):
    """End a basic block after the exponentials.

    ptxas 13.5 moves the wait for P V to the head of its basic block, before the exponentials that should run under P V.
    This branch depends on their sums, which are never negative. Its body is a loop, so that ptxas cannot predicate it.
    """
    if state.rSum[0] + state.rSum[1] < Float32(0.0):
        wait_full(kv, place)


@cute.jit
def take_turn(plan: Sm90FmhaPlan, group: Int32):
    """Wait until the other warpgroup has issued its MMAs.

    Only where the two read the same tiles: there they would run in step, both at the tensor core and then both at their
    exponentials.
    """
    if cutlass.const_expr(plan.turns):
        cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=GROUPS * WARPGROUP)


@cute.jit
def give_turn(plan: Sm90FmhaPlan, group: Int32):
    """Let the other warpgroup issue."""
    if cutlass.const_expr(plan.turns):
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - group, number_of_threads=GROUPS * WARPGROUP)


@cute.jit
def tile_softmax(
    plan: Sm90FmhaPlan,
    item: WorkItem,
    registers: Registers,
    state: RowState,
    tile: Int32,
    keys: cute.Tensor,
    lane_key: Int32,
    scale_log2: Float32,
):
    """Mask the scores of a tile where a row does not see all of it, then their softmax."""
    if tile < item.clear_first or tile >= item.clear_last:
        mask_scores(registers.rS, tile * plan.tile_n + lane_key, keys)
    softmax_tile(registers.rS, state, scale_log2)


@cute.jit
def visible_keys(plan: Sm90FmhaPlan, problem: Problem, item: WorkItem, group: Int32, thread: Int32) -> cute.Tensor:
    """Of this thread's rows, the first key that each sees and one past the last: (row, begin or end)."""
    rKeys = cute.make_rmem_tensor((ROWS, 2), Int32)
    first_row = item.row_tile * plan.tile_m + (thread // 32) * 16 + (thread % 32) // 4
    if cutlass.const_expr(plan.share == "rows"):
        first_row = first_row + group * GROUP_M
    for i in cutlass.range_constexpr(ROWS):
        position = (first_row + 8 * i) % problem.t + problem.s_k - problem.t
        rKeys[i, 0] = cutlass.max(position - problem.left + 1, Int32(0))
        rKeys[i, 1] = cutlass.min(position + problem.right + 1, problem.s_k)
    return rKeys

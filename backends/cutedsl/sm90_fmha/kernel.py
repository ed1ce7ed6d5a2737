# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Forward attention for sm_90a in CuTeDSL: warp-specialised, persistent, one compiled kernel per plan.

    warpgroup 0      the producer: one warp per ring issues TMA loads; its registers go to the others
    warpgroups 1, 2  the consumers: S = Q K^T by wgmma from shared memory, softmax in registers, O += P V with P in its
                     accumulator registers. With shared columns, or rows of hd 64, there may be three (plan.py)

A CTA takes work items (batch x kv head, split of the keys, tile of query rows) one after another; order.py says which.
The query heads of a kv head are folded into rows: heads of one group are adjacent in memory, so q can be viewed as
[batch * kv_heads, heads / kv_heads * t, hd] without a copy. All sizes, the mask and the scale are run-time values; a
tile whose keys are all visible skips the mask. plan.py says how the consumers share an item, and why.

One tile, with S one tile ahead of P V:

    tensor core  S[i+1] = Q K[i+1]    O += P[i] V[i]      S[i+2] = Q K[i+2]
    softmax                           P[i+1] = 2^(S[i+1] - m)   O *= 2^(m_old - m_new)

With more than one split, items write partials to a workspace and a second kernel (combine.py) merges them. That kernel
is a programmatic dependent launch: its CTAs can start before the last item ends.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, memory
from cutlass.cute.nvgpu import cpasync

from backends.cutedsl.attention_tiles import (
    Inputs,
    Outputs,
    Problem,
    allocate_operand,
    clipped_tensors,
    problem_of,
    ragged_problem_of,
    tma_tensors,
)
from backends.cutedsl.device import WARPGROUP
from backends.cutedsl.ring import allocate_rings, init_rings
from backends.cutedsl.sm90_fmha.attend import consumer_warpgroup
from backends.cutedsl.sm90_fmha.columns import ColumnRings, score_warpgroup, value_warpgroup
from backends.cutedsl.sm90_fmha.combine import FEW_SPLITS, combine_kernel, launch_combine
from backends.cutedsl.sm90_fmha.combine import WARPS as COMBINE_WARPS
from backends.cutedsl.sm90_fmha.load import (
    Loads,
    load_warp,
    load_warp_of_k,
    load_warp_of_q,
    load_warp_of_v,
    make_loads,
)
from backends.cutedsl.sm90_fmha.lone import lone_warpgroup
from backends.cutedsl.sm90_fmha.operands import (
    Consumer,
    Sm90Smem,
    layout_k,
    layout_k_box,
    layout_p,
    layout_q,
    layout_v,
    layout_v_box,
    make_tma,
)
from backends.cutedsl.sm90_fmha.order import Order, order_of
from backends.cutedsl.sm90_fmha.plan import (
    GROUP_M,
    MERGE_REGISTERS,
    Sm90FmhaPlan,
)
from backends.cutedsl.sm90_fmha.softmax import ROWS


class Sm90Fmha:
    """The host function: tensor maps, launch of the attention kernel, launch of the combine kernel."""

    def __init__(self, plan: Sm90FmhaPlan) -> None:
        self.plan = plan

    @cute.jit
    def __call__(self, **arguments):
        """Queue attention on `stream`. `arguments`: what attention.parameters_of lists for the plan, by name."""
        call = SimpleNamespace(**arguments)
        plan, splits = self.plan, call.splits
        inputs = self._make_tma(call)
        outputs = Outputs(call.mO, call.mLSE, call.mO_part, call.mLSE_part)
        name = f"hd{plan.hd}_{plan.share}_{plan.groups}x{plan.tile_n}" + ("_sinks" if plan.sinks else "")
        name += f"_paged{plan.page_size}" if plan.page_size else "_ragged" if plan.ragged else ""
        name += f"_{plan.o_halves}th" if plan.o_halves > 1 else ""
        name += "_short" if plan.short_parts else ""
        self.kernel.set_name_prefix(f"sm90_fmha_{name}", remove_cutlass_symbol=True, keep_mangled_name=False)
        combine_kernel.set_name_prefix(f"sm90_fmha_combine_{name}", remove_cutlass_symbol=True, keep_mangled_name=False)
        problem = ragged_problem_of(call, plan) if plan.ragged else problem_of(call, plan)
        problem, order = problem.with_divisors(), order_of(plan, problem, call.max_ctas)
        if cutlass.const_expr(plan.share == "lone"):
            grid = [call.mQ.shape[0], problem.row_tiles, splits]
        else:
            grid = [order.grid, 1, 1]
        self.kernel(inputs, outputs, problem, order, arguments.get("mSink")).launch(
            grid=grid,
            block=[plan.threads, 1, 1],
            cluster=[plan.cluster, 1, 1],
            stream=call.stream,
            min_blocks_per_mp=1,
        )
        if splits > 1:
            all_rows = call.mQ.shape[0] * (call.mQ.shape[1] if plan.ragged else problem.rows)
            # With one `or` of both conditions, the last launch would be compiled for a lone warpgroup, too.
            if cutlass.const_expr(plan.share == "lone"):  # noqa: SIM114
                launch_combine(plan.hd, 1, outputs, all_rows, splits, call.stream)
            elif splits <= FEW_SPLITS:
                launch_combine(plan.hd, 1, outputs, all_rows, splits, call.stream)
            else:
                launch_combine(plan.hd, COMBINE_WARPS, outputs, all_rows, splits, call.stream)

    def _make_tma(self, call: SimpleNamespace) -> Inputs:
        plan = self.plan
        if plan.ragged:
            mK, mV = clipped_tensors(call.mK, call.mV)
            return Inputs(
                call.mQ,
                make_tma(mK, layout_k_box(plan), (plan.k_box, plan.slab_columns)),
                make_tma(mV, layout_v_box(plan), (plan.v_columns, plan.v_box)),
            )
        mQ, mK, mV = tma_tensors(plan.hd, call.mQ, call.mK, call.mV)
        return Inputs(
            make_tma(mQ, layout_q(plan), (GROUP_M, plan.hd)),
            make_tma(mK, layout_k(plan), (plan.tile_n, plan.slab_columns)),
            make_tma(mV, layout_v(plan), (plan.v_columns, plan.v_keys)),
        )

    @cute.kernel
    def kernel(self, inputs: Inputs, outputs: Outputs, problem: Problem, order: Order, mSink: cute.Tensor | None):
        """Dispatch the warps to their roles."""
        plan, problem = self.plan, problem.with_tiles(self.plan)
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tensor in inputs[1:] if plan.ragged else inputs:
                cpasync.prefetch_descriptor(tensor.atom)

        allocator = memory.SmemAllocator()
        smem = self._allocate(allocator)
        q = allocate_rings(allocator, plan.q_stages)
        if cutlass.const_expr(plan.share == "columns"):
            rings = ColumnRings(
                q,
                allocate_rings(allocator, plan.k_stages),
                allocate_rings(allocator, plan.v_stages),
                allocate_rings(allocator, plan.p_stages),
            )
            if thread == 0:
                init_rings(q, 1, 4)
                init_rings(rings.k, 1, 4)
                init_rings(rings.v, 1, 8)
                init_rings(rings.p, 1, 8, producers=4)
            self._begin()
            self._share_columns(problem, order, make_loads(plan, inputs, smem), smem, outputs, mSink, rings)
        elif cutlass.const_expr(plan.share == "lone"):
            kv = allocate_rings(allocator, plan.ring_stages)
            lone_warpgroup(plan, problem, make_loads(plan, inputs, smem), smem, outputs, mSink, q, kv, thread)
        else:
            kv = allocate_rings(allocator, plan.ring_stages, plan.rings)
            if thread == 0:
                init_rings(q, 1, 4 * plan.groups)
                init_rings(kv, plan.rings, plan.ring_consumers)
            self._begin()
            if warp < 4:
                cute.arch.setmaxregister_decrease(plan.producer_registers)
                if warp < plan.rings:
                    load_warp(plan, problem, order, make_loads(plan, inputs, smem), q, kv, warp)
                if cutlass.const_expr(plan.ragged):
                    load_warp_of_q(plan, problem, order, inputs.q, smem.sQ, q, warp)
            else:
                cute.arch.setmaxregister_increase(plan.consumer_registers)
                consumer = Consumer(cute.arch.make_warp_uniform((warp - 4) // 4), thread % WARPGROUP)
                consumer_warpgroup(plan, problem, order, smem, outputs, mSink, q, kv, consumer)

    def _begin(self) -> None:
        """Make the barriers visible to all threads."""
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    @cute.jit
    def _share_columns(
        self,
        problem: Problem,
        order: Order,
        loads: Loads,
        smem: Sm90Smem,
        outputs: Outputs,
        mSink: cute.Tensor | None,
        rings: ColumnRings,
    ):
        """Dispatch the warps to their roles when two warpgroups share the columns of O."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < 4:
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            if warp == 0:
                load_warp_of_k(plan, problem, order, loads, rings.k)
            elif warp == 1:
                load_warp_of_v(plan, problem, order, loads, rings.q, rings.v)
            if cutlass.const_expr(plan.ragged):
                load_warp_of_q(plan, problem, order, loads.q, smem.sQ, rings.q, warp)
        elif warp < 8:
            cute.arch.setmaxregister_increase(plan.score_registers)
            score_warpgroup(plan, problem, order, smem, outputs, mSink, rings, thread % WARPGROUP)
        else:
            cute.arch.setmaxregister_increase(plan.consumer_registers)
            half = cute.arch.make_warp_uniform((warp - 8) // 4)
            value_warpgroup(plan, problem, order, smem, outputs, rings, half, thread % WARPGROUP)

    def _allocate(self, allocator: memory.SmemAllocator) -> Sm90Smem:
        plan = self.plan
        sQ, sK = allocate_operand(allocator, layout_q(plan)), allocate_operand(allocator, layout_k(plan))
        if plan.share == "columns":
            sV, sP = allocate_operand(allocator, layout_v(plan)), allocate_operand(allocator, layout_p(plan))
            sFactor = allocator.allocate_tensor(Float32, cute.make_layout((GROUP_M, plan.p_stages)), byte_alignment=16)
            return Sm90Smem(sQ, sK, sV, sP=sP, sFactor=sFactor)
        sV = cute.make_tensor(cute.recast_ptr(sK.iterator, layout_v(plan).inner), layout_v(plan).outer)
        sMerge = sStat = None
        if plan.share == "keys":
            vectors = cute.make_layout((4, WARPGROUP, MERGE_REGISTERS // 4))
            sMerge = allocator.allocate_tensor(Float32, vectors, byte_alignment=16)
            sStat = allocator.allocate_tensor(Float32, cute.make_layout((WARPGROUP, 2 * ROWS)), byte_alignment=16)
        return Sm90Smem(sQ, sK, sV, sMerge, sStat)

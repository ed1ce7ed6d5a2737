"""The FMHA forward kernel of one head dimension, as PTX text, and the program of a case.

Tensor memory has 512 columns. S is double-buffered, 2 x 128 columns. P (bf16, 64 columns) overlays its own S, which is
dead once its row is in registers. For every hd, P is the tensor memory A operand of P V, so it need not go through
shared memory for hd > 64. That leaves 256 columns for O. hd up to 256 fits; hd = 512 does not, as O alone would take
all 512.

So at hd = 512 two CTAs share a row tile. Each computes all of S and owns 256 columns of V and O. Q K^T is done twice:
1.5 times the MMA work of doing everything once. In return the CTAs are independent, the kernel is the one for hd = 256
with a longer K, and the second read of K hits the L2. The alternatives:
- `cta_group::2`, M = 128: 64 rows a CTA, the upper half of N in lanes 64 to 127, so that O takes 256 columns and S 64
  (layout B, facts.md 2.3). No work is repeated. But a row's scores are in two lanes, so its maximum and sum need an
  exchange between warps, and every barrier of the pipeline spans a cluster. M = 256 does not help: each CTA then holds
  128 whole rows of O.
- Two passes over V in one CTA: S is still recomputed, by half as many CTAs, one pass after the other.
- M = 64 (layout F): the halves of O are at lane offsets 0 and 16. P must have the lane offset of its D, so it is stored
  twice; with 64 rows a CTA, K and V are read twice as often.

Shared memory: Q is resident; K and V pass through one ring of stages of up to 128 columns, in the order of use.
Registers: 12 warps leave 168 each, slightly less than a whole row of S needs, so the softmax warps take some from the
others (setmaxnreg). Float arithmetic uses `.rn` throughout, so that ptxas must not contract: every rounding is the same
on a GPU and in the virtual machine, except in the approximate functions and the MMA.

With few queries the keys are split over CTAs, and a second kernel combines their partial results (split_keys.py). The
parts are those of sm_90a: SPLIT_KEYS keys, four tiles. 64 heads of 8 KV heads and 8192 keys then have 128 CTAs. The
number of keys per part is an argument of the program and appears in the name of the entry.
"""

from __future__ import annotations

from functools import cache

from backends.ptx.attention import FmhaShape, tensor_map
from backends.ptx.builder import Builder
from backends.ptx.emitter import module_text
from backends.ptx.sm100_fmha.correction import emit_correction
from backends.ptx.sm100_fmha.frame import Sm100FmhaParams, open_frame
from backends.ptx.sm100_fmha.geometry import ROLES, THREADS, TILE_M, TILE_N, Sm100FmhaTiling
from backends.ptx.sm100_fmha.issue import emit_mma, emit_producer
from backends.ptx.sm100_fmha.softmax import emit_softmax
from backends.ptx.split_keys import KeyPlan, combine_kernel, partial_arguments, split_program
from backends.ptx.tcgen05 import tear_down
from megamoe.contract import Case, KernelArg, Launch, Program

PTX_VERSION = (8, 6)
"""tcgen05 and the .shared::cta destination of tensor copies appeared in PTX ISA 8.6."""


def entry_name(hd: int, part_keys: int | None = None) -> str:
    """The entry name of the kernel for one hd, and for parts of `part_keys` keys if they are split."""
    return f"fmha_forward_hd{hd}" + (f"_parts_of_{part_keys}" if part_keys else "")


@cache
def kernel_text(hd: int, part_keys: int | None = None) -> str:
    """PTX for sm_100a that serves every t, s_k, mask, batch and grouping of one hd.

    With `part_keys`, a multiple of TILE_N, the kernel writes results of parts of that many keys, and the module also
    has the kernel that combines them.
    """
    attention = _attention(hd, part_keys)
    if part_keys is None:
        return attention.text()
    return module_text([attention, combine_kernel(hd, "sm_100a", PTX_VERSION)])


def _attention(hd: int, part_keys: int | None) -> Builder:
    tiling = Sm100FmhaTiling(hd)
    x = Builder(entry_name(hd, part_keys), target="sm_100a", version=PTX_VERSION, block=THREADS)
    x.header(_description(tiling))
    frame = open_frame(x, tiling, part_keys)
    emit_producer(frame)
    emit_mma(frame)
    emit_softmax(frame)
    emit_correction(frame)
    tear_down(x, frame.threads, ROLES, frame.tmem, note=f"all {THREADS} threads")
    return x


def _description(tiling: Sm100FmhaTiling) -> list[str]:
    o_end = tiling.o_column + tiling.o_columns - 1
    lines = [
        f"FMHA forward, hd = {tiling.hd}: O = softmax(scale Q K^T) V, bf16 in and out, fp32 softmax.",
        f"A CTA: {TILE_M} folded query rows of a (batch, kv_head), tiles of {TILE_N} keys, {tiling.o_columns} of O.",
        "Warps 0-3 softmax, 4-7 correction and epilogue, 8 MMA issuer, 9 TMA producer.",
        f"TMEM columns: S/P buffers 0-127 and 128-255, O {tiling.o_column}-{o_end}.",
        "Dynamic shared memory, in bytes:",
    ]
    return lines + tiling.smem.described()


ROWS_PER_STORE = 32


def fmha_program(case: Case, part_keys: int | None = None) -> Program:
    """The program of an fmha case on sm_100a: one launch, or two with workspaces if the keys are split.

    `part_keys`: keys that a CTA visits, a multiple of TILE_N. It overrides the rule of split_keys.py.
    """
    shape = FmhaShape.of(case, "sm_100a")
    tiling = Sm100FmhaTiling(shape.hd)
    plan = KeyPlan.of(shape, TILE_N, part_keys)
    attention = Launch(
        entry=entry_name(shape.hd, plan.part_keys),
        grid=(-(-shape.rows // TILE_M) * tiling.halves, shape.kv_heads, shape.batch * plan.parts),
        block=(THREADS, 1, 1),
        args=_arguments(shape, plan.parts),
        dynamic_smem=tiling.smem.size,
    )
    if plan.parts == 1:
        return Program(target="sm_100a", ptx=kernel_text(shape.hd), launches=(attention,))
    return split_program("sm_100a", kernel_text(shape.hd, plan.part_keys), attention, shape, plan.parts)


def _arguments(shape: FmhaShape, splits: int) -> tuple[KernelArg, ...]:
    maps = {
        "q": tensor_map(shape, "q", shape.rows, TILE_M),
        "k": tensor_map(shape, "k", shape.s_k, TILE_N),
        "v": tensor_map(shape, shape.values, shape.s_k, TILE_N),
    }
    if splits == 1:
        o = tensor_map(shape, "o", shape.rows, ROWS_PER_STORE)
        return Sm100FmhaParams.arguments(**maps, o=o, lse="lse" if shape.lse else None, axes=shape.axes())
    return partial_arguments(shape, maps, splits)

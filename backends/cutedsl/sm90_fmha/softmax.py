# ruff: noqa: N815
# pyright: reportMissingImports=false
"""Softmax of a tile in a warpgroup's registers, in the layout of a wgmma accumulator.

A thread has two rows, i = 0 and 1, at warp * 16 + lane / 4 + 8 i. Of each block of 8 columns it has the two at
2 (lane % 4). Register 4 block + 2 i + j holds (row i, column j of the two). The four lanes of a row are a quad.
"""

from collections.abc import Iterable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass._mlir.dialects import llvm, math
from cutlass.cutlass_dsl import T, dsl_user_op

from backends.cutedsl.attention_tiles import RESCALE_THRESHOLD

ROWS = 2
"""Rows of a thread."""


class RowState(NamedTuple):
    """Statistics of this thread's rows, f32.

    rMax: the maximum of the raw scores so far, or at most RESCALE_THRESHOLD below it. rBase: rMax scaled, or 0 before
    the first score; it is subtracted from scaled scores. rSum: the sum of this thread's exponentials relative to rBase.
    rFactor: the factor that takes O to the maximum after the last tile.
    """

    rMax: cute.Tensor
    rBase: cute.Tensor
    rSum: cute.Tensor
    rFactor: cute.Tensor


def make_row_state() -> RowState:
    """Registers for a RowState."""
    return RowState(*(cute.make_rmem_tensor(ROWS, Float32) for _ in range(4)))


def reset(state: RowState) -> None:
    """Set the state of rows that have seen no key."""
    state.rMax.fill(-Float32.inf)
    state.rSum.fill(0.0)


def row_values(rAcc: cute.Tensor, i: int) -> cute.Tensor:
    """Row i of a flat accumulator: (pair, block)."""
    return cute.make_tensor(rAcc.iterator + 2 * i, cute.make_layout((2, cute.size(rAcc) // 4), stride=(1, 4)))


def quad_reduced(value: Float32, operation) -> Float32:
    """`operation` over the four lanes of a row."""
    for distance in (1, 2):
        value = operation(value, cute.arch.shuffle_sync_bfly(value, offset=distance))
    return value


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a b + c, rounded once.

    A product and a sum would be one instruction on the device all the same: ptxas contracts the two where PTX names no
    rounding. But the PTX virtual machine rounds both, and another ptxas might too.
    """
    values = [Float32(value).ir_value(loc=loc, ip=ip) for value in (a, b, c)]
    return Float32(math.fma(*values, loc=loc, ip=ip))


@cute.jit
def mask_scores(rS: cute.Tensor, first_key: Int32, keys: cute.Tensor):
    """Set the scores of keys that a row does not see to -inf. `first_key`: the key of this thread's first column.

    `keys` (row, begin or end): the first key that each row sees, and one past the last.
    """
    for i in cutlass.range_constexpr(ROWS):
        mask_row(row_values(rS, i), i, first_key, keys)


def mask_row(rRow: cute.Tensor, i: int, first_key: Int32, keys: cute.Tensor) -> None:
    """mask_scores for row `i`, whose scores are in rRow."""
    begin = keys[i, 0] - first_key
    visible = Uint32(cutlass.max(keys[i, 1] - keys[i, 0], Int32(0)))
    for block in range(cute.size(rRow, mode=[1])):
        for j in range(2):
            shown = Boolean(Uint32(Int32(8 * block + j) - begin) < visible)
            rRow[j, block] = cutlass.select_(shown, rRow[j, block], -Float32.inf)


CHAINS = 4
"""Chains of maxima per row. With two, ptxas makes a chain of 32 dependent maxima for 128 keys, 5 clocks each."""


@cute.jit
def raise_maxima(
    rS: cute.Tensor,
    state: RowState,
    scale_log2: Float32,
    rows: cutlass.Constexpr,
    first_only: cutlass.Constexpr = False,
):
    """Update the maxima of `rows` with the scores of a tile. rFactor takes their sums and O to the new maxima.

    A maximum stays while the true one is at most RESCALE_THRESHOLD above it, in powers of two; the factor is then 1.
    The chains of all these rows run side by side. With `first_only`, rows that have a maximum keep it.
    """
    rRows = [row_values(rS, i) for i in rows]
    tops = [[rRow[k % 2, k // 2] for k in range(CHAINS)] for rRow in rRows]
    for block in cutlass.range_constexpr(CHAINS // 2, cute.size(rRows[0], mode=[1])):
        for rRow, chains in zip(rRows, tops, strict=True):
            for j in cutlass.range_constexpr(2):
                k = cutlass.const_expr((2 * block + j) % CHAINS)
                chains[k] = cute.arch.fmax(chains[k], rRow[j, block])
    top = [cute.arch.fmax(cute.arch.fmax(*chains[:2]), cute.arch.fmax(*chains[2:])) for chains in tops]
    for distance in (1, 2):
        others = [cute.arch.shuffle_sync_bfly(value, offset=distance) for value in top]
        top = [cute.arch.fmax(value, other) for value, other in zip(top, others, strict=True)]
    for i, value in zip(rows, top, strict=True):
        old = state.rMax[i]
        # False if both are -inf: -inf - -inf is NaN.
        raised = Boolean((value - old) * scale_log2 > Float32(RESCALE_THRESHOLD))
        if cutlass.const_expr(first_only):
            raised = raised & Boolean(old == -Float32.inf)
        new = cutlass.select_(raised, value, old)
        # A row that has seen no key keeps -inf. Relative to 0 its exponentials are 0, not NaN.
        base = cutlass.select_(new == -Float32.inf, Float32(0.0), new) * scale_log2
        state.rMax[i] = new
        state.rBase[i] = base
        factor = cute.math.exp2(fma(old, scale_log2, -base), fastmath=True)
        state.rFactor[i] = cutlass.select_(raised, factor, Float32(1.0))


@cute.jit
def exponentials(rS: cute.Tensor, state: RowState, scale_log2: Float32, i: cutlass.Constexpr):
    """Replace row i of rS by 2^(scale_log2 (rS - maximum)), and add them to its sum."""
    rRow = row_values(rS, i)
    sums = [Float32(0.0), Float32(0.0)]
    block_exponentials(rRow, sums, -state.rBase[i], scale_log2, range(cute.size(rRow, mode=[1])))
    state.rSum[i] = fma(state.rSum[i], state.rFactor[i], total(sums))


def total(sums: list[Float32]) -> Float32:
    """The sum of one or two sums."""
    return sums[0] if len(sums) == 1 else sums[0] + sums[1]


def block_exponentials(
    rRow: cute.Tensor, sums: list[Float32], below: Float32, scale_log2: Float32, blocks: Iterable[int]
) -> None:
    """Replace the scores in some blocks of a row by 2^(scale_log2 score + below), and add them to one or two sums."""
    for block in blocks:
        for j in range(2):
            rRow[j, block] = cute.math.exp2(fma(rRow[j, block], scale_log2, below), fastmath=True)
            k = j % len(sums)
            sums[k] = sums[k] + rRow[j, block]


@cute.jit
def rescale(rO: cute.Tensor, rFactor: cute.Tensor):
    """Multiply O of each row by its factor, unless the factors of all rows of the warp are 1."""
    if cute.arch.vote_any_sync(Boolean(rFactor[0] != Float32(1.0)) | Boolean(rFactor[1] != Float32(1.0))):
        for i in cutlass.range_constexpr(ROWS):
            rRow = row_values(rO, i)
            factor = rFactor[i]
            for block in cutlass.range_constexpr(cute.size(rRow, mode=[1])):
                for j in cutlass.range_constexpr(2):
                    rRow[j, block] = rRow[j, block] * factor


@dsl_user_op
def bf16_pair(low: Float32, high: Float32, *, loc=None, ip=None) -> Int32:
    """Two f32 rounded to bf16, as the halves of a word.

    Inline assembly, because LLVM moves its own conversion past the head of the loop. P would then stay in f32 while the
    next S comes, which takes 32 more registers for a tile of 128 keys, and the MMA would wait for the rounding.
    """
    values = [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)]
    instruction = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    return Int32(llvm.inline_asm(T.i32(), values, instruction, "=r,f,f", has_side_effects=True, loc=loc, ip=ip))


def pair_words(rP: cute.Tensor) -> cute.Tensor:
    """P as 32-bit words of two bf16."""
    return cute.make_tensor(cute.recast_ptr(rP.iterator, dtype=Int32), cute.make_layout(cute.size(rP) // 2))


@cute.jit
def round_p(rS: cute.Tensor, rP: cute.Tensor):
    """Round P to bf16. The accumulator of one wgmma is, pair by pair, the A operand of the next."""
    round_pairs(rS, rP, range(cute.size(rP) // 2))


def round_pairs(rS: cute.Tensor, rP: cute.Tensor, pairs: Iterable[int]) -> None:
    """Round some pairs of P to bf16."""
    words = pair_words(rP)
    for k in pairs:
        words[k] = bf16_pair(rS[2 * k], rS[2 * k + 1])

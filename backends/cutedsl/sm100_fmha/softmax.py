# pyright: reportMissingImports=false
"""The softmax warpgroups, a thread per row: S from tensor memory, P to the MMA warp, statistics to the correction."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from backends.cutedsl.attention_tiles import RESCALE_THRESHOLD, AttentionItem, Problem, attention_item
from backends.cutedsl.device import WARPGROUP
from backends.cutedsl.sm100_fmha.operands import FmhaSmem
from backends.cutedsl.sm100_fmha.plan import TILE_M, TILE_N, Sm100FmhaPlan
from backends.cutedsl.tcgen05 import CHUNK, fence_after_sync, fence_before_sync, load_row, store_row


@dataclass
class SoftmaxRings:
    """A softmax warpgroup's ends of the rings. `chain_in`: from the other warpgroup; `chain_out`: to it.

    Functions that advance a ring return the rings, because CuTeDSL carries only assigned values through a run-time loop
    or branch.
    """

    s: PipelineConsumer
    p: PipelineProducer
    stat: PipelineProducer
    chain_in: PipelineConsumer
    chain_out: PipelineProducer


@cute.jit
def mask_scores(rS: cute.Tensor, key_begin: Int32, key_end: Int32):
    """Set columns outside [key_begin, key_end), both relative to the tile, to -inf: one unsigned comparison each."""
    visible = Uint32(cutlass.max(key_end - key_begin, Int32(0)))
    for column in cutlass.range_constexpr(TILE_N):
        shown = Boolean(Uint32(Int32(column) - key_begin) < visible)
        rS[column] = cutlass.select_(shown, rS[column], -Float32.inf)


@cute.jit
def row_maximum(rS: cute.Tensor) -> Float32:
    """max(rS), in four chains."""
    chains = [rS[0], rS[1], rS[2], rS[3]]
    for column in cutlass.range_constexpr(4, TILE_N):
        chains[column % 4] = cute.arch.fmax(chains[column % 4], rS[column])
    return cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))


def as_bf16(words: cute.Tensor) -> cute.Tensor:
    """The same registers as bf16, two a word."""
    return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=BFloat16), cute.make_layout(2 * cute.size(words)))


@cute.jit
def exponentials(rS: cute.Tensor, rP: cute.Tensor, scale_log2: Float32, shift: Float32, sums):
    """rS = 2^(scale_log2 rS + shift), rP = bf16(rS), 32 columns. Returns `sums`, two pairs, plus the unrounded rS."""
    even, odd = sums
    for c in cutlass.range_constexpr(0, CHUNK, 4):
        for k in cutlass.range_constexpr(c, c + 4, 2):
            x, y = cute.arch.fma_packed_f32x2((rS[k], rS[k + 1]), (scale_log2, scale_log2), (shift, shift))
            rS[k] = cute.math.exp2(x, fastmath=True)
            rS[k + 1] = cute.math.exp2(y, fastmath=True)
        even = cute.arch.add_packed_f32x2(even, (rS[c], rS[c + 1]))
        odd = cute.arch.add_packed_f32x2(odd, (rS[c + 2], rS[c + 3]))
    rP.store(rS.load().to(BFloat16))
    return even, odd


@cute.jit
def store_p_smem(rP: cute.Tensor, sP: cute.Tensor, thread: Int32):
    """Store P as the A operand in swizzled shared memory (`make_smem_layout_a`), from a tensor-memory load's registers.

    This needs no TiledCopy. `tcgen05.ld.32x32b` gives a thread one whole row. `make_smem_layout_a` is a function of
    (row, key) like any other layout, only nested as ((row, key % 16), 0, (key / 16 % 4, key / 64)). Its colexicographic
    order is row first, then key, so composing it with the plain (128, 128):(1, 128) flattens it to sP[row, key]. A row
    of that tensor is two runs of 64 contiguous keys, eight 16-byte vectors each. The swizzle belongs to the pointer of
    sP and is applied to the final address; it permutes 16-byte units, so a vector stays whole. make_tiled_copy_C and
    make_tiled_copy_D fail here: they look for one thread layout that fits both the accumulator and the operand, but the
    two only need to share the row.

    A warp's store touches 32 rows, 16 bytes each. The swizzle spreads every 8 rows over all 32 banks, so the 512 bytes
    take the minimum of four passes. The MMA reads through the async proxy, so a proxy fence follows.
    """
    sP_row_key = cute.composition(sP, cute.make_layout((TILE_M, TILE_N)))
    sP_row = cute.logical_divide(sP_row_key[thread, None], cute.make_layout(8))
    rP_vectors = cute.logical_divide(rP, cute.make_layout(8))
    for vector in cutlass.range_constexpr(TILE_N // 8):
        cute.autovec_copy(rP_vectors[None, vector], sP_row[None, vector])
    cute.arch.fence_view_async_shared()


@cute.jit
def take_base(sBase: cute.Tensor, thread: Int32, rings: SoftmaxRings):
    """The row maximum that the other warpgroup used for the previous tile."""
    turn = rings.chain_in.wait_and_advance()
    base = sBase[thread, turn.index]
    turn.release()
    rings.chain_in.advance()
    return base, rings


@cute.jit
def give_base(sBase: cute.Tensor, thread: Int32, base: Float32, rings: SoftmaxRings):
    """Hand the row maximum of this tile to the other warpgroup."""
    turn = rings.chain_out.acquire_and_advance()
    sBase[thread, turn.index] = base
    turn.commit()
    rings.chain_out.advance()
    return rings


@cute.jit
def finite(base: Float32) -> Float32:
    """`base`, or 0 if a row has seen no key, so that exponentials of scores of -inf are 0 and not NaN."""
    return cutlass.select_(base == -Float32.inf, Float32(0.0), base)


@cute.jit
def keep_or_raise(previous: Float32, tile_max: Float32, scale_log2: Float32) -> Float32:
    """The new maximum: the previous one while the true one is at most RESCALE_THRESHOLD above it."""
    keep = (tile_max - previous) * scale_log2 <= RESCALE_THRESHOLD
    return cutlass.select_(keep, previous, tile_max)


@cute.jit
def rescaling(old: Float32, new: Float32, scale_log2: Float32) -> Float32:
    """The factor that takes a sum from the maximum `old` to `new`; exactly 1 if the two are equal and finite."""
    return cute.math.exp2((old - finite(new)) * scale_log2, fastmath=True)


@cute.jit
def give_p_tmem(
    plan: Sm100FmhaPlan,
    problem: Problem,
    tmem_ptr: cute.Pointer,
    rS: cute.Tensor,
    rP_words: cute.Tensor,
    base: Float32,
    thread: Int32,
    rings: SoftmaxRings,
):
    """Store the exponentials of a row of S relative to `base`, P, in tensor memory. Returns their sum.

    P is the A operand: two bf16 per word, word c of a row in column c. It goes out in quarters, each stored while the
    next is computed. The stage was last read two tiles ago, so the wait can come first. At most 16 words of P are in
    registers at a time: all 64 beside 128 of S spilled 80 bytes (ptxas 13.5).
    """
    sums = ((Float32(0.0), Float32(0.0)), (Float32(0.0), Float32(0.0)))
    p_tile = rings.p.acquire_and_advance()
    fence_after_sync()
    for chunk in cutlass.range_constexpr(TILE_N // CHUNK):
        rS_chunk, words = chunk_of(rS, rP_words, chunk)
        sums = exponentials(rS_chunk, as_bf16(words), problem.scale_log2, -base * problem.scale_log2, sums)
        column = plan.tmem_p + p_tile.index * (TILE_N // 2) + chunk * CHUNK // 2
        store_row(words, tmem_ptr + column, thread)
    cute.arch.fence_view_async_tmem_store()
    fence_before_sync()
    p_tile.commit()
    total = cute.arch.add_packed_f32x2(*sums)
    return total[0] + total[1], rings


@cute.jit
def give_p_smem(
    problem: Problem,
    sP: cute.Tensor,
    rS: cute.Tensor,
    rP_words: cute.Tensor,
    base: Float32,
    thread: Int32,
    rings: SoftmaxRings,
):
    """As give_p_tmem, in shared memory. The tensor core may still be reading the only stage, so the wait comes last."""
    sums = ((Float32(0.0), Float32(0.0)), (Float32(0.0), Float32(0.0)))
    for chunk in cutlass.range_constexpr(TILE_N // CHUNK):
        rS_chunk, words = chunk_of(rS, rP_words, chunk)
        sums = exponentials(rS_chunk, as_bf16(words), problem.scale_log2, -base * problem.scale_log2, sums)
    p_tile = rings.p.acquire_and_advance()
    store_p_smem(as_bf16(rP_words), sP[None, None, None, p_tile.index], thread)
    p_tile.commit()
    total = cute.arch.add_packed_f32x2(*sums)
    return total[0] + total[1], rings


def chunk_of(rS: cute.Tensor, rP_words: cute.Tensor, chunk: int) -> tuple[cute.Tensor, cute.Tensor]:
    """32 scores of a row, and the 16 words that they become."""
    scores = cute.make_tensor(rS.iterator + chunk * CHUNK, cute.make_layout(CHUNK))
    return scores, cute.make_tensor(rP_words.iterator + chunk * CHUNK // 2, cute.make_layout(CHUNK // 2))


@cute.jit
def scores_of_tile(
    tmem_ptr: cute.Pointer,
    thread: Int32,
    item: AttentionItem,
    tile: Int32,
    keys: tuple[Int32, Int32],
    rings: SoftmaxRings,
):
    """This thread's row of S, with -inf outside `keys` (first, one past the last) if the tile needs a mask."""
    s_tile = rings.s.wait_and_advance()
    fence_after_sync()
    rS = cute.make_rmem_tensor(TILE_N, Float32)
    load_row(tmem_ptr + s_tile.index * TILE_N, rS, thread)
    cute.arch.fence_view_async_tmem_load()
    fence_before_sync()
    s_tile.release()
    if tile < item.clear_first or tile >= item.clear_last:
        key_begin, key_end = keys
        mask_scores(rS, key_begin - tile * TILE_N, key_end - tile * TILE_N)
    return rS, rings


@cute.jit
def raise_base(
    plan: Sm100FmhaPlan,
    problem: Problem,
    smem: FmhaSmem,
    thread: Int32,
    i: Int32,
    base: Float32,
    tile_max: Float32,
    rings: SoftmaxRings,
):
    """The row maximum for tile `i` of an item. The other warpgroup gets it; the correction gets the factor for O."""
    previous = base
    if cutlass.const_expr(plan.softmax_groups == 2):  # noqa: SIM102 (one is decided at compile time, one at run time)
        if i > 0:
            previous, rings = take_base(smem.sBase, thread, rings)
    raised = keep_or_raise(previous, cute.arch.fmax(previous, tile_max), problem.scale_log2)
    if cutlass.const_expr(plan.softmax_groups == 2):
        rings = give_base(smem.sBase, thread, raised, rings)
    stat_tile = rings.stat.acquire_and_advance()
    smem.sStat[thread, stat_tile.index] = rescaling(previous, raised, problem.scale_log2)
    stat_tile.commit()
    return raised, rings


@cute.jit
def softmax_item(
    plan: Sm100FmhaPlan,
    problem: Problem,
    tmem_ptr: cute.Pointer,
    smem: FmhaSmem,
    thread: Int32,
    item: AttentionItem,
    first_turn: Int32,
    rings: SoftmaxRings,
):
    """Compute this warpgroup's tiles of an item from `first_turn` on. Returns its last maximum and its row sum."""
    groups = cutlass.const_expr(plan.softmax_groups)
    position = (item.row_tile * TILE_M + thread) % problem.t + problem.s_k - problem.t
    keys = position - problem.left + 1, cutlass.min(position + problem.right + 1, problem.s_k)
    rP_words = cute.make_rmem_tensor(TILE_N // 2, Float32)
    base = -Float32.inf
    row_sum = Float32(0.0)
    for i in cutlass.range(first_turn, item.tiles, groups, unroll=1):
        rS, rings = scores_of_tile(tmem_ptr, thread, item, item.first_tile + i, keys, rings)
        raised, rings = raise_base(plan, problem, smem, thread, i, base, row_maximum(rS), rings)
        row_sum = row_sum * rescaling(base, raised, problem.scale_log2)
        base = raised
        if cutlass.const_expr(plan.p_in_tmem):
            tile_sum, rings = give_p_tmem(plan, problem, tmem_ptr, rS, rP_words, finite(base), thread, rings)
        else:
            tile_sum, rings = give_p_smem(problem, smem.sP, rS, rP_words, finite(base), thread, rings)
        row_sum += tile_sum
        if cutlass.const_expr(groups == 2):
            rings.s.advance()
            rings.p.advance()
            rings.stat.advance()
    return base, row_sum, rings


@cute.jit
def softmax_warpgroup(
    plan: Sm100FmhaPlan, problem: Problem, tmem_ptr: cute.Pointer, smem: FmhaSmem, rings: SoftmaxRings
):
    """The softmax work loop. Each tile sends the factor for O; an item ends with (row sum, row maximum of raw scores).

    Two warpgroups take tiles in turn, counted over all items. So each uses only one stage of S, P, stat and chain, and
    advances its rings by two stages. The row maximum goes from one to the other tile by tile (`chain`). Each sums its
    own tiles. At the end of an item the warpgroup that did not have the last tile takes the last maximum from the chain
    and rescales its sum to it.
    """
    groups = cutlass.const_expr(plan.softmax_groups)
    thread, _, _ = cute.arch.thread_idx()
    group = thread // WARPGROUP
    thread = thread % WARPGROUP
    if cutlass.const_expr(groups == 2):
        rings.s.advance(group)
        rings.p.advance(group)
        rings.stat.advance(group)
        rings.chain_out.advance(group)
        rings.chain_in.advance(1 - group)
    start, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    tiles_before = Int32(0)
    for index in cutlass.range(start, problem.work_items, step, unroll=1):
        item = attention_item(plan, problem, index)
        first_turn = (tiles_before + group) % groups
        base, row_sum, rings = softmax_item(plan, problem, tmem_ptr, smem, thread, item, first_turn, rings)
        tiles_before += item.tiles
        first = (tiles_before + group) % groups == 0
        if cutlass.const_expr(groups == 2):  # noqa: SIM102
            if item.tiles > 0 and first:
                last, rings = take_base(smem.sBase, thread, rings)
                row_sum = row_sum * rescaling(base, last, problem.scale_log2)
                base = last
        final = rings.stat.acquire_and_advance()
        smem.sStat[thread, final.index] = row_sum
        if first:
            smem.sMax[thread, final.index % plan.max_stages] = base
        final.commit()
        if cutlass.const_expr(groups == 2):
            rings.stat.advance()

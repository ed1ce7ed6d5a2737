# pyright: reportMissingImports=false
"""A consumer warpgroup: S = Q K^T, softmax, O += P V over the key tiles of its work items, all in registers."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from backends.cutedsl.attention_tiles import AttentionItem, Outputs, Problem
from backends.cutedsl.device import LOG2_E, WARPGROUP
from backends.cutedsl.divisor import parts
from backends.cutedsl.ring import RingPlace, StageRing, advanced, release, ring_number, ring_start, wait_full
from backends.cutedsl.sm90_fmha.epilogue import finish_item
from backends.cutedsl.sm90_fmha.operands import (
    Consumer,
    Operands,
    Registers,
    Sm90Smem,
    first_row,
    make_operands,
    make_pv_mma,
    make_qk_mma,
    make_registers,
    visible_keys,
)
from backends.cutedsl.sm90_fmha.order import Order, deal, dealt_item
from backends.cutedsl.sm90_fmha.plan import GROUP_M, Sm90FmhaPlan
from backends.cutedsl.sm90_fmha.softmax import (
    ROWS,
    RowState,
    block_exponentials,
    exponentials,
    mask_scores,
    raise_maxima,
    rescale,
    reset,
    round_p,
    round_pairs,
    row_values,
    total,
)
from backends.cutedsl.sm90_fmha.trust import TrustedTile, settle

TURN_BARRIER = 2
"""Named barriers: warpgroup g waits for its turn at TURN_BARRIER + g."""


class QView(NamedTuple):
    """The Q tile of an item: its place in the ring of Q, and the index of the 64 rows that a warpgroup reads."""

    ring: StageRing
    place: RingPlace
    tile: Int32


@cute.jit
def issue_qk(
    plan: Sm90FmhaPlan,
    operands: Operands,
    rS: cute.Tensor,
    q_stage: Int32,
    kv: StageRing,
    place: RingPlace,
    waits: cutlass.Constexpr = True,
):
    """Issue S = Q K^T of the tile at `place`. Returns the next place. With `waits`, wait for the tile first."""
    qk_mma = make_qk_mma(plan)
    qk_thread = qk_mma.get_slice(0)
    tSrS = cute.make_tensor(
        rS.iterator, qk_thread.make_fragment_C(qk_thread.partition_shape_C((GROUP_M, plan.tile_n))).layout
    )
    k_blocks = cute.size(operands.tSrK, mode=[2])
    warpgroup.fence()
    if cutlass.const_expr(waits):
        wait_full(kv, place)
    for k_block in cutlass.range_constexpr(k_blocks):
        qk_mma.set(warpgroup.Field.ACCUMULATE, k_block != 0)
        cute.gemm(
            qk_mma,
            tSrS,
            operands.tSrQ[None, None, k_block, q_stage],
            operands.tSrK[None, None, k_block, place.stage],
            tSrS,
        )
    warpgroup.commit_group()
    return advanced(kv, place)


@cute.jit
def issue_pv(
    plan: Sm90FmhaPlan,
    operands: Operands,
    registers: Registers,
    kv: StageRing,
    place: RingPlace,
    waits: cutlass.Constexpr = True,
    adds: cutlass.Constexpr = True,
):
    """Issue O += P V of the tile at `place`, or O = P V without `adds`. Returns the next place. `waits`: as above."""
    pv_mma = make_pv_mma(plan)
    pv_mma.set(warpgroup.Field.ACCUMULATE, True)
    pv_thread = pv_mma.get_slice(0)
    layout_o = pv_thread.make_fragment_C(pv_thread.partition_shape_C((GROUP_M, plan.o_columns))).layout
    tOrP = cute.make_tensor(
        registers.rP.iterator, pv_thread.make_fragment_A(pv_thread.partition_shape_A((GROUP_M, plan.tile_n))).layout
    )
    tOrO = cute.make_tensor(registers.rO.iterator, layout_o)
    warpgroup.fence()
    if cutlass.const_expr(waits):
        wait_full(kv, place)
    for k_block in cutlass.range_constexpr(plan.tile_n // 16):
        if cutlass.const_expr(not adds):
            pv_mma.set(warpgroup.Field.ACCUMULATE, k_block != 0)
        cute.gemm(pv_mma, tOrO, tOrP[None, None, k_block], operands.tOrV[None, None, k_block, place.stage], tOrO)
    warpgroup.commit_group()
    return advanced(kv, place)


@cute.jit
def consumer_warpgroup(
    plan: Sm90FmhaPlan,
    problem: Problem,
    order: Order,
    smem: Sm90Smem,
    outputs: Outputs,
    mSink: cute.Tensor | None,
    q: StageRing,
    kv: StageRing,
    consumer: Consumer,
):
    """The work loop of a consumer warpgroup. `kv`: the first ring of slabs. `mSink`: as in begin_rows."""
    group = consumer.group
    kv = ring_number(kv, own_ring(plan, consumer))
    kv_place = ring_start(kv, False)
    q_place = ring_start(q, False)
    operands = make_operands(plan, smem)
    registers = make_registers(plan)
    if cutlass.const_expr(plan.turns):  # noqa: SIM102 (one is decided at compile time, one at run time)
        if group == plan.groups - 1:
            give_turn(plan, group)
    hand = deal(plan, problem, order)
    for number in cutlass.range(hand.start, hand.stop, hand.step, unroll=1):
        item = dealt_item(plan, problem, order, number)
        own = problem.of(item.sequence, plan)
        begin_rows(plan, own, item, registers.rows, mSink, consumer)
        registers.rO.fill(0.0)
        if item.tiles > 0:
            q_stage = q_place.stage
            if cutlass.const_expr(plan.share == "rows"):
                q_stage = q_stage * plan.groups + group
            wait_full(q, q_place)
            q_view = QView(q, q_place, q_stage)
            kv_place = attend(plan, own, item, operands, registers, smem, q_view, kv, kv_place, consumer)
            q_place = advanced(q, q_place)
        finish_item(plan, own, outputs, smem, item, registers, consumer)


@cute.jit
def begin_rows(
    plan: Sm90FmhaPlan,
    problem: Problem,
    item: AttentionItem,
    state: RowState,
    mSink: cute.Tensor | None,
    consumer: Consumer,
):
    """Set the state of rows that have seen no key. `mSink` (heads) f32: the sinks, None if there are none.

    A row begins as if its sink were a score already seen: the sink is the maximum, and the first lane of the quad has
    its exponential, 1, in the sum. If splits or warpgroups share the keys, only the first of them counts the sink.
    """
    reset(state)
    if cutlass.const_expr(mSink is not None):
        heads = problem.group if plan.ragged else problem.head_and_token(problem.rows)[0]
        first_head = parts(item.kv_batch, parts(Int32(cute.size(mSink)), heads)[0])[1] * heads
        row = first_row(plan, item, consumer)
        is_first = Boolean(item.split == 0)
        if cutlass.const_expr(plan.share == "keys"):
            is_first = is_first and Boolean(consumer.group == 0)
        for i in cutlass.range_constexpr(ROWS):
            if is_first and row + 8 * i < problem.rows:
                head = first_head + problem.head_and_token(row + 8 * i, same=False)[0]
                sink = mSink[head]  # pyright: ignore[reportOptionalSubscript] (const_expr narrows nothing)
                state.rMax[i] = sink * (LOG2_E / problem.scale_log2)
                state.rSum[i] = cutlass.select_(consumer.thread % 4 == 0, Float32(1.0), Float32(0.0))


def own_ring(plan: Sm90FmhaPlan, consumer: Consumer) -> Int32:
    """The number of the ring that this warpgroup reads."""
    return consumer.group if plan.rings > 1 else Int32(0)


@cute.jit
def attend(
    plan: Sm90FmhaPlan,
    problem: Problem,
    item: AttentionItem,
    operands: Operands,
    registers: Registers,
    smem: Sm90Smem,
    q: QView,
    kv: StageRing,
    place: RingPlace,
    consumer: Consumer,
):
    """Compute this warpgroup's tiles of an item; O stays unnormalised. Returns the place in the ring after them.

    Q is released after the last S, so that the next item's Q arrives during the last O += P V and the epilogue.
    """
    group, ring = consumer.group, own_ring(plan, consumer)
    rKeys = None if plan.finds_keys_anew else visible_keys(plan, problem, item, consumer)
    tiles = own_tiles(plan, problem, item, group)
    skipped = item.tiles - tiles
    if ring < tiles:
        k_stage = place.stage
        waits = cutlass.const_expr(not plan.trusts_maxima or not plan.waits_first)
        if cutlass.const_expr(not waits):
            wait_full(kv, place)
        take_turn(plan, group)
        place = issue_qk(plan, operands, registers.rS, q.tile, kv, place, waits)
        give_turn(plan, group)
        warpgroup.wait_group(0)
        release(kv, k_stage)
        mask_tile(plan, problem, item, registers.rS, item.first_tile + ring, rKeys, consumer)
        softmax_tile(plan, problem, registers, kv, place)
        round_p(registers.rS, registers.rP)
        # Absolute tile numbers take a register less than numbers relative to the item's first tile.
        origin = item.first_tile if plan.trusts_maxima else 0
        for i in cutlass.range(origin + ring + plan.rings, origin + tiles, plan.rings, unroll=1):
            tile = i if plan.trusts_maxima else item.first_tile + i
            k_stage = place.stage
            # With tiles of 80 keys the waits take an eighth of the MMAs' time, so they come before the turn.
            if cutlass.const_expr(plan.waits_first):
                wait_full(kv, place)
                wait_full(kv, advanced(kv, place))
            take_turn(plan, group)
            place = issue_qk(plan, operands, registers.rS, q.tile, kv, place, not plan.waits_first)
            v_place = place
            place = issue_pv(plan, operands, registers, kv, place, not plan.waits_first)
            give_turn(plan, group)
            warpgroup.wait_group(1)
            if cutlass.const_expr(not plan.trusts_maxima):
                release(kv, k_stage)
            mask_tile(plan, problem, item, registers.rS, tile, rKeys, consumer)
            if cutlass.const_expr(plan.trusts_maxima):
                rTileSum = cute.make_rmem_tensor(ROWS, Float32)
                trusting_tile(plan, problem, registers, rTileSum, kv, v_place)
                trusted = TrustedTile(q.tile, k_stage, tile, rKeys, rTileSum)
                settle(plan, problem, item, smem, registers, trusted, consumer)
                release(kv, k_stage)
            else:
                softmax_tile(plan, problem, registers, kv, v_place)
                end_block(registers.rows.rSum[0] + registers.rows.rSum[1], kv, v_place)
                warpgroup.wait_group(0)
                release(kv, v_place.stage)
                rescale(registers.rO, registers.rows.rFactor)
                round_p(registers.rS, registers.rP)
        release(q.ring, q.place.stage)
        k_place, v_place = place, place_of_last_v(plan, kv, place, skipped)
        if cutlass.const_expr(not waits):
            wait_full(kv, v_place)
        place = issue_pv(plan, operands, registers, kv, v_place, waits)
        warpgroup.wait_group(0)
        release(kv, v_place.stage)
        skip_k(plan, group, kv, k_place, skipped)
        place = skip_pairs(plan, group, kv, place, skipped)
    else:
        release(q.ring, q.place.stage)
        place = skip_k(plan, group, kv, place, skipped)
        place = skip_pairs(plan, group, kv, place, skipped)
    return place


def own_tiles(plan: Sm90FmhaPlan, problem: Problem, item: AttentionItem, group: Int32) -> Int32:
    """How many tiles of an item this warpgroup computes. It skips the last ones, which none of its 64 rows sees.

    P would be zero there and leave O, the sums and the maxima unchanged.
    """
    if not plan.skips:
        return item.tiles
    first_row = item.row_tile * plan.tile_m + group * GROUP_M
    last_row = cutlass.min(first_row + GROUP_M, problem.rows) - 1
    last_head, token = problem.head_and_token(last_row)
    one_head = Boolean(problem.head_and_token(first_row)[0] == last_head)
    last_token = cutlass.select_(one_head, token, problem.t - 1)
    key_end = cutlass.max(cutlass.min(last_token + problem.s_k - problem.t + problem.right + 1, problem.s_k), Int32(0))
    tile_end = parts(key_end + plan.tile_n - 1, Int32(plan.tile_n))[0]
    seen = cutlass.max(cutlass.min(tile_end - item.first_tile, item.tiles), Int32(0))
    return cutlass.select_(first_row < problem.rows, seen, Int32(0))


def place_of_last_v(plan: Sm90FmhaPlan, kv: StageRing, place: RingPlace, skipped: Int32) -> RingPlace:
    """The place of the last V tile that is read. If tiles are skipped, the first skipped K tile comes before it."""
    if not plan.skips:
        return place
    following, some = advanced(kv, place), Boolean(skipped > 0)
    return RingPlace(
        cutlass.select_(some, following.stage, place.stage), cutlass.select_(some, following.parity, place.parity)
    )


@cute.jit
def skip_slabs(kv: StageRing, place: RingPlace, count: cutlass.Constexpr):
    """Release slabs unread. Wait for them first: an arrival before a slab is full could count a round too early."""
    for _ in cutlass.range_constexpr(count):
        wait_full(kv, place)
        release(kv, place.stage)
        place = advanced(kv, place)
    return place


@cute.jit
def skip_k(plan: Sm90FmhaPlan, group: Int32, kv: StageRing, place: RingPlace, skipped: Int32):
    """Skip the first K tile of `skipped` tiles. In the ring it comes before the last V tile that is read."""
    if cutlass.const_expr(plan.skips):  # noqa: SIM102 (one is decided at compile time, one at run time)
        if skipped > 0:
            take_turn(plan, group)
            give_turn(plan, group)
            place = skip_slabs(kv, place, 1)
    return place


@cute.jit
def skip_pairs(plan: Sm90FmhaPlan, group: Int32, kv: StageRing, place: RingPlace, skipped: Int32):
    """Skip the other K tiles of `skipped` tiles, and their V tiles."""
    if cutlass.const_expr(plan.skips):
        for _ in cutlass.range(1, skipped, unroll=1):
            take_turn(plan, group)
            give_turn(plan, group)
            place = skip_slabs(kv, place, 2)
        if skipped > 0:
            place = skip_slabs(kv, place, 1)
    return place


@cute.jit
def end_block(value: Float32, kv: StageRing, place: RingPlace):
    """End a basic block after the instructions that compute `value`, which is never negative.

    ptxas 13.5 moves a wait to the head of its basic block, before the exponentials that should run under P V. The body
    of this branch is a loop, so that ptxas cannot predicate it.
    """
    if value < Float32(0.0):
        wait_full(kv, place)


@cute.jit
def take_turn(plan: Sm90FmhaPlan, group: Int32):
    """Wait until the other warpgroup has issued its MMAs.

    Only needed where the two read the same tiles. Without turns they would run in step, both at the tensor core and
    then both at their exponentials.
    """
    if cutlass.const_expr(plan.turns):
        cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=2 * WARPGROUP)


@cute.jit
def give_turn(plan: Sm90FmhaPlan, group: Int32):
    """Let the other warpgroup issue."""
    if cutlass.const_expr(plan.turns):
        following = cutlass.select_(group == plan.groups - 1, Int32(0), group + 1)
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + following, number_of_threads=2 * WARPGROUP)


@cute.jit
def mask_tile(
    plan: Sm90FmhaPlan,
    problem: Problem,
    item: AttentionItem,
    rS: cute.Tensor,
    tile: Int32,
    rKeys: cute.Tensor | None,
    consumer: Consumer,
):
    """Mask the scores of a tile if a row does not see all of it.

    If `rKeys` is None, the visible keys are computed here. That saves registers where few tiles are masked.
    """
    if tile < item.clear_first or tile >= item.clear_last:
        first_key = tile * plan.tile_n + 2 * (consumer.thread % 4)
        if cutlass.const_expr(rKeys is None):
            mask_scores(rS, first_key, visible_keys(plan, problem, item, consumer))
        else:
            mask_scores(rS, first_key, rKeys)


@cute.jit
def softmax_tile(plan: Sm90FmhaPlan, problem: Problem, registers: Registers, kv: StageRing, place: RingPlace):
    """Replace the scores of a tile by exponentials, and update the state of the rows.

    Left alone, ptxas computes the maximum of the second row after the exponentials of the first: 31 dependent maxima in
    two chains, 5 clocks each, with nothing to run beside them. Three warpgroups then wait for one another. Ending a
    block after both maxima makes four chains. With two warpgroups a tile of 128 or 80 keys gains nothing by it.
    """
    rS, rows, scale_log2 = registers.rS, registers.rows, problem.scale_log2
    if cutlass.const_expr(plan.groups == 3):
        raise_maxima(rS, rows, scale_log2, tuple(range(ROWS)))
        end_block(rows.rFactor[0] + rows.rFactor[1], kv, place)
        for i in cutlass.range_constexpr(ROWS):
            exponentials(rS, rows, scale_log2, i)
    else:
        for i in cutlass.range_constexpr(ROWS):
            raise_maxima(rS, rows, scale_log2, (i,))
            exponentials(rS, rows, scale_log2, i)


@cute.jit
def trusting_tile(
    plan: Sm90FmhaPlan, problem: Problem, registers: Registers, rTileSum: cute.Tensor, kv: StageRing, place: RingPlace
):
    """Replace a tile's scores by exponentials relative to the maxima so far, and round P; end P V of the tile before.

    Rows that have seen no key take the tile's maximum. rTileSum receives the tile's sums. The exponentials of some keys
    overlap P V of the tile before, whose slab at `place` is then released. The others overlap the rounding.
    """
    rS, rows, scale_log2 = registers.rS, registers.rows, problem.scale_log2
    if cute.arch.vote_any_sync(Boolean(rows.rMax[0] == -Float32.inf) | Boolean(rows.rMax[1] == -Float32.inf)):
        raise_maxima(rS, rows, scale_log2, tuple(range(ROWS)), first_only=True)
    rRows = [row_values(rS, i) for i in range(ROWS)]
    sums = [[Float32(0.0)] * plan.sum_chains for _ in range(ROWS)]
    hidden, blocks = plan.hidden_keys // 8, plan.tile_n // 8
    for i in cutlass.range_constexpr(ROWS):
        block_exponentials(rRows[i], sums[i], -rows.rBase[i], scale_log2, range(hidden))
    end_block(sums[0][0] + sums[1][0], kv, place)
    warpgroup.wait_group(0)
    release(kv, place.stage)
    for block in cutlass.range_constexpr(blocks):
        for i in cutlass.range_constexpr(ROWS):
            if cutlass.const_expr(hidden + block < blocks):
                block_exponentials(rRows[i], sums[i], -rows.rBase[i], scale_log2, (hidden + block,))
        round_pairs(rS, registers.rP, (2 * block, 2 * block + 1))
    for i in cutlass.range_constexpr(ROWS):
        rTileSum[i] = total(sums[i])

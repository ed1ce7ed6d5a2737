"""The FMHA forward kernel for sm_90a with one warp that loads and two warpgroups that consume, as PTX text.

For many rows per key, and for hd 512. With 64 rows each the consumers never wait for each other: the products of one
run under the softmax of the other. At hd 512, O of 64 rows would take 256 registers per thread of one warpgroup. So
there the consumers share 64 rows, each has half of the columns of O, and each computes S for half of the keys of a
tile. They exchange their maxima, and P, through shared memory.

If K and V are one latent tensor, a tile is loaded once and read as both: 64 columns of K have the same layout as 64
columns of V.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from backends.ptx.attention import PANEL_COLUMNS
from backends.ptx.builder import Builder
from backends.ptx.emitter import module_text
from backends.ptx.operands import Address, Register, Vector, at
from backends.ptx.sm90_fmha.frame import Sm90FmhaFrame, open_frame
from backends.ptx.sm90_fmha.geometry import (
    CONSUMER_REGISTERS,
    MMA_K,
    PAIR_BYTES,
    PAIR_THREADS,
    PRODUCER_REGISTERS,
    ROW_BYTES,
    SWIZZLE_ATOM_BYTES,
    THREADS,
    TILE_M,
    PairTiling,
)
from backends.ptx.sm90_fmha.kernel import (
    K_MAJOR,
    MMA,
    MN_MAJOR,
    PLUS_A,
    PLUS_B,
    PTX_VERSION,
    Products,
    advanced,
    descriptor,
    epilogue,
    partial_epilogue,
)
from backends.ptx.sm90_fmha.softmax import (
    Accumulators,
    exponentials,
    mask,
    of_row,
    packed,
    probabilities,
    tile_maximum,
)
from backends.ptx.split_keys import combine_kernel
from backends.ptx.tcgen05 import RingCursor

SHOWN_BARRIER, HANDED_BARRIER = 1, 2
"""Named barriers of both consumers: maxima are visible, P is complete."""


def pair_name(tiling: PairTiling) -> str:
    """The entry name of the kernel."""
    return f"fmha_forward_pair_hd{tiling.hd}" + ("_latent" if tiling.latent else "")


@cache
def pair_text(tiling: PairTiling, part_keys: int | None = None) -> str:
    """PTX that serves every t, s_k, mask, batch and grouping of one hd; `part_keys` as kernel_text says."""
    attention = _attention(tiling, part_keys)
    if part_keys is None:
        return attention.text()
    return module_text([attention, combine_kernel(tiling.hd, "sm_90a", PTX_VERSION)])


def _attention(tiling: PairTiling, part_keys: int | None) -> Builder:
    x = Builder(pair_name(tiling), target="sm_90a", version=PTX_VERSION, block=PAIR_THREADS, ctas_per_sm=1)
    x.header(_description(tiling))
    frame = open_frame(x, tiling, part_keys)
    group = x.let("group", "shr.u32", frame.thread, THREADS.bit_length() - 1)
    _produce(frame, tiling, group)
    consumer = _Consumer.open(frame, tiling, group)
    consumer.tiles()
    if frame.part is None:
        epilogue(consumer.frame, consumer.sums)
    else:
        partial_epilogue(consumer.frame, consumer.sums, frame.part)
    x.emit("ret")
    return x


def _produce(frame: Sm90FmhaFrame, tiling: PairTiling, group: Register) -> None:
    """Thread 0 loads Q once, and K and V tile by tile as soon as both consumers have released a stage."""
    x, params, smem = frame.x, frame.params, frame.smem
    x.section("warpgroup 0: thread 0 loads")
    produces = x.let("produces", "setp.eq.u32", group, 0)
    with x.when(produces, "producer"):
        x.setmaxnreg("dec", PRODUCER_REGISTERS)
        tile = x.let("load_tile", "mov.b32", 0)
        key = x.let("load_key", "mov.b32", frame.keys.first_key)
        loads = x.let("loads", "setp.ne.and.u32", frame.keys.count, 0, frame.is_leader)
        with x.when(loads, "loader"):
            x.prefetch_maps((params.q, params.k) if tiling.latent else (params.q, params.k, params.v))
            x.expect_tx(smem["q_full"], tiling.q_bytes, note="rows beyond the last come as zeros")
            for panel in range(tiling.hd // PANEL_COLUMNS):
                source = Address(params.q, 0, (panel * PANEL_COLUMNS, frame.row_origin, frame.batch_head))
                x.tma_load(smem["q"].plus(panel * tiling.q_panel_bytes), source, smem["q_full"])
            ring = RingCursor.start(smem, tiling.stages, "load", parity=1)
            with x.while_below("load_tiles", tile, frame.keys.count, "loaded", (tile, 1), (key, tiling.tile_n)):
                data = ring.data("ring", tiling.stage_bytes, "load_data")
                tensors = (("k", params.k),) if tiling.latent else (("k", params.k), ("v", params.v))
                for index, (name, tensor) in enumerate(tensors):
                    ring.wait(f"{name}_empty")
                    full = ring.barrier(f"{name}_full")
                    x.expect_tx(full, tiling.k_bytes)
                    for panel in range(tiling.hd // PANEL_COLUMNS):
                        source = Address(tensor, 0, (panel * PANEL_COLUMNS, key, frame.batch_head))
                        x.tma_load(at(data, index * tiling.k_bytes + panel * tiling.panel_bytes), source, full)
                ring.advance()
        x.emit("ret")


@dataclass(frozen=True, slots=True)
class _Consumer:
    """One consumer. `frame` is its own: its thread, its rows, its columns of O. `number`: 0 or 1."""

    frame: Sm90FmhaFrame
    tiling: PairTiling
    number: Register
    releases: Register
    """Whether this thread signals that its warp has left a stage."""
    sums: Accumulators
    products: Products
    scores: Vector

    @classmethod
    def open(cls, frame: Sm90FmhaFrame, tiling: PairTiling, group: Register) -> _Consumer:
        """Declares its registers and sets O = 0."""
        x = frame.x
        x.section("warpgroups 1 and 2: consume")
        x.setmaxnreg("inc", CONSUMER_REGISTERS)
        number = x.let("consumer", "sub.u32", group, 1)
        releases = x.let("releases", "setp.eq.u32", x.let("own_lane", "and.b32", frame.thread, 31), 0)
        thread = x.let("own_thread", "and.b32", frame.thread, THREADS - 1)
        q_data = x.let("q_data", "add.u32", frame.smem.base, frame.smem.layout["q"])
        if tiling.shares_columns:
            o_origin = x.let("own_columns", "mul.lo.u32", number, tiling.o_columns)
            own = replace(frame, thread=thread, o_origin=o_origin)
        else:
            row_origin = x.let("own_rows", "mad.lo.u32", number, TILE_M, frame.row_origin)
            x.emit("mad.lo.u32", q_data, number, TILE_M * ROW_BYTES, q_data)
            own = replace(frame, thread=thread, row_origin=row_origin)
        sums = Accumulators.open(own)
        products = Products.open(own, q_data)
        scores = x.regs("s", "f32", tiling.score_keys // 2)
        return cls(own, tiling, number, releases, sums, products, scores)

    def tiles(self) -> None:
        """Processes all tiles of keys."""
        x, tiling, frame = self.frame.x, self.tiling, self.frame
        x.section("tiles of keys")
        ring = RingCursor.start(frame.smem, tiling.stages, "read", parity=0)
        exchange = _Exchange.open(self) if tiling.shares_columns else None
        tile = x.let("tile", "mov.b32", 0)
        key = x.let("key", "mov.b32", frame.keys.first_key)
        if tiling.shares_columns:
            x.emit("mad.lo.u32", key, self.number, tiling.score_keys, key)
        finished = x.let("finished", "setp.eq.u32", frame.keys.count, 0)
        with x.unless(finished, "all_tiles"):
            x.wait(frame.smem["q_full"], 0, "q_full")
            with x.loop("tiles") as loop:
                data = ring.data("ring", tiling.stage_bytes, "stage_data")
                self._score(ring, data)
                if exchange is None:
                    p = probabilities(frame, self.sums, self.scores, key)
                else:
                    p = exchange.probabilities(key)
                self._accumulate(ring, data, p)
                ring.advance()
                x.emit("add.u32", key, key, tiling.tile_n)
                x.emit("add.u32", tile, tile, 1)
                x.emit("setp.ge.u32", finished, tile, frame.keys.count)
                x.emit("bra", loop.done, guard=finished)
        if exchange is not None:
            exchange.add_sums()

    def _score(self, ring: RingCursor, data: Register) -> None:
        """S = Q K^T of this consumer's keys of the tile, once K has arrived."""
        x, tiling = self.frame.x, self.tiling
        x.comment("S = Q K^T")
        ring.wait("k_full")
        if tiling.shares_columns:
            data = x.let("own_keys", "mad.lo.u32", self.number, tiling.score_keys * ROW_BYTES, data)
        k = descriptor(x, "k", data)
        x.wgmma_fence()
        for step in range(tiling.hd // MMA_K):
            panel, inside = divmod(step * MMA_K, PANEL_COLUMNS)
            a = advanced(x, self.products.q, panel * tiling.q_panel_bytes + 2 * inside)
            b = advanced(x, k, panel * tiling.panel_bytes + 2 * inside)
            accumulates = self.products.always if step else self.products.never
            kinds = (PLUS_A, PLUS_B, K_MAJOR, K_MAJOR)
            x.emit(MMA.format(n=tiling.score_keys), self.scores, a, b, accumulates, *kinds)
        x.wgmma_finish()
        if not tiling.latent:
            x.arrive(ring.barrier("k_empty"), guard=self.releases)

    def _accumulate(self, ring: RingCursor, data: Register, p: Vector | Register) -> None:
        """O += P V of this consumer's columns, once V has arrived. `p`: registers, or the descriptor of P."""
        x, tiling = self.frame.x, self.tiling
        x.comment("O += P V")
        if not tiling.latent:
            ring.wait("v_full")
            data = x.let("v_data", "add.u32", data, tiling.k_bytes)
        if tiling.shares_columns:
            panels = tiling.o_columns // PANEL_COLUMNS
            data = x.let("own_v", "mad.lo.u32", self.number, panels * tiling.panel_bytes, data)
        v = descriptor(x, "v", data, tiling.panel_bytes)
        mma = MMA.format(n=tiling.o_columns)
        x.wgmma_fence()
        for step in range(tiling.tile_n // MMA_K):
            b = advanced(x, v, step * MMA_K * ROW_BYTES)
            if isinstance(p, Register):
                kinds = (PLUS_A, PLUS_B, K_MAJOR, MN_MAJOR)
                a = advanced(x, p, step * 2 * MMA_K)
                x.emit(mma, self.sums.outputs, a, b, self.products.always, *kinds)
            else:
                a = p[4 * step : 4 * step + 4]
                x.emit(mma, self.sums.outputs, a, b, self.products.always, PLUS_A, PLUS_B, MN_MAJOR)
        x.wgmma_finish()
        x.arrive(ring.barrier("k_empty" if tiling.latent else "v_empty"), guard=self.releases)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Exchange buffers of consumers that share rows.

    `mine`, `other`: where this thread stores two f32 for the other consumer, and where that consumer's thread stores
    its own. `p`: the descriptor of P of the tile, 64 keys of 64 rows. `stores`: where this thread's column pairs of its
    upper row go, one per block of 8 keys; those of its lower row go 8 rows further.
    """

    consumer: _Consumer
    mine: Address
    other: Address
    p: Register
    stores: Vector

    @classmethod
    def open(cls, consumer: _Consumer) -> _Exchange:
        """Computes the addresses."""
        frame, number = consumer.frame, consumer.number
        x, smem = frame.x, frame.smem
        place = x.indexed("exchange_at", smem.base, frame.thread, PAIR_BYTES)
        mine = x.indexed("shown_at", place, number, THREADS * PAIR_BYTES)
        opposite = x.let("opposite", "xor.b32", number, 1)
        other = x.indexed("seen_at", place, opposite, THREADS * PAIR_BYTES)
        p_data = x.let("p_data", "add.u32", smem.base, smem.layout["p"])
        p = descriptor(x, "p", p_data)
        x.comment("Row r has block b of 8 keys at 128 r + 16 (b ^ r % 8).")
        quad = x.let("own_quad", "shr.u32", frame.thread, 2)
        row = x.let("own_row", "and.b32", quad, 7)
        warp = x.let("own_warp", "shr.u32", frame.thread, 5)
        rows = x.let("p_row", "mad.lo.u32", warp, 16, row)
        base = x.indexed("p_row_at", p_data, rows, ROW_BYTES)
        pair = x.let("own_pair", "and.b32", frame.thread, 3)
        x.emit("mad.lo.u32", base, pair, 4, base)
        blocks = consumer.tiling.score_keys // 8
        first = x.let("first_block", "mul.lo.u32", number, blocks)
        x.emit("xor.b32", first, first, row)
        stores: list[Register] = []
        for block in range(blocks):
            swizzled = x.let("block", "xor.b32", first, block)
            stores.append(x.let("p_at", "mad.lo.u32", swizzled, 16, base))
        offset = smem.layout["exchange"]
        return cls(consumer, at(mine, offset), at(other, offset), p, tuple(stores))

    def probabilities(self, key: Register) -> Register:
        """Writes P of the tile to shared memory and returns its descriptor. Rescales O. `key`: this consumer's first
        key."""
        frame, sums, scores = self.consumer.frame, self.consumer.sums, self.consumer.scores
        x = frame.x
        mask(frame, sums.rows, scores, key)
        maxima = [tile_maximum(x, of_row(scores, index)) for index in range(2)]
        for index, seen in enumerate(self._shown((maxima[0], maxima[1]))):
            x.emit("max.f32", maxima[index], maxima[index], seen)
            exponentials(frame, sums, scores, index, maxima[index])
        for place, pair in enumerate(packed(x, scores)):
            block, lower = divmod(place, 2)
            x.emit("st.shared.b32", at(self.stores[block], lower * SWIZZLE_ATOM_BYTES), pair)
        x.fence_proxy_async()
        x.emit("bar.sync", HANDED_BARRIER, 2 * THREADS, note="P is whole")
        return self.p

    def add_sums(self) -> None:
        """Makes the row sums those of all keys."""
        rows, x = self.consumer.sums.rows, self.consumer.frame.x
        for row, seen in zip(rows, self._shown((rows[0].total, rows[1].total)), strict=True):
            x.emit("add.rn.f32", row.total, row.total, seen)

    def _shown(self, values: tuple[Register, Register]) -> tuple[Register, Register]:
        """Exchanges `values` with the other consumer: returns the values of its corresponding thread."""
        x = self.consumer.frame.x
        x.emit("st.shared.v2.f32", self.mine, values)
        x.emit("bar.sync", SHOWN_BARRIER, 2 * THREADS, note="both have shown theirs")
        seen = x.reg("seen_upper", "f32"), x.reg("seen_lower", "f32")
        x.emit("ld.shared.v2.f32", seen, self.other)
        return seen


def _description(tiling: PairTiling) -> list[str]:
    share = "half of the columns of O" if tiling.shares_columns else f"{TILE_M} rows"
    lines = [
        f"FMHA forward, hd = {tiling.hd}: O = softmax(scale Q K^T) V, bf16 in and out, fp32 softmax.",
        f"A CTA: {tiling.tile_m} folded query rows of a (batch, kv_head), tiles of {tiling.tile_n} keys.",
        f"A warp loads; two warpgroups have {share} each. Dynamic shared memory, in bytes:",
    ]
    return lines + tiling.smem.described()

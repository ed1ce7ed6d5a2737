"""The two issuing threads: one of warp 9 loads Q, K and V with TMA, one of warp 8 issues every tcgen05.mma.

Q is loaded once, K and V tile by tile, in the order in which the MMA warp consumes them.

S(i) = Q K(i)^T goes to S buffer i mod 2 before O += P(i-1) V(i-1), so that the softmax of tile i overlaps with the
product of tile i - 1. P(i) is bf16 in the first 64 columns of S(i)'s buffer. The ISA orders two MMAs only if their
accumulator and shape are the same (PTX ISA, "Pipelined tcgen05 Instructions"). So S(i) waits until P(i-2) V(i-2), which
reads P from the same columns, is reported done. The additions to O are ordered by issue.
"""

from __future__ import annotations

from backends.ptx.attention import PANEL_COLUMNS
from backends.ptx.operands import Address, Register, at
from backends.ptx.sm100_fmha.frame import Sm100FmhaFrame, buffer_of
from backends.ptx.sm100_fmha.geometry import (
    ISSUER_REGISTERS,
    MMA_K,
    PANEL_BYTES,
    ROLES,
    SWIZZLE_ATOM_BYTES,
    TILE_N,
    instruction_descriptor,
)
from backends.ptx.tcgen05 import RingCursor, smem_descriptor, tmem_address


def emit_producer(frame: Sm100FmhaFrame) -> None:
    """K of tile i goes out before V of tile i - 1, because Q K^T runs one tile ahead of P V."""
    x = frame.x
    x.section("warps 8-11: issuers give registers to the softmax")
    is_issuer = x.let("is_issuer", "setp.ge.u32", frame.warp, ROLES.mma)
    with x.when(is_issuer, "issuer_registers"):
        x.setmaxnreg("dec", ISSUER_REGISTERS)
    x.section("warp 9: TMA producer")
    is_producer = x.let("is_producer", "setp.eq.u32", frame.warp, ROLES.producer)
    with x.when(is_producer, "producer"):
        leader = x.elect(x.reg("producer_leader", "pred"))
        with x.when(leader, "producer_leader"):
            _load_q(frame)
            _load_tiles(frame)
        x.sync_warp()


def _load_q(frame: Sm100FmhaFrame) -> None:
    x, tiling, q_full = frame.x, frame.tiling, frame.smem["q_full"]
    no_tiles = x.let("no_tiles", "setp.eq.u32", frame.keys.count, 0)
    with x.unless(no_tiles, "q_loads"):
        x.expect_tx(q_full, tiling.q_bytes, note="rows beyond the last arrive as zeros and count")
        for panel in range(tiling.hd // PANEL_COLUMNS):
            source = Address(frame.params.q, 0, (panel * PANEL_COLUMNS, frame.row_origin, frame.batch_head))
            x.tma_load(frame.smem["q"].plus(panel * PANEL_BYTES), source, q_full)


def _load_tiles(frame: Sm100FmhaFrame) -> None:
    x, tiling, params = frame.x, frame.tiling, frame.params
    ring = RingCursor.start(frame.smem, tiling.ring_stages, "load", parity=1)
    tile = x.let("load_tile", "mov.b32", 0)
    k_key = x.let("k_key", "mov.b32", frame.keys.first_key)
    v_key = x.reg("v_key", "u32")
    v_columns = x.let("v_columns", "mov.b32", frame.o_origin)
    k_columns = x.let("k_columns", "mov.b32", 0)
    beyond, before = x.reg("no_k_left", "pred"), x.reg("no_v_yet", "pred")
    with x.loop("load_tiles") as loop:
        x.emit("setp.ge.u32", beyond, tile, frame.keys.count)
        with x.unless(beyond, "k_loads"):
            x.comment("K(tile)")
            for chunk in range(tiling.k_stages):
                _load_stage(frame, ring, params.k, k_columns, chunk, k_key)
        x.emit("setp.eq.u32", before, tile, 0)
        with x.unless(before, "v_loads"):
            x.comment("V(tile - 1)")
            x.emit("sub.u32", v_key, k_key, TILE_N)
            for chunk in range(tiling.v_stages):
                _load_stage(frame, ring, params.v, v_columns, chunk, v_key)
        x.emit("bra", loop.done, guard=beyond)
        x.emit("add.u32", tile, tile, 1)
        x.emit("add.u32", k_key, k_key, TILE_N)
    ring.drain()


def _load_stage(
    frame: Sm100FmhaFrame, ring: RingCursor, tensor_map: Register, columns: Register, chunk: int, key: Register
) -> None:
    x, tiling = frame.x, frame.tiling
    ring.wait("ring_empty")
    full = ring.barrier("ring_full")
    x.expect_tx(full, tiling.stage_bytes)
    data = ring.data("ring", tiling.stage_bytes, "stage_data")
    for panel in range(tiling.stage_panels):
        offset = chunk * tiling.stage_columns + panel * PANEL_COLUMNS
        column = x.let("column", "add.u32", columns, offset)
        source = Address(tensor_map, 0, (column, key, frame.batch_head))
        x.tma_load(at(data, panel * PANEL_BYTES), source, full)
    ring.advance()


MMA = "tcgen05.mma.cta_group::1.kind::f16"
P_COLUMNS_PER_STEP = MMA_K // 2
"""TMEM columns that MMA_K bf16 elements of A take: two to a 32-bit column (facts.md 2.3)."""


class FmhaMmaIssuer:
    """Registers of the issuing thread, and the two products."""

    def __init__(self, frame: Sm100FmhaFrame) -> None:
        x, tiling = frame.x, frame.tiling
        self.frame = frame
        self.ring = RingCursor.start(frame.smem, tiling.ring_stages, "mma", parity=0)
        self.tile = x.let("mma_tile", "mov.b32", 0)
        self.always = x.let("always", "setp.eq.u32", self.tile, 0)
        self.never = x.let("never", "setp.ne.u32", self.tile, 0)
        qk, pv = (
            instruction_descriptor(n, b_is_mn_major=mn) for n, mn in ((TILE_N, False), (tiling.stage_columns, True))
        )
        self.qk_idesc = x.let("qk_idesc", "mov.b32", qk, note="K-major B")
        self.pv_idesc = x.let("pv_idesc", "mov.b32", pv, note="MN-major B")
        q_data = x.let("q_data", "add.u32", frame.smem.base, frame.smem.layout["q"])
        self.q_descriptor = self._descriptor("q_descriptor", q_data)
        self.o_tmem = tmem_address(x, "o_tmem", frame.tmem, 1, tiling.o_column)
        self.a_step, self.b_step = x.reg("a_descriptor", "b64"), x.reg("b_descriptor", "b64")

    def _descriptor(self, name: str, data: Register, leading_bytes: int = 0) -> Register:
        """The descriptor of 64-column panels in 128-byte swizzle; `leading_bytes` lie between MN-major panels."""
        constant = smem_descriptor(stride_bytes=SWIZZLE_ATOM_BYTES, leading_bytes=leading_bytes)
        return self.frame.x.matrix_descriptor(name, data, constant)

    def _next_stage(self) -> Register:
        self.ring.wait("ring_full")
        return self.ring.data("ring", self.frame.tiling.stage_bytes, "stage_data")

    def _release_stage(self) -> None:
        self.frame.x.commit_mma(self.ring.barrier("ring_empty"), note="when the MMAs have read it")
        self.ring.advance()

    def score(self) -> None:
        """S(tile) = Q K(tile)^T: K = hd in steps of 16, each 32 bytes along a swizzled 128-byte row."""
        x, tiling, smem = self.frame.x, self.frame.tiling, self.frame.smem
        x.comment("S(tile) = Q K(tile)^T, once P(tile - 2) V(tile - 2) has read P from this buffer.")
        index, parity = buffer_of(x, self.tile, "s")
        x.emit("xor.b32", parity, parity, 1)
        x.wait(smem.mbarrier("pv_done", index, "s_free_at"), parity, "s_free")
        x.after_thread_sync()
        s_tmem = tmem_address(x, "s_tmem", self.frame.tmem, index, TILE_N)
        for chunk in range(tiling.k_stages):
            k_descriptor = self._descriptor("k_descriptor", self._next_stage())
            for step in range(tiling.stage_columns // MMA_K):
                panel, inside = divmod(step * MMA_K, PANEL_COLUMNS)
                offset = panel * PANEL_BYTES + inside * 2
                q_offset = chunk * tiling.stage_panels * PANEL_BYTES + offset
                x.emit("add.s64", self.a_step, self.q_descriptor, q_offset // 16)
                x.emit("add.s64", self.b_step, k_descriptor, offset // 16)
                accumulate = self.always if chunk or step else self.never
                x.emit(MMA, at(s_tmem), self.a_step, self.b_step, self.qk_idesc, accumulate)
            self._release_stage()
        x.commit_mma(smem.mbarrier("s_full", index))

    def accumulate(self, tile: Register) -> None:
        """O += P(tile) V(tile): K = TILE_N keys in steps of 16, each two swizzle atoms of eight key rows."""
        x, tiling, smem = self.frame.x, self.frame.tiling, self.frame.smem
        x.comment("O += P(tile - 1) V(tile - 1), once P is written and O is rescaled.")
        index, parity = buffer_of(x, tile, "p")
        x.wait(smem.mbarrier("pv_ready", index), parity, "pv_ready")
        x.after_thread_sync()
        p_tmem = tmem_address(x, "p_tmem", self.frame.tmem, index, TILE_N)
        has_sum = x.let("o_has_sum", "setp.ne.u32", tile, 0)
        for chunk in range(tiling.v_stages):
            v_descriptor = self._descriptor("v_descriptor", self._next_stage(), PANEL_BYTES)
            o_columns = at(self.o_tmem, chunk * tiling.stage_columns)
            for step in range(TILE_N // MMA_K):
                offset = step * MMA_K // 8 * SWIZZLE_ATOM_BYTES
                x.emit("add.s64", self.b_step, v_descriptor, offset // 16)
                accumulate = self.always if step else has_sum
                p_columns = at(p_tmem, step * P_COLUMNS_PER_STEP)
                x.emit(MMA, o_columns, p_columns, self.b_step, self.pv_idesc, accumulate)
            self._release_stage()
        x.commit_mma(smem.mbarrier("pv_done", index))


def emit_mma(frame: Sm100FmhaFrame) -> None:
    """Iteration i scores tile i and accumulates tile i - 1, each if it exists."""
    x = frame.x
    x.section("warp 8: MMA issuer")
    is_mma = x.let("is_mma", "setp.eq.u32", frame.warp, ROLES.mma)
    with x.when(is_mma, "mma"):
        leader = x.elect(x.reg("mma_leader", "pred"))
        x.emit("setp.ne.and.u32", leader, frame.keys.count, 0, leader)
        with x.when(leader, "mma_leader"):
            _issue_tiles(frame)
        x.sync_warp()


def _issue_tiles(frame: Sm100FmhaFrame) -> None:
    x = frame.x
    issuer = FmhaMmaIssuer(frame)
    x.wait(frame.smem["q_full"], 0, "q_full")
    last, first = x.reg("no_tile_to_score", "pred"), x.reg("no_tile_to_sum", "pred")
    previous = x.reg("previous_tile", "u32")
    with x.loop("mma_tiles") as loop:
        x.emit("setp.ge.u32", last, issuer.tile, frame.keys.count)
        with x.unless(last, "score"):
            issuer.score()
        x.emit("setp.eq.u32", first, issuer.tile, 0)
        with x.unless(first, "accumulate"):
            x.emit("sub.u32", previous, issuer.tile, 1)
            issuer.accumulate(previous)
        x.emit("bra", loop.done, guard=last)
        x.emit("add.u32", issuer.tile, issuer.tile, 1)

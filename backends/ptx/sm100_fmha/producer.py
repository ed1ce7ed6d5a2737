"""Warp 9: one thread brings Q once, then K and V tile by tile, in the order in which the MMA warp consumes them."""

from __future__ import annotations

from backends.ptx.attention import PANEL_COLUMNS
from backends.ptx.operands import Address, Register, at
from backends.ptx.sm100_fmha.frame import Sm100FmhaFrame
from backends.ptx.sm100_fmha.geometry import ISSUER_REGISTERS, PANEL_BYTES, ROLES, TILE_N
from backends.ptx.tcgen05 import RingCursor


def emit_producer(frame: Sm100FmhaFrame) -> None:
    """K of tile i goes out before V of tile i - 1, as Q K^T runs one tile ahead of P V."""
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

"""The last warpgroup: one warp loads weights and tokens, one stage at a time, with bulk copies of contiguous bytes."""

from __future__ import annotations

from backends.ptx.operands import SINK, at
from backends.ptx.sm90_moe.frame import ColumnFrame, ColumnTile
from backends.ptx.sm90_moe.geometry import PRODUCER_REGISTERS, ROW_BYTES, UNIT_BYTES
from backends.ptx.tcgen05 import RingCursor


def emit_producer(frame: ColumnFrame) -> None:
    """Loads all tiles of this CTA."""
    x = frame.x
    x.section("the last four warps: producer")
    is_producer = x.let("is_producer_group", "setp.ge.u32", frame.warp, frame.tiling.consumers // 32)
    with x.when(is_producer, "producer"):
        x.setmaxnreg("dec", PRODUCER_REGISTERS)
        leader = x.elect(x.reg("producer_leader", "pred"))
        x.emit("setp.eq.and.u32", leader, frame.warp, frame.tiling.consumers // 32, leader)
        with x.when(leader, "producer_leader"):
            ring = RingCursor.start(frame.smem, frame.tiling.stages, "load", parity=1)
            with frame.tiles("load") as tile:
                _load_tile(frame, ring, tile)
            ring.drain()
        x.emit("ret")


def _load_tile(frame: ColumnFrame, ring: RingCursor, tile: ColumnTile) -> None:
    x, params, tiling = frame.x, frame.params, frame.tiling
    weight_tile = x.let("weight_tile", "mad.lo.u32", tile.expert, params.tiles_m, tile.tile_m)
    x.emit("mul.lo.u32", weight_tile, weight_tile, tiling.panels)
    panels = [x.let("weights_at", "mad.wide.u32", weight_tile, params.weight_pitch, params.weights)]
    for _ in range(1, tiling.panels):
        panels.append(x.let("panel_at", "add.s64", panels[-1], x.let("pitch", "cvt.u64.u32", params.weight_pitch)))
    tokens = x.let("tokens_at", "mad.wide.u32", tile.column, params.column_pitch, params.activations)
    b_bytes = x.let("b_bytes", "mul.lo.u32", tile.width, tiling.units * ROW_BYTES)
    b_wide = x.let("b_wide", "cvt.u64.u32", b_bytes)
    stage_bytes = x.let("stage_bytes", "add.u32", b_bytes, tiling.a_bytes)
    unit = x.let("load_unit", "mov.b32", 0)
    with x.while_below("load_stages", unit, params.units, "k_finished", (unit, tiling.units)):
        ring.wait("ring_empty")
        x.fence_proxy_async("the weights here were read through the generic proxy")
        full = ring.barrier("ring_full")
        x.emit("mbarrier.arrive.expect_tx.shared::cta.b64", SINK, full, stage_bytes)
        data, panel_bytes = ring.data("a", tiling.a_bytes), tiling.units * UNIT_BYTES
        for index, panel in enumerate(panels):
            x.bulk_load(at(data, index * panel_bytes), at(panel), panel_bytes, full)
            x.emit("add.s64", panel, panel, panel_bytes)
        x.bulk_load(at(ring.data("b", tiling.b_bytes)), at(tokens), b_bytes, full)
        x.emit("add.s64", tokens, tokens, b_wide)
        ring.advance()

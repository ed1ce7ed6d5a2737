"""Warp 9: one thread brings Q once, then K and V tile by tile, in the order in which the MMA warp consumes them."""

from __future__ import annotations

from backends.ptx.attention import PANEL_COLUMNS
from backends.ptx.operands import SINK, Address, Elected, Register, at
from backends.ptx.sm100_fmha.frame import FULL_WARP, Frame
from backends.ptx.sm100_fmha.geometry import ISSUER_REGISTERS, MMA_WARP, PANEL_BYTES, PRODUCER_WARP, TILE_N
from backends.ptx.sm100_fmha.ring import RingPosition

TMA_LOAD = "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"


def emit_producer(frame: Frame) -> None:
    """K of tile i goes out before V of tile i - 1, as Q K^T runs one tile ahead of P V."""
    x = frame.x
    x.section("warps 8-11: issuers give registers to the softmax")
    is_issuer = x.let("is_issuer", "setp.ge.u32", frame.warp, MMA_WARP)
    with x.when(is_issuer, "issuer_registers"):
        x.emit("setmaxnreg.dec.sync.aligned.u32", ISSUER_REGISTERS)
    x.section("warp 9: TMA producer")
    is_producer = x.let("is_producer", "setp.eq.u32", frame.warp, PRODUCER_WARP)
    with x.when(is_producer, "producer"):
        leader = x.reg("producer_leader", "pred")
        x.emit("elect.sync", Elected(leader), FULL_WARP)
        with x.when(leader, "producer_leader"):
            _load_q(frame)
            _load_tiles(frame)
        x.emit("bar.warp.sync", FULL_WARP)


def _load_q(frame: Frame) -> None:
    x, geometry = frame.x, frame.geometry
    no_tiles = x.let("no_tiles", "setp.eq.u32", frame.tiles, 0)
    with x.unless(no_tiles, "q_loads"):
        barrier = frame.place("q_full")
        expect = "mbarrier.arrive.expect_tx.shared::cta.b64"
        x.emit(expect, SINK, barrier, geometry.q_bytes, note="rows beyond the last arrive as zeros and count")
        for panel in range(geometry.hd // PANEL_COLUMNS):
            coordinates = (panel * PANEL_COLUMNS, frame.row_origin, frame.batch_head)
            source = Address(frame.params.maps.q, 0, coordinates)
            x.emit(TMA_LOAD, frame.place("q").plus(panel * PANEL_BYTES), source, barrier)


def _load_tiles(frame: Frame) -> None:
    x, geometry, params = frame.x, frame.geometry, frame.params
    ring = RingPosition.start(frame, "load", parity=1)
    tile = x.let("load_tile", "mov.b32", 0)
    k_key = x.let("k_key", "mov.b32", frame.first_key)
    v_key = x.reg("v_key", "u32")
    v_columns = x.let("v_columns", "mov.b32", frame.o_origin)
    k_columns = x.let("k_columns", "mov.b32", 0)
    beyond, before = x.reg("no_k_left", "pred"), x.reg("no_v_yet", "pred")
    with x.loop("load_tiles") as loop:
        x.emit("setp.ge.u32", beyond, tile, frame.tiles)
        with x.unless(beyond, "k_loads"):
            x.comment("K(tile)")
            for chunk in range(geometry.k_stages):
                _load_stage(frame, ring, params.maps.k, k_columns, chunk, k_key)
        x.emit("setp.eq.u32", before, tile, 0)
        with x.unless(before, "v_loads"):
            x.comment("V(tile - 1)")
            x.emit("sub.u32", v_key, k_key, TILE_N)
            for chunk in range(geometry.v_stages):
                _load_stage(frame, ring, params.maps.v, v_columns, chunk, v_key)
        x.emit("bra", loop.done, guard=beyond)
        x.emit("add.u32", tile, tile, 1)
        x.emit("add.u32", k_key, k_key, TILE_N)
    x.comment("The last arrivals on ring_empty must not find the CTA gone.")
    drained, all_drained = x.let("drained", "mov.b32", 0), x.reg("all_drained", "pred")
    with x.loop("drain") as loop:
        x.wait(ring.barrier("ring_empty"), ring.parity, "ring_drained")
        ring.advance()
        x.emit("add.u32", drained, drained, 1)
        x.emit("setp.eq.u32", all_drained, drained, geometry.ring_stages)
        x.emit("bra", loop.done, guard=all_drained)


def _load_stage(
    frame: Frame, ring: RingPosition, tensor_map: Register, columns: Register, chunk: int, key: Register
) -> None:
    x, geometry = frame.x, frame.geometry
    x.wait(ring.barrier("ring_empty"), ring.parity, "ring_empty")
    full = ring.barrier("ring_full")
    x.emit("mbarrier.arrive.expect_tx.shared::cta.b64", SINK, full, geometry.stage_bytes)
    data = ring.data()
    for panel in range(geometry.stage_panels):
        offset = chunk * geometry.stage_columns + panel * PANEL_COLUMNS
        column = x.let("column", "add.u32", columns, offset)
        source = Address(tensor_map, 0, (column, key, frame.batch_head))
        x.emit(TMA_LOAD, at(data, panel * PANEL_BYTES), source, full)
    ring.advance()

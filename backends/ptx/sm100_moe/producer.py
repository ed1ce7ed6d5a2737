"""Warp 5: brings operands and scale factors, stage by stage along K, in the order in which the MMA warp consumes them.

Weights and scale factors are whole boxes. The rows of A either lie together (a box as well), or are gathered from the
tokens, wherever those lie: 32 lanes, each with four rows, fill the 128 rows by `tile::gather4`. So no copy of the
activations is made, and a row that fills up a tile, whose index is the number of tokens, arrives as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.operands import SINK, Address, Elected, Register, at
from backends.ptx.sm100_moe.frame import FULL_WARP, Frame, Tile
from backends.ptx.sm100_moe.geometry import (
    A_BYTES,
    B_ATOMS,
    B_BYTES,
    PRODUCER_WARP,
    SFA_BYTES,
    SFB_BYTES,
    STAGE_BYTES,
    STAGE_ROW_BYTES,
    STAGE_STEPS,
    STAGES,
    TILE_N,
)
from backends.ptx.sm100_moe.ring import RingPosition

COMPLETE = "mbarrier::complete_tx::bytes"
GATHER_ROWS = 4


def _load(rank: int) -> str:
    return f"cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.{COMPLETE}"


@dataclass(frozen=True, slots=True)
class _Coordinates:
    """Where a tile's boxes begin. `rows`: the four rows that this lane gathers, if it does."""

    tile: Tile
    weight_row: Register
    weight_atom: Register
    rows: tuple[Register, ...]


def emit_producer(frame: Frame, token_of_row: Register | None) -> None:
    """All tiles of this CTA. `token_of_row`: address of the token of each padded row, u32, if A is to be gathered."""
    x = frame.x
    x.section("warp 5: TMA producer")
    is_producer = x.let("is_producer_warp", "setp.eq.u32", frame.warp, PRODUCER_WARP)
    with x.when(is_producer, "producer"):
        leader = x.reg("producer_leader", "pred")
        x.emit("elect.sync", Elected(leader), FULL_WARP)
        lane = x.let("producer_lane", "and.b32", frame.thread, 31)
        ring = RingPosition.start(frame, "load", parity=1)
        with frame.walk("load").tiles() as tile:
            _load_tile(frame, ring, _coordinates(frame, tile, lane, token_of_row), lane, leader)
        _drain(frame, ring)


def _coordinates(frame: Frame, tile: Tile, lane: Register, token_of_row: Register | None) -> _Coordinates:
    x = frame.x
    weight_row = x.let("weight_row", "mul.lo.u32", tile.n_tile, TILE_N)
    weight_atom = x.let("weight_atom", "mul.lo.u32", tile.n_tile, B_ATOMS)
    rows: tuple[Register, ...] = ()
    if token_of_row is not None:
        first = x.let("first_gathered", "mad.lo.u32", lane, GATHER_ROWS, tile.first_row)
        source = x.let("token_of_row_at", "mad.wide.u32", first, 4, token_of_row)
        rows = x.regs("gathered", "u32", GATHER_ROWS)
        x.emit("ld.global.v4.u32", rows, at(source))
    return _Coordinates(tile, weight_row, weight_atom, rows)


def _load_tile(frame: Frame, ring: RingPosition, where: _Coordinates, lane: Register, leader: Register) -> None:
    x = frame.x
    k_stage, k_byte, k_atom = (x.let(name, "mov.b32", 0) for name in ("k_stage", "k_byte", "k_atom"))
    finished = x.reg("k_finished", "pred")
    with x.loop("load_stages") as loop:
        x.emit("setp.ge.u32", finished, k_stage, frame.params.k_stages)
        x.emit("bra", loop.done, guard=finished)
        x.wait(ring.barrier("ring_empty"), ring.parity, "ring_empty")
        full = ring.barrier("ring_full")
        a_data = ring.data("a", A_BYTES)
        with x.when(leader, "load_boxes"):
            expect = "mbarrier.arrive.expect_tx.shared::cta.b64"
            x.emit(expect, SINK, full, STAGE_BYTES, note="what lies outside of a tensor arrives as zeros and counts")
            _load_boxes(frame, ring, where, (k_byte, k_atom), full)
            if not where.rows:
                a_box = Address(frame.params.a, 0, (k_byte, where.tile.first_row))
                x.emit(_load(2), at(a_data), a_box, full)
        if where.rows:
            rows_data = x.indexed("gather_data", a_data, lane, GATHER_ROWS * STAGE_ROW_BYTES)
            gather = f"cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.{COMPLETE}"
            x.emit(gather, at(rows_data), Address(frame.params.a, 0, (k_byte, *where.rows)), full)
        ring.advance()
        x.emit("add.u32", k_stage, k_stage, 1)
        x.emit("add.u32", k_byte, k_byte, STAGE_ROW_BYTES)
        x.emit("add.u32", k_atom, k_atom, STAGE_STEPS)


def _load_boxes(
    frame: Frame, ring: RingPosition, where: _Coordinates, k: tuple[Register, Register], full: Address
) -> None:
    x, params, (k_byte, k_atom) = frame.x, frame.params, k
    expert = where.tile.expert
    b_data, sfa_data, sfb_data = ring.data("b", B_BYTES), ring.data("sfa", SFA_BYTES), ring.data("sfb", SFB_BYTES)
    x.emit(_load(3), at(b_data), Address(params.b, 0, (k_byte, where.weight_row, expert)), full)
    x.emit(_load(3), at(sfa_data), Address(params.sfa, 0, (0, k_atom, where.tile.row_tile)), full)
    x.emit(_load(4), at(sfb_data), Address(params.sfb, 0, (0, k_atom, where.weight_atom, expert)), full)


def _drain(frame: Frame, ring: RingPosition) -> None:
    x = frame.x
    x.comment("The last arrivals on ring_empty must not find the CTA gone.")
    drained, all_drained = x.let("drained", "mov.b32", 0), x.reg("all_drained", "pred")
    with x.loop("drain") as loop:
        x.wait(ring.barrier("ring_empty"), ring.parity, "ring_drained")
        ring.advance()
        x.emit("add.u32", drained, drained, 1)
        x.emit("setp.eq.u32", all_drained, drained, STAGES)
        x.emit("bra", loop.done, guard=all_drained)

"""Warp 5: brings operands and scale factors, stage by stage along K, in the order in which the MMA warp consumes them.

Weights and scale factors are whole boxes. The rows of A either lie together, a box as well, or are gathered from the
tokens: 32 lanes, each with four rows, fill the 128 rows by `tile::gather4`, so that no copy of the activations is made.
A row that fills up a tile has the number of tokens for its index and arrives as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.operands import Address, Register, Vector, at
from backends.ptx.sm100_moe.frame import GemmFrame, Tile
from backends.ptx.sm100_moe.geometry import (
    A_BYTES,
    B_ATOMS,
    B_BYTES,
    ROLES,
    SFA_BYTES,
    SFB_BYTES,
    STAGE_BYTES,
    STAGE_ROW_BYTES,
    STAGE_STEPS,
    STAGES,
    TILE_N,
)
from backends.ptx.tcgen05 import RingCursor

GATHER_ROWS = 4


@dataclass(frozen=True, slots=True)
class _Producer:
    """The loading warp. `token_of_row`: address of the token of each padded row, u32, if A is to be gathered."""

    frame: GemmFrame
    ring: RingCursor
    lane: Register
    leader: Register
    token_of_row: Register | None


@dataclass(frozen=True, slots=True)
class _TileOrigin:
    """Where a tile's boxes begin. `rows`: the four rows that this lane gathers, if A is gathered."""

    tile: Tile
    weight_row: Register
    weight_atom: Register
    rows: Vector


@dataclass(frozen=True, slots=True)
class _Depth:
    """How far along K a stage begins: in stages, bytes of codes and scale factor atoms."""

    stage: Register
    byte: Register
    atom: Register


def emit_producer(frame: GemmFrame, token_of_row: Register | None) -> None:
    """All tiles of this CTA. `token_of_row` as in `_Producer`."""
    x = frame.x
    x.section("warp 5: TMA producer")
    is_producer = x.let("is_producer_warp", "setp.eq.u32", frame.warp, ROLES.producer)
    with x.when(is_producer, "producer"):
        leader = x.elect(x.reg("producer_leader", "pred"))
        lane = x.let("producer_lane", "and.b32", frame.thread, 31)
        ring = RingCursor.start(frame.smem, STAGES, "load", parity=1)
        producer = _Producer(frame, ring, lane, leader, token_of_row)
        with frame.tiles("load") as tile:
            _load_tile(producer, _origin(producer, tile))
        ring.drain()


def _origin(producer: _Producer, tile: Tile) -> _TileOrigin:
    x = producer.frame.x
    weight_row = x.let("weight_row", "mul.lo.u32", tile.n_tile, TILE_N)
    weight_atom = x.let("weight_atom", "mul.lo.u32", tile.n_tile, B_ATOMS)
    rows: Vector = ()
    if producer.token_of_row is not None:
        first = x.let("first_gathered", "mad.lo.u32", producer.lane, GATHER_ROWS, tile.first_row)
        source = x.indexed_wide("token_of_row_at", producer.token_of_row, first, 4)
        rows = x.regs("gathered", "u32", GATHER_ROWS)
        x.emit("ld.global.v4.u32", rows, at(source))
    return _TileOrigin(tile, weight_row, weight_atom, rows)


def _load_tile(producer: _Producer, origin: _TileOrigin) -> None:
    x, params, ring = producer.frame.x, producer.frame.params, producer.ring
    k = _Depth(*(x.let(name, "mov.b32", 0) for name in ("k_stage", "k_byte", "k_atom")))
    steps = ((k.stage, 1), (k.byte, STAGE_ROW_BYTES), (k.atom, STAGE_STEPS))
    with x.while_below("load_stages", k.stage, params.k_stages, "k_finished", *steps):
        ring.wait("ring_empty")
        full = ring.barrier("ring_full")
        a_data = ring.data("a", A_BYTES)
        with x.when(producer.leader, "load_boxes"):
            x.expect_tx(full, STAGE_BYTES, note="what lies outside of a tensor arrives as zeros and counts")
            _load_boxes(producer, origin, k, full)
            if not origin.rows:
                x.tma_load(at(a_data), Address(params.a, 0, (k.byte, origin.tile.first_row)), full)
        if origin.rows:
            rows_data = x.indexed("gather_data", a_data, producer.lane, GATHER_ROWS * STAGE_ROW_BYTES)
            x.tma_gather4(at(rows_data), Address(params.a, 0, (k.byte, *origin.rows)), full)
        ring.advance()


def _load_boxes(producer: _Producer, origin: _TileOrigin, k: _Depth, full: Address) -> None:
    """Weights and scale factors."""
    x, params, ring = producer.frame.x, producer.frame.params, producer.ring
    expert, row_tile = origin.tile.expert, origin.tile.row_tile
    b_data, sfa_data, sfb_data = ring.data("b", B_BYTES), ring.data("sfa", SFA_BYTES), ring.data("sfb", SFB_BYTES)
    x.tma_load(at(b_data), Address(params.b, 0, (k.byte, origin.weight_row, expert)), full)
    x.tma_load(at(sfa_data), Address(params.sfa, 0, (0, k.atom, row_tile)), full)
    x.tma_load(at(sfb_data), Address(params.sfb, 0, (0, k.atom, origin.weight_atom, expert)), full)

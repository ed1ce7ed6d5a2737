"""The two issuing warps: warp 5 loads operands and scale factors along K, warp 4 copies scales and multiplies.

Weights and scale factors are whole boxes. The rows of A either are contiguous and also a box, or are gathered from the
tokens: 32 lanes with four rows each fill the 128 rows by `tile::gather4`, so that the activations need no copy. A
padding row has the number of tokens as its index and arrives as zeros.

A stage's scale factors go to one of two slots of tensor memory. The ISA orders a copy before a later MMA, but not an
MMA before a later copy (PTX ISA, "Pipelined tcgen05 Instructions"). So the copies of stage i wait until the MMAs of
stage i - 2 are reported done; the MMAs of stage i - 1 keep the tensor core busy meanwhile.

Two whole accumulators and the scale factors do not fit, so the accumulators of consecutive tiles overlap by half. The
epilogue first moves the shared half to registers and signals it; the next tile's MMAs wait for nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.moe.layout import ATOM_BYTES
from backends.ptx.operands import Address, Register, Vector, at
from backends.ptx.sm100_moe.frame import GemmFrame, Tile
from backends.ptx.sm100_moe.geometry import (
    A_BYTES,
    ACCUMULATOR_STRIDE,
    B_ATOMS,
    B_BYTES,
    MMA_K_BYTES,
    OPERAND_DESCRIPTOR,
    ROLES,
    SCALE_DESCRIPTOR,
    SF_COLUMN,
    SF_SLOT_COLUMNS,
    SF_SLOTS,
    SFA_BYTES,
    SFA_COLUMNS,
    SFB_BYTES,
    SFB_COLUMNS,
    SFB_OFFSET,
    STAGE_BYTES,
    STAGE_ROW_BYTES,
    STAGE_STEPS,
    STAGES,
    TILE_N,
    instruction_descriptor,
)
from backends.ptx.tcgen05 import RingCursor, tmem_address

GATHER_ROWS = 4


@dataclass(frozen=True, slots=True)
class _Producer:
    """The loading warp. `token_of_row`: address of the token of each padded row, u32, if A is gathered."""

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
    """How far along K a stage begins, in stages, bytes of codes and scale factor atoms."""

    stage: Register
    byte: Register
    atom: Register


def emit_producer(frame: GemmFrame, token_of_row: Register | None) -> None:
    """Loads all tiles of this CTA. `token_of_row` as in `_Producer`."""
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
    """Loads weights and scale factors."""
    x, params, ring = producer.frame.x, producer.frame.params, producer.ring
    expert, row_tile = origin.tile.expert, origin.tile.row_tile
    b_data, sfa_data, sfb_data = ring.data("b", B_BYTES), ring.data("sfa", SFA_BYTES), ring.data("sfb", SFB_BYTES)
    x.tma_load(at(b_data), Address(params.b, 0, (k.byte, origin.weight_row, expert)), full)
    x.tma_load(at(sfa_data), Address(params.sfa, 0, (0, k.atom, row_tile)), full)
    x.tma_load(at(sfb_data), Address(params.sfb, 0, (0, k.atom, origin.weight_atom, expert)), full)


MMA = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X"
COPY = "tcgen05.cp.cta_group::1.32x128b.warpx4"


class GemmMmaIssuer:
    """Registers of the issuing thread."""

    def __init__(self, frame: GemmFrame) -> None:
        x = frame.x
        self.frame = frame
        self.ring = RingCursor.start(frame.smem, STAGES, "mma", parity=0)
        self.two_behind = RingCursor.start(frame.smem, STAGES, "mma_behind", stage=STAGES - SF_SLOTS, parity=1)
        self.idesc = x.let("idesc", "mov.b32", instruction_descriptor())
        self.always = x.let("always", "setp.ge.u32", frame.thread, 0)

    def descriptor(self, name: str, stage_bytes: int, constant: int) -> Register:
        """The descriptor of this stage of the ring `name`."""
        data = self.ring.data(name, stage_bytes)
        return self.frame.x.matrix_descriptor(f"{name}_descriptor", data, constant, start=f"{name}_start")

    def buffer(self, name: str, index: Register, stride: int, offset: int) -> Register:
        """The tensor memory address of one of several buffers."""
        x = self.frame.x
        address = tmem_address(x, name, self.frame.tmem, index, stride)
        x.emit("add.u32", address, address, offset)
        return address


def emit_mma(frame: GemmFrame) -> None:
    """Multiplies all tiles of this CTA."""
    x = frame.x
    x.section("warp 4: MMA issuer")
    is_mma = x.let("is_mma", "setp.eq.u32", frame.warp, ROLES.mma)
    with x.when(is_mma, "mma"):
        leader = x.elect(x.reg("mma_leader", "pred"))
        with x.when(leader, "mma_leader"):
            issuer = GemmMmaIssuer(frame)
            with frame.tiles("mma") as tile:
                _multiply_tile(issuer, tile)
        x.sync_warp()


def _multiply_tile(issuer: GemmMmaIssuer, tile: Tile) -> None:
    frame, x = issuer.frame, issuer.frame.x
    buffer = x.let("mma_buffer", "and.b32", tile.index, 1)
    before = x.let("mma_tile_parity", "xor.b32", buffer, 1)
    x.wait(frame.smem["tile_free"], before, "tile_free")
    x.after_thread_sync()
    accumulator = issuer.buffer("accumulator", buffer, ACCUMULATOR_STRIDE, 0)
    k_stage = x.let("mma_k_stage", "mov.b32", 0)
    with x.while_below("mma_stages", k_stage, frame.params.k_stages, "mma_k_finished", (k_stage, 1)):
        _multiply_stage(issuer, accumulator, k_stage)
    x.commit_mma(frame.smem["tile_full"], note="when the last MMA of the tile is done")


def _multiply_stage(issuer: GemmMmaIssuer, accumulator: Register, k_stage: Register) -> None:
    x, ring = issuer.frame.x, issuer.ring
    issuer.two_behind.wait("ring_empty", "slot_free")
    issuer.two_behind.advance()
    ring.wait("ring_full")
    slot = x.let("sf_slot", "and.b32", ring.stage, SF_SLOTS - 1)
    scales = issuer.buffer("sf_columns", slot, SF_SLOT_COLUMNS, SF_COLUMN)
    _copy_scales(issuer, scales)
    a = issuer.descriptor("a", A_BYTES, OPERAND_DESCRIPTOR)
    b = issuer.descriptor("b", B_BYTES, OPERAND_DESCRIPTOR)
    a_step, b_step = x.reg("a_step", "b64"), x.reg("b_step", "b64")
    has_sum = x.let("has_sum", "setp.ne.u32", k_stage, 0)
    for step in range(STAGE_STEPS):
        x.emit("add.s64", a_step, a, step * MMA_K_BYTES // 16)
        x.emit("add.s64", b_step, b, step * MMA_K_BYTES // 16)
        sfa = at(scales, step * SFA_COLUMNS)
        sfb = at(scales, SFB_OFFSET + step * SFB_COLUMNS)
        accumulate = issuer.always if step else has_sum
        x.emit(MMA, at(accumulator), a_step, b_step, issuer.idesc, sfa, sfb, accumulate)
    x.commit_mma(ring.barrier("ring_empty"), note="when the MMAs have read it")
    ring.advance()


def _copy_scales(issuer: GemmMmaIssuer, scales: Register) -> None:
    """Copies every atom to four columns: A's per step, B's per step and 128 weight rows."""
    x = issuer.frame.x
    sfa = issuer.descriptor("sfa", SFA_BYTES, SCALE_DESCRIPTOR)
    sfb = issuer.descriptor("sfb", SFB_BYTES, SCALE_DESCRIPTOR)
    atom = x.reg("atom_descriptor", "b64")
    for step in range(STAGE_STEPS):
        x.emit("add.s64", atom, sfa, step * ATOM_BYTES // 16)
        x.emit(COPY, at(scales, step * SFA_COLUMNS), atom)
        for half in range(B_ATOMS):
            x.emit("add.s64", atom, sfb, (half * STAGE_STEPS + step) * ATOM_BYTES // 16)
            x.emit(COPY, at(scales, SFB_OFFSET + step * SFB_COLUMNS + half * SFA_COLUMNS), atom)

"""Warp 4: one thread copies scale factors to tensor memory and issues every tcgen05.mma.

A stage's scale factors go to one of two slots of tensor memory. The ISA orders a copy before a later MMA, not an MMA
before a later copy (PTX ISA, "Pipelined tcgen05 Instructions"). So the copies of stage i wait until the MMAs of stage
i - 2 are reported done; those of stage i - 1 keep the tensor core busy meanwhile.

Two whole accumulators and the scale factors do not fit, so the accumulators of consecutive tiles overlap by half. The
epilogue moves the shared half to its registers first and says so; the MMAs of the next tile wait for nothing else.
"""

from __future__ import annotations

from backends.ptx.operands import Register, at
from backends.ptx.sm100_moe.frame import GemmFrame, Tile
from backends.ptx.sm100_moe.geometry import (
    A_BYTES,
    ACCUMULATOR_STRIDE,
    ATOM_BYTES,
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
    STAGE_STEPS,
    STAGES,
    instruction_descriptor,
)
from backends.ptx.tcgen05 import RingCursor, tmem_address

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
    """All tiles of this CTA."""
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
    """Copies every atom to four columns: A's by step, B's by step and by 128 weight rows."""
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

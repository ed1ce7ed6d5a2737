"""Warp 4: one thread copies scale factors to tensor memory and issues every tcgen05.mma.

A stage's scale factors go to one of two slots of tensor memory. The ISA orders a copy before a later MMA, not an MMA
before a later copy (PTX ISA, "Pipelined tcgen05 Instructions"), so the copies of stage i wait until the MMAs of stage
i - 2 are reported done; those of stage i - 1 keep the tensor core busy meanwhile.

The accumulators of consecutive tiles overlap by half, as two of them and the scale factors would not fit. The epilogue
takes the shared half to its registers first and says so; the MMAs of the next tile wait for that alone.
"""

from __future__ import annotations

from backends.ptx.operands import Elected, Register, at
from backends.ptx.sm100_moe.frame import FULL_WARP, Frame, Tile
from backends.ptx.sm100_moe.geometry import (
    A_BYTES,
    ACCUMULATOR_STRIDE,
    ATOM_BYTES,
    B_ATOMS,
    B_BYTES,
    MMA_K_BYTES,
    MMA_WARP,
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
    operand_descriptor,
    scale_descriptor,
)
from backends.ptx.sm100_moe.ring import RingPosition

MMA = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X"
COPY = "tcgen05.cp.cta_group::1.32x128b.warpx4"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"


class MmaIssuer:
    """Registers of the issuing thread."""

    def __init__(self, frame: Frame) -> None:
        x = frame.x
        self.frame = frame
        self.ring = RingPosition.start(frame, "mma", parity=0)
        self.two_behind = RingPosition.start(frame, "mma_behind", stage=STAGES - SF_SLOTS, parity=1)
        self.idesc = x.let("idesc", "mov.b32", instruction_descriptor())
        self.always = x.let("always", "setp.ge.u32", frame.thread, 0)

    def descriptor(self, name: str, stage_bytes: int, constant: int) -> Register:
        """The descriptor of this stage of the ring `name`."""
        x = self.frame.x
        sixteenths = x.let(f"{name}_start", "shr.u32", self.ring.data(name, stage_bytes), 4)
        descriptor = x.let(f"{name}_descriptor", "cvt.u64.u32", sixteenths)
        x.emit("or.b64", descriptor, descriptor, constant)
        return descriptor

    def tensor_memory(self, name: str, index: Register, stride: int, offset: int) -> Register:
        """The tensor memory address of one of several buffers, in the .b32 register that tcgen05 insists on."""
        x = self.frame.x
        address = x.reg(name, "b32")
        x.emit("mad.lo.u32", address, index, stride, self.frame.tmem)
        x.emit("add.u32", address, address, offset)
        return address


def emit_mma(frame: Frame) -> None:
    """All tiles of this CTA."""
    x = frame.x
    x.section("warp 4: MMA issuer")
    is_mma = x.let("is_mma", "setp.eq.u32", frame.warp, MMA_WARP)
    with x.when(is_mma, "mma"):
        leader = x.reg("mma_leader", "pred")
        x.emit("elect.sync", Elected(leader), FULL_WARP)
        with x.when(leader, "mma_leader"):
            issuer = MmaIssuer(frame)
            with frame.walk("mma").tiles() as tile:
                _multiply_tile(issuer, tile)
        x.emit("bar.warp.sync", FULL_WARP)


def _multiply_tile(issuer: MmaIssuer, tile: Tile) -> None:
    frame, x = issuer.frame, issuer.frame.x
    buffer = x.let("mma_buffer", "and.b32", tile.index, 1)
    before = x.let("mma_tile_parity", "xor.b32", buffer, 1)
    x.wait(frame.place("tile_free"), before, "tile_free")
    x.emit("tcgen05.fence::after_thread_sync")
    accumulator = issuer.tensor_memory("accumulator", buffer, ACCUMULATOR_STRIDE, 0)
    k_stage, finished = x.let("mma_k_stage", "mov.b32", 0), x.reg("mma_k_finished", "pred")
    with x.loop("mma_stages") as loop:
        x.emit("setp.ge.u32", finished, k_stage, frame.params.k_stages)
        x.emit("bra", loop.done, guard=finished)
        _multiply_stage(issuer, accumulator, k_stage)
        x.emit("add.u32", k_stage, k_stage, 1)
    x.emit(COMMIT, frame.place("tile_full"), note="when the last MMA of the tile is done")


def _multiply_stage(issuer: MmaIssuer, accumulator: Register, k_stage: Register) -> None:
    x, ring, behind = issuer.frame.x, issuer.ring, issuer.two_behind
    x.wait(behind.barrier("ring_empty"), behind.parity, "slot_free")
    behind.advance()
    x.wait(ring.barrier("ring_full"), ring.parity, "ring_full")
    slot = x.let("sf_slot", "and.b32", ring.stage, SF_SLOTS - 1)
    scales = issuer.tensor_memory("sf_columns", slot, SF_SLOT_COLUMNS, SF_COLUMN)
    _copy_scales(issuer, scales)
    a = issuer.descriptor("a", A_BYTES, operand_descriptor())
    b = issuer.descriptor("b", B_BYTES, operand_descriptor())
    a_step, b_step = x.reg("a_step", "b64"), x.reg("b_step", "b64")
    has_sum = x.let("has_sum", "setp.ne.u32", k_stage, 0)
    for step in range(STAGE_STEPS):
        x.emit("add.s64", a_step, a, step * MMA_K_BYTES // 16)
        x.emit("add.s64", b_step, b, step * MMA_K_BYTES // 16)
        sfa = at(scales, step * SFA_COLUMNS)
        sfb = at(scales, SFB_OFFSET + step * SFB_COLUMNS)
        accumulate = issuer.always if step else has_sum
        x.emit(MMA, at(accumulator), a_step, b_step, issuer.idesc, sfa, sfb, accumulate)
    x.emit(COMMIT, ring.barrier("ring_empty"), note="when the MMAs have read it")
    ring.advance()


def _copy_scales(issuer: MmaIssuer, scales: Register) -> None:
    """Every atom to four columns: A's by step, B's by step and 128 weight rows."""
    x = issuer.frame.x
    sfa = issuer.descriptor("sfa", SFA_BYTES, scale_descriptor())
    sfb = issuer.descriptor("sfb", SFB_BYTES, scale_descriptor())
    atom = x.reg("atom_descriptor", "b64")
    for step in range(STAGE_STEPS):
        x.emit("add.s64", atom, sfa, step * ATOM_BYTES // 16)
        x.emit(COPY, at(scales, step * SFA_COLUMNS), atom)
        for half in range(B_ATOMS):
            x.emit("add.s64", atom, sfb, (half * STAGE_STEPS + step) * ATOM_BYTES // 16)
            x.emit(COPY, at(scales, SFB_OFFSET + step * SFB_COLUMNS + half * SFA_COLUMNS), atom)

"""The first warpgroups: weights from shared memory into registers, unpacked to f16, times the tokens.

The A fragments of a group of two or four k-steps are a set of registers. There are two sets or more: while the tensor
cores multiply with one, the threads unpack the next group into another. A stage is released once its wgmmas are known
to be done: after sets - 1 groups of the next stage have been issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from backends.ptx.operands import Register, Vector, at
from backends.ptx.sm90_moe.frame import ColumnFrame, ColumnTile
from backends.ptx.sm90_moe.geometry import (
    BLOCK_BYTES,
    CODES_BYTES,
    LANE_BYTES,
    MMA_K,
    ROW_BYTES,
    SCALE_BYTES,
    UNIT_BYTES,
    UNIT_STEPS,
    operand_descriptor,
)
from backends.ptx.sm90_moe.unpack import row_scales, unpack
from backends.ptx.tcgen05 import RingCursor

UNITS_A_TURN = 2
"""Units per pass of the main loop. K is a multiple of 128."""
MMA = "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{operand}.{operand}"
PLUS_A, PLUS_B, K_MAJOR = 1, 1, 0
WARP_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.{operand}.{operand}.f32"
MAX_WARP_COLUMNS = 8
"""Up to this many columns each warp multiplies by itself: a wgmma takes 15 cycles on an H200 whatever N, and makes four
warps wait for each other. At 16 columns wgmma is faster (results/records/h200-moe-clean-flush.json)."""
MMA_BYTES = 16
STEPS_OF_LDMATRIX = 2


class ColumnEpilogue(Protocol):
    """How one GEMM handles a tile."""

    def begin(self) -> None:
        """Runs once, in the warps that multiply."""
        ...

    def begin_tile(self, tile: ColumnTile) -> None:
        """Runs before the products of a tile."""
        ...

    def finish(self, tile: ColumnTile, width: int, accumulator: Vector) -> None:
        """Stores the tile. `accumulator`: register 4 b + 2 r + c is weight row 16 warp + lane / 4 + 8 r of the
        warpgroup's 64 and column 8 b + 2 (lane % 4) + c."""
        ...


@dataclass(frozen=True, slots=True)
class WeightUnit:
    """What a thread unpacks of a unit: a word of codes per k-step, a word of block scales per two k-steps."""

    codes: Vector
    scales: Vector


@dataclass(frozen=True, slots=True)
class Multiplier:
    """Registers of one thread. `ring`: the stage being multiplied. `ahead`: the stage whose codes are loaded next.
    `codes_at`, `scales_at`: the thread's bytes in unit 0 of stage 0. `tokens_at`: the tokens of stage 0, in units of 16
    bytes. `rows_at`: the lane's ldmatrix address in them: row lane % 8, chunk lane / 8. `spent`: the mbarrier of the
    stage that was multiplied last."""

    frame: ColumnFrame
    ring: RingCursor
    ahead: RingCursor
    codes_at: Register
    scales_at: Register
    tokens_at: Register
    descriptor_high: Register
    rows_at: Register
    units: tuple[WeightUnit, ...]
    sets: tuple[Vector, ...]
    spent: Register
    is_lane_0: Register
    always: Register

    @classmethod
    def open(cls, frame: ColumnFrame) -> Multiplier:
        """Computes the thread's addresses."""
        x = frame.x
        ring = RingCursor.start(frame.smem, frame.tiling.stages, "mma", parity=0)
        panel = x.let("panel", "shr.u32", frame.warp, 3)
        block = x.let("block", "and.b32", frame.warpgroup, 1)
        x.emit("mad.lo.u32", block, block, BLOCK_BYTES, frame.smem.base)
        x.emit("mad.lo.u32", block, panel, frame.tiling.units * UNIT_BYTES, block)
        x.emit("add.u32", block, block, frame.smem.layout["a"])
        warp = x.let("warp_in_group", "and.b32", frame.warp, 3)
        codes = x.indexed("codes_at", block, x.let("warp_lane", "mad.lo.u32", warp, 32, frame.lane), LANE_BYTES)
        pair = x.let("row_pair", "mad.lo.u32", warp, 8, x.let("quad", "shr.u32", frame.lane, 2))
        scales = x.indexed("scales_at", block, pair, SCALE_BYTES)
        sets = tuple(x.regs(f"a{index}", "b32", 4 * frame.tiling.group_steps) for index in range(frame.tiling.sets))
        tokens = x.let("tokens_at", "add.u32", frame.smem.base, frame.smem.layout["b"])
        x.emit("shr.u32", tokens, tokens, 4)
        return cls(
            frame=frame,
            ring=ring,
            ahead=RingCursor.start(frame.smem, frame.tiling.stages, "ahead", parity=0),
            codes_at=codes,
            scales_at=scales,
            tokens_at=tokens,
            descriptor_high=x.let("descriptor_high", "mov.b32", operand_descriptor() >> 32),
            rows_at=_rows_at(frame),
            units=tuple(
                WeightUnit(x.regs("word", "b32", UNIT_STEPS), x.regs("scale_word", "b32", UNIT_STEPS // 2))
                for _ in range(UNITS_A_TURN)
            ),
            sets=sets,
            spent=x.let("spent", "mov.b32", frame.smem.base),
            is_lane_0=x.let("is_lane_0", "setp.eq.u32", frame.lane, 0),
            always=x.let("always", "setp.eq.u32", frame.lane, frame.lane),
        )

    def release(self, guard: Register) -> None:
        """Releases the stage that was read last."""
        self.frame.x.arrive(at(self.spent), guard=guard)


def _rows_at(frame: ColumnFrame) -> Register:
    """The lane's address for ldmatrix: chunk c of row r of a swizzled tile is 16 bytes at 128 r + 16 (c ^ r % 8)."""
    x = frame.x
    row, place = x.let("b_row", "and.b32", frame.lane, 7), x.let("b_chunk", "shr.u32", frame.lane, 3)
    x.emit("xor.b32", place, place, row)
    x.emit("shl.b32", place, place, 4)
    x.emit("mad.lo.u32", place, row, ROW_BYTES, place)
    x.emit("add.u32", place, place, frame.smem.base)
    x.emit("add.u32", place, place, frame.smem.layout["b"])
    return place


def emit_multiply(frame: ColumnFrame, widths: Sequence[int], epilogue: ColumnEpilogue) -> None:
    """Multiplies all tiles of this CTA, each with the code for its width."""
    x = frame.x
    x.section("the other warps: multiply")
    x.setmaxnreg("inc", frame.tiling.registers)
    multiplier = Multiplier.open(frame)
    accumulator = x.regs("acc", "f32", widths[-1] // 2)
    x.comment("The registers of mma.sync and wgmma are apart: ptxas would let no wgmma overlap with anything.")
    warp_accumulator = x.regs("warp_acc", "f32", MAX_WARP_COLUMNS // 2)
    epilogue.begin()
    with frame.tiles("mma") as tile:
        epilogue.begin_tile(tile)
        for width in widths:
            x.section(f"tiles of {width} columns")
            other = x.let("other_width", "setp.ne.u32", tile.width, width)
            with x.unless(other, f"width_{width}"):
                mine = (warp_accumulator if width <= MAX_WARP_COLUMNS else accumulator)[: width // 2]
                _multiply_tile(multiplier, width, mine)
                epilogue.finish(tile, width, mine)


def _multiply_tile(multiplier: Multiplier, width: int, accumulator: Vector) -> None:
    """Multiplies one tile. With two units per stage, one unit's codes load a stage ahead while the other multiplies."""
    frame, x, ring = multiplier.frame, multiplier.frame.x, multiplier.ring
    per_stage = frame.tiling.units
    unit = x.let("unit", "mov.b32", 0)
    if width <= MAX_WARP_COLUMNS:
        for register in accumulator:
            x.emit("mov.f32", register, 0.0)
    if per_stage == UNITS_A_TURN:
        _load_ahead(multiplier, range(UNITS_A_TURN))
    with x.while_below("units", unit, frame.params.units, "units_finished", (unit, UNITS_A_TURN)):
        has_sum = x.let("has_sum", "setp.ne.u32", unit, 0)
        has_spent = x.let("has_spent", "setp.ne.and.u32", unit, 0, multiplier.is_lane_0)
        next_unit = x.let("next_unit", "add.u32", unit, UNITS_A_TURN)
        has_next = x.let("has_next", "setp.lt.u32", next_unit, frame.params.units)
        for index in range(UNITS_A_TURN):
            if per_stage == 1:
                _load_ahead(multiplier, range(index, index + 1))
            if width <= MAX_WARP_COLUMNS:
                _multiply_unit_by_warps(multiplier, index, width, accumulator)
            else:
                releases = multiplier.is_lane_0 if index >= per_stage else has_spent
                _multiply_unit(multiplier, index, width, accumulator, multiplier.always if index else has_sum, releases)
            if (index + 1) % per_stage == 0:
                place = ring.barrier("ring_empty")
                x.emit("add.u32", multiplier.spent, place.base, place.offset)
                ring.advance()
                if width <= MAX_WARP_COLUMNS:
                    x.sync_warp()
                    multiplier.release(multiplier.is_lane_0)
            if per_stage == UNITS_A_TURN:
                with x.when(has_next, "load_ahead"):
                    _load_ahead(multiplier, range(index, index + 1))
    if width > MAX_WARP_COLUMNS:
        x.emit("wgmma.wait_group.sync.aligned", 0)
        multiplier.release(multiplier.is_lane_0)


def _load_ahead(multiplier: Multiplier, units: range) -> None:
    """Loads codes and block scales of `units` of the stage at `ahead`; advances `ahead` after the last unit."""
    x, ahead, tiling = multiplier.frame.x, multiplier.ahead, multiplier.frame.tiling
    for index in units:
        inside = index % tiling.units
        if inside == 0:
            ahead.wait("ring_full")
        codes = x.indexed("unit_codes", multiplier.codes_at, ahead.stage, tiling.a_bytes)
        scales = x.indexed("unit_scales", multiplier.scales_at, ahead.stage, tiling.a_bytes)
        unit = multiplier.units[index]
        x.emit("ld.shared.v4.b32", unit.codes, at(codes, inside * UNIT_BYTES))
        x.emit("ld.shared.v2.b32", unit.scales, at(scales, inside * UNIT_BYTES + CODES_BYTES))
        if inside == tiling.units - 1:
            ahead.advance()


def _multiply_unit(
    multiplier: Multiplier,
    index: int,
    width: int,
    accumulator: Vector,
    accumulates: Register,
    releases: Register,
) -> None:
    """Unpacks a unit, group by group, and issues its wgmmas. `releases`: the threads that free the stage before."""
    x, tiling = multiplier.frame.x, multiplier.frame.tiling
    start = x.indexed("b_start", multiplier.tokens_at, multiplier.ring.stage, tiling.b_bytes // 16)
    groups = UNIT_STEPS // tiling.group_steps
    for group in range(groups):
        fragments = multiplier.sets[(index * groups + group) % tiling.sets]
        steps = range(group * tiling.group_steps, (group + 1) * tiling.group_steps)
        registers = [fragments[4 * place : 4 * place + 4] for place in range(len(steps))]
        _unpack_steps(multiplier, index, steps, registers)
        x.wgmma_fence()
        for step, fragment in zip(steps, registers, strict=True):
            offset = (index % tiling.units * width * ROW_BYTES + step * 2 * MMA_K) // 16
            low = x.let("b_low", "add.u32", start, offset)
            tokens = x.reg("b_descriptor", "b64")
            x.emit("mov.b64", tokens, (low, multiplier.descriptor_high))
            accumulate = multiplier.always if step else accumulates
            mma = MMA.format(width=width, operand=tiling.operand)
            x.emit(mma, accumulator, fragment, tokens, accumulate, PLUS_A, PLUS_B, K_MAJOR)
        x.emit("wgmma.commit_group.sync.aligned")
        x.emit("wgmma.wait_group.sync.aligned", tiling.sets - 1)
        if index % tiling.units * groups + group == tiling.sets - 2:
            multiplier.release(releases)


def _multiply_unit_by_warps(multiplier: Multiplier, index: int, width: int, accumulator: Vector) -> None:
    """Unpacks a unit and multiplies it; each warp does its 16 rows by itself."""
    x, tiling = multiplier.frame.x, multiplier.frame.tiling
    fragments = x.regs("warp_a", "b32", 4 * UNIT_STEPS)
    stage = x.indexed("rows_data", multiplier.rows_at, multiplier.ring.stage, tiling.b_bytes)
    other = x.let("other_rows_data", "xor.b32", stage, STEPS_OF_LDMATRIX * 2 * MMA_BYTES)
    tokens: dict[tuple[int, int], Vector] = {}
    for block in range(width // 8):
        offset = index % tiling.units * width * ROW_BYTES + 8 * block * ROW_BYTES
        for half, base in enumerate((stage, other)):
            matrices = x.regs("matrices", "b32", 4)
            x.emit("ldmatrix.sync.aligned.m8n8.x4.shared.b16", matrices, at(base, offset))
            tokens[block, 2 * half], tokens[block, 2 * half + 1] = matrices[:2], matrices[2:]
    registers = [fragments[4 * step : 4 * step + 4] for step in range(UNIT_STEPS)]
    _unpack_steps(multiplier, index, range(UNIT_STEPS), registers)
    for step, fragment in enumerate(registers):
        for block in range(width // 8):
            sums = accumulator[4 * block : 4 * block + 4]
            x.emit(WARP_MMA.format(operand=tiling.operand), sums, fragment, tokens[block, step], sums)


def _unpack_steps(multiplier: Multiplier, index: int, steps: range, registers: list[Vector]) -> None:
    """Unpacks the A fragments of an even number of k-steps of unit `index`."""
    x, unit, operand = multiplier.frame.x, multiplier.units[index], multiplier.frame.tiling.operand
    for first in range(0, len(steps), 2):
        rows = row_scales(x, unit.scales[steps[first] // 2], operand)
        for place in (first, first + 1):
            unpack(x, unit.codes[steps[place]], rows, registers[place], operand)

"""How the grouped GEMMs are cut into tiles and shared memory stages, and how the repacked operands lie in memory.

Operands are swapped: weights are A of wgmma, from registers, and M; tokens are B, from shared memory, and N. A tile is
64 weight rows per warpgroup by one column tile: up to 256 rows of one expert, in the narrowest of a few widths that
holds them.

Separate launches put both operands into units of UNIT_K along K, so that a stage is a few bulk copies:

- weights: [expert][panel of PANEL_ROWS rows][unit][warpgroup] blocks of BLOCK_BYTES: for each warp and lane 16 bytes,
  the codes of its A fragments of four k-steps, then for each warp and row pair 8 bytes of block scales (repack.py);
- tokens: [column tile][unit][row] 128 bytes of f16, swizzled as wgmma reads them (expand.py).

In both, two neighbouring blocks of 16 along K are interleaved, one element of the first, one of the second: the two
halves of a register of A then belong to the two blocks, just like the halves of the register with their two block
scales.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.shared_memory import SmemLayout

WARPGROUP_ROWS = 64
PANEL_ROWS = 128
"""Weight rows whose units are contiguous, whatever the tile."""
MMA_K = 16
UNIT_K = 64
UNIT_STEPS = UNIT_K // MMA_K
LANE_BYTES = 4 * UNIT_STEPS
"""Bytes of a lane's codes in a unit: a word of eight codes per k-step."""
SCALE_BYTES = 2 * UNIT_STEPS
"""Bytes of block scales of a pair of rows, 8 apart, in a unit."""
CODES_BYTES = 128 * LANE_BYTES
BLOCK_BYTES = CODES_BYTES + 4 * 8 * SCALE_BYTES
UNIT_BYTES = PANEL_ROWS // WARPGROUP_ROWS * BLOCK_BYTES
ROW_BYTES = 2 * UNIT_K
"""One row of B in a unit, a span of the 128-byte swizzle."""
WIDEST = (8, 16, 32, 64, 128, 256)
"""Widest column tiles: there is one kernel for each."""
WIDTHS = (8, 16, 32, 64, 96, 112, 128, 256)
"""A tile has the narrowest width that holds its rows: above 64 columns its time is proportional to its columns."""
PRODUCER_REGISTERS = 24
MAX_COLUMNS_OF_FOUR = 64
"""Accumulators of wider tiles leave too few registers for four warpgroups."""
SM_COUNT = 132
"""Persistent CTAs of a grouped GEMM: one per SM of an H200."""
STAGED_PITCH = 2 * WARPGROUP_ROWS + 16
"""Bytes of a token in the epilogue's staging: the warpgroup's rows in bf16, or half as many in f32, plus 16 bytes that
put the tokens in different banks."""
STAGED_BYTES = 8192
SMEM_FOR_RING = 216 * 1024
IN_FLIGHT = 80 * 1024
"""The ring need not hold more bytes of weights: 64 KiB per SM saturate an H200 (bulk copies)."""

OPERAND_BIAS = 7
"""Weights, and rows that are not bf16, hold code * block scale * 2^-7. A code unpacks to code * 2^-14, and 448 * 2^7 is
the largest scale that f16 can hold next to it."""


def result_factor(bf16: bool) -> float:
    """The factor that undoes the bias in an accumulator."""
    return float(1 << (OPERAND_BIAS if bf16 else 2 * OPERAND_BIAS))


def widths_up_to(widest: int) -> tuple[int, ...]:
    """The widths of column tiles in a kernel whose widest is `widest`."""
    return tuple(width for width in WIDTHS if width <= widest)


def widest_for(routes: int, num_experts: int) -> int:
    """The widest column tile worth having: twice the mean rows of an expert while that costs little, else the mean."""
    mean = routes / num_experts
    wanted = min(max(mean, min(2 * mean, MAX_COLUMNS_OF_FOUR)), routes)
    return next((width for width in WIDEST if width >= wanted), WIDEST[-1])


@dataclass(frozen=True, slots=True)
class ColumnTiling:
    """All that depends on the widest column tile and on the number of `warpgroups` that multiply. Four keep tensor
    cores, unpacking and memory busy together and read the tokens half as often as two. `bf16`: the operands are bf16,
    else f16."""

    widest: int
    warpgroups: int
    bf16: bool = False

    @classmethod
    def of(cls, widest: int, rows: int, bf16: bool = False, experts: int = 1) -> ColumnTiling:
        """The tiling for `rows` of weights per expert, a multiple of PANEL_ROWS, and about `experts` that have a column
        tile. Four warpgroups, unless that leaves most SMs idle in one of few rounds."""
        tiles = experts * rows // (2 * PANEL_ROWS)
        idles = tiles > SM_COUNT and -(-2 * tiles // SM_COUNT) <= 7 / 8 * 2 * -(-tiles // SM_COUNT)
        four = widest <= MAX_COLUMNS_OF_FOUR and rows % (2 * PANEL_ROWS) == 0 and not idles
        return cls(widest, 4 if four else 2, bf16)

    @property
    def operand(self) -> str:
        """The type of both operands."""
        return "bf16" if self.bf16 else "f16"

    @property
    def tile_m(self) -> int:
        """Weight rows per CTA."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def panels(self) -> int:
        """Panels of weights in a tile."""
        return self.tile_m // PANEL_ROWS

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return 128 * self.warpgroups

    @property
    def threads(self) -> int:
        """The threads that multiply, plus a warpgroup whose first warp loads and whose others give up registers."""
        return self.consumers + 128

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies. A CTA has only what its threads are launched with, a multiple of 8
        each: asking for more hangs an H200."""
        launched = (1 << 16) // self.threads // 8 * 8 * (self.warpgroups + 1)
        return (launched - PRODUCER_REGISTERS) // self.warpgroups // 8 * 8

    @property
    def group_steps(self) -> int:
        """K-steps whose A fragments form one set of registers and whose wgmmas form one group.

        Two sets of four k-steps leave too few registers beside the widest accumulators of four warpgroups and of two:
        ptxas 13.0 then serialises wgmmas. Sets of two cost 2 to 5 % of time at 64 columns, nothing at 256
        (results/records/h200-moe-backends.json).
        """
        return UNIT_STEPS // 2 if self.widest in (MAX_COLUMNS_OF_FOUR, WIDEST[-1]) else UNIT_STEPS

    @property
    def sets(self) -> int:
        """Sets of registers for A: one group is multiplied while another is unpacked."""
        return 2

    @property
    def staged_rows(self) -> int:
        """Tokens that a warpgroup's epilogue moves through shared memory at a time."""
        return min(self.widest, STAGED_BYTES // (2 * self.tile_m))

    @property
    def staged_bytes(self) -> int:
        """Bytes of a warpgroup's staging."""
        return self.staged_rows * STAGED_PITCH

    @property
    def units(self) -> int:
        """Units per stage. Two units of the widest tile would leave too few stages."""
        return 2 if self.widest <= 128 else 1

    @property
    def a_bytes(self) -> int:
        """Bytes of weights in one stage."""
        return self.panels * self.units * UNIT_BYTES

    @property
    def b_bytes(self) -> int:
        """Bytes reserved for the tokens of one stage."""
        return self.units * self.widest * ROW_BYTES

    @property
    def stages(self) -> int:
        """As many stages as fit, but no more than needed to keep IN_FLIGHT bytes of weights in flight."""
        return min(SMEM_FOR_RING // (self.a_bytes + self.b_bytes), -(-IN_FLIGHT // self.a_bytes))

    @property
    def smem(self) -> SmemLayout:
        """The ring, the epilogue's staging and the mbarriers."""
        layout = SmemLayout().with_place("b", self.stages * self.b_bytes, 1024)
        layout = layout.with_place("a", self.stages * self.a_bytes, 128)
        layout = layout.with_place("staged", self.warpgroups * self.staged_bytes, 128)
        layout = layout.with_mbarriers("ring_full", self.stages)
        return layout.with_mbarriers("ring_empty", self.stages, self.consumers // 32)


def operand_descriptor() -> int:
    """The matrix descriptor of B without its start address: K-major, 128-byte swizzle, 8-row groups 1024 bytes apart
    (PTX ISA, "Matrix Descriptor")."""
    return 8 * ROW_BYTES // 16 << 32 | 1 << 62


def max_columns(routes: int, num_experts: int, widest: int) -> int:
    """The most column tiles that `routes` can need."""
    occupied = min(routes, num_experts)
    return occupied + (routes - occupied) // widest

"""The plan of the sm_90a MoE kernels: tiles, how the repacked operands lie in memory, the ring, who does what.

Operands are swapped: weights are A of wgmma, from registers, and M; tokens are B, from shared memory, and N. A tile is
256 weight rows by one column tile: up to `width` rows of one expert. A warpgroup multiplies two blocks of 64 weight
rows: waits, descriptors and tokens serve both.

Both operands are in units of 64 along K, so that a stage of the ring is a few bulk copies of bytes that lie together:

- weights: [expert][panel of 128 rows][unit][64 rows] blocks of BLOCK_BYTES: for each warp and lane 16 bytes, the codes
  of its A fragments of four k-steps, then for each pair of rows 8 bytes of block scales (repack.py);
- tokens: [column tile][unit][row] 128 bytes of f16 or bf16, swizzled as wgmma reads them (expand.py).

In both, two neighbouring blocks of 16 along K take turns, an element of the first, one of the second: the halves of a
register of A are then of two blocks, as the two block scales that multiply them are the halves of another.

Pure arithmetic without CuTeDSL: the harness asks for workspaces on machines that do not have it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from backends.cutedsl.device import SMEM_BYTES, WARPGROUP
from backends.cutedsl.moe.layout import SF_VEC_SIZE

BLOCK_ROWS = 64
"""Weight rows of a wgmma: its M."""
BLOCKS = 2
"""Of a panel."""
PANEL_ROWS = BLOCKS * BLOCK_ROWS
PANELS = 2
"""Of a tile."""
UNIT_K = 64
K_STEPS = UNIT_K // 16
LANE_BYTES = 4 * K_STEPS
"""Codes of a lane in a unit: a word of eight for each k-step."""
PAIR_BYTES = 2 * UNIT_K // SF_VEC_SIZE
"""Block scales of a pair of rows in a unit."""
CODES_BYTES = WARPGROUP * LANE_BYTES
BLOCK_BYTES = CODES_BYTES + BLOCK_ROWS // 2 * PAIR_BYTES
UNIT_BYTES = BLOCKS * BLOCK_BYTES
ROW_BYTES = 2 * UNIT_K
"""A token in a unit, a span of the 128-byte swizzle."""
TURN_UNITS = 2
"""Units that the multiplying loop takes at a time, each with registers of its own for A. K is a multiple of 128."""
WIDTHS, BF16_WIDTHS = range(8, 160, 8), range(8, 136, 8)
"""What wgmma takes, as far as the accumulators of two blocks leave a thread room for the rest: 160 columns of f16 take
longer than 152 (h200-moe-forms.json), and 136 of bf16, whose weights take more to unpack, have a stack."""
FEW_COLUMNS = 64
"""The widest column tile with two units a stage: those of wider ones would leave too few stages."""
TILE_COLUMNS, UNIT_COLUMNS = 93, 25
"""What a column tile costs beside its columns, in columns, and how much more where a stage is one unit: 16 columns take
8.8 us a tile of 48 experts of 7168 / 3072, 32 take 10.1, 64 12.7, 80 16.1 and 128 20.3 (h200-moe-forms.json)."""
WARP_COLUMNS = 8
"""Columns of a tile that each warp multiplies by itself."""
MAX_STAGED_TOKENS = 64
"""Tokens in shared memory whose blocks of 16 are one a thread of a warpgroup."""
STAGED_PITCH = BLOCK_ROWS // 2 + 4
"""f32 of a staged token: 32 outputs of a block, and four that keep tokens in different banks."""
MAX_STAGES = 12
"""Of the ring, whatever fits: more than twice what saturates memory."""
PRODUCER_REGISTERS = 24
COLUMN_FIELDS = 4
"""int32 of an entry of the table of column tiles."""
OPERAND_BIAS = 7
"""Weights, and tokens that are no bf16, hold code * block scale * 2^-7: 448 * 2^7 is the largest scale that f16 holds
beside a code, which unpacks to code * 2^-14."""


def result_factor(bf16: bool) -> float:
    """What brings an accumulator back: bf16 tokens are as they are."""
    return float(1 << (OPERAND_BIAS if bf16 else 2 * OPERAND_BIAS))


@dataclass(frozen=True, slots=True)
class Sm90MoePlan:
    """The compile-time shape of a grouped GEMM. `width`: columns of a tile, N of wgmma, one of WIDTHS. `swiglu`: L1,
    else L2. `bf16`: operands are bf16, as the tokens are; else f16, which holds NVFP4 numbers.

    One kernel has one width: ptxas 13.5 gives each width of several registers of its own and then serialises wgmmas.
    """

    width: int
    swiglu: bool
    bf16: bool = False

    @property
    def group_blocks(self) -> int:
        """Blocks of weight rows a warpgroup. Warps that multiply by themselves wait for loads, which more of them hide:
        with two blocks the layer of 8 tokens takes 90.1 us where it takes 88.2 (results/attempts.md)."""
        return 1 if self.width == WARP_COLUMNS else BLOCKS

    @property
    def groups(self) -> int:
        """Warpgroups that multiply."""
        return PANELS * BLOCKS // self.group_blocks

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return WARPGROUP * self.groups

    @property
    def threads(self) -> int:
        """Those that multiply, and the producer's warpgroup."""
        return self.consumers + WARPGROUP

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer's thread after setmaxnreg: 640 threads are launched with 96 each, 384 with 168."""
        launched = (1 << 16) // self.threads // 8 * 8 * self.threads
        return (launched - PRODUCER_REGISTERS * WARPGROUP) // self.consumers // 8 * 8

    @property
    def sums(self) -> int:
        """Accumulators a thread, those of one block behind those of the other."""
        return self.group_blocks * self.width // 2

    @property
    def units(self) -> int:
        """Units of K a stage."""
        return TURN_UNITS if self.width <= FEW_COLUMNS else 1

    @property
    def a_bytes(self) -> int:
        """Weights of a stage."""
        return PANELS * self.units * UNIT_BYTES

    @property
    def b_bytes(self) -> int:
        """Room for the tokens of a stage."""
        return self.units * self.width * ROW_BYTES

    @property
    def staged_tokens(self) -> int:
        """Tokens that the epilogue of L1 takes through shared memory at a time."""
        return min(self.width, MAX_STAGED_TOKENS)

    @property
    def staged_bytes(self) -> int:
        """Bytes of the staging of L1's epilogue, of all warpgroups."""
        return 0 if not self.swiglu else self.groups * self.staged_tokens * STAGED_PITCH * 4

    @property
    def stages(self) -> int:
        """Stages of the ring: as many as fit. 64 KiB on their way saturate an H200; the others keep its memory busy
        while the warpgroups end a tile."""
        return min(MAX_STAGES, (SMEM_BYTES - self.staged_bytes) // (self.a_bytes + self.b_bytes))


def width_for(routes: int, num_experts: int, balanced: bool, bf16: bool = False) -> int:
    """The column tile that costs least. Rows of an expert are `balanced`, or come by chance, as a binomial."""
    mean = routes / num_experts
    deviation = 0.0 if balanced else math.sqrt(mean * (1 - 1 / num_experts))

    def cost(width: int) -> float:
        columns = TILE_COLUMNS + width + (UNIT_COLUMNS if width > FEW_COLUMNS else 0)
        return likely_tiles(mean, deviation, width) * columns

    return min(BF16_WIDTHS if bf16 else WIDTHS, key=cost)


def likely_tiles(mean: float, deviation: float, width: int) -> float:
    """Column tiles of an expert whose rows are normal, or `mean` if `deviation` is 0, in the mean."""
    if deviation == 0:
        return math.ceil(mean / width)
    most = math.ceil((mean + 6 * deviation) / width)
    return sum(math.erfc((tile * width + 0.5 - mean) / (math.sqrt(2) * deviation)) / 2 for tile in range(most))


def max_columns(routes: int, num_experts: int, width: int) -> int:
    """The most column tiles that `routes` can need."""
    occupied = min(routes, num_experts)
    return occupied + (routes - occupied) // width

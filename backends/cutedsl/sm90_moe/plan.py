"""The plan of the sm_90a MoE kernels: tiles, the memory layout of the repacked operands, the ring, the warp roles.

Operands are swapped: weights are A of wgmma (M), from registers; tokens are B (N), from shared memory. A tile is 256
weight rows by one column tile: up to `width` rows of one expert. A warpgroup multiplies two blocks of 64 weight rows,
so waits, descriptors and tokens serve both.

Both operands are in units of 64 along K, so that a stage of the ring is a few bulk copies of contiguous bytes:

- weights: [expert][panel of 128 rows][unit][64 rows] blocks of BLOCK_BYTES: for each warp and lane 16 bytes, the codes
  of its A fragments of four k-steps, then for each pair of rows 8 bytes of block scales (repack.py);
- tokens: [column tile][unit][row] 128 bytes of f16 or bf16, swizzled as wgmma reads them (expand.py).

In both, two neighbouring blocks of 16 along K are interleaved element by element. The two halves of a register of A
then belong to the two blocks, as do the halves of the register with the block scales that multiply it.

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
"""Blocks per panel."""
PANEL_ROWS = BLOCKS * BLOCK_ROWS
PANELS = 2
"""Panels per tile."""
UNIT_K = 64
K_STEPS = UNIT_K // 16
LANE_BYTES = 4 * K_STEPS
"""Bytes of a lane's codes in a unit: a word of eight codes for each k-step."""
PAIR_BYTES = 2 * UNIT_K // SF_VEC_SIZE
"""Block scales of a pair of rows in a unit, a byte each."""
CODES_BYTES = WARPGROUP * LANE_BYTES
BLOCK_BYTES = CODES_BYTES + BLOCK_ROWS // 2 * PAIR_BYTES
UNIT_BYTES = BLOCKS * BLOCK_BYTES
ROW_BYTES = 2 * UNIT_K
"""Bytes of a token in a unit: a span of the 128-byte swizzle."""
TURN_UNITS = 2
"""Units per turn of the multiplying loop, each with its own registers for A. K is a multiple of 128."""
WIDTHS, BF16_WIDTHS = range(8, 160, 8), range(8, 136, 8)
"""Widths that wgmma accepts, as long as the accumulators of two blocks leave a thread enough registers: 160 columns of
f16 take longer than 152 (h200-moe-forms.json), and 136 of bf16, whose weights take more to unpack, need a stack."""
FEW_COLUMNS = 64
"""The widest column tile with two units per stage. Wider tiles would have too few such stages."""
TILE_COLUMNS, UNIT_COLUMNS = 93, 25
"""The fixed cost of a column tile, in columns, and the extra cost if a stage is one unit: 16 columns take 8.8 us a tile
of 48 experts of 7168 / 3072, 32 take 10.1, 64 12.7, 80 16.1 and 128 20.3 (h200-moe-forms.json)."""
WARP_COLUMNS = 8
"""The width of a tile whose warps multiply by themselves, by mma.sync."""
MAX_STAGED_TOKENS = 64
"""The most tokens staged in shared memory: each thread of a warpgroup then has one block of 16."""
STAGED_PITCH = BLOCK_ROWS // 2 + 4
"""f32 per staged token: 32 outputs of a block, and four of padding that put tokens in different banks."""
MAX_STAGES = 12
"""The most stages of the ring, even if more fit: more than twice what saturates memory."""
PRODUCER_REGISTERS = 24
COLUMN_FIELDS = 4
"""int32 values per entry of the table of column tiles."""
OPERAND_BIAS = 7
"""Weights, and tokens unless they are bf16, hold code * block scale * 2^-7. A code unpacks to code * 2^-14, and its
scale is taken times 2^7: the largest is 448 * 2^7, and f16 would not hold 448 * 2^8."""


def result_factor(bf16: bool) -> float:
    """The factor that undoes OPERAND_BIAS in an accumulator; bf16 tokens have no bias."""
    return float(1 << (OPERAND_BIAS if bf16 else 2 * OPERAND_BIAS))


@dataclass(frozen=True, slots=True)
class Sm90MoePlan:
    """The compile-time shape of a grouped GEMM. `width`: columns of a tile, N of wgmma, one of WIDTHS. `swiglu`: L1,
    else L2. `bf16`: operands are bf16, as the tokens are; else f16, which holds NVFP4 numbers.

    A kernel has one width: with several, ptxas 13.5 gives each width registers of its own and then serialises wgmmas.
    """

    width: int
    swiglu: bool
    bf16: bool = False

    @property
    def group_blocks(self) -> int:
        """Blocks of weight rows per warpgroup. Warps that multiply by themselves wait for loads, and more warps hide
        that: with two blocks the layer of 8 tokens takes 90.1 us instead of 88.2 (results/attempts.md)."""
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
        """Threads of a CTA: those that multiply, and the producer's warpgroup."""
        return self.consumers + WARPGROUP

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer's thread after setmaxnreg: 640 threads are launched with 96 each, 384 with 168."""
        launched = (1 << 16) // self.threads // 8 * 8 * self.threads
        return (launched - PRODUCER_REGISTERS * WARPGROUP) // self.consumers // 8 * 8

    @property
    def sums(self) -> int:
        """Accumulators per thread, one block's after the other's."""
        return self.group_blocks * self.width // 2

    @property
    def units(self) -> int:
        """Units of K per stage."""
        return TURN_UNITS if self.width <= FEW_COLUMNS else 1

    @property
    def a_bytes(self) -> int:
        """Bytes of weights per stage."""
        return PANELS * self.units * UNIT_BYTES

    @property
    def b_bytes(self) -> int:
        """Bytes for the tokens of a stage."""
        return self.units * self.width * ROW_BYTES

    @property
    def staged_tokens(self) -> int:
        """Tokens that the epilogue of L1 stages in shared memory at a time."""
        return min(self.width, MAX_STAGED_TOKENS)

    @property
    def staged_bytes(self) -> int:
        """Bytes of staging for L1's epilogue, over all warpgroups."""
        return 0 if not self.swiglu else self.groups * self.staged_tokens * STAGED_PITCH * 4

    @property
    def stages(self) -> int:
        """Stages of the ring: as many as fit, at most MAX_STAGES. 64 KiB in flight saturate an H200; the other stages
        keep its memory busy while the warpgroups finish a tile."""
        return min(MAX_STAGES, (SMEM_BYTES - self.staged_bytes) // (self.a_bytes + self.b_bytes))


def width_for(routes: int, num_experts: int, balanced: bool, bf16: bool = False) -> int:
    """The width with the least cost. Rows per expert are `balanced`, or random with a binomial distribution."""
    mean = routes / num_experts
    deviation = 0.0 if balanced else math.sqrt(mean * (1 - 1 / num_experts))

    def cost(width: int) -> float:
        columns = TILE_COLUMNS + width + (UNIT_COLUMNS if width > FEW_COLUMNS else 0)
        return likely_tiles(mean, deviation, width) * columns

    return min(BF16_WIDTHS if bf16 else WIDTHS, key=cost)


def likely_tiles(mean: float, deviation: float, width: int) -> float:
    """The expected column tiles of an expert. Its row count is normal, or `mean` if `deviation` is 0."""
    if deviation == 0:
        return math.ceil(mean / width)
    most = math.ceil((mean + 6 * deviation) / width)
    return sum(math.erfc((tile * width + 0.5 - mean) / (math.sqrt(2) * deviation)) / 2 for tile in range(most))


def max_columns(routes: int, num_experts: int, width: int) -> int:
    """The most column tiles that `routes` can need."""
    occupied = min(routes, num_experts)
    return occupied + (routes - occupied) // width

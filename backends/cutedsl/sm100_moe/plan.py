"""The plan of the sm_100a MoE kernels: tiles, rings, tensor memory, CTA pairs, register layout.

Pure arithmetic without CuTeDSL: the harness asks for workspaces on machines that do not have it.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.cutedsl.device import SMEM_BYTES, TMEM_COLUMNS, TMEM_LANES
from backends.cutedsl.moe.layout import SF_VEC_SIZE, TILE_M

TILE_K = 256
"""Elements along K per ring stage: 128 bytes of codes, one swizzle row; four instructions of 64."""
HALF_N = 128
"""Columns of an accumulator that an epilogue thread holds in registers at a time: all of a single CTA's tile, half of a
pair's."""
MAX_RING_STAGES = 8
SF_ROWS_PER_COLUMN = 32
"""Scales of 32 rows share a column of tensor memory: a word of 4 scales per lane (facts.md 2.4)."""
K_BLOCKS = TILE_K // 64
MMA_WARP, LOAD_WARP = 4, 5
THREADS = 192
H_COLUMNS = HALF_N // 2
"""Columns of h from 128 columns of L1, half of them gate and half up. One atom of block scales."""
STORE_COLUMNS = 64
"""Columns of bf16 rows that one TMA store of L2 writes: a 128-byte swizzle row."""
STORE_STAGES = 2
UNIT_FIELDS = 4
"""int32 values per entry of the schedule."""


@dataclass(frozen=True, slots=True)
class Sm100MoePlan:
    """The compile-time shape of one grouped GEMM. `cta_group`: CTAs that share a tile; `swiglu`: L1, else L2.

    A single CTA computes 128 x 128; a pair computes 256 x 256 with 128 rows of A and of W in each CTA. Single CTAs suit
    few tokens per expert: the work is to stream W, and small tiles spread it evenly over the machine. Pairs suit many:
    a stage of 38 KiB feeds the tensor core for 512 cycles. A single CTA's 36 KiB feed it for 256, and L2 could not
    serve that rate to every SM.

    A single CTA's tensor memory holds two accumulators, 2 x 128 columns, and 32 columns of scales for every ring stage.
    A pair's holds two accumulators of 256 columns that share 128, as regions 0, 1 and 1, 2 of 3 x 128, then two slots
    of 48 columns of scales. The epilogue reads the shared region first; the next tile begins once that is in registers.
    """

    cta_group: int
    swiglu: bool

    @property
    def tile_n(self) -> int:
        """Rows of W per tile: columns of an accumulator."""
        return HALF_N * self.cta_group

    @property
    def halves(self) -> int:
        """Steps of 128 columns in which the epilogue reads an accumulator."""
        return self.tile_n // HALF_N

    @property
    def acc_stages(self) -> int:
        """Accumulators that change hands as a whole. The two of a pair overlap, so they count as one."""
        return 2 if self.cta_group == 1 else 1

    @property
    def stage_bytes(self) -> int:
        """Bytes of a ring stage of one CTA: codes of A and of its part of W, scales of A and of all of W."""
        return 2 * TILE_M * TILE_K // 2 + (TILE_M + self.tile_n) * TILE_K // SF_VEC_SIZE

    @property
    def store_bytes(self) -> int:
        """Bytes of shared memory for the bf16 rows of L2 on their way out."""
        return 0 if self.swiglu else STORE_STAGES * TILE_M * STORE_COLUMNS * 2

    @property
    def ring_stages(self) -> int:
        """Stages of the operand ring: as many as shared memory holds, at most 8."""
        return min(MAX_RING_STAGES, (SMEM_BYTES - self.store_bytes) // self.stage_bytes)

    @property
    def tmem_sf(self) -> int:
        """First tensor-memory column of block scales."""
        return 2 * HALF_N if self.cta_group == 1 else 3 * HALF_N

    @property
    def sfa_columns(self) -> int:
        """Columns of a slot that the scales of A take."""
        return TILE_M // SF_ROWS_PER_COLUMN * K_BLOCKS

    @property
    def sf_columns(self) -> int:
        """Columns of a slot: the scales of one ring stage, of A and of W."""
        return (TILE_M + self.tile_n) // SF_ROWS_PER_COLUMN * K_BLOCKS

    @property
    def sf_slots(self) -> int:
        """Slots of scales in tensor memory. With one per ring stage, a slot is free when its stage is loaded. With
        fewer, the MMA warp waits for the instructions that read a slot before it copies into it, because nothing else
        orders a tcgen05.cp after a tcgen05.mma (PTX ISA 9.7.16.6.2.1)."""
        return min(self.ring_stages, (TMEM_COLUMNS - self.tmem_sf) // self.sf_columns)


def half_of_tile(cta_group: int, step: int, turn: int) -> tuple[int, int]:
    """(first tensor-memory column, which half of the tile's columns) of the epilogue's step `step` (0, or 0 and 1).

    `turn`: 0 for the first tile of the CTA, 1 for the second, 0 for the third and so on; accumulators begin at column
    128 `turn`. A pair's first step is the region that both of its accumulators share; then the next tile may begin. In
    a kernel `turn` is an Int32, and so is the result.
    """
    if cta_group == 1:
        return turn * HALF_N, 0
    if step == 0:
        return HALF_N, 1 - turn
    return turn * (2 * HALF_N), turn


def pays_as_pair(rows: int, num_experts: int) -> bool:
    """Whether pairs of CTAs should compute the tiles: yes if experts have more than 128 rows on average."""
    return rows > TILE_M * num_experts


def swiglu_registers(interleave: int, h_column: int) -> tuple[int, int]:
    """The (gate, up) registers of an L1 epilogue thread for column `h_column` (0..63) of its row of h.

    `tcgen05.ld.32x32b` gives thread t of the warpgroup lane t, and register r its column r. So thread t, register r
    hold (M, N) = (t, r) of the 128 columns whatever the interleave, and gate and up of an h column meet in one thread,
    `interleave` registers apart.
    """
    gate = 2 * h_column - h_column % interleave
    return gate, gate + interleave


assert TILE_M == TMEM_LANES, "one epilogue thread a row; also rows of W a CTA loads"

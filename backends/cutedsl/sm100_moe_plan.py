"""What the sm_100a MoE kernels decide before they compile: tiles, rings, tensor memory, CTA pairs, register layout.

Pure arithmetic, no CuTeDSL: the harness asks for workspaces on machines where CuTeDSL is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_M = 128
"""Expert rows a CTA: the 128 lanes of tensor memory, one epilogue thread a row."""
TILE_N = 128
"""Rows of W1 or W2 a tile: columns of one accumulator."""
TILE_K = 256
"""Elements along K a ring stage: 128 bytes of codes, one swizzle row; four instructions of 64."""
SF_VEC_SIZE = 16
ACC_STAGES = 2
"""Accumulators in tensor memory: the epilogue reads one while the tensor core fills the other."""
MAX_RING_STAGES = 8
TMEM_COLUMNS = 512
SF_ROWS_PER_COLUMN = 32
"""Scales of 32 rows share a column of tensor memory: a word of 4 scales a lane (ptx-facts, section 2.4)."""
K_BLOCKS = TILE_K // 64
SF_COLUMNS = (TILE_M + TILE_N) // SF_ROWS_PER_COLUMN * K_BLOCKS
"""Columns that the scales of one ring stage take: 16 of A and 16 of B."""
WARPGROUP = 128
MMA_WARP, LOAD_WARP = 4, 5
THREADS = 192
SMEM_BYTES = 224 * 1024
"""Shared memory for the ring and the epilogue. A CTA may have 227 KiB (ptx-facts 0.1): 3 KiB are left for the rest."""
SM_COUNT = 148
"""Streaming multiprocessors of a B200."""
MAX_EXPERTS = 512
H_COLUMNS = TILE_N // 2
"""Columns of h that a tile of L1 makes: half of its columns are gate, half are up. One atom of block scales."""
STORE_COLUMNS = 64
"""Columns of bf16 rows that one TMA store of L2 writes: a 128-byte swizzle row."""
STORE_STAGES = 2
UNIT_FIELDS = 4
"""int32 of an entry of the schedule."""


@dataclass(frozen=True, slots=True)
class Sm100MoePlan:
    """The compile-time shape of one grouped GEMM. `cta_group`: CTAs that share a tile; `swiglu`: L1, else L2.

    The accumulators take 2 x 128 of the 512 columns of tensor memory, and every ring stage has 32 columns of its own
    for its scales: so scales are copied as soon as a stage arrives, ahead of the instructions that read them, and never
    over scales that are still read. A tile of 256 columns would leave no room for scales beside two accumulators.

    A pair of CTAs computes 256 rows of one expert. Each holds its own 128 rows of A and half of the rows of W, so that
    the tensor core reads 3/4 of the shared memory for a product, and W comes from L2 half as often. It pays where
    experts have more than 128 rows; with fewer, the second CTA computes nothing of use.
    """

    cta_group: int
    swiglu: bool

    @property
    def w_rows(self) -> int:
        """Rows of W that one CTA holds in a ring stage."""
        return TILE_N // self.cta_group

    @property
    def stage_bytes(self) -> int:
        """Bytes of a ring stage of one CTA: codes of A and W, scales of A, scales of all of W's rows."""
        return (TILE_M + self.w_rows) * TILE_K // 2 + (TILE_M + TILE_N) * TILE_K // SF_VEC_SIZE

    @property
    def store_bytes(self) -> int:
        """Bytes of shared memory through which the bf16 rows of L2 go."""
        return 0 if self.swiglu else STORE_STAGES * TILE_M * STORE_COLUMNS * 2

    @property
    def ring_stages(self) -> int:
        """Stages of the operand ring: what shared memory holds, at most 8, as many as there are columns for scales."""
        return min(MAX_RING_STAGES, (SMEM_BYTES - self.store_bytes) // self.stage_bytes)

    @property
    def tmem_sf(self) -> int:
        """First tensor-memory column of block scales."""
        return ACC_STAGES * TILE_N


def pays_as_pair(rows: int, num_experts: int) -> bool:
    """Whether the experts' tiles should be computed by pairs of CTAs: if experts have more than 128 rows on average."""
    return rows > TILE_M * num_experts


def swiglu_columns(interleave: int, h_column: int) -> tuple[int, int]:
    """(gate, up) columns of an L1 accumulator that column `h_column` (0..63) of the tile's h is made of.

    `tcgen05.ld.32x32b` of column c gives thread t row t, in register c: so this is also which registers meet. The
    accumulator of thread t, register c belongs to (M, N) = (t, c) of the tile whatever the interleave, h column n of
    that row being silu(register 2 n - n mod i) * (register 2 n - n mod i + i) with i the interleave.
    """
    gate = 2 * h_column - h_column % interleave
    return gate, gate + interleave


def block_loads(interleave: int, block: int) -> tuple[tuple[int, int], ...]:
    """(first column, columns) of the accumulator loads that together hold h block `block` (0..3) of 16 columns.

    With an interleave of 8 or 16 its gates and ups lie in 32 neighbouring columns, else in two runs of 16.
    """
    gate, up = swiglu_columns(interleave, block * SF_VEC_SIZE)
    if interleave <= SF_VEC_SIZE:
        return ((gate, 2 * SF_VEC_SIZE),)
    return ((gate, SF_VEC_SIZE), (up, SF_VEC_SIZE))


def block_registers(interleave: int) -> tuple[tuple[int, int], ...]:
    """For each of the 16 columns of an h block, the registers of (gate, up) among those of `block_loads`, in order."""
    columns = [swiglu_columns(interleave, column) for column in range(SF_VEC_SIZE)]
    loaded = [first + i for first, count in block_loads(interleave, 0) for i in range(count)]
    return tuple((loaded.index(gate), loaded.index(up)) for gate, up in columns)

"""How the grouped GEMMs are cut into tiles, tensor memory columns and shared memory stages.

The TILE_M rows of a tile are the lanes of TMEM. Nothing here depends on the case: hidden, intermediate, the number of
experts and their loads are known only at run time.
"""

from __future__ import annotations

from backends.ptx.moe.layout import ATOM_BYTES, ATOM_ROWS, TILE_M
from backends.ptx.shared_memory import SmemLayout
from backends.ptx.tcgen05 import WarpRoles, smem_descriptor, with_tmem_base

TILE_N = 256
"""Weight rows per tile. The widest MMA reads the fewest bytes of shared memory per product."""
HALF_N = TILE_N // 2
"""Accumulator columns that the epilogue holds in registers at a time."""
MMA_K = 64
"""e2m1 elements of K in one tcgen05.mma.kind::mxf4nvf4, one scale factor atom (facts.md 2.1)."""
STAGE_STEPS = 4
STAGE_K = STAGE_STEPS * MMA_K
STAGE_ROW_BYTES = STAGE_K // 2
"""One 128-byte swizzle span."""
MMA_K_BYTES = MMA_K // 2
A_BYTES = TILE_M * STAGE_ROW_BYTES
B_BYTES = TILE_N * STAGE_ROW_BYTES
B_ATOMS = TILE_N // ATOM_ROWS
SFA_BYTES = STAGE_STEPS * ATOM_BYTES
SFB_BYTES = B_ATOMS * SFA_BYTES
STAGE_BYTES = A_BYTES + B_BYTES + SFA_BYTES + SFB_BYTES
STAGES = 4
SM_COUNT = 148
"""Persistent CTAs of a grouped GEMM: one per SM of a B200."""

EPILOGUE_WARPS = range(4)
ROLES = WarpRoles(mma=4, producer=5)
THREADS = 192
EPILOGUE_THREADS = 128

ACCUMULATOR_STRIDE = 128
"""Columns between the accumulators. Each has TILE_N: the upper half of the first is the second's lower half."""
SF_COLUMN = ACCUMULATOR_STRIDE + TILE_N
SFA_COLUMNS = TILE_M // 32
SFB_COLUMNS = TILE_N // 32
SFB_OFFSET = STAGE_STEPS * SFA_COLUMNS
SF_SLOTS = 2
SF_SLOT_COLUMNS = STAGE_STEPS * (SFA_COLUMNS + SFB_COLUMNS)
"""Columns of the scale factors of one stage."""

STAGED_COLUMNS = 32
"""bf16 columns of expert rows that a warp hands to TMA at a time; shared memory has no room for more."""
STAGED_ROW_BYTES = STAGED_COLUMNS * 2
STAGED_WARP_BYTES = 32 * STAGED_ROW_BYTES


def smem_layout(*, staged: bool) -> SmemLayout:
    """The ring of operands and scale factors, a staging buffer for output rows if `staged`, and the mbarriers."""
    layout = SmemLayout().with_place("a", STAGES * A_BYTES, 1024).with_place("b", STAGES * B_BYTES, 1024)
    layout = layout.with_place("sfa", STAGES * SFA_BYTES, 128).with_place("sfb", STAGES * SFB_BYTES, 128)
    if staged:
        layout = layout.with_place("staged", len(EPILOGUE_WARPS) * STAGED_WARP_BYTES, 1024)
    layout = layout.with_mbarriers("ring_full", STAGES).with_mbarriers("ring_empty", STAGES)
    return with_tmem_base(layout.with_mbarriers("tile_full").with_mbarriers("tile_free", 1, EPILOGUE_THREADS))


def instruction_descriptor() -> int:
    """The 32-bit descriptor of tcgen05.mma.kind::mxf4nvf4: e2m1 A and B, ue4m3 scale factors, K = 64, TILE_M by TILE_N
    (PTX ISA, Table "Instruction descriptor" of the block-scaled kinds; facts.md 2.2)."""
    a_is_e2m1, b_is_e2m1 = 1 << 7, 1 << 10
    return a_is_e2m1 | b_is_e2m1 | TILE_N >> 3 << 17 | TILE_M >> 7 << 27


OPERAND_DESCRIPTOR = smem_descriptor(stride_bytes=8 * STAGE_ROW_BYTES)
"""Descriptor of codes: K-major, 128-byte swizzle."""
SCALE_DESCRIPTOR = smem_descriptor(stride_bytes=128, leading_bytes=16, swizzle_128b=False)
"""Descriptor of a scale factor atom for tcgen05.cp.32x128b: 32 rows of 16 bytes (facts.md 1.2)."""

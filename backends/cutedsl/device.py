"""Sizes of the devices that the kernels are planned for. Imports no CuTeDSL: plans are made on machines without it."""

WARPGROUP = 128
SMEM_BYTES = 224 * 1024
"""Shared memory for operands. A CTA may have 227 KiB (facts.md 0.1); 3 KiB are left for barriers and statistics."""
H200_SM_COUNT = 132
B200_SM_COUNT = 148
TMEM_LANES = 128
"""Lanes of tensor memory. A lane holds a row of a tile and belongs to one thread of a warpgroup."""
TMEM_COLUMNS = 512
LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634

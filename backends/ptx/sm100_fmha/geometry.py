"""How one head dimension is cut into tiles, tensor memory columns and shared memory stages.

All of it follows from hd; t, s_k, the mask and the number of heads are known only at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.attention import PANEL_COLUMNS
from backends.ptx.shared_memory import SharedMemory

TILE_M = 128
"""Folded query rows a CTA, and TMEM lanes."""
TILE_N = 128
"""Keys a tile."""
MMA_K = 16
"""bf16 elements of K in one tcgen05.mma.kind::f16 (facts.md 2.1)."""
PANEL_BYTES = TILE_M * PANEL_COLUMNS * 2
SWIZZLE_ATOM_BYTES = 8 * 128
TMEM_COLUMNS = 512
MAX_SMEM = 232448
"""Dynamic shared memory that one CTA may ask for on sm_100 (facts.md 0.1)."""
MAX_RING_STAGES = 8
SUPPORTED_HD = (64, 128, 256, 512)

SOFTMAX_WARPS = range(4)
CORRECTION_WARPS = range(4, 8)
MMA_WARP = 8
PRODUCER_WARP = 9
THREADS = 384
"""Three warpgroups, as setmaxnreg concerns whole ones; warps 10 and 11 only keep the third complete."""
SOFTMAX_REGISTERS, CORRECTION_REGISTERS, ISSUER_REGISTERS = 224, 128, 96
"""Registers a thread after setmaxnreg; times 128 threads they must stay below the 64 Ki of the machine."""
WARPGROUP_THREADS = 128


@dataclass(frozen=True, slots=True)
class Geometry:
    """The tiling of one hd."""

    hd: int

    @property
    def o_columns(self) -> int:
        """Columns of O (and V) that one CTA owns: TMEM_COLUMNS less two S buffers is what O may take."""
        return min(self.hd, TMEM_COLUMNS - 2 * TILE_N)

    @property
    def halves(self) -> int:
        """CTAs that share a row tile, each with its own columns of O."""
        return self.hd // self.o_columns

    @property
    def stage_columns(self) -> int:
        """Columns of K or V in one ring stage."""
        return min(self.hd, 2 * PANEL_COLUMNS)

    @property
    def stage_panels(self) -> int:
        """64-column panels in one ring stage."""
        return self.stage_columns // PANEL_COLUMNS

    @property
    def stage_bytes(self) -> int:
        """Bytes of one ring stage."""
        return self.stage_panels * PANEL_BYTES

    @property
    def k_stages(self) -> int:
        """Ring stages that one key tile of K takes."""
        return self.hd // self.stage_columns

    @property
    def v_stages(self) -> int:
        """Ring stages that one key tile of this CTA's columns of V takes."""
        return self.o_columns // self.stage_columns

    @property
    def q_bytes(self) -> int:
        """Bytes of the resident query tile."""
        return TILE_M * self.hd * 2

    @property
    def ring_stages(self) -> int:
        """As many stages as fit beside Q and 4 KiB of barriers and exchange, at most MAX_RING_STAGES."""
        return min(MAX_RING_STAGES, (MAX_SMEM - self.q_bytes - 2048) // self.stage_bytes)

    @property
    def smem(self) -> SharedMemory:
        """The shared memory map."""
        stages = self.ring_stages
        smem = SharedMemory().with_place("q", self.q_bytes, 1024)
        smem = smem.with_place("ring", stages * self.stage_bytes, 1024)
        smem = smem.with_place("rescale", 2 * TILE_M * 4, 16).with_place("row_sum", TILE_M * 4, 16)
        for name, count in (
            ("q_full", 1),
            ("ring_full", stages),
            ("ring_empty", stages),
            ("s_full", 2),
            ("pv_ready", 2),
            ("pv_done", 2),
            ("rescale_full", 2),
            ("row_sum_full", 1),
        ):
            smem = smem.with_place(name, 8 * count, 8)
        return smem.with_place("tmem_base", 4, 4)

    # Tensor memory columns.
    @property
    def o_column(self) -> int:
        """First TMEM column of O, behind the two S buffers."""
        return 2 * TILE_N


def instruction_descriptor(n: int, *, b_is_mn_major: bool) -> int:
    """The 32-bit descriptor of tcgen05.mma.kind::f16: bf16 A and B, f32 D, M = TILE_M (PTX ISA, Table "Instruction
    descriptor"; facts.md 2.2)."""
    d_is_f32, a_is_bf16, b_is_bf16 = 1 << 4, 1 << 7, 1 << 10
    return d_is_f32 | a_is_bf16 | b_is_bf16 | b_is_mn_major << 16 | n // 8 << 17 | TILE_M // 16 << 24


def smem_descriptor(leading_bytes: int) -> int:
    """A 64-bit shared memory matrix descriptor without its start address: 128-byte swizzle, 8-row groups 1024 bytes
    apart, `leading_bytes` between 64-column panels (used by MN-major operands only; facts.md 3)."""
    leading, stride = leading_bytes // 16, SWIZZLE_ATOM_BYTES // 16
    version, swizzle_128b = 1, 2
    return leading << 16 | stride << 32 | version << 46 | swizzle_128b << 61

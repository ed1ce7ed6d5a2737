"""How one head dimension is cut into tiles, tensor memory columns and shared memory stages.

All of it follows from hd. t, s_k, the mask and the number of heads are known only at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.attention import PANEL_COLUMNS
from backends.ptx.shared_memory import MAX_SMEM, SmemLayout
from backends.ptx.tcgen05 import TMEM_COLUMNS, WarpRoles, with_tmem_base

TILE_M = 128
"""Folded query rows per CTA, and TMEM lanes."""
TILE_N = 128
"""Keys per tile."""
MMA_K = 16
"""bf16 elements of K in one tcgen05.mma.kind::f16 (facts.md 2.1)."""
PANEL_BYTES = TILE_M * PANEL_COLUMNS * 2
SWIZZLE_ATOM_BYTES = 8 * 128
MAX_RING_STAGES = 8
OTHER_BYTES = 2048
"""Shared memory reserved for barriers and exchange, next to Q and the ring."""

SOFTMAX_WARPS = range(4)
CORRECTION_WARPS = range(4, 8)
ROLES = WarpRoles(mma=8, producer=9)
THREADS = 384
"""Three warpgroups: setmaxnreg acts on whole ones, so warps 10 and 11 only fill the third."""
SOFTMAX_REGISTERS, CORRECTION_REGISTERS, ISSUER_REGISTERS = 224, 128, 96
"""Registers per thread after setmaxnreg; times 128 threads they must stay below the SM's 64 Ki."""
WARPGROUP_THREADS = 128


@dataclass(frozen=True, slots=True)
class Sm100FmhaTiling:
    """The tiling of one hd."""

    hd: int

    @property
    def o_columns(self) -> int:
        """Columns of O (and V) that one CTA owns: at most what two S buffers leave of TMEM_COLUMNS."""
        return min(self.hd, TMEM_COLUMNS - 2 * TILE_N)

    @property
    def halves(self) -> int:
        """CTAs that share a row tile, each with its own columns of O."""
        return self.hd // self.o_columns

    @property
    def o_column(self) -> int:
        """First TMEM column of O, after the two S buffers."""
        return 2 * TILE_N

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
        """As many stages as fit beside Q and OTHER_BYTES, at most MAX_RING_STAGES."""
        return min(MAX_RING_STAGES, (MAX_SMEM - self.q_bytes - OTHER_BYTES) // self.stage_bytes)

    @property
    def smem(self) -> SmemLayout:
        """Operands, then the exchange between softmax and correction, then the mbarriers."""
        layout = SmemLayout().with_place("q", self.q_bytes, 1024)
        layout = layout.with_place("ring", self.ring_stages * self.stage_bytes, 1024)
        layout = layout.with_place("rescale", 2 * TILE_M * 4, 16).with_place("row_sum", TILE_M * 4, 16)
        layout = layout.with_mbarriers("q_full")
        layout = layout.with_mbarriers("ring_full", self.ring_stages).with_mbarriers("ring_empty", self.ring_stages)
        layout = layout.with_mbarriers("s_full", 2).with_mbarriers("pv_ready", 2, 2 * WARPGROUP_THREADS)
        layout = layout.with_mbarriers("pv_done", 2).with_mbarriers("rescale_full", 2, WARPGROUP_THREADS)
        return with_tmem_base(layout.with_mbarriers("row_sum_full", 1, WARPGROUP_THREADS))


def instruction_descriptor(n: int, *, b_is_mn_major: bool) -> int:
    """The 32-bit descriptor of tcgen05.mma.kind::f16: bf16 A and B, f32 D, M = TILE_M (PTX ISA, Table "Instruction
    descriptor"; facts.md 2.2)."""
    d_is_f32, a_is_bf16, b_is_bf16 = 1 << 4, 1 << 7, 1 << 10
    return d_is_f32 | a_is_bf16 | b_is_bf16 | b_is_mn_major << 16 | n // 8 << 17 | TILE_M // 16 << 24

"""How one head dimension is cut into tiles, accumulators and shared memory stages. All of it follows from hd."""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.shared_memory import SmemLayout

TILE_M = 64
"""Folded query rows a CTA: M of wgmma."""
MMA_K = 16
"""bf16 elements of K in one wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Shape")."""
ROW_BYTES = 128
SWIZZLE_ATOM_BYTES = 8 * ROW_BYTES
THREADS = 128
MAX_O_COLUMNS = 256
"""N of wgmma is 256 at most; its f32 accumulator then takes 128 registers a thread."""


@dataclass(frozen=True, slots=True)
class Sm90FmhaTiling:
    """The tiling of one hd."""

    hd: int

    @property
    def tile_n(self) -> int:
        """Keys a tile."""
        return 64 if self.hd < 512 else 32

    @property
    def o_columns(self) -> int:
        """Columns of O (and V) that one CTA owns."""
        return min(self.hd, MAX_O_COLUMNS)

    @property
    def halves(self) -> int:
        """CTAs that share a row tile, each with its own columns of O."""
        return self.hd // self.o_columns

    @property
    def panel_bytes(self) -> int:
        """Bytes of 64 columns of K or V of one tile."""
        return self.tile_n * ROW_BYTES

    @property
    def q_bytes(self) -> int:
        """Bytes of the resident query tile."""
        return TILE_M * self.hd * 2

    @property
    def k_bytes(self) -> int:
        """Bytes of K of one tile."""
        return self.tile_n * self.hd * 2

    @property
    def v_bytes(self) -> int:
        """Bytes of this CTA's columns of V of one tile."""
        return self.tile_n * self.o_columns * 2

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage."""
        return self.k_bytes + self.v_bytes

    @property
    def stages(self) -> int:
        """Tiles in flight: enough to keep the memory busy, few enough that two CTAs fit an SM up to hd = 128."""
        return {64: 4, 128: 3, 256: 2, 512: 3}[self.hd]

    @property
    def smem(self) -> SmemLayout:
        """Q, the ring (a stage is K, then V), and the mbarriers."""
        layout = SmemLayout().with_place("q", self.q_bytes, 1024)
        layout = layout.with_place("ring", self.stages * self.stage_bytes, 1024)
        layout = layout.with_mbarriers("q_full")
        return layout.with_mbarriers("k_full", self.stages).with_mbarriers("v_full", self.stages)


def descriptor_bits(leading_bytes: int = 0) -> int:
    """A shared memory matrix descriptor of wgmma without its start address: 128-byte swizzle, 8-row groups 1024 bytes
    apart, `leading_bytes` between 64-column panels (used by MN-major operands only; PTX ISA, "Matrix Descriptor")."""
    swizzle_128b = 1
    return leading_bytes // 16 << 16 | SWIZZLE_ATOM_BYTES // 16 << 32 | swizzle_128b << 62

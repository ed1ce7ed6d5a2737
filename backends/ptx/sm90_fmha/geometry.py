"""How one head dimension is cut into tiles, accumulators and shared memory stages. All of it follows from hd."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from backends.ptx.shared_memory import MAX_SMEM, SmemLayout

TILE_M = 64
"""Folded query rows per CTA: M of wgmma."""
MMA_K = 16
"""bf16 elements of K in one wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Shape")."""
ROW_BYTES = 128
SWIZZLE_ATOM_BYTES = 8 * ROW_BYTES
THREADS = 128
SM_COUNT = 132
"""SMs of an H200."""
MAX_O_COLUMNS = 256
"""N of wgmma is at most 256; its f32 accumulator then takes 128 registers per thread."""


@dataclass(frozen=True, slots=True)
class Tiling(ABC):
    """The tiling of one hd: a tile of query rows resident in shared memory, and tiles of keys that stream past."""

    hd: int

    @property
    @abstractmethod
    def tile_m(self) -> int:
        """Folded query rows per CTA."""

    @property
    @abstractmethod
    def tile_n(self) -> int:
        """Keys per tile."""

    @property
    @abstractmethod
    def o_columns(self) -> int:
        """Columns of O (and V) that one warpgroup owns."""

    @property
    @abstractmethod
    def stages(self) -> int:
        """Tiles in flight."""

    @property
    def ctas_per_sm(self) -> int:
        """CTAs needed to keep an SM busy."""
        return 1

    @property
    @abstractmethod
    def smem(self) -> SmemLayout:
        """Q, the ring (a stage is K, then V), the warpgroups' exchange buffers, and the mbarriers."""

    @property
    def halves(self) -> int:
        """Number of CTAs that share a row tile."""
        return 1

    @property
    def panel_bytes(self) -> int:
        """Bytes of 64 columns of K or V of one tile."""
        return self.tile_n * ROW_BYTES

    @property
    def q_panel_bytes(self) -> int:
        """Bytes of 64 columns of Q."""
        return self.tile_m * ROW_BYTES

    @property
    def q_bytes(self) -> int:
        """Bytes of the resident query tile."""
        return self.tile_m * self.hd * 2

    @property
    def k_bytes(self) -> int:
        """Bytes of K of one tile."""
        return self.tile_n * self.hd * 2

    @property
    def v_bytes(self) -> int:
        """Bytes of V of one tile that are not also K."""
        return self.k_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage."""
        return self.k_bytes + self.v_bytes


@dataclass(frozen=True, slots=True)
class Sm90FmhaTiling(Tiling):
    """The tiling with one warpgroup per CTA: kernel.py, up to hd 256."""

    @property
    def tile_m(self) -> int:
        """Folded query rows per CTA."""
        return TILE_M

    @property
    def tile_n(self) -> int:
        """Keys per tile."""
        return 64

    @property
    def o_columns(self) -> int:
        """Columns of O (and V) that one warpgroup owns."""
        return self.hd

    @property
    def stages(self) -> int:
        """Tiles in flight: enough to keep the memory busy, few enough that two CTAs fit an SM up to hd = 128."""
        return {64: 4, 128: 3, 256: 2}[self.hd]

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that keep an SM busy: 8 heads of 32768 keys of hd 64 take 24.8 us in 256 CTAs and 27.7 us in 128."""
        return 2 if self.hd == 64 else 1

    @property
    def smem(self) -> SmemLayout:
        """Q, the ring, and the mbarriers."""
        layout = SmemLayout().with_place("q", self.q_bytes, 1024)
        layout = layout.with_place("ring", self.stages * self.stage_bytes, 1024)
        layout = layout.with_mbarriers("q_full")
        return layout.with_mbarriers("k_full", self.stages).with_mbarriers("v_full", self.stages)


PAIR_THREADS = 3 * THREADS
"""The producer's warpgroup and two consumers."""
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
"""Registers per thread after setmaxnreg: 128 x (24 + 2 x 240) is 64,512, the number of registers that 384 threads
launch with, 168 each."""
PAIR_WARPS = 8
"""Warps of both consumers."""
PAIR_BYTES = 8
"""One f32 of each of a thread's two rows."""
BARRIER_BYTES = 1024
"""Shared memory reserved for mbarriers."""


@dataclass(frozen=True, slots=True)
class PairTiling(Tiling):
    """The tiling where one warp loads and two warpgroups consume: pair.py.

    `latent`: whether K and V are one tensor. A tile is then loaded once and read as both.
    """

    latent: bool = False

    @property
    def shares_columns(self) -> bool:
        """Whether the consumers share 64 rows and split the columns of O, instead of having 64 rows each."""
        return self.hd > MAX_O_COLUMNS

    @property
    def tile_m(self) -> int:
        """Folded query rows per CTA."""
        return TILE_M if self.shares_columns else 2 * TILE_M

    @property
    def tile_n(self) -> int:
        """Keys per tile."""
        return 128 if self.hd <= 128 else 64

    @property
    def score_keys(self) -> int:
        """Keys of a tile whose scores one consumer computes."""
        return self.tile_n // 2 if self.shares_columns else self.tile_n

    @property
    def o_columns(self) -> int:
        """Columns of O per consumer."""
        return min(self.hd, MAX_O_COLUMNS)

    @property
    def v_bytes(self) -> int:
        """Bytes of V of one tile that are not also K."""
        return 0 if self.latent else self.k_bytes

    @property
    def stages(self) -> int:
        """Tiles in flight: as many as shared memory holds next to Q and P."""
        return (MAX_SMEM - BARRIER_BYTES - self.q_bytes - self.p_bytes - self.exchange_bytes) // self.stage_bytes

    @property
    def p_bytes(self) -> int:
        """Bytes of P of one tile, which the consumers exchange if they share rows."""
        return TILE_M * self.tile_n * 2 if self.shares_columns else 0

    @property
    def exchange_bytes(self) -> int:
        """Bytes of two numbers per thread, which the consumers exchange if they share rows."""
        return 2 * THREADS * PAIR_BYTES if self.shares_columns else 0

    @property
    def smem(self) -> SmemLayout:
        """Q, the ring, P and two numbers per thread if the consumers share rows, and the mbarriers."""
        layout = SmemLayout().with_place("q", self.q_bytes, 1024)
        layout = layout.with_place("ring", self.stages * self.stage_bytes, 1024)
        if self.shares_columns:
            layout = layout.with_place("p", self.p_bytes, 1024).with_place("exchange", self.exchange_bytes, 16)
        layout = layout.with_mbarriers("q_full")
        for name in ("k",) if self.latent else ("k", "v"):
            layout = layout.with_mbarriers(f"{name}_full", self.stages)
            layout = layout.with_mbarriers(f"{name}_empty", self.stages, arrivals=PAIR_WARPS)
        return layout


def descriptor_bits(leading_bytes: int = 0) -> int:
    """A shared memory matrix descriptor of wgmma without its start address: 128-byte swizzle, 8-row groups 1024 bytes
    apart, `leading_bytes` between 64-column panels (used by MN-major operands only; PTX ISA, "Matrix Descriptor")."""
    swizzle_128b = 1
    return leading_bytes // 16 << 16 | SWIZZLE_ATOM_BYTES // 16 << 32 | swizzle_128b << 62

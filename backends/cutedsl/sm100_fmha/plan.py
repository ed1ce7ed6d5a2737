# pyright: reportMissingImports=false
"""The plan of the sm_100a attention kernel: tiles, shared memory, tensor memory, splits.

Pure arithmetic without CuTeDSL: the harness asks for workspaces and splits on machines that do not have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from backends.cutedsl.device import SMEM_BYTES, TMEM_LANES, WARPGROUP

if TYPE_CHECKING:
    from cutlass import Int32

    from backends.cutedsl.attention_tiles import Problem

TILE_M = TMEM_LANES
"""Query rows per tile: each has a softmax thread."""
TILE_N = 128
"""Keys per tile: the columns of one S accumulator."""
SLAB_BYTES = 16 * 1024
"""Bytes per stage of the K/V ring: 128 keys x 64 columns of K; 64 keys x 128 columns of V (128 x 64 for hd 64)."""
SLAB_COLUMNS = 64
"""Columns per slab of Q or K: one 128-byte swizzle row of bf16."""
S_STAGES = 2
STAT_STAGES = 2
MIN_TILES_PER_SPLIT = 4
MAX_SPLITS = 32
"""The combine kernel keeps one split per lane."""


@dataclass(frozen=True, slots=True)
class Sm100FmhaPlan:
    """The compile-time shape of the kernel for one head dimension (64, 128, 256 or 512 elements).

    Tensor memory has 512 columns. S is double-buffered (2 x 128) and O takes up to 256. P takes 64 columns per stage.
    It has columns of its own if 2 x 128 + 2 x 64 + O <= 512, which holds for hd 64 and 128. For hd 256 and 512 none are
    left, and P goes through swizzled shared memory. P never overlaps S, so S[i + 2] does not wait for P[i] V[i], and
    the tensor core has work while the softmax runs.

    O of hd 512 would fill all 512 columns and leave none for S. So a work item computes 256 columns of O (`o_halves` is
    2), and both halves compute the same S. That costs 3/2 of the FLOPs (2 x 512 for S and 512 for O instead of 512 and
    512, times 2 x 128 x 128 per key tile) and a second read of K, mostly from L2. Two CTAs of a cluster could compute S
    once and exchange P through shared memory, but not before cta_group may be 2.
    """

    hd: int
    tile_m: ClassVar[int] = TILE_M
    tile_n: ClassVar[int] = TILE_N

    def part_begin(self, problem: Problem, split: Int32) -> Int32:
        """The first key tile of a split. All splits but the last have the same number of key tiles."""
        return split * problem.split_tiles

    @property
    def o_halves(self) -> int:
        """Work items that share a row tile, each with its own columns of O."""
        return 2 if self.hd == 512 else 1

    @property
    def o_columns(self) -> int:
        """Columns of O, and of V, that a work item owns."""
        return self.hd // self.o_halves

    @property
    def pv_tile_n(self) -> int:
        """N of one P V instruction."""
        return min(self.hd, 128)

    @property
    def pv_tile_k(self) -> int:
        """Keys per V slab."""
        return SLAB_BYTES // 2 // self.pv_tile_n

    @property
    def k_slabs(self) -> int:
        """Slabs of a Q tile or of a K tile."""
        return self.hd // SLAB_COLUMNS

    @property
    def v_key_slabs(self) -> int:
        """Slabs along the keys of one V tile."""
        return TILE_N // self.pv_tile_k

    @property
    def v_column_slabs(self) -> int:
        """Slabs along the columns of one V tile of this work item."""
        return self.o_columns // self.pv_tile_n

    @property
    def q_stages(self) -> int:
        """Q tiles in shared memory: two if that leaves at least eight slabs to the ring."""
        return 2 if self.hd <= 128 else 1

    @property
    def p_in_tmem(self) -> bool:
        """Whether P is a tensor-memory operand."""
        return self.o_columns <= 128

    @property
    def softmax_groups(self) -> int:
        """Softmax warpgroups: two in turn where the exponentials bound a tile, one where the tensor core does.

        At 8192 FLOPs per clock a tile costs the tensor core 128 x 128 x 4 x hd / 8192 clocks (512, 1024, 2048 for hd
        64, 128, 256; half of hd 512 3072) and the special-function units 128 x 128 / 16 = 1024. One warpgroup cannot
        reduce the maxima of a tile during its own exponentials; two can, each during the other's.
        """
        return 2 if self.hd <= 128 else 1

    @property
    def threads(self) -> int:
        """Threads per CTA: the softmax warpgroups, the correction warpgroup, and one with the MMA and TMA warps."""
        return WARPGROUP * (self.softmax_groups + 2)

    @property
    def max_stages(self) -> int:
        """Row-maximum buffers. With two softmax warpgroups one is enough: an item ends with a message from each. The
        first message brings the maximum, and the second is not released before the maximum has been read."""
        return 1 if self.softmax_groups == 2 else STAT_STAGES

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers per thread of softmax, correction, and the MMA and TMA warps; at most 512 over all warpgroups."""
        return (192, 88, 40) if self.softmax_groups == 2 else (240, 160, 104)

    @property
    def p_stages(self) -> int:
        """P tiles in flight between the softmax and the MMA warp."""
        return 2 if self.p_in_tmem else 1

    @property
    def p_smem_bytes(self) -> int:
        """Bytes of P in shared memory."""
        return 0 if self.p_in_tmem else TILE_M * TILE_N * 2 * self.p_stages

    @property
    def q_smem_bytes(self) -> int:
        """Bytes of Q in shared memory, all stages."""
        return TILE_M * self.hd * 2 * self.q_stages

    @property
    def ring_stages(self) -> int:
        """Slabs in the K/V ring: as many as Q and P leave room for, at most 12."""
        return min(12, (SMEM_BYTES - self.q_smem_bytes - self.p_smem_bytes) // SLAB_BYTES)

    @property
    def tmem_p(self) -> int:
        """First tensor-memory column of P, if P is there."""
        return S_STAGES * TILE_N

    @property
    def tmem_o(self) -> int:
        """First tensor-memory column of O."""
        return S_STAGES * TILE_N + (self.p_stages * TILE_N // 2 if self.p_in_tmem else 0)


def split_count(t: int, s_k: int) -> int:
    """The number of parts that the keys of a sequence are split into (1: no split, no combine kernel).

    A part has at least 4 key tiles of 128; below that the prologue and the combine cost more than they save. It has at
    least t / 4 key tiles: a part writes and reads back rows x hd fp32 against tiles x 128 x hd x 2 bf16 of K and V, so
    with many rows only a long part pays. There are at most 32 parts.

    The rule may use nothing else, not even how full the machine is. Parts are added up in another order than tiles, so
    the bits of a sequence's result would otherwise depend on the batch that it is served in (laws batch_invariant and
    gqa_equals_expanded_mha).
    """
    key_tiles = -(-s_k // TILE_N)
    tiles_per_split = max(MIN_TILES_PER_SPLIT, t // 4, -(-key_tiles // MAX_SPLITS))
    return -(-key_tiles // tiles_per_split)

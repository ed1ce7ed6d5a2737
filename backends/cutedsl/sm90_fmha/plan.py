"""What the sm_90a attention kernel decides before it runs: how two warpgroups share a tile, shared memory, splits.

Pure arithmetic, no CuTeDSL: the harness asks for workspaces and splits on machines where CuTeDSL is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Share = Literal["rows", "keys", "columns"]
"""How the two consumer warpgroups share a work item; see Sm90FmhaPlan."""

WARPGROUP = 128
GROUPS = 2
"""Consumer warpgroups of a CTA."""
GROUP_M = 64
"""Query rows a warpgroup: M of wgmma."""
PANEL_COLUMNS = 64
"""Columns of a panel in shared memory: one 128-byte swizzle row of bf16."""
THREADS = WARPGROUP * (GROUPS + 1)
SMEM_BYTES = 224 * 1024
"""Shared memory for Q, the rings and the merge buffer. A CTA may have 227 KiB: 3 KiB are left for the rest."""
MERGE_REGISTERS = 32
"""Accumulator registers a thread that one pass of the merge carries over."""
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = 240
"""Registers a thread after setmaxnreg: 128 x (24 + 2 x 240) = 64,512 of 65,536."""
UNBOUNDED = 1 << 30
"""A window or look-ahead that hides nothing: above every admissible s_k, and s_k + UNBOUNDED still fits an int32."""
SM_COUNT = 132
"""Streaming multiprocessors of an H200."""
LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
MAX_SPLITS = 256
"""The combine kernel keeps one split a thread."""
DECODE_T = 16
"""Query tokens a sequence up to which the warpgroups share the keys and not the rows."""
SHORT_KEYS = 2048
"""Keys up to which the split follows from t and s_k alone."""
SHORT_SPLIT_KEYS = 512
"""Keys of a split of such a short cache where few queries are decoded; of many queries it is not split."""
TINY_KEYS = 512
"""Keys up to which many queries are treated as few: one sequence of t 128 and s_k 512 then has eight CTAs and not one
(hd 128: 9.0 us in four splits of 128 keys, 14.4 in one part)."""
TINY_SPLIT_KEYS = 128
"""Keys of a split of these."""
ITEM_KEYS = 64
"""What beginning and ending a work item costs, in keys that a CTA reads meanwhile."""
COMBINE_KEYS = 192
"""What the combine kernel costs, in the same unit."""


@dataclass(frozen=True, slots=True)
class Sm90FmhaPlan:
    """The compile-time shape of the kernel: head dimension (64, 128, 256 or 512 elements) and who does what.

    - rows: a tile has 128 query rows, 64 a warpgroup; both read every tile of keys. For many queries.
    - keys: a tile has 64 query rows. Each warpgroup has a ring and a producer warp of its own, and visits every other
      tile of keys; the second hands O and its row statistics to the first through shared memory at the end. For
      decoding: the two never wait for each other, so loads, softmax and MMAs of one run under those of the other.
    - columns: a tile has 64 query rows; each warpgroup computes all of S and one half of the columns of O. For hd 512:
      O takes 64 x 256 fp32, 128 registers a thread. S is computed twice, so a tile of 64 keys costs 3,072 clocks of the
      tensor core; its 128 KiB of K and V take 7,400 at the rate at which HBM feeds an SM (17.6 bytes a clock).
    """

    hd: int
    share: Share

    @property
    def tile_m(self) -> int:
        """Query rows a work item."""
        return GROUPS * GROUP_M if self.share == "rows" else GROUP_M

    @property
    def tile_n(self) -> int:
        """Keys a tile.

        Rows: as many as registers hold. S, P and O take 3/4 tile_n + hd / 2 of a thread's 240, and every tile pays for
        its barriers and drains. TFLOP/s of 8 x 16 x 128 rows on 8192 keys that L2 holds, on an H200: hd 64 414 at 128
        keys, 426 at 192; hd 128 633 at 112, 652 at 128, 656 at 160; hd 256 680 at 64, 709 at 80.
        Keys, columns: shared memory decides. A ring has two slabs in use (hd 512: eight) and the others on their way.
        """
        if self.share == "rows":
            return {64: 192, 128: 160, 256: 80}[self.hd]
        return {64: 128, 128: 64, 256: 32, 512: 64}[self.hd]

    @property
    def slab_columns(self) -> int:
        """Columns of a slab of K or V."""
        return min(self.hd, 128 if self.share == "columns" else 256)

    @property
    def slabs(self) -> int:
        """Slabs of a K tile, or of a V tile."""
        return self.hd // self.slab_columns

    @property
    def slab_bytes(self) -> int:
        """Bytes of a stage of a ring."""
        return self.tile_n * self.slab_columns * 2

    @property
    def o_columns(self) -> int:
        """Columns of O a warpgroup."""
        return self.hd // GROUPS if self.share == "columns" else self.hd

    @property
    def q_bytes(self) -> int:
        """Bytes of a Q tile."""
        return self.tile_m * self.hd * 2

    @property
    def q_stages(self) -> int:
        """Q tiles in shared memory: two where they are small, so that an item's loads begin under the one before."""
        return 2 if self.q_bytes <= 16 * 1024 else 1

    @property
    def rings(self) -> int:
        """Rings of slabs: one, or one a warpgroup."""
        return GROUPS if self.share == "keys" else 1

    @property
    def ring_consumers(self) -> int:
        """Warps that read a slab and release it."""
        return 4 * GROUPS // self.rings

    @property
    def merge_bytes(self) -> int:
        """Bytes of the buffer through which the second warpgroup hands over O."""
        return WARPGROUP * MERGE_REGISTERS * 4 if self.share == "keys" else 0

    @property
    def ring_stages(self) -> int:
        """Slabs of one ring: all the shared memory that is left, 12 slabs at most."""
        left = SMEM_BYTES - self.q_stages * self.q_bytes - self.merge_bytes
        return min(12, left // self.slab_bytes) // self.rings

    @property
    def turns(self) -> bool:
        """Whether the warpgroups issue MMAs in turn. Where they read the same tiles they run in step otherwise: hd 512,
        t 128 takes 188 us without turns and 175 with them."""
        return self.share != "keys"


@dataclass(frozen=True, slots=True)
class FmhaSizes:
    """The sizes of a case that the plan depends on; `rows` are the query rows of one (batch, kv head)."""

    hd: int
    t: int
    s_k: int
    rows: int
    kv_batches: int


def kernel_plan(sizes: FmhaSizes) -> Sm90FmhaPlan:
    """The kernel for a case. It follows from hd, t and s_k: neither batch nor grouping of heads changes a bit."""
    if sizes.hd == 512:
        return Sm90FmhaPlan(512, "columns")
    few = sizes.t <= DECODE_T or sizes.s_k <= TINY_KEYS
    return Sm90FmhaPlan(sizes.hd, "keys" if few else "rows")


def split_count(sizes: FmhaSizes, sm_count: int = SM_COUNT) -> int:
    """Into how many parts the keys of a sequence are split (1: no split, no combine kernel).

    Up to SHORT_KEYS keys the count follows from t and s_k alone: then the bits of a sequence's result depend neither on
    the batch that it is served in nor on how its heads are grouped (laws batch_invariant, gqa_equals_expanded_mha).
    Longer caches are split so that the machine is full, whatever that takes: the laws hold there at equal plans.
    """
    plan = kernel_plan(sizes)
    if sizes.s_k <= SHORT_KEYS:
        if sizes.t <= DECODE_T:
            return -(-sizes.s_k // SHORT_SPLIT_KEYS)
        return -(-sizes.s_k // TINY_SPLIT_KEYS) if sizes.s_k <= TINY_KEYS else 1
    items = sizes.kv_batches * -(-sizes.rows // plan.tile_m)
    tiles = -(-sizes.s_k // plan.tile_n)

    def cost(splits: int) -> int:
        """Keys that the busiest CTA reads, and the rest in the same unit: a fp32 row of O, written and read back, has
        the bytes of two keys."""
        waves = -(-items * splits // sm_count)
        item = -(-tiles // splits) * plan.tile_n + ITEM_KEYS
        if splits == 1:
            return waves * item
        return waves * (item + 2 * min(sizes.rows, plan.tile_m)) + COMBINE_KEYS

    return min(range(1, min(MAX_SPLITS, tiles) + 1), key=cost)

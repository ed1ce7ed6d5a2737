# pyright: reportMissingImports=false
"""The plan of the sm_90a attention kernel: how warpgroups share a tile, shared memory, splits.

Pure arithmetic without CuTeDSL: the harness asks for workspaces and splits on machines that do not have it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from backends.cutedsl.attention import FmhaSizes
from backends.cutedsl.device import H200_SM_COUNT, SMEM_BYTES, WARPGROUP

if TYPE_CHECKING:
    from cutlass import Int32

    from backends.cutedsl.attention_tiles import Problem

Share = Literal["rows", "keys", "columns", "lone"]
"""How the consumer warpgroups share a work item; see Sm90FmhaPlan."""

GROUP_M = 64
"""Query rows per warpgroup: M of wgmma."""
PANEL_COLUMNS = 64
"""Columns of a panel in shared memory: one 128-byte swizzle row of bf16."""
MERGE_REGISTERS = 32
"""Accumulator registers per thread that one pass of the merge carries over."""
P_STAGES = 2
"""Tiles of P that the warpgroup that computes S may be ahead of the warpgroups that hold O."""
MAX_SPLITS = 256
"""Each warp of the combine kernel keeps the weights of all splits, eight per lane."""
DECODE_T = 16
"""The most query tokens per sequence for which the warpgroups share the keys rather than the rows."""
CHUNK_T = 128
"""The most query tokens per sequence for which hd 64 takes two warpgroups and tiles of 224 keys: a row tile or less.
For more tokens it takes three warpgroups: 16 x 256 queries on 1024 keys take 84 us, and 86 in tiles of 128 rows. At hd
128 and 256, tiles have 64 keys up to CHUNK_T tokens, and 128 and 80 above."""
SHORT_KEYS = 2048
"""The longest cache whose split follows from t and s_k alone."""
SHORT_SPLIT_KEYS = 512
"""Keys per split of a short cache when few queries are decoded. For many queries only a tiny cache is split."""
TINY_KEYS = 512
"""The longest cache for which many queries are treated as few. One head of t 128 and s_k 512 then has eight CTAs
instead of one: hd 128 takes 9.9 us in four splits, cuDNN 13.3 (results/records/h200-fmha-clean-flush.json)."""
TINY_SPLIT_KEYS = 128
"""Keys per split of a tiny cache for many queries."""
ROW_KEYS = (128, 512)
"""Numbers of keys that one_row.py is compiled for. It reads all keys for each row of O anew, so longer caches and
several tokens are faster in tiles that rows share."""
MAX_ROWS = H200_SM_COUNT
"""The most rows of O (query heads of all sequences) for one_row.py: each row has an SM to itself. 256 rows on 512 keys
take 9.7 us with one_row.py at hd 64 and 13.4 at hd 128, and 8.5 and 10.1 with lone.py
(results/records/h200-fmha-short.json). Property tests draw at most 128 rows, so that the laws batch_invariant and
gqa_equals_expanded_mha hold; the grouping of heads never matters."""
LONE_KEYS = 128
"""Keys of a tile of lone.py. A CTA has only one tile."""
LONE_CTAS = 4 * H200_SM_COUNT
"""The most CTAs for lone.py if a cache has several tiles, which are then combined. 8 sequences of 8 kv heads on 1024
keys, 512 CTAs, take 11.6 us with lone.py at hd 64 and 16.1 at hd 128, and 14.2 and 17.4 with warpgroups that share
keys. 32 sequences on 512 keys, 1,024 CTAs, take 17.0 and 25.9, and 15.9 and 22.8. 8 heads of 128 queries on 2048 keys
take 10.0 us instead of 26.1 (results/records/h200-fmha-short.json). Property tests draw fewer CTAs than this."""
ITEM_KEYS = 64
"""The cost of starting and finishing a work item, in keys that a CTA could read in that time."""
COMBINE_KEYS = 192
"""The cost of the combine kernel, in the same unit."""


@dataclass(frozen=True, slots=True)
class Sm90FmhaPlan:
    """The compile-time shape of the kernel: head dimension (64, 128, 256 or 512 elements) and who does what.

    - rows: a tile has 64 query rows for each of two or three warpgroups; all read every tile of keys. For many queries.
    - keys: a tile has 64 query rows. Each warpgroup has a ring and a producer warp of its own, and visits every other
      tile of keys. At the end the second hands O and its row statistics to the first through shared memory. For
      decoding: the two never wait for each other, so loads, softmax and MMAs of one overlap those of the other.
    - columns: a tile has 64 query rows. One warpgroup computes S and the softmax, and hands P over in shared memory.
      Two others hold half of the columns of O each. For hd 512, where O takes 64 x 256 fp32, 128 registers per thread.
      K and V have separate rings: a slab of K is 128 keys by 64 columns, a slab of V 16 keys by all columns.

    - lone: a tile has 64 query rows. A CTA is one warpgroup with one tile of keys, which is a split. For short caches.

    `tile_n`: keys per tile. `groups`: consumer warpgroups of a CTA. There are three with columns, and with rows of hd
    64 and many queries: exponentials take as long as MMAs there, and two warpgroups leave both units idle half of the
    time. `cluster`: CTAs that run side by side. They share keys, and L2 serves simultaneous loads of one tile as one.
    `sinks`: whether rows begin with the sink of their head. `ragged`: whether sequences have lengths of their own.
    `page_size`: keys per page; 0: the keys of a sequence are contiguous. `o_halves`: work items that share a tile, each
    with its columns of V and O. `short_parts`: whether parts of O are rounded to bf16. `max_slabs`: the most slabs in
    all rings together.
    """

    hd: int
    share: Share
    tile_n: int
    groups: int = 2
    cluster: int = 1
    sinks: bool = False
    ragged: bool = False
    page_size: int = 0
    o_halves: int = 1
    short_parts: bool = False
    max_slabs: int = 12

    def part_begin(self, problem: Problem, split: Int32) -> Int32:
        """The first key tile of a split. Splits differ by at most one tile."""
        if problem.divisors is None:
            return split * problem.key_tiles // problem.splits
        return problem.divisors.splits.parts(split * problem.key_tiles)[0]

    @property
    def tile_m(self) -> int:
        """Query rows per work item."""
        return self.groups * GROUP_M if self.share == "rows" else GROUP_M

    @property
    def slab_columns(self) -> int:
        """Columns of a slab of K."""
        return 64 if self.share == "columns" else self.hd

    @property
    def slabs(self) -> int:
        """Slabs of a K tile."""
        return self.hd // self.slab_columns

    @property
    def v_columns(self) -> int:
        """Columns of V and O of a work item."""
        return self.hd // self.o_halves

    @property
    def v_keys(self) -> int:
        """Keys of a slab of V, which has as many bytes as a slab of K and all columns of the work item."""
        return self.tile_n * self.slab_columns // self.v_columns

    @property
    def v_slabs(self) -> int:
        """Slabs of a V tile."""
        return self.tile_n // self.v_keys

    @property
    def slab_bytes(self) -> int:
        """Bytes of a stage of a ring."""
        return self.tile_n * self.slab_columns * 2

    @property
    def k_box(self) -> int:
        """Keys of one TMA load of K, all in one page."""
        return math.gcd(self.tile_n, self.page_size)

    @property
    def v_box(self) -> int:
        """Keys of one TMA load of V, all in one page."""
        return math.gcd(self.v_keys, self.page_size)

    @property
    def o_columns(self) -> int:
        """Columns of O per warpgroup."""
        return self.v_columns // 2 if self.share == "columns" else self.hd

    @property
    def pv_columns(self) -> int:
        """Columns of O per MMA. ptxas refuses one of 256 columns in a CTA of 512 threads: it takes 154 registers."""
        return min(self.o_columns, 128) if self.share == "columns" else self.o_columns

    @property
    def q_bytes(self) -> int:
        """Bytes of a Q tile."""
        return self.tile_m * self.hd * 2

    @property
    def q_stages(self) -> int:
        """Q tiles in shared memory: two if they are small, so that the next item's loads begin during this one."""
        return 2 if self.q_bytes <= 16 * 1024 and self.share != "lone" else 1

    @property
    def rings(self) -> int:
        """Rings of slabs: one, or one per warpgroup."""
        return self.groups if self.share == "keys" else 1

    @property
    def ring_consumers(self) -> int:
        """Warps that read a slab and release it."""
        return 4 * self.groups // self.rings

    @property
    def p_stages(self) -> int:
        """Tiles of P in shared memory."""
        return P_STAGES if self.share == "columns" else 0

    @property
    def p_bytes(self) -> int:
        """Bytes of a tile of P."""
        return GROUP_M * self.tile_n * 2

    @property
    def merge_bytes(self) -> int:
        """Bytes of the buffer through which the second warpgroup hands over O."""
        return WARPGROUP * MERGE_REGISTERS * 4 if self.share == "keys" else 0

    @property
    def ring_stages(self) -> int:
        """Slabs of one ring. All rings share the shared memory that is left, with at most `max_slabs` slabs."""
        left = SMEM_BYTES - self.q_stages * self.q_bytes - self.merge_bytes - self.p_stages * self.p_bytes
        return min(self.max_slabs, left // self.slab_bytes) // self.rings

    @property
    def k_stages(self) -> int:
        """Slabs in the ring of K, if K and V have separate rings."""
        return (self.ring_stages + 1) // 2

    @property
    def v_stages(self) -> int:
        """Slabs in the ring of V, if K and V have separate rings."""
        return self.ring_stages // 2

    @property
    def threads(self) -> int:
        """Threads of a CTA: the producer's warpgroup and the consumers'."""
        return WARPGROUP if self.share == "lone" else WARPGROUP * (self.groups + 1)

    @property
    def scarce_registers(self) -> bool:
        """Whether S, P and O leave a consumer few registers."""
        return self.share == "rows" and self.hd == 256

    @property
    def producer_registers(self) -> int:
        """Registers of a thread of the producer's warpgroup after setmaxnreg.

        The warp that copies Q of ragged sequences needs more at hd 256. Tiles have 64 keys there, so the consumers have
        enough. 4096 queries on as many keys take 1434 us in tiles of 80 keys with 24 registers, and 1526 with 40. 128
        queries on 8192 keys in tiles of 64 take 248.3 with 40, and 250.1 with 24 (results/records/h200-fmha-rows.json).
        """
        return 40 if self.scarce_registers and self.tile_n == 64 else 24

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer's thread after setmaxnreg.

        128 x (24 + 2 x 240), 128 x (40 + 2 x 232) and 128 x (24 + 3 x 160) are the 64,512 that 384 threads are launched
        with, 168 each. 512 threads have 65,536.
        """
        if self.share == "columns":
            return 168
        return (504 - self.producer_registers) // self.groups

    @property
    def score_registers(self) -> int:
        """Registers of a thread that computes S while others hold O: 24 + 152 + 2 x 168 are 65,536 / 128."""
        return 152

    @property
    def trusts_maxima(self) -> bool:
        """Whether the exponentials of a tile are taken relative to the maxima of the tiles before it: trust.py.

        4096 queries on as many keys of 64 heads of hd 128 take 699 us with it and 780 us without. At hd 256 P V takes
        longer than the softmax, and a slab of K stays in its ring longer: 1472 us with it, 1421 without
        (results/records/h200-fmha-trust.json, the source of all times in this file that name no record).
        """
        return self.share != "lone" and (self.hd == 64 or (self.share == "rows" and self.hd == 128))

    @property
    def hidden_keys(self) -> int:
        """Keys of a tile whose exponentials overlap P V of the tile before. The others overlap the rounding.

        P V is done by then: one of three warpgroups waits for its scores, and tiles of 224 keys have many exponentials.
        """
        if self.share == "keys" or self.groups == 3:
            return 32
        return 48 if self.hd == 64 else 64

    @property
    def sum_chains(self) -> int:
        """Chains of additions per row, over a tile's exponentials.

        Three warpgroups take 480 us with two chains and 495 with one. With two warpgroups 128 rows of hd 64 on 8192
        keys take 75.3 us with two chains and 74.3 with one.
        """
        return 2 if self.groups == 3 else 1

    @property
    def waits_first(self) -> bool:
        """Whether a warpgroup waits for slabs before it prepares MMAs, rather than between them.

        Otherwise ptxas 13.5 finds no place for the fences of three warpgroups that trust maxima, and serialises their
        MMAs.
        """
        return self.tile_n == 80 or (self.trusts_maxima and self.groups == 3)

    @property
    def finds_keys_anew(self) -> bool:
        """Whether a consumer recomputes the keys that its rows see for each masked tile, to save registers."""
        return self.scarce_registers or self.skips

    @property
    def skips(self) -> bool:
        """Whether a warpgroup skips tiles that none of its rows sees.

        With three warpgroups, key tiles are smaller than row tiles. With two, an item has at most one tile to skip, and
        finding that out takes as long.
        """
        return self.share == "rows" and self.groups == 3

    @property
    def turns(self) -> bool:
        """Whether the warpgroups issue MMAs in turn. Without turns they run in step where they read the same tiles."""
        return self.share != "keys"


@dataclass(frozen=True, slots=True)
class OneRowPlan:
    """The compile-time shape of one_row.py: head dimension, and the most keys."""

    hd: int
    keys: int
    warps: int = 32

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    @property
    def keys_of_warp(self) -> int:
        """Keys that a warp has at once: a lane has 16 bytes of a key."""
        return 32 // (self.hd // 8)

    @property
    def keys_of_turn(self) -> int:
        """Keys that the CTA has at once."""
        return self.warps * self.keys_of_warp

    @property
    def turns(self) -> int:
        """Keys of a thread."""
        return self.keys // self.keys_of_turn


def one_row_plan(sizes: FmhaSizes) -> OneRowPlan | None:
    """The plan for one query on few keys, without sinks and pages; None where tiles are faster.

    It depends on hd, t, s_k and the number of rows.
    """
    if sizes.t != 1 or sizes.hd not in (64, 128) or sizes.rows * sizes.kv_batches > MAX_ROWS:
        return None
    return next((OneRowPlan(sizes.hd, keys) for keys in ROW_KEYS if sizes.s_k <= keys), None)


def lone_plan(sizes: FmhaSizes) -> Sm90FmhaPlan | None:
    """The plan with one tile of keys per CTA, for short caches; its splits are its tiles. None where others are faster.

    It depends on hd, t, s_k and the number of CTAs.
    """
    if sizes.hd not in (64, 128):
        return None
    plan = standard_plan(sizes.hd, "lone")
    tiles = -(-sizes.s_k // plan.tile_n)
    ctas = sizes.kv_batches * -(-sizes.rows // plan.tile_m) * tiles
    few = sizes.t <= CHUNK_T and sizes.s_k <= SHORT_KEYS and ctas <= LONE_CTAS
    return plan if tiles == 1 or few else None


def standard_plan(hd: int, share: Share) -> Sm90FmhaPlan:
    """The plan for a way to share the work, if the sizes need no other.

    Rows: S, P and O take 3/4 tile_n + hd / 2 of a thread's 240 registers. At hd 64 larger tiles are faster where a
    sequence has few rows (128 rows on 8192 keys: 74 us with 224 keys per tile, 77 with 192, 80 with 160), and smaller
    ones where tiles are masked. At hd 128 tiles of 128 keys are at least as fast as tiles of 160.
    At hd 256 neighbours share loads: 512 queries on 4096 keys take 181 us in clusters of two and 183 without, 4096 1478
    and 1549, at the power cap (results/records/h200-fmha-variants.json).
    Keys, columns: shared memory decides. A ring has one or two slabs in use and the others in flight. With shared keys
    there are fewer than would fit: 32 caches of hd 64 take 126.7 us with 12 slabs of 64 keys, 126.4 with eight and
    128.1 with 12 of 128 (results/records/h200-fmha-attempts.json).
    """
    if share == "lone":
        return Sm90FmhaPlan(hd, share, LONE_KEYS, 1, max_slabs=2)
    if share == "rows":
        return Sm90FmhaPlan(hd, share, {64: 224, 128: 128, 256: 80}[hd], cluster=2 if hd == 256 else 1)
    if share == "columns":
        return Sm90FmhaPlan(hd, share, 128, 3, cluster=2)
    return Sm90FmhaPlan(hd, share, {64: 64, 128: 64, 256: 32}[hd], max_slabs=10 if hd == 64 else 8)


def kernel_plan(sizes: FmhaSizes, ragged: bool = False) -> Sm90FmhaPlan:
    """The plan for a case. It depends on hd, t and s_k only, so neither batch nor grouping of heads changes a bit.

    The exception is hd 512 if a single row tile has a long cache. Every CTA then has a part, and they write and read
    back O 128 times. So two CTAs divide the columns of V, and parts are bf16. 64 rows on 32768 keys took 29.7 us like
    this, 31.3 with parts in fp32, and 32.5 with all columns in each CTA (results/records/h200-fmha-turns.json). With
    more rows it is slower, because K is read twice. With tiles of 64 keys the 64 rows take 26.4 us, and 28.5 with 128:
    the last tiles are done sooner after they arrive. With 15 slabs, a whole tile of K and 7 slabs of V are in flight:
    25.5 us, where 18 slabs take 26.3, 16 26.0 and 14 28.5 (results/records/h200-fmha-forms.json).

    Up to CHUNK_T queries are bound by memory, and an H200 reads more slowly with more than some 100 KiB per SM in
    flight: 128 rows of hd 128 on 8192 keys take 126.9 us with six slabs of 64 keys, 129.8 with eight and 130.6 with six
    of 128; of hd 256 249.7 with four of 64 and 255.2 with five (results/records/h200-fmha-attempts.json, with the times
    of 64 keys above).

    Ragged sequences take more registers: with three warpgroups, or at hd 256 with 80 keys, ptxas spills.
    """
    if sizes.hd == 512:
        plan = standard_plan(512, "columns")
        alone = sizes.kv_batches == 1 and sizes.rows <= plan.tile_m and sizes.s_k > SHORT_KEYS
        if not alone or ragged:
            return plan
        return replace(plan, tile_n=64, o_halves=2, short_parts=True, max_slabs=15)
    if sizes.t <= DECODE_T or sizes.s_k <= TINY_KEYS:
        return standard_plan(sizes.hd, "keys")
    if sizes.hd == 64 and sizes.t > CHUNK_T:
        return Sm90FmhaPlan(64, "rows", 128, 2 if ragged else 3)
    if sizes.t <= CHUNK_T and sizes.hd > 64:
        return Sm90FmhaPlan(sizes.hd, "rows", 64, max_slabs=6 if sizes.hd == 128 else 4)
    if sizes.hd == 256 and ragged:
        return Sm90FmhaPlan(256, "rows", 64)
    return standard_plan(sizes.hd, "rows")


def split_count(sizes: FmhaSizes, ragged: bool = False, sm_count: int = H200_SM_COUNT) -> int:
    """The number of parts that the keys of a sequence are split into (1: no split, no combine kernel).

    Up to SHORT_KEYS keys the count follows from t and s_k alone. Then the bits of a sequence's result depend neither on
    the batch that it is served in nor on how its heads are grouped (laws batch_invariant, gqa_equals_expanded_mha).
    Longer caches are split to fill the machine. There the laws hold at equal plans only.
    """
    plan = kernel_plan(sizes, ragged)
    if sizes.s_k <= SHORT_KEYS:
        if sizes.t <= DECODE_T:
            return -(-sizes.s_k // SHORT_SPLIT_KEYS)
        return -(-sizes.s_k // TINY_SPLIT_KEYS) if sizes.s_k <= TINY_KEYS else 1
    items = sizes.kv_batches * -(-sizes.rows // plan.tile_m) * plan.o_halves
    part = 2 * min(sizes.rows, plan.tile_m) // (plan.o_halves * (2 if plan.short_parts else 1))
    tiles = -(-sizes.s_k // plan.tile_n)

    def cost(splits: int) -> int:
        """Keys that the busiest CTA reads, and its other work in the same unit.

        A row of O in fp32, written and read back, has the bytes of two keys: `part` for all rows of an item.
        """
        waves = -(-items * splits // sm_count)
        item = -(-tiles // splits) * plan.tile_n + ITEM_KEYS
        if splits == 1:
            return waves * item
        return waves * (item + part) + COMBINE_KEYS

    return min(range(1, min(MAX_SPLITS, tiles) + 1), key=cost)

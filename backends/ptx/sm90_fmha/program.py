"""Forward attention on sm_90a as a program of the harness: which of the three kernels, and in how many parts.

kernel.py has one warpgroup per CTA and two or three CTAs per SM: for few rows, which wait for memory. pair.py has one
warp that loads and two warpgroups that consume: for many rows per key, and for hd 512. one_row.py has no tensor cores:
for one query on few keys.
"""

from __future__ import annotations

from backends.ptx.attention import FmhaParams, FmhaShape, tensor_map
from backends.ptx.sm90_fmha.geometry import PAIR_THREADS, SM_COUNT, THREADS, PairTiling, Sm90FmhaTiling, Tiling
from backends.ptx.sm90_fmha.kernel import entry_name, kernel_text
from backends.ptx.sm90_fmha.one_row import row_program, row_tiling
from backends.ptx.sm90_fmha.pair import pair_name, pair_text
from backends.ptx.split_keys import MAX_SPLIT_QUERIES, SPLIT_KEYS, KeyPlan, partial_arguments, split_program
from megamoe.contract import Case, KernelArg, Launch, Program

SHORT_KEYS = 2048
"""Up to this many keys the parts, and with them the bits of a row, follow from t and s_k alone (split_keys.py), except
where TINY_PART_KEYS applies. Longer caches are split to fill the machine."""
TINY_PART_KEYS = 128
"""Keys per part of a cache of up to SPLIT_KEYS, for more queries than split_keys.py would split it for."""
TINY_QUERIES = 128
"""The most queries of a sequence for which such a short cache is split. More queries have many row tiles."""
TINY_CTAS = 4 * SM_COUNT
"""The most CTAs that this split may create; more would not run at the same time. Property tests draw fewer."""
MAX_PARTS = 128
ITEM_KEYS = 64
"""The cost of starting and ending a part, in keys that an SM could read in that time while all SMs read."""
COMBINE_COST = 192 * 64
"""The cost of the combine kernel in the same unit, times hd: a key of hd 64 costs an eighth of one of hd 512."""
COMBINED_COST = 96
"""The cost of each part that it adds, in the same unit: 128 parts take 0.9 us more than 64 when one sequence of 32768
keys of hd 512 is split (results/records/h200-fmha-parts.json, as for all times here)."""
PACE = {64: 1.2, 128: 1.0, 256: 1.0}
"""The least time per key of a CTA of kernel.py, in the same unit, if other SMs leave it more memory bandwidth."""
PAIR_PACE = 0.55
"""The same for pair.py. That sequence of hd 512 takes 30.3 us in 74 parts, 31.9 in 86, 33.4 in 52 and 36.9 in 43."""


def has_pair(shape: FmhaShape) -> bool:
    """Whether pair.py handles a case. Depends only on hd, t and s_k, so that batch and heads change no bit of a row."""
    return shape.hd == 512 or (shape.t > MAX_SPLIT_QUERIES and shape.s_k > SPLIT_KEYS)


def part_keys_of(shape: FmhaShape, tiling: Tiling) -> int | None:
    """Keys per part, a multiple of the tile; None where the rule of split_keys.py applies.

    Each SM processes its share of the parts one after the other: memory is what they wait for.
    """
    items = shape.batch * shape.kv_heads * -(-shape.rows // tiling.tile_m)
    if shape.s_k <= SHORT_KEYS:
        tiny = shape.hd <= 128 and MAX_SPLIT_QUERIES < shape.t <= TINY_QUERIES and shape.s_k <= SPLIT_KEYS
        tiny = tiny and items * -(-shape.s_k // TINY_PART_KEYS) <= TINY_CTAS
        return TINY_PART_KEYS if tiny else None
    tiles, sm_count = -(-shape.s_k // tiling.tile_n), shape.sms or SM_COUNT

    pace = PAIR_PACE if isinstance(tiling, PairTiling) else PACE[shape.hd]

    def cost(parts: int) -> float:
        keys = -(-tiles // parts) * tiling.tile_n
        ctas = items * parts
        share = max(ctas / sm_count, pace) if ctas <= sm_count else min(-(-ctas // sm_count), tiling.ctas_per_sm)
        item = keys * share + ITEM_KEYS
        combine = 0.0
        if parts > 1:
            item += 2 * min(shape.rows, tiling.tile_m)
            combine = (COMBINE_COST + COMBINED_COST * parts) / shape.hd
        return -(-ctas // (tiling.ctas_per_sm * sm_count)) * item + combine

    best = min(range(1, min(MAX_PARTS, tiles) + 1), key=cost)
    return -(-tiles // best) * tiling.tile_n


def fmha_program(case: Case, part_keys: int | None = None) -> Program:
    """The program of an fmha case on sm_90a: one launch, or two with workspaces if the keys are split.

    `part_keys`: keys that a CTA visits, a multiple of the tile. It overrides the rules.
    """
    shape = FmhaShape.of(case, "sm_90a")
    row = row_tiling(shape)
    if row and part_keys is None:
        return row_program(shape, row)
    latent = shape.values == "k"
    tiling = PairTiling(shape.hd, latent) if has_pair(shape) else Sm90FmhaTiling(shape.hd)
    part_keys = part_keys_of(shape, tiling) if part_keys is None else part_keys
    plan = KeyPlan.of(shape, tiling.tile_n, part_keys)
    if isinstance(tiling, PairTiling):
        name, threads, text = pair_name(tiling), PAIR_THREADS, pair_text(tiling, plan.part_keys)
    else:
        name, threads, text = entry_name(shape.hd), THREADS, kernel_text(shape.hd, plan.part_keys)
    attention = Launch(
        entry=name,
        grid=(-(-shape.rows // tiling.tile_m) * tiling.halves, shape.kv_heads, shape.batch * plan.parts),
        block=(threads, 1, 1),
        args=_arguments(shape, tiling, plan.parts),
        dynamic_smem=tiling.smem.size,
    )
    if plan.parts == 1:
        return Program(target="sm_90a", ptx=text, launches=(attention,))
    return split_program("sm_90a", text, attention, shape, plan.parts)


def _arguments(shape: FmhaShape, tiling: Tiling, splits: int) -> tuple[KernelArg, ...]:
    maps = {
        "q": tensor_map(shape, "q", shape.rows, tiling.tile_m),
        "k": tensor_map(shape, "k", shape.s_k, tiling.tile_n),
        "v": tensor_map(shape, shape.values, shape.s_k, tiling.tile_n),
    }
    if splits == 1:
        return FmhaParams.arguments(**maps, lse="lse" if shape.lse else None, axes=shape.axes())
    return partial_arguments(shape, maps, splits)

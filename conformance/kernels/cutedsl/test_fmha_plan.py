"""The plans of the CuTeDSL attention kernels fit their machines. Needs no CuTeDSL."""

from __future__ import annotations

import itertools
import subprocess
import sys
from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cutedsl import BACKEND
from backends.cutedsl.attention import FmhaSizes
from backends.cutedsl.device import H200_SM_COUNT, TMEM_COLUMNS, WARPGROUP
from backends.cutedsl.sm90_fmha.plan import (
    LONE_CTAS,
    LONE_KEYS,
    MAX_ROWS,
    SHORT_KEYS,
    Share,
    Sm90FmhaPlan,
    kernel_plan,
    lone_plan,
    one_row_plan,
    standard_plan,
)
from backends.cutedsl.sm90_fmha.plan import MAX_SPLITS as SM90_MAX_SPLITS
from backends.cutedsl.sm90_fmha.plan import split_count as sm90_split_count
from backends.cutedsl.sm100_fmha.plan import (
    MAX_SPLITS,
    MIN_TILES_PER_SPLIT,
    S_STAGES,
    SLAB_BYTES,
    STAT_STAGES,
    TILE_M,
    TILE_N,
    Sm100FmhaPlan,
    split_count,
)
from conformance.kernels.laws.strategies import drawing_of
from megamoe.contract import Target, UnsupportedError
from megamoe.spec.load import load_specs

HEAD_DIMENSIONS = (64, 128, 256, 512)
MAX_SMEM = 227 * 1024
REGISTER_FILE = 65536


@pytest.mark.parametrize("hd", HEAD_DIMENSIONS)
def test_tensor_memory_regions_are_disjoint_and_fit(hd: int) -> None:
    plan = Sm100FmhaPlan(hd)
    regions = [(0, S_STAGES * TILE_N), (plan.tmem_o, plan.tmem_o + plan.o_columns)]
    if plan.p_in_tmem:
        regions.append((plan.tmem_p, plan.tmem_p + plan.p_stages * TILE_N // 2))
    taken = sorted(regions)
    for (_, end), (start, _) in itertools.pairwise(taken):
        assert end <= start, f"hd {hd}: tensor-memory columns {taken} overlap"
    assert taken[-1][1] <= TMEM_COLUMNS, f"hd {hd}: tensor-memory columns {taken} reach past {TMEM_COLUMNS}"


@pytest.mark.parametrize("hd", HEAD_DIMENSIONS)
def test_p_goes_through_shared_memory_only_where_tensor_memory_is_full(hd: int) -> None:
    plan = Sm100FmhaPlan(hd)
    needed = S_STAGES * TILE_N + 2 * TILE_N // 2 + plan.o_columns
    assert plan.p_in_tmem == (needed <= TMEM_COLUMNS), f"hd {hd}: S, P and O together need {needed} columns"


@pytest.mark.parametrize("hd", HEAD_DIMENSIONS)
def test_shared_memory_fits(hd: int) -> None:
    plan = Sm100FmhaPlan(hd)
    statistics = 4 * TILE_M * (STAT_STAGES + plan.max_stages + (2 if plan.softmax_groups == 2 else 0))
    barriers = 16 * (plan.q_stages + plan.ring_stages + S_STAGES + plan.p_stages + STAT_STAGES + 3)
    operands = plan.q_smem_bytes + plan.p_smem_bytes + plan.ring_stages * SLAB_BYTES
    total = operands + statistics + barriers
    assert total + 64 <= MAX_SMEM, f"hd {hd}: {total} bytes of shared memory, {MAX_SMEM} exist"
    assert plan.ring_stages >= 4, f"hd {hd}: a ring of {plan.ring_stages} slabs cannot hide a load"


@pytest.mark.parametrize("hd", HEAD_DIMENSIONS)
def test_registers_fit_before_and_after_they_are_moved(hd: int) -> None:
    plan = Sm100FmhaPlan(hd)
    softmax, correction, other = plan.registers
    moved = 128 * (softmax * plan.softmax_groups + correction + other)
    assert moved <= REGISTER_FILE, f"hd {hd}: the warpgroups ask for {moved} registers of {REGISTER_FILE}"
    assert all(count % 8 == 0 and 24 <= count <= 256 for count in plan.registers), (
        f"hd {hd}: setmaxnreg takes multiples of 8 from 24 to 256 (PTX ISA 9.7.19.5), not {plan.registers}"
    )


@given(t=st.integers(1, 128), s_k=st.integers(1, 65536))
def test_parts_are_worth_splitting(t: int, s_k: int) -> None:
    splits, key_tiles = split_count(t, s_k), -(-s_k // TILE_N)
    assert 1 <= splits <= min(MAX_SPLITS, key_tiles), f"{splits} splits of {key_tiles} key tiles"
    if splits > 1:
        assert key_tiles > (splits - 1) * MIN_TILES_PER_SPLIT, f"{splits} splits of {key_tiles} key tiles are too short"
        assert key_tiles > (splits - 1) * (t // 4), f"{splits} splits of {key_tiles} key tiles do not pay for {t} rows"


def test_a_long_cache_with_one_row_is_split() -> None:
    assert split_count(t=1, s_k=32768) > 8, "decoding one sequence leaves most of the machine idle"


def test_the_backend_is_there_without_cutedsl() -> None:
    """Importing and listing the backend imports no CuTeDSL, so a machine without it can still list the kernels."""
    code = "import sys, backends.cutedsl as b; b.BACKEND.targets('fmha'); print('cutlass' in sys.modules)"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert seen == "False", "importing backends.cutedsl imports cutlass"


def test_a_missing_compiler_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.cutedsl.sm100_fmha import program as sm100_fmha_program

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    case = load_specs(None)["fmha"].parse_case("fmha:hd=64,t=1,s_k=128")
    sm100_fmha_program.compiled.cache_clear()
    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UnsupportedError, match=r"nvidia-cutlass-dsl, which is not installed; the extra `cutedsl`"):
        BACKEND.build(case, "sm_100a")


def test_another_target_is_refused_by_name() -> None:
    case = load_specs(None)["nvfp4_moe"].parse_case("nvfp4_moe:hidden=128,intermediate=128,num_experts=1,tokens=1")
    elsewhere: Target = "sm_80"  # pyright: ignore[reportAssignmentType]
    with pytest.raises(UnsupportedError, match=r"no nvfp4_moe for sm_80; it has fmha on sm_90a, fmha on sm_100a"):
        BACKEND.build(case, elsewhere)


SHARES: tuple[Share, ...] = ("rows", "keys")
ONE_ROW_TILE = kernel_plan(FmhaSizes(hd=512, t=1, s_k=32768, rows=64, kv_batches=1))


def plans_of(ragged: bool) -> tuple[Sm90FmhaPlan, ...]:
    """Plans that cases use, for sequences of one length or of varying lengths."""
    axes = (HEAD_DIMENSIONS, (1, 16, 17, 128, 129, 4096), (1, 512, 513, 2048, 2049, 65536), (1, 32))
    sizes = (FmhaSizes(hd, t, s_k, rows=t, kv_batches=batches) for hd, t, s_k, batches in itertools.product(*axes))
    return tuple(dict.fromkeys(kernel_plan(one, ragged) for one in sizes))


RAGGED = tuple(plan for plan in plans_of(ragged=True) if plan not in plans_of(ragged=False))
"""Plans that only ragged batches use."""
PLANS = (*plans_of(ragged=False), *RAGGED)
LONE = tuple(standard_plan(hd, "lone") for hd in (64, 128))
MAX_BOX_ROWS = 256

SIZES = st.builds(
    FmhaSizes,
    hd=st.sampled_from((64, 128, 256, 512)),
    t=st.integers(1, 4096),
    s_k=st.integers(1, 65536),
    rows=st.integers(1, 4096),
    kv_batches=st.integers(1, 4096),
)


@given(SIZES, st.booleans())
def test_the_plans_are_all_that_cases_take(sizes: FmhaSizes, ragged: bool) -> None:
    """Tests of plans go over PLANS: a plan outside it would be compiled only by its user."""
    assert kernel_plan(sizes, ragged) in PLANS, f"{sizes}, ragged {ragged}: no test goes over its plan"


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_shared_memory_of_sm_90a_fits(plan: Sm90FmhaPlan) -> None:
    statistics = WARPGROUP * 16 if plan.share == "keys" else 0
    barriers = 16 * (plan.q_stages + plan.rings * plan.ring_stages + plan.p_stages)
    p_bytes = plan.p_stages * (plan.p_bytes + 4 * plan.tile_m)
    operands = plan.q_stages * plan.q_bytes + plan.rings * plan.ring_stages * plan.slab_bytes + plan.merge_bytes
    total = operands + p_bytes + statistics + barriers + 16
    assert total <= MAX_SMEM, f"{plan}: {total} bytes of shared memory, {MAX_SMEM} exist"


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_ring_holds_the_slabs_in_use_and_more_under_way(plan: Sm90FmhaPlan) -> None:
    """K of the next tile and V of this one are in use at once. At least 48 KiB more are in flight meanwhile."""
    in_use = 2
    assert plan.ring_stages > in_use, f"{plan}: a ring of {plan.ring_stages} slabs, {in_use} of them in use"
    waiting = plan.rings * (plan.ring_stages - in_use) * plan.slab_bytes
    assert waiting >= 48 * 1024, f"{plan}: {waiting} bytes under way while two slabs are read"


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_tiles_suit_the_instructions(plan: Sm90FmhaPlan) -> None:
    assert plan.tile_n % 16 == 0, f"{plan}: P V takes keys by 16, a tile has {plan.tile_n}"
    assert plan.tile_n <= MAX_BOX_ROWS, f"{plan}: a TMA box has {MAX_BOX_ROWS} rows at most"
    assert plan.slab_columns * plan.slabs == plan.hd, f"{plan}: {plan.slabs} slabs of {plan.slab_columns} columns"
    if plan.share == "columns":
        held = {"S": (plan.tile_n // 2, plan.score_registers), "O": (plan.o_columns // 2, plan.consumer_registers)}
    else:
        held = {"S, P and O": ((plan.tile_n + plan.tile_n // 2 + plan.o_columns) // 2, plan.consumer_registers)}
    for what, (accumulators, registers) in held.items():
        assert accumulators <= registers - 24, f"{plan}: {what} take {accumulators} registers of {registers}"


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_registers_of_sm_90a_fit_after_they_are_moved(plan: Sm90FmhaPlan) -> None:
    """setmaxnreg moves registers of the CTA's launch, which gives each thread a multiple of 8."""
    launched = REGISTER_FILE // plan.threads // 8 * 8 * plan.threads
    counts = [plan.producer_registers, *([plan.consumer_registers] * plan.groups)]
    if plan.share == "columns":
        counts[1] = plan.score_registers
    moved = WARPGROUP * sum(counts)
    assert moved <= launched, f"{plan}: the warpgroups ask for {moved} registers of {launched}"
    for count in counts:
        legal = count % 8 == 0 and 24 <= count <= 256
        assert legal, f"{plan}: setmaxnreg takes multiples of 8 from 24 to 256 (PTX ISA 9.7.19.5), not {count}"


@given(SIZES)
def test_a_split_has_keys(sizes: FmhaSizes) -> None:
    splits = sm90_split_count(sizes)
    tiles = -(-sizes.s_k // kernel_plan(sizes).tile_n)
    assert 1 <= splits <= SM90_MAX_SPLITS, f"{sizes}: {splits} splits"
    if sizes.s_k > SHORT_KEYS:
        assert splits <= tiles, f"{sizes}: {splits} splits of {tiles} tiles"


@given(SIZES, st.integers(1, 4096), st.integers(1, 4096))
def test_short_caches_are_split_alike_in_every_batch(sizes: FmhaSizes, rows: int, kv_batches: int) -> None:
    short = FmhaSizes(sizes.hd, sizes.t, min(sizes.s_k, SHORT_KEYS), sizes.rows, sizes.kv_batches)
    other = FmhaSizes(short.hd, short.t, short.s_k, rows, kv_batches)
    assert kernel_plan(short) == kernel_plan(other), f"{short} and {other} have different kernels"
    if max(short.rows * short.kv_batches, other.rows * other.kv_batches) <= MAX_ROWS:
        assert one_row_plan(short) == one_row_plan(other), f"{short} and {other} have different kernels"
    assert sm90_split_count(short) == sm90_split_count(other), f"{short} and {other} are split differently"


@pytest.mark.parametrize("hd", [64, 128, 256, 512])
def test_decoding_one_sequence_fills_the_machine(hd: int) -> None:
    kv_heads = 1 if hd == 512 else 8
    sizes = FmhaSizes(hd, 1, 32768, 64 // kv_heads, kv_heads)
    ctas = kv_heads * sm90_split_count(sizes) * kernel_plan(sizes).o_halves
    assert 0.9 * H200_SM_COUNT <= ctas <= H200_SM_COUNT, (
        f"hd {hd}: {ctas} CTAs decode one sequence on {H200_SM_COUNT} SMs"
    )


@given(SIZES)
def test_a_kernel_of_one_row_has_every_key_once(sizes: FmhaSizes) -> None:
    plan = one_row_plan(sizes)
    if plan is None:
        return
    assert sizes.t == 1, f"{sizes}: {plan} has rows of one token"
    assert sizes.s_k <= plan.keys == plan.turns * plan.keys_of_turn, f"{sizes}: {plan} has {plan.turns} turns"
    assert plan.threads <= 1024, f"{plan}: a CTA has 1024 threads at most"
    assert 8 * plan.turns <= REGISTER_FILE // plan.threads, f"{plan}: K and V of a thread take all of its registers"


def test_long_caches_and_many_tokens_have_tiles() -> None:
    assert one_row_plan(FmhaSizes(64, 1, 128, 1, 1)), "one row on 128 keys has a kernel of its own"
    for t, s_k in ((2, 128), (1, 513)):
        assert one_row_plan(FmhaSizes(64, t, s_k, t, 1)) is None, f"t {t}, s_k {s_k} has tiles"


def test_many_sequences_have_tiles() -> None:
    """2,048 rows with a CTA each take three times as long as shared tiles."""
    assert one_row_plan(FmhaSizes(64, 1, 128, 8, 16)), "128 rows have a CTA each"
    assert one_row_plan(FmhaSizes(64, 1, 128, 8, 256)) is None, "2,048 rows share tiles"


@pytest.mark.parametrize("plan", LONE, ids=str)
def test_two_lone_warpgroups_fit_an_sm(plan: Sm90FmhaPlan) -> None:
    assert (plan.threads, plan.ring_stages) == (WARPGROUP, 2), f"{plan}: K and V of one tile, and who computes"
    total = plan.q_stages * plan.q_bytes + plan.ring_stages * plan.slab_bytes + 48
    assert 2 * (total + 1024) <= MAX_SMEM + 1024, f"{plan}: {total} bytes of shared memory a CTA"
    held = (plan.tile_n + plan.tile_n // 2 + plan.o_columns) // 2
    assert held + 24 <= REGISTER_FILE // (2 * plan.threads), f"{plan}: S, P and O take {held} registers"


def test_short_caches_have_a_tile_a_cta() -> None:
    for t, s_k, rows, kv_batches in ((1, 512, 8, 32), (1, 2048, 8, 8), (128, 2048, 128, 8), (4096, 128, 4096, 64)):
        plan = lone_plan(FmhaSizes(64, t, s_k, rows, kv_batches))
        assert plan == LONE[0], f"{kv_batches} x {rows} rows on {s_k} keys: {plan}"
    for t, s_k, rows, kv_batches in ((1, 2049, 8, 8), (129, 512, 129, 1), (1, 512, 8, 256), (128, 2048, 128, 64)):
        plan = lone_plan(FmhaSizes(64, t, s_k, rows, kv_batches))
        assert plan is None, f"{kv_batches} x {rows} rows on {s_k} keys are too many for {plan}"


@pytest.mark.parametrize("s_k", [LONE_KEYS + 1, 512, SHORT_KEYS])
def test_draws_of_property_tests_are_too_small_for_another_kernel(s_k: int) -> None:
    """Otherwise batch_invariant would compare the kernel of one tile a CTA with the kernel for many CTAs."""
    drawing = drawing_of("fmha")
    row_tiles = LONE_CTAS // -(-s_k // LONE_KEYS) + 1
    work = drawing.work({"hd": 64, "t": 1, "s_k": s_k, "batch": row_tiles, "heads": 1, "kv_heads": 1})
    assert work > drawing.budget, f"{row_tiles} row tiles on {s_k} keys may be drawn"


def test_draws_of_property_tests_have_one_kernel_for_every_batch() -> None:
    """Otherwise batch_invariant would compare two kernels, which round in different places."""
    drawing = drawing_of("fmha")
    work = drawing.work({"hd": 64, "t": 1, "s_k": 1, "batch": MAX_ROWS + 1, "heads": 1, "kv_heads": 1})
    assert work > drawing.budget, f"a draw may have {MAX_ROWS + 1} rows, and its sequences alone another kernel"

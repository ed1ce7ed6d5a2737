"""The plan of the CuTeDSL attention kernel for sm_90a fits the machine. Needs no CuTeDSL."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cutedsl.attention import FmhaSizes
from backends.cutedsl.device import H200_SM_COUNT, WARPGROUP
from backends.cutedsl.sm90_fmha.plan import (
    CONSUMER_REGISTERS,
    GROUPS,
    MAX_SPLITS,
    PRODUCER_REGISTERS,
    SHORT_KEYS,
    Share,
    Sm90FmhaPlan,
    kernel_plan,
    split_count,
)

PLANS: tuple[tuple[int, Share], ...] = (
    *((hd, share) for hd in (64, 128, 256) for share in ("rows", "keys")),
    (512, "columns"),
)
MAX_SMEM = 227 * 1024
REGISTER_FILE = 65536
MAX_BOX_ROWS = 256

SIZES = st.builds(
    FmhaSizes,
    hd=st.sampled_from((64, 128, 256, 512)),
    t=st.integers(1, 128),
    s_k=st.integers(1, 65536),
    rows=st.integers(1, 4096),
    kv_batches=st.integers(1, 4096),
)


@pytest.mark.parametrize(("hd", "share"), PLANS)
def test_shared_memory_fits(hd: int, share: Share) -> None:
    plan = Sm90FmhaPlan(hd, share)
    statistics = WARPGROUP * 16 if share == "keys" else 0
    barriers = 16 * (plan.q_stages + plan.rings * plan.ring_stages)
    operands = plan.q_stages * plan.q_bytes + plan.rings * plan.ring_stages * plan.slab_bytes + plan.merge_bytes
    total = operands + statistics + barriers + 16
    assert total <= MAX_SMEM, f"hd {hd}, {share}: {total} bytes of shared memory, {MAX_SMEM} exist"


@pytest.mark.parametrize(("hd", "share"), PLANS)
def test_a_ring_holds_the_slabs_in_use_and_more_under_way(hd: int, share: Share) -> None:
    """K of the next tile and V of this one are read at once. At least 48 KiB more are under way meanwhile."""
    plan = Sm90FmhaPlan(hd, share)
    in_use = 2 * plan.slabs
    assert plan.ring_stages > in_use, f"hd {hd}, {share}: a ring of {plan.ring_stages} slabs, {in_use} of them in use"
    waiting = plan.rings * (plan.ring_stages - in_use) * plan.slab_bytes
    if plan.slabs == 1:
        assert waiting >= 48 * 1024, f"hd {hd}, {share}: {waiting} bytes under way while two slabs are read"


@pytest.mark.parametrize(("hd", "share"), PLANS)
def test_tiles_suit_the_instructions(hd: int, share: Share) -> None:
    plan = Sm90FmhaPlan(hd, share)
    assert plan.tile_n % 16 == 0, f"hd {hd}, {share}: P V takes keys by 16, a tile has {plan.tile_n}"
    assert plan.tile_n <= MAX_BOX_ROWS, f"hd {hd}, {share}: a TMA box has {MAX_BOX_ROWS} rows at most"
    assert plan.slab_columns * plan.slabs == hd, f"hd {hd}, {share}: {plan.slabs} slabs of {plan.slab_columns} columns"
    accumulators = (plan.tile_n + plan.tile_n // 2 + plan.o_columns) // 2
    assert accumulators <= CONSUMER_REGISTERS - 24, f"hd {hd}, {share}: S, P and O take {accumulators} registers"


def test_registers_fit_after_they_are_moved() -> None:
    moved = WARPGROUP * (PRODUCER_REGISTERS + GROUPS * CONSUMER_REGISTERS)
    assert moved <= REGISTER_FILE, f"the warpgroups ask for {moved} registers of {REGISTER_FILE}"
    for count in (PRODUCER_REGISTERS, CONSUMER_REGISTERS):
        legal = count % 8 == 0 and 24 <= count <= 256
        assert legal, f"setmaxnreg takes multiples of 8 from 24 to 256 (PTX ISA 9.7.19.5), not {count}"


@given(SIZES)
def test_a_split_has_keys(sizes: FmhaSizes) -> None:
    splits = split_count(sizes)
    tiles = -(-sizes.s_k // kernel_plan(sizes).tile_n)
    assert 1 <= splits <= MAX_SPLITS, f"{sizes}: {splits} splits"
    if sizes.s_k > SHORT_KEYS:
        assert splits <= tiles, f"{sizes}: {splits} splits of {tiles} tiles"


@given(SIZES, st.integers(1, 4096), st.integers(1, 4096))
def test_short_caches_are_split_alike_in_every_batch(sizes: FmhaSizes, rows: int, kv_batches: int) -> None:
    short = FmhaSizes(sizes.hd, sizes.t, min(sizes.s_k, SHORT_KEYS), sizes.rows, sizes.kv_batches)
    other = FmhaSizes(short.hd, short.t, short.s_k, rows, kv_batches)
    assert kernel_plan(short) == kernel_plan(other), f"{short} and {other} have different kernels"
    assert split_count(short) == split_count(other), f"{short} and {other} are split differently"


@pytest.mark.parametrize("hd", [64, 128, 256, 512])
def test_decoding_one_sequence_fills_the_machine(hd: int) -> None:
    kv_heads = 1 if hd == 512 else 8
    sizes = FmhaSizes(hd, 1, 32768, 64 // kv_heads, kv_heads)
    ctas = kv_heads * split_count(sizes)
    assert 0.9 * H200_SM_COUNT <= ctas <= H200_SM_COUNT, (
        f"hd {hd}: {ctas} CTAs decode one sequence on {H200_SM_COUNT} SMs"
    )

"""The plan of the CuTeDSL attention kernel fits the machine. Needs no CuTeDSL."""

from __future__ import annotations

import itertools
import subprocess
import sys
from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cutedsl import BACKEND
from backends.cutedsl.device import TMEM_COLUMNS
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
from megamoe.contract import UnsupportedError
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
    """Importing and listing the backend imports no CuTeDSL, so a machine without it can still say what there is."""
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
    with pytest.raises(UnsupportedError, match=r"no nvfp4_moe for sm_90a; it has fmha on sm_90a, fmha on sm_100a"):
        BACKEND.build(case, "sm_90a")

"""The ptx backend's kernels assemble without spills or warnings, fit the machine, and are launched as declared."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest

from backends.ptx import BACKEND
from backends.ptx.assembler import AssemblyError, assemble
from backends.ptx.attention import SUPPORTED_HD
from backends.ptx.builder import Builder
from backends.ptx.moe.combine import combine_kernel
from backends.ptx.moe.requantise import requantise_kernel
from backends.ptx.moe.routing import routing_kernel
from backends.ptx.moe.shape import SwigluVariant
from backends.ptx.operands import at
from backends.ptx.shared_memory import MAX_SMEM, SmemLayout
from backends.ptx.sm90_fmha.geometry import THREADS as SM90_THREADS
from backends.ptx.sm90_fmha.geometry import PairTiling, Sm90FmhaTiling
from backends.ptx.sm90_fmha.kernel import PTX_VERSION as SM90_VERSION
from backends.ptx.sm90_fmha.kernel import kernel_text as sm90_text
from backends.ptx.sm90_fmha.one_row import MAX_KEYS, RowTiling, row_text
from backends.ptx.sm90_fmha.pair import pair_text
from backends.ptx.sm100_fmha.geometry import Sm100FmhaTiling
from backends.ptx.sm100_fmha.kernel import PTX_VERSION, kernel_text
from backends.ptx.sm100_moe.geometry import ACCUMULATOR_STRIDE, HALF_N, SF_COLUMN, SF_SLOT_COLUMNS, SF_SLOTS, TILE_N
from backends.ptx.sm100_moe.kernel import L1_SMEM, L2_SMEM, l1_kernel, l2_kernel
from backends.ptx.sm100_moe.kernel import PTX_VERSION as MOE_VERSION
from backends.ptx.sm100_moe.row_kernels import gather_scales_kernel
from backends.ptx.split_keys import SPLIT_KEYS
from backends.ptx.tcgen05 import TMEM_COLUMNS
from conformance.kernels.laws.law import specs
from megamoe.contract import (
    TARGETS,
    KernelArg,
    Launch,
    Program,
    ScalarArg,
    Target,
    TensorMapArg,
    UnsupportedError,
)
from megamoe.contract.assembly import Assembly

LIVE_VALUES = 64


def assembled(ptx: str, target: Target = "sm_100a") -> Assembly:
    """Runs `assemble`. A missing assembler skips the test, so that it never passes unchecked."""
    try:
        return assemble(ptx, target)
    except UnsupportedError as missing:
        pytest.skip(f"unsupported: {missing}")


def local_memory_bytes(assembly: Assembly) -> int:
    """Bytes of local memory traffic and stack; 0 for a kernel that stays in registers."""
    return assembly.stack + assembly.spill_stores + assembly.spill_loads


def hold_places_apart(smem: SmemLayout) -> None:
    """Checks that the places fit a CTA and do not overlap."""
    assert smem.size <= MAX_SMEM, f"{smem.size} bytes of shared memory; a CTA may have {MAX_SMEM}"
    ends = 0
    for name, (offset, size) in smem.places.items():
        assert offset >= ends, f"{name} at {offset} overlaps what ends at {ends}"
        ends = offset + size


def crowded_kernel(directive: str) -> str:
    """A kernel with LIVE_VALUES loads alive at once, and `directive` after .reqntid."""
    x = Builder("crowded", target="sm_100a", version=(8, 6), block=128)
    buffer = x.param("buffer", "u64")
    values = x.regs("value", "f32", LIVE_VALUES)
    for index, value in enumerate(values):
        x.emit("ld.global.f32", value, at(buffer, 4 * index))
    x.emit("bar.sync", 0)
    for index, value in enumerate(values):
        x.emit("st.global.f32", at(buffer, 4 * (LIVE_VALUES - 1 - index)), value)
    x.emit("ret")
    return x.text().replace(".reqntid 128, 1, 1", f".reqntid 128, 1, 1\n{directive}")


# A part's epilogue is the same loop for every hd; at 512 a CTA has half of the columns.
@pytest.mark.parametrize(
    ("hd", "part_keys"), [*((hd, None) for hd in SUPPORTED_HD), (64, SPLIT_KEYS), (512, SPLIT_KEYS)]
)
def test_fmha_assembles_without_spills(hd: int, part_keys: int | None) -> None:
    assembly = assembled(kernel_text(hd, part_keys))
    assert local_memory_bytes(assembly) == 0, f"fmha hd={hd} uses local memory: {assembly}"
    assert assembly.code_size > 0, f"fmha hd={hd}: the cubin has no code"


def test_a_spill_is_seen() -> None:
    assert local_memory_bytes(assembled(crowded_kernel(""))) == 0, "the crowded kernel fits without a register limit"
    limited = assembled(crowded_kernel(".maxnreg 24"))
    assert local_memory_bytes(limited) > 0, f"{LIVE_VALUES} live values in 24 registers went unnoticed: {limited}"


def test_invalid_ptx_is_refused() -> None:
    broken = kernel_text(64).replace("tcgen05.wait::ld.sync.aligned;", "tcgen05.wait::ld.sync;", 1)
    with pytest.raises(AssemblyError, match=r"ptxas"):
        assembled(broken)


def test_a_warning_is_refused() -> None:
    without_limits = kernel_text(64).replace(".reqntid 384, 1, 1\n", "")
    with pytest.raises(AssemblyError, match=r"setmaxnreg"):
        assembled(without_limits)


def test_the_declared_version_is_the_lowest() -> None:
    major, minor = PTX_VERSION
    older = kernel_text(64).replace(f".version {major}.{minor}", f".version {major}.{minor - 1}")
    with pytest.raises(AssemblyError):
        assembled(older)


def test_a_missing_assembler_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    monkeypatch.setattr(shutil, "which", nothing)
    with pytest.raises(UnsupportedError, match="ptxas"):
        assemble(kernel_text(64), "sm_100a")


@pytest.mark.parametrize("hd", SUPPORTED_HD)
def test_fmha_fits_the_machine(hd: int) -> None:
    tiling = Sm100FmhaTiling(hd)
    assert tiling.o_column + tiling.o_columns <= TMEM_COLUMNS, f"hd={hd}: O ends beyond tensor memory"
    assert tiling.halves * tiling.o_columns == hd, f"hd={hd}: the CTAs of a row tile do not cover O exactly"
    hold_places_apart(tiling.smem)


def _param_of(argument: KernelArg) -> str:
    """Returns how PTX declares the parameter that `argument` fills, without its name."""
    if isinstance(argument, TensorMapArg):
        return ".align 64 .b8"
    return f".{argument.dtype}" if isinstance(argument, ScalarArg) else ".u64"


def check_arguments(ptx: str, launch: Launch) -> None:
    """Checks that a launch passes what its entry declares, in order."""
    head = ptx.split(f".entry {launch.entry}(")[1].split(")")[0]
    declared = re.findall(r"^    \.param (.*) \w+(?:\[128\])?,?$", head, re.MULTILINE)
    passed = [_param_of(argument) for argument in launch.args]
    assert passed == declared, f"{launch.entry} is passed {passed}, declares {declared}"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("hd", SUPPORTED_HD)
@pytest.mark.parametrize("s_k", [130, 1000])
@pytest.mark.parametrize("lse", [True, False])
def test_arguments_are_the_parameters(target: Target, hd: int, s_k: int, lse: bool) -> None:
    case = specs()["fmha"].case(hd=hd, t=3, s_k=s_k, heads=4, kv_heads=2, lse=lse)
    program = BACKEND.build(case, target)
    assert program.ptx.count(".visible .entry ") == len(program.launches) == (2 if s_k > SPLIT_KEYS else 1)
    for launch in program.launches:
        check_arguments(program.ptx, launch)


def test_other_arguments_are_noticed() -> None:
    case = specs()["fmha"].case(hd=64, t=3, s_k=130, heads=4, kv_heads=2)
    program = BACKEND.build(case, "sm_100a")
    launch = program.launches[0]
    with pytest.raises(AssertionError, match="is passed"):
        check_arguments(program.ptx, replace(launch, args=launch.args[1:]))


def test_other_targets_are_unsupported() -> None:
    layer = specs()["nvfp4_moe"]
    case = layer.profile("smoke").cases[0]
    with pytest.raises(UnsupportedError, match="no other_op for sm_90a"):
        BACKEND.build(replace(case, op="other_op"), "sm_90a")


VARIANTS = [
    SwigluVariant(interleave, clamped, weighted)
    for interleave, clamped, weighted in ((8, False, False), (16, True, False), (32, False, True), (64, True, True))
]
OTHERS: list[Callable[[], Builder]] = [
    lambda: l2_kernel().builder,
    lambda: routing_kernel(MOE_VERSION),
    lambda: gather_scales_kernel(MOE_VERSION),
    lambda: requantise_kernel(MOE_VERSION),
    lambda: combine_kernel(MOE_VERSION),
]
STAGES = ("layer", "l1", "requantise", "l2", "combine")


def program(**axes: object) -> Program:
    """The program of a small layer with these axes."""
    small = {"hidden": 256, "intermediate": 128, "num_experts": 4, "tokens": 6, "topk": 2}
    case = specs()["nvfp4_moe"].case(**{**small, **axes})  # type: ignore[arg-type]
    return BACKEND.build(case, "sm_100a")


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_swiglu_assembles_without_spills(variant: SwigluVariant) -> None:
    assembly = assembled(l1_kernel(variant).builder.text())
    assert local_memory_bytes(assembly) == 0, f"{variant} uses local memory: {assembly}"


@pytest.mark.parametrize("kernel", OTHERS, ids=lambda kernel: kernel().entry)
def test_assembles_without_spills(kernel: Callable[[], Builder]) -> None:
    builder = kernel()
    assembly = assembled(builder.text())
    assert local_memory_bytes(assembly) == 0, f"{builder.entry} uses local memory: {assembly}"


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_one_module(stage: str) -> None:
    """All entries of a stage are in one module that assembles; each launch names one of them."""
    built = program(stage=stage)
    assert assembled(built.ptx).code_size > 0, f"stage {stage}: the cubin has no code"
    entries = re.findall(r"^\.visible \.entry (\w+)\(", built.ptx, re.MULTILINE)
    assert [launch.entry for launch in built.launches] == entries, (
        f"stage {stage} launches other entries than {entries}"
    )


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("weight", ["before", "after"])
def test_moe_arguments_are_the_parameters(stage: str, weight: str) -> None:
    built = program(stage=stage, weight=weight)
    for launch in built.launches:
        check_arguments(built.ptx, launch)


def test_the_moes_declared_version_is_the_lowest() -> None:
    major, minor = MOE_VERSION
    older = l2_kernel().builder.text().replace(f".version {major}.{minor}", f".version {major}.{minor - 1}")
    with pytest.raises(AssemblyError):
        assembled(older)


@pytest.mark.parametrize("smem", [L1_SMEM, L2_SMEM], ids=["l1", "l2"])
def test_shared_memory_fits(smem: SmemLayout) -> None:
    hold_places_apart(smem)


def test_tensor_memory_fits() -> None:
    end = SF_COLUMN + SF_SLOTS * SF_SLOT_COLUMNS
    assert end <= TMEM_COLUMNS, f"scale factors end at column {end}"
    assert ACCUMULATOR_STRIDE + TILE_N <= SF_COLUMN, "the second accumulator reaches into the scale factors"
    assert TILE_N - ACCUMULATOR_STRIDE == HALF_N, (
        "the epilogue frees one half first: the accumulators must share that much"
    )


@pytest.mark.parametrize("axis", ["hidden", "intermediate"])
def test_other_shapes_are_unsupported(axis: str) -> None:
    case = specs()["nvfp4_moe"].case(hidden=256, intermediate=256, num_experts=1, tokens=1)
    odd = replace(case, axes=tuple((name, 192 if name == axis else value) for name, value in case.axes))
    with pytest.raises(UnsupportedError, match=f"{axis} is 192; .* multiple of 128"):
        BACKEND.build(odd, "sm_100a")


MAX_REGISTERS = 255
MAX_REGISTERS_OF_AN_SM = 65536


SINGLE_HD = SUPPORTED_HD[:-1]
PAIRS = (*(PairTiling(hd) for hd in SUPPORTED_HD), PairTiling(256, latent=True), PairTiling(512, latent=True))


@pytest.mark.parametrize("part_keys", [None, SPLIT_KEYS])
@pytest.mark.parametrize("hd", SINGLE_HD)
def test_fmha_of_sm_90a_assembles_without_spills(hd: int, part_keys: int | None) -> None:
    assembly = assembled(sm90_text(hd, part_keys), "sm_90a")
    assert local_memory_bytes(assembly) == 0, f"hd={hd} uses local memory: {assembly}"
    assert assembly.registers <= MAX_REGISTERS


def test_the_declared_version_of_sm_90a_is_the_lowest() -> None:
    major, minor = SM90_VERSION
    assert (major, minor) == (8, 0)
    with pytest.raises(AssemblyError):
        assembled(sm90_text(64).replace(".version 8.0", ".version 7.8"), "sm_90a")


@pytest.mark.parametrize("part_keys", [None, SPLIT_KEYS])
@pytest.mark.parametrize("tiling", PAIRS, ids=str)
def test_two_consumers_of_sm_90a_assemble_without_spills(tiling: PairTiling, part_keys: int | None) -> None:
    assembly = assembled(pair_text(tiling, part_keys), "sm_90a")
    assert local_memory_bytes(assembly) == 0, f"{tiling} uses local memory: {assembly}"


@pytest.mark.parametrize("hd", [64, 128])
def test_one_row_of_sm_90a_assembles_without_spills(hd: int) -> None:
    tiling = RowTiling(hd)
    assembly = assembled(row_text(tiling), "sm_90a")
    assert local_memory_bytes(assembly) == 0, f"{tiling} uses local memory: {assembly}"
    assert tiling.turns * tiling.keys_of_turn == MAX_KEYS, f"{tiling}: {tiling.turns} turns"
    hold_places_apart(tiling.smem)


@pytest.mark.parametrize("tiling", PAIRS, ids=str)
def test_two_consumers_of_sm_90a_fit_the_machine(tiling: PairTiling) -> None:
    consumers = 2 if tiling.shares_columns else 1
    assert consumers * tiling.o_columns == tiling.hd, f"{tiling}: O is not covered exactly"
    assert tiling.tile_n & tiling.tile_n - 1 == 0, "tiles begin at multiples of a power of two"
    assert tiling.stages >= (1 if tiling.shares_columns else 2), f"{tiling}: {tiling.stages} tiles on their way"
    hold_places_apart(tiling.smem)


@pytest.mark.parametrize("hd", SINGLE_HD)
def test_fmha_of_sm_90a_fits_the_machine(hd: int) -> None:
    tiling = Sm90FmhaTiling(hd)
    assert tiling.tile_n & tiling.tile_n - 1 == 0, "tiles begin at multiples of a power of two"
    hold_places_apart(tiling.smem)


@pytest.mark.parametrize("hd", [64, 128])
def test_two_ctas_fit_an_sm(hd: int) -> None:
    assert 2 * (Sm90FmhaTiling(hd).smem.size + 1024) <= MAX_SMEM + 1024, "shared memory holds one CTA only"
    assert 2 * SM90_THREADS * assembled(sm90_text(hd), "sm_90a").registers <= MAX_REGISTERS_OF_AN_SM

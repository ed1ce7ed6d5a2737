"""Every MoE kernel of the ptx backend assembles for sm_100a without spills or warnings, and fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from backends.ptx import BACKEND
from backends.ptx.assembler import AssemblyError
from backends.ptx.builder import Builder
from backends.ptx.shared_memory import MAX_SMEM, SmemLayout
from backends.ptx.sm100_moe.combine import combine_kernel
from backends.ptx.sm100_moe.epilogue import SwigluVariant
from backends.ptx.sm100_moe.gather_scales import gather_scales_kernel
from backends.ptx.sm100_moe.geometry import (
    ACCUMULATOR_STRIDE,
    HALF_N,
    SF_COLUMN,
    SF_SLOT_COLUMNS,
    SF_SLOTS,
    TILE_N,
)
from backends.ptx.sm100_moe.kernel import L1_SMEM, L2_SMEM, PTX_VERSION, l1_kernel, l2_kernel
from backends.ptx.sm100_moe.requantise import requantise_kernel
from backends.ptx.sm100_moe.routing import routing_kernel
from backends.ptx.tcgen05 import TMEM_COLUMNS
from conformance.kernels.ptx.test_assembles import assembled, check_arguments, local_memory_bytes
from megamoe.contract import Program, UnsupportedError
from megamoe.spec.load import load_specs

VARIANTS = [
    SwigluVariant(interleave, clamped, weighted)
    for interleave, clamped, weighted in ((8, False, False), (16, True, False), (32, False, True), (64, True, True))
]
OTHERS: list[Callable[[], Builder]] = [
    lambda: l2_kernel().builder,
    lambda: routing_kernel(PTX_VERSION),
    lambda: gather_scales_kernel(PTX_VERSION),
    lambda: requantise_kernel(PTX_VERSION),
    lambda: combine_kernel(PTX_VERSION),
]
STAGES = ("layer", "l1", "requantise", "l2", "combine")


def program(**axes: object) -> Program:
    """The program of a small layer with these axes."""
    small = {"hidden": 256, "intermediate": 128, "num_experts": 4, "tokens": 6, "topk": 2}
    case = load_specs()["nvfp4_moe"].case(**{**small, **axes})  # type: ignore[arg-type]
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
def test_arguments_are_the_parameters(stage: str, weight: str) -> None:
    built = program(stage=stage, weight=weight)
    for launch in built.launches:
        check_arguments(built.ptx, launch)


def test_the_declared_version_is_the_lowest() -> None:
    major, minor = PTX_VERSION
    older = l2_kernel().builder.text().replace(f".version {major}.{minor}", f".version {major}.{minor - 1}")
    with pytest.raises(AssemblyError):
        assembled(older)


@pytest.mark.parametrize("smem", [L1_SMEM, L2_SMEM], ids=["l1", "l2"])
def test_shared_memory_fits(smem: SmemLayout) -> None:
    assert smem.size <= MAX_SMEM, f"{smem.size} bytes of shared memory; a CTA may have {MAX_SMEM}"
    ends = 0
    for name, (offset, size) in smem.places.items():
        assert offset >= ends, f"{name} at {offset} overlaps what ends at {ends}"
        ends = offset + size


def test_tensor_memory_fits() -> None:
    end = SF_COLUMN + SF_SLOTS * SF_SLOT_COLUMNS
    assert end <= TMEM_COLUMNS, f"scale factors end at column {end}"
    assert ACCUMULATOR_STRIDE + TILE_N <= SF_COLUMN, "the second accumulator reaches into the scale factors"
    assert TILE_N - ACCUMULATOR_STRIDE == HALF_N, (
        "the epilogue frees one half first: the accumulators must share that much"
    )


@pytest.mark.parametrize("axis", ["hidden", "intermediate"])
def test_other_shapes_are_unsupported(axis: str) -> None:
    case = load_specs()["nvfp4_moe"].case(hidden=256, intermediate=256, num_experts=1, tokens=1)
    odd = replace(case, axes=tuple((name, 192 if name == axis else value) for name, value in case.axes))
    with pytest.raises(UnsupportedError, match=f"{axis} is 192; .* multiple of 128"):
        BACKEND.build(odd, "sm_100a")

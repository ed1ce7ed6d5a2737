"""The ptx backend's attention for sm_100a assembles without spills or warnings, fits, and is launched as declared."""

from __future__ import annotations

import importlib.util
import re
import shutil
from dataclasses import replace

import pytest

from backends.ptx import BACKEND
from backends.ptx.assembler import AssemblyError, assemble
from backends.ptx.attention import SUPPORTED_HD
from backends.ptx.builder import Builder
from backends.ptx.operands import at
from backends.ptx.shared_memory import MAX_SMEM
from backends.ptx.sm100_fmha.geometry import Sm100FmhaTiling
from backends.ptx.sm100_fmha.kernel import PTX_VERSION, kernel_text
from backends.ptx.tcgen05 import TMEM_COLUMNS
from megamoe.contract import KernelArg, Launch, ScalarArg, Target, TensorMapArg, UnsupportedError
from megamoe.contract.assembly import Assembly
from megamoe.spec.load import load_specs

LIVE_VALUES = 64


def assembled(ptx: str, target: Target = "sm_100a") -> Assembly:
    """`assemble`; a missing assembler skips the test, so that it never passes unasked."""
    try:
        return assemble(ptx, target)
    except UnsupportedError as missing:
        pytest.skip(f"unsupported: {missing}")


def local_memory_bytes(assembly: Assembly) -> int:
    """Bytes of local memory traffic and stack; 0 for a kernel that stays in registers."""
    return assembly.stack + assembly.spill_stores + assembly.spill_loads


def crowded_kernel(directive: str) -> str:
    """A kernel with LIVE_VALUES loads alive at once, and `directive` behind .reqntid."""
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


@pytest.mark.parametrize("hd", SUPPORTED_HD)
def test_fmha_assembles_without_spills(hd: int) -> None:
    assembly = assembled(kernel_text(hd))
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
    assert tiling.smem.size <= MAX_SMEM, f"hd={hd} wants {tiling.smem.size} bytes of shared memory"
    assert tiling.o_column + tiling.o_columns <= TMEM_COLUMNS, f"hd={hd}: O ends beyond tensor memory"
    assert tiling.halves * tiling.o_columns == hd, f"hd={hd}: the CTAs of a row tile do not cover O exactly"
    ends = 0
    for name, (offset, size) in tiling.smem.places.items():
        assert offset >= ends, f"hd={hd}: {name} at {offset} overlaps what ends at {ends}"
        ends = offset + size


def _param_of(argument: KernelArg) -> str:
    """How PTX declares the parameter that `argument` fills, less its name."""
    if isinstance(argument, TensorMapArg):
        return ".align 64 .b8"
    return f".{argument.dtype}" if isinstance(argument, ScalarArg) else ".u64"


def check_arguments(ptx: str, launch: Launch) -> None:
    """A launch passes what its entry declares, in order."""
    head = ptx.split(f".entry {launch.entry}(")[1].split(")")[0]
    declared = re.findall(r"^    \.param (.*) \w+(?:\[128\])?,?$", head, re.MULTILINE)
    passed = [_param_of(argument) for argument in launch.args]
    assert passed == declared, f"{launch.entry} is passed {passed}, declares {declared}"


@pytest.mark.parametrize("hd", SUPPORTED_HD)
@pytest.mark.parametrize("lse", [True, False])
def test_arguments_are_the_parameters(hd: int, lse: bool) -> None:
    case = load_specs()["fmha"].case(hd=hd, t=3, s_k=130, heads=4, kv_heads=2, lse=lse)
    program = BACKEND.build(case, "sm_100a")
    check_arguments(program.ptx, program.launches[0])


def test_other_arguments_are_noticed() -> None:
    case = load_specs()["fmha"].case(hd=64, t=3, s_k=130, heads=4, kv_heads=2)
    program = BACKEND.build(case, "sm_100a")
    launch = program.launches[0]
    with pytest.raises(AssertionError, match="is passed"):
        check_arguments(program.ptx, replace(launch, args=launch.args[1:]))


def test_other_targets_are_unsupported() -> None:
    layer = load_specs()["nvfp4_moe"]
    case = layer.profile("smoke").cases[0]
    with pytest.raises(UnsupportedError, match="no nvfp4_moe for sm_90a"):
        BACKEND.build(case, "sm_90a")

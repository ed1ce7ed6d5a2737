"""The ptx backend's attention for sm_90a assembles without spills, fits the machine and is launched as declared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends.ptx import BACKEND
from backends.ptx.assembler import AssemblyError
from backends.ptx.attention import SUPPORTED_HD
from backends.ptx.shared_memory import MAX_SMEM
from backends.ptx.sm90_fmha.geometry import SPLIT_KEYS, THREADS, Sm90FmhaTiling, splits_of
from backends.ptx.sm90_fmha.kernel import PTX_VERSION, kernel_text
from conformance.kernels.ptx.test_assembles import assembled, check_arguments, local_memory_bytes
from megamoe.contract import Row, RunOptions, load_executor
from megamoe.judge.guarded import GuardedCase
from megamoe.judge.judge import judge
from megamoe.spec.load import load_specs

MAX_REGISTERS = 255
MAX_REGISTERS_OF_AN_SM = 65536


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("hd", SUPPORTED_HD)
def test_it_assembles_without_spills(hd: int, split: bool) -> None:
    assembly = assembled(kernel_text(hd, split), "sm_90a")
    assert local_memory_bytes(assembly) == 0, f"hd={hd} uses local memory: {assembly}"
    assert assembly.registers <= MAX_REGISTERS


def test_the_declared_version_is_the_lowest() -> None:
    major, minor = PTX_VERSION
    assert (major, minor) == (8, 0)
    with pytest.raises(AssemblyError):
        assembled(kernel_text(64).replace(".version 8.0", ".version 7.8"), "sm_90a")


@pytest.mark.parametrize("hd", SUPPORTED_HD)
def test_it_fits_the_machine(hd: int) -> None:
    tiling = Sm90FmhaTiling(hd)
    assert tiling.smem.size <= MAX_SMEM, f"hd={hd} wants {tiling.smem.size} bytes of shared memory"
    assert tiling.halves * tiling.o_columns == hd, f"hd={hd}: the CTAs of a row tile do not cover O exactly"
    assert tiling.tile_n & tiling.tile_n - 1 == 0, "tiles begin at multiples of a power of two"
    ends = 0
    for name, (offset, size) in tiling.smem.places.items():
        assert offset >= ends, f"hd={hd}: {name} at {offset} overlaps what ends at {ends}"
        ends = offset + size


@pytest.mark.parametrize("hd", [64, 128])
def test_two_ctas_fit_an_sm(hd: int) -> None:
    assert 2 * (Sm90FmhaTiling(hd).smem.size + 1024) <= MAX_SMEM + 1024, "shared memory holds one CTA only"
    assert 2 * THREADS * assembled(kernel_text(hd), "sm_90a").registers <= MAX_REGISTERS_OF_AN_SM


@pytest.mark.parametrize("hd", SUPPORTED_HD)
@pytest.mark.parametrize("s_k", [130, 1000])
@pytest.mark.parametrize("lse", [True, False])
def test_arguments_are_the_parameters(hd: int, s_k: int, lse: bool) -> None:
    case = load_specs()["fmha"].case(hd=hd, t=3, s_k=s_k, heads=4, kv_heads=2, lse=lse)
    program = BACKEND.build(case, "sm_90a")
    assert program.ptx.count(".visible .entry ") == len(program.launches) == (2 if s_k > SPLIT_KEYS else 1)
    for launch in program.launches:
        check_arguments(program.ptx, launch)


@pytest.mark.parametrize(("t", "s_k", "splits"), [(1, 512, 1), (1, 513, 2), (16, 8192, 16), (17, 8192, 1)])
def test_the_keys_of_few_queries_are_split(t: int, s_k: int, splits: int) -> None:
    assert splits_of(t, s_k) == splits
    assert all(SPLIT_KEYS % Sm90FmhaTiling(hd).tile_n == 0 for hd in SUPPORTED_HD), "a split begins within a tile"


@pytest.mark.parametrize("hd", SUPPORTED_HD)
def test_parts_without_a_key_count_for_nothing(hd: int) -> None:
    """With a window of one key, two of three parts see no key of one query or of both."""
    case = load_specs()["fmha"].case(hd=hd, t=2, s_k=1025, heads=2, causal=True, window=1)
    record = judge(Row(case.id, "ptx", "sm_90a", "vm", "lazy"), "pytest")
    assert record.status == "passed", record.sentence


SYNCHRONISES = ("wgmma.fence", "wgmma.wait_group", "wgmma.commit_group", "bar.sync", "fence.", "mbarrier.")
# (text, occurrence) that the VM does not miss when it is removed -> why the kernel has it.
NOT_NOTICED = {
    (
        "fence.mbarrier_init.release.cluster;",
        0,
    ): "a CTA without a cluster sees its own mbarriers; the async proxy does not",
    ("wgmma.fence.sync.aligned;", 1): "the VM holds a wgmma's register operands against earlier wgmma only",
    (
        "bar.sync 0;",
        1,
    ): "to the VM a wgmma is one step of all four warps; on a GPU another warp's may still read the stage",
}


def _without(ptx: str) -> dict[tuple[str, int], str]:
    """The kernel without each of its synchronising instructions, by text and occurrence."""
    lines = ptx.splitlines()
    seen: dict[str, int] = {}
    found: dict[tuple[str, int], str] = {}
    for number, line in enumerate(lines):
        text = line.split("//")[0].strip()
        if text.startswith(SYNCHRONISES):
            rest = lines.copy()
            # A wait is the instruction and the branch back to it.
            rest[number : number + (2 if "try_wait" in text else 1)] = []
            found[text, seen.setdefault(text, 0)] = "\n".join(rest)
            seen[text] += 1
    return found


def _violation(ptx: str) -> str | None:
    """What the VM says of `ptx` on a case whose ring is filled a second time."""
    spec = load_specs()["fmha"]
    case = spec.case(hd=64, t=4, s_k=300)
    program = replace(BACKEND.build(case, "sm_90a"), ptx=ptx)
    guarded = GuardedCase(spec, case, load_executor("vm"))
    return guarded.run(program, RunOptions(step_budget=500_000)).execution.violation


def test_the_vm_notices_what_is_missing() -> None:
    text = kernel_text(64)
    assert _violation(text) is None
    missed = {key for key, mutant in _without(text).items() if _violation(mutant) is None}
    assert missed - set(NOT_NOTICED) == set(), "removed, and the VM does not notice"
    assert set(NOT_NOTICED) - missed == set(), "the VM notices these by now: take them out of NOT_NOTICED"

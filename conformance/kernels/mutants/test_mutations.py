"""Planted faults in a real kernel: removes each synchronising instruction and checks whether the VM notices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from backends.cutedsl.sm100_moe.program import moe_program
from conformance.kernels.laws.law import spec_of
from conformance.kernels.mutants.__main__ import main
from conformance.kernels.mutants.campaign import DROPPED, Outcome, drops
from conformance.kernels.mutants.mutant import instructions
from conformance.kernels.mutants.table import DROPS, Reason, drops_table, reason_of, reasons
from megamoe.contract import Case, HostProgram, Program, RunOptions, UnsupportedError, load_backend, load_executor
from megamoe.judge.guarded import GuardedCase

# By target, instructions (parts of their texts) whose order other instructions also give: the VM does not miss them.
# survivors.yaml argues each.
NOT_NOTICED = {
    "sm_100a": (
        "tcgen05.fence",
        "tcgen05.wait::ld",
        "tcgen05.relinquish",
        "bar.warp.sync",
        "%ring_drained_completed",
    ),
    "sm_90a": ("bar.sync 0",),
}


@pytest.mark.parametrize("target", DROPPED)
def test_what_goes_unnoticed_is_excused_and_published(target: str) -> None:
    """One test a target: workers with a third each would all remove every instruction."""
    found, known = drops(target), reasons()
    _unnoticed_is_excused(target, found, known)
    _no_excuse_is_stale(target, found)
    _published_is_true(target, found, known)


def _unnoticed_is_excused(target: str, found: Sequence[Outcome], known: Sequence[Reason]) -> None:
    """Every removal is noticed, except those that are listed with a written reason."""
    missed = [one for one in found if not one.killed]
    excused = [one for one in missed if any(part in one.before for part in NOT_NOTICED[target])]
    listed = "; ".join(f"PTX line {one.line} `{one.before}`" for one in missed if one not in excused)
    assert not listed, f"the VM does not notice that these are missing: {listed}"
    lacking = {one.before for one in missed if (why := reason_of(one, known)) is None or why.verdict != "equivalent"}
    assert not lacking, f"survivors.yaml does not argue that nothing is ordered by these: {lacking}"


def _no_excuse_is_stale(target: str, found: Sequence[Outcome]) -> None:
    """An excuse that no unnoticed removal needs is out of date."""
    missed = [one.before for one in found if not one.killed]
    stale = [part for part in NOT_NOTICED[target] if not any(part in before for before in missed)]
    assert not stale, f"the VM notices these by now; take them out of NOT_NOTICED: {stale}"


def _published_is_true(target: str, found: Sequence[Outcome], known: Sequence[Reason]) -> None:
    """results/mutations.md is true of the target."""
    beginning, *sections = DROPS.read_text("utf-8").split("\n## ")
    of_target = [f"{beginning}\n## {one}" for one in sections if one.partition("\n")[0].endswith(f" on {target}")]
    assert of_target == [drops_table({target: found}, known)], "out of date; run: nox -s mutants -- --drops"


def test_the_published_table_has_the_targets_and_no_other() -> None:
    headings = [line for line in DROPS.read_text("utf-8").splitlines() if line.startswith("## ")]
    assert headings == [f"## `{case}` on {target}" for target, case in DROPPED.items()]


def test_a_text_that_no_instruction_has_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    case = ["--case", DROPPED["sm_100a"], "--backend", "ptx", "--target", "sm_100a"]
    assert main([*case, "--text", "tcgen05.wiat"]) == 2, "nothing was taken out, so nothing was proven"
    said = capsys.readouterr().err
    assert "has 'tcgen05.wiat' in its text; those that order are bar.sync, " in said
    assert "did you mean 'tcgen05.wait" in said


SCHEDULES = ("eager", "lazy", "random:1")
COUNTER = "tmem_unordered_copies"


def case_of(text: str) -> Case:
    return spec_of("nvfp4_moe").parse_case(f"nvfp4_moe:{text}")


def cutedsl(case: Case, cta_group: int) -> HostProgram:
    """Our kernels in CuTeDSL. Skips the test if CuTeDSL is missing."""
    try:
        return moe_program(case, cta_group, 148)
    except UnsupportedError as missing:
        pytest.skip(f"unsupported: {missing}")


def raw_ptx(case: Case) -> Program:
    """Our kernels in PTX."""
    built = load_backend("ptx").build(case, "sm_100a")
    assert isinstance(built, Program), "the ptx backend builds PTX with launches"
    return built


def run(case: Case, program: Program | HostProgram, schedule: str) -> tuple[int, str | None]:
    """Counts copies of scales that nothing orders after an mma, and returns the first broken rule."""
    guarded = GuardedCase(spec_of(case.op), case, load_executor("vm"))
    execution = guarded.run(program, RunOptions(schedule=schedule)).execution
    return execution.counters.get(COUNTER, 0), execution.violation


def without_each(ptx: str, instruction: str) -> Iterator[tuple[str, str]]:
    """Yields, for each such instruction, its entry and the PTX without it."""
    for one in instructions(ptx):
        if one.opcode.startswith(instruction):
            yield one.entry, f"{ptx[: one.begin]}{ptx[one.end :]}"


@pytest.mark.parametrize("cta_group", [1, 2])
def test_a_kernel_that_does_not_wait_for_the_launch_before(cta_group: int) -> None:
    """Every kernel of the layer but the first may begin while the previous one runs."""
    case = case_of("hidden=256,intermediate=128,num_experts=2,tokens=3,topk=2")
    program = cutedsl(case, cta_group)
    hasty = dict(without_each(program.ptx, "griddepcontrol.wait"))
    assert len(hasty) == 4, f"gather, L1, L2 and combine are to wait: {sorted(hasty)}"
    for entry, ptx in hasty.items():
        _, violation = run(case, replace(program, ptx=ptx), "eager")
        assert violation is not None, f"{entry} does not wait, and nobody notices"
        assert violation.startswith(f"[dependent-launch-not-awaited] kernel {entry}, PTX line"), violation


SLOTS = "hidden=1536,intermediate=128,num_experts=1,tokens=20,interleave=64,stage=l1"
"""More K tiles than slots of scales, so the slots wrap."""


@pytest.mark.parametrize("backend", ["cutedsl", "ptx"])
def test_a_slot_of_scales_that_is_overwritten_too_early(backend: str) -> None:
    """The wait for the MMAs that read the slot comes before the copies; without it the copies are counted."""
    case = case_of(SLOTS)
    program = cutedsl(case, 2) if backend == "cutedsl" else raw_ptx(case)
    hasty = replace(program, ptx=without_the_slot_s_wait(program.ptx, backend))
    for schedule in SCHEDULES:
        counted, violation = run(case, program, schedule)
        assert (counted, violation) == (0, None), f"{backend} as it is, {schedule}: {counted} copies; {violation}"
        counted, violation = run(case, hasty, schedule)
        assert violation is None, f"{backend}, {schedule}: production kernels do the same: {violation}"
        assert counted > 0, f"{backend}, {schedule}: scales are overwritten under an mma, and nothing is counted"


def without_the_slot_s_wait(ptx: str, backend: str) -> str:
    """Makes the wait before the copies of scales end at once."""
    lines = ptx.splitlines()
    first_copy = next(index for index, line in enumerate(lines) if "tcgen05.cp" in line)
    waits = [index for index, line in enumerate(lines[:first_copy]) if "mbarrier.try_wait" in line]
    at = waits[-1] if backend == "cutedsl" else next(i for i in reversed(waits) if "%slot_free_completed" in lines[i])
    over = re.search(r"%?\w+(?=, \[)", lines[at])
    assert over is not None, f"a wait that sets no predicate: {lines[at]}"
    return "\n".join([*lines[:at], f"setp.eq.s32 {over[0]}, 0, 0;", *lines[at + 1 :]])

"""Nothing gets worse than the baseline, or enters or leaves it, unseen."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from conformance.fakes.results import CASE, COUNTERS, KERNEL, NEIGHBOUR, ROW, baseline, claim, compiled, judged
from megamoe.contract import Row
from megamoe.gate.baseline import Baseline
from megamoe.gate.counters import Claim, against_baseline
from megamoe.gate.verdict import Finding, judge_run
from megamoe.records.lines import Figures, Record
from megamoe.spec.selection import Selection

BOTH = (judged(ROW), compiled(ROW), judged(NEIGHBOUR), compiled(NEIGHBOUR))
HELD = baseline(*BOTH)


def _findings(
    *lines: Record | Figures, held: Baseline = HELD, claimed: Claim | None = None, owed: tuple[Row, ...] | None = None
) -> list[Finding]:
    records = [line for line in lines if isinstance(line, Record)]
    programs = [line for line in lines if isinstance(line, Figures)]
    rows = (ROW, NEIGHBOUR) if owed is None else owed
    return list(against_baseline(held, claimed or claim(ROW, NEIGHBOUR), rows, records, programs))


def test_the_same_again_is_no_finding() -> None:
    assert _findings(*BOTH) == []


def test_what_no_run_repeats_is_not_compared() -> None:
    again = judged(ROW).model_copy(update={"judge_host_seconds": 99.0, "metrics": {}, "input_sha256": {}, "run": "x"})
    assert _findings(again, *BOTH[1:]) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"instructions_alu": 101}, "instructions_alu 100 -> 101 (+1.0%)"),
        ({"mma_flops": 8192}, "mma_flops 4096 -> 8192 (+100.0%)"),
        ({"smem_bank_conflicts": 1}, "smem_bank_conflicts none -> 1"),
        ({"instructions_alu": 101, "mma_flops": 1}, "instructions_alu 100 -> 101 (+1.0%), mma_flops 4096 -> 1"),
    ],
)
def test_more_of_a_cost_closes_the_gate(changed: Mapping[str, int], said: str) -> None:
    (found,) = _findings(judged(ROW, {**COUNTERS, **changed}), *BOTH[1:])
    assert (found.kind, found.row, found.closes) == ("regressed", ROW, True)
    assert found.sentence.startswith(f"regressed: {ROW}: {said}")
    assert found.accept == f"megamoe accept '{ROW}'", "the command that accepts it must be there"


def test_a_cost_that_is_no_longer_counted_closes_the_gate() -> None:
    left = {name: value for name, value in COUNTERS.items() if name != "tma_stores"}
    (found,) = _findings(judged(ROW, left), *BOTH[1:])
    assert found.closes, "a counter that nobody counts any more holds nothing any more"
    assert "tma_stores 2 -> none" in found.sentence


@pytest.mark.parametrize(
    ("changed", "word"), [({"mma_flops": 2048}, "better"), ({"useful_flops": 1}, "changed"), ({"new": 3}, "changed")]
)
def test_what_is_no_more_of_a_cost_only_asks(changed: Mapping[str, int], word: str) -> None:
    (found,) = _findings(judged(ROW, {**COUNTERS, **changed}), *BOTH[1:])
    assert not found.closes
    assert found.sentence.startswith(f"{word}: {ROW}")
    assert found.accept is not None
    verdict = judge_run([ROW], [judged(ROW)])
    assert verdict.with_findings([found]).passed
    assert verdict.with_findings([found]).asks == (str(found),)
    assert not verdict.with_findings([found], strict=True).passed, "--strict keeps the baseline true"


def test_the_sentence_says_whether_the_program_or_what_runs_it_has_changed() -> None:
    worse = {**COUNTERS, "mma_flops": 8192}
    (machine,) = _findings(judged(ROW, worse), *BOTH[1:])
    (program,) = _findings(judged(ROW, worse, program="p2"), *BOTH[1:])
    assert machine.sentence.endswith("the program is the same, so what runs it has changed")
    assert program.sentence.endswith("the program has changed")


def test_no_record_of_a_row_hides_behind_another() -> None:
    better, worse = judged(ROW, {**COUNTERS, "mma_flops": 1}), judged(ROW, {**COUNTERS, "mma_flops": 8192})
    for other in (judged(ROW), better):
        for order in ((worse, other), (other, worse)):
            assert any(found.closes for found in _findings(*order, *BOTH[1:])), "one of two records is worse"
    assert not any(found.closes for found in _findings(better, *BOTH[1:]))


def test_a_row_that_the_baseline_lacks_closes_the_gate() -> None:
    (found,) = _findings(*BOTH, held=baseline(*BOTH[:2]))
    assert (found.kind, found.row, found.closes) == ("new", NEIGHBOUR, True)
    assert found.accept is not None
    (alone,) = _findings(*BOTH, held=baseline(*BOTH[:3]))
    assert (alone.kind, alone.row, alone.closes) == ("new", NEIGHBOUR, True), "its figures alone may be lacking, too"


def test_a_row_that_nobody_claims_for_the_baseline_does_not() -> None:
    assert _findings(*BOTH, held=baseline(*BOTH[:2]), claimed=claim(ROW)) == []


def test_a_row_that_failed_is_the_verdict_s_business() -> None:
    failed = judged(ROW, {}, status="failed")
    assert _findings(failed, judged(ROW), *BOTH[1:]) == [], "its counters mean nothing"
    verdict = judge_run([ROW, NEIGHBOUR], [failed, judged(NEIGHBOUR)], passed_before=HELD.records)
    (problem,) = verdict.problems
    assert problem.startswith("failed, which passed in the baseline: the outputs are wrong")


def test_a_row_that_nobody_owes_any_more_closes_the_gate() -> None:
    (found,) = _findings(*BOTH[:2], claimed=claim(ROW), owed=(ROW,))
    assert (found.kind, found.row, found.closes) == ("gone", NEIGHBOUR, True)
    assert found.accept is not None


@pytest.mark.parametrize(
    "selection",
    [
        Selection(ops=("nvfp4_moe",)),
        Selection(backends=("cutedsl",)),
        Selection(targets=("sm_90a",)),
        Selection(executors=("gpu",)),
        Selection(cases=(CASE,)),
        Selection(where=("t=1",)),
        Selection(profile="full"),
        Selection(schedules=("lazy",)),
    ],
)
def test_a_run_that_was_asked_for_less_says_nothing_of_the_rest(selection: Selection) -> None:
    assert _findings(*BOTH[:2], claimed=claim(ROW, selection=selection), owed=(ROW,)) == []


@pytest.mark.parametrize(
    "selection", [Selection(ops=("fmha",)), Selection(backends=("ptx",), targets=("sm_100a",), executors=("vm",))]
)
def test_a_run_that_was_asked_for_it_does(selection: Selection) -> None:
    assert [one.kind for one in _findings(*BOTH[:2], claimed=claim(ROW, selection=selection), owed=(ROW,))] == ["gone"]


@pytest.mark.parametrize(
    ("changed", "closes", "said"),
    [
        ({"registers": 255}, True, "registers 168 -> 255"),
        ({"spill_bytes": 8}, True, "spill_bytes 0 -> 8"),
        ({"registers": 128}, False, "registers 168 -> 128"),
        (
            {"registers": 128, "code_bytes": 9000},
            True,
            "fmha.code_bytes 4096 -> 9000 (+119.7%), fmha.registers 168 -> 128",
        ),
    ],
)
def test_compiler_figures_are_held_alike(changed: Mapping[str, int], closes: bool, said: str) -> None:
    (found,) = _findings(judged(ROW), compiled(ROW, {**KERNEL, **changed}), *BOTH[2:])
    assert found.closes is closes
    assert said in found.sentence
    assert "compiler figures of" in found.sentence
    assert found.accept == f"megamoe accept '{ROW}'"


def test_one_kernel_may_be_renamed_but_several_may_not() -> None:
    assert _findings(judged(ROW), compiled(ROW, entry="fmha_2"), *BOTH[2:]) == []
    two = compiled(ROW).model_copy(update={"kernels": {"a": KERNEL, "b": KERNEL}})
    (found,) = _findings(judged(ROW), two, *BOTH[2:])
    assert found.closes, "a kernel more is more of everything"
    assert "a.registers none -> 168" in found.sentence


def test_the_program_of_a_row_on_a_device_is_the_business_of_its_row_in_the_vm() -> None:
    device = ROW._replace(executor="gpu")
    worse = compiled(ROW, {**KERNEL, "registers": 255})
    assert (
        _findings(judged(device), worse, owed=(device,), claimed=claim(ROW, selection=Selection(cases=(CASE,)))) == []
    )


def test_of_several_lines_of_figures_the_worst_counts() -> None:
    """Records of two runs may be combined; the order of the files must not decide."""
    worse, same = compiled(ROW, {**KERNEL, "registers": 255}), compiled(ROW)
    for lines in ((worse, same), (same, worse)):
        (found,) = _findings(judged(ROW), *lines, *BOTH[2:])
        assert (found.kind, found.closes) == ("regressed", True), f"{found}: the other line hides the regression"


def test_figures_that_are_not_there_close_the_gate() -> None:
    (held,) = _findings(judged(ROW), *BOTH[2:])
    assert held.closes
    assert "no compiler figures" in held.sentence
    nobody = _findings(judged(ROW), judged(NEIGHBOUR), held=baseline(judged(ROW), judged(NEIGHBOUR)))
    assert [one.closes for one in nobody] == [True, True], "a row of the baseline without figures proves nothing"


def test_a_second_assembler_has_figures_of_its_own() -> None:
    other = compiled(ROW, {**KERNEL, "registers": 40}, assembler="other")
    (found,) = _findings(*BOTH, other)
    assert found.kind == "new"
    assert "other" in found.sentence


def test_another_version_of_the_assembler_is_named() -> None:
    newer = compiled(ROW, {**KERNEL, "registers": 170}, assembler="ptxas 14.0")
    (found,) = _findings(judged(ROW), newer, *BOTH[2:])
    assert "ptxas before, ptxas 14.0 now" in found.sentence


def test_the_line_counts_what_was_found() -> None:
    verdict = judge_run([ROW, NEIGHBOUR], [judged(ROW), judged(NEIGHBOUR)])
    more = _findings(judged(ROW, {**COUNTERS, "mma_flops": 8192}), *BOTH[1:2], *BOTH[2:], held=baseline(*BOTH[:2]))
    assert verdict.with_findings(more).line == "2 passed, 0 failed, 1 regressed, 1 new"

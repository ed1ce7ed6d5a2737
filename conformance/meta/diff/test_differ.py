"""Compares two runs row by row: each call has its reason, and no regression passes unnoticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.fakes.results import (
    CASE,
    H200,
    figures,
    header,
    record,
    side,
    timing,
)
from megamoe.contract import STATUSES, Status
from megamoe.diff.differ import CALLS, ComparedRow, Comparison, ComparisonError, compare_runs
from megamoe.diff.sides import Side
from megamoe.records.keys import Key
from megamoe.records.lines import AnyLine
from megamoe.report.comparison import FOREST_WIDTH, as_json, as_markdown, forest, forest_span
from megamoe.spec.load import load_specs
from megamoe.spec.spec import Override, Thresholds

SPECS = load_specs()
RANDOM = np.random.default_rng(0)
QUIET = 10 + 0.02 * RANDOM.standard_normal((10, 10))


def only(comparison: Comparison) -> ComparedRow:
    assert len(comparison.rows) == 1, f"one row was compared, not {comparison.line}"
    return comparison.rows[0]


def compared(before: AnyLine, after: AnyLine, *, across: bool = False) -> ComparedRow:
    return only(compare_runs(side(header(), before), side(header(), after), SPECS, across=across))


@pytest.mark.parametrize(
    ("factor", "call", "regression"),
    [(1.0, "SAME", False), (1.01, "SAME", False), (1.1, "SLOWER", True), (0.9, "FASTER", False)],
)
def test_times(factor: float, call: str, regression: bool) -> None:
    row = compared(timing(QUIET), timing(QUIET[::-1] * factor))
    assert (row.call, row.regression) == (call, regression)
    assert row.ratio == pytest.approx(factor, rel=0.003)
    assert row.before_us == pytest.approx(10, rel=0.003), "times are microseconds"
    assert row.samples == (100, 100)


def test_times_that_cannot_be_told_apart_are_counted_and_fail_only_if_asked() -> None:
    noisy = 10 + 2 * RANDOM.standard_normal((10, 10))
    comparison = compare_runs(side(header(), timing(noisy)), side(header(), timing(noisy * 1.05)), SPECS)
    row = only(comparison)
    assert row.call == "AMBIGUOUS"
    assert "the threshold is" in row.sentence
    assert (comparison.exit_status(), comparison.exit_status(strict=True)) == (0, 1)
    assert "1 AMBIGUOUS" in comparison.line


def test_one_sample_a_side_is_ambiguous() -> None:
    row = compared(timing([10.0]), timing([20.0]))
    assert row.call == "AMBIGUOUS", "twice the time, but nothing is known of the noise"
    assert "too few samples" in row.sentence
    assert not row.regression, "nothing was known before either"


def test_samples_that_are_there_before_and_not_after_are_missed() -> None:
    row = compared(timing(QUIET), timing([20.0]))
    assert (row.call, row.regression) == ("AMBIGUOUS", True), "one sample is no way around a regression"
    assert row.sentence == "there are too few samples to say anything; there were enough before"
    assert not compared(timing([20.0]), timing(QUIET)).regression, "more is known than before"


def test_times_of_two_methods_say_so() -> None:
    row = compared(timing(QUIET), timing(QUIET).model_copy(update={"method": "events"}))
    assert row.sentence.endswith("; timed by graph before, by events after"), row.sentence


def test_the_threshold_is_that_of_the_spec() -> None:
    slower = QUIET[::-1] * 1.1
    assert compared(timing(QUIET), timing(slower)).call == "SLOWER"
    lenient = Thresholds(0.02, (Override(0.2, "a test", where={"hd": (64,)}, temperature="cold"),))
    specs = {"fmha": replace(SPECS["fmha"], thresholds=lenient)}
    for temperature, call in (("cold", "SAME"), ("hot", "SLOWER")):
        before, after = timing(QUIET), timing(slower)
        old, new = (side(header(), one.model_copy(update={"temperature": temperature})) for one in (before, after))
        row = only(compare_runs(old, new, specs))
        assert row.call == call, f"the threshold at {temperature} is {row.threshold}"


def test_a_case_that_no_spec_knows_has_the_default_threshold() -> None:
    for case in ("unheard:of=1", "fmha:no_such_axis=1"):
        row = compared(timing(QUIET, case=case), timing(QUIET, case=case))
        assert (row.call, row.threshold is not None) == ("SAME", True)


@pytest.mark.parametrize("before", STATUSES)
@pytest.mark.parametrize("after", STATUSES)
def test_every_change_of_a_status_but_to_passed_is_a_regression(before: Status, after: Status) -> None:
    for lines in ((record(before), record(after)), (timing(QUIET, status=before), timing(QUIET, status=after))):
        row = compared(*lines)
        if before == after:
            assert row.call == "SAME"
        else:
            assert row.call == "STATUS-CHANGED"
            assert row.regression == (after != "passed"), f"{before} -> {after}"
            assert (row.before_status, row.after_status) == (before, after)


def test_a_row_that_is_gone_is_a_regression_and_a_new_one_is_not() -> None:
    both, old, new = record(), record(schedule="lazy"), record(schedule="random:1")
    comparison = compare_runs(side(both, old), side(both, new), SPECS)
    calls = {row.key.variant: (row.call, row.regression) for row in comparison.rows}
    assert calls == {"eager": ("SAME", False), "lazy": ("MISSING", True), "random:1": ("NEW", False)}
    assert comparison.rows[0].call == "MISSING", "the most severe comes first"


@pytest.mark.parametrize(
    ("before", "after", "call"),
    [
        ({"mma_flops": 10}, {"mma_flops": 10}, "SAME"),
        ({"mma_flops": 10}, {"mma_flops": 11}, "WORSE"),
        ({"mma_flops": 11}, {"mma_flops": 10}, "BETTER"),
        ({"useful_flops": 10}, {"useful_flops": 11}, "CHANGED"),
        ({"mma_flops": 10, "tma_loads": 5}, {"mma_flops": 9, "tma_loads": 6}, "WORSE"),
        ({"mma_flops": 10}, {}, "WORSE"),
        ({"mma_flops": 10}, {"mma_flops": 10, "smem_bank_conflicts": 1}, "WORSE"),
    ],
)
def test_counters_are_exact(before: dict[str, int], after: dict[str, int], call: str) -> None:
    row = compared(record("passed", before), record("passed", after))
    assert (row.call, row.regression) == (call, call == "WORSE")
    assert {change.name for change in row.changes} == {
        name for name in {**before, **after} if before.get(name) != after.get(name)
    }


def test_counters_of_what_did_not_pass_mean_nothing() -> None:
    row = compared(record("failed", {"mma_flops": 1}), record("failed", {"mma_flops": 2}))
    assert (row.call, row.sentence) == ("SAME", "failed on both sides")


def test_counters_of_other_inputs_are_not_compared() -> None:
    row = compared(
        record("passed", {"tma_loads": 1}, inputs={"q": "a"}), record("passed", {"tma_loads": 2}, inputs={"q": "b"})
    )
    assert (row.call, row.changes) == ("CHANGED", ()), "what was not compared is not called the same"
    assert "inputs are not the same" in row.sentence


@pytest.mark.parametrize("last", ["worse", "same"])
def test_no_line_of_a_row_hides_what_got_worse_in_another(last: str) -> None:
    for good, bad in (
        (record("passed", {"tma_loads": 1}), record("passed", {"tma_loads": 2})),
        (figures(128), figures(168)),
    ):
        after = (good, bad) if last == "worse" else (bad, good)
        row = only(compare_runs(side(header(), good), side(header(), *after), SPECS))
        assert (row.call, row.regression) == ("WORSE", True), f"{row}: the line after it hides the regression"


def _passed(flops: int, inputs: str = "a") -> AnyLine:
    return record("passed", {"mma_flops": flops}, inputs={"q": inputs})


@pytest.mark.parametrize(
    ("before", "after", "call"),
    [
        ((_passed(10), record("not_run")), (_passed(20), record("not_run")), "WORSE"),
        ((_passed(10), record("failed")), (_passed(20), record("failed")), "WORSE"),
        ((_passed(10), record("failed")), (_passed(20),), "WORSE"),
        ((_passed(10), record("not_run")), (record("not_run"),), "STATUS-CHANGED"),
        ((_passed(10), record("failed")), (record("failed"),), "STATUS-CHANGED"),
        ((_passed(10), _passed(20)), (_passed(20),), "WORSE"),
        ((_passed(10), _passed(20)), (_passed(15),), "WORSE"),
        ((_passed(10), _passed(5, "b")), (_passed(10), _passed(6, "b")), "WORSE"),
        ((_passed(10), _passed(5, "b")), (_passed(11), _passed(5, "b")), "WORSE"),
        ((figures(128), figures(168)), (figures(168),), "WORSE"),
        ((timing(QUIET), timing([], status="error")), (timing(QUIET * 1.5), timing([], status="error")), "SLOWER"),
        ((timing(QUIET), timing([], status="error")), (timing(QUIET * 1.5),), "SLOWER"),
        ((timing(QUIET), timing([], status="error")), (timing([], status="error"),), "STATUS-CHANGED"),
    ],
)
@given(st.data())
@settings(max_examples=6)
def test_no_line_of_either_side_hides_what_got_worse(
    before: tuple[AnyLine, ...], after: tuple[AnyLine, ...], call: str, data: st.DataObject
) -> None:
    """A status shared by both sides hides nothing, nor does an old line that a newer one follows."""
    old, new = (
        side(*(header(f"run-{i}") for i in range(2)), *_of_runs(data.draw(st.permutations(lines))))
        for lines in (before, after)
    )
    row = only(compare_runs(old, new, SPECS))
    assert (row.call, row.regression) == (call, True), f"{row.sentence}: the regression is hidden"
    for one in (old, new):
        assert compare_runs(one, one, SPECS).counts == {"SAME": 1}, "a side is the same as itself"


def _of_runs(lines: Sequence[AnyLine]) -> list[AnyLine]:
    return [line.model_copy(update={"run": f"run-{i}"}) for i, line in enumerate(lines)]


def test_two_headers_of_one_run_that_differ_are_refused() -> None:
    other = header().model_copy(update={"git_revision": "def", "megamoe": "9"})
    twice = side(header(), other, record(), label="a.jsonl")
    for before, after in ((twice, side(header(), record())), (side(header(), record()), twice)):
        with pytest.raises(
            ComparisonError, match=r"a\.jsonl, line 2: run run-1 .* git_revision and megamoe;.* line 1\."
        ):
            compare_runs(before, after, SPECS)
    same = side(header(), header(), record())
    assert compare_runs(same, same, SPECS).counts == {"SAME": 1}, "the same header twice says one thing"


def test_a_side_may_hold_rows_of_several_machines() -> None:
    both = side(
        header(), timing(QUIET), header("run-2", software={"triton": "3.9"}), timing(QUIET, backend="peer", run="run-2")
    )
    assert compare_runs(both, both, SPECS).counts == {"SAME": 2}, "each row is of one machine"


@pytest.mark.parametrize("new", ["error", "crashed", "not_run"])
def test_a_status_that_was_not_there_before_is_not_hidden_by_a_worse_one(new: Status) -> None:
    for after in ((record("failed"), record(new)), (record(new), record("failed"))):
        row = only(compare_runs(side(record("failed")), side(*after), SPECS))
        assert (row.call, row.after_status, row.regression) == ("STATUS-CHANGED", new, True)
        assert compare_runs(side(*after), side(*after), SPECS).counts == {"SAME": 1}


def test_the_only_kernel_of_a_program_may_be_renamed() -> None:
    renamed = figures(128).model_copy(update={"kernels": {"fmha_whole": {"registers": 128, "spill_bytes": 0}}})
    assert compared(figures(128), renamed).call == "SAME"
    assert compared(figures(120), renamed).sentence.startswith("fmha_whole.registers 120 -> 128")


def test_figures_are_exact() -> None:
    row = compared(figures(128), figures(168))
    assert (row.call, row.regression) == ("WORSE", True)
    assert row.sentence == "fmha_split.registers 128 -> 168 (+31.2%)"
    assert compared(figures(168), figures(128)).call == "BETTER"
    assert compared(figures(168), figures(168)).call == "SAME"


def test_whether_the_program_is_the_same_is_said() -> None:
    assert compared(record(program="a"), record(program="a")).same_program is True
    assert compared(record(program="a"), record(program="b")).same_program is False
    assert compared(record(), record(program="b")).same_program is None


def test_of_several_lines_of_a_row_the_worst_counts() -> None:
    row = only(compare_runs(side(record()), side(record("failed"), record()), SPECS))
    assert row.regression, "a row that failed once did not pass"
    two_runs = side(header(), timing(QUIET), header("run-2"), timing(QUIET, run="run-2"))
    row = only(compare_runs(two_runs, side(header(), timing(QUIET)), SPECS))
    assert row.samples == (200, 100), "samples of several lines of a row belong together"


@pytest.mark.parametrize("slow", [0, 4, 9])
def test_copies_of_a_good_time_cannot_drown_a_slow_one(slow: int) -> None:
    """Ten lines of one run, one of them slow: the side is refused, wherever the slow line is."""
    lines = [timing(QUIET * (1.5 if i == slow else 1.0)) for i in range(10)]
    copied, sound = side(header(), *lines), side(header(), timing(QUIET))
    for before, after in ((sound, copied), (copied, sound)):
        with pytest.raises(ComparisonError, match=r"side, line 3: run run-1 has a second time of fmha.* line 2\."):
            compare_runs(before, after, SPECS)


def test_a_file_that_is_twice_in_a_side_is_refused_if_it_has_times() -> None:
    one, other = side(header(), timing(QUIET), label="a.jsonl"), side(header(), timing(QUIET), label="b.jsonl")
    both = Side("folder", (*one.files, *other.files))
    with pytest.raises(ComparisonError, match=r"b\.jsonl, line 2: .*; the first is at a\.jsonl, line 2\."):
        compare_runs(one, both, SPECS)
    with pytest.raises(ComparisonError, match=r"a\.jsonl, line 2: .*; the first is at a\.jsonl, line 2\."):
        compare_runs(one, Side("a, a", one.files * 2), SPECS)
    cold_and_hot = side(header(), timing(QUIET), timing(QUIET, temperature="hot"), timing(QUIET, backend="peer"))
    assert compare_runs(cold_and_hot, cold_and_hot, SPECS).counts == {"SAME": 3}, "other rows, other temperatures"


@pytest.mark.parametrize(
    ("device", "software", "complaint"),
    [
        ({"name": "NVIDIA H100"}, {}, "device name: NVIDIA H200 before, NVIDIA H100 after"),
        ({"driver": "590.1"}, {}, "device driver: 580.65 before, 590.1 after"),
        ({"toolkit": "13.1"}, {}, "device toolkit: 13.0 before, 13.1 after"),
        ({"power_limit_w": 500.0}, {}, "device power_limit_w"),
        ({}, {"triton": "3.9"}, "triton: none before, 3.9 after"),
    ],
)
def test_other_machines_are_refused_unless_asked_for(
    device: dict[str, object], software: dict[str, str], complaint: str
) -> None:
    other = header(device=H200.model_copy(update=device), software=software)
    before, after = side(header(), timing(QUIET)), side(other, timing(QUIET))
    with pytest.raises(ComparisonError, match=complaint) as refusal:
        compare_runs(before, after, SPECS)
    assert "add --across" in str(refusal.value)
    comparison = compare_runs(before, after, SPECS, across=True)
    assert any(complaint in sentence for sentence in comparison.across), "it must be labelled"
    assert complaint in as_markdown(comparison)


def test_clocks_as_found_are_no_other_machine() -> None:
    idle = header(device=H200.model_copy(update={"sm_clock_mhz": 345, "copy_bytes_per_s": 4.1e12}))
    assert compare_runs(side(header(), timing(QUIET)), side(idle, timing(QUIET)), SPECS).across == ()


def test_a_side_of_two_machines_is_refused() -> None:
    mixed = side(
        header("run-1"), header("run-2", H200.model_copy(update={"name": "NVIDIA H100"})),
        timing(QUIET, run="run-1"), timing(QUIET, run="run-2"),
    )  # fmt: skip
    with pytest.raises(ComparisonError, match="NVIDIA H100 and NVIDIA H200"):
        compare_runs(mixed, mixed, SPECS)


def test_a_time_of_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ComparisonError, match="no header of run run-1"):
        compare_runs(side(header(), timing(QUIET)), side(timing(QUIET)), SPECS)


def test_verdicts_and_counters_depend_on_no_machine() -> None:
    other = header(device=None)
    assert compare_runs(side(header(), record()), side(other, record()), SPECS).across == ()


def test_other_assemblers_are_refused() -> None:
    with pytest.raises(ComparisonError, match=r"assembler ptxas: ptxas 13\.5 before, ptxas 13\.6 after"):
        compared(figures(128), figures(128, "ptxas 13.6"))
    assert compared(figures(128), figures(129, "ptxas 13.6"), across=True).call == "WORSE"


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ((), (record(),), "side holds no row"),
        ((record(),), (header(),), "side holds no row"),
        ((record(),), (record(backend="cutedsl"),), "no row is in both"),
        ((record(),), (timing(QUIET),), "no row is in both"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    before: tuple[AnyLine, ...], after: tuple[AnyLine, ...], complaint: str
) -> None:
    with pytest.raises(ComparisonError, match=complaint):
        compare_runs(side(*before), side(*after), SPECS)


def test_only_some_rows() -> None:
    before = side(header(), record(), record(backend="cutedsl"), timing(QUIET))
    comparison = compare_runs(before, side(header(), record(), timing(QUIET)), SPECS, only=["*on ptx*(verdict)"])
    assert [row.key.kind for row in comparison.rows] == ["verdict"]
    with pytest.raises(ComparisonError, match="that 'nothing' matches"):
        compare_runs(before, before, SPECS, only=["nothing"])


def test_a_torn_file_is_noted(tmp_path: Path) -> None:
    torn = side(record())
    torn = replace(torn, files=(replace(torn.files[0], torn="line 2 is torn"),))
    assert compare_runs(torn, side(record()), SPECS).notes == ("line 2 is torn",)


KEYS = [(backend, schedule) for backend in ("cutedsl", "ptx", "peer") for schedule in ("eager", "lazy")]
FAULTS: dict[str, tuple[str, AnyLine | None]] = {
    "gone": ("MISSING", None),
    "wrong": ("STATUS-CHANGED", record("failed")),
    "not run": ("STATUS-CHANGED", record("not_run")),
    "more work": ("WORSE", record("passed", {"mma_flops": 11, "tma_loads": 3})),
    "a cost more": ("WORSE", record("passed", {"mma_flops": 10, "tma_loads": 3, "smem_bank_conflicts": 1})),
    "not counted": ("WORSE", record("passed", {"tma_loads": 3})),
    "slower": ("SLOWER", timing(QUIET * 1.1)),
    "no time": ("STATUS-CHANGED", timing(QUIET, status="error")),
}


def _rows() -> list[AnyLine]:
    """For every key, a verdict with counters, and a time."""
    rows: list[AnyLine] = []
    for backend, schedule in KEYS:
        rows.append(record("passed", {"mma_flops": 10, "tma_loads": 3}, backend=backend, schedule=schedule))
        rows.append(timing(QUIET, backend=backend, temperature="cold" if schedule == "eager" else "hot"))
    return rows


@pytest.mark.parametrize("fault", FAULTS)
@given(st.data())
@settings(max_examples=15)
def test_one_regression_among_many_rows_is_found(fault: str, data: st.DataObject) -> None:
    """Holds for any place of the fault, any order of the lines, and an improved row elsewhere."""
    call, planted = FAULTS[fault]
    before = _rows()
    places = [i for i, line in enumerate(before) if planted is None or line.kind == planted.kind]
    place = data.draw(st.sampled_from(places))
    after = [line for i, line in enumerate(before) if i != place]
    if planted is not None:
        names = {"backend", "schedule"} if planted.kind == "record" else {"backend", "temperature"}
        after.append(planted.model_copy(update={name: getattr(before[place], name) for name in names}))
    after.append(record("passed", {"mma_flops": 1}, backend="new"))
    comparison = compare_runs(side(header(), *before), side(header(), *data.draw(st.permutations(after))), SPECS)
    assert [row.call for row in comparison.regressions] == [call]
    assert comparison.rows[0].regression, "it comes first"
    assert comparison.exit_status() == 1
    assert comparison.counts["NEW"] == 1


@given(st.permutations(_rows()))
@settings(max_examples=15)
def test_a_run_is_the_same_as_itself_in_any_order(lines: list[AnyLine]) -> None:
    comparison = compare_runs(side(header(), *_rows()), side(header(), *lines), SPECS)
    assert comparison.counts == {"SAME": len(lines)}
    assert comparison.exit_status(strict=True) == 0


def _row(low: float, ratio: float, high: float) -> ComparedRow:
    key = Key("timing", CASE, "ptx", "sm_90a", "gpu", temperature="cold")
    return ComparedRow(key, "SAME", ratio=ratio, low=low, high=high, threshold=0.02)


@pytest.mark.parametrize(
    ("low", "ratio", "high"),
    [(0.99, 1.0, 1.01), (1.0, 1.0, 1.0), (0.0, 1.0, np.inf), (3.0, 4.0, 5.0), (0.1, 0.2, 0.3), (0.9, 1.2, 9.0)],
)
def test_a_forest_plot_keeps_its_width_and_points_the_right_way(low: float, ratio: float, high: float) -> None:
    row = _row(low, ratio, high)
    for span in (forest_span([row]), 0.05):
        line = forest(row, span)
        assert len(line) == FOREST_WIDTH
        dot = line.find("●")
        if dot >= 0 and ratio not in (0.99, 1.0, 1.01):
            assert (dot > FOREST_WIDTH // 2) == (ratio > 1), f"{ratio} is drawn as {line!r}"
        if high > 1 + span * 1.1:
            assert line.endswith("►"), "an interval that goes on must say so"
        if low < 1 - span * 1.1:
            assert line.startswith("◄")


def test_json_has_everything_and_no_infinity() -> None:
    comparison = compare_runs(
        side(header(), timing([10.0]), record("passed", {"mma_flops": 1})),
        side(header(), timing([11.0]), record("passed", {"mma_flops": 2})),
        SPECS,
    )
    found = as_json(comparison)
    assert found["exit_status"] == 1
    assert found["counts"] == {"WORSE": 1, "AMBIGUOUS": 1}
    rows = found["rows"]
    assert isinstance(rows, list)
    by_call = {row["call"]: row for row in rows}
    assert by_call["AMBIGUOUS"]["high"] is None, "infinity is not JSON"
    assert by_call["WORSE"]["changes"] == [{"name": "mma_flops", "before": 1, "after": 2, "trend": "worse"}]


def test_markdown_cannot_be_broken_by_what_a_sentence_says() -> None:
    bad = record("failed").model_copy(update={"sentence": "o | `x`\n<script>"})
    text = as_markdown(compare_runs(side(record()), side(bad), SPECS))
    (line,) = [line for line in text.splitlines() if "STATUS-CHANGED" in line and line.startswith("|")]
    assert line.replace("\\|", "").count("|") == 5, f"a table row has four cells: {line}"
    assert "<script>" not in text


def test_the_severity_of_every_call_is_known() -> None:
    assert set(CALLS) >= {"FASTER", "SLOWER", "SAME", "AMBIGUOUS", "MISSING", "NEW", "STATUS-CHANGED"}

"""The gate fails closed, and an open gate says how much it compared with which baseline."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from conformance import ROOT
from conformance.fakes.results import (
    CASE,
    COUNTERS,
    KERNEL,
    NEIGHBOUR,
    OTHER,
    ROW,
    baseline,
    compiled,
    expectation,
    gated,
    judged,
)
from megamoe.cli.main import main
from megamoe.contract import Row, Status
from megamoe.gate.baseline import VM_BASELINE, Baseline
from megamoe.gate.expected import ExpectedError, read_expected, stale_entries
from megamoe.gate.verdict import Finding, judge_run, open_line
from megamoe.records.files import RecordWriter
from megamoe.records.lines import Figures, Record, record_of
from megamoe.spec.load import load_specs
from megamoe.spec.spec import Spec

TODAY = date(2026, 1, 15)


@pytest.fixture(scope="module")
def specs() -> dict[str, Spec]:
    return load_specs()


def _record(row: Row, status: Status) -> Record:
    return record_of("run-1", row, status, "" if status == "passed" else "something is off")


def test_all_passed_opens_the_gate() -> None:
    verdict = judge_run([ROW, NEIGHBOUR], [_record(ROW, "passed"), _record(NEIGHBOUR, "passed")])
    assert verdict.passed
    assert verdict.line == "2 passed, 0 failed"


@pytest.mark.parametrize("status", ["failed", "error", "crashed", "timed_out", "unsupported", "not_run"])
def test_any_other_status_closes_it(status: Status) -> None:
    verdict = judge_run([ROW, NEIGHBOUR], [_record(ROW, status), _record(NEIGHBOUR, "passed")])
    assert not verdict.passed, f"{status} must close the gate"
    assert len(verdict.problems) == 1, "the neighbour row is no problem"
    assert verdict.problems[0].startswith(f"{status}: something is off. Rerun: megamoe run --case {CASE} ")


def test_a_missing_row_closes_it() -> None:
    verdict = judge_run([ROW, NEIGHBOUR], [_record(ROW, "passed")])
    assert not verdict.passed
    assert verdict.missing == 1
    assert f"there is no record of {OTHER} on ptx sm_100a vm eager" in verdict.problems[0]


def test_the_command_for_a_missing_row_names_the_specs_that_were_given() -> None:
    (problem,) = judge_run([ROW], [], specs=Path("my specs")).problems
    assert problem.endswith(f"Rerun: {ROW.rerun} --specs 'my specs'")


def test_nothing_owed_closes_it() -> None:
    assert not judge_run([], []).passed, "a run of nothing proves nothing"


@pytest.mark.parametrize("expected", ["error", "crashed", "timed_out", "unsupported"])
@pytest.mark.parametrize("failed_first", [True, False])
def test_an_expected_status_hides_no_other_record_of_the_row(expected: Status, failed_first: bool) -> None:
    records = [_record(ROW, "failed"), _record(ROW, expected)]
    verdict = judge_run([ROW], records if failed_first else records[::-1], [expectation(status=expected)])
    (problem,) = verdict.problems
    assert f"is expected to be {expected} but is failed" in problem
    assert not verdict.excused, "a row that also failed otherwise is not excused"


def test_a_pass_does_not_hide_behind_an_expected_failure() -> None:
    for order in (["passed", "failed"], ["failed", "passed"]):
        verdict = judge_run([ROW], [_record(ROW, status) for status in order], [expectation()])  # pyright: ignore[reportArgumentType]
        assert not verdict.passed, f"{order}: a row that passes now and then is not known to fail"


def test_several_records_that_say_the_same_are_one_problem() -> None:
    assert len(judge_run([ROW], [_record(ROW, "failed")] * 3).problems) == 1


def test_the_worst_of_several_records_counts() -> None:
    for order in (["passed", "failed"], ["failed", "passed"]):
        verdict = judge_run([ROW], [_record(ROW, status) for status in order])  # pyright: ignore[reportArgumentType]
        assert not verdict.passed, f"{order}: a later pass must not hide a failure"


def test_a_record_that_was_not_owed_counts_unless_it_passed() -> None:
    owed = [_record(ROW, "passed")]
    assert judge_run([ROW], [*owed, _record(NEIGHBOUR, "passed")]).passed
    assert not judge_run([ROW], [*owed, _record(NEIGHBOUR, "crashed")]).passed


def test_an_expected_failure_opens_it_and_is_counted() -> None:
    verdict = judge_run([ROW], [_record(ROW, "failed")], [expectation()])
    assert verdict.passed
    assert verdict.line == "0 passed, 1 failed, 1 of these as expected"


@pytest.mark.parametrize("status", ["passed", "crashed", "unsupported"])
def test_an_expected_failure_that_turns_out_otherwise_closes_it(status: Status) -> None:
    verdict = judge_run([ROW], [_record(ROW, status)], [expectation()])
    assert not verdict.passed, f"expected failed, was {status}"
    assert "expected.yaml, line 3" in verdict.problems[0]


def test_an_expectation_holds_for_its_own_row_only() -> None:
    for change in ({"backend": "other"}, {"target": "sm_90a"}, {"executor": "gpu"}, {"schedule": "lazy"}):
        verdict = judge_run([ROW], [_record(ROW, "failed")], [expectation(**change)])
        assert not verdict.passed, f"{change} is another row"


def test_two_entries_that_disagree_about_one_row_close_it() -> None:
    for status in ("failed", "unsupported"):
        entries = [expectation(), expectation(case="fmha:*", status="unsupported")]
        verdict = judge_run([ROW], [_record(ROW, status)], entries)
        assert not verdict.passed, f"{status} is what one entry says, and the other something else"
        assert "both speak about" in verdict.problems[0]


def test_a_row_may_be_expected_for_two_reasons() -> None:
    """A backend that supports neither sinks nor sequence lengths refuses a row with both."""
    entries = [expectation(), expectation(case="fmha:*")]
    assert judge_run([ROW], [_record(ROW, "failed")], entries).passed, "both entries say that it fails"
    assert not judge_run([ROW], [_record(ROW, "passed")], entries).passed, "both are wrong about a row that passes"


def test_a_missing_record_is_missing_even_if_a_failure_is_expected() -> None:
    assert not judge_run([ROW], [], [expectation()]).passed


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"expires": date(2026, 1, 14)}, "expired on 2026-01-14"),
        ({"expires": date(2026, 1, 15)}, None),
        ({"expires": date(2026, 7, 14)}, None),
        (
            {"expires": date(2026, 7, 15)},
            "expires on 2026-07-15, more than 180 days from now; 2026-07-14 is the latest",
        ),
        ({"case": "fmha:hd=64,t=1,s_k=12*", "example": "fmha:hd=64,t=1,s_k=129"}, None),
        ({"case": "fmha:hd=64,t=79*", "example": "fmha:hd=64,t=79,s_k=9"}, "matches no case of any matrix"),
        ({"case": "fmha:*", "example": "fmha:hd=65,t=1,s_k=1"}, "the example is not a case"),
        ({"case": "nsa:*", "example": "nsa:hd=64"}, "the example is not a case"),
        ({"executor": "gqu"}, "there is no executor 'gqu'"),
        ({"backend": "pxt"}, "there is no backend 'pxt'"),
        ({"schedule": "rnadom:*"}, "no schedule matches 'rnadom:*'"),
        ({"schedule": "random:*"}, None),
    ],
)
def test_a_stale_entry_is_a_sentence(specs: dict[str, Spec], changes: dict[str, object], complaint: str | None) -> None:
    sentences = stale_entries([expectation(**changes)], specs, TODAY)
    assert len(sentences) == (complaint is not None)
    assert all(complaint and complaint in sentence for sentence in sentences)


def test_a_stale_entry_closes_the_gate() -> None:
    assert not judge_run([ROW], [_record(ROW, "passed")], stale=["expected.yaml, line 3: ..."]).passed


GOOD = """\
expected:
  - case: "fmha:hd=64,*"
    backend: ptx
    target: sm_90a
    executor: vm
    status: unsupported
    reason: no wgmma kernel yet
    expires: 2026-03-01
    example: "fmha:hd=64,t=1,s_k=128"
"""


def test_entries_are_read_with_their_lines(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text(GOOD)
    (found,) = read_expected(tmp_path / "e.yaml")
    assert found.where.endswith("e.yaml, line 2")
    assert found.entry.expires == date(2026, 3, 1)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("executor: vm", "executer: vm", "line 5, key 'executer'|key 'executor'"),
        ("status: unsupported", "status: passed", "line 6, key 'status'"),
        ("target: sm_90a", "target: sm_80", "line 4, key 'target'"),
        ("expires: 2026-03-01", "expires: soon", "line 8, key 'expires'"),
        ("    reason: no wgmma kernel yet\n", "", "key 'reason'"),
        ("no wgmma kernel yet", "todo", "line 7, key 'reason'"),
        ('example: "fmha:hd=64', 'example: "fmha:hd=128', "does not match the case"),
        ("backend: ptx", "backend: ptx\n    backend: ptx", "is given twice, first in line 3"),
        ("expected:", "expects:", "must hold one key"),
        (GOOD, "expected: 3", "must be a list"),
        (GOOD, "expected: [3]", "an entry must be a mapping"),
        (GOOD, "expected: [", "is not acceptable YAML"),
        (GOOD, "", "must hold one key"),
        ("reason: no", "reason: !!python/object/apply:os.getcwd []\n    why: no", "e.yaml:7: .* tag"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in GOOD, "the planted fault must change the file"
    (tmp_path / "e.yaml").write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ExpectedError, match=complaint):
        read_expected(tmp_path / "e.yaml")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExpectedError, match=r"cannot read .*: there is no such file"):
        read_expected(tmp_path / "none.yaml")


def test_our_own_file_is_not_stale(specs: dict[str, Spec]) -> None:
    ours = (ROOT / "conformance") / "expected.yaml"
    assert stale_entries(read_expected(ours), specs, date.today()) == ()


LINES = (judged(ROW), compiled(ROW), judged(NEIGHBOUR), compiled(NEIGHBOUR))
OWED = ["--case", ROW.case, "--case", NEIGHBOUR.case, "--backend", "ptx", "--target", "sm_100a"]
GATE = ["gate", "run.jsonl", *OWED, "--baseline", "base.jsonl"]
ACCEPT = ["accept", "--from", "run.jsonl", "--baseline", "base.jsonl", "--reason", "first", "--all-of", "*"]
ALL = f"2 rows, {2 * len(COUNTERS)} counters and {2 * len(KERNEL)} compiler figures"


def _said(held: Baseline | None, *lines: Record | Figures, finding: Finding | None = None) -> str:
    records = [line for line in lines if isinstance(line, Record)]
    programs = [line for line in lines if isinstance(line, Figures)]
    verdict = judge_run([ROW, NEIGHBOUR], records).with_findings([finding] if finding else [])
    return open_line(verdict, held, records, programs)


def test_it_counts_what_was_compared() -> None:
    held = baseline(*LINES)
    assert _said(held, *LINES) == f"the gate is open: {ALL} are as in baseline.jsonl"
    assert _said(held, *LINES, *LINES) == _said(held, *LINES), "a line that is there twice counts once"
    one = f"1 row, {len(COUNTERS)} counters and {len(KERNEL)} compiler figures are as in baseline.jsonl"
    more = "; 1 row passed without a line there"
    assert _said(baseline(*LINES[:2]), *LINES) == f"the gate is open: {one}{more}", "what has no line was not compared"


def test_it_does_not_say_alike_of_what_differs_or_of_nothing() -> None:
    asked = Finding("renew", "better: fewer", ROW, closes=False)
    said = _said(baseline(*LINES), *LINES, finding=asked)
    assert said == f"the gate is open: {ALL} were held against baseline.jsonl, see what differs above"
    assert _said(None, *LINES) == "the gate is open: 2 rows passed, held against no baseline"


def test_our_baseline_is_named_by_its_place_in_the_repository() -> None:
    assert _said(baseline(*LINES, path=VM_BASELINE), *LINES).endswith("are as in results/baselines/vm.jsonl")


def test_the_command_says_it_of_an_open_gate_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(*LINES)
    assert main(ACCEPT) == 0
    capsys.readouterr()
    assert main(GATE) == 0
    assert f"the gate is open: {ALL} are as in base.jsonl\n" in capsys.readouterr().out
    _write(judged(ROW, {**COUNTERS, "mma_flops": 8192}), *LINES[1:])
    assert main(GATE) == 1
    assert "the gate is open" not in capsys.readouterr().out


def _write(*lines: Record | Figures) -> None:
    Path("run.jsonl").unlink(missing_ok=True)
    with RecordWriter(Path("run.jsonl")) as writer:
        for line in (gated(), *lines):
            writer.append(line)

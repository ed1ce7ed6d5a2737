"""`megamoe gate` and `megamoe accept` on the command line: faults close the gate, acceptance opens it."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from datetime import date, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conformance import ROOT
from conformance.fakes import backends as fake_backends
from conformance.fakes.results import (
    COUNTERS,
    H200,
    KERNEL,
    NEIGHBOUR,
    ROW,
    compiled,
    gated,
    judged,
)
from megamoe.cli.main import main
from megamoe.cli.options import EXPECTED
from megamoe.contract import Row, Status, Temperature
from megamoe.gate.accept import glob_of
from megamoe.gate.baseline import read_baseline
from megamoe.records.files import RecordWriter
from megamoe.records.lines import Figures, Record, RunHeader, Timing

FAKE = fake_backends.__name__
OWED = ["--case", ROW.case, "--case", NEIGHBOUR.case, "--backend", "ptx", "--target", "sm_100a"]
GATE = ["gate", "run.jsonl", *OWED, "--baseline", "base.jsonl"]
ACCEPT = ["accept", "--from", "run.jsonl", "--baseline", "base.jsonl", "--reason", "the tiles are larger now"]
GOOD = (judged(ROW), compiled(ROW), judged(NEIGHBOUR), compiled(NEIGHBOUR))
WORSE = {**COUNTERS, "mma_flops": 8192}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _check_out(revision: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked_out(folder: Path) -> str | None:
        return revision

    monkeypatch.setattr("megamoe.cli.gate.git_revision", checked_out)


def _run_of(
    *lines: Record | Figures | RunHeader,
    path: str = "run.jsonl",
    specs: Path | None = None,
    expected: Path | None = None,
) -> None:
    Path(path).unlink(missing_ok=True)
    with RecordWriter(Path(path)) as writer:
        for line in (gated(specs=specs, expected=expected), *lines):
            writer.append(line)


def _timing(row: Row, temperature: Temperature) -> Timing:
    return Timing(
        run="run-7",
        case=row.case,
        op=row.op,
        backend=row.backend,
        target=row.target,
        executor=row.executor,
        temperature=temperature,
        method="graph",
        status="passed",
        sentence="",
        samples_us=(9.0, 10.0),
        rounds=(0, 0),
    )


def _accept_all(*lines: Record | Figures) -> None:
    _run_of(*lines)
    assert main([*ACCEPT, "--all-of", "*"]) == 0


def _printed_command(out: str, reason: str) -> list[str]:
    """The command that the gate prints, with its dots replaced by a reason."""
    (command,) = {line.partition("Accept it on purpose: ")[2] for line in out.splitlines() if "on purpose: " in line}
    words = shlex.split(command)
    assert words[0] == "megamoe"
    assert "..." in words
    return [reason if word == "..." else word for word in words[1:]]


def test_the_same_run_again_opens_the_gate(capsys: pytest.CaptureFixture[str]) -> None:
    _accept_all(*GOOD)
    assert main(GATE) == 0
    assert "2 passed, 0 failed\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((judged(ROW, WORSE), *GOOD[1:]), f"regressed: {ROW}: mma_flops 4096 -> 8192 (+100.0%)"),
        ((GOOD[0], compiled(ROW, {**KERNEL, "spill_bytes": 16}), *GOOD[2:]), "spill_bytes 0 -> 16"),
        (GOOD[2:], f"missing: there is no record of {ROW}"),
        ((GOOD[0], *GOOD[2:]), "no compiler figures: the baseline has those of"),
        ((judged(ROW, status="failed"), *GOOD[1:]), "failed, which passed in the baseline: the outputs are wrong"),
        ((judged(ROW, status="unsupported"), *GOOD[1:]), "unsupported, which passed in the baseline"),
    ],
)
def test_each_planted_fault_closes_the_gate(
    lines: Sequence[Record | Figures], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _accept_all(*GOOD)
    _run_of(*lines)
    assert main(GATE) == 1
    assert said in capsys.readouterr().out


def test_the_command_that_is_printed_accepts_the_change(capsys: pytest.CaptureFixture[str]) -> None:
    _accept_all(*GOOD)
    _run_of(judged(ROW, WORSE), *GOOD[1:])
    capsys.readouterr()
    assert main(GATE) == 1
    command = _printed_command(capsys.readouterr().out, "two more tiles hide the latency")
    assert main(command) == 0
    assert f"accepted: {ROW}: mma_flops 4096 -> 8192" in capsys.readouterr().out
    assert main(GATE) == 0
    (*_, last) = read_baseline(Path("base.jsonl")).acceptances
    assert (last.row, last.reason) == (str(ROW), "two more tiles hide the latency")
    assert last.changes == {"mma_flops": "4096 -> 8192"}


def test_what_accepts_all_at_once_accepts_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    """A glob of every case would also take out of the baseline what some other change left without an owner."""
    Path("base.jsonl").touch()
    _run_of(*GOOD)
    assert main(GATE) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("All of these at once: "))
    assert "--all-of 'fmha:hd=64,*' " in line, line


@pytest.mark.parametrize(
    ("cases", "glob"),
    [
        (["fmha:hd=64,t=1,s_k=128"], "fmha:hd=64,t=1,s_k=128"),
        (["fmha:hd=64,t=1,s_k=128", "fmha:hd=64,t=1,s_k=128,heads=8"], "fmha:hd=64,t=1,*"),
        (["fmha:hd=64,t=1,s_k=1", "fmha:hd=64,t=17,s_k=1"], "fmha:hd=64,*"),
        (["fmha:hd=64,t=1,s_k=1", "fmha:hd=512,t=1,s_k=1"], "fmha:*"),
        (["fmha:hd=64,t=1,s_k=1", "nvfp4_moe:tokens=1"], "*"),
    ],
)
def test_a_glob_of_rows_is_narrow(cases: list[str], glob: str) -> None:
    rows = [ROW._replace(case=case) for case in cases]
    assert glob_of(rows) == glob
    assert all(fnmatchcase(case, glob) for case in cases)
    assert glob_of([*rows, *(row._replace(backend="other") for row in rows)]) == glob


def _git(*words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *who, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_acceptances_of_two_branches_merge_in_git() -> None:
    """For neighbouring rows, with their compiler figures, and for runs of two revisions."""
    _accept_all(*GOOD)
    _git("init", "-q")
    _git("add", "base.jsonl")
    _git("commit", "-qm", "both")
    changed = {ROW: "ours", NEIGHBOUR: "theirs"}
    for row, branch in changed.items():
        _git("checkout", "-q", "-b", branch, "main")
        Path("run.jsonl").unlink()
        with RecordWriter(Path("run.jsonl")) as writer:
            head = gated().model_copy(update={"git_revision": branch, "started": f"2026-11-22T18:00:0{len(branch)}"})
            for line in (head, judged(row, WORSE), compiled(row, {**KERNEL, "registers": 200})):
                writer.append(line)
        assert main([*ACCEPT, str(row)]) == 0
        _git("commit", "-qam", branch)
    _git("merge", "-q", "ours")
    merged = read_baseline(Path("base.jsonl"))
    assert all(merged.records[row].counters["mma_flops"] == WORSE["mma_flops"] for row in changed)
    assert sorted(line.row for line in merged.acceptances if "mma_flops" in line.changes) == sorted(map(str, changed))
    assert "".join(f"{line.model_dump_json()}\n" for line in merged.lines) == Path("base.jsonl").read_text()


def test_what_got_better_asks_and_strict_insists(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _check_out(gated().git_revision, monkeypatch)
    _accept_all(*GOOD)
    _run_of(judged(ROW, {**COUNTERS, "mma_flops": 2048}), *GOOD[1:])
    capsys.readouterr()
    assert main(GATE) == 0
    assert f"better: {ROW}: mma_flops 4096 -> 2048 (-50.0%)" in capsys.readouterr().out
    assert main([*GATE, "--strict"]) == 1
    assert main(_printed_command(capsys.readouterr().out, "half the tiles")) == 0
    assert main([*GATE, "--strict"]) == 0
    _run_of(*GOOD)
    assert main(GATE) == 1, "what was gained must not be lost again"


@pytest.mark.parametrize(
    ("ran", "here", "strict", "said"),
    [
        ("abc", "abc", 0, None),
        (
            "abc",
            "def",
            1,
            "run run-7 is of revision abc; checked out is def: the records are not about this code, so run it",
        ),
        (
            "abc",
            "abc+changes",
            1,
            "run run-7 is of revision abc; checked out is abc+changes: the records are not about this code",
        ),
        (None, "def", 0, "run run-7 is of revision None; checked out is def"),
        ("abc", None, 0, "run run-7 is of revision abc; checked out is None"),
        (None, None, 0, None),
    ],
)
def test_records_of_another_revision_are_noted_and_close_a_strict_gate(
    ran: str | None,
    here: str | None,
    strict: int,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An unknown revision does not count as another one: a machine without git history may run or judge."""
    _accept_all(*GOOD)
    Path("run.jsonl").unlink()
    with RecordWriter(Path("run.jsonl")) as writer:
        for line in (gated().model_copy(update={"git_revision": ran}), *GOOD):
            writer.append(line)
    _check_out(here, monkeypatch)
    capsys.readouterr()
    assert main(GATE) == 0, "without --strict it is for the reader"
    out = capsys.readouterr().out.replace("\n", " ")
    assert (said or "2 passed") in out
    assert ("is of revision" in out) == (said is not None)
    assert main([*GATE, "--strict", "--junit", "gate.xml"]) == strict
    assert (said or "2 passed") in capsys.readouterr().out.replace("\n", " ")
    assert len(list(ElementTree.parse("gate.xml").iter("failure"))) == strict, "CI reads the JUnit file"


def test_what_the_gate_prints_excuses_what_a_backend_does_not_support(capsys: pytest.CaptureFixture[str]) -> None:
    """The entries go to the file that is named, and cover no row that passes."""
    _accept_all(*GOOD[:2])
    refused = NEIGHBOUR._replace(case="fmha:hd=64,t=1,s_k=1,causal=true")
    owed = ["--case", ROW.case, "--case", refused.case, "--backend", "ptx", "--target", "sm_100a"]
    gate = ["gate", "run.jsonl", *owed, "--baseline", "base.jsonl", "--expected", "e.yaml"]
    Path("e.yaml").write_text("expected: []\n")
    _run_of(*GOOD[:2], judged(refused, status="unsupported"), expected=Path("e.yaml"))
    capsys.readouterr()
    assert main(gate) == 1
    out = capsys.readouterr().out
    assert out.endswith("the gate is closed: 1 unsupported row\n"), out
    told, _, entries = out.partition("needs an entry in e.yaml. For rows of a matrix these do:\n")
    assert entries, f"the file is not named: {told}"
    lines = [line for line in entries.splitlines() if line.startswith("  - ")]
    Path("e.yaml").write_text("expected:\n" + "\n".join(lines) + "\n")
    _run_of(*GOOD[:2], judged(refused, status="unsupported"), expected=Path("e.yaml"))
    assert main(gate) == 0, capsys.readouterr().out


def test_a_closed_gate_says_so_in_its_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    _accept_all(*GOOD)
    _run_of(judged(ROW, WORSE), compiled(ROW), judged(NEIGHBOUR, status="failed"), compiled(NEIGHBOUR))
    capsys.readouterr()
    assert main([*GATE, "--junit", "gate.xml"]) == 1
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "the gate is closed: 1 failed row, 1 regressed row"


def test_a_new_row_closes_the_gate_until_it_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    _accept_all(*GOOD[:2])
    _run_of(*GOOD)
    capsys.readouterr()
    assert main(GATE) == 1
    out = capsys.readouterr().out
    assert f"new: the baseline has no line for {NEIGHBOUR}" in out
    assert main(_printed_command(out, "a second shape")) == 0
    assert main(GATE) == 0


def test_a_row_that_nobody_owes_leaves_the_baseline_on_purpose() -> None:
    dropped = ROW._replace(case="fmha:hd=64,t=1,s_k=999")
    _accept_all(*GOOD, judged(dropped), compiled(dropped))
    _run_of(*GOOD)
    assert main([*ACCEPT, str(dropped)]) == 0
    left = read_baseline(Path("base.jsonl"))
    assert set(left.records) == {ROW, NEIGHBOUR}
    assert {key.case for key in left.figures} == {ROW.case, NEIGHBOUR.case}
    assert left.acceptances[-1].changes == {"row": "removed"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--reason", " ", str(ROW)], "says nothing"),
        (["--reason", "...", str(ROW)], "says nothing"),
        (["--reason", "x", "fmha:hd=64"], "is no row; rows are printed as CASE on BACKEND TARGET EXECUTOR SCHEDULE"),
        (["--reason", "x", str(ROW._replace(case="fmha:hd=64,t=1,s_k=7"))], "unknown row fmha:hd=64,t=1,s_k=7 on ptx"),
        (["--reason", "x", str(NEIGHBOUR)], "is failed, and only what passed is accepted: the outputs are wrong"),
        (["--reason", "x", "--all-of", "fmha:*"], "is failed, and only what passed is accepted: the outputs are wrong"),
        (["--reason", "x", "--all-of", "nsa:*"], "has a case that matches 'nsa:*'"),
        (["--reason", "x"], "name rows as the gate prints them, or give --all-of"),
        (["--reason", "x", "--all-of", "*", str(ROW)], "name rows as the gate prints them, or give --all-of"),
        (["--reason", "x", "--from", "nowhere.jsonl", str(ROW)], "cannot read records from nowhere.jsonl"),
        ([str(ROW)], "--reason"),
    ],
)
def test_what_cannot_be_accepted_is_refused_and_nothing_is_written(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _accept_all(*GOOD)
    before = Path("base.jsonl").read_bytes()
    _run_of(judged(ROW, WORSE), compiled(ROW), judged(NEIGHBOUR, status="failed"))
    capsys.readouterr()
    files = [] if "--from" in words else ["--from", "run.jsonl"]
    assert main(["accept", *files, "--baseline", "base.jsonl", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said
    assert Path("base.jsonl").read_bytes() == before


def test_what_the_baseline_says_already_is_not_accepted_again(capsys: pytest.CaptureFixture[str]) -> None:
    _accept_all(*GOOD)
    assert main([*ACCEPT, str(ROW)]) == 2
    assert "there is nothing to accept" in capsys.readouterr().err


def test_times_of_a_device_go_into_its_own_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megamoe.gate.baseline.BASELINES", tmp_path / "baselines")
    row = Row(ROW.case, "ptx", "sm_90a", "gpu", "eager")
    cold, hot = (_timing(row, temperature) for temperature in ("cold", "hot"))
    peer = judged(row._replace(backend="somebody"), {}, status="unsupported")
    with RecordWriter(Path("run.jsonl")) as writer:
        for line in (gated().model_copy(update={"device": H200}), judged(row), cold, hot, compiled(row), peer):
            writer.append(line)
    assert main(["accept", "--from", "run.jsonl", "--all-of", "*", "--reason", "the first times"]) == 0
    assert "left out, as unsupported where it was run: 1 row" in capsys.readouterr().out
    held = read_baseline(tmp_path / "baselines" / "h200.jsonl")
    assert [line.samples_us for line in held.timings.values()] == [cold.samples_us, hot.samples_us]
    assert {line.run for line in held.timings.values()} == set(held.headers), "times keep the device that took them"
    assert set(held.records) == {row}, "what a peer cannot do is no baseline"


def test_a_row_may_be_pasted_without_quotes() -> None:
    _run_of(*GOOD)
    assert main([*ACCEPT, *str(ROW).split()]) == 0
    assert set(read_baseline(Path("base.jsonl")).records) == {ROW}


def test_what_a_live_gate_prints_accepts_its_own_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Another run may end before the user has pasted the command."""
    Path("base.jsonl").touch()
    row = ["--case", ROW.case, "--backend", f"{FAKE}:WORKS", "--executor", f"{FAKE}:EXECUTOR", "--schedule", "eager"]
    assert main(["gate", *row, "--jobs", "1", "--baseline", "base.jsonl"]) == 1
    (run,) = Path("results/runs").iterdir()
    command = _printed_command(capsys.readouterr().out, "the first of its kind")
    assert command[command.index("--from") + 1] == str(run)
    _run_of(*GOOD, path="results/runs/99991231T000000.000000Z-later.jsonl")
    main(command)
    assert "there is no record of" not in capsys.readouterr().err


def test_the_newest_run_is_what_is_accepted() -> None:
    Path("results/runs").mkdir(parents=True)
    _run_of(*GOOD, path="results/runs/a.jsonl")
    assert main(["accept", "--baseline", "base.jsonl", "--reason", "the first", str(ROW)]) == 0


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "there is no baseline base.jsonl; `megamoe accept` makes one"),
        ("torn", "is torn"),
        ("{}\n", "base.jsonl, line 1"),
        (judged(ROW, status="failed").model_dump_json() + "\n", "the baseline holds fmha:hd=64,t=1,s_k=128 on ptx"),
        (2 * (judged(ROW).model_dump_json() + "\n"), "has two lines of kind record about"),
    ],
)
def test_a_baseline_that_cannot_be_used_is_a_sentence_and_status_2(
    content: str | None, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _run_of(*GOOD)
    if content is not None:
        Path("base.jsonl").write_text(content)
    assert main(GATE) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("days", "status", "said"),
    [
        (-1, "failed", "expired on"),
        (181, "failed", "more than 180 days from now"),
        (30, "passed", "is expected to be failed but passed; remove the entry"),
        (30, "crashed", "is expected to be failed but is crashed"),
        (30, "failed", None),
    ],
)
def test_an_expected_failure_holds_until_it_does_not(
    days: int, status: Status, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    _accept_all(*GOOD)
    expires = date.today() + timedelta(days=days)
    fields = f"{{case: '{ROW.case}', backend: ptx, target: sm_100a, executor: vm, status: failed, expires: {expires}"
    Path("e.yaml").write_text(f"expected:\n- {fields}, reason: the ring deadlocks, example: '{ROW.case}'}}\n")
    _run_of(judged(ROW, status=status), *GOOD[1:], expected=Path("e.yaml"))
    capsys.readouterr()
    assert main([*GATE, "--expected", "e.yaml"]) == (0 if said is None else 1)
    assert (said or "1 of these as expected") in capsys.readouterr().out


def test_without_the_tracked_file_every_row_is_new(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megamoe.cli.gate.VM_BASELINE", Path("nowhere.jsonl"))
    _run_of(*GOOD)
    assert main(["gate", "run.jsonl", *OWED]) == 1, "a baseline that was deleted must not open the gate"
    assert "2 passed, 0 failed, 1 new" in capsys.readouterr().out, "the other row is none of the smoke profile"


def test_specs_of_one_s_own_have_no_baseline_but_one_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    specs = ["--specs", str(ROOT / "specs")]
    _run_of(*GOOD)
    assert main(["gate", "run.jsonl", *OWED, *specs]) == 0
    assert main([*ACCEPT, "--all-of", "*"]) == 0
    _run_of(judged(ROW, WORSE), *GOOD[1:])
    capsys.readouterr()
    assert main([*GATE, *specs]) == 1
    assert main(_printed_command(capsys.readouterr().out, "on purpose")) == 0, "with the same specs"


def test_specs_of_one_s_own_have_no_expected_failures_but_those_that_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Our entries about an op that these specs do not describe would close the gate for everyone else's specs."""
    Path("specs").mkdir()
    Path("specs/fmha.yaml").write_text((ROOT / "specs" / "fmha.yaml").read_text())
    _run_of(*GOOD, specs=Path("specs"))
    mine = ["gate", "run.jsonl", *OWED, "--specs", "specs"]
    assert main(mine) == 0, capsys.readouterr().out
    assert main([*mine, "--expected", str(EXPECTED)]) == 1, "what is named is held"
    assert "there is no op 'nvfp4_moe'" in capsys.readouterr().out.replace("\n", " ")


def test_a_row_of_a_device_is_owed_only_if_it_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    machine = f"{FAKE}:BROKEN_MACHINE"
    asked = ["--case", ROW.case, "--backend", "ptx", "--target", "sm_100a"]
    row = ROW._replace(executor=machine)
    _run_of(*GOOD[:2])
    assert main(["gate", "run.jsonl", *asked]) == 1, "the tracked baseline has other counters"
    assert "missing" not in capsys.readouterr().out, "nobody asked for the device"
    _run_of(*GOOD[:2], judged(row, status="unsupported"))
    assert main(["gate", "run.jsonl", *asked, "--executor", machine]) == 1
    out = capsys.readouterr().out
    assert "unsupported: the outputs are wrong" in out, "what the machine owed and cannot do closes the gate"
    _run_of(*GOOD[:2])
    assert main(["gate", "run.jsonl", *asked, "--executor", "vm", "--executor", machine]) == 1
    assert f"missing: there is no record of {row}" in capsys.readouterr().out


def test_the_rows_are_run_if_no_file_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--case", ROW.case, "--jobs", "1", "--executor", f"{FAKE}:EXECUTOR", "--junit", "out/gate.xml"]
    assert main(["gate", *asked, "--backend", f"{FAKE}:WORKS"]) == 0
    assert "1 passed, 0 failed" in capsys.readouterr().out
    assert len(list(ElementTree.parse("out/gate.xml").iter("testcase"))) == 1
    assert main(["gate", *asked, "--backend", f"{FAKE}:SCALES"]) == 1
    assert len(list(ElementTree.parse("out/gate.xml").iter("failure"))) == 1


def test_an_earlier_run_in_the_same_file_is_not_this_one_s_business() -> None:
    asked = ["gate", "--case", ROW.case, "--jobs", "1", "--executor", f"{FAKE}:EXECUTOR", "--output", "run.jsonl"]
    assert main([*asked, "--backend", f"{FAKE}:SCALES"]) == 1
    assert main([*asked, "--backend", f"{FAKE}:WORKS"]) == 0


def test_a_real_kernel_from_run_to_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    run = [
        "gate",
        "--case",
        ROW.case,
        "--backend",
        "ptx",
        "--target",
        "sm_100a",
        "--jobs",
        "1",
        "--output",
        "run.jsonl",
    ]
    assert main(run[:-2]) == 0, "the tracked baseline has this row, and its counters repeat exactly"
    assert main(["accept", "--baseline", "base.jsonl", "--reason", "a first one", str(ROW)]) == 0
    text = Path("base.jsonl").read_text()
    held = read_baseline(Path("base.jsonl")).records[Row(*ROW)].counters["instructions_alu"]
    fewer = text.replace(f'"instructions_alu":{held}', f'"instructions_alu":{held - 1}')
    assert fewer != text
    Path("base.jsonl").write_text(fewer)
    capsys.readouterr()
    assert main([*run, "--baseline", "base.jsonl"]) == 1
    out = capsys.readouterr().out
    assert f"instructions_alu {held - 1} -> {held}" in out
    assert "the program is the same, so what runs it has changed" in out
    assert main(_printed_command(out, "counted more exactly")) == 0
    assert Path("base.jsonl").read_text().startswith(text.partition('{"schema_version":2,"run":"accept"')[0][:40])

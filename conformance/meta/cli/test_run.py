"""The command line: exit statuses, one sentence for bad input, and files that survive an interruption."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date, timedelta
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from rich.text import Text

from conformance import ROOT
from conformance.fakes import adversaries
from conformance.fakes import backends as fake_backends
from conformance.fakes.commands import interruptible, python
from conformance.fakes.results import judged
from conformance.fakes.simulated_device import EXECUTOR
from conformance.kernels.laws.law import specs
from megamoe.cli.main import main
from megamoe.cli.run import INTERRUPTED_BEFORE
from megamoe.cli.terminal import complain, console, print_verdict
from megamoe.contract import Row, scratch
from megamoe.gate.verdict import judge_run
from megamoe.records.files import RecordWriter, newest_run, read_records
from megamoe.records.lines import record_of
from megamoe.spec.selection import (
    Selection,
    SelectionError,
    expand_schedules,
    owed_rows,
    parse_row,
    parse_where,
)

CASE = "fmha:hd=64,t=1,s_k=3"
FAKE = fake_backends.__name__
DEVICE = "conformance.fakes.simulated_device"


def _options(attribute: str) -> list[str]:
    return ["--backend", f"{FAKE}:{attribute}", "--executor", f"{FAKE}:EXECUTOR"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--case", "fmha:hd=65,t=1,s_k=1"], "65"),
        (["run", "--jobs", "x"], "'x' is no whole number from 1 to 1,024"),
        (["run", "--jobs", "0"], "'0' is no whole number from 1 to 1,024"),
        (["run", "--timeout", "inf"], "'inf' is no number from 0.1 to 604,800"),
        (["gate", "--timeout", "nan"], "'nan' is no number from 0.1 to 604,800"),
        (["compare", "a", "b", "--most", "-1"], "'-1' is no whole number from 0 to 1,000,000"),
        (["schema", "--version", "9"], "there is no version 9 of records"),
        (["check", "a.ptx", "--smem", "-1"], "'-1' is no whole number from 0 to"),
        (["run", "--case", "x" * 100_000], "characters)"),
        (["run", "--case", "fhma:hd=64,t=1,s_k=1"], "there is no op 'fhma'; specs describe: fmha"),
        (["run", "--case", "fmha:hd=64,t=1"], "s_k"),
        (["run", "--case", CASE, "--backend", "pxt"], "there is no backend 'pxt'; registered: "),
        (["run", "--case", CASE, "--backend", "nowhere:BACKEND"], "'nowhere:BACKEND' cannot be loaded"),
        (["run", "--case", CASE, "--backend", f"{FAKE}:NOT_A_BACKEND"], "of type int"),
        (["run", "--case", CASE, *_options("WORKS"), "--executor", "vn"], "there is no executor 'vn'"),
        (["run", "--case", CASE, *_options("WORKS"), "--target", "sm_80"], "there is no target 'sm_80'"),
        (["run", "--case", CASE, *_options("WORKS"), "--schedule", "soon"], "schedule 'soon' is not"),
        (["run", "--case", CASE, *_options("WORKS"), "--where", "hd=128"], "no selected case has hd=128; hd is 64"),
        (["run", "--case", CASE, "--backend", "ptxx"], "; did you mean 'ptx'?"),
        (["run", "--case", CASE, "--backend", "nowhere:BACKEND"], "no module 'nowhere' here or on PYTHONPATH"),
        (["run", "--case", CASE, "--backend", "backends.ptx:BACKEN"], "no attribute 'BACKEN'; did you mean 'BACKEND'?"),
        (["run", "--case", "fmha"], "'fmha' is no case id of fmha: write fmha:hd=...,t=...,s_k=..., as `megamoe list"),
        (["run", "--profile", "x" * 999], f"'{'x' * 200}… (999 characters)' is no profile of"),
        (["check", "a.ptx", "--profile", "x" * 999], f"'{'x' * 200}… (999 characters)'; there are strict"),
        (["check", "a.ptx", "--profile", "lenent"], "; did you mean 'lenient'?"),
        (["run", "--case", CASE, "--executor", "vmm"], "; did you mean 'vm'?"),
        (["run", "--resume", "nowhere.jsonl"], "cannot resume nowhere.jsonl"),
        (["run", "--resume", "r.jsonl", "--op", "fmha"], "drop the other options that name rows"),
        (["run", "--resume", "r.jsonl", "--last-failed"], "drop the other options that name rows"),
        (["run", "--last-failed"], "there is no run in results/runs"),
        (["run", "--case", CASE, "--profile", "full"], "--case names its own rows"),
        (["run", "--profile", "fulll"], "megamoe: --profile: 'fulll' is no profile of fmha or nvfp4_moe; there are "),
        (["run", "--profile", "fulll"], "; did you mean 'full'?"),
        (["list", "--profile", "huge", "--op", "fmha"], "megamoe: --profile: 'huge' is no profile of fmha; there are"),
        (["run", "--specs", "nowhere"], "nowhere"),
        (["run", "--case", CASE, *_options("WORKS"), "--expected", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["run", "--case", CASE, *_options("WORKS"), "--output", "."], "cannot write records to"),
        (["run", "--jobs", "0"], "--jobs"),
        (["run", "--jbos", "1"], "--jbos"),
        (["gate", "nowhere.jsonl"], "cannot read records from nowhere.jsonl"),
        (["list", "--op", "nsa"], "there is no op 'nsa'"),
        (["list", "--matrix", "gird"], "megamoe: --matrix: 'gird' is no matrix of fmha or nvfp4_moe; there are "),
        (["list", "--where", "hd"], "filter 'hd' is not of the form"),
        (["list", "--where", "head_dim=64"], "no selected case has an axis 'head_dim'"),
        (["list", "--where", "head=4"], "; did you mean 'heads'?"),
        (["list", "--where", "hd=64|65"], "no selected case has hd=65; hd is 64, 128, 256, 512"),
        (["list", "--where", "hd=256,t=32", "--matrix", "decode"], "no selected case has"),
        (["list", "--op", "fhma"], "; did you mean 'fmha'?"),
        (["list", "--\x1b[31m"], "\\x1b[31m"),
        (["lits"], "lits"),
    ],
)
def test_bad_input_is_a_sentence_and_status_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    streams = capsys.readouterr()
    assert sentence in streams.err
    assert "Traceback" not in streams.err + streams.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("run --jobs many", "--jobs: 'many' is no whole number from 1 to 1,024"),
        ("run --timeout nan", "--timeout: 'nan' is no number from 0.1 to 604,800"),
        ("check a.cu --smem many", "--smem: 'many' is no whole number from 0 to 1,048,576"),
        ("check a.cu --cluster 2,x", "--cluster: '2,x' is no size; write 8 or 8,2,1"),
        ("export flashinfer a --out b --temperature warm", "--temperature: 'warm' is not one of 'cold', 'hot'"),
        ("run --jobs", "option '--jobs' requires an argument; see megamoe run --help"),
        ("gate --strict=yes", "option '--strict' does not take a value; see megamoe gate --help"),
        ("export flashinfer a --out", "option '--out' requires an argument; see megamoe export flashinfer --help"),
        ("run --joobs 3", "no such option: --joobs; did you mean --jobs?"),
        ("run -z", "no such option: -z; see megamoe run --help"),
        ("list more", "got unexpected extra argument(s) (more); see megamoe list --help"),
        ("compare a", "missing argument 'AFTER'; see megamoe compare --help"),
        ("explain a", "missing option '--backend'; see megamoe explain --help"),
        ("rnu", "no such command 'rnu'; did you mean 'run'?"),
        ("export nope", "no such command 'nope'; see megamoe export --help"),
        ("--bogus", "no such option: --bogus; see megamoe --help"),
        ("--version=3", "option '--version' does not take a value; see megamoe --help"),
    ],
)
def test_what_typer_refuses_is_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    streams = capsys.readouterr()
    assert streams.err == f"megamoe: {sentence}\n"
    assert streams.out == ""


def test_a_run_that_passes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["run", "--case", CASE, "--case", "fmha:hd=64,t=2,s_k=3", "--jobs", "1", *_options("WORKS")]
    assert main([*arguments, "--schedule", "eager", "--schedule", "random:0-1"]) == 0
    assert "6 passed, 0 failed" in capsys.readouterr().out
    (path,) = (tmp_path / "results" / "runs").iterdir()
    found = read_records(path)
    assert len(found.records) == found.headers[0].owed_rows == 6
    assert main(["gate", str(path)]) == 0
    assert "6 passed, 0 failed" in capsys.readouterr().out


def test_a_run_that_fails_and_a_gate_that_misses_a_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "--case", CASE, "--jobs", "1", *_options("SCALES"), "--output", "r.jsonl"]) == 1
    out = capsys.readouterr().out
    assert "0 passed, 1 failed" in out
    assert f"Rerun: megamoe run --case {CASE} --backend {FAKE}:SCALES" in out
    (record,) = read_records(Path("r.jsonl")).records
    assert record.bundle is not None
    assert (tmp_path / record.bundle / "sentence.txt").is_file()
    header = Path("r.jsonl").read_bytes().splitlines(keepends=True)[0]
    Path("lost.jsonl").write_bytes(header)
    assert main(["gate", "lost.jsonl"]) == 1, "a record that was lost must close the gate"
    assert "there is no record of" in capsys.readouterr().out


def test_a_gate_says_what_has_changed_since_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--case", CASE, "--jobs", "1", *_options("WORKS"), "--output", "r.jsonl"]) == 0
    whole = Path("r.jsonl").read_text()
    assert '"owed_rows":1' in whole
    Path("other.jsonl").write_text(whole.replace('"owed_rows":1', '"owed_rows":72'))
    capsys.readouterr()
    assert main(["gate", "other.jsonl"]) == 1, "rows that the run owed and nobody owes now must close the gate"
    assert "owed 72 rows when it began, its selection holds 1 now" in capsys.readouterr().out
    header = read_records(Path("r.jsonl")).headers[0]
    Path("old.jsonl").write_text(whole.replace(f'"{header.git_revision}"', '"0ld"'))
    assert main(["gate", "old.jsonl"]) == 0
    assert "is of revision 0ld; checked out is" in " ".join(capsys.readouterr().out.split())


def test_a_record_file_with_no_header_owes_what_the_options_say(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.jsonl").write_bytes(b"")
    assert main(["gate", "empty.jsonl"]) == 2
    assert main(["gate", "empty.jsonl", "--case", CASE, *_options("WORKS")]) == 1
    assert "1 missing" in capsys.readouterr().out


def test_an_expected_failure_is_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    soon = str(date.today() + timedelta(days=30))
    entry = {
        "case": CASE.replace("s_k=3", "s_k=*"),
        "backend": f"{FAKE}:SCALES",
        "target": "sm_100a",
        "executor": f"{FAKE}:EXECUTOR",
        "status": "failed",
        "reason": "it halves its output on purpose",
        "expires": soon,
        "example": CASE,
    }
    Path("e.yaml").write_text(json.dumps({"expected": [entry]}).replace(f'"{soon}"', soon))
    arguments = ["run", "--case", CASE, "--jobs", "1", "--expected", "e.yaml"]
    assert main([*arguments, *_options("SCALES")]) == 0
    assert "1 of these as expected" in capsys.readouterr().out


def test_list_answers_without_torch() -> None:
    code = "import sys; from megamoe.cli.main import main; main(['list']); assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "72 of them published" in done.stdout


def test_list_filters_and_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--matrix", "grid", "--where", "hd=64|128,t=1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 8, "2 head dimensions x 1 t x 4 s_k"
    assert {row["axes"]["hd"] for row in rows} == {64, 128}
    assert all(row["published"] and "grid" in row["matrices"] for row in rows)
    assert main(["list", "--matrix", "grid", "--matrix", "stages", "--json"]) == 0
    ops = {row["op"] for row in json.loads(capsys.readouterr().out)}
    assert ops == {"fmha", "nvfp4_moe"}, "each op has one of the two matrices"


def test_doctor_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "numpy", "specs", "GPU", "ptxas", "CUDA C++"} <= set(findings)
    assert all(one["detail"] for one in findings.values()), "every finding says what was found or why not"
    assert main(["doctor", "--json", "--specs", "nowhere"]) == 0
    (specs,) = (one for one in json.loads(capsys.readouterr().out) if one["subject"] == "specs")
    assert not specs["works"]


def _start(tmp_path: Path) -> subprocess.Popen[str]:
    """Starts a run with a passing row and a hanging row in its own session, and waits for the first record."""
    both = ["--backend", f"{FAKE}:WORKS", "--backend", f"{FAKE}:HANGS", "--executor", f"{FAKE}:EXECUTOR"]
    path = tmp_path / "r.jsonl"
    command = [sys.executable, "-m", "megamoe", "run", "--case", CASE, "--jobs", "2", *both, "--output", str(path)]
    pipe = subprocess.PIPE
    with interruptible():
        run = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and run.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") == 2:
            break
        time.sleep(0.05)
    return run


def test_an_interrupted_run_leaves_a_readable_file_and_says_so(tmp_path: Path) -> None:
    run = _start(tmp_path)
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert "interrupted: 1 row was not run; the record file is whole, and this finishes it: megamoe run --resume" in out
    assert out.count("not run") == 1, f"one sentence for all rows: {out}"
    assert "Traceback" not in err
    assert sorted(record.status for record in read_records(tmp_path / "r.jsonl").records) == ["not_run", "passed"]


Killed = tuple[Path, list[str], list[str], CompletedProcess[str]]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """The records of a killed run, the temporary files that it left, those after the next run, and the next run, whose
    kernel prints 64 MiB."""
    folder = tmp_path_factory.mktemp("killed")
    with tempfile.TemporaryDirectory(dir="/tmp") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", name)
        _kill(_start(folder))
        left = os.listdir(name)
        room = adversaries.__name__
        row = Row("fmha:hd=64,t=1,s_k=128", f"{room}:PRINTS_MUCH", "sm_100a", f"{room}:DEVICE", "eager")
        command = [sys.executable, "-m", *shlex.split(row.rerun), "--output", str(folder / "s.jsonl"), "--jobs", "1"]
        following = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        # The keepers of the second run's processes clean up after these have ended.
        deadline = time.monotonic() + 20
        while os.listdir(name) and time.monotonic() < deadline:
            time.sleep(0.05)
        return folder / "r.jsonl", left, os.listdir(name), following


def test_a_killed_run_leaves_a_readable_file_and_the_next_clears_up(
    killed: Killed, capsys: pytest.CaptureFixture[str]
) -> None:
    path, left, after, following = killed
    assert left, "the kill must leave something, or this tests nothing"
    assert following.returncode == 0, following.stderr[-2000:]
    assert not after, "what the killed run left must be gone after the next"
    assert scratch.PREFIX.startswith("."), "a listing shows nothing of ours"
    assert [record.status for record in read_records(path).records] == ["passed"]
    assert main(["gate", str(path)]) == 1
    assert f"there is no record of {CASE} on {FAKE}:HANGS" in capsys.readouterr().out


def test_much_output_does_not_reach_the_terminal(killed: Killed) -> None:
    printing = killed[3]
    assert printing.returncode == 0, printing.stderr[-2000:]
    assert len(printing.stdout) + len(printing.stderr) < 1 << 18, "64 MiB were printed"
    assert "\x1b" not in printing.stderr + printing.stdout, "a control character reached the terminal"
    assert "dropped" in printing.stderr


def _kill(run: subprocess.Popen[str]) -> None:
    run.kill()
    try:
        run.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        pytest.fail("the workers of a killed run must end with it: their output pipe is still open")


def _begun(lines: int, torn: bytes = b"") -> tuple[str, ...]:
    """Leaves only the header and `lines` lines of a finished run of four rows in r.jsonl. Returns its rows."""
    cases = [part for t in (1, 2) for part in ("--case", f"fmha:hd=64,t={t},s_k=3")]
    schedules = ["--schedule", "eager", "--schedule", "lazy"]
    assert main(["run", *cases, *schedules, "--jobs", "1", *_options("WORKS"), "--output", "r.jsonl"]) == 0
    path = Path("r.jsonl")
    rows = tuple(str(one.row) for one in read_records(path).records)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: 1 + lines]) + torn)
    return rows


@pytest.mark.parametrize("torn", [b"", b'{"schema_version":2,"run":"x","ki'])
def test_what_a_killed_run_left_is_finished(torn: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    rows = _begun(1, torn)
    (header,), (first,) = read_records(Path("r.jsonl")).headers, read_records(Path("r.jsonl")).records
    if not torn:
        with RecordWriter(Path("r.jsonl")) as writer:
            for row in rows[1:3]:
                writer.append(record_of(header.run, parse_row(row), "not_run", INTERRUPTED_BEFORE))
    assert main(["gate", "r.jsonl"]) == 1
    capsys.readouterr()
    assert main(["run", "--resume", "r.jsonl", "--jobs", "1"]) == 0
    assert "4 passed, 0 failed" in capsys.readouterr().out
    found = read_records(Path("r.jsonl"))
    assert found.records[0] == first, "a line that was acknowledged stays as it is"
    assert sorted(str(one.row) for one in found.records) == sorted(rows), "each row once, and none is run again"
    assert [one.owed_rows for one in found.headers] == [4, 4], "what was run later has a header of its own"
    assert main(["gate", "r.jsonl"]) == 0
    assert main(["run", "--resume", "r.jsonl"]) == 0
    assert "every row of r.jsonl was run already" in capsys.readouterr().out


def test_a_file_that_is_being_written_is_not_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    _begun(1)
    with RecordWriter(Path("r.jsonl")):
        assert main(["run", "--resume", "r.jsonl"]) == 2
    assert "is being written by another run" in capsys.readouterr().err


def test_the_first_failure_ends_a_run_and_its_rows_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [part for t in (1, 2, 3) for part in ("--case", f"fmha:hd=64,t={t},s_k=3")]
    assert main(["run", *cases, "-x", "-q", "--jobs", "1", *_options("SCALES")]) == 1
    out = capsys.readouterr().out
    assert "stopped at the first failure: 2 rows were not run" in out
    assert "records:" not in out, "-q says only what is wrong, and the verdict"
    assert "0 passed, 1 failed, 2 not_run" in out
    (newest,) = Path("results/runs").iterdir()
    (wrong,) = (one.row for one in read_records(newest).records if one.status == "failed")
    assert main(["run", "--last-failed", "--jobs", "1"]) == 1
    (again,) = (path for path in Path("results/runs").iterdir() if path != newest)
    assert [one.row for one in read_records(again).records] == [wrong]
    capsys.readouterr()
    assert main(["gate", str(again)]) == 1, "the file knows what it owed"
    assert "0 passed, 1 failed\n" in capsys.readouterr().out
    os.utime(newest, (2e9, 2e9))
    assert newest_run() == newest, "the newest is what was written last"


def test_the_example_of_a_backend_passes_what_it_takes_and_refuses_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found in the current folder, without PYTHONPATH."""
    Path("my_backend.py").write_text((ROOT / "examples" / "my_backend.py").read_text("utf-8"))
    mine = ["--backend", "my_backend:BACKEND", "--op", "fmha", "--jobs", "2", "--schedule", "lazy"]
    monkeypatch.setattr(sys, "path", list(sys.path))
    main(["run", *mine])
    told = " ".join(capsys.readouterr().out.split())
    assert "6 passed, 0 failed, 50 unsupported" in told, told
    for reason in (
        "causal is True; this kernel takes False",
        "hd is 256 and s_k 128; a CTA has a thread for each, at most",
    ):
        assert f"unsupported: {reason}" in told, told


def test_rows_that_are_unsupported_for_one_reason_share_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [part for t in (1, 2, 3) for part in ("--case", f"fmha:hd=64,t={t},s_k=3")]
    there = ["--backend", f"{FAKE}:WORKS", "--executor", f"{FAKE}:BROKEN_MACHINE", "--jobs", "1"]
    assert main(["run", *cases, *there, "--schedule", "eager"]) == 1
    out = capsys.readouterr().out
    assert out.count("it has no such tensor cores") == 1, out
    assert "(3 rows, fmha:hd=64,t=3,s_k=3 on" in out


def _shell(command: str, cwd: Path = ROOT, seconds: int = 60) -> subprocess.CompletedProcess[str]:
    python = f'"{sys.executable}"'
    words = ["bash", "-c", command.replace("PYTHON", python)]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.mark.parametrize(
    "command", ["PYTHON -m megamoe list", "PYTHON -m megamoe list --json", "PYTHON -m backends.peers"]
)
def test_a_closed_pipe_ends_a_command_without_a_word(command: str) -> None:
    # A reader of one line may exit after everything was written: a pipe holds 64 KiB.
    done = _shell(f"{command} | head -n 0; echo ${{PIPESTATUS[0]}}")
    assert done.stdout.splitlines()[-1] == "141", done.stdout + done.stderr
    assert done.stderr == ""


def test_a_closed_pipe_ends_a_run_at_once(tmp_path: Path) -> None:
    """One row passes, the other hangs for its limit of 300 s; `head` exits after the first line."""
    rows = f"--case {CASE} --backend {FAKE}:SCALES --backend {FAKE}:HANGS --executor {FAKE}:EXECUTOR --jobs 2"
    # Like a script's background job, which starts with SIGINT ignored.
    command = (
        f"trap '' INT; PYTHON -m megamoe run {rows} --output {tmp_path}/r.jsonl | head -n 1; echo ${{PIPESTATUS[0]}}"
    )
    started = time.monotonic()
    done = _shell(command)
    assert time.monotonic() - started < 60
    assert done.stdout.splitlines()[-1] == "141", done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(one.status for one in read_records(tmp_path / "r.jsonl").records) == ["failed", "not_run"]


def test_control_characters_of_a_sentence_never_reach_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07\x9b31m\r90 passed\n90 passed, 0 failed\u202e\x08"
    row = parse_row(f"{CASE} on ptx sm_100a vm eager")
    record = record_of("run", row, "failed", hostile)
    print_verdict(judge_run([row], [record]), [record])
    console().print(Text(hostile))
    complain(hostile)
    out, err = capsys.readouterr()
    assert not set(out + err) & {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160), 0x202E)}
    assert "\n90 passed" not in out.partition("0 passed, 1 failed")[0], "a sentence makes no line of its own"
    assert "\\x1b[2J" in out, "what was there is seen"


@pytest.mark.parametrize(("backend", "told"), [("mine:BACKEND", True), ("ptx", False)])
def test_what_a_row_only_counts_is_told_of_a_backend_without_a_baseline(
    backend: str, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {CASE: 12, "fmha:hd=64,t=2,s_k=9": 0}
    records = [
        judged(parse_row(f"{case} on {backend} sm_100a vm eager"), {"mbarrier_inits_unfenced": count, "tma_loads": 3})
        for case, count in counts.items()
    ]
    print_verdict(judge_run([record.row for record in records], records), records)
    out = " ".join(capsys.readouterr().out.split())
    wanted = "1 row passed with what a row does not fail on: mbarrier_inits_unfenced 12; see docs/rules/README.md"
    assert (wanted in out) is told, f"of {backend} the gate {'does not hold' if told else 'holds'} the counter: {out}"


@pytest.mark.parametrize("how", ["sys.exit(0)", "sys.exit()", "raise SystemExit", "raise KeyboardInterrupt"])
def test_a_command_that_did_not_say_its_verdict_never_ends_with_0(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("leaves.py").write_text(f"import sys\n{how}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["run", "--case", CASE, "--backend", "leaves:BACKEND"]) not in (0, None)
    assert capsys.readouterr().err.startswith("megamoe: ")


def test_help_and_version_have_their_short_ways(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in ((["-h"], "Usage"), (["run", "-h"], "--last-failed"), (["--version"], "megamoe ")):
        assert main(arguments) == 0
        assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "completes"),
    [
        ("run --ba", "--backend"),
        ("run --backend pt", "ptx"),
        ("run --op f", "fmha"),
        ("gate --profile sm", "smoke"),
        ("run --case fmha:hd=64,t=1,s_k=12", "hd=64,t=1,s_k=128"),
    ],
)
def test_a_shell_completes_names(words: str, completes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_MEGAMOE_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"megamoe {words}")
    done = python("-m", "megamoe", cwd=ROOT)
    assert completes in done.stdout, done.stdout + done.stderr


def test_schedules_expand() -> None:
    assert expand_schedules(["lazy", "random:0-2", "random:1"]) == ("lazy", "random:0", "random:1", "random:2")
    for bad in ("random:3-1", "random:", "random", "eager ", "random:0-99999999"):
        with pytest.raises(SelectionError):
            expand_schedules([bad])


def test_a_backend_that_was_asked_for_owes_something() -> None:
    both = Selection(backends=(f"{FAKE}:WORKS", f"{FAKE}:EMPTY"))
    with pytest.raises(SelectionError, match=f"{FAKE}:EMPTY' was asked for, but has no kernel"):
        owed_rows(specs(), both)


def test_filters_gather_values() -> None:
    assert parse_where(["hd=64|128,t=1", "hd=256"]) == {"hd": {"64", "128", "256"}, "t": {"1"}}


def test_long_rows_start_first() -> None:
    selection = Selection(profile="full", backends=(f"{FAKE}:WORKS",), schedules=("eager", "lazy"))
    rows = owed_rows(specs(), selection)
    assert len(rows) == len(set(rows)), "no row is owed twice"
    assert rows.index(next(row for row in rows if row.case == "fmha:hd=512,t=128,s_k=1024")) < rows.index(
        next(row for row in rows if row.case == "fmha:hd=64,t=1,s_k=128")
    )


def test_a_run_on_a_device_says_which(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    there = [
        "--backend",
        "conformance.fakes.simulated_device:WORKS",
        "--executor",
        "conformance.fakes.simulated_device:EXECUTOR",
        "--target",
        "sm_90a",
    ]
    assert main(["run", "--case", CASE, "--jobs", "1", *there, "--output", str(path)]) == 0
    (header,) = read_records(path).headers
    assert header.device is not None, "a record of a device must say of which"
    assert header.device == EXECUTOR.facts()

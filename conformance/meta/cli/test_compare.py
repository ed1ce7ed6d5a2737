"""`megamoe compare` on the command line: exit status, sentences, files, and records of git revisions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conformance import ROOT
from conformance.fakes.results import H200, header, record, timing, write
from megamoe.cli.main import main
from megamoe.diff.sides import ComparisonError, read_side

QUIET = 10 + 0.02 * np.random.default_rng(0).standard_normal((10, 10))


def compare(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["compare", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return status, out, err


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return write(tmp_path / "before.jsonl", header(), record("passed", {"mma_flops": 10}), timing(QUIET))


def test_nothing_changed(before: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = compare(capsys, before, before)
    assert (status, err) == (0, "")
    assert "2 rows: 2 SAME; no regressions" in out


@pytest.mark.parametrize(
    ("after", "says"),
    [
        ((record("passed", {"mma_flops": 11}), timing(QUIET)), "mma_flops 10 -> 11 (+10.0%)"),
        ((record("failed"), timing(QUIET)), "passed before, failed after: it failed"),
        ((record("passed", {"mma_flops": 10}),), "MISSING"),
        ((record("passed", {"mma_flops": 10}), timing(QUIET * 1.2)), "SLOWER"),
    ],
)
def test_a_regression_is_status_1(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], after: tuple, says: str
) -> None:
    status, out, _ = compare(capsys, before, write(tmp_path / "after.jsonl", header(), *after))
    assert status == 1
    assert says in out
    assert "1 regression" in out


def test_strict_makes_ambiguity_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write(tmp_path / f"{us}.jsonl", header(), timing([us])) for us in (10.0, 10.1)]
    assert compare(capsys, *files)[0] == 0
    assert compare(capsys, *files, "--strict")[0] == 1
    status, out, _ = compare(capsys, files[0], files[0], "--strict")
    assert (status, "1 row: 1 SAME" in out) == (0, True), "one sample is the same as itself, however noisy"


def _torn(folder: Path) -> tuple[object, ...]:
    file = folder / "torn.jsonl"
    file.write_bytes(record().model_dump_json().encode()[:50])
    return file, file


def _garbage(folder: Path) -> tuple[object, ...]:
    file = folder / "garbage.jsonl"
    file.write_bytes(b"\xff\x00 not json\n")
    return file, file


def _other_schema(folder: Path) -> tuple[object, ...]:
    file = folder / "new.jsonl"
    file.write_text(record().model_dump_json().replace('"schema_version":2', '"schema_version":9') + "\n")
    return file, file


def _nothing_in_common(folder: Path) -> tuple[object, ...]:
    return write(folder / "a.jsonl", record()), write(folder / "b.jsonl", record(backend="cutedsl"))


def _empty_folder(folder: Path) -> tuple[object, ...]:
    (folder / "empty").mkdir()
    return folder / "empty", folder / "empty"


def _no_such_file(folder: Path) -> tuple[object, ...]:
    return folder / "none.jsonl", folder / "none.jsonl"


def _an_option(folder: Path) -> tuple[object, ...]:
    return "--", "--output=x", "--output=x"


def _no_such_specs(folder: Path) -> tuple[object, ...]:
    file = write(folder / "a.jsonl", record())
    return file, file, "--specs", folder / "none"


def _other_machine(folder: Path) -> tuple[object, ...]:
    other = header(device=H200.model_copy(update={"name": "NVIDIA H100"}))
    return write(folder / "a.jsonl", header(), timing(QUIET)), write(folder / "b.jsonl", other, timing(QUIET))


def _a_time_nine_times(folder: Path) -> tuple[object, ...]:
    copies = write(folder / "b.jsonl", header(), timing(QUIET * 1.5), *[timing(QUIET)] * 9)
    return write(folder / "a.jsonl", header(), timing(QUIET)), copies


def _file_that_cannot_be_written(folder: Path) -> tuple[object, ...]:
    file = write(folder / "a.jsonl", record())
    return file, file, "--json", file / "x.json"


def _empty_names(folder: Path) -> tuple[object, ...]:
    return "", write(folder / "a.jsonl", record())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (_torn, "holds no row"),
        (_empty_names, "a side has an empty name"),
        (_garbage, "line 1: not JSON"),
        (_other_schema, "schema_version"),
        (_nothing_in_common, "no row is in both"),
        (_empty_folder, "there is no *.jsonl in the folder"),
        (_no_such_file, "there is no such file or folder, and"),
        (_an_option, "is no git revision here"),
        (_no_such_specs, "there is no such folder"),
        (_other_machine, "device name: NVIDIA H200 before, NVIDIA H100 after"),
        (
            _a_time_nine_times,
            "b.jsonl, line 3: run run-1 has a second time of fmha:hd=64,t=1,s_k=128 on ptx sm_90a gpu",
        ),
        (_file_that_cannot_be_written, "cannot write"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_unusable_input_is_a_sentence_and_status_2(
    arguments: Callable[[Path], tuple[object, ...]], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = compare(capsys, *arguments(tmp_path))
    assert (status, out) == (2, "")
    assert err.startswith("megamoe: ")
    assert says in err
    assert len(err.splitlines()) == 1, "one sentence, on one line"


def test_another_machine_is_labelled_if_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = compare(capsys, *_other_machine(tmp_path), "--across")
    assert status == 0
    assert "not the same machine: device name: NVIDIA H200 before, NVIDIA H100 after" in out


def test_a_torn_file_with_rows_is_used_and_noted(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(before.read_bytes() + b'{"schema_version":2,')
    status, out, _ = compare(capsys, before, torn)
    assert status == 0
    assert "line 4 is torn" in out


def test_files_for_machines_and_comments(before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = write(tmp_path / "after.jsonl", header(), record("failed"), timing(QUIET))
    options = ("--json", tmp_path / "new" / "c.json", "--markdown", tmp_path / "c.md")
    assert compare(capsys, before, after, *options)[0] == 1
    found = json.loads((tmp_path / "new" / "c.json").read_text())
    assert found["exit_status"] == 1
    assert found["rows"][0]["call"] == "STATUS-CHANGED"
    assert "**STATUS-CHANGED (worse)**" in (tmp_path / "c.md").read_text()
    assert not list(tmp_path.rglob("*.part")), "nothing half written may be left"


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / "runs" / f"{name}.jsonl", record(backend=name))
    (tmp_path / "runs" / "notes.md").write_text("not a record")
    assert [one.backend for file in read_side(str(tmp_path / "runs")).files for one in file.records] == ["a", "b"]


def git(folder: Path, *arguments: str) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose baseline got worse in its second commit."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for number, flops in enumerate((10, 12)):
        baseline = folder / "results" / "baselines" / "vm.jsonl"
        baseline.unlink(missing_ok=True)
        write(baseline, record("passed", {"mma_flops": flops}))
        write(folder / "results" / "baselines" / f"more-{number}.jsonl", record(backend=f"other{number}"))
        (folder / "results" / "baselines" / "README.md").write_text("not a record")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", f"baseline {number}")
    monkeypatch.chdir(folder)
    return folder


def test_a_revision_is_its_tracked_baselines(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = compare(capsys, "HEAD~1", "HEAD")
    assert status == 1
    assert "mma_flops 10 -> 12" in out
    assert "3 rows: 1 WORSE, 1 NEW, 1 SAME" in out
    assert compare(capsys, "HEAD", "results/baselines")[0] == 0, "a path is a path, and holds what HEAD holds"


def test_a_run_beside_a_revision_owes_what_it_ran_on(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A device's baseline is not owed by a run on the VM; a row that the VM lost is."""
    write(checkout / "results" / "baselines" / "h200.jsonl", header(), timing(QUIET))
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "a device")
    run = write(checkout / "run.jsonl", record("passed", {"mma_flops": 12}), record(backend="other0"))
    status, out, _ = compare(capsys, "HEAD", run.name)
    assert "h200.jsonl is left out: run.jsonl ran nothing on gpu (NVIDIA H200)" in out.replace("\n", "")
    assert (status, "3 rows: 1 MISSING, 2 SAME; 1 regression" in out) == (1, True), out
    assert compare(capsys, "HEAD", "results/baselines")[1].count("left out") == 0, "a folder is all that is in it"
    other = header("run-2", H200.model_copy(update={"name": "NVIDIA H100"}))
    on_another = write(checkout / "h100.jsonl", other, timing(QUIET, run="run-2"))
    status, _, err = compare(capsys, "HEAD", on_another)
    assert (status, "h100.jsonl ran on gpu (NVIDIA H100)" in err) == (2, True), err


def test_two_backends_are_held_against_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [record("passed", {"mma_flops": flops}, backend=name) for name, flops in (("my_v1", 10), ("my_v2", 12))]
    file = write(tmp_path / "both.jsonl", header(), *lines, record(backend="ptx"))
    status, out, _ = compare(capsys, file, file, "--rename", "my_v2=my_v1")
    assert status == 1
    assert "my_v2 is held against my_v1" in out
    assert "mma_flops 10 -> 12" in out
    assert "2 rows: 1 WORSE, 1 SAME" in out
    assert compare(capsys, file, file, "--rename", "my_v1=my_v2")[0] == 0, "the other way round it is better"
    one, two = (write(tmp_path / f"{line.backend}.jsonl", header(), line) for line in lines)
    assert "1 row: 1 WORSE" in compare(capsys, one, two, "--rename", "my_v2=my_v1")[1]
    for bad, says in (
        ("my_v2", "is not of the form NEW=OLD"),
        ("nobody=my_v1", "both.jsonl has no line of the backend 'nobody'; it has my_v1, my_v2, ptx"),
        ("ptx=nobody", "no line of the backend 'nobody'"),
    ):
        status, out, err = compare(capsys, file, file, "--rename", bad)
        assert (status, out, says in err) == (2, "", True), err
    assert compare(capsys, file, file, "--rename", "my_v2=my_v1", "--rename", "ptx=my_v1")[0] == 2


def test_a_revision_is_the_same_as_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This repository's baselines: rows of several machines, some too noisy to tell apart from anything."""
    monkeypatch.chdir(ROOT)
    status, out, err = compare(capsys, "HEAD", "HEAD", "--strict")
    assert (status, err) == (0, "")
    assert " SAME; no regressions" in out.splitlines()[-1]
    assert "AMBIGUOUS" not in out


def test_a_path_at_a_revision(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "results/baselines/vm.jsonl"
    status, out, _ = compare(capsys, f"HEAD~1:{name}", f"HEAD:{name}")
    assert status == 1
    assert "1 row: 1 WORSE" in out
    assert len(read_side("HEAD:results/baselines/").files) == 3


@pytest.mark.parametrize(
    "name", ["HEAD:none", "none", "HEAD:", "none:results", "-q", "HEAD:results", "HEAD:../x", ":", ""]
)
def test_what_a_revision_does_not_track_is_refused(checkout: Path, name: str) -> None:
    with pytest.raises(ComparisonError):
        read_side(name)


def test_a_tracked_file_of_another_kind_is_no_side(checkout: Path) -> None:
    """results/ tracks records of mutants and witnesses, too."""
    (checkout / "results" / "mutants.jsonl").write_text('{"command": "--sync all", "planned": 2}\n')
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "a campaign")
    with pytest.raises(ComparisonError, match="tracks no record file at results"):
        read_side("HEAD:results")


def test_outside_of_a_checkout_there_are_no_revisions(tmp_path: Path) -> None:
    with pytest.raises(ComparisonError, match="is no git revision here"):
        read_side("HEAD", tmp_path)


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_session_ends_with_the_status_of_the_command(tmp_path: Path, status: int) -> None:
    """nox by itself would exit with 1 for any failure, and CI could not tell a regression from a usage error."""
    pytest.importorskip("nox")
    for name in ("noxfile.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    programs = tmp_path / ".nox" / "house" / "bin"
    programs.mkdir(parents=True)
    for name, text in (("python", "exit 0"), ("megamoe", f'echo "asked: $*"; exit {status}')):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    command = [sys.executable, "-m", "nox", "-s", "compare", "--", "A", "B"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "asked: compare A B" in done.stdout + done.stderr
    assert done.returncode == status, done.stderr

"""Where commands write: they touch no device, pipe or link, and a full disk costs evidence, not verdicts."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from conformance import ROOT
from conformance.fakes import backends as fake_backends
from conformance.fakes.results import record, timing
from megamoe.cli.main import main
from megamoe.contract import Row
from megamoe.judge.isolated import Processes
from megamoe.judge.judge import judge
from megamoe.records.files import RecordWriter, read_records
from megamoe.records.lines import AnyLine, RecordError
from megamoe.spec.selection import parse_row

FAKE = fake_backends.__name__
CASE = "fmha:hd=64,t=1,s_k=3"
FULL = "No space left on device"


def _asked(command: str, backend: str, *more: str) -> list[str]:
    asked = ["--case", CASE, "--jobs", "1", "--executor", f"{FAKE}:EXECUTOR", "--backend", f"{FAKE}:{backend}"]
    return [command, *asked, *more]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, Path]:
    """Paths that are not plain files. A device is created if this user may; otherwise a link to one replaces it."""
    found = {kind: tmp_path / kind for kind in ("pipe", "link", "device", "folder")}
    os.mkfifo(found["pipe"])
    (tmp_path / "target").write_text("mine")
    found["link"].symlink_to(tmp_path / "target")
    found["folder"].mkdir()
    try:
        os.mknod(found["device"], stat.S_IFCHR | 0o600, os.makedev(1, 7))
    except OSError:
        found["device"].symlink_to("/dev/full")
    return found


@pytest.mark.parametrize("kind", ["pipe", "link", "device", "folder"])
@pytest.mark.parametrize(
    "arguments",
    [
        _asked("run", "WORKS", "--output"),
        _asked("gate", "WORKS", "--output"),
        _asked("gate", "WORKS", "--junit"),
        ["report", "run.jsonl", "--output"],
        ["compare", "run.jsonl", "run.jsonl", "--json"],
        ["compare", "run.jsonl", "run.jsonl", "--markdown"],
        ["accept", "--all-of", "*", "--reason", "why not", "--from", "run.jsonl", "--baseline"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_only_a_plain_file_is_written(
    arguments: list[str], kind: str, odd: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe would block, a device would be replaced, and a link leads out of the given folder."""
    with RecordWriter(Path("run.jsonl")) as writer:
        writer.append(record())
    place = odd[kind]
    before = place.lstat()
    assert main([*arguments, str(place)]) == 2
    said = capsys.readouterr().err
    assert str(place) in said
    assert "Traceback" not in said
    after = place.lstat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino), f"the {kind} is not what it was"
    assert Path("target").read_text() == "mine"


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["gate"],
        ["gate", "run.jsonl", "--trusted"],
        ["gate", "run.jsonl", "--baseline"],
        ["gate", "run.jsonl", "--expected"],
        ["run", "--resume"],
        _asked("run", "WORKS", "--sign"),
        ["compare", "run.jsonl"],
        ["report"],
        ["export", "flashinfer", "--out", "made"],
        ["accept", "--all-of", "*", "--reason", "why not", "--from"],
        ["check", "a.ptx", "--suppress"],
        ["check"],
    ],
    ids=" ".join,
)
def test_only_a_plain_file_is_read(
    arguments: list[str], kind: str, odd: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe would block, and a device has no end."""
    with RecordWriter(Path("run.jsonl")) as writer:
        writer.append(record())
    place = odd[kind]
    if arguments == ["check"]:
        place = place.rename("kernel.ptx")
    assert main([*arguments, str(place)]) == 2
    said = capsys.readouterr().err
    assert str(place) in said
    assert "plain file" in said or "regular file" in said, said


MUTANTS = '{"command": "--sync all", "machine": "abc", "started": "2026-11-22 04:47 UTC", "planned": 2}\n'


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["run", "--last-failed", "--jobs", "1"], 1),
        (["gate", "results/runs"], 1),
        (["accept", "--all-of", "nothing*", "--reason", "why not"], 2),
        (["report"], 0),
        (["report", "results/runs"], 0),
        (["compare", "results/runs", "results/runs"], 0),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_a_file_that_is_no_run_is_taken_for_none(
    arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of runs also holds what an older megamoe has written there: the record of a campaign of mutants."""
    run, other = Path("results/runs/run.jsonl"), Path("results/runs/mutants.jsonl")
    assert main(_asked("run", "SCALES", "--output", str(run))) == 1
    other.write_text(MUTANTS)
    os.utime(other, (2e9, 2e9))
    capsys.readouterr()
    assert main(arguments) == status
    told = "".join(capsys.readouterr())
    assert "mutants.jsonl" not in told, told
    assert "schema_version" not in told, told


@pytest.mark.parametrize("arguments", [["gate"], ["report"], ["compare", "results/runs"]], ids=" ".join)
def test_a_folder_without_a_run_is_told_with_what_is_in_it(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("results/runs").mkdir(parents=True)
    Path("results/runs/mutants.jsonl").write_text(MUTANTS)
    assert main([*arguments, "results/runs"]) == 2
    said = capsys.readouterr().err
    assert "the folder results/runs holds no record file of runs: mutants.jsonl has no schema_version" in said, said


def test_a_damaged_run_in_a_folder_is_still_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_asked("run", "WORKS", "--output", "runs/a.jsonl")) == 0
    whole = Path("runs/a.jsonl").read_text()
    Path("runs/b.jsonl").write_text(whole[1:])
    assert main(["gate", "runs"]) == 2
    assert "b.jsonl, line 1: not JSON" in (said := capsys.readouterr().err), said


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["gate"], "`megamoe run` writes record files to results/runs"),
        (["run", "--resume"], "`megamoe run` writes record files to results/runs"),
        (["accept", "--all-of", "*", "--reason", "why not", "--from"], "`megamoe run` writes record files to results"),
        (["compare", "run.jsonl"], "`megamoe run` writes record files to results/runs"),
        (["report", "run.jsonl", "--against"], "`megamoe run` writes record files to results/runs"),
        (["report"], "`megamoe run` writes record files to results/runs"),
        (["export", "flashinfer", "--out", "made"], "`megamoe run` writes record files to results/runs"),
        (["gate", "run.jsonl", "--baseline"], "`megamoe accept` makes one"),
        (["gate", "run.jsonl", "--trusted"], "name a file with a public key of 64 hexadecimal digits on each line"),
        (["gate", "run.jsonl", "--expected"], "name a YAML file"),
        (["list", "--specs"], "specs are in specs/ at the top of the repository"),
        (_asked("run", "WORKS", "--sign"), "openssl genpkey -algorithm ed25519 makes one"),
        (["check", "a.ptx", "--suppress"], "name a YAML file"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_a_file_that_is_not_there_is_told_with_what_would_be_right(
    arguments: list[str], right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with RecordWriter(Path("run.jsonl")) as writer:
        writer.append(record())
    assert main([*arguments, "nowhere"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("megamoe: ")
    assert "nowhere" in said
    assert right in said
    assert said.count("\n") == 1, f"it is not one sentence: {said}"


def _fills_up(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Simulates a disk with room for `after` record lines."""
    append, lines = RecordWriter.append, list[AnyLine]()

    def limited(self: RecordWriter, line: AnyLine) -> None:
        lines.append(line)
        if len(lines) > after:
            raise RecordError(f"cannot append to {self.path}: {FULL}")
        append(self, line)

    monkeypatch.setattr(RecordWriter, "append", limited)


@pytest.mark.parametrize(("backend", "verdict"), [("WORKS", "2 passed, 0 failed"), ("SCALES", "2 failed")])
@pytest.mark.parametrize("command", ["run", "gate"])
def test_a_disk_that_fills_up_takes_records_and_not_the_verdict(
    command: str, backend: str, verdict: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _fills_up(monkeypatch, after=2)
    more = ["--schedule", "eager", "--schedule", "lazy", "--output", "r.jsonl"]
    assert main(_asked(command, backend, *more)) == 2, "lines are lost, so that this is no verdict to rely on"
    streams = capsys.readouterr()
    assert verdict in streams.out, "what was judged must be said"
    assert FULL in streams.err
    assert len(read_records(Path("r.jsonl")).lines) == 2, "what was acknowledged stays"


def test_a_verdict_is_said_before_its_junit_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path.cwd() / "file").write_text("")
    assert main(_asked("gate", "SCALES", "--output", "r.jsonl", "--junit", "file/gate.xml")) == 2
    streams = capsys.readouterr()
    assert "1 failed" in streams.out
    assert "cannot write JUnit XML to file/gate.xml" in streams.err


def test_a_line_that_a_disk_takes_half_of_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = Path("r.jsonl"), os.write
    with RecordWriter(path) as writer:
        writer.append(record())
        monkeypatch.setattr(os, "write", lambda place, data: write(place, data[: len(data) // 2]))
        with pytest.raises(RecordError, match="the disk is probably full"):
            writer.append(record())
    assert read_records(path).torn is None, "the file must be whole, or the run cannot be resumed"


def test_what_a_terminal_cannot_take_is_a_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "megamoe", "list"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert FULL in done.stderr
    assert "Traceback" not in done.stderr


# Evidence


ROW = parse_row(f"{CASE} on {FAKE}:SCALES sm_100a {FAKE}:EXECUTOR eager")


@pytest.mark.parametrize("which", ["failures", "outputs", "programs"])
def test_evidence_that_cannot_be_written_is_no_error_of_the_row(which: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "below"
    failures, outputs, programs = (below if name == which else None for name in ("failures", "outputs", "programs"))
    found = judge(ROW, "run-1", None, failures, outputs, programs)
    assert found.status == "failed", found.sentence
    assert "seen -0.75, expected" in found.sentence, f"what was found is lost: {found.sentence}"
    assert "below" in found.sentence, "that evidence is missing must be said"
    passed = judge(ROW._replace(backend=f"{FAKE}:WORKS"), "run-1", None, failures, outputs, programs)
    assert passed.status == "passed", passed.sentence


def test_a_full_disk_under_a_bundle_is_no_error_of_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0\n" + "frame\n" * 5000)

    monkeypatch.setattr("torch.save", full)
    found = judge(ROW, "run-1", failures=tmp_path / "failures")
    assert found.status == "failed", found.sentence
    assert "no bundle" in found.sentence
    assert len(found.sentence) < 2000, "of the frames of a library, the beginning will do"
    assert not list((tmp_path / "failures").iterdir()), "half a bundle is worse than none"


@pytest.mark.parametrize("name", ["../../../escaped", "/tmp/escaped", "..", ".hidden", "a/b", "x" * 900, "a\nb\x1b[2J"])
def test_nothing_that_others_have_named_leaves_the_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backend's name from anyone's record file becomes part of a path."""
    lines = (record(backend=name), timing([[9.0, 10.0]], backend=name))
    with RecordWriter(Path("run.jsonl")) as writer:
        from conformance.fakes.results import header

        for line in (header(), *lines):
            writer.append(line)
    before = {path for path in tmp_path.parent.rglob("*") if "dataset" not in path.parts}
    assert main(["export", "flashinfer", "run.jsonl", "--out", "dataset"]) == 0, capsys.readouterr().err
    files = [path for path in Path("dataset").rglob("*") if path.is_file()]
    assert any("solutions" in path.parts for path in files)
    assert all(len(path.relative_to("dataset").parts) <= 4 for path in files)
    assert {path for path in tmp_path.parent.rglob("*") if "dataset" not in path.parts} == before


# Kills


# The keys of the caches


def _sees(kind: str, row: Row, home: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The keys readable to a process of `kind` that works on `row`."""
    monkeypatch.setattr(Path, "home", lambda: home)
    hidden = Processes((), 0)._confinement(kind, row).hidden
    keys = {path.stem: str(path) for path in (home / ".local/state/megamoe").iterdir()}
    assert set(keys) == {"cutedsl", "ptx"}, "a process that is kept from a file can make none beside it"
    return {name for name, path in keys.items() if path not in hidden}


def test_only_who_vouches_for_a_cache_sees_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that could sign a parse could choose what the machine reads its own text as."""
    row = parse_row(f"{CASE} on {FAKE}:WORKS sm_100a vm eager")
    assert _sees("builder", row, tmp_path, monkeypatch) == set()
    assert _sees("builder", row._replace(backend="cutedsl"), tmp_path, monkeypatch) == {"cutedsl"}
    assert _sees("machine", row, tmp_path, monkeypatch) == {"ptx"}
    assert _sees("machine", row._replace(executor=f"{FAKE}:EXECUTOR"), tmp_path, monkeypatch) == set()

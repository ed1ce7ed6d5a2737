"""Shards of a run: their records concatenate, and the gate names the missing shard in one sentence."""

from __future__ import annotations

import json
import shlex
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest

from conformance.fakes import backends as fake_backends
from megamoe.cli.main import main
from megamoe.cli.options import Share
from megamoe.contract import Row
from megamoe.judge.judge import judge
from megamoe.judge.run import RunSettings
from megamoe.records.files import read_records
from megamoe.records.lines import Record
from megamoe.spec.selection import SelectionError

FAKE = fake_backends.__name__
CASES = [f"fmha:hd=64,t={t},s_k=3" for t in (1, 2, 3)]
ROWS = [word for case in CASES for word in ("--case", case)]
WORKS = [*ROWS, "--backend", f"{FAKE}:WORKS", "--executor", f"{FAKE}:EXECUTOR", "--jobs", "1"]
Records = dict[int, bytes]


def _judged_here(rows: Sequence[Row], settings: RunSettings) -> Generator[Record, None, None]:
    """Judges without workers, which are not under test here."""
    yield from (judge(row, settings.run) for row in rows)


@pytest.fixture(scope="module", autouse=True)
def _in_a_folder_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # One folder for all, because in another folder a backend's offer is requested again.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("shards"))
        patch.setattr("megamoe.cli.run.judged", _judged_here)
        yield


@pytest.fixture(scope="module")
def shards(_in_a_folder_of_its_own: None) -> Records:
    """The record files of a run in two shards."""
    for index in (1, 2):
        assert main(["run", *WORKS, "--shard", f"{index}/2", "--output", f"shard-{index}.jsonl"]) == 0
    return {index: Path(f"shard-{index}.jsonl").read_bytes() for index in (1, 2)}


def _gate(content: bytes, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str]]:
    Path("all.jsonl").write_bytes(content)
    capsys.readouterr()
    status = main(["gate", "all.jsonl", *options])
    return status, capsys.readouterr().out.splitlines()


def test_shards_concatenate(shards: Records, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = _gate(shards[1] + shards[2], capsys)
    assert status == 0, said
    assert "3 passed, 0 failed" in said
    Path("all.jsonl").write_bytes(shards[1] + shards[2])
    heads = read_records(Path("all.jsonl")).headers
    assert len({head.shard.run_set for head in heads if head.shard}) == 1, "two jobs of one tree belong together"
    assert sum(head.owed_rows for head in heads) == len(CASES)


def test_a_missing_shard_is_one_sentence(shards: Records, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = _gate(shards[1], capsys)
    assert status == 1, "a run without one of its shards proves nothing"
    about = [line for line in said if "shard 2/2 of run set" in line]
    assert len(about) == 1, f"one shard is missing, and the gate says: {said}"
    assert not any("there is no record of" in line for line in said), "its rows need no sentence each"
    assert any("missing" in line and "passed" in line for line in said), "but they are counted"
    assert _gate(shards[1], capsys, "--shard", "1/2")[0] == 0, "one shard can be held alone"


def test_the_command_of_a_missing_shard_can_be_pasted(shards: Records, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("pasted")
    folder.mkdir()
    (folder / "1.jsonl").write_bytes(shards[1])
    capsys.readouterr()
    assert main(["gate", str(folder)]) == 1, "a folder is the record files in it"
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "shard 2/2 of run set" in line]
    words = shlex.split(said.partition(". Run it: ")[2])
    assert words[0] == "megamoe", f"a whole command: {said}"
    assert main([*words[1:], "--jobs", "1", "--output", str(folder / "2.jsonl")]) == 0
    assert main(["gate", str(folder)]) == 0, capsys.readouterr().out


def test_resume_finishes_its_own_shard(shards: Records, capsys: pytest.CaptureFixture[str]) -> None:
    Path("2.jsonl").write_bytes(shards[2].split(b"\n")[0] + b"\n")
    assert main(["run", "--resume", "2.jsonl", "--shard", "2/2"]) == 2, "the file knows which shard it is"
    assert main(["run", "--resume", "2.jsonl", "--jobs", "1"]) == 0
    done = {one.row for one in read_records(Path("2.jsonl")).records}
    assert len(done) == read_records(Path("2.jsonl")).headers[0].owed_rows, "rows of the first shard are not its own"
    assert _gate(shards[1] + Path("2.jsonl").read_bytes(), capsys)[0] == 0
    told = json.loads(shards[2].split(b"\n")[0])
    told["shard"]["plan"] = "0" * 16
    Path("2.jsonl").write_text(f"{json.dumps(told)}\n")
    capsys.readouterr()
    assert main(["run", "--resume", "2.jsonl"]) == 2, "today's second shard is not the one that was begun"
    assert "shards have other rows now" in capsys.readouterr().err


def test_options_that_mean_no_shard_are_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *WORKS, "--shard", "1/9"]) == 2
    assert "give at most 3" in capsys.readouterr().err
    with pytest.raises(SelectionError, match="give --shard I/N too"):
        _ = Share(run_set="nightly").nth

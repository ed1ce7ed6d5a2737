"""Records of campaigns: torn lines, two writers, files that are no record."""

from __future__ import annotations

import lzma
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from conformance import ROOT
from conformance.kernels.mutants.__main__ import main
from conformance.kernels.mutants.campaign import Outcome, Record
from conformance.kernels.mutants.journal import Ran
from conformance.kernels.mutants.unmutated import Watch, Watched
from megamoe.records.lines import RecordError


def test_a_torn_line_is_cut_off_and_run_again(tmp_path: Path) -> None:
    path = tmp_path / "mutants.jsonl"
    record = Record(path)
    record.append(Ran("--sync all", "abc", "2026-11-22 04:47 UTC", 2))
    record.append(Outcome("a/drop/1.0", "p", "drop", 1, "bar.sync 0;", ""))
    record.close()
    whole = path.read_text()
    path.write_text(f'{whole}{{"id": "a/drop/2')
    torn, again = path.read_text(), Record(path)
    assert (path.read_text(), set(again.by_id), len(again.calls)) == (torn, {"a/drop/1.0"}, 1), "reading writes nothing"
    again.append(record.calls[0])
    assert path.read_text() == whole + whole.splitlines(keepends=True)[0], "the next line is written over the torn one"


def test_a_torn_record_that_is_written_anew_is_appended_to(tmp_path: Path) -> None:
    """As with --forget --smoke: the old end of the file says nothing about what was written since."""
    record = Record(tmp_path / "mutants.jsonl")
    one = Outcome("a/drop/1.0", "p", "drop", 1, "bar.sync 0;", "")
    others = [replace(one, id=f"b/drop/{at}.0") for at in range(3)]
    for each in (one, *others):
        record.append(each)
    record.close()
    with record.path.open("a") as out:
        out.write('{"id": "a/drop/2')
    torn = Record(record.path)
    torn.leave_out({one.id})
    torn.append(replace(one, id="c/drop/1.0"))
    wanted = [*(each.id for each in others), "c/drop/1.0"]
    assert list(Record(record.path).by_id) == wanted, f"the file holds {record.path.read_bytes()[-200:]!r}"


def test_a_compressed_record_is_read_and_not_written(tmp_path: Path) -> None:
    plain, packed = Record(tmp_path / "mutants.jsonl"), tmp_path / "mutants.jsonl.xz"
    one = Outcome("a/drop/1.0", "p", "drop", 1, "bar.sync 0;", "")
    plain.append(one)
    plain.close()
    packed.write_bytes(lzma.compress(plain.path.read_bytes()))
    assert Record(packed).results == [one]
    with pytest.raises(RecordError, match="is compressed and only read"):
        Record(packed).append(one)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is no file that xz has written"):
        Record(packed)


_WRITER = """
import sys
from pathlib import Path
from conformance.kernels.mutants.journal import Journal, Ran
record = Journal(Ran, Path(sys.argv[1]))
print("read", flush=True)
sys.stdin.readline()
record.append(Ran("--unmutated 2", "abc", "2026-11-22 04:47 UTC", 2))
print("written", flush=True)
sys.stdin.readline()
"""


def test_of_two_processes_that_write_one_record_the_second_is_refused(tmp_path: Path) -> None:
    """One read the file before the first wrote, one reads while it writes; lines of both are whole."""
    path, mine = tmp_path / "unmutated.jsonl", Watched("ptx", "sm_90a", "fmha:hd=64,t=1,s_k=1", rows=1)
    early = Watch(path)
    with Popen([sys.executable, "-c", _WRITER, str(path)], stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "read\n"
        print(file=other.stdin, flush=True)
        assert other.stdout.readline() == "written\n"
        for late in (early, Watch(path)):
            with pytest.raises(RecordError, match="is being written by another process"):
                late.append(mine)
            with pytest.raises(RecordError, match="is being written by another process"):
                late.leave_out(set())
    with pytest.raises(RecordError, match="since it was read"):
        early.append(mine)
    late = Watch(path)
    late.append(mine)
    late.leave_out(set())
    with pytest.raises(RecordError, match="is being written"):
        Watch(path).append(mine)
    assert (len(late.calls), late.rows, len(Watch(path).calls)) == (1, 1, 1), path.read_text()


@pytest.mark.parametrize(
    "held",
    [
        '{"command": "a", "machine": "", "started": "", "planned": 1}',
        '{"my": "data"}',
        '{"my": "data"}\n',
        "some\nnotes",
        '{"id": 3}\n',
        "[1]\n",
        "3",
    ],
)
@pytest.mark.parametrize("option", ["--table", "--smoke", "--holes"])
def test_a_file_that_is_no_record_is_left_as_it_is(
    held: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(held)
    case = ["--case", "fmha:hd=64,t=1,s_k=1"] if option == "--holes" else []
    assert main([option, "--record", str(path), *case]) == 2
    assert f"{path}:1: " in (told := capsys.readouterr().err), told
    assert "name another file with --record" in told, told
    assert (path.read_text(), list(tmp_path.iterdir())) == (held, [path]), "somebody's file was changed"

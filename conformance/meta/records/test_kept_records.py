"""The records behind our claims are listed, whole, and of a revision that can be checked out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance import ROOT
from megamoe.records.files import RecordFile, read_records

RECORDS = ROOT / "results" / "records"
FILES = sorted(RECORDS.glob("*.jsonl"))


def _complaints(file: RecordFile) -> list[str]:
    found = [file.torn] if file.torn else []
    # A lent machine with a device gets a copy of the tree, without its history; README.md says of which commit.
    elsewhere = {record.run for record in file.records if record.executor == "gpu"}
    for header in (header for header in file.headers if header.run not in elsewhere):
        if header.git_revision is None or not re.fullmatch(r"[0-9a-f]{40}", header.git_revision):
            found.append(f"{file.path.name} is of revision {header.git_revision}, which nobody can check out")
    for header in file.headers:
        rows = {record.row for record in file.records if record.run == header.run}
        if len(rows) != header.owed_rows:
            found.append(f"{file.path.name}: run {header.run} owed {header.owed_rows} rows and has {len(rows)}")
    return found


def test_each_is_listed() -> None:
    listed = re.findall(r"^\| `([^`/]+\.jsonl)`", (RECORDS / "README.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == [file.name for file in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_is_whole_and_of_a_revision(path: Path) -> None:
    assert _complaints(read_records(path)) == []


def test_a_torn_file_of_changed_code_is_noticed(tmp_path: Path) -> None:
    header = FILES[0].read_text("utf-8").splitlines()[0]
    revision = read_records(FILES[0]).headers[0].git_revision
    (tmp_path / "r.jsonl").write_text(header.replace(f'"{revision}"', f'"{revision}+changes"') + '\n{"torn')
    torn, changed, cut = _complaints(read_records(tmp_path / "r.jsonl"))
    assert "is torn" in torn
    assert "+changes, which nobody can check out" in changed
    assert "rows and has 0" in cut


def test_a_run_that_was_cut_short_is_noticed(tmp_path: Path) -> None:
    lines = (RECORDS / "smoke.jsonl").read_text("utf-8").splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if '"kind":"record"' in line)
    (tmp_path / "r.jsonl").write_text("".join(lines[:last] + lines[last + 1 :]))
    (cut,) = _complaints(read_records(tmp_path / "r.jsonl"))
    assert re.search(r"owed (\d+) rows and has \d+", cut), cut


def test_the_smoke_profile_passed_as_a_whole() -> None:
    file = read_records(RECORDS / "smoke.jsonl")
    (header,) = file.headers
    assert {record.status for record in file.records} == {"passed"}
    assert len({record.row for record in file.records}) == header.owed_rows
    assert {line.program_sha256 for line in file.figures} == {record.program_sha256 for record in file.records}

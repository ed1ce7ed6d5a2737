"""Record files survive a round trip and a kill; a bad line is named, a torn one ignored; writes are atomic."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import time
from pathlib import Path
from random import Random

import pytest

from conformance import ROOT
from conformance.fakes.endless_writer import append_for_ever
from conformance.fakes.results import ACCEPTANCE, AGREEMENT, figures, header, record, timing
from megamoe.contract import Program, Row
from megamoe.contract.counted import counted
from megamoe.contract.program import MAX_PTX
from megamoe.records.files import RecordWriter, read_records, write_file, write_folder
from megamoe.records.lines import MAX_LINE_TEXT, MAX_NAME, AnyLine, Evidence, Record, RecordError, record_of
from megamoe.records.provenance import run_header
from megamoe.spec.selection import Selection

RECORDS = ROOT / "results" / "records"
ROW = Row("fmha:hd=64,t=1,s_k=128", "ptx", "sm_100a", "vm", "random:3")


def _write(path: Path, *records: Record) -> None:
    with RecordWriter(path) as writer:
        for record in records:
            writer.append(record)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    evidence = Evidence({"o.max": math.inf, "o.rms": 0.5}, {"mma_flops": 2**60}, "ab", bundle="dir")
    record = record_of("run-1", ROW, "failed", "o is wrong", evidence, 1.25)
    header = run_header(Selection(backends=("ptx",)), owed_rows=1)
    with RecordWriter(tmp_path / "new" / "r.jsonl") as writer:
        writer.append(header)
        writer.append(record)
    found = read_records(tmp_path / "new" / "r.jsonl")
    assert found.records == (record,), "a record must survive a round trip, infinities and large counters included"
    assert found.headers == (header,), "a header must survive a round trip"
    assert found.torn is None, "a file of whole lines has no torn line"


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    _write(tmp_path / "r.jsonl", record_of("run-1", ROW, "failed", "x", Evidence({"o.max": math.nan})))
    assert b"NaN," not in (tmp_path / "r.jsonl").read_bytes().replace(b'"NaN"', b""), "a bare NaN is not JSON"
    assert math.isnan(read_records(tmp_path / "r.jsonl").records[0].metrics["o.max"]), "NaN must stay NaN"


def test_a_sentence_ends_with_the_command_that_reruns_it() -> None:
    sentence = record_of("run-1", ROW, "failed", "o is wrong.").sentence
    assert sentence == (
        "o is wrong. Rerun: megamoe run --case fmha:hd=64,t=1,s_k=128 --backend ptx --target sm_100a "
        "--executor vm --schedule random:3"
    )


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_torn_last_line_is_reported_and_ignored(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "r.jsonl"
    _write(path, record_of("a", ROW, "passed", ""), record_of("b", ROW, "passed", ""))
    first, second = path.read_bytes().splitlines()
    path.write_bytes(first + b"\n" + second[:kept])
    found = read_records(path)
    assert [record.run for record in found.records] == ["a"], "the whole line must be read, the torn one must not"
    assert found.torn is not None
    assert "line 2 is torn" in found.torn, "the torn line must be reported"
    with pytest.raises(RecordError, match="ends in a torn line"):
        RecordWriter(path)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (b'"status":"passed"', b'"status":"fine"', "status"),
        (b'"backend":"ptx",', b"", "backend"),
        (b'"schema_version":2', b'"schema_version":9', "schema_version: 9 is newer, .* reads schema 1 and schema 2"),
        (b'"kind":"record",', b"", "it has no kind; the kinds are run, record, agreement"),
        (b'"kind":"record"', b'"kind":"verdict"', "its kind is 'verdict'; the kinds are run, record, agreement"),
        (b'"counters":{}', b'"counters":{"mma_flops":-1}', "counters.mma_flops.*greater than or equal to 0"),
        (b'"sentence":""', b'"sentence":"","speed":0.0', "speed"),
        (b'"sentence":""', b'"sentence":"o is wrong"', "only a pass has none"),
        (b'"status":"passed"', b'"status":"failed"', "only a pass has none"),
        (b'"op":"fmha"', b'"op":"gemm"', "op 'gemm' with the case"),
        (b'"judge_host_seconds":null', b'"judge_host_seconds":-1', "judge_host_seconds"),
        (b"{", b"[", "not JSON"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, old: bytes, new: bytes, complaint: str) -> None:
    path = tmp_path / "r.jsonl"
    _write(path, record_of("a", ROW, "passed", ""), record_of("b", ROW, "passed", ""))
    first, second = path.read_bytes().splitlines()
    assert old in second, "the planted fault must change the line"
    path.write_bytes(first + b"\n" + second.replace(old, new, 1) + b"\n")
    with pytest.raises(RecordError, match=rf"line 2.*{complaint}"):
        read_records(path)


def test_a_file_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot read records from"):
        read_records(tmp_path / "none.jsonl")
    with pytest.raises(RecordError, match="it is a device, not a plain file"):
        read_records(Path("/dev/zero"))


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "records.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(RecordError, match="it is a pipe"):
        read_records(pipe)
    with pytest.raises(RecordError, match="cannot write records to"):
        RecordWriter(tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"null", "schema 2"),
        (b"7", "schema 2"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"schema_version": {}}', "schema 2"),
        (b'{"schema_version": 1e999}', "schema 2"),
        (b'{"schema_version": -1}', "schema_version: -1 is unknown; this megamoe reads schema 1 and schema 2"),
        (b'{"schema_version": 0, "kind": "run"}', "schema_version: 0 is unknown"),
        (b'{"schema_version": true}', "schema_version: true is unknown"),
        (b'{"schema_version": 3}', "schema_version: 3 is newer, so read it with a newer megamoe"),
        (b'{"kind": "run"}', "it has no schema_version; this megamoe reads schema 1 and schema 2"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_garbage_is_refused_in_a_sentence(tmp_path: Path, text: bytes, complaint: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(text + b"\n")
    with pytest.raises(RecordError, match=f"r.jsonl, line 1.*{complaint}"):
        read_records(path)


@pytest.mark.parametrize("key", ["sentence", "case", "op", "kind", "schema_version", "LONG"])
@pytest.mark.parametrize("filler", ["x", "\\n", "\\u001b"], ids=repr)
def test_a_complaint_repeats_no_more_than_the_beginning_of_a_value(tmp_path: Path, key: str, filler: str) -> None:
    """A line may hold megabytes, and control sequences for a terminal."""
    path = tmp_path / "r.jsonl"
    line = json.loads(record_of("a", ROW, "passed", "").model_dump_json())
    text = json.dumps({**line, key: "LONG"}).replace("LONG", filler * 100_000)
    path.write_text(text + "\n")
    with pytest.raises(RecordError, match="line 1") as refusal:
        read_records(path)
    said = str(refusal.value).removeprefix(str(path))
    assert len(said) < 600, f"{len(said)} characters are no sentence"
    assert said.isprintable(), f"one line, as text: {said!r}"
    assert "…" in said, "that something is left out must be said"


LINES = (header(), record("failed", {"mma_flops": 1}), timing([[1.0] * 3000]), figures(128), AGREEMENT, ACCEPTANCE)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.kind)
def test_a_torn_line_of_any_kind_is_set_aside(tmp_path: Path, line: AnyLine) -> None:
    """Cut anywhere: after the first byte, in the middle of a word, before the newline."""
    path = tmp_path / "r.jsonl"
    text = line.model_dump_json().encode()
    for kept in (1, 2, len(text) // 3, len(text) // 2, len(text) - 1, len(text)):
        path.write_bytes(text + b"\n" + text[:kept])
        found = read_records(path)
        assert found.lines == (line,), f"the whole line before a torn one of {kept} bytes must be read"
        assert found.torn is not None
        assert f"({counted(kept, 'byte')} without a newline)" in found.torn


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_at_any_instant_leaves_whole_lines_and_at_most_a_torn_last_one(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    path, filler = tmp_path / "r.jsonl", timing([[1.0] * 5000])
    writer = multiprocessing.get_context("spawn").Process(target=append_for_ever, args=(path, ROW, filler))
    writer.start()
    size, deadline = random.randrange(1, 2_000_000), time.monotonic() + 60
    while time.monotonic() < deadline and (not path.exists() or path.stat().st_size < size):
        time.sleep(0.001)
    with pytest.raises(RecordError, match="written by another run"):
        RecordWriter(path)
    time.sleep(random.random() / 100)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    data, found = path.read_bytes(), read_records(path)
    assert len(data) >= size, "the writer must have written as much before it was killed"
    assert len(found.lines) == data.count(b"\n"), "every whole line before the kill must be read"
    assert (found.torn is None) == data.endswith(b"\n"), "a torn last line must be reported"
    if found.torn:
        with pytest.raises(RecordError, match="ends in a torn line"):
            RecordWriter(path)
    else:
        _write(path, record_of("after", ROW, "passed", ""))
        assert read_records(path).records[-1].run == "after", "a file that is whole can be continued"


def test_a_file_of_the_first_version_is_still_read() -> None:
    """The file was committed before the second version existed."""
    file = read_records(RECORDS / "fmha-cells-both.jsonl")
    assert len(file.records) == 144, "every verdict of the first version must be read"
    assert {line.schema_version for line in file.lines} == {2}, "an old line is handed on in the form of this version"


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_file_is_replaced_and_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    for data in ("one \N{GREEK SMALL LETTER LAMDA}", b"two"):
        write_file(path, data, "the list")
        assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert path.stat().st_mode & 0o777 == 0o644
    assert _names(tmp_path) == ["a.txt", "new"]


@pytest.mark.parametrize("step", ["fsync", "replace", "fchmod"])
@pytest.mark.parametrize(("fault", "raised"), [(_full, RecordError), (_interrupted, KeyboardInterrupt)])
def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, fault: object, raised: type[BaseException]
) -> None:
    path = tmp_path / "a.txt"
    write_file(path, "old", "the list")
    monkeypatch.setattr(os, step, fault)
    with pytest.raises(raised) as refusal:
        write_file(path, "new", "the list")
    assert str(refusal.value) in ("", f"cannot write the list {path}: No space left on device")
    assert path.read_text() == "old"
    assert _names(tmp_path) == ["a.txt"], "nothing half written stays"


def test_a_folder_is_there_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "out", {"a/b.txt": "b", "c.txt": "c"}, "the dataset")
    assert _names(tmp_path) == ["a", "b.txt", "c.txt", "out"]
    with pytest.raises(RecordError, match="is not empty; give a new folder"):
        write_folder(tmp_path / "out", {"d.txt": "d"}, "the dataset")
    monkeypatch.setattr(os, "replace", _full)
    with pytest.raises(RecordError, match=r"cannot write the dataset to .*: No space left on device"):
        write_folder(tmp_path / "other", {"d.txt": "d"}, "the dataset")
    assert _names(tmp_path) == ["a", "b.txt", "c.txt", "out"], "nothing half written stays"


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write the list"):
        write_file(tmp_path / "file" / "a.txt", "", "the list")
    with pytest.raises(RecordError, match="cannot write the dataset to"):
        write_folder(tmp_path / "file" / "out", {}, "the dataset")


@pytest.mark.parametrize("name", ["../a", "/tmp/a", "a/../../b", ".."])
def test_no_file_of_a_folder_lies_outside_of_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecordError, match="leads out of it"):
        write_folder(tmp_path / "out", {"fine": "", name: ""}, "the dataset")
    assert _names(tmp_path) == []


def test_what_others_say_is_capped_where_it_is_written_and_where_it_is_read(tmp_path: Path) -> None:
    long = record_of("a", ROW, "failed", "x" * 10_000_000)
    assert len(long.sentence) <= MAX_LINE_TEXT
    assert "(10,000,000 characters)" in long.sentence
    assert long.sentence.endswith(ROW.rerun), "the command that reruns the row is never cut"
    _write(tmp_path / "r.jsonl", long)
    assert read_records(tmp_path / "r.jsonl").records == (long,)
    text = (tmp_path / "r.jsonl").read_text().replace("Rerun", "y" * 10_000_000)
    (tmp_path / "r.jsonl").write_text(text)
    assert len(read_records(tmp_path / "r.jsonl").records[0].sentence) <= MAX_LINE_TEXT
    with pytest.raises(ValueError, match="a name has at most"):
        record_of("a", ROW._replace(backend="b" * (MAX_NAME + 1)), "passed", "")
    with pytest.raises(ValueError, match="characters of PTX"):
        Program("sm_100a", "x" * (MAX_PTX + 1), ())

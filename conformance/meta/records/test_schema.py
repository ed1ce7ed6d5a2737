"""The JSON Schema of record lines is tracked and up to date, and agrees with the models that read and write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_rs import Draft202012Validator, meta

from conformance import ROOT
from conformance.fakes.results import ACCEPTANCE, AGREEMENT, figures, header, record, timing
from megamoe.cli.main import main
from megamoe.contract import STATUSES
from megamoe.records.files import RecordWriter, parse_records
from megamoe.records.lines import VERSIONS, AnyLine, Record, RecordError, record_schema

RESULTS = ROOT / "results"
SCHEMAS = {version: record_schema(version) for version in VERSIONS}
VALIDATORS = {version: Draft202012Validator(schema) for version, schema in SCHEMAS.items()}
Line = dict[str, Any]


def line_of_each_kind() -> dict[str, AnyLine]:
    agreement = AGREEMENT.model_copy(update={"metrics": {"cutedsl~ptx.o.max": float("inf")}})
    lines = (header(), record("failed", {"mma_flops": 1}), agreement, timing([[1.0, 2.0]]), figures(128), ACCEPTANCE)
    return {line.kind: line for line in lines}


SOUND = line_of_each_kind()


def refused_by_models(line: Line) -> bool:
    try:
        parse_records(Path("planted"), json.dumps(line).encode() + b"\n")
    except RecordError:
        return True
    return False


def refused_by_schema(line: Line, version: int = 2) -> bool:
    return not VALIDATORS[version].is_valid(line)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tracked_schema_is_up_to_date(version: int, capsys: pytest.CaptureFixture[str]) -> None:
    file = RESULTS / "schema" / f"record-{version}.schema.json"
    assert main(["schema", "--version", str(version)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads(file.read_text("utf-8")) == printed, (
        f"{file.name} is not what the models say; renew it: megamoe schema --version {version} > {file.name}"
    )
    meta.validate(printed)
    assert printed["$id"] == f"urn:megamoe:record-{version}"


def test_there_is_no_schema_of_another_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--version", "99"]) == 2
    assert "there is no version 99" in capsys.readouterr().err


def committed() -> Iterator[tuple[str, bytes]]:
    """Every line of every record file in results/ that git may track. witness.jsonl has another format."""
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir() and path.name not in ("runs", "failures")):
        for file in sorted(folder.rglob("*.jsonl")):
            for number, text in enumerate(file.read_bytes().splitlines(), 1):
                yield f"{file.name}, line {number}", text


@cache
def of_kind(version: int, kind: str) -> Draft202012Validator:
    """A validator for one kind of line: as strict as the whole schema, and much faster on long lines."""
    schema = SCHEMAS[version]
    return Draft202012Validator({**schema, "oneOf": [{"$ref": schema["discriminator"]["mapping"][kind]}]})


def test_every_committed_line_fits_the_schema_of_its_version_and_of_this_one() -> None:
    seen: dict[int, int] = {}
    for where, text in committed():
        line = json.loads(text)
        version = line["schema_version"]
        seen[version] = seen.get(version, 0) + 1
        check = of_kind(version, line["kind"])
        assert check.is_valid(line), f"{where}: {next(check.iter_errors(line)).message}"
        (upgraded,) = parse_records(Path(where), text + b"\n").lines
        again = json.loads(upgraded.model_dump_json())
        if version == 2 and again == line:
            continue
        check = of_kind(2, line["kind"])
        assert check.is_valid(again), f"{where}, upgraded: {next(check.iter_errors(again)).message}"
    assert seen.get(1), "there must be lines of the first version to read"


@pytest.mark.parametrize("kind", SOUND)
def test_a_line_of_each_kind_fits(kind: str) -> None:
    line = json.loads(SOUND[kind].model_dump_json())
    assert not refused_by_schema(line)
    assert not refused_by_models(line)


words = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=8)
numbers = st.dictionaries(words, st.floats(), max_size=3)
counts = st.dictionaries(words, st.integers(0, 2**63), max_size=3)
samples = st.lists(st.floats(0, 1e6, exclude_min=True, allow_subnormal=False), min_size=1, max_size=5)
any_record = st.builds(
    lambda status, metrics, counters, sentence: record(status).model_copy(
        update={"metrics": metrics, "counters": counters, "sentence": "" if status == "passed" else "x" + sentence}
    ),
    st.sampled_from(STATUSES), numbers, counts, words,
)  # fmt: skip
any_line = st.one_of(
    any_record,
    st.builds(lambda times, status: timing(times, status=status), samples, st.sampled_from(STATUSES)),
    st.builds(lambda software: header(software=software), st.dictionaries(words, words, max_size=3)),
    st.builds(figures, st.integers(0, 255), words.map("ptxas ".__add__), st.integers(0, 10**6)),
)


@given(any_line)
@settings(max_examples=150)
def test_whatever_is_written_fits(line: AnyLine) -> None:
    text = line.model_dump_json()
    assert not refused_by_schema(json.loads(text)), f"the schema refuses what the writer writes: {text}"
    (again,) = parse_records(Path("written"), text.encode() + b"\n").lines
    assert again.model_dump_json() == text, "and what is read is what was written"


@given(st.sampled_from(sorted(SOUND)), st.data())
@settings(max_examples=150)
def test_nonsense_in_any_place_is_refused_by_both(kind: str, data: st.DataObject) -> None:
    line: Line = json.loads(SOUND[kind].model_dump_json())
    line[data.draw(st.sampled_from(sorted(line)))] = {"x": [{"y": "nonsense"}]}
    assert refused_by_models(line), "the models take nonsense"
    assert refused_by_schema(line), "the schema takes nonsense"


def _set(**values: object) -> Callable[[Line], Line]:
    return lambda line: {**line, **values}


def _without(name: str) -> Callable[[Line], Line]:
    return lambda line: {key: value for key, value in line.items() if key != name}


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        *((kind, _set(speed=1.0)) for kind in SOUND),
        *((kind, _without("run")) for kind in SOUND),
        *((kind, _without("kind")) for kind in SOUND),
        *((kind, _without("schema_version")) for kind in SOUND),
        *((kind, _set(schema_version=3)) for kind in SOUND),
        *((kind, _set(schema_version=True)) for kind in SOUND),
        *((kind, _set(schema_version="2")) for kind in SOUND),
        *((kind, _set(kind="verdict")) for kind in SOUND),
        ("run", _without("git_revision")),
        ("run", _set(owed_rows="many")),
        ("run", _set(device={"name": "NVIDIA H200"})),
        ("run", _set(software=["triton"])),
        ("record", _set(status="fine")),
        ("record", _set(status="passed")),
        ("record", _set(sentence="")),
        ("record", _set(judge_host_seconds=-1)),
        ("record", _set(audit_host_seconds=-1)),
        ("record", _set(counters={"mma_flops": 1.5})),
        ("record", _set(counters={"mma_flops": -1})),
        ("record", _set(metrics={"o.max": "large"})),
        ("agreement", _without("backends")),
        ("timing", _set(samples_us=[], rounds=[])),
        ("timing", _set(samples_us=[0.0, 1.0])),
        ("timing", _set(samples_us=[-1.0, 1.0])),
        ("timing", _set(samples_us=["NaN", 1.0])),
        ("timing", _set(status="failed", sentence="x")),
        ("timing", _set(temperature="warm")),
        ("timing", _set(launches_per_sample=0)),
        ("timing", _set(floor_us=-1)),
        ("figures", _set(kernels={"k": {"registers": 1.5}})),
        ("acceptance", _set(reason="")),
    ],
)
def test_a_planted_fault_is_refused_by_both(kind: str, spoil: Callable[[Line], Line]) -> None:
    line = spoil(json.loads(SOUND[kind].model_dump_json()))
    assert refused_by_models(line), "the models take it"
    assert refused_by_schema(line), "the schema takes it"


@pytest.mark.parametrize(("kind", "spoil"), [("record", _set(op="gemm")), ("timing", _set(rounds=[0]))])
def test_what_json_schema_cannot_say_is_refused_by_the_models(kind: str, spoil: Callable[[Line], Line]) -> None:
    line = spoil(json.loads(SOUND[kind].model_dump_json()))
    assert refused_by_models(line)
    assert not refused_by_schema(line), "then the documentation of record_schema is out of date"


@pytest.mark.parametrize("kind", ["timing", "figures", "acceptance"])
def test_the_first_version_has_only_its_kinds_and_fields(kind: str) -> None:
    assert refused_by_schema({**json.loads(SOUND[kind].model_dump_json()), "schema_version": 1}, 1)
    head = {**json.loads(header().model_dump_json()), "schema_version": 1}
    assert refused_by_schema(head, 1), "a header of the first version knows no device"
    del head["device"], head["software"]
    assert not refused_by_schema(head, 1)


def test_a_line_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    """model_copy and model_construct check nothing."""
    bad = Record.model_construct(**{**dict(record()), "status": "fine"})
    with RecordWriter(tmp_path / "r.jsonl") as writer, pytest.raises(RecordError, match="is not written to"):
        writer.append(bad)
    assert (tmp_path / "r.jsonl").read_bytes() == b"", "not even a part of it"

"""The page and the terminal show every record of the input, and no text in a record can act."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import pytest

from conformance import ROOT
from conformance.fakes.report_records import (
    HOSTILE,
    NOW,
    SPECS,
    data_in,
    data_of,
    full_matrix,
    hostile_records,
    material_of,
    printed,
    write_runs,
)
from conformance.fakes.results import figures, header, record, timing, write
from megamoe.cli.main import main
from megamoe.diff.differ import compare_runs
from megamoe.diff.sides import read_side
from megamoe.records.keys import SEVERITY
from megamoe.records.lines import AnyLine, Record
from megamoe.report.encoding import DIGITS, decode_records
from megamoe.report.evidence import read_coverage
from megamoe.report.material import Material, gather, record_files
from megamoe.report.measures import SIGNS
from megamoe.report.page import SCRIPTS, Extras, asset, page

MAX_LINE_BYTES = 232
"""Bytes of the page per record and timing."""
MAX_EMPTY_BYTES = 270_000
"""Bytes of the rest of the page. Three runs of the full matrix, 19,566 lines, make 4.7 MB."""


def unfound(records: Iterable[Record], data: Mapping[str, object]) -> list[str]:
    """A sentence for each record that the data lacks or changes."""
    decoded = Counter(_essence(one) for one in decode_records(data))  # type: ignore[arg-type]
    wanted = Counter(_essence(one.model_dump() | {"executor": one.executor}) for one in records)
    return [f"{count} of {key[:7]}" for key, count in (wanted - decoded).items()]


def _essence(one: Mapping[str, object]) -> tuple[object, ...]:
    named = ("case", "backend", "target", "executor", "schedule", "run", "status", "sentence")
    metrics, counters = one["metrics"], one["counters"]
    assert isinstance(metrics, dict)
    assert isinstance(counters, dict)
    return (
        *(one[name] for name in named),
        tuple((name, f"{float(value):.{DIGITS}g}") for name, value in metrics.items()),
        tuple(counters.items()),
        tuple(cast("dict[str, str]", one.get("artifact", {})).items()),
    )


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Material:
    folder = tmp_path_factory.mktemp("matrix")
    return gather(write_runs(folder, list(full_matrix(runs=2, samples=20))))


def test_every_record_of_the_input_is_in_the_page(matrix: Material) -> None:
    data = data_of(matrix)
    assert len(matrix.records) > 3000
    assert not unfound(matrix.records, data)
    assert len(data["timings"]) == len(matrix.timings)  # type: ignore[arg-type]
    assert len(data["figures"]) == len(matrix.figures)  # type: ignore[arg-type]


def test_every_tracked_record_is_in_the_page() -> None:
    material = gather(record_files(home=ROOT))
    assert len(material.records) > 1000
    assert not unfound(material.records, data_of(material))


def test_hostile_text_is_data_and_nothing_else(tmp_path: Path) -> None:
    material = material_of(tmp_path, header(), *hostile_records())
    text = page(material, Extras(SPECS, NOW))
    assert not unfound(material.records, data_in(text))
    for element, count in (("<script", 2), ("</script", 2), ("<img", 0), ("<style", 1), ("<!--", 0)):
        assert text.count(element) == count, f"a record must not add {element} to the page"


def test_a_lost_or_changed_record_is_noticed(tmp_path: Path) -> None:
    records = hostile_records()
    data = data_of(material_of(tmp_path, header(), *records))
    rows: list[list[object]] = data["records"]  # type: ignore[assignment]
    assert unfound(records, {**data, "records": rows[1:]}), "a record that is missing"
    changed = [[*row[:5], rows[0][5], *row[6:]] for row in rows]
    assert len(unfound(records, {**data, "records": changed})) == len(records) - 1, "sentences of another record"
    swapped = [[*row[:6], rows[-1][6], *row[7:]] for row in rows]
    assert unfound(records, {**data, "records": swapped}), "metrics of another record"


def test_style_and_script_are_admitted_by_their_digests(matrix: Material) -> None:
    text = page(matrix, Extras(SPECS, NOW))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy, "the page has a policy"
    for tag, body in re.findall(r"<(style|script)>(.*?)</\1>", text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[1].replace("&#39;", "'"), (
            f"the digest of the {tag} is not its own"
        )
    assert "default-src 'none'" in policy[1]
    outside = re.findall(
        r"""(?:src|href)=["'](?!#|data:)[^"']*|url\((?!#)[^)]*|@import|https?://(?!www\.w3\.org/2000/svg)""", text
    )
    assert not outside, f"the page must load nothing: {outside[:3]}"


def _lines_and_bytes(folder: Path, one_in: int) -> tuple[int, int]:
    """Lines and bytes of a page of three runs of every `one_in`-th case, with a comparison."""
    folder.mkdir()
    paths = write_runs(folder, list(full_matrix(runs=3, samples=120, one_in=one_in)))
    material = gather(paths)
    comparison = compare_runs(read_side(str(paths[0])), read_side(str(paths[2])), SPECS)
    extras = Extras(SPECS, NOW, comparison=comparison, coverage=read_coverage(ROOT / "results/coverage.md"))
    return len(material.records) + len(material.timings), len(page(material, extras).encode())


def test_the_full_matrix_with_its_history_is_small(tmp_path: Path) -> None:
    """Extrapolates from two partial pages: bytes grow linearly with the lines."""
    few, of_few = _lines_and_bytes(tmp_path / "few", 16)
    more, of_more = _lines_and_bytes(tmp_path / "more", 8)
    of_each = (of_more - of_few) / (more - few)
    assert of_each <= MAX_LINE_BYTES, f"from {few} to {more} lines the page grows by {of_each:.0f} bytes a line"
    empty = of_few - few * of_each
    assert empty <= MAX_EMPTY_BYTES, f"without a line the page has {empty:.0f} bytes"


def test_what_is_given_twice_is_shown_once(tmp_path: Path) -> None:
    lines = [header(), record(), record("failed", case="fmha:hd=64,t=4,s_k=128")]
    twice = gather([write(tmp_path / "a.jsonl", *lines), write(tmp_path / "b.jsonl", *lines)])
    assert len(twice.records) == 2
    again = gather([write(tmp_path / "c.jsonl", *lines, record("error"))])
    assert len(again.records) == 3, "another verdict on the same row of the same run is not the same line"


def test_the_newest_record_of_a_row_counts_whatever_the_order_of_files(tmp_path: Path) -> None:
    old, new = header("run-1"), header("run-2").model_copy(update={"started": "2026-11-22T00:00:00+00:00"})
    paths = [
        write(tmp_path / "new.jsonl", new, record("failed", run="run-2")),
        write(tmp_path / "old.jsonl", old, record(run="run-1"), record("error", run="run-0")),
    ]
    for order in (paths, paths[::-1]):
        material = gather(order)
        assert [one.status for one in material.latest] == ["failed"], "run-2 started last"
        assert [one.run for one in material.records] == ["run-0", "run-1", "run-2"]
        assert any("run-0 has no header" in note for note in material.notes)


def test_a_baseline_is_older_than_any_run(tmp_path: Path) -> None:
    accepted = header("baseline").model_copy(update={"started": "2027-01-01T00:00:00+00:00"})
    elsewhere = header("baseline", device=None)
    paths = [
        write(tmp_path / "vm.jsonl", elsewhere, record("error", run="baseline")),
        write(tmp_path / "run.jsonl", header("run-1"), record("failed")),
        write(tmp_path / "h200.jsonl", accepted, timing([5.0], run="baseline")),
    ]
    material = gather(paths)
    assert [one.status for one in material.latest] == ["failed"], "what happened last is what a run found"
    devices = {header.run: header.device and header.device.name for header in material.runs}
    assert devices[material.timings[0].run] == "NVIDIA H200", "two baselines of one name keep their machines"
    assert devices[material.records[0].run] is None
    assert not material.notes


def test_torn_and_empty_files_are_said(tmp_path: Path) -> None:
    torn = write(tmp_path / "torn.jsonl", header(), record())
    torn.write_bytes(torn.read_bytes() + b'{"schema_version":2,"ru')
    (tmp_path / "empty.jsonl").touch()
    material = gather([torn, tmp_path / "empty.jsonl"])
    assert len(material.records) == 1
    assert any("torn" in note for note in material.notes)
    assert any("holds no line" in note for note in material.notes)
    assert json.dumps(list(material.notes)) in json.dumps(data_of(material))


def test_nothing_at_all_is_an_error_and_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").touch()
    output = tmp_path / "report.html"
    output.write_text("the report of yesterday")
    for arguments, sentence in (
        ([str(tmp_path / "empty.jsonl")], "nothing to report"),
        ([str(tmp_path / "nowhere.jsonl")], "cannot read records"),
        ([str(tmp_path / "nothing.d")], "cannot read records"),
        ([str(ROOT / "specs")], "there is no *.jsonl"),
        ([str(ROOT / "noxfile.py")], "line 1: not JSON"),
        ([str(ROOT / "results/records"), "--against", "no-such-revision"], "no git revision"),
    ):
        assert main(["report", *arguments, "--output", str(output)]) == 2
        assert sentence in capsys.readouterr().err
    assert output.read_text() == "the report of yesterday"
    assert not [path for path in tmp_path.iterdir() if path.name not in ("empty.jsonl", "report.html")]


def test_the_command_takes_what_is_tracked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    output = tmp_path / "deep" / "report.html"
    assert main(["report", "--output", str(output)]) == 0
    assert str(output) in capsys.readouterr().out
    data = data_in(output.read_text())
    assert len(data["coverage"]) > 200  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    assert "run `megamoe run` first" in capsys.readouterr().err


def test_the_comparison_is_in_the_page(tmp_path: Path) -> None:
    before = write(tmp_path / "before.jsonl", header(), record(counters={"mma_flops": 1}), figures(100))
    after = write(tmp_path / "after.jsonl", header(), record("failed", counters={"mma_flops": 2}), figures(120))
    output = tmp_path / "report.html"
    assert main(["report", str(after), "--against", str(before), "--output", str(output)]) == 0
    found = data_in(output.read_text())["comparison"]
    expected = compare_runs(read_side(str(before)), read_side(str(after)), SPECS)
    assert isinstance(found, dict)
    assert found["line"] == expected.line
    assert [row[6] for row in found["rows"]] == [row.call for row in expected.rows]
    assert found["status"] == 1


def test_other_commands_do_not_pay_for_the_report() -> None:
    slow = "{'jinja2', 'numpy', 'torch', 'megamoe.report.page'} & set(sys.modules)"
    program = f"import sys, megamoe.cli.main; found = {slow}; sys.exit(str(found) if found else 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"importing the command line brought {done.stderr}"


def test_the_assets_end_no_element_early() -> None:
    for name in ("report.css", *SCRIPTS):
        text = asset(name)
        assert not re.search(r"</(script|style)|<!--", text, re.IGNORECASE), f"{name} would end its element"
        assert not name.endswith(".js") or text.startswith("'use strict';\n"), f"{name} is not strict"


def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = write(tmp_path / "r.jsonl", header(), record())
    (tmp_path / "file").touch()
    assert main(["report", str(records), "--output", str(tmp_path / "file" / "report.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("lines", [[header()], [record("failed")], [timing([1.0], status="failed")], [figures(9)]])
def test_whatever_kind_of_line_there_is_alone(lines: list[AnyLine], tmp_path: Path) -> None:
    material = material_of(tmp_path, *lines)
    data = data_of(material)
    kinds = [name for name in ("runs", "records", "timings", "figures") if data[name]]
    assert len(kinds) == 1, f"one line of {type(lines[0]).__name__} became {kinds}"
    assert printed(material)


def test_the_terminal_says_what_failed(tmp_path: Path) -> None:
    matrix = gather(write_runs(tmp_path, list(full_matrix(runs=1, samples=5))))
    text = printed(matrix)
    for op in matrix.ops:
        assert op in text
    counts = Counter(one.status for one in matrix.latest)
    for status in SEVERITY:
        said = f"{SIGNS[status]} {counts[status]:,} {status.replace('_', ' ')}"
        assert (said in text) == (counts[status] > 0), f"{counts[status]} rows are {status}"
    hostile = printed(material_of(tmp_path, header(), *hostile_records()))
    assert HOSTILE[0] in hostile, "a sentence is shown as it is"
    assert "[red]no markup[/red]" in hostile
    assert max(map(len, hostile.splitlines())) < 1000


def test_the_terminal_shows_what_is_nearest_to_its_bar(tmp_path: Path) -> None:
    near = record().model_copy(update={"metrics": {"o.rms": 0.93, "o.rms.bar": 1.0}})
    assert "0.930" in printed(material_of(tmp_path, header(), near))


def test_times_alone_are_a_report(tmp_path: Path) -> None:
    material = material_of(
        tmp_path, header(), timing([4.0] * 10).model_copy(update={"floor_us": 2.0, "floor_by": "bytes"})
    )
    assert "✓.50" in printed(material)
    assert len(data_of(material)["timings"]) == 1  # type: ignore[arg-type]


def test_a_timing_keeps_its_status(tmp_path: Path) -> None:
    failed = timing([1.0], status="timed_out")
    assert "T" in printed(material_of(tmp_path, header(), failed))


def test_the_newest_run_is_not_said_to_have_the_device_of_an_older_one(tmp_path: Path) -> None:
    on_the_vm = header("run-2", device=None).model_copy(update={"started": "2026-11-21T19:00:00+00:00"})
    text = " ".join(printed(material_of(tmp_path, header(), timing([4.0] * 10), on_the_vm)).split())
    assert "newest 2026-11-21T19:00 UTC at abc, no device; times of: NVIDIA H200" in text
    (tmp_path / "alone").mkdir()
    text = " ".join(printed(material_of(tmp_path / "alone", header(), record())).split())
    assert "newest 2026-11-21T18:00 UTC at abc, NVIDIA H200" in text
    assert "times of" not in text, "there is no timing"

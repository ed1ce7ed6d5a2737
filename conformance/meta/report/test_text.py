"""`megamoe report --text`: the report in a terminal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from conformance.fakes.hostile_records import HOSTILE, data_of, hostile_records, material_of, printed
from conformance.fakes.results import header, record, timing
from conformance.fakes.simulated_matrix import full_matrix, write_runs
from megamoe.records.keys import SEVERITY
from megamoe.report.material import gather
from megamoe.report.measures import SIGNS


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

"""The key of a line, and the one order of severity, in which no status hides a worse one."""

from __future__ import annotations

from itertools import permutations

import pytest

from conformance import ROOT
from conformance.fakes.results import CASE, figures, record, timing
from megamoe.contract import STATUSES, Row, Status
from megamoe.records.keys import SEVERITY, Key, KeyedLine, worst

LINES: tuple[KeyedLine, ...] = (record(), timing([1.0, 2.0]), figures(128))


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.kind)
def test_every_field_that_a_line_has_is_in_its_key(line: KeyedLine) -> None:
    names = [name for name in Key._fields if name != "kind" and hasattr(line, name)]
    assert len(names) >= 4
    for name in names:
        other = line.model_copy(update={name: "another"})
        assert Key.of(other) == Key.of(line)._replace(**{name: "another"}), f"{name} tells two lines apart"


def test_lines_of_other_runs_and_results_meet() -> None:
    assert Key.of(record("failed", {"mma_flops": 1}, run="run-2")) == Key.of(record())
    assert Key.of(timing([3.0], run="run-2")) == Key.of(timing([1.0]))
    assert Key.of(figures(1, "ptxas 14.0")) == Key.of(figures(2, "ptxas 13.5")), "two versions of one assembler"
    assert len({Key.of(line) for line in LINES}) == len(LINES), "lines of two kinds never meet"


def test_a_row_has_the_key_of_its_record() -> None:
    row = Row(CASE, "ptx", "sm_100a", "vm", "eager")
    assert Key.of(row) == Key.of(record())
    assert record().row == row


def test_what_lines_share() -> None:
    assert Key.of(record()).program == Key.of(record(schedule="lazy")).program == Key.of(figures(128)).program
    cold, hot = (Key.of(timing([1.0], temperature=temperature)) for temperature in ("cold", "hot"))
    assert cold.cell == hot.cell
    assert cold.cell != Key.of(record()).cell, "another executor"


def test_a_key_is_readable() -> None:
    assert [str(Key.of(line)) for line in LINES] == [
        f"{CASE} on ptx sm_100a vm eager (verdict)",
        f"{CASE} on ptx sm_90a gpu cold (timing)",
        f"{CASE} on ptx sm_100a ptxas (figures)",
    ]
    assert str(Key.of(record()).program) == f"{CASE} on ptx sm_100a"


def test_every_status_has_its_place() -> None:
    assert sorted(SEVERITY) == sorted(STATUSES)
    assert SEVERITY[-1] == "passed"


@pytest.mark.parametrize("kind", ["failed", "crashed", "timed_out", "error"])
def test_nothing_known_hides_no_fault(kind: Status) -> None:
    for others in permutations(["passed", "unsupported", "not_run", kind]):
        assert worst([record(status) for status in others]).status == kind  # pyright: ignore[reportArgumentType]


def test_of_several_lines_with_the_worst_status_the_last_counts() -> None:
    lines = [record("error", run="a"), record("failed", run="b"), record("failed", run="c"), record(run="d")]
    assert worst(lines).run == "c"
    with pytest.raises(ValueError, match="empty"):
        worst([])


def test_there_is_no_second_order() -> None:
    sources = [path for folder in ("megamoe", "backends") for path in (ROOT / folder).rglob("*.py")]
    second = [path.name for path in sources if "STATUSES.index" in path.read_text("utf-8")]
    assert second == [], "STATUSES is a list of names; megamoe/records/keys.py is the order"

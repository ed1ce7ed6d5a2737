"""The one order of severity: no status hides one that is worse, in whichever order lines come."""

from __future__ import annotations

from itertools import permutations

import pytest

from conformance import ROOT
from conformance.fakes.results import record
from megamoe.contract import STATUSES, Status
from megamoe.records.keys import SEVERITY, worst


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

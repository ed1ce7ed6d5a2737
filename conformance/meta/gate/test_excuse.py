"""Entries that the gate offers excuse every unsupported row and no other."""

from __future__ import annotations

from datetime import date

import pytest
import yaml

from conformance.fakes.results import ROW, judged
from megamoe.contract import Row
from megamoe.gate.excuse import as_yaml, excusing
from megamoe.gate.expected import ExpectedEntry
from megamoe.gate.verdict import judge_run
from megamoe.spec.load import load_specs

TODAY = date(2026, 11, 30)


def _entries(refused: list[Row], passed: list[Row]) -> list[ExpectedEntry]:
    records = [*(judged(row, status="unsupported") for row in refused), *map(judged, passed)]
    return excusing(judge_run([*refused, *passed], records), load_specs(), TODAY)


def _row(axes: str, backend: str = "ptx") -> Row:
    return ROW._replace(case=f"fmha:{axes}", backend=backend)


@pytest.mark.parametrize(
    ("refused", "passed", "globs"),
    [
        (["hd=64,t=1,s_k=1", "hd=256,t=4,s_k=128"], [], ["fmha:*"]),
        (["hd=256,t=4,s_k=128", "hd=256,t=32,s_k=128"], ["hd=64,t=4,s_k=128"], ["fmha:hd=256,*"]),
        (["hd=64,t=17,s_k=96,lse=false"], ["hd=64,t=1,s_k=1"], ["fmha:*,lse=false*"]),
        (["hd=64,t=1,s_k=1"], ["hd=64,t=1,s_k=128"], ["fmha:*,s_k=1"]),
    ],
)
def test_a_glob_covers_no_row_that_passed(refused: list[str], passed: list[str], globs: list[str]) -> None:
    """The glob `*,s_k=1*` would cover `s_k=128` too."""
    entries = _entries([_row(axes) for axes in refused], [_row(axes) for axes in passed])
    assert [one.case for one in entries] == globs
    assert not [axes for axes in passed for one in entries if one.matches(_row(axes))]


def test_a_row_of_another_backend_does_not_narrow_a_glob() -> None:
    refused = [_row("hd=64,t=1,s_k=1"), _row("hd=256,t=4,s_k=128")]
    (entry,) = _entries(refused, [_row("hd=64,t=1,s_k=1", "cutedsl")])
    assert (entry.case, entry.backend) == ("fmha:*", "ptx")


def test_a_row_of_no_matrix_has_no_entry() -> None:
    assert _entries([_row("hd=64,t=1,s_k=999")], [_row("hd=64,t=1,s_k=1")]) == [], "its entry would be stale"


def test_a_printed_entry_is_the_entry() -> None:
    (entry,) = _entries([_row("hd=64,t=1,s_k=1")], [])
    (read,) = yaml.safe_load(f"expected:\n{as_yaml(entry)}\n")["expected"]
    assert ExpectedEntry.model_validate(read) == entry

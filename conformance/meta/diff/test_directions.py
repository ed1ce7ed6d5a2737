"""The table of directions knows every counter, and only an increase of a cost is worse."""

from __future__ import annotations

import ast

import pytest

from conformance import ROOT
from megamoe.diff.directions import changes, direction
from megamoe.records.files import read_records


def _counted_in(text: str) -> set[str]:
    """Names in `...counters["NAME"]`, the VM's way to count."""
    return {
        node.slice.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Subscript)
        and ast.unparse(node.value).endswith("counters")
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    }


def test_the_table_knows_every_counter_of_the_machine() -> None:
    files = sorted((ROOT / "backends" / "vm").rglob("*.py"))
    counted = {name for file in files for name in _counted_in(file.read_text("utf-8"))}
    assert len(counted) > 5, "the walk must find the counters"
    unknown = sorted(name for name in counted if direction(name) is None)
    assert not unknown, f"say in megamoe/diff/directions.py which way these get worse: {unknown}"


def test_a_counter_that_nobody_listed_is_found() -> None:
    assert _counted_in('machine.counters["l2_misses"] += 1') == {"l2_misses"}
    assert direction("l2_misses") is None


def test_the_table_knows_every_counter_of_the_records() -> None:
    files = sorted((ROOT / "results" / "records").glob("*.jsonl"))
    names = {name for file in files for record in read_records(file).records for name in record.counters}
    assert names, "there must be records to read"
    assert not sorted(name for name in names if direction(name) is None)


@pytest.mark.parametrize(
    ("name", "before", "after", "trend"),
    [
        ("mma_flops", 10, 11, "worse"),
        ("mma_flops", 10, 9, "better"),
        ("instructions_alu", 10, 11, "worse"),
        ("tma_stores", None, 1, "worse"),
        ("tma_stores", None, 0, None),
        ("tma_stores", 0, None, None),
        ("tma_stores", 5, None, "vanished"),
        ("tma_stores", 5, 0, "better"),
        ("useful_flops", 10, 9, "changed"),
        ("useful_flops", 10, None, "changed"),
        ("what_is_this", 10, 11, "changed"),
        ("registers", 168, 168, None),
        ("registers", 168, 255, "worse"),
        ("gemm_up.registers", 168, 255, "worse"),
    ],
)
def test_what_a_difference_means(name: str, before: int | None, after: int | None, trend: str | None) -> None:
    old = {} if before is None else {name: before}
    new = {} if after is None else {name: after}
    found = changes(old, new)
    assert [one.trend for one in found] == ([] if trend is None else [trend])


def test_a_change_is_readable() -> None:
    (one,) = changes({"mma_flops": 200}, {"mma_flops": 250})
    assert str(one) == "mma_flops 200 -> 250 (+25.0%)"
    (new,) = changes({}, {"tma_stores": 3})
    assert str(new) == "tma_stores none -> 3"

"""A kernel that breaks the device costs its own row the status; later rows get a process with a device."""

from __future__ import annotations

import pytest

from conformance.fakes import broken_kernels
from megamoe.contract import Row
from megamoe.judge.run import RunSettings, judged
from megamoe.records.lines import Record
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, SelectionError, owed_rows

ROOM = broken_kernels.__name__
ROWS = [
    Row(
        f"fmha:hd=64,t=2,s_k=3{f',seed={seed}' if seed else ''}",
        f"{ROOM}:NAMED_CASE",
        "sm_90a",
        f"{ROOM}:LOST_DEVICE",
        "eager",
    )
    for seed in range(6)
]


@pytest.fixture(scope="module")
def records() -> dict[Row, Record]:
    found = list(judged(ROWS, RunSettings("run-1", jobs=1, timeout_s=60)))
    assert len(found) == len({record.row for record in found}), "a row has two records"
    return {record.row: record for record in found}


def test_every_row_has_its_record(records: dict[Row, Record]) -> None:
    assert set(records) == set(ROWS)


def test_the_row_that_breaks_the_device_has_failed_with_the_drivers_words(records: dict[Row, Record]) -> None:
    for seed in broken_kernels.BREAKING_SEEDS:
        record = records[ROWS[seed]]
        assert record.status == "failed", f"{record.row}: a kernel that faults is {record.status}, not failed"
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in record.sentence
        assert "can use the device no more" in record.sentence


def test_the_rows_after_it_pass(records: dict[Row, Record]) -> None:
    for seed in (0, 2, 5):
        assert records[ROWS[seed]].status == "passed", records[ROWS[seed]].sentence


def test_a_call_that_is_refused_breaks_nothing(records: dict[Row, Record]) -> None:
    record = records[ROWS[broken_kernels.REFUSED_SEED]]
    assert record.status == "error"
    assert "CUDA_ERROR_INVALID_VALUE" in record.sentence


SPECS = load_specs()


def _schedules(**options: tuple[str, ...]) -> list[tuple[str, str]]:
    selection = Selection(profile="schedules", ops=("fmha",), backends=(f"{ROOM}:NAMED_CASE",), **options)
    rows = owed_rows(SPECS, selection)
    first = [row for row in rows if row.case == rows[0].case]
    return [(row.executor.partition(":")[2] or row.executor, row.schedule) for row in first]


def test_a_device_owes_one_row_where_the_vm_owes_one_a_schedule() -> None:
    assert len(_schedules(executors=("vm",))) == 10
    assert _schedules(executors=(f"{ROOM}:LOST_DEVICE",)) == [("LOST_DEVICE", "eager")]
    both = _schedules(executors=("vm", f"{ROOM}:LOST_DEVICE"))
    assert both.count(("LOST_DEVICE", "eager")) == 1
    assert len(both) == len(_schedules(executors=("vm",))) + 1


def test_a_schedule_that_the_device_lacks_is_owed_if_it_is_not_asked_for_by_name() -> None:
    with pytest.raises(SelectionError, match="no row"):
        _schedules(executors=(f"{ROOM}:LOST_DEVICE",), schedules=("lazy",))
    assert _schedules(executors=(f"{ROOM}:LOST_DEVICE",), schedules=("lazy", "eager")) == [("LOST_DEVICE", "eager")]


def test_no_row_is_owed_on_a_device_that_nobody_asked_for() -> None:
    assert {executor for executor, _ in _schedules()} == {"vm"}

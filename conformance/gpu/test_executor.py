"""A program that cannot run, and one that breaks the device.

The executor says why it cannot run, and the row is unsupported. A kernel that breaks the device fails its own row only;
later rows get a process with a device.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from backends.gpu import executor
from conformance.fakes import broken_kernels
from megamoe.contract import Row, Target
from megamoe.judge.judge import judge
from megamoe.judge.run import RunSettings, judged
from megamoe.records.lines import Record
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, SelectionError, owed_rows

GPU = executor.EXECUTOR


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    executor._no_device.cache_clear()
    yield
    executor._no_device.cache_clear()


def _device(patch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(executor, "_found", lambda module: True)
    patch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    patch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA" in str(GPU.unavailable("sm_90a"))


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    _device(monkeypatch, (9, 0))
    monkeypatch.setattr(executor, "_found", lambda module: module != "pynvml")
    assert GPU.unavailable("sm_90a") == "the package nvidia-ml-py is not installed; the extra `gpu` of megamoe has it"


def test_no_driver_is_said_in_torchs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver\n on your system.")

    _device(monkeypatch, None)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert GPU.unavailable("sm_90a") == "torch finds no device: Found no NVIDIA driver on your system."


@pytest.mark.parametrize(
    ("capability", "target", "runs"),
    [((9, 0), "sm_90a", True), ((9, 0), "sm_100a", False), ((10, 0), "sm_100a", True), ((10, 3), "sm_100a", False)],
)
def test_a_target_needs_exactly_its_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], target: Target, runs: bool
) -> None:
    _device(monkeypatch, capability)
    reason = GPU.unavailable(target)
    assert (reason is None) == runs, reason
    assert reason is None or f"this is NVIDIA H200 with {capability[0]}.{capability[1]}" in reason


def test_its_rows_are_unsupported_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _device(monkeypatch, (8, 9))
    row = Row("fmha:hd=64,t=2,s_k=3", "conformance.fakes.broken_kernels:FAULTY", "sm_90a", "gpu", "eager")
    record = judge(row, "run-1")
    assert record.status == "unsupported"
    assert "executor gpu cannot run sm_90a here: sm_90a needs compute capability 9.0" in record.sentence


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
    assert len(_schedules(executors=("vm",))) > 1, "the profile must have several schedules"
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

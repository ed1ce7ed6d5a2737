"""The committed record of the witnesses: its three files agree with each other, with WITNESSES and with the pins."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from backends.vm import coverage
from backends.vm.faults import UnknownInstructionError
from conformance import ROOT
from conformance.witness.examination import WITNESSES
from conformance.witness.record import OPCODES, RECORD, TABLE, read_rows, table
from conformance.witness.witness import TOLERANCE, error

ROWS = read_rows(RECORD.read_text("utf-8"))
RENEW = "renew them: nox -s witness"
PINS = ROOT / "constraints.txt"


def test_the_table_is_that_of_the_record() -> None:
    assert TABLE.read_text("utf-8") == table(ROWS), RENEW


def test_every_witness_has_a_row() -> None:
    assert [row.name for row in ROWS] == [one.name for one in WITNESSES], RENEW
    assert len({row.name for row in ROWS}) == len(ROWS), "two witnesses have one name"


def test_a_row_says_what_its_status_promises() -> None:
    tightest, loosest = min(TOLERANCE.values()), max(TOLERANCE.values())
    assert tightest < loosest
    for row in ROWS:
        if row.status == "pass":
            assert row.error is not None, f"{row.name}: passed without an error measured"
            assert row.error <= loosest, f"{row.name}: passed with error {row.error}"
            assert row.instructions > 0, f"{row.name}: passed without executing anything"
            assert not row.reason, f"{row.name}: passed, but: {row.reason}"
        else:
            assert len(row.reason) > 10, f"{row.name} is {row.status} without a reason"


def test_the_record_is_of_the_pinned_versions() -> None:
    pins = {line.replace("_", "-") for line in PINS.read_text("utf-8").splitlines()}
    for package in {f"{row.package}=={row.version}" for row in ROWS}:
        assert package in pins, f"the record is of {package}, which constraints.txt does not pin; {RENEW}"


def test_opcodes_are_those_of_packages_that_passed() -> None:
    executed = json.loads(OPCODES.read_text("utf-8"))
    assert set(executed) == {row.package for row in ROWS if row.status == "pass"}, RENEW
    assert all(opcodes == sorted(set(opcodes)) and len(opcodes) > 50 for opcodes in executed.values())


def test_the_coverage_table_names_the_second_kernels() -> None:
    rows = json.loads(coverage.as_json())["forms"]
    named = {name for row in rows for name in row["second_kernels"]}
    assert named == set(json.loads(OPCODES.read_text("utf-8"))), "a package executed nothing that the table shows"


def test_an_opcode_of_no_form_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "opcodes.json"
    file.write_text('{"someone": ["mma.of.nobody"]}')
    monkeypatch.setattr(coverage, "WITNESSED", file)
    coverage.second_kernels.cache_clear()
    try:
        with pytest.raises(UnknownInstructionError, match=r"mma\.of\.nobody"):
            coverage.second_kernels()
    finally:
        coverage.second_kernels.cache_clear()


@pytest.mark.parametrize(("planted", "caught"), [(0.0, False), (0.5, True), (math.nan, True), (math.inf, True)])
def test_one_wrong_element_is_caught(planted: float, caught: bool) -> None:
    expected = torch.randn(64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected[3, 4] = -math.inf
    found = expected.bfloat16()
    found[5, 6] += planted
    assert (error(found, expected) > TOLERANCE[torch.bfloat16]) is caught


def test_a_missing_infinity_is_caught() -> None:
    expected = torch.tensor([1.0, -math.inf], dtype=torch.float64)
    assert error(torch.tensor([1.0, -1e30]), expected) == math.inf

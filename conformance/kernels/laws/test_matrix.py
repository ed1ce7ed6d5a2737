"""The cells of the smoke profile, one test each, named by the case's id: `pytest -k hd=64` picks them."""

from __future__ import annotations

from datetime import date

import pytest

from conformance import ROOT
from conformance.kernels.laws.law import Machine, specs
from conformance.kernels.laws.machines import end_as_unsupported, machines, skip_unless_available
from megamoe.contract import Case
from megamoe.gate.expected import Expectation, ExpectedEntry, read_expected
from megamoe.judge.judge import judge

PROFILE = "smoke"
EXPECTED = (ROOT / "conformance") / "expected.yaml"
MACHINES = {op: machines(op) for op in specs()}
CELLS = [
    pytest.param(machine, case, id=f"{machine}-{case.id}")
    for op, spec in specs().items()
    for case in spec.profile(PROFILE).cases
    # The judge caches the references of the last case, so keep the cells of a case together.
    for machine in MACHINES[op]
]


def test_the_profile_has_cells() -> None:
    assert CELLS, f"profile {PROFILE} has no cell on any registered backend, so that nothing was tested"


@pytest.mark.parametrize(("machine", "case"), CELLS)
def test_cell(machine: Machine, case: Case, in_ci: bool) -> None:
    skip_unless_available(machine)
    record = judge(machine.row(case, "eager"), run="pytest")
    if record.status == "unsupported":
        end_as_unsupported(record, in_ci, read_expected(EXPECTED))
    if record.status != "passed":
        pytest.fail(f"{case.id} {record.status}: {record.sentence}", pytrace=False)


def test_a_cell_that_is_unsupported_fails_in_ci_and_is_skipped_elsewhere() -> None:
    declining = Machine("conformance.fakes.fmha:NOTHING", "sm_100a", "conformance.fakes.fmha:EXECUTOR")
    record = judge(declining.row(specs()["fmha"].profile(PROFILE).cases[0], "eager"), run="pytest")
    assert record.status == "unsupported"
    with pytest.raises(pytest.fail.Exception, match=r"fakes.fmha:NOTHING .* is owed here and unsupported: .*no kernel"):
        end_as_unsupported(record, in_ci=True)
    with pytest.raises(pytest.skip.Exception, match=r"unsupported: .*this backend has no kernel that works"):
        end_as_unsupported(record, in_ci=False)
    entry = ExpectedEntry(
        case="fmha:*",
        backend=record.backend,
        target="sm_100a",
        executor=record.executor,
        status="unsupported",
        reason="there is no kernel on purpose",
        expires=date(2026, 12, 24),
        example=record.case,
    )
    with pytest.raises(pytest.skip.Exception):
        end_as_unsupported(record, in_ci=True, expected=[Expectation(entry, "expected.yaml, line 1")])

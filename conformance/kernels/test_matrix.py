"""The cells of the smoke profile, each a test that has the case's id: `pytest -k hd=64` picks them as one expects."""

from __future__ import annotations

import pytest
from law import Machine, specs
from machines import machines, skip_unless_available

from megamoe.case import Case
from megamoe.judge import judge

PROFILE = "smoke"
CELLS = [
    pytest.param(machine, case, id=f"{machine}-{case.id}")
    for op, spec in specs().items()
    for machine in machines(op)
    for case in spec.profile(PROFILE).cases
]


def test_the_profile_has_cells() -> None:
    assert CELLS, f"profile {PROFILE} has no cell on any registered backend, so that nothing was tested"


@pytest.mark.parametrize(("machine", "case"), CELLS)
def test_cell(machine: Machine, case: Case) -> None:
    skip_unless_available(machine)
    record = judge(machine.row(case, "eager"), run="pytest")
    if record.status == "unsupported":
        pytest.skip(record.sentence)
    if record.status != "passed":
        pytest.fail(f"{case.id} {record.status}: {record.sentence}", pytrace=False)

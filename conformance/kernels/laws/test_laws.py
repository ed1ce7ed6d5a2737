"""Every law that a spec names holds on every registered backend, target and executor."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.kernels.laws.law import (
    BrokenLawError,
    Law,
    Machine,
    all_laws,
    laws_of,
    specs,
)
from conformance.kernels.laws.machines import machines, skip_unless_available
from conformance.kernels.laws.trial import OutOfScopeError, Tally, conduct, trials
from megamoe.spec.marked_yaml import SpecError

# An example costs seconds where Hypothesis expects milliseconds: a share of what the profile has for others.
EXAMPLES = max(1, settings.default.max_examples // 10) if settings.default else 10
TRIALS = [
    pytest.param(law, machine, id=f"{law.op}-{law.name}-{machine}")
    for law in all_laws()
    for machine in machines(law.op)
]
TALLIES: dict[tuple[str, Machine], Tally] = defaultdict(Tally)


@pytest.mark.parametrize("op", specs())
def test_every_law_of_the_spec_is_implemented(op: str) -> None:
    implemented, named = set(laws_of(op)), set(specs()[op].laws)
    assert implemented == named, (
        f"{specs()[op].file.name} names laws that laws/{op}.py lacks: {sorted(named - implemented)}; "
        f"it lacks these laws, which are there: {sorted(implemented - named)}"
    )


@pytest.mark.parametrize("op", specs())
def test_every_law_says_what_it_says(op: str) -> None:
    for name, law in laws_of(op).items():
        assert law.sentence.endswith("."), f"the docstring of {name} must begin with the law as a sentence"


def test_there_is_a_machine() -> None:
    assert TRIALS, "no backend has a kernel for any op, so that no law was tried; register one in pyproject.toml"


@pytest.mark.parametrize(("law", "machine"), TRIALS)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_law(law: Law, machine: Machine, data: st.DataObject, pytestconfig: pytest.Config) -> None:
    skip_unless_available(machine)
    given_case, given_schedules = pytestconfig.getoption("--case"), pytestconfig.getoption("--schedule") or []
    failure = ""
    try:
        trial = data.draw(trials(law, given_case, given_schedules), label="trial")
        conduct(law, machine, trial, TALLIES[repr(law), machine])
    except OutOfScopeError as other:
        pytest.skip(str(other))
    except (BrokenLawError, SpecError) as error:
        failure = str(error)
    if failure:
        pytest.fail(failure, pytrace=False)

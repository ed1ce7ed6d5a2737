"""Every law that a spec names holds on every registered backend, target and executor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.kernels.laws.law import (
    BrokenLawError,
    Law,
    Machine,
    all_laws,
    laws_of,
    spec_of,
    specs,
)
from conformance.kernels.laws.machines import machines, skip_unless_available
from conformance.kernels.laws.strategies import drawing_of
from conformance.kernels.laws.trial import SCHEDULES, OutOfScopeError, Tally, Trial, conduct, trials
from megamoe.spec.marked_yaml import SpecError

TRIALS = [
    pytest.param(law, machine, id=f"{law.op}-{law.name}-{machine}")
    for law in all_laws()
    for machine in machines(law.op)
]
BEYOND = [
    pytest.param(law, machine, case, id=f"{law.op}-{law.name}-{machine}-{case}")
    for law in all_laws()
    for case in drawing_of(law.op).beyond.get(law.name, ())
    for machine in machines(law.op)
]
# Large cases take most of the time, and a fault at the edge of a tile does not need one.
SHARES = (1, 4, 4, 4, 8, 8, 8, 8)
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
def test_law(law: Law, machine: Machine, pytestconfig: pytest.Config) -> None:
    skip_unless_available(machine)
    given_case, given_schedules = pytestconfig.getoption("--case"), pytestconfig.getoption("--schedule") or []
    profile = settings.default or settings()

    @settings(max_examples=max(1, profile.max_examples * drawing_of(law.op).percent // 100))
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        _hold(law, machine, lambda: data.draw(trials(law, given_case, given_schedules, SHARES), label="trial"))

    holds()


@pytest.mark.parametrize(("law", "machine", "case"), BEYOND)
def test_law_beyond_the_budget(law: Law, machine: Machine, case: str, pytestconfig: pytest.Config) -> None:
    skip_unless_available(machine)
    if given := pytestconfig.getoption("--case"):
        pytest.skip(f"--case {given} was given")
    _hold(law, machine, lambda: Trial(spec_of(law.op).parse_case(f"{law.op}:{case}"), SCHEDULES[: law.schedules]))


def _hold(law: Law, machine: Machine, trial: Callable[[], Trial]) -> None:
    """Conducts one trial; a broken law fails the test in one line."""
    failure = ""
    try:
        conduct(law, machine, trial(), TALLIES[repr(law), machine])
    except OutOfScopeError as other:
        pytest.skip(str(other))
    except (BrokenLawError, SpecError) as error:
        failure = str(error)
    if failure:
        pytest.fail(failure, pytrace=False)

"""Drawn cases are within the spec's ranges and the budget, and hit the edges of tiles often."""

from __future__ import annotations

import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given, settings

from conformance.kernels.laws.law import Law, all_laws, laws_of, spec_of
from conformance.kernels.laws.strategies import cases, drawing_of, schedules
from megamoe.contract import Case

LAWS = [pytest.param(law, id=f"{law.op}-{law.name}") for law in all_laws()]
EXAMPLES = 200


def drawn(law: Law, examples: int = EXAMPLES) -> list[Case]:
    """Returns cases as a derandomised run of a law draws them."""
    found: list[Case] = []

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None)
    @given(cases(law))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def test_draws_do_not_depend_on_the_modules_that_are_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    law = next(iter(all_laws()))
    before = drawn(law)
    (tmp_path / "full_of_constants.py").write_text(f"NUMBERS = {list(range(101, 4_000, 20))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_module("full_of_constants")
    found = drawn(law)
    del sys.modules["full_of_constants"]
    assert found == before, "workers that have loaded other modules would try the laws on other cases"


@pytest.mark.parametrize("law", LAWS)
def test_drawn_cases_keep_to_ranges_and_budget_and_are_various(law: Law) -> None:
    found = drawn(law)
    if {case.inputs for case in found} != set(spec_of(law.op).inputs):
        # Hypothesis mutates earlier draws: of 200 cases only some 40 are independent.
        found = drawn(law, 5 * EXAMPLES)
    _keep_to_ranges_and_budget(law, found)
    _are_various(law, found)


def _keep_to_ranges_and_budget(law: Law, found: list[Case]) -> None:
    spec, drawing = spec_of(law.op), drawing_of(law.op)
    for case in found:
        assert not spec.space.undrawn(case), f"{case.id} is outside of the ranges: {spec.space.undrawn(case)}"
        assert law.covers(case), f"{law.name} says nothing about {case.id}"
        work = sum(drawing.work(run) for run in law.runs(dict(case.axes)))
        assert work <= drawing.budget, f"{case.id} takes {work} of a budget of {drawing.budget} on {law.name}"


def _are_various(law: Law, found: list[Case]) -> None:
    spec, drawing = spec_of(law.op), drawing_of(law.op)
    for name, axis in spec.axes.items():
        values = Counter(case[name] for case in found)
        if (
            name in law.fixed
            or name not in (*drawing.first, *drawing.last, *drawing.after)
            or len(axis.choices or (0, 1)) == 1
        ):
            continue
        assert len(values) > 1, f"{name} is always {next(iter(values))} in {len(found)} cases of {law.name}"
        missed = set(axis.choices or ()) - set(values)
        assert not missed, f"{name} never took {missed} in {len(found)} cases of {law.name}"
        edges = drawing.edges.get(name, ()) if name in drawing.first else ()
        share = sum(count for value, count in values.items() if value in edges) / max(1, len(found) - values[None])
        assert not edges or share > 0.25, f"{name} is at an edge in only {share:.0%} of the cases of {law.name}"
    assert {case.inputs for case in found} == set(spec.inputs), f"not all input distributions: {law.name}"


@pytest.mark.parametrize("law", LAWS)
def test_cases_beyond_the_budget_are_of_the_law_and_within_the_ranges(law: Law) -> None:
    spec, drawing = spec_of(law.op), drawing_of(law.op)
    assert set(drawing.beyond) <= set(laws_of(law.op)), f"laws of {law.op} are {', '.join(laws_of(law.op))}"
    for text in drawing.beyond.get(law.name, ()):
        case = spec.parse_case(f"{law.op}:{text}")
        assert law.covers(case), f"{law.name} says nothing about {case.id}"
        assert not spec.space.undrawn(case), f"{case.id} is outside of the ranges: {spec.space.undrawn(case)}"
        work = sum(drawing.work(run) for run in law.runs(dict(case.axes)))
        assert work > drawing.budget, f"{case.id} takes {work} of a budget of {drawing.budget}: draws can find it"


def test_schedules_of_a_trial_differ() -> None:
    seen: set[str] = set()

    @settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None)
    @given(schedules(3))
    def collect(chosen: tuple[str, ...]) -> None:
        assert len(set(chosen)) == 3, f"{chosen} are not three schedules"
        seen.update(name.partition(":")[0] for name in chosen)

    collect()
    assert seen == {"eager", "lazy", "random"}

"""Drawn cases are within the spec's ranges and the budget, and hit the edges of tiles often."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, seed, settings
from hypothesis.strategies import SearchStrategy, integers

from conformance.kernels.laws.law import Law, all_laws, laws_of, spec_of
from conformance.kernels.laws.strategies import cases, drawing_of, schedules
from megamoe.contract import Case

T = TypeVar("T")
LAWS = [pytest.param(law, id=f"{law.op}-{law.name}") for law in all_laws()]
EXAMPLES = 100
SEED = 0
"""Of the first round of draws; the next rounds count up from it."""
ROUNDS = 20
"""A value that comes in none of so many rounds is never drawn."""


def drawn(strategy: SearchStrategy[T], round_number: int = 0) -> list[T]:
    """Returns EXAMPLES draws. The seed is given, so they do not hang on the text of a test."""
    found: list[T] = []

    @seed(SEED + round_number)
    @settings(max_examples=EXAMPLES, database=None, deadline=None)
    @given(strategy)
    def collect(value: T) -> None:
        found.append(value)

    collect()
    return found


def drawn_until(strategy: SearchStrategy[T], lacks: Callable[[list[T]], Iterable[str]]) -> list[T]:
    """Draws rounds until the draws lack nothing. Fails with what they lack if they still do after ROUNDS.

    Hypothesis mutates earlier draws of a round: of 200 cases only some 40 are independent, so rounds are short.
    """
    found: list[T] = []
    for round_number in range(ROUNDS):
        found += drawn(strategy, round_number)
        if not any(lacks(found)):
            return found
    pytest.fail(f"{'; '.join(lacks(found))} in {len(found)} draws")


def test_draws_do_not_depend_on_the_modules_that_are_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    law = next(iter(all_laws()))
    before = drawn(cases(law))
    (tmp_path / "full_of_constants.py").write_text(f"NUMBERS = {list(range(101, 4_000, 20))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_module("full_of_constants")
    found = drawn(cases(law))
    del sys.modules["full_of_constants"]
    assert found == before, "workers that have loaded other modules would try the laws on other cases"


@pytest.mark.parametrize("law", LAWS)
def test_drawn_cases_keep_to_ranges_and_budget_and_are_various(law: Law) -> None:
    spec, drawing = spec_of(law.op), drawing_of(law.op)
    for case in drawn_until(cases(law), partial(_lacking, law)):
        assert not spec.space.undrawn(case), f"{case.id} is outside of the ranges: {spec.space.undrawn(case)}"
        assert law.covers(case), f"{law.name} says nothing about {case.id}"
        work = sum(drawing.work(run) for run in law.runs(dict(case.axes)))
        assert work <= drawing.budget, f"{case.id} takes {work} of a budget of {drawing.budget} on {law.name}"


def _lacking(law: Law, found: list[Case]) -> Iterator[str]:
    """Yields what the cases need to be various."""
    spec, drawing = spec_of(law.op), drawing_of(law.op)
    for name in [*drawing.first, *drawing.last, *drawing.after]:
        axis = spec.axes[name]
        values = Counter(case[name] for case in found)
        if name in law.fixed or len(axis.choices or (0, 1)) == 1:
            continue
        if len(values) == 1:
            yield f"{law.name}: {name} is always {next(iter(values))}"
        if missed := set(axis.choices or ()) - set(values):
            yield f"{law.name}: {name} never takes {missed}"
        edges = drawing.edges.get(name, ()) if name in drawing.first else ()
        share = sum(count for value, count in values.items() if value in edges) / max(1, len(found) - values[None])
        if edges and share <= 0.25:
            yield f"{law.name}: {name} is at an edge in only {share:.0%}"
    if missed := set(spec.inputs) - {case.inputs for case in found}:
        yield f"{law.name}: no inputs are {missed}"


def test_cases_without_a_value_are_not_various() -> None:
    law, edges = laws_of("fmha")["bitwise_repeatable"], drawing_of("fmha").edges["t"]
    found = drawn_until(cases(law), partial(_lacking, law))
    for lack, keeps in {
        "hd never takes {512}": lambda case: case["hd"] != 512,
        "causal is always False": lambda case: not case["causal"],
        "t is at an edge in only 0%": lambda case: case["t"] not in edges,
        "no inputs are {'lone_keys'}": lambda case: case.inputs != "lone_keys",
    }.items():
        lacking = list(_lacking(law, list(filter(keeps, found))))
        assert f"bitwise_repeatable: {lack}" in lacking, f"only this is missed: {lacking}"


def test_what_no_round_draws_is_missed() -> None:
    def lacking(found: list[int]) -> list[str]:
        return [] if 9 in found else ["9 never comes"]

    assert 9 in drawn_until(integers(0, 30), lacking)
    with pytest.raises(pytest.fail.Exception, match=f"9 never comes in {ROUNDS * EXAMPLES} draws"):
        drawn_until(integers(10, 1000), lacking)


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
    def lacking(trials: list[tuple[str, ...]]) -> list[str]:
        kinds = {name.partition(":")[0] for chosen in trials for name in chosen}
        return [f"{kind} is never drawn" for kind in ("eager", "lazy", "random") if kind not in kinds]

    for chosen in drawn_until(schedules(3), lacking):
        assert len(set(chosen)) == 3, f"{chosen} are not three schedules"

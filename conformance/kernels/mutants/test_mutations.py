"""Planted faults in a real kernel: each synchronising instruction taken out, and whether the VM notices."""

from __future__ import annotations

from functools import cache

from conformance import ROOT
from conformance.kernels.mutants.mutations import NOT_NOTICED, Finding, findings, table

PUBLISHED = ROOT / "results" / "mutations.md"


@cache
def _found() -> tuple[Finding, ...]:
    return tuple(findings())


def test_what_goes_unnoticed_is_excused() -> None:
    """Every removal is noticed, but for those whose reason is written down."""
    missed = [finding.mutant for finding in _found() if not finding.schedule and not finding.excuse]
    listed = "; ".join(f"PTX line {mutant.line} `{mutant.text}`" for mutant in missed)
    assert not missed, f"the VM does not notice that these are missing: {listed}"


def test_no_excuse_is_stale() -> None:
    """An excuse that no unnoticed removal needs is out of date."""
    needed = {finding.excuse for finding in _found() if not finding.schedule}
    stale = [part for part, why in NOT_NOTICED.items() if why not in needed]
    assert not stale, f"the VM notices these by now; take their excuses out of mutations.NOT_NOTICED: {stale}"


def test_published_table_is_true() -> None:
    """results/mutations.md says what is so."""
    command = "python -m conformance.kernels.mutants.mutations > results/mutations.md"
    assert PUBLISHED.read_text() == table(list(_found())), f"results/mutations.md is out of date; run: {command}"

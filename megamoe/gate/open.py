"""The sentence of an open gate: how much was held against which baseline."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megamoe.contract import Row
from megamoe.gate.baseline import BASELINES, Baseline
from megamoe.gate.verdict import Verdict
from megamoe.records.keys import Key
from megamoe.records.lines import Figures, Record


def open_line(
    verdict: Verdict, baseline: Baseline | None, records: Iterable[Record], figures: Iterable[Figures]
) -> str:
    """One sentence about a verdict that passed: rows, their counters, and the figures of their programs, each once.

    `baseline`: None if the run was held against none.
    """
    passed = {record.row: record for record in records if record.status == "passed" and record.row in verdict.records}
    if baseline is None:
        return f"the gate is open: {_number(len(passed), 'row')} passed, held against no baseline"
    held = {row: record for row, record in passed.items() if row in baseline.records}
    counters = sum(len({*record.counters} | {*baseline.records[row].counters}) for row, record in held.items())
    what = f"{_number(len(held), 'row')}, {_number(counters, 'counter')} and "
    what += _number(_compiler_figures(baseline, held, figures), "compiler figure")
    where = _shown(baseline.path)
    differs = any(finding.kind == "renew" for finding in verdict.findings)
    told = f"{what} were held against {where}, see what differs above" if differs else f"{what} are as in {where}"
    without = len(passed) - len(held)
    return f"the gate is open: {told}" + (f"; {_number(without, 'row')} passed without a line there" if without else "")


def _compiler_figures(baseline: Baseline, rows: Iterable[Row], figures: Iterable[Figures]) -> int:
    programs = {Key.of(row).program for row in rows}
    keyed = ((Key.of(line), line) for line in figures)
    found = {key: line for key, line in keyed if key.program in programs and key in baseline.figures}
    return sum(len(numbers) for line in found.values() for numbers in line.kernels.values())


def _number(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _shown(path: Path) -> str:
    """Our baseline by its place in the repository, another one as it was given."""
    return str(path.relative_to(BASELINES.parents[1]) if path.is_relative_to(BASELINES) else path)

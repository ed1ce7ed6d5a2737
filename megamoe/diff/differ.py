"""Holds the results of two runs against each other: per row a call, on which CI acts and which a person sees.

comparison = compare_runs(read_side("before.jsonl"), read_side("after.jsonl"), load_specs())
comparison.exit_status()    # 0 fine, 1 regression

Three kinds of rows. "verdict": what a Record says, statuses and counters, exactly. "timing": device time at one
temperature of the L2, by intervals from raw samples (megamoe.diff.times says how). "figures": what an assembler
says, exactly. (megamoe.judge.tolerance is something else: it compares tensors.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megamoe.contract import Case, Status
from megamoe.diff.directions import Change, Trend, changes
from megamoe.diff.rows import (
    CALLS,
    Call,
    ComparedRow,
    RowKey,
    SideRows,
    rows_of,
    worst,
)
from megamoe.diff.sides import ComparisonError, Side, differences_of_machines
from megamoe.records.lines import Figures, Record, Timing
from megamoe.spec.error import SpecError
from megamoe.spec.spec import Spec
from megamoe.spec.thresholds import DEFAULT_THRESHOLD

__all__ = [
    "CALLS",
    "Call",
    "Change",
    "ComparedRow",
    "Comparison",
    "ComparisonError",
    "RowKey",
    "called",
    "compare_runs",
]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, the most severe first. `notes` are sentences that a reader must see, such as one about a torn file.

    `across` says in what the machines differ, empty unless comparing them was asked for.
    """

    before: str
    after: str
    rows: tuple[ComparedRow, ...]
    notes: tuple[str, ...] = ()
    across: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[Call, int]:
        """Rows by call, the most severe first; calls of no row are left out."""
        found = Counter(row.call for row in self.rows)
        return {call: found[call] for call in CALLS if found[call]}

    @property
    def regressions(self) -> tuple[ComparedRow, ...]:
        """The rows that make the comparison fail."""
        return tuple(row for row in self.rows if row.regression)

    def exit_status(self, strict: bool = False) -> int:
        """0 fine, 1 regression; with `strict` a row whose times could not be told apart is one as well."""
        return int(any(row.regression or (strict and row.call == "AMBIGUOUS") for row in self.rows))

    @property
    def line(self) -> str:
        """One line: "12 rows: 1 SLOWER, 1 AMBIGUOUS, 10 SAME; 1 regression"."""
        parts = ", ".join(f"{number} {call}" for call, number in self.counts.items())
        bad = len(self.regressions)
        return f"{len(self.rows)} rows: {parts}; {bad or 'no'} regression{'' if bad == 1 else 's'}"


def compare_runs(
    before: Side, after: Side, specs: Mapping[str, Spec], *, across: bool = False, only: Sequence[str] = ()
) -> Comparison:
    """What became of every row of `before` in `after`. Thresholds of times come from `specs`, by op.

    `only`: globs over the text of a row; a row that matches none is left out. Raises ComparisonError when nothing can
    be compared: a side without rows, no row in common, or, unless `across`, other machines, drivers or versions.
    """
    old, new = rows_of(before, only), rows_of(after, only)
    for side, rows in ((before, old), (after, new)):
        if not rows.keys():
            why = f" that {' or '.join(map(repr, only))} matches" if only else ""
            raise ComparisonError(f"{side.label} holds no row{why}, so there is nothing to compare")
    common = set(old.keys()).intersection(new.keys())
    if not common:
        raise ComparisonError(
            f"no row is in both: {before.label} has, for one, {old.keys()[0]}; {after.label} has {new.keys()[0]}"
        )
    other = differences_of_machines(before, after, {key.kind for key in common})
    if other and not across:
        raise ComparisonError(f"{'; '.join(other)}. To compare nevertheless, labelled as such, add --across")
    rows = [*_missing_or_new(old, new), *_verdicts(old, new), *_figures(old, new), *_timings(old, new, specs)]
    rows.sort(key=lambda row: (not row.regression, CALLS.index(row.call), -_distance(row), row.key))
    return Comparison(before.label, after.label, tuple(rows), (*before.notes, *after.notes), tuple(other))


def _distance(row: ComparedRow) -> float:
    return 0.0 if row.ratio is None else abs(row.ratio - 1.0)


def _missing_or_new(old: SideRows, new: SideRows) -> Iterator[ComparedRow]:
    before, after = dict.fromkeys(old.keys()), dict.fromkeys(new.keys())
    for key in before:
        if key not in after:
            status = _status(old, key)
            sentence = f"it is there before{f' ({status})' if status else ''} and not after"
            yield ComparedRow(key, "MISSING", True, sentence, before_status=status)
    for key in after:
        if key not in before:
            status = _status(new, key)
            sentence = f"it is there after{f' ({status})' if status else ''} and not before"
            yield ComparedRow(key, "NEW", False, sentence, after_status=status)


def _status(rows: SideRows, key: RowKey) -> Status | None:
    if key in rows.verdicts:
        return worst(rows.verdicts[key]).status
    return worst(rows.timings[key]).status if key in rows.timings else None


def _verdicts(old: SideRows, new: SideRows) -> Iterator[ComparedRow]:
    for key, lines in old.verdicts.items():
        if key in new.verdicts:
            before, after = worst(lines), worst(new.verdicts[key])
            changed = _status_changed(key, before, after)
            alike = [line for line in new.verdicts[key] if line.status == after.status]
            yield changed or _most_severe(_verdict(key, before, line) for line in alike)


def _status_changed(key: RowKey, before: Record | Timing, after: Record | Timing) -> ComparedRow | None:
    """Better is a row that passes now; every other change is worse, if only because it hides what was there."""
    if before.status == after.status:
        return None
    sentence = f"{before.status} before, {after.status} after{after.sentence and ': '}{after.sentence}"
    return ComparedRow(
        key,
        "STATUS-CHANGED",
        regression=after.status != "passed",
        sentence=sentence,
        before_status=before.status,
        after_status=after.status,
        same_program=_same(before.program_sha256, after.program_sha256),
    )


def _same(before: str | None, after: str | None) -> bool | None:
    return None if before is None or after is None else before == after


def _verdict(key: RowKey, before: Record, after: Record) -> ComparedRow:
    """Counters of a row that did not pass mean nothing, nor do those of other inputs; the latter is not called SAME."""
    found: tuple[Change, ...] = ()
    sentence = "" if before.status == "passed" else f"{before.status} on both sides"
    other_inputs = before.input_sha256 != after.input_sha256 and before.input_sha256 and after.input_sha256
    if other_inputs:
        sentence = "the inputs are not the same, so counters are not compared"
    elif before.status == "passed":
        found = changes(before.counters, after.counters)
    row = _exact(key, found, sentence, before, after)
    return replace(row, call="CHANGED") if other_inputs else row


def _exact(
    key: RowKey, found: tuple[Change, ...], sentence: str, before: Record | Figures, after: Record | Figures
) -> ComparedRow:
    """One cost that got worse is enough; so is one that is not counted any more, as nothing holds it now."""
    trends = {change.trend for change in found}
    call: Call = "SAME"
    if trends:
        call = "WORSE" if trends & {"worse", "vanished"} else "BETTER" if "better" in trends else "CHANGED"
    return ComparedRow(
        key,
        call,
        regression=call == "WORSE",
        sentence=sentence or _spelt(found),
        before_status=before.status if isinstance(before, Record) else None,
        after_status=after.status if isinstance(after, Record) else None,
        changes=found,
        same_program=_same(before.program_sha256, after.program_sha256),
    )


def _spelt(found: Iterable[Change]) -> str:
    order: tuple[Trend, ...] = ("worse", "vanished", "better", "changed")
    return ", ".join(str(change) for change in sorted(found, key=lambda change: order.index(change.trend)))


def _figures(old: SideRows, new: SideRows) -> Iterator[ComparedRow]:
    for key, lines in old.figures.items():
        if key in new.figures:
            before, held = lines[-1], _by_kernel(lines[-1])
            yield _most_severe(
                _exact(key, changes(held, _by_kernel(after)), "", before, after) for after in new.figures[key]
            )


def _most_severe(rows: Iterable[ComparedRow]) -> ComparedRow:
    """Of several lines of a row after, none can hide a regression of another; the last of those that are alike."""
    return min(reversed([*rows]), key=lambda row: CALLS.index(row.call))


def _by_kernel(figures: Figures) -> dict[str, int]:
    return {f"{entry}.{name}": number for entry, kernel in figures.kernels.items() for name, number in kernel.items()}


def _timings(old: SideRows, new: SideRows, specs: Mapping[str, Spec]) -> Iterator[ComparedRow]:
    passed: list[RowKey] = []
    for key, lines in old.timings.items():
        if key in new.timings:
            before, after = worst(lines), worst(new.timings[key])
            changed = _status_changed(key, before, after)
            if changed:
                yield changed
            elif before.status != "passed":
                sentence = f"{before.status} on both sides, so that there is no time to compare"
                yield ComparedRow(key, "SAME", False, sentence, before.status, after.status)
            else:
                passed.append(key)
    if passed:
        yield from _timed(passed, old, new, _thresholds(passed, specs))


def _timed(keys: Sequence[RowKey], old: SideRows, new: SideRows, thresholds: Sequence[float]) -> Iterator[ComparedRow]:
    from megamoe.diff.times import centres, ratios

    before, after = centres([old.timings[key] for key in keys]), centres([new.timings[key] for key in keys])
    found = ratios(before, after)
    us = [side.microseconds.tolist() for side in (before, after)]
    samples = [side.samples.tolist() for side in (before, after)]
    enough = [side.known for side in (before, after)]
    numbers = zip(found.ratio.tolist(), found.low.tolist(), found.high.tolist(), thresholds, strict=True)
    for i, (key, (ratio, low, high, threshold)) in enumerate(zip(keys, numbers, strict=True)):
        was, now = worst(old.timings[key]), worst(new.timings[key])
        call = called(low, high, threshold)
        # Enough samples before and too few after: what was held is held no more, as if the row were missing.
        lost = enough[0][i] and not enough[1][i]
        how = "" if was.method == now.method else f"; timed by {was.method} before, by {now.method} after"
        yield ComparedRow(
            key,
            call,
            regression=call == "SLOWER" or lost,
            sentence=_about(call, ratio, low, high, threshold) + ("; there were enough before" if lost else "") + how,
            before_status="passed",
            after_status="passed",
            before_us=us[0][i],
            after_us=us[1][i],
            ratio=ratio,
            low=low,
            high=high,
            threshold=threshold,
            samples=(samples[0][i], samples[1][i]),
            same_program=_same(was.program_sha256, now.program_sha256),
        )


def called(low: float, high: float, threshold: float) -> Call:
    """A difference counts only if the whole interval lies beyond the threshold; they are the same if it lies within."""
    if low > 1 + threshold:
        return "SLOWER"
    if high < 1 - threshold:
        return "FASTER"
    return "SAME" if low >= 1 - threshold and high <= 1 + threshold else "AMBIGUOUS"


def _about(call: Call, ratio: float, low: float, high: float, threshold: float) -> str:
    if high == float("inf"):
        return "there are too few samples to say anything"
    interval = f"{ratio - 1:+.1%}, between {low - 1:+.1%} and {high - 1:+.1%}"
    return f"{interval}; the threshold is {threshold:.1%}" if call == "AMBIGUOUS" else interval


def _thresholds(keys: Sequence[RowKey], specs: Mapping[str, Spec]) -> list[float]:
    known = {case.id: case for spec in specs.values() for cases in spec.matrices.values() for case in cases}
    return [_threshold(key, specs.get(key.op), known.get(key.case)) for key in keys]


def _threshold(key: RowKey, spec: Spec | None, case: Case | None) -> float:
    """The default for a case that no spec knows: an old record may speak of what is not there any more."""
    if spec is None:
        return DEFAULT_THRESHOLD
    # A case of no matrix is spelt out only for an override that is not about a matrix: that takes a while.
    if case is None and all(override.cases is not None for override in spec.thresholds.overrides):
        return spec.thresholds.default
    try:
        return spec.thresholds.of(case or spec.parse_case(key.case), "cold" if key.variant == "cold" else "hot")
    except SpecError:
        return spec.thresholds.default

"""The one differ of two sets of lines, for compare, gate and accept: one call per key.

comparison = compare_runs(read_side("before.jsonl"), read_side("after.jsonl"), load_specs())
comparison.exit_status()    # 0 fine, 1 regression

There are three kinds of keys. "verdict": statuses and counters of records, compared exactly. "timing": device time at
one L2 temperature, compared by intervals from raw samples (see megamoe.diff.times). "figures": what an assembler
reports, compared exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from megamoe.contract import Case, Status
from megamoe.contract.counted import counted
from megamoe.diff.directions import Change, Trend, differences
from megamoe.diff.sides import ComparisonError, Lines, Side, differences_of_machines, lines_of, renamed, where_both_ran
from megamoe.records.keys import Key, worst
from megamoe.records.lines import Figures, Record, Timing
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.spec import DEFAULT_THRESHOLD, Spec

__all__ = [
    "CALLS",
    "Call",
    "Change",
    "ComparedRow",
    "Comparison",
    "ComparisonError",
    "called",
    "compare_lines",
    "compare_runs",
]


Call = Literal[
    "STATUS-CHANGED", "SLOWER", "WORSE", "MISSING", "AMBIGUOUS", "CHANGED", "NEW", "FASTER", "BETTER", "SAME"
]
CALLS: tuple[Call, ...] = get_args(Call)
"""Most severe first."""


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One row and the result of its comparison. Fields that do not apply are None or empty.

    `regression`: whether this row alone makes the comparison fail. `sentence`: the reason for the call. `before_us`,
    `after_us`: centre of the samples in microseconds per launch. `ratio` is after over before; with 99 % confidence it
    lies between `low` and `high`, which may be infinite. `threshold`: how far it may be from 1, from the spec.
    `samples`: their numbers before and after. `changes`: counters and figures that differ. `same_program`: whether both
    sides ran the same PTX, None if unknown.
    """

    key: Key
    call: Call
    regression: bool = False
    sentence: str = ""
    before_status: Status | None = None
    after_status: Status | None = None
    before_us: float | None = None
    after_us: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    threshold: float | None = None
    samples: tuple[int, int] | None = None
    changes: tuple[Change, ...] = ()
    same_program: bool | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, most severe first. `notes`: sentences that a reader must see, such as one about a torn file.

    `across`: how the machines differ; empty unless a comparison across machines was requested.
    """

    before: str
    after: str
    rows: tuple[ComparedRow, ...]
    notes: tuple[str, ...] = ()
    across: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[Call, int]:
        """The number of rows per call, most severe first; calls without rows are left out."""
        found = Counter(row.call for row in self.rows)
        return {call: found[call] for call in CALLS if found[call]}

    @property
    def regressions(self) -> tuple[ComparedRow, ...]:
        """The rows that make the comparison fail."""
        return tuple(row for row in self.rows if row.regression)

    def exit_status(self, strict: bool = False) -> int:
        """0 fine, 1 regression. With `strict`, also 1 if a row is AMBIGUOUS."""
        return int(any(row.regression or (strict and row.call == "AMBIGUOUS") for row in self.rows))

    @property
    def line(self) -> str:
        """A summary: "12 rows: 1 SLOWER, 1 AMBIGUOUS, 10 SAME; 1 regression"."""
        parts = ", ".join(f"{number} {call}" for call, number in self.counts.items())
        bad = len(self.regressions)
        regressions = counted(bad, "regression") if bad else "no regressions"
        return f"{counted(len(self.rows), 'row')}: {parts}; {regressions}"


def compare_runs(
    before: Side,
    after: Side,
    specs: Mapping[str, Spec],
    *,
    across: bool = False,
    only: Sequence[str] = (),
    renames: Sequence[str] = (),
) -> Comparison:
    """Compares every row of `before` with `after`. Thresholds for times come from `specs`, by op.

    `only`: globs over the text of a key; rows that match none are left out. `renames`: NEW=OLD, a backend of `after` to
    compare with one of `before`. Raises ComparisonError if nothing can be compared: a side without rows, no common row,
    or, unless `across`, different machines, drivers or versions.
    """
    before, after = renamed(*where_both_ran(before, after, across), renames)
    old, new = lines_of(before, only), lines_of(after, only)
    for side, lines in ((before, old), (after, new)):
        if not lines.keys():
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
    rows = list(compare_lines(old, new, specs))
    rows.sort(key=lambda row: (not row.regression, CALLS.index(row.call), -_distance(row), row.key))
    return Comparison(before.label, after.label, tuple(rows), (*before.notes, *after.notes), tuple(other))


def _distance(row: ComparedRow) -> float:
    return 0.0 if row.ratio is None else abs(row.ratio - 1.0)


def compare_lines(old: Lines, new: Lines, specs: Mapping[str, Spec]) -> Iterator[ComparedRow]:
    """One row for each key of either side. If a key has several lines, none of them hides a regression in another."""
    yield from _missing_or_new(old, new)
    for key, records in old.verdicts.items():
        if key in new.verdicts:
            yield _verdict(key, records, new.verdicts[key])
    for key, figures in old.figures.items():
        if key in new.figures:
            yield _most_severe(_pairs(key, figures, new.figures[key]))
    yield from _timings(old, new, specs)


def _missing_or_new(old: Lines, new: Lines) -> Iterator[ComparedRow]:
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


def _status(lines: Lines, key: Key) -> Status | None:
    found = lines.verdicts.get(key) or lines.timings.get(key)
    return worst(found).status if found else None


def _status_changed(
    key: Key, old: Sequence[Record] | Sequence[Timing], new: Sequence[Record] | Sequence[Timing]
) -> ComparedRow | None:
    """A row that passes now is better. Every other change is worse, if only because it hides what was there before.

    A new status counts as a change even if both sides also have a worse one. So does a lost pass.
    """
    known = {"passed", *(line.status for line in old)}
    before, after = worst(old), worst([line for line in new if line.status not in known] or new)
    passes = [line for line in old if line.status == "passed"]
    if passes and all(line.status != "passed" for line in new):
        before = passes[-1]
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


def _verdict(key: Key, old: Sequence[Record], new: Sequence[Record]) -> ComparedRow:
    """The worse of a changed status and changed counters. Only lines that passed have counters to compare."""
    changed = _status_changed(key, old, new)
    found = [changed] if changed else []
    before, after = ([line for line in lines if line.status == "passed"] for lines in (old, new))
    if before and after:
        found += _counters(key, before, after)
    elif not found:
        was, now = worst(old), worst(new)
        found.append(_row(key, "SAME", f"{was.status} on both sides", was, now))
    return _most_severe(found)


def _counters(key: Key, old: Sequence[Record], new: Sequence[Record]) -> Iterator[ComparedRow]:
    """Does not compare counters of different inputs. A line without a partner on its inputs is not called SAME."""
    alone = [line for line in old if not any(_same_inputs(line, other) for other in new)]
    alone += [line for line in new if not any(_same_inputs(line, other) for other in old)]
    if alone:
        yield _row(key, "CHANGED", "the inputs are not the same, so counters are not compared", old[-1], new[-1])
    if len(alone) < len(old) + len(new):
        yield from _pairs(key, old, new)


def _same_inputs(one: Record | Figures, other: Record | Figures) -> bool:
    if isinstance(one, Figures) or isinstance(other, Figures):
        return True
    return one.input_sha256 == other.input_sha256 or not one.input_sha256 or not other.input_sha256


def _pairs(
    key: Key, old: Sequence[Record] | Sequence[Figures], new: Sequence[Record] | Sequence[Figures]
) -> Iterator[ComparedRow]:
    """Compares every line of `old` with every line of `new` on the same inputs. The same lines on both sides are SAME.

    Numbers repeat exactly, so if a side's lines differ from each other, every one of them is compared.
    """
    if len(old) + len(new) > 2 and _distinct(old) == _distinct(new):
        for before, after in zip(old, new, strict=False):
            yield _row(key, "SAME", "", before, after)
        return
    for before in old:
        for after in new:
            if _same_inputs(before, after):
                yield _exact(key, before, after)


def _distinct(lines: Sequence[Record] | Sequence[Figures]) -> set[str]:
    """The exactly repeatable part of the lines, without duplicates."""
    return {
        repr(
            (sorted(line.counters.items()), sorted(line.input_sha256.items()))
            if isinstance(line, Record)
            else sorted((entry, sorted(numbers.items())) for entry, numbers in line.kernels.items())
        )
        for line in lines
    }


def _exact(key: Key, before: Record | Figures, after: Record | Figures) -> ComparedRow:
    """One worse cost makes the row WORSE. So does a cost that is no longer counted, because nothing checks it now."""
    found = differences(before, after)
    trends = {change.trend for change in found}
    call: Call = "SAME"
    if trends:
        call = "WORSE" if trends & {"worse", "vanished"} else "BETTER" if "better" in trends else "CHANGED"
    return _row(key, call, _spelt(found), before, after, found)


def _row(
    key: Key,
    call: Call,
    sentence: str,
    before: Record | Figures,
    after: Record | Figures,
    found: tuple[Change, ...] = (),
) -> ComparedRow:
    return ComparedRow(
        key,
        call,
        regression=call == "WORSE",
        sentence=sentence,
        before_status=before.status if isinstance(before, Record) else None,
        after_status=after.status if isinstance(after, Record) else None,
        changes=found,
        same_program=_same(before.program_sha256, after.program_sha256),
    )


def _spelt(found: Iterable[Change]) -> str:
    order: tuple[Trend, ...] = ("worse", "vanished", "better", "changed")
    return ", ".join(str(change) for change in sorted(found, key=lambda change: order.index(change.trend)))


def _most_severe(rows: Iterable[ComparedRow]) -> ComparedRow:
    """A regression comes before any other row, then the most severe call. Among equals the last one wins."""
    return min(reversed([*rows]), key=lambda row: (not row.regression, CALLS.index(row.call)))


def _timings(old: Lines, new: Lines, specs: Mapping[str, Spec]) -> Iterator[ComparedRow]:
    """Compares the times of the lines that passed. If the status changed too, reports the more severe of both."""
    passed: dict[Key, tuple[Sequence[Timing], Sequence[Timing]]] = {}
    changes: dict[Key, ComparedRow] = {}
    for key, lines in old.timings.items():
        if key not in new.timings:
            continue
        changed = _status_changed(key, lines, new.timings[key])
        before, after = ([line for line in side if line.samples_us] for side in (lines, new.timings[key]))
        if before and after:
            passed[key] = (before, after)
            changes |= {key: changed} if changed else {}
        elif changed:
            yield changed
        else:
            status = worst(lines).status
            sentence = f"{status} on both sides, so that there is no time to compare"
            yield ComparedRow(key, "SAME", False, sentence, status, status)
    if passed:
        for row in _timed(passed, _thresholds([*passed], specs)):
            yield _most_severe([row, *([changes[row.key]] if row.key in changes else [])])


def _timed(
    passed: Mapping[Key, tuple[Sequence[Timing], Sequence[Timing]]], thresholds: Sequence[float]
) -> Iterator[ComparedRow]:
    # Imported here because they take 0.2 s and a comparison without times does not need them.
    from megamoe.diff.times import centres, ratios

    before, after = (centres([lines[i] for lines in passed.values()]) for i in (0, 1))
    found = ratios(before, after)
    us = [side.microseconds.tolist() for side in (before, after)]
    samples = [side.samples.tolist() for side in (before, after)]
    enough = [side.known for side in (before, after)]
    numbers = zip(found.ratio.tolist(), found.low.tolist(), found.high.tolist(), thresholds, strict=True)
    for i, (key, (ratio, low, high, threshold)) in enumerate(zip(passed, numbers, strict=True)):
        was, now = (lines[-1] for lines in passed[key])
        identical = list(passed[key][0]) == list(passed[key][1])
        call = "SAME" if identical else called(low, high, threshold)
        # Enough samples before and too few after: the time is no longer checked, as if the row were missing.
        lost = enough[0][i] and not enough[1][i]
        how = "" if was.method == now.method else f"; timed by {was.method} before, by {now.method} after"
        flushes = [side.flush or "dirty" for side in (was, now)]
        if was.temperature == "cold" and flushes[0] != flushes[1]:
            how += f"; the L2 was emptied by a {flushes[0]} flush before, by a {flushes[1]} one after"
        yield ComparedRow(
            key,
            call,
            regression=call == "SLOWER" or lost,
            sentence="the samples are the same"
            if identical
            else _about(call, ratio, low, high, threshold) + ("; there were enough before" if lost else "") + how,
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
    """Times differ if the whole interval lies beyond the threshold, and are the same if all of it lies within."""
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


def _thresholds(keys: Sequence[Key], specs: Mapping[str, Spec]) -> list[float]:
    known = {case.id: case for spec in specs.values() for cases in spec.matrices.values() for case in cases}
    return [_threshold(key, specs.get(key.op), known.get(key.case)) for key in keys]


def _threshold(key: Key, spec: Spec | None, case: Case | None) -> float:
    """The spec's threshold; the default if no spec has the case, since an old record may hold a case that is gone."""
    if spec is None:
        return DEFAULT_THRESHOLD
    # Parsing a case outside all matrices is slow, and only an override without a list of cases needs it.
    if case is None and all(override.cases is not None for override in spec.thresholds.overrides):
        return spec.thresholds.default
    try:
        return spec.thresholds.of(case or spec.parse_case(key.case), "cold" if key.temperature == "cold" else "hot")
    except SpecError:
        return spec.thresholds.default

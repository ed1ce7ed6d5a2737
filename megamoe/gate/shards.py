"""Checks that all shards of a run set are present and come from one tree.

A missing shard is one finding, not one per row. More than MAX_NAMED missing shards share one finding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from megamoe.contract import Row
from megamoe.contract.counted import counted
from megamoe.gate.verdict import Finding
from megamoe.records.lines import Record, RunHeader, Shard
from megamoe.records.shards import Cut
from megamoe.spec.selection import SelectionError

_Member = tuple[RunHeader, Shard, Sequence[Row]]
Cutter = Callable[[Sequence[Row], int], Cut]
"""Cuts rows into that many shards, with the current specs and code."""
Again = Callable[[RunHeader, str], str]
"""Returns the command that runs another shard of a header's run set. The index may be a shell word."""
MAX_NAMED: Final = 8
"""Up to this many missing shards of a run set get a finding each."""


@dataclass(frozen=True, slots=True)
class Absent:
    """The findings about missing shards, and the rows that they cover."""

    findings: tuple[Finding, ...] = ()
    rows: frozenset[Row] = frozenset()


def absent_shards(
    headers: Iterable[tuple[RunHeader, Sequence[Row]]], recorded: Collection[Row], cutter: Cutter, again: Again
) -> Absent:
    """Finds the missing shards of the run sets of `headers`. Each header comes with the rows of its selection.

    `recorded`: rows that have a record; no finding covers them. `again`: makes the command that runs a missing shard.
    """
    sets: dict[str, list[_Member]] = {}
    for header, rows in headers:
        if header.shard is not None:
            sets.setdefault(header.shard.run_set, []).append((header, header.shard, rows))
    findings: list[Finding] = []
    spoken_for: set[Row] = set()
    for name, found in sets.items():
        header, shard, rows = found[0]
        if len({(one.count, one.plan, str(sorted(head.selection.items()))) for head, one, _ in found}) > 1:
            findings.append(_closing(f"{_runs(found)} of run set {name} were cut differently: run them again"))
            continue
        findings += _of_two_trees(name, found)
        there = {one.index: head.owed_rows for head, one, _ in found}
        missing = [index for index in range(1, shard.count + 1) if index not in there]
        if missing:
            of = _rows_by_shard(shard, rows, recorded, cutter)
            if len(missing) <= MAX_NAMED:
                findings += [_missing(shard, index, of.get(index), again(header, str(index))) for index in missing]
            else:
                findings.append(_many_missing(shard, missing, again(header, "$index")))
            spoken_for.update(row for index in missing for row in of.get(index, of.get(0, [])))
        elif sum(there.values()) != len(rows):
            findings.append(_closing(changed_since(f"run set {name}", sum(there.values()), len(rows))))
    return Absent(tuple(findings), frozenset(spoken_for))


def changed_since(run: str, owed: int, now: int) -> str:
    """A sentence about a run whose selection has another number of rows now: specs, backends or its file changed."""
    return f"{run} owed {counted(owed, 'row')} when it began, its selection holds {now} now; run it again"


def shards_twice(headers: Iterable[RunHeader], records: Iterable[Record]) -> list[Finding]:
    """Findings for shards in which two runs recorded the same row. A resumed run only has rows that the first one
    lacks."""
    shards = {header.run: header.shard for header in headers if header.shard is not None}
    runs_of: dict[tuple[str, int, Row], dict[str, None]] = {}
    for record in records:
        shard = shards.get(record.run)
        if shard is not None and record.status != "not_run":
            runs_of.setdefault((shard.run_set, shard.index, record.row), {})[record.run] = None
    twice = {tuple(runs): row for (_, _, row), runs in runs_of.items() if len(runs) > 1}
    return [
        _closing(f"{' and '.join(runs)} are both {shards[runs[0]]}, and both have {row}: keep the file of one of them")
        for runs, row in twice.items()
    ]


def _rows_by_shard(
    shard: Shard, rows: Sequence[Row], recorded: Collection[Row], cutter: Cutter
) -> Mapping[int, list[Row]]:
    """Rows without a record, by shard index. All of them under 0 if the rows would be cut differently today."""
    left = [row for row in rows if row not in recorded]
    try:
        now = cutter(rows, shard.count)
    except SelectionError:
        now = None
    if now is None or now.plan != shard.plan:
        return {0: left}
    unseen = set(left)
    return {index: [row for row in part if row in unseen] for index, part in enumerate(now.shards, 1)}


def _missing(shard: Shard, index: int, rows: Sequence[Row] | None, command: str) -> Finding:
    count = "rows that are not known any more" if rows is None else counted(len(rows), "row")
    told = f"shard {index}/{shard.count} of run set {shard.run_set} is in no file: {count}"
    return Finding("missing", f"{told}. Run it: {command}")


def _many_missing(shard: Shard, missing: Sequence[int], command: str) -> Finding:
    named = ", ".join(map(str, missing[:MAX_NAMED]))
    told = f"{len(missing)} of the {shard.count} shards of run set {shard.run_set} are in no file: {named} and others"
    loop = f"for index in {' '.join(_in_words(missing))}; do {command}; done"
    return Finding("missing", f"{told}. Run them: {loop}")


def _in_words(numbers: Sequence[int]) -> Iterator[str]:
    """Ascending numbers as shell words; consecutive numbers become one word."""
    ends = [at for at, one in enumerate(numbers, 1) if at == len(numbers) or numbers[at] != one + 1]
    for start, end in zip([0, *ends], ends, strict=False):
        first, last = numbers[start], numbers[end - 1]
        yield str(first) if first == last else f"$(seq {first} {last})"


def _of_two_trees(name: str, found: Sequence[_Member]) -> Iterator[Finding]:
    """Findings for headers of one run set that disagree on specs, expected failures, code or revision."""
    first, _, _ = found[0]
    for told in ("revision", *sorted({key for head, _, _ in found for key in head.digests})):
        other = next((one for one in found if _told(one[0], told) != _told(first, told)), None)
        if other is not None:
            values = f"{_told(first, told) or 'not known'} and {_told(other[0], told) or 'not known'}"
            what = "revision" if told == "revision" else f"digest of the {told}"
            runs = _runs([found[0], other])
            yield _closing(f"{runs} of run set {name} are of two trees: their {what} is {values}; run them of one")


def _told(header: RunHeader, name: str) -> str | None:
    return header.git_revision if name == "revision" else header.digests.get(name)


def _runs(found: Iterable[tuple[RunHeader, Shard, object]]) -> str:
    return " and ".join(f"{head.run} (shard {shard.index}/{shard.count})" for head, shard, _ in found)


def _closing(sentence: str) -> Finding:
    return Finding("evidence", sentence)

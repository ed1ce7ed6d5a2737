"""Whether the shards of a run set are all there, and of one tree. A shard that is not there is one sentence, not one a
row; more than MAX_NAMED of them are one sentence together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from megamoe.contract import Row
from megamoe.gate.verdict import Finding
from megamoe.records.lines import Record, RunHeader, Shard
from megamoe.records.shards import Cut
from megamoe.spec.selection import SelectionError

_Member = tuple[RunHeader, Shard, Sequence[Row]]
Cutter = Callable[[Sequence[Row], int], Cut]
"""How rows are cut into that many shards here and now."""
Again = Callable[[RunHeader, str], str]
"""The command that runs another shard of the run set of a header: at this index, which may be a word of a shell."""
MAX_NAMED: Final = 8
"""Missing shards of a run set that have a sentence each."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Shards without a run: one finding for each, and the rows that it speaks for."""

    findings: tuple[Finding, ...] = ()
    rows: frozenset[Row] = frozenset()


def absent_shards(
    headers: Iterable[tuple[RunHeader, Sequence[Row]]], recorded: Collection[Row], cutter: Cutter, again: Again
) -> Absent:
    """What is not there of the run sets that `headers` belong to. With each header go the rows of its selection.

    `recorded`: rows that have a record; no finding speaks for one of them. `again`: what a person can do about it.
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
            told = f"run set {name} owed {sum(there.values())} rows when it began, its selection holds {len(rows)} now"
            findings.append(_closing(f"{told}; run it again"))
    return Absent(tuple(findings), frozenset(spoken_for))


def shards_twice(headers: Iterable[RunHeader], records: Iterable[Record]) -> list[Finding]:
    """A shard of which two runs have the same row. A run that was resumed has rows that the run before lacks."""
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
    """Rows without a record by the index of their shard; under 0 where rows are cut in another way today."""
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
    count = "rows that are not known any more" if rows is None else f"{len(rows)} rows" if len(rows) != 1 else "1 row"
    told = f"shard {index}/{shard.count} of run set {shard.run_set} is in no file: {count}"
    return Finding("missing", f"{told}. Run it: {command}")


def _many_missing(shard: Shard, missing: Sequence[int], command: str) -> Finding:
    named = ", ".join(map(str, missing[:MAX_NAMED]))
    told = f"{len(missing)} of the {shard.count} shards of run set {shard.run_set} are in no file: {named} and others"
    loop = f"for index in {' '.join(_in_words(missing))}; do {command}; done"
    return Finding("missing", f"{told}. Run them: {loop}")


def _in_words(numbers: Sequence[int]) -> Iterator[str]:
    """Rising numbers as words of a shell, those that follow each other as one."""
    ends = [at for at, one in enumerate(numbers, 1) if at == len(numbers) or numbers[at] != one + 1]
    for start, end in zip([0, *ends], ends, strict=False):
        first, last = numbers[start], numbers[end - 1]
        yield str(first) if first == last else f"$(seq {first} {last})"


def _of_two_trees(name: str, found: Sequence[_Member]) -> Iterator[Finding]:
    """Headers of one run set that do not tell of the same specs, expected failures, code and revision."""
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

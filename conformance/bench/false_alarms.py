"""How often two runs of the same program are called different: `python -m conformance.bench.false_alarms DIR`.

DIR holds record files of repetitions of one benchmark (A/A runs). Pairs are compared as by `megamoe compare`: all
pairs, and separately each file with the next, as in CI. A row called SLOWER or FASTER is a false alarm. The exit status
is 1 if more than 1 % are false alarms, and 2 for files that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

from megamoe.diff.differ import Call, ComparedRow, ComparisonError, called, compare_runs
from megamoe.diff.sides import Side, read_side
from megamoe.records.files import record_files_of, write_file
from megamoe.records.keys import Key
from megamoe.records.lines import AnyLine, RecordError, Timing
from megamoe.spec.load import load_specs
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.spec import DEFAULT_THRESHOLD

FORMAT = "megamoe-false-alarms-1"
MAX_FALSE_ALARMS = 0.01
PLANTED = (1.05, 1.1, 1.2)
"""Slowdowns planted in the second run of each consecutive pair, to see how many are noticed."""
ALARMS: tuple[Call, ...] = ("SLOWER", "FASTER")


@dataclass(slots=True)
class Tally:
    """Counts rows by call over many comparisons, and keeps the false alarms."""

    pairs: int = 0
    counts: Counter[Call] = field(default_factory=Counter[Call])
    alarms: list[tuple[str, str, ComparedRow]] = field(default_factory=list[tuple[str, str, ComparedRow]])

    def add(self, before: str, after: str, rows: Iterable[ComparedRow]) -> None:
        """Adds a comparison."""
        self.pairs += 1
        for row in rows:
            self.counts[row.call] += 1
            if row.call in ALARMS:
                self.alarms.append((before, after, row))

    @property
    def share(self) -> float:
        """The share of false alarms among all rows."""
        return len(self.alarms) / max(1, self.counts.total())

    def as_json(self) -> dict[str, object]:
        """Counts and shares."""
        total = max(1, self.counts.total())
        shares = {call: round(number / total, 5) for call, number in sorted(self.counts.items())}
        return {"pairs": self.pairs, "rows": self.counts.total(), "counts": dict(self.counts), "shares": shares}


def measured(folder: Path, specs: Path | None = None) -> dict[str, object]:
    """The summary of all record files in `folder`. ComparisonError or RecordError if they cannot be compared."""
    files = record_files_of(folder)
    if len(files) < 2:
        raise ComparisonError(f"{folder} holds {len(files)} record files (*.jsonl); false alarms need at least 2")
    sides = [read_side(str(file)) for file in files]
    known = load_specs(specs)
    every, following, at_default = Tally(), Tally(), Tally()
    by_temperature = {"cold": Tally(), "hot": Tally()}
    planted = {factor: {"cold": Tally(), "hot": Tally()} for factor in PLANTED}
    spread: dict[Key, float] = {}
    for (i, before), (j, after) in combinations(enumerate(sides), 2):
        rows = [row for row in compare_runs(before, after, known).rows if row.ratio is not None]
        if not rows:
            raise ComparisonError(f"{before.label} and {after.label} share no time, so there is nothing to call SLOWER")
        every.add(files[i].name, files[j].name, rows)
        at_default.add(files[i].name, files[j].name, _at_default_threshold(rows))
        if j == i + 1:
            following.add(files[i].name, files[j].name, rows)
            for factor, tallies in planted.items():
                slower = compare_runs(before, _slower(after, factor), known).rows
                for temperature, tally in tallies.items():
                    tally.add(files[i].name, files[j].name, _timed_at(slower, temperature))
        for temperature, tally in by_temperature.items():
            tally.add(files[i].name, files[j].name, _timed_at(rows, temperature))
        for row in rows:
            if row.ratio is not None:
                spread[row.key] = max(spread.get(row.key, 0.0), abs(row.ratio - 1))
    return {
        "format": FORMAT,
        "files": [file.name for file in files],
        "device": _device(sides[0]),
        "rows": len(spread),
        "all_pairs": {**every.as_json(), "false_alarms": round(every.share, 5)},
        "consecutive_pairs": {**following.as_json(), "false_alarms": round(following.share, 5)},
        "all_pairs_at_default_threshold": {**at_default.as_json(), "false_alarms": round(at_default.share, 5)},
        "all_pairs_by_temperature": {name: tally.as_json() for name, tally in by_temperature.items()},
        "planted_slowdowns": {
            f"{factor - 1:.0%}": {name: tally.as_json()["shares"] for name, tally in tallies.items()}
            for factor, tallies in planted.items()
        },
        "rows_with_alarms_at_default_threshold": sorted({str(row.key) for _, _, row in at_default.alarms}),
        "alarms": [_alarm(*one) for one in every.alarms],
        "widest": [
            {"row": str(key), "largest_difference": round(value, 5)}
            for key, value in sorted(spread.items(), key=lambda item: -item[1])
        ],
    }


def _timed_at(rows: Iterable[ComparedRow], temperature: str) -> list[ComparedRow]:
    return [row for row in rows if row.ratio is not None and row.key.temperature == temperature]


def _at_default_threshold(rows: Iterable[ComparedRow]) -> list[ComparedRow]:
    """Calls the rows as if no spec had its own threshold."""
    intervals = [(row, row.low, row.high) for row in rows]
    return [
        replace(row, call=called(low, high, DEFAULT_THRESHOLD))
        for row, low, high in intervals
        if low is not None and high is not None
    ]


def _slower(side: Side, factor: float) -> Side:
    """The same run with every launch taking `factor` times as long."""

    def slowed(line: AnyLine) -> AnyLine:
        if not isinstance(line, Timing):
            return line
        return line.model_copy(update={"samples_us": tuple(sample * factor for sample in line.samples_us)})

    return replace(side, files=tuple(replace(file, lines=tuple(map(slowed, file.lines))) for file in side.files))


def _device(side: Side) -> dict[str, object] | None:
    devices = [header.device for header in side.headers.values() if header.device]
    return devices[0].model_dump() if devices else None


def _alarm(before: str, after: str, row: ComparedRow) -> dict[str, object]:
    return {"before": before, "after": after, "row": str(row.key), "call": row.call, "sentence": row.sentence}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the summary and writes it if asked to. Returns the exit status."""
    parser = argparse.ArgumentParser(description="How often two runs of the same program are called different.")
    parser.add_argument("folder", type=Path, help="record files of repetitions of one benchmark")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary to FILE")
    parser.add_argument("--specs", type=Path, metavar="FOLDER", help="folder of the specs")
    chosen = parser.parse_args(arguments)
    try:
        found = measured(chosen.folder, chosen.specs)
        if chosen.json:
            write_file(chosen.json, json.dumps(found, indent=1, allow_nan=False) + "\n", "the summary")
    except (ComparisonError, RecordError, SpecError) as error:
        print(f"false_alarms: {error}", file=sys.stderr)
        return 2
    return _print(found)


def _print(found: dict[str, object]) -> int:
    tallies = {name: found[name] for name in ("all_pairs", "consecutive_pairs")}
    for name, tally in tallies.items():
        assert isinstance(tally, dict)
        calls = ", ".join(f"{share:.2%} {call}" for call, share in tally["shares"].items())
        print(
            f"{name}: {tally['pairs']} pairs, {tally['rows']} rows: {calls}; false alarms {tally['false_alarms']:.2%}"
        )
    for name in ("all_pairs_at_default_threshold", "all_pairs_by_temperature", "planted_slowdowns"):
        print(f"{name}: {json.dumps(found[name])}")
    alarms, widest = found["alarms"], found["widest"]
    assert isinstance(alarms, list)
    assert isinstance(widest, list)
    for alarm in alarms[:20]:
        print(f"{alarm['call']} {alarm['before']} -> {alarm['after']}: {alarm['row']}: {alarm['sentence']}")
    for row in widest[:10]:
        print(f"largest difference of two runs {row['largest_difference']:.2%}: {row['row']}")
    kept = all(isinstance(tally, dict) and tally["false_alarms"] <= MAX_FALSE_ALARMS for tally in tallies.values())
    print(f"at most {MAX_FALSE_ALARMS:.0%} may be false alarms: {'kept' if kept else 'NOT kept'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())

"""Rows of sm_90a that no device has judged with today's program: python -m conformance.gpu.judged RECORD ... --op OP.

Builds the program of every row that the profiles owe, and compares it with the row's newest line in the records, which
must have passed with today's PTX. If the backend declines a row, its line must say unsupported. CuTeDSL's compiler
takes seconds for each kernel that is not in its cache; `--part 2/8` is the second eighth of the rows. The status is 0
if every row is judged, 1 if not, 2 for unreadable records or unusable words.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from conformance.gpu.same_bits import BACKENDS, TARGET, Key, part_of, program_of, rows_of
from megamoe.judge.figures import program_sha256
from megamoe.records.files import newest_records, read_records
from megamoe.records.lines import Record, RecordError
from megamoe.spec.load import load_specs
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.selection import SelectionError

PROFILES: Final = ("full", "gpu")
"""The profiles that an H200 judges: small rows, and large ones."""


def newest(records: Sequence[Path]) -> dict[Key, Record]:
    """Returns the line of each row on a device, from the run that started last."""
    found = newest_records(map(read_records, records), lambda one: (one.target, one.executor) == (TARGET, "gpu"))
    return {(row.case, row.backend): record for row, record in found.items()}


def built(key: Key) -> str | None:
    """Returns the digest of today's program of a row; None if its backend declines it."""
    found = program_of(load_specs()[key[0].partition(":")[0]], key)
    return None if found is None else program_sha256(found[0].ptx)


def lacking(today: Mapping[Key, str | None], judged: Mapping[Key, Record]) -> Iterator[str]:
    """Yields a sentence for each row of `today` (digests of programs) that `judged` lacks or contradicts."""
    for key, program in today.items():
        row, record = f"{key[0]} on {key[1]}", judged.get(key)
        wanted = "unsupported" if program is None else "passed"
        if record is None:
            yield f"{row}: no record"
        elif record.status != wanted:
            yield f"{row}: {record.status}, where {wanted} is right: {record.sentence}"
        elif program is not None and record.program_sha256 != program:
            yield f"{row}: passed with the program {record.program_sha256}; today's is {program}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the rows. Returns 1 if there are any, 2 for unreadable records or unusable words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="record files of a device")
    parser.add_argument("--op", required=True)
    parser.add_argument("--profile", action="append", help="full and gpu if none is given")
    parser.add_argument("--backend", action="append", help="both of ours if none is given")
    parser.add_argument("--part", type=part_of, default="1/1", help="I/N: only the I-th of N parts")
    given = parser.parse_args(arguments)
    backends = given.backend or BACKENDS
    try:
        judged = newest(given.records)
        rows = dict.fromkeys(
            key for profile in given.profile or PROFILES for key in rows_of(given.op, profile, backends)
        )
        today = {key: built(key) for key in given.part.of(rows)}
    except (SelectionError, SpecError, RecordError, OSError) as error:
        print(f"judged: {error}", file=sys.stderr)
        return 2
    found = list(lacking(today, judged))
    for sentence in found:
        print(sentence)
    takes = sum(program is not None for program in today.values())
    print(f"{len(today)} rows, {takes} of them with a program; {len(found)} not judged on a device as they are today")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

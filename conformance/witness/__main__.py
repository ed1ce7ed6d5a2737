"""`python -m conformance.witness [--only TEXT] [--sources DIR]`: examines every witness and writes the record.

`--schedule NAME` runs them under one schedule instead and writes nothing. With `--sources`, `--orders K` runs the calls
of public kernels under K random orders each, and writes results/others.jsonl only.

Each target has its own process, because the compiler reads its target once. A witness that takes too long, or ends its
process, gets that as its reason.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from itertools import groupby
from pathlib import Path

from pebble import ProcessPool

from backends.vm.machine.scheduler import schedule
from conformance.witness import public
from conformance.witness.apart import LostError, result_of
from conformance.witness.examination import SCHEDULES, WITNESSES, Examination, examine, settle
from conformance.witness.record import (
    OPCODES,
    RECORD,
    TABLE,
    Row,
    opcodes_as_text,
    rows_as_text,
    table,
)
from conformance.witness.witness import Witness
from megamoe.records.lines import RecordError
from megamoe.records.provenance import installed_version


def _lost(witness: Witness, reason: str) -> Examination:
    row = Row(witness.package, metadata.version(witness.package), witness.kernel, witness.target, witness.options,
              witness.shape, "cannot run", None, 0, 0, 0.0, 0.0, reason)  # fmt: skip
    return Examination(row, frozenset())


def _examined(chosen: list[Witness], schedules: Sequence[str]) -> list[Examination]:
    found: list[Examination] = []
    spawn = multiprocessing.get_context("spawn")
    for target, members in groupby(chosen, key=lambda one: one.target):
        with ProcessPool(1, context=spawn, initializer=settle, initargs=(target,)) as pool:
            for witness in members:
                try:
                    one = result_of(pool, examine, witness.name, schedules)
                except LostError as lost:
                    one = _lost(witness, str(lost))
                found.append(one)
                _say(one.row)
    return found


def _say(row: Row) -> None:
    size = "" if row.error is None else f" error {row.error:.1e},"
    times = f"compiled in {row.compile_seconds:.1f} s, ran {row.run_seconds:.1f} s"
    print(f"{row.status:10}  {row.name}:{size} {times}{f': {row.reason}' if row.reason else ''}", flush=True)


def main(arguments: list[str]) -> int:
    """Returns 1 if a witness computes something wrong, or if its faults do not match `known_fault`; with --orders, if a
    line of the record has an error. 2 for a meaningless call."""
    parser = argparse.ArgumentParser(prog="conformance.witness", description=__doc__)
    parser.add_argument("--only", default="", help="examine those whose name contains this, and write no record")
    parser.add_argument("--sources", type=Path, help="checkouts of public repositories, as owner+name or name: run too")
    parser.add_argument("--schedule", metavar="NAME", default="", help="run under this one, e.g. random:3; no record")
    parser.add_argument("--resume", action="store_true", help="with --sources: what is not right yet, and no wheel's")
    parser.add_argument("--orders", type=int, metavar="K", help="with --sources: K random orders of each cheap call; "
                        "a call that is repeated goes on where the record ends")  # fmt: skip
    parser.add_argument("--seconds", type=float, metavar="S", help="with --orders: processor time, then no call begins")
    parser.add_argument("--record", type=Path, metavar="FILE", help="with --orders: another file")
    parser.add_argument("--doors", action="store_true", help="measure what a launch by each door costs, and no more")
    given = parser.parse_args(arguments)
    if given.doors:
        from conformance.witness import door_overhead

        door_overhead.renew()
        return 0
    if given.orders is not None:
        return _under_random_orders(given, arguments)
    if given.schedule:
        try:
            schedule(given.schedule)
        except ValueError as unknown:
            print(unknown)
            return 2
    only = given.only
    chosen = [] if given.resume else [one for one in WITNESSES if only in one.name]
    if given.sources is not None:
        if not given.sources.is_dir():
            print(f"--sources must name a folder with checkouts of public repositories; {given.sources} is none")
            return 2
        sources = given.sources.resolve()
        good = (
            public.tried(sources, only, given.schedule) if given.schedule else public.renew(sources, only, given.resume)
        )
        return max(_of_wheels(chosen, only, given.schedule), int(not good)) if chosen else int(not good)
    if not chosen:
        print(f"no witness has {only!r} in its name; there are: {', '.join(one.name for one in WITNESSES)}")
        return 2
    return _of_wheels(chosen, only, given.schedule)


def _under_random_orders(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    if given.sources is None or not given.sources.is_dir() or given.orders < 1:
        print("--orders needs a number of at least 1, and --sources a folder with checkouts of public repositories")
        return 2
    # It imports the kernels' tests, which no process of a target needs.
    from conformance.witness import random_orders

    try:
        return int(
            not random_orders.renew(
                given.sources.resolve(), given.orders, given.only, given.seconds, given.record, arguments
            )
        )
    except (RecordError, ValueError) as error:
        print(error)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same call goes on where its record ends")
        return 130


def absent(packages: Iterable[str]) -> list[str]:
    """Returns those of `packages` that are not installed."""
    return sorted({name for name in packages if installed_version(name) is None})


def _of_wheels(chosen: list[Witness], only: str, schedule: str) -> int:
    if lacking := absent(one.package for one in chosen):
        print(f"not installed, so that no witness of a wheel is examined: {', '.join(lacking)}. Run: nox -s witness")
        return 2
    found = _examined(chosen, (schedule,) if schedule else SCHEDULES)
    rows = [one.row for one in found]
    if not only and not schedule:
        opcodes: dict[str, set[str]] = {}
        for one in found:
            opcodes.setdefault(one.row.package, set()).update(one.opcodes)
        RECORD.write_text(rows_as_text(rows), encoding="utf-8")
        TABLE.write_text(table(rows), encoding="utf-8")
        OPCODES.write_text(opcodes_as_text(opcodes), encoding="utf-8")
    surprises = [
        row.name
        for row, one in zip(rows, chosen, strict=True)
        if row.status == "wrong" or (row.status == "fault") != bool(one.known_fault)
    ]
    if surprises:
        print(f"not as known: {'; '.join(surprises)}")
    return int(bool(surprises))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

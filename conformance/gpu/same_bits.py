"""Compares rows on a device with the machine, bit by bit.

    python -m conformance.gpu.same_bits run FILE --executor gpu --op nvfp4_moe     on an H200
    python -m conformance.gpu.same_bits run FILE --executor vm --op nvfp4_moe      anywhere
    python -m conformance.gpu.same_bits compare RECORD --device FILE ... --machine FILE ...

`run` draws the inputs of each row of a profile (or of its rows of each `--case`), as the judge does, and keeps the
outputs of its sm_90a program; the machine models an H200's tensor core to the bit. `--part 2/8` is the second eighth of
the rows. `compare` counts the elements that differ in any bit. Elements that may hold anything count as equal. With
`--known RECORD`, `run` skips a row whose line in that older record has no differing bit, while its program is the same,
and `compare` copies the line. Lines of other programs, and of cases that are in no profile any more, are left out. A
program is its text and its launches. A line without `launches_sha256`, from before 2026-11-24, is compared by text
alone; both commands print how many such lines there are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from conformance.gpu.probe import differences
from megamoe.contract import (
    AnyProgram,
    HostProgram,
    PythonProgram,
    RunOptions,
    UnsupportedError,
    as_program,
    load_backend,
    load_executor,
)
from megamoe.judge.guarded import GuardedCase
from megamoe.records.shards import Nth
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, SelectionError, owed_rows
from megamoe.spec.spec import Spec

TARGET: Final = "sm_90a"
BACKENDS: Final = ("cutedsl", "ptx")


@dataclass(frozen=True)
class Digests:
    """SHA-256 of a program. `text`: its PTX, and its host object if there is one. `launches`: its grids, arguments,
    workspaces and all other fields; "" if a record or a file does not have it."""

    text: str
    launches: str = ""

    def same(self, other: Digests) -> bool:
        """Whether the digests that both have are equal."""
        told = self.launches and other.launches
        return self.text == other.text and (not told or self.launches == other.launches)


@dataclass(frozen=True)
class Left:
    """Outputs of one `program`. `fault`: the judge's finding about the memory, or the error that occurred; "" for
    none."""

    program: Digests
    outputs: Mapping[str, torch.Tensor]
    fault: str


Key = tuple[str, str]
"""A case and a backend."""


def rows_of(op: str, profile: str, backends: Sequence[str]) -> list[Key]:
    """Returns the rows of `op` in `profile`, the most work first."""
    selection = Selection(profile, ops=(op,), backends=tuple(backends), targets=(TARGET,), schedules=("eager",))
    return [(row.case, row.backend) for row in owed_rows(load_specs(), selection)]


def program_of(spec: Spec, key: Key) -> tuple[AnyProgram, Digests] | None:
    """Builds the program of a row; None if its backend has none."""
    case_id, backend = key
    try:
        program = as_program(load_backend(backend).build(spec.parse_case(case_id), TARGET), backend)
    except UnsupportedError:
        return None
    return program, digests_of(program)


def digests_of(program: AnyProgram) -> Digests:
    """Hashes the text, and separately all other fields but the compiler's name."""
    host = program.host_object if isinstance(program, HostProgram) else b""
    text = (program.ptx or "").encode() + host
    names = {one.name for one in fields(program)} - {"ptx", "host_object", "compiler"}
    held = {name: getattr(program, name) for name in sorted(names)}
    said = {name: sorted(one.items()) if isinstance(one, Mapping) else one for name, one in held.items()}
    if isinstance(program, PythonProgram):
        del said["prepare"]
    return Digests(hashlib.sha256(text).hexdigest(), hashlib.sha256(repr(said).encode()).hexdigest())


def left_by(key: Key, executor_name: str, known: Mapping[Key, Digests] = MappingProxyType({})) -> Left | None:
    """Runs the program of a row. None if its backend has none, or if `known` has the row with this program."""
    spec = load_specs()[key[0].partition(":")[0]]
    built = program_of(spec, key)
    if built is None or (key in known and known[key].same(built[1])):
        return None
    (program, digests), case = built, spec.parse_case(key[0])
    options = RunOptions(accumulate="hopper") if executor_name == "vm" else RunOptions()
    try:
        ran = GuardedCase(spec, case, load_executor(executor_name)).run(program, options)
        return Left(digests, ran.settled, ran.fault())
    except Exception as error:
        return Left(digests, {}, f"{type(error).__name__}: {error}"[:500])


def compared(device: Mapping[Key, Left], machine: Mapping[Key, Left]) -> list[dict[str, object]]:
    """Returns a line for each row that ran on both sides. ValueError if the two ran different programs."""
    found: list[dict[str, object]] = []
    for key in sorted(device.keys() & machine.keys()):
        here, there = device[key], machine[key]
        ran, modelled = here.program, there.program
        if ran.text != modelled.text:
            raise ValueError(
                f"{key[0]} of {key[1]}: the device ran the program {ran.text}, the machine {modelled.text}"
            )
        if not ran.same(modelled):
            raise ValueError(
                f"{key[0]} of {key[1]}: the device and the machine ran the same text with other grids or arguments: "
                f"their launches are {ran.launches} and {modelled.launches}"
            )
        line: dict[str, object] = {"case": key[0], "backend": key[1], "target": TARGET, "program_sha256": ran.text}
        if ran.launches and modelled.launches:
            line["launches_sha256"] = ran.launches
        if here.fault or there.fault:
            line |= {"device": here.fault, "machine": there.fault}
        else:
            sizes = {name: tensor.numel() for name, tensor in there.outputs.items()}
            line |= {"differing": differences(here.outputs, there.outputs), "elements": sizes}
        found.append(line)
    return found


def _run(given: argparse.Namespace) -> int:
    found: dict[Key, Left] = {}
    given.file.write_bytes(pickle.dumps(found))
    before = _lines(given.known)
    known = {_key(line): _digests(line) for line in before if not _differs(line)}
    _say_untold(given.known, before)
    rows = rows_of(given.op, given.profile, given.backend or BACKENDS)
    for key in given.part.of([key for key in rows if given.case is None or key[0] in given.case]):
        if (left := left_by(key, given.executor, known)) is not None:
            found[key] = left
            given.file.write_bytes(pickle.dumps(found))
            print(f"{key[0]} {key[1]}: {left.fault or 'ran'}", flush=True)
    return sum(bool(left.fault) for left in found.values())


def part_of(text: str) -> Nth:
    """Parses I/N of a command line."""
    try:
        return Nth.parse(text)
    except SelectionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _lines(record: Path | None) -> list[dict[str, Any]]:
    return [] if record is None else json.loads(record.read_text("utf-8"))


def _key(line: Mapping[str, Any]) -> Key:
    return line["case"], line["backend"]


def _digests(line: Mapping[str, Any]) -> Digests:
    return Digests(line["program_sha256"], line.get("launches_sha256", ""))


def _say_untold(record: Path | None, lines: Sequence[Mapping[str, Any]]) -> None:
    if untold := sum(not _digests(line).launches for line in lines):
        print(f"{untold} lines of {record} do not tell of launches: of these rows only the programs' text is compared")


def _differs(line: Mapping[str, Any]) -> bool:
    """Whether a bit differs, or one side has nothing to compare."""
    return "differing" not in line or any(line["differing"].values())


def todays(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Keeps the lines whose case is in a profile and whose program is the one that the backend builds today."""
    specs = load_specs()
    cases = {case.id for spec in specs.values() for profile in spec.profiles.values() for case in profile.cases}
    found: list[Mapping[str, Any]] = []
    for line in lines:
        if line["case"] in cases:
            built = program_of(specs[line["case"].partition(":")[0]], _key(line))
            if built is not None and built[1].same(_digests(line)):
                found.append(line)
    return found


def _compare(given: argparse.Namespace) -> int:
    device, machine = (
        {key: left for path in paths for key, left in pickle.loads(path.read_bytes()).items()}
        for paths in (given.device, given.machine)
    )
    before = _lines(given.known)
    known = todays(before)
    lines = {_key(line): line for line in (*known, *compared(device, machine))}
    found = [lines[key] for key in sorted(lines)]
    given.file.write_text("[\n" + ",\n".join(json.dumps(line) for line in found) + "\n]\n")
    differing = [line for line in found if _differs(line)]
    for line in differing:
        print(json.dumps(line))
    print(f"{len(found)} rows, {len(differing)} differ; the device ran {len(device)}, the machine {len(machine)}")
    _say_untold(given.known, known)
    if len(known) < len(before):
        print(f"{len(before) - len(known)} lines of {given.known} are of other programs than today's, or of no profile")
    return len(differing)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs or compares. Returns the number of rows that have a fault or differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="keep what programs leave")
    run.add_argument("file", type=Path, help="takes it: a pickle, for files of your own alone")
    run.add_argument("--executor", default="vm")
    run.add_argument("--op", required=True)
    run.add_argument("--profile", default="full")
    run.add_argument("--case", action="append", help="only these of the profile")
    run.add_argument("--backend", action="append", help="both of ours if none is given")
    run.add_argument("--part", type=part_of, default="1/1", help="I/N: only the I-th of N parts")
    run.add_argument("--known", type=Path, help="a record: not its rows of today's programs without a difference")
    run.set_defaults(do=_run)
    compare = commands.add_parser("compare", help="count the elements that differ")
    compare.add_argument("file", type=Path, help="takes the record")
    compare.add_argument("--device", type=Path, nargs="+", required=True)
    compare.add_argument("--machine", type=Path, nargs="+", required=True)
    compare.add_argument("--known", type=Path, help="a record: takes over its other rows of today's programs")
    compare.set_defaults(do=_compare)
    given = parser.parse_args(arguments)
    return given.do(given)


if __name__ == "__main__":
    sys.exit(min(main(), 125))

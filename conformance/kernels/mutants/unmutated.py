"""Runs unchanged programs under random orders with their findings collected: none of them is an error.

A machine with false alarms would kill every mutant. The cases come from the profiles smoke and full and from random
draws, for every backend and target that runs on the machine; slow cases are left out. Each case runs once in order, as
a row is judged, and then under orders of its own seeds, which must leave the same bits.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, settings

from conformance import ROOT
from conformance.kernels.laws.law import laws_of
from conformance.kernels.laws.strategies import cases
from conformance.kernels.mutants.campaign import Built, collected, judged, program_of
from conformance.kernels.mutants.journal import Journal, Ran
from conformance.kernels.mutants.mutant import program_id
from megamoe.contract import Case, RunOptions
from megamoe.contract.counted import counted
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, owed_rows

UNMUTATED = ROOT / "results" / "unmutated.jsonl"
OTHERS = ROOT / "results" / "others.jsonl"
"""Kernels of public repositories under random orders: conformance.witness.random_orders writes it."""
ORDERS = 24
"""Random orders of a case on a backend and a target."""
DRAWN = 60
"""Cases drawn from the ranges of each op."""
MAX_SECONDS = 0.25
"""Processor time of the run in order, including reading the program; a slower case is left out."""
MAX_ELEMENTS = 1 << 17
"""Elements of the inputs of a case; a larger case is left out."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A case on a backend and a target, or a call of a public kernel, of a family: a line of a record.

    `rows`: orders that ran, from random:`first` on; 0 if it was left out, and `left_out` says why. `errors`: sentences
    of the errors. `relied`, `notes`: rules of grade portability, and notes, with the number of rows that met them.
    `text`: the first digits of the SHA-256 of the program's text, or of the file of a public kernel. `argued`: rules
    and places of the errors in a public kernel that argued.yaml argues, with the number of rows that met them.
    """

    backend: str
    target: str
    case: str
    first: int = 0
    rows: int = 0
    errors: tuple[str, ...] = ()
    relied: dict[str, int] = field(default_factory=dict[str, int])
    notes: dict[str, int] = field(default_factory=dict[str, int])
    left_out: str = ""
    seconds: float = 0.0
    text: str = ""
    argued: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def id(self) -> tuple[str, str, str]:
        """Key of the line."""
        return self.backend, self.target, self.case


class Watch(Journal[Watched]):
    """The record of watched cases."""

    def __init__(self, path: Path = UNMUTATED) -> None:
        """`path`: the file to read and to append to."""
        super().__init__(Watched, path)

    @property
    def rows(self) -> int:
        """Number of rows that ran."""
        return sum(one.rows for one in self.results)

    @property
    def wrong(self) -> list[Watched]:
        """Watched cases with an error."""
        return [one for one in self.results if one.errors]


def drawn(op: str, count: int, seed: int) -> list[Case]:
    """Draws `count` cases of `op`'s law matches_reference, the same for a seed on every host; each case once."""
    found: dict[str, Case] = {}

    @settings(max_examples=count, database=None, deadline=None, derandomize=True, phases=[Phase.generate],
              suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])  # fmt: skip
    @given(cases(laws_of(op)["matches_reference"]))
    def take(case: Case) -> None:
        found[case.id] = case

    take()
    return random.Random(seed).sample(list(found.values()), len(found))


def candidates(seed: int = 0) -> list[tuple[str, str, Case]]:
    """Backends, targets and cases in the order of watching; `seed` shuffles it."""
    specs = load_specs(None)
    owed = [row for name in ("smoke", "full") for row in owed_rows(specs, Selection(name, executors=("vm",)))]
    found = {(row.backend, row.target, row.case): specs[row.op].parse_case(row.case) for row in owed}
    for op in specs:
        places = dict.fromkeys((row.backend, row.target) for row in owed if row.op == op)
        found |= {(*place, case.id): case for case in drawn(op, DRAWN, seed) for place in places}
    shuffled = random.Random(seed).sample(sorted(found), len(found))
    return [(backend, target, found[backend, target, case]) for backend, target, case in shuffled]


def watched(backend: str, target: str, built: Built, seeds: Sequence[int]) -> Watched:
    """Runs a program once in order and then under random:SEED for each of `seeds`."""
    about, text = (backend, target, built.case.id), program_id(built.program.ptx)
    # Building the references does not count in the time.
    _ = built.expected
    begun = time.process_time()
    first = collected(built, built.program, RunOptions(schedule="eager"))
    if (spent := time.process_time() - begun) > MAX_SECONDS:
        return Watched(*about, left_out=f"it takes more than {MAX_SECONDS:g} s", seconds=round(spent, 2), text=text)
    alone = first.ran
    _, wrong = judged(built, alone)
    errors = [f"eager: {wrong}"[:300]] if wrong else []
    relied, notes = Counter[str](), Counter[str]()
    for seed in seeds:
        schedule = f"random:{seed}"
        one = collected(built, built.program, RunOptions(schedule=schedule))
        errors += [f"{schedule}: {fault}"[:300] for fault in one.found if fault.about.grade == "error"]
        relied.update({fault.rule for fault in one.found if fault.about.grade == "portability"})
        notes.update({fault.rule for fault in one.found if fault.about.grade == "note"})
        wrong = "" if errors else one.ran.fault() or _moved(alone.settled, one.ran.settled)
        errors += [f"{schedule}: {wrong}"[:300]] if wrong else []
    spent = round(time.process_time() - begun, 2)
    return Watched(*about, seeds[0], len(seeds), tuple(errors), dict(relied), dict(notes), seconds=spent, text=text)


def _moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> str:
    bits = {name: (before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before}
    names = [name for name, (one, other) in bits.items() if not torch.equal(one, other)]
    return f"other bits than in order: {', '.join(names)}" if names else ""


def watch(record: Watch, rows: int, seconds: float | None = None) -> Iterator[Watched]:
    """Watches until `record` has `rows` rows, for at most `seconds` of processor time. Recorded cases do not run again,
    unless their backend now builds another text; then they run under their recorded orders. Texts without a row come
    first."""
    begun = time.process_time()
    specs = load_specs(None)

    def over() -> bool:
        return seconds is not None and time.process_time() - begun > seconds

    for one in [each for each in record.results if each.rows]:
        if over():
            return
        case = specs[one.case.partition(":")[0]].parse_case(one.case)
        program = program_of(one.backend, one.target, case)
        if program is not None and program_id(program.ptx) != one.text:
            orders = range(one.first, one.first + one.rows)
            record.append(watched(one.backend, one.target, Built(specs[case.op], case, program), orders))
            yield record.by_id[one.id]
    if record.rows >= rows:
        return
    for place, backend, target, case in _left(record):
        if record.rows >= rows or over():
            return
        program = program_of(backend, target, case)
        built = None if program is None else Built(specs[case.op], case, program)
        if built is None:
            record.append(Watched(backend, target, case.id, left_out="the backend has no such program"))
        elif built.size > MAX_ELEMENTS:
            record.append(Watched(backend, target, case.id, left_out=f"more than {MAX_ELEMENTS} elements"))
        else:
            record.append(watched(backend, target, built, range(place * ORDERS, (place + 1) * ORDERS)))
            yield record.by_id[backend, target, case.id]


def _left(record: Watch) -> list[tuple[int, str, str, Case]]:
    """Candidates that `record` lacks, with their places; programs without a row come first."""
    known = {(one.backend, one.target, one.text) for one in record.results if one.rows}
    left = [(place, *one) for place, one in enumerate(candidates()) if (one[0], one[1], one[2].id) not in record.by_id]

    def is_known(one: tuple[int, str, str, Case]) -> bool:
        _, backend, target, case = one
        program = program_of(backend, target, case)
        return program is None or (backend, target, program_id(program.ptx)) in known

    return sorted(left, key=is_known)


def followed(record: Watch, planned: int, given: Sequence[str], running: Iterable[Watched]) -> int:
    """Prints what `running` yields, which `record` takes; `planned`: the rows that it shall have. Returns 1 if one of
    its lines has an error, else 0."""
    record.append(Ran.now(given, planned))
    for one in running:
        fate = one.left_out or "; ".join(one.errors) or "no error"
        rows = f"{record.rows}/{planned} rows"
        print(f"{rows}, {one.case} on {one.backend} {one.target}: {fate}, {one.seconds:.1f} s", flush=True)
    wrong = counted(len(record.wrong), "case")
    print(f"{record.path}: {counted(record.rows, 'row')}, {wrong} with an error")
    return int(bool(record.wrong))


def told(record: Watch, *, others: bool = False) -> list[str]:
    """Returns a record as lines of Markdown. `others`: it is of public kernels, by family, rather than by backend."""
    lines, wrong = [one for one in record.results if one.rows], record.wrong
    places, relied, notes, argued, left_out = (Counter[str]() for _ in range(5))
    for one in record.results:
        left_out.update(filter(None, [one.left_out]))
    for one in lines:
        op = () if others else (one.case.partition(":")[0],)
        places[" ".join((one.backend, one.target, *op))] += one.rows
        relied.update(one.relied)
        notes.update(one.notes)
        for finding, rows in one.argued.items():
            argued[finding.partition(" at ")[0]] += rows
    skipped = ", ".join(f"{count} ({why})" for why, count in sorted(left_out.items()))
    what = counted(len(lines), "call") if others else f"{counted(len(lines), 'case')}, each on a backend and a target"
    return [
        f"{counted(record.rows, 'row')}: {what}, under random orders; {len(wrong)} with an error.",
        f"Rows that met a rule of grade portability: {_counted(relied)}. Notes: {_counted(notes)}.",
        *(
            [f"Findings of grade error that are argued, by rule, each site in each row: {_counted(argued)}."]
            if others
            else []
        ),
        *([f"Left out: {skipped}."] if skipped else []),
        "",
        "| program | rows |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in sorted(places.items())),
        "",
        *(f"- `{one.case}` on {one.backend} {one.target}: {one.errors[0]}" for one in wrong),
        *([""] if wrong else []),
    ]


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"`{name}` {count}" for name, count in sorted(found.items())) or "none"

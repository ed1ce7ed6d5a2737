"""`python -m conformance.kernels.mutants.carried FOLDER`: writes what on_device.py needs on an H200.

For each sm_90a mutant of the record whose row has at most ELEMENTS it packs the machine code, the launches, and the
inputs of the row that killed it in the VM, or of its program's first row if none did. Launches are the VM's, host
programs' included. `--draw SYNC OTHERS SEED` adds mutants of the smoke profile's programs of the NVFP4 layer.

`--some N`: only N of all, at random; at most an eighth of these deadlock in the VM, as such mutants cost seconds each.
`--hanging`: only mutants that hang in the record of an H200 (silicon.py), with waits that give up, so that tools come
to an end; and their unchanged programs, with the same waits.
`--untold`: only mutants of that record on which no tool ran, but for those that hang; and `alone.json`, what the record
says of them alone.
`--more N`: only mutants of SYNCHRONISATION that the record of an H200 lacks; of each program those on the N cases that
have most of them. `--texts`: the folder gets PTX instead of machine code, and on_device.py assembles it, with a copy of
the pinned ptxas that it finds in the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backends.vm.executor import VmExecutor
from backends.vm.machine.machine import LaunchRequest, Machine
from backends.vm.memory.global_memory import Buffer
from conformance.fakes.patient import patient
from conformance.kernels.mutants.campaign import Built, Plan, Record, Subject, built_of, planned, subjects
from conformance.kernels.mutants.mutant import SYNCHRONISATION, Mutant, mutants, program_id
from conformance.kernels.mutants.on_device import ALONE, RUNS, TEXTS, lot, numbered
from conformance.kernels.mutants.silicon import Seen, read
from conformance.kernels.mutants.table import RECORD
from megamoe.contract import HostProgram, Program
from megamoe.contract.assembly import assemblers
from megamoe.contract.counted import counted
from megamoe.judge.guarded import GuardedCase
from megamoe.ops import reference
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection

TARGET = "sm_90a"
ELEMENTS = 300_000
"""Most elements of the inputs of a packed row."""


class Noting(Machine):
    """A machine that notes launches and performs none."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.noted: list[LaunchRequest] = []

    def perform(self, asked: LaunchRequest) -> None:
        """Note it."""
        if asked.cooperative:
            raise ValueError(f"{asked.function.name} is a cooperative launch; the launcher on the device makes none")
        # The caller may overwrite the bytes for the next launch.
        self.noted.append(replace(asked, params=tuple(map(bytes, asked.params))))


def noted(built: Built, program: Program | HostProgram) -> tuple[Noting, tuple[str, ...]]:
    """Returns the launches that `program` requests on the inputs of a case, and the names of the outputs."""
    made: list[Noting] = []

    def noting(*given: Any) -> Noting:
        made.append(Noting(*given))
        return made[-1]

    executor = VmExecutor()
    executor.machines = noting
    guarded = GuardedCase(built.spec, built.case, executor, reference(built.case.op).make_inputs(built.case))
    guarded.run(program)
    return made[-1], tuple(guarded.arena.outputs)


def places(launch: LaunchRequest, buffers: Sequence[Buffer]) -> list[tuple[int, int, str, int]]:
    """Finds the addresses among the parameters: parameter, byte, buffer, offset into it."""
    found: list[tuple[int, int, str, int]] = []
    for number, param in enumerate(launch.params):
        for byte in range(0, len(param) - 7, 8):
            (word,) = struct.unpack_from("<Q", param, byte)
            for one in buffers:
                if one.base <= word < one.base + max(one.data.size, 1):
                    found.append((number, byte, one.name, word - one.base))
    return found


@dataclass(slots=True)
class Carried:
    """The folder: `rows` and `calls` of rows.json. `hanging`: waits of its programs give up. `stuck`: ids of mutants
    that deadlock in the VM. `texts`: it gets `plain`, unchanged texts by id, and for each row a `changes`: the id, and
    the text that stands for what is between two places. Otherwise it gets machine code."""

    folder: Path
    hanging: bool = False
    stuck: frozenset[str] = frozenset()
    texts: bool = False
    plain: dict[str, str] = field(default_factory=dict[str, str])
    changes: dict[str, tuple[str, int, int, str]] = field(default_factory=dict[str, tuple[str, int, int, str]])
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    calls: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def __post_init__(self) -> None:
        for name in ("bytes", "code"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def call(self, name: str, built: Built, program: Program | HostProgram) -> str:
        """Keeps the launches and inputs of `program` on a case, once by `name`."""
        if name in self.calls:
            return name
        machine, outputs = noted(built, program)
        buffers = list(machine.memory.buffers)
        # An input with a scratch buffer's name stays apart: names are the program's.
        self.calls[name] = {
            "launches": [
                {
                    "entry": one.function.name,
                    "grid": one.shape.grid,
                    "block": one.shape.block,
                    "cluster": one.shape.cluster,
                    "smem": one.shape.dynamic_smem,
                    "dependent": one.dependent,
                    "params": [param.hex() for param in one.params],
                    "places": places(one, buffers),
                }
                for one in machine.noted
            ],
            "buffers": [
                (one.name, one.data.size, None if one.name in program.scratch else self._kept(one.data.tobytes()))
                for one in buffers
            ],
            "outputs": outputs,
        }
        return name

    def _kept(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()[:16]
        path = self.folder / "bytes" / name
        if not path.exists():
            path.write_bytes(data)
        return name

    def row(self, subject: Subject, built: Built, mutant: Mutant | None) -> str:
        """Keeps a mutant, or the unchanged program for None. Returns a sentence if it cannot."""
        program, number = built.program, len(self.rows)
        base = f"{subject.backend} {program_id(program.ptx)} {built.case.id}"
        changed = program if mutant is None else mutant.of(program)
        name = base if mutant is None or mutant.launch is None else f"{base} {mutant.id}"
        try:
            self.call(name, built, changed if mutant is None or mutant.launch is not None else program)
            text = patient(changed.ptx) if self.hanging else changed.ptx
            if self.texts:
                self._keep_text(number, program.ptx, text, mutant)
            else:
                code = cubin(numbered(text, [one["entry"] for one in self.calls[name]["launches"]], number))
                (self.folder / "code" / f"{number}.cubin").write_bytes(code)
        except Exception as error:
            return f"{'' if mutant is None else mutant.id}: {type(error).__name__}: {str(error)[:200]}"
        self.rows.append(
            {
                "number": number,
                "id": "" if mutant is None else mutant.id,
                "kind": "" if mutant is None else mutant.kind,
                "orders": mutant is not None and mutant.kind in SYNCHRONISATION,
                "stuck": mutant is not None and mutant.id in self.stuck,
                "base": base,
                "call": name,
                "runs": 1 if self.hanging else RUNS,
            }
        )
        return ""

    def _keep_text(self, number: int, ptx: str, text: str, mutant: Mutant | None) -> None:
        edits = () if mutant is None else mutant.edits
        begin, end = min((one.begin for one in edits), default=0), max((one.end for one in edits), default=0)
        if self.hanging:
            begin, end = 0, len(ptx)
        name = program_id(ptx)
        self.plain[name] = ptx
        self.changes[str(number)] = name, begin, end, text[begin : len(text) - (len(ptx) - end)]

    def write(self) -> None:
        """Writes rows.json, the texts and the launcher."""
        (self.folder / "rows.json").write_text(json.dumps({"rows": self.rows, "calls": self.calls}))
        if self.texts:
            held = json.dumps({"plain": self.plain, "changes": self.changes}).encode()
            (self.folder / TEXTS).write_bytes(lzma.compress(held, preset=1))
        launcher = Path(__file__).with_name("on_device.py")
        (self.folder / "on_device.py").write_text(launcher.read_text("utf-8"), "utf-8")

    def write_alone(self, seen: Sequence[Seen]) -> None:
        """Writes alone.json: the answers that `seen` has of the mutants without a tool."""
        fates = {one.id: one for one in seen if one.id}
        answers = [
            {
                "number": row["number"],
                "tool": ALONE,
                "status": of.fate,
                "wrong": of.wrong,
                "of": of.launches,
                "reports": {},
            }
            for row in self.rows
            if (of := fates.get(row["id"])) is not None
        ]
        (self.folder / "alone.json").write_text(json.dumps(answers))


def cubin(ptx: str) -> bytes:
    """Assembles with the first assembler found."""
    return next(iter(assemblers().values()))()(ptx, TARGET).cubin


def of_record(record: Record) -> Iterator[tuple[Subject, Built, Mutant]]:
    """Yields mutants of a record whose program is still built, each with the case that killed it."""
    specs = load_specs(None)
    known: dict[str, tuple[Subject, Mapping[str, Mutant]] | None] = {}
    for one in record.results:
        backend, target, _, text = one.program.split()
        if target != TARGET:
            continue
        if one.program not in known:
            built = built_of(specs, one.program)
            known[one.program] = None
            if built is not None:
                by_id = {each.id: each for each in mutants(built.program)}
                known[one.program] = Subject(backend, target, built.case.op, [built]), by_id
        if (found := known[one.program]) is None or one.id not in found[1]:
            continue
        built = built_of(specs, f"{backend} {target} {one.case} {text}") if one.case else found[0].built[0]
        if built is not None and built.size <= ELEMENTS:
            yield found[0], built, found[1][one.id]


def hangs(one: Seen) -> bool:
    """Whether an H200 waited for it in vain."""
    return one.fate == "hang"


def is_untold(one: Seen) -> bool:
    """Whether no tool ran on it, although it ends."""
    return not one.tools and not hangs(one)


def of_silicon(wanted: Callable[[Seen], bool]) -> Iterator[tuple[Subject, Built, Mutant]]:
    """Yields `wanted` mutants of an H200's record whose program is still built, each with the case it ran on."""
    specs = load_specs(None)
    bases: dict[str, list[str]] = {}
    for one in read():
        if one.id and wanted(one):
            bases.setdefault(one.base, []).append(one.id)
    for base, ids in bases.items():
        backend, text, case_id = base.split()
        if (built := built_of(specs, f"{backend} {TARGET} {case_id} {text}")) is not None:
            subject = Subject(backend, TARGET, built.case.op, [built])
            yield from ((subject, built, one) for one in mutants(built.program) if one.id in ids)


Choice = tuple[Subject, Built, Mutant]


def more_of(every: Sequence[Choice], cases: int) -> list[Choice]:
    """Keeps mutants of SYNCHRONISATION that the H200's record lacks, of each program those on `cases` cases."""
    seen = {one.id for one in read()}
    left = [one for one in every if one[2].kind in SYNCHRONISATION and one[2].id not in seen]
    counts: dict[str, Counter[str]] = {}
    for subject, built, _ in left:
        counts.setdefault(f"{subject.backend} {program_id(built.program.ptx)}", Counter())[built.case.id] += 1
    kept = {(name, case) for name, some in counts.items() for case, _ in some.most_common(cases)}
    return [one for one in left if (f"{one[0].backend} {program_id(one[1].program.ptx)}", one[1].case.id) in kept]


def drawn_ones(synchronisation: int, others: int, seed: int) -> Iterator[tuple[Subject, Built, Mutant]]:
    """Draws like `nox -s mutants -- --op nvfp4_moe --target sm_90a`, each on the first case of its program."""
    selection = Selection("smoke", ("nvfp4_moe",), targets=(TARGET,), executors=("vm",))
    for subject, mutant in planned(Plan(selection, synchronisation, others, seed), subjects(selection)):
        yield subject, subject.built[0], mutant


def main(given: list[str]) -> None:
    """Runs the command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--draw", type=int, nargs=3, metavar=("SYNC", "OTHERS", "SEED"))
    parser.add_argument("--some", type=int, metavar="N")
    parser.add_argument("--hanging", action="store_true")
    parser.add_argument("--untold", action="store_true")
    parser.add_argument("--more", type=int, metavar="N")
    parser.add_argument("--texts", action="store_true")
    options = parser.parse_args(given)
    record = Record(options.record)
    stuck = frozenset(one.id for one in record.results if one.check == "rule:deadlock")
    carried = Carried(options.folder, options.hanging, stuck, options.texts)
    if options.hanging or options.untold:
        chosen = of_silicon(hangs if options.hanging else is_untold)
    else:
        chosen = of_record(record)
    if options.more is not None:
        chosen = more_of(list(chosen), options.more)
    every = {one[2].id: one for one in chosen}
    if options.draw:
        every = {one[2].id: one for one in drawn_ones(*options.draw)} | every
    if options.some is not None:
        ranked = sorted(every, key=lot)
        few = [name for name in ranked if name in stuck][: options.some // 8]
        rest = [name for name in ranked if name not in stuck][: options.some - len(few)]
        every = {name: every[name] for name in (*few, *rest)}
    bases = {(one.backend, built.program.ptx, built.case.id): (one, built) for one, built, _ in every.values()}
    left = [said for one, built in bases.values() if (said := carried.row(one, built, None))]
    left += [said for one in every.values() if (said := carried.row(*one))]
    carried.write()
    if options.untold:
        carried.write_alone(read())
    print("\n".join(left))
    print(
        f"{counted(len(carried.rows), 'row')}, of them {len(bases)} of programs as they are; {len(left)} are left out"
    )


if __name__ == "__main__":
    main(sys.argv[1:])

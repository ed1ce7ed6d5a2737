"""Every lane-wise spelling that ptxas takes for sm_90a: programs, operands, and an H200's answers as checksums.

An H200 ran each spelling in a kernel of its own. The machine runs up to BUNDLE spellings in one kernel, because loading
a kernel takes it longer than running an instruction.

    python -m conformance.silicon.lanewise.every             # all values on the machine, against the answers
    python -m conformance.silicon.lanewise.every pack FOLDER # here: PTX, operands, the machine's checksums
    python3 FOLDER/ask.py FOLDER OUT                         # there (on_device.py): OUT/every.npz, OUT/differing.npz
    python -m conformance.silicon.lanewise.every merge OUT   # here: records the answers in every.npz
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from backends.ptx.assembler import find_ptxas
from backends.vm.bind.forms import all_forms
from backends.vm.coverage import MEASURED, family_of
from backends.vm.faults import UnknownInstructionError
from backends.vm.load import load
from conformance import SILICON
from conformance.silicon.lanewise import on_device
from conformance.silicon.lanewise.as_ptxas import departures
from conformance.silicon.lanewise.on_device import CHECKED, checksums
from conformance.silicon.lanewise.programs import (
    COUNT,
    HEAD,
    SOURCES,
    Program,
    answered,
    bundled,
    kernel,
    matrix_programs,
    program_of,
    register_of,
)
from conformance.silicon.lanewise.values import count_of, values_of
from megamoe.contract.scratch import scratch_folder
from megamoe.records.files import write_file

Checks = npt.NDArray[np.uint32]

FILE: Final = SILICON / "lanewise" / "every.npz"
BUNDLE: Final = 32
PROGRAMS_A_MODULE: Final = 40
_FAMILIES: Final = (
    "integer", "float32", "float64_ops", "half_ops", "compare", "convert_ops", "move", "warp_ops", "carry", "video",
)  # fmt: skip


def candidates() -> Iterator[Program]:
    """Yields a program for each spelling of each lane-wise form, then those of matrices; ptxas refuses half of them."""
    seen: set[str] = set()
    for form in all_forms():
        if family_of(form) not in _FAMILIES:
            continue
        for words in itertools.product(*[[*sorted(slot.choices), *[""] * slot.optional] for slot in form.slots]):
            parts = [word for word in words if word]
            opcode = ".".join(parts)
            if opcode not in seen and (program := program_of(parts, random.Random(opcode))) is not None:
                seen.add(opcode)
                yield program
    yield from matrix_programs()


def taken(programs: Sequence[Program]) -> list[Program]:
    """Returns the programs whose instruction ptxas takes for sm_90a. UnsupportedError without a ptxas.

    For a virtual architecture ptxas generates no code and names each line that it refuses.
    """
    head = [*HEAD.splitlines(), ".visible .entry every()", "{", ".reg .b64 %i; .reg .pred %q, %q2, %q3;"]
    left = list(programs)
    with scratch_folder("lanewise") as folder:
        source = folder / "every.ptx"
        command = [str(find_ptxas()), "-arch", "compute_90a", "-o", str(folder / "nothing"), str(source)]
        while left:
            source.write_text("\n".join([*head, *map(_alone, left), "ret;", "}", ""]))
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
            lines = re.findall(r"line (\d+); (?:error|fatal)", done.stdout + done.stderr)
            refused = {int(line) - len(head) - 1 for line in lines} & set(range(len(left)))
            if not refused:
                raise RuntimeError(f"ptxas refused more than the spellings: {done.stderr[:300]}")
            left = [program for at, program in enumerate(left) if at not in refused]
    return left


def bindable(programs: Sequence[Program]) -> list[Program]:
    """Returns the programs that the machine takes. It refuses roundings of exact conversions, which ptxas ignores."""
    try:
        load(HEAD + bundled(programs, COUNT)).entry(programs[0].entry)
    except UnknownInstructionError:
        half = len(programs) // 2
        return [*bindable(programs[:half]), *bindable(programs[half:])] if half else []
    return list(programs)


def asked_of(programs: Sequence[Program]) -> list[Program]:
    """Returns the programs that both ptxas and the machine take."""
    return [one for some in bundles(taken(programs)) for one in bindable(some)]


def _alone(program: Program) -> str:
    names = zip(SOURCES, program.sources, strict=False)
    registers = [f".reg .{register_of(kind)} %{name};" for name, kind in (("d", program.destination), *names)]
    return f"{{ {' '.join(registers)} {program.text} }}"


@dataclass(frozen=True)
class Answers:
    """What an H200 answered: by spelling, the checksum of the program and its operands, and those of its results.

    `refused`: the spellings that ptxas refuses for sm_90a, and those that only the machine refuses.
    """

    checks: Mapping[str, tuple[int, Checks]]
    refused: frozenset[str]

    @classmethod
    def read(cls, file: Path = FILE) -> Answers:
        """Reads every.npz; without it nothing is answered."""
        if not file.exists():
            return cls({}, frozenset())
        held = np.load(file)
        opcodes = [str(one) for one in held["opcodes"]]
        parts = np.split(held["checks"], np.cumsum(held["counts"])[:-1])
        checks = {one: (int(which), part) for one, which, part in zip(opcodes, held["identities"], parts, strict=True)}
        return cls(checks, frozenset(map(str, held["refused"])))

    def packed(self) -> bytes:
        """Returns the bytes of every.npz."""
        opcodes, file = sorted(self.checks), io.BytesIO()
        np.savez_compressed(
            file,
            allow_pickle=False,
            opcodes=np.array(opcodes),
            identities=np.array([self.checks[one][0] for one in opcodes], np.uint32),
            counts=np.array([len(self.checks[one][1]) for one in opcodes], np.uint32),
            checks=np.concatenate([self.checks[one][1] for one in opcodes]),
            refused=np.array(sorted(self.refused)),
        )
        return file.getvalue()


@cache
def _of_values(sources: tuple[str, ...]) -> int:
    return crc32(b"".join(one.tobytes() for one in values_of(sources)))


def identity(program: Program) -> int:
    """Checksum of the kernel that ran and its operands: an answer belongs to these alone."""
    return crc32(f"{kernel(program)} {_of_values(program.sources)}".encode())


def bundles(programs: Iterable[Program]) -> list[list[Program]]:
    """Up to BUNDLE programs with the same first word and sources each, for one kernel."""

    def shared(program: Program) -> tuple[str, tuple[str, ...]]:
        return program.opcode.partition(".")[0], program.sources

    groups = [list(group) for _, group in itertools.groupby(sorted(programs, key=shared), shared)]
    return [group[at : at + BUNDLE] for group in groups for at in range(0, len(group), BUNDLE)]


def machine_checks(programs: Sequence[Program], most: int | None = None) -> list[Checks]:
    """The checksums of the machine's results for a bundle, of the first `most` values or of all."""
    values = [one[:most] for one in values_of(programs[0].sources)]
    count = min(most or count_of(programs[0].sources), count_of(programs[0].sources))
    with np.errstate(all="ignore"):
        return [checksums(one) for one in answered(programs, bundled(programs, count), values, count)]


def differences(programs: Sequence[Program], answers: Answers, most: int | None = None) -> list[str]:
    """A sentence for each program of a bundle of which the machine's results are not the H200's."""
    said: list[str] = []
    for program, mine in zip(programs, machine_checks(programs, most), strict=True):
        wrong = np.flatnonzero(mine != answers.checks[program.opcode][1][: len(mine)])
        if len(wrong):
            first = CHECKED * int(wrong[0])
            said.append(f"{program.opcode}: of values {first} to {first + CHECKED - 1} the machine gives other results "
                        f"than an H200, as in {len(wrong)} of {len(mine)} such parts")  # fmt: skip
    return said


def unanswered(programs: Iterable[Program], answers: Answers) -> list[Program]:
    """Returns the programs that no H200 has run, or not with these operands."""
    return [one for one in programs if answers.checks.get(one.opcode, (None,))[0] != identity(one)]


def pack(folder: Path, programs: Sequence[Program]) -> None:
    """Writes what travels: the programs, their operands, and the machine's checksums of their results."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = [programs[at : at + PROGRAMS_A_MODULE] for at in range(0, len(programs), PROGRAMS_A_MODULE)]
    for number, part in enumerate(modules):
        text = HEAD + "\n".join(map(kernel, part))
        (folder / f"part-{number}.ptx.gz").write_bytes(gzip.compress(text.encode()))
    rows = [
        [[one.entry, one.opcode, " ".join(one.sources), count_of(one.sources), identity(one)] for one in part]
        for part in modules
    ]
    (folder / "entries.json").write_text(json.dumps(rows))
    named = {" ".join(one.sources): np.stack([*values_of(one.sources)] or [_NONE]) for one in programs}
    np.savez_compressed(folder / "operands.npz", allow_pickle=False, **named)
    mine = {
        one.opcode: part for some in bundles(programs) for one, part in zip(some, machine_checks(some), strict=True)
    }
    np.savez_compressed(folder / "machine.npz", allow_pickle=False, **mine)
    (folder / "ask.py").write_text(Path(on_device.__file__).read_text("utf-8"))


_NONE: Final = np.zeros(0, np.uint64)


def merged(out: Path, held: Answers, every: Iterable[Program], asked: Sequence[Program]) -> Answers:
    """Returns the answers to `asked`: OUT/every.npz's, else held ones. The others of `every` count as refused."""
    found = np.load(out / "every.npz")
    checks = {one.opcode: held.checks[one.opcode] for one in asked if one.opcode in held.checks}
    checks |= {
        one.opcode: (int(found[one.opcode][0]), found[one.opcode][1:]) for one in asked if one.opcode in found.files
    }
    return Answers(checks, frozenset(one.opcode for one in every) - {one.opcode for one in asked})


def _merge(out: Path) -> str:
    """Records OUT's answers, and lists their opcodes as witnessed."""
    every = list(candidates())
    asked = asked_of(every)
    answers = merged(out, Answers.read(), every, asked)
    write_file(FILE, answers.packed(), "answers")
    listed = json.loads(MEASURED.read_text("utf-8"))
    listed["lanewise/every.npz"] = sorted(answers.checks)
    write_file(MEASURED, json.dumps(dict(sorted(listed.items())), indent=1) + "\n", "opcodes")
    return f"{len(answers.checks)} of {len(asked)} spellings are answered"


def main(given: Sequence[str]) -> int:
    """Runs the command line; see the module."""
    answers = Answers.read()
    if given[:1] == ["pack"]:
        new = unanswered(asked_of(list(candidates())), answers)
        pack(Path(given[1]), new)
        print(f"{len(new)} programs: {given[1]}")
    elif given[:1] == ["merge"]:
        print(_merge(Path(given[1])))
    else:
        programs = [one for one in candidates() if one.opcode in answers.checks]
        wrong = [said for some in bundles(programs) for said in differences(some, answers)]
        known = {one.opcode for one in programs if departures(one)}
        new = [one for one in wrong if one.partition(":")[0] not in known]
        said = f"{len(new)} of {len(programs)} spellings differ from an H200"
        print("\n".join([*new, f"{said}, and {len(wrong) - len(new)} where ptxas departs from the ISA (as_ptxas.py)"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

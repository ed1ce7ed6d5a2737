"""Takes an H200's answers into the record: `python -m conformance.silicon.whole.merge OUT`, OUT of ask.py.

OUT/whole.npz has the outputs of the programs of forms; their checksums go to answers.npz, and the opcodes that ran to
witnessed.json. OUT/hashes.npz has the hashes of random programs; they go to drawn.npz, with the numbers of the programs
in OUT/drawn-failed.txt. Answers must agree with those already recorded. If anything is refused, nothing is written.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.vm.coverage import MEASURED
from conformance import SILICON
from conformance.silicon.whole import drawn
from conformance.silicon.whole.forms import FILE, answers, identity, programs
from conformance.silicon.whole.on_device import DRAWN_MODULE, drawer_of
from conformance.silicon.whole.on_machine import answer, checksums
from megamoe.records.files import write_file

Hashes = npt.NDArray[np.uint64]
DRAWN = SILICON / "whole" / "drawn.npz"
_FAILED = re.compile(r"drawn_(\d+): \S")


class MergeError(Exception):
    """A reason against taking answers into the record, as a sentence."""


@dataclass(frozen=True, slots=True)
class DrawnAnswers:
    """Random programs that an H200 ran: `modules`, by the number of the first program, uint64 [250] each, the hash of
    each program's output; and the numbers of those that hung or failed, whose hash is 0."""

    modules: Mapping[int, Hashes]
    failed: frozenset[int]

    @classmethod
    def read(cls, file: Path) -> DrawnAnswers:
        """Reads drawn.npz."""
        held = np.load(file)
        return cls(dict(zip(held["first"].tolist(), held["hashes"], strict=True)), frozenset(held["failed"].tolist()))

    @classmethod
    def told(cls, out: Path) -> DrawnAnswers:
        """Reads OUT. MergeError if it is of another drawn.py, has a part of a module, or has a program with neither a
        hash nor a line that it failed."""
        failed = _failed_in(out / "drawn-failed.txt")
        modules: dict[int, Hashes] = {}
        if (file := out / "hashes.npz").exists():
            found = np.load(file)
            if "drawer" not in found.files or int(found["drawer"]) != drawer_of(Path(drawn.__file__)):
                raise MergeError(f"{file} is of other programs than those that drawn.py draws; pack and ask again")
            for name in found.files:
                if name != "drawer":
                    modules[int(name)] = _module(file, int(name), found[name], failed)
        if not modules:
            raise MergeError(f"{out} has no module of random programs; ask.py ran out of time before the first")
        held = {number for number in failed if _module_of(number) in modules}
        return cls(modules, frozenset(held))

    def left(self, number: int) -> int:
        """Returns the hash of program `number`'s output. KeyError if its module never ran."""
        first = _module_of(number)
        return int(self.modules[first][number - first])

    def with_more(self, more: DrawnAnswers) -> DrawnAnswers:
        """Returns these and more; a recorded module stays. MergeError if a program that ran twice left other bytes."""
        for first in self.modules.keys() & more.modules.keys():
            for number in (first + np.flatnonzero(self.modules[first] != more.modules[first])).tolist():
                if number not in self.failed | more.failed:
                    raise MergeError(f"program {number} left other bytes than when it ran before; ask again, and find "
                                     "out why it does before either is taken")  # fmt: skip
        added = {number for number in more.failed if _module_of(number) not in self.modules}
        return DrawnAnswers({**more.modules, **self.modules}, self.failed | added)

    def arrays(self) -> dict[str, npt.NDArray[np.uint32] | Hashes]:
        """Returns the arrays of drawn.npz."""
        firsts = sorted(self.modules)
        return {
            "first": np.array(firsts, np.uint32),
            "hashes": np.stack([self.modules[first] for first in firsts]),
            "failed": np.array(sorted(self.failed), np.uint32),
        }


def _module_of(number: int) -> int:
    """Returns a module's number, its first program's."""
    return number - number % DRAWN_MODULE


def _failed_in(file: Path) -> frozenset[int]:
    numbers: set[int] = set()
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        if not (named := _FAILED.match(line)):
            raise MergeError(f"{file} has the line {line[:80]!r}; a program that failed is told as drawn_NUMBER: why")
        numbers.add(int(named[1]))
    return frozenset(numbers)


def _module(file: Path, first: int, hashes: npt.NDArray[Any], failed: frozenset[int]) -> Hashes:
    if first % DRAWN_MODULE or hashes.shape != (DRAWN_MODULE,) or hashes.dtype != np.uint64:
        raise MergeError(
            f"{file} has {hashes.dtype} {list(hashes.shape)} from program {first} on; a module is uint64 "
            f"[{DRAWN_MODULE}], from a multiple of {DRAWN_MODULE} on, so ask for whole ones"
        )
    silent = set((first + np.flatnonzero(hashes == 0)).tolist()) - failed
    if silent:
        raise MergeError(f"{file} has no hash of program {min(silent)}, which drawn-failed.txt does not name either")
    return hashes


def _packed(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.getvalue()


def merge_drawn(out: Path, into: Path = DRAWN) -> str:
    """Merges OUT's random programs into the file `into`; returns a sentence on what is new. MergeError if it refuses
    them."""
    held = DrawnAnswers.read(into) if into.exists() else DrawnAnswers({}, frozenset())
    every = held.with_more(DrawnAnswers.told(out))
    write_file(into, _packed(every.arrays()), "answers")
    new, failed = len(every.modules) - len(held.modules), len(every.failed - held.failed)
    return f"{new * DRAWN_MODULE} random programs are new, of which {failed} failed; {into.name} has " \
           f"{len(every.modules) * DRAWN_MODULE}"  # fmt: skip


def merge_forms(out: Path) -> str:
    """Records the outputs of OUT/whole.npz as answers, and lists the opcodes that ran as witnessed."""
    found = np.load(out / "whole.npz")
    held = dict(answers()) if FILE.exists() else {}
    every = sorted(programs(), key=lambda one: one.entry)
    new = {one.entry: (identity(one), checksums(found[one.entry])) for one in every if one.entry in found.files}
    held |= new
    every = [one for one in every if one.entry in held and held[one.entry][0] == identity(one)]
    listed = json.loads(MEASURED.read_text("utf-8"))
    listed.pop("whole/answers.npz", None)
    elsewhere = set().union(*listed.values())
    with np.errstate(all="ignore"):
        ran = set().union(*(answer(one).opcodes for one in every))
    listed["whole/answers.npz"] = sorted(ran - elsewhere)
    arrays = {
        "entries": np.array([one.entry for one in every]),
        "identities": np.array([held[one.entry][0] for one in every], np.uint32),
        "rows": np.stack([held[one.entry][1] for one in every]),
    }
    write_file(FILE, _packed(arrays), "answers")
    write_file(MEASURED, json.dumps(dict(sorted(listed.items())), indent=1) + "\n", "opcodes")
    return f"{len(new)} programs of forms are answered; {FILE.name} has {len(every)}"


def main(given: list[str]) -> int:
    """Runs the command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder in which ask.py left its answers")
    out: Path = parser.parse_args(given).out
    forms, random = (out / "whole.npz").exists(), (out / "hashes.npz").exists()
    if not forms and not random:
        print(f"{out} has neither whole.npz nor hashes.npz; give the folder OUT of ask.py", file=sys.stderr)
        return 2
    try:
        # Merge random programs first: they can be refused, and then nothing may be written.
        if random:
            print(merge_drawn(out))
        if forms:
            print(merge_forms(out))
    except MergeError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

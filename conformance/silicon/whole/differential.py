"""Compares random programs on the machine with an H200: `python -m conformance.silicon.whole.differential --help`.

The machine's hashes go to a folder, 250 programs a file, so that a run can be stopped and resumed, and its findings to
files beside them. `--seconds` stops a run in time; `--carry FILE` writes all into one file, to take it to another host,
and `--take FILE` takes it from there. Compared with the H200's hashes (drawn.npz, of merge.py), it prints how many
programs agree, which do not, and the machine's findings. Of those that do not, it prints which agree once their text is
changed as ptxas 13.0 changed it (as_ptxas.py). `--record FILE` writes that as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from inspect import getfile
from pathlib import Path

import numpy as np

from backends.vm.faults import Fault, UnknownInstructionError
from conformance import ROOT
from conformance.silicon.whole.as_ptxas import explained
from conformance.silicon.whole.drawn import drawn
from conformance.silicon.whole.merge import DRAWN, DrawnAnswers, Hashes
from conformance.silicon.whole.on_device import DRAWN_MODULE, level_of
from conformance.silicon.whole.on_machine import answer, schedule_of

RECORD = ROOT / "results" / "records" / "h200-random-programs.json"


def machine_hash(number: int) -> tuple[int, str]:
    """Returns the hash of program `number`'s output, and the machine's first finding, "" for none."""
    try:
        left = answer(drawn(number), schedule_of(number))
    except (Fault, UnknownInstructionError) as error:
        return 0, str(error)
    return left.hash, left.found[0] if left.found else ""


def _some(folder: Path, first: int, until: float | None) -> None:
    """Writes the files of the programs from `first` on, unless they exist or the time is `until`."""
    file = folder / f"{first}.npy"
    if file.exists() or (until is not None and time.time() > until):
        return
    answers = [machine_hash(number) for number in range(first, first + DRAWN_MODULE)]
    found = [f"program {first + i}: {said}" for i, (_, said) in enumerate(answers) if said]
    if found:
        (folder / f"{first}.txt").write_text("\n".join(found) + "\n")
    np.save(folder / f"part-{first}.npy", np.array([one for one, _ in answers], np.uint64))
    (folder / f"part-{first}.npy").replace(file)


def run(folder: Path, first: int, count: int, jobs: int, seconds: float | None = None) -> None:
    """Writes the machine's hashes of `count` programs from `first` on to `folder`. After `seconds` begins no more.

    ValueError if the folder has hashes of another version of the machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    version = folder / "version"
    if not version.exists():
        version.write_text(machine_version())
    elif version.read_text() != machine_version():
        raise ValueError(f"{folder} has hashes of another version of the machine; name an empty folder")
    until = None if seconds is None else time.time() + seconds
    with ProcessPoolExecutor(jobs, initializer=os.nice, initargs=(10,)) as pool:
        firsts = range(first, first + count, DRAWN_MODULE)
        for one in [pool.submit(_some, folder, at, until) for at in firsts]:
            one.result()


def findings(folder: Path) -> list[str]:
    """What the machine found in the programs that ran."""
    files = sorted(folder.glob("*.txt"), key=lambda one: int(one.stem))
    return [line for file in files for line in file.read_text().splitlines()]


def carry(folder: Path, file: Path) -> None:
    """Writes the folder's hashes and findings into one file."""
    hashes = {one.stem: np.load(one) for one in folder.glob("[0-9]*.npy")}
    found = {f"found {one.stem}": np.array(one.read_text()) for one in folder.glob("*.txt")}
    version = np.array((folder / "version").read_text())
    np.savez_compressed(file, allow_pickle=False, version=version, **hashes, **found)


def take(folder: Path, file: Path) -> None:
    """Writes the files of the folder that `carry` read."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, held in np.load(file).items():
        if name == "version":
            (folder / name).write_text(str(held))
        elif name.startswith("found "):
            (folder / f"{name.removeprefix('found ')}.txt").write_text(str(held))
        else:
            np.save(folder / f"{name}.npy", held)


def machine_version() -> str:
    """SHA-256 of the sources of backends/vm and of drawn.py."""
    digest = hashlib.sha256()
    for file in [*sorted((ROOT / "backends" / "vm").rglob("*.py")), Path(getfile(drawn))]:
        digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def both(folder: Path, held: DrawnAnswers) -> Iterator[tuple[int, Hashes, Hashes]]:
    """Yields the modules that both have: the first number, the machine's hashes and the H200's."""
    for first, theirs in held.modules.items():
        if (mine := folder / f"{first}.npy").exists():
            yield first, np.load(mine), theirs


@dataclass(frozen=True, slots=True)
class Compared:
    """Random programs on the machine beside an H200: `ran` on both, of which the `lost` hung or failed there.

    `reasons`: for each program that left other bytes, what ptxas did to it, "" if that is not known. `found`: what the
    machine found. `version`: the machine's.
    """

    ran: int
    lost: int
    reasons: Mapping[int, str]
    found: Sequence[str]
    version: str

    @property
    def agree(self) -> int:
        """The number of programs that left the same bytes."""
        return self.ran - self.lost - len(self.reasons)

    def unknown(self) -> list[int]:
        """The programs that left other bytes for no known reason."""
        return [number for number, reason in self.reasons.items() if not reason]

    def lines(self) -> list[str]:
        """What to print."""
        differ = ", ".join(f"{number} {level_of(number)}" for number in self.unknown()) or "none"
        return [
            *self.found,
            f"{self.ran} programs ran on both; {self.agree} agree; {self.lost} hung or failed on the H200;",
            *(
                f"{count} agree once changed as ptxas changed them: {reason};"
                for reason, count in Counter(self.reasons.values()).most_common()
                if reason
            ),
            f"{len(self.unknown())} differ: {differ}",
        ]

    def record(self) -> dict[str, object]:
        """The content of results/records/h200-random-programs.json."""
        reasons = Counter(reason for reason in self.reasons.values() if reason)
        with_wgmma = Counter(reason for number, reason in self.reasons.items() if "wgmma" in drawn(number).text)
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self.version,
            "ran_on_both": self.ran,
            "agree": self.agree,
            "hung_or_failed_on_the_h200": self.lost,
            "agree_once_changed_as_ptxas_changed_them": {
                reason: {"all": count, "with_wgmma": with_wgmma[reason]} for reason, count in reasons.most_common()
            },
            "differ": self.unknown(),
            "findings": list(self.found),
        }


def compared(folder: Path, jobs: int) -> Compared:
    """Compares the hashes in `folder` with the H200's, and explains those that differ."""
    held = DrawnAnswers.read(DRAWN)
    total, unlike = 0, dict[int, int]()
    for first, mine, theirs in both(folder, held):
        total += len(mine)
        unlike |= {first + int(at): int(theirs[at]) for at in np.flatnonzero(mine != theirs)}
    ran = sorted(set(unlike) - held.failed)
    with ProcessPoolExecutor(jobs, initializer=os.nice, initargs=(10,)) as pool:
        reasons = dict(zip(ran, pool.map(explained, ran, map(unlike.__getitem__, ran), chunksize=8), strict=True))
    return Compared(total, len(unlike) - len(ran), reasons, findings(folder), (folder / "version").read_text())


def main() -> None:
    """Runs the command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the machine's hashes are, or go")
    parser.add_argument("--run", nargs=2, type=int, metavar=("FIRST", "COUNT"), help="multiples of 250")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="begin no module of 250 programs later")
    parser.add_argument("--take", type=Path, metavar="FILE", help="first, put the hashes of FILE into the folder")
    parser.add_argument("--carry", type=Path, metavar="FILE", help="write the folder's hashes to FILE, and end")
    parser.add_argument("--record", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.take:
        take(asked.folder, asked.take)
    if asked.run:
        run(asked.folder, asked.run[0], asked.run[1], asked.jobs, asked.seconds)
    if asked.carry:
        carry(asked.folder, asked.carry)
        print(f"{len(list(asked.folder.glob('[0-9]*.npy')))} modules of {DRAWN_MODULE} programs: {asked.carry}")
        return
    made = compared(asked.folder, asked.jobs)
    if asked.record:
        asked.record.write_text(json.dumps(made.record(), indent=1) + "\n")
    print("\n".join(made.lines()))


if __name__ == "__main__":
    main()

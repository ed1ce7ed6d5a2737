"""Compares random programs on the machine with an H200: `python -m conformance.silicon.whole.differential --help`.

The machine's hashes go to a folder, 250 programs a file, so that a run can be stopped and resumed. Compared with the
H200's hashes (drawn.npz, of merge.py), it prints how many programs agree, which do not, and the machine's findings. Of
those that do not, it prints which agree once their text is changed as ptxas 13.0 changed it (as_ptxas.py).
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from backends.vm.faults import Fault, UnknownInstructionError
from conformance.silicon.whole.as_ptxas import explained
from conformance.silicon.whole.drawn import drawn
from conformance.silicon.whole.merge import DRAWN, DrawnAnswers, Hashes
from conformance.silicon.whole.on_device import DRAWN_MODULE, level_of
from conformance.silicon.whole.on_machine import answer, schedule_of


def machine_hash(number: int) -> tuple[int, str]:
    """Returns the hash of program `number`'s output, and the machine's first finding, "" for none."""
    try:
        left = answer(drawn(number), schedule_of(number))
    except (Fault, UnknownInstructionError) as error:
        return 0, str(error)
    return left.hash, left.found[0] if left.found else ""


def _some(folder: Path, first: int) -> list[str]:
    """Writes the file of the programs from `first` on, unless it exists; returns findings."""
    file = folder / f"{first}.npy"
    if file.exists():
        return []
    answers = [machine_hash(number) for number in range(first, first + DRAWN_MODULE)]
    np.save(folder / f"part-{first}.npy", np.array([one for one, _ in answers], np.uint64))
    (folder / f"part-{first}.npy").replace(file)
    return [f"program {first + i}: {said}" for i, (_, said) in enumerate(answers) if said]


def run(folder: Path, first: int, count: int, jobs: int) -> list[str]:
    """Writes the machine's hashes of `count` programs from `first` on to `folder`; returns its findings."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[str] = []
    with ProcessPoolExecutor(jobs, initializer=os.nice, initargs=(10,)) as pool:
        for one in as_completed([pool.submit(_some, folder, at) for at in range(first, first + count, DRAWN_MODULE)]):
            found += one.result()
    return found


def both(folder: Path, held: DrawnAnswers) -> Iterator[tuple[int, Hashes, Hashes]]:
    """Yields the modules that both have: the first number, the machine's hashes and the H200's."""
    for first, theirs in held.modules.items():
        if (mine := folder / f"{first}.npy").exists():
            yield first, np.load(mine), theirs


def main() -> None:
    """Runs the command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the machine's hashes are, or go")
    parser.add_argument("--run", nargs=2, type=int, metavar=("FIRST", "COUNT"), help="multiples of 250")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    if asked.run:
        for said in run(asked.folder, asked.run[0], asked.run[1], asked.jobs):
            print(said, flush=True)
    held = DrawnAnswers.read(DRAWN)
    total, unlike = 0, dict[int, int]()
    for first, mine, theirs in both(asked.folder, held):
        total += len(mine)
        unlike |= {first + int(at): int(theirs[at]) for at in np.flatnonzero(mine != theirs)}
    ran = sorted(set(unlike) - held.failed)
    with ProcessPoolExecutor(asked.jobs, initializer=os.nice, initargs=(10,)) as pool:
        reasons = dict(zip(ran, pool.map(explained, ran, map(unlike.__getitem__, ran), chunksize=8), strict=True))
    lost = len(unlike) - len(ran)
    print(f"{total} programs ran on both; {total - len(unlike)} agree; {lost} hung or failed on the H200;")
    for reason, count in Counter(reasons.values()).most_common():
        if reason:
            print(f"{count} agree once changed as ptxas changed them: {reason};")
    unknown = [number for number in ran if not reasons[number]]
    print(f"{len(unknown)} differ: {', '.join(f'{number} {level_of(number)}' for number in unknown) or 'none'}")


if __name__ == "__main__":
    main()

"""Programs of all forms that are not lane-wise, and the H200's answers that the machine is held to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from zlib import crc32

import numpy as np
import numpy.typing as npt

from conformance import SILICON
from conformance.silicon.whole import copies, matrices, movement
from conformance.silicon.whole.on_machine import ROW, answer, rows_that_differ
from conformance.silicon.whole.programs import Whole

FILE = SILICON / "whole" / "answers.npz"


def programs() -> Iterator[Whole]:
    """Yields all programs, each with a unique name."""
    yield from matrices.mma_programs()
    yield from matrices.wmma_programs()
    yield from matrices.wgmma_programs()
    yield from movement.barrier_programs()
    yield from movement.control_programs()
    yield from movement.memory_programs()
    yield from movement.atomic_programs()
    yield from movement.barrier_histories()
    yield from copies.copy_programs()
    yield from copies.bulk_programs()
    yield from copies.issued_programs()
    yield from copies.cluster_programs()
    yield from copies.tensor_programs()


def identity(program: Whole) -> int:
    """Checksum of the program's text without white space, its launch and its input: an answer belongs to that program
    alone."""
    text = " ".join(program.text.split())
    return crc32(f"{text} {program.threads} {program.grid} {program.given} {program.tensor_map}".encode())


@cache
def answers() -> Mapping[str, tuple[int, npt.NDArray[np.uint32]]]:
    """By entry: the identity of the program that ran, and the checksums of its output's rows."""
    held = np.load(FILE)
    rows = zip(held["entries"], held["identities"], held["rows"], strict=True)
    return {str(entry): (int(which), row) for entry, which, row in rows}


def answered(program: Whole) -> bool:
    """Whether an H200 has run exactly this program."""
    return FILE.exists() and program.entry in answers() and answers()[program.entry][0] == identity(program)


def difference(program: Whole) -> str | None:
    """A sentence on how the machine differs from the H200; None if it does not."""
    left = answer(program)
    if left.found:
        return f"{program.name}: the machine finds {left.found[0]}"
    wrong = rows_that_differ(left.output, answers()[program.entry][1])
    at = ", ".join(f"{ROW * row} to {ROW * row + ROW - 1}" for row in wrong[:4])
    return f"{program.name}: other bytes than an H200's among {at} of the output" if wrong else None


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        every = list(programs())
        unlike = [said for program in every if (said := difference(program))]
    print("\n".join([*unlike, f"{len(unlike)} of {len(every)} programs differ from an H200"]))

"""Matrices between shared memory and registers: ldmatrix, stmatrix, movmatrix (PTX ISA 9.7.14.5.15 to 17)."""

from __future__ import annotations

import numpy as np

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault
from backends.vm.machine import access
from backends.vm.machine.warp import Warp
from backends.vm.tensor.fragments import MATRIX_ROW_BYTES, Words, load_matrices, store_matrices, transposed_matrix

_COUNT = {"x1": 1, "x2": 2, "x4": 4}
_ROWS = 8


def whole_warp(warp: Warp, what: str) -> None:
    """Fault unless all 32 lanes execute `what` together; a lane that has exited is undefined behaviour too."""
    warp.converged(what)
    if not warp.mask.all():
        lane = int(np.flatnonzero(~warp.mask)[0])
        raise Fault("diverged", f"{what} needs all 32 lanes of the warp, and lane {lane} has exited or never was",
                    lane=lane)  # fmt: skip


def _resolve(space: str, addresses: access.Addresses, what: str) -> tuple[str, access.Addresses]:
    space, addresses = access.resolve(space, addresses)
    if not space.startswith("shared"):
        raise Fault("wrong-space", f"{what} takes addresses in shared memory, these are {space} ones",
                    address=int(addresses[0]))  # fmt: skip
    return space, addresses


@opcode(
    "ldmatrix.sync.aligned.m8n8.<count>{.trans}{.<space>}.b16",
    section="9.7.14.5.15",
    counter="memory",
    count="x1 x2 x4",
    space="shared shared::cta",
)
def ldmatrix(b: Binder) -> Step:
    """Load 8x8 matrices of 16-bit elements whose rows lie at the addresses that the lower lanes give."""
    d, address = b.expect(2)
    count, space, transposed = _COUNT[b.words["count"]], b.words["space"], bool(b.words["trans"])
    rows = [b.destination(item, "u32") for item in b.vector(d, count)]
    addresses_of, what = b.address(address), b.instruction.opcode

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        where, addresses = _resolve(space, addresses_of(warp)[: _ROWS * count], what)
        registers = load_matrices(access.load(warp, where, addresses, MATRIX_ROW_BYTES), transposed=transposed)
        for row, words in zip(rows, registers, strict=True):
            warp.u32[row][...] = words

    return step


@opcode(
    "stmatrix.sync.aligned.m8n8.<count>{.trans}{.<space>}.b16",
    section="9.7.14.5.16",
    counter="memory",
    count="x1 x2 x4",
    space="shared shared::cta",
)
def stmatrix(b: Binder) -> Step:
    """Store 8x8 matrices of 16-bit elements to rows at the addresses that the lower lanes give."""
    address, source = b.expect(2)
    count, space, transposed = _COUNT[b.words["count"]], b.words["space"], bool(b.words["trans"])
    rows = [b.source(item, "u32") for item in b.vector(source, count)]
    addresses_of, what, line = b.address(address), b.instruction.opcode, b.instruction.line

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        where, addresses = _resolve(space, addresses_of(warp)[: _ROWS * count], what)
        registers: Words = np.stack([warp.u32[row] for row in rows])
        access.store(warp, where, addresses, store_matrices(registers, transposed=transposed), line)

    return step


@opcode("movmatrix.sync.aligned.m8n8.trans.b16", section="9.7.14.5.17", counter="move")
def movmatrix(b: Binder) -> Step:
    """Transpose an 8x8 matrix of 16-bit elements across the warp."""
    d, a = b.expect(2)
    rd, ra, what = b.destination(d, "u32"), b.source(a, "u32"), b.instruction.opcode

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        warp.u32[rd][...] = transposed_matrix(warp.u32[ra])

    return step

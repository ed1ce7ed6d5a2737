"""Which register of which thread holds which (M, N) of a fused SwiGLU tile: row M = thread, column N = register.

One tcgen05.ld.32x32b gives thread t lane t of tensor memory, row t of the tile, and column c in register c. A thread
has gates 0 to 7 in registers 0 to 7, their ups in 8 to 15, gates 8 to 15 in 16 to 23, and so on. The test asks the
kernel itself: it zeroes one register of one thread; the activation made from it must become zero.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backends.ptx.sm100_moe.geometry import HALF_N
from conformance.kernels.ptx.test_moe_layer import built, case_of, run
from megamoe.codec.nvfp4 import unpack

LOADED = "tcgen05.wait::ld.sync.aligned;"
AXES = "hidden=128,intermediate=128,num_experts=1,tokens=128,stage=l1"
"""One tile: all 128 rows are tokens', and both halves of its columns, of HALF_N registers each."""


def zeroed(ptx: str, thread: int, register: int) -> str:
    """The kernel with one accumulator register of one thread set to zero, in both halves of the tile."""
    probe = f".reg .pred %probe; setp.eq.u32 %probe, %thread, {thread}; @%probe mov.f32 %acc_{register}, 0f00000000;"
    assert ptx.count(LOADED) == 1, "the epilogue loads its accumulators in one place"
    return ptx.replace(LOADED, f"{LOADED}\n{probe}")


def changed(interleave: int, thread: int, register: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [128, intermediate] without and with the register."""
    case = case_of(f"{AXES},interleave={interleave}")
    program = built(case)
    codes: list[torch.Tensor] = []
    for ptx in (program.ptx, zeroed(program.ptx, thread, register)):
        outputs, sentence = run(case, replace(program, ptx=ptx))
        assert not sentence, sentence
        codes.append(unpack(outputs["a2_codes"]))
    return codes[0], codes[1]


@pytest.mark.parametrize(
    ("interleave", "thread", "register", "activation"),
    [(8, 0, 0, 0), (8, 77, 8, 0), (8, 127, 21, 13), (8, 33, 31, 15), (8, 70, 127, 63), (32, 5, 33, 1), (64, 96, 64, 0)],
)
def test_register_is_column_and_thread_is_row(interleave: int, thread: int, register: int, activation: int) -> None:
    """Register c belongs to activation g * (c // 2 g) + c % g of its half, whether it is the gate's or the up's."""
    assert activation == interleave * (register // (2 * interleave)) + register % interleave, "the table errs"
    before, after = changed(interleave, thread, register)
    others = torch.arange(len(before)) != thread
    assert torch.equal(before[others], after[others]), f"register {register} of thread {thread} reaches another row"
    zeros = [activation + half * HALF_N // 2 for half in range(2)]
    assert (after[thread, zeros] & 7 == 0).all(), f"register {register} is not of activations {zeros}"
    blocks = {zero // 16 for zero in zeros}
    untouched = [column for column in range(before.shape[1]) if column // 16 not in blocks]
    assert torch.equal(before[thread, untouched], after[thread, untouched]), f"register {register} reaches other blocks"
    assert (before[thread, zeros] & 7 != 0).any(), (
        f"row {thread}: activations {zeros} were zero before: nothing was asked"
    )

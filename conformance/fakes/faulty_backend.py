"""A backend for sm_90a whose kernels break the device, one way each, chosen by the seed of the case; even seeds work.

`megamoe run --backend conformance.fakes.faulty_backend:BACKEND --executor gpu` judges its rows as any other's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from megamoe.contract import (
    BufferArg,
    Launch,
    Program,
    PythonProgram,
    Target,
    UnsupportedError,
)
from megamoe.ops import reference

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Case

_KERNEL = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry faulty(.param .u64 o)
{{
.reg .b64 %p, %far;
.reg .b32 %x;
ld.param.u64 %p, [o];
{body}
ret;
}}
"""
FAULTS: Final[Mapping[int, tuple[str, str]]] = {
    1: ("writes far outside", "mov.u64 %far, 0x100000000000; add.u64 %p, %p, %far; st.global.u32 [%p], 1;"),
    3: ("hangs", "mov.u32 %x, 1000;\nAGAIN: nanosleep.u32 %x;\nbra AGAIN;"),
    5: ("traps", "trap;"),
    7: ("stores to an odd address", "add.u64 %p, %p, 1; st.global.u32 [%p], 1;"),
    9: ("asks for more shared memory than there is", ""),
}
TOO_MUCH_SMEM: Final = 300_000


@dataclass(frozen=True)
class Simulated:
    """The op's simulated reference, computed by torch on the device and written into the outputs."""

    case: Case
    tensors: Mapping[str, torch.Tensor]

    def enqueue(self) -> None:
        """One pass of torch operations."""
        room = reference(self.case.op)
        for name, value in room.simulated(self.case, self.tensors).items():
            self.tensors[name].copy_(value)

    def collect(self) -> None:
        """The outputs are written where they belong."""


class FaultyBackend:
    """FAULTS by seed; any other seed computes the right answer."""

    name = "faulty"

    def targets(self, op: str) -> tuple[Target, ...]:
        """FMHA on sm_90a."""
        return ("sm_90a",) if op == "fmha" else ()

    def build(self, case: Case, target: Target) -> Program | PythonProgram:
        """A kernel with the fault of the case's seed, or the reference in torch."""
        if target not in self.targets(case.op):
            raise UnsupportedError(f"{case.id}: faults are planted in fmha on sm_90a only")
        if case.seed not in FAULTS:
            return PythonProgram(target, lambda tensors: Simulated(case, tensors), {})
        what, body = FAULTS[case.seed]
        smem = TOO_MUCH_SMEM if "more shared memory" in what else 0
        launch = Launch("faulty", (1, 1, 1), (32, 1, 1), (BufferArg("o"),), dynamic_smem=smem)
        return Program(target, _KERNEL.format(body=body), (launch,))


BACKEND = FaultyBackend()

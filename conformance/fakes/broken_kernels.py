"""Kernels that break a rule of the machine or the device, and a device that stays broken. Workers find them by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from conformance.fakes.backends import specs
from megamoe.contract import (
    BufferArg,
    DeviceError,
    DeviceLostError,
    Execution,
    Launch,
    Program,
    PythonProgram,
    RunOptions,
    Target,
    UnsupportedError,
)
from megamoe.ops import reference

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Case

WAIT = "tcgen05.wait::st.sync.aligned;"


class BrokenPtx:
    """The raw-PTX backend without its first tcgen05.wait::st."""

    name = "broken"

    def targets(self, op: str) -> tuple[Target, ...]:
        from backends.ptx import BACKEND

        return BACKEND.targets(op)

    def build(self, case: Case, target: Target) -> Program:
        from backends.ptx import BACKEND

        program = BACKEND.build(case, target)
        assert WAIT in program.ptx, "there is no wait to leave out"
        return replace(program, ptx=program.ptx.replace(WAIT, "", 1))


BROKEN_PTX = BrokenPtx()


_KERNEL = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry faulty(.param .u64 o)
{{
.reg .b64 %p, %far;
.reg .b32 %x, %y;
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
    # The VM detects a loop in which no memory changes.
    11: (
        "polls, and counts in memory how often",
        "st.global.u32 [%p], 7;\nst.global.u32 [%p+4], 0;\n"
        "AGAIN: red.relaxed.gpu.global.add.u32 [%p+4], 1;\nld.relaxed.gpu.global.u32 %y, [%p];\nbra AGAIN;",
    ),
    9: ("asks for more shared memory than there is", ""),
}
TOO_MUCH_SMEM: Final = 300_000


@dataclass(frozen=True)
class Simulated:
    """The op's simulated reference, computed by torch on the device and written to the outputs."""

    case: Case
    tensors: Mapping[str, torch.Tensor]

    def enqueue(self) -> None:
        room = reference(self.case.op)
        for name, value in room.simulated(self.case, self.tensors).items():
            self.tensors[name].copy_(value)

    def collect(self) -> None:
        pass


class FaultyBackend:
    """FMHA on sm_90a: the seed picks one of FAULTS; any other seed computes the right answer.

    `megamoe run --backend conformance.fakes.broken_kernels:FAULTY --executor gpu` judges its rows like any other's.
    """

    name = "faulty"

    def targets(self, op: str) -> tuple[Target, ...]:
        return ("sm_90a",) if op == "fmha" else ()

    def build(self, case: Case, target: Target) -> Program | PythonProgram:
        if target not in self.targets(case.op):
            raise UnsupportedError(f"{case.id}: faults are planted in fmha on sm_90a only")
        if case.seed not in FAULTS:
            return PythonProgram(target, lambda tensors: Simulated(case, tensors), {})
        what, body = FAULTS[case.seed]
        smem = TOO_MUCH_SMEM if "more shared memory" in what else 0
        launch = Launch("faulty", (1, 1, 1), (32, 1, 1), (BufferArg("o"),), dynamic_smem=smem)
        return Program(target, _KERNEL.format(body=body), (launch,))


FAULTY = FaultyBackend()


BREAKING_SEEDS = (1, 4)
REFUSED_SEED = 3


class LostDevice:
    """An executor whose device a kernel can break: no later program of the process runs.

    It computes the simulated reference. Seeds 1 and 4 break the device; seed 3 is refused and breaks nothing.
    """

    name = "simulated"
    schedules = ("eager",)

    def unavailable(self, target: Target) -> str | None:
        return None

    def run(self, program: Program, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        """After a fault every call fails, as on a real device."""
        if DeviceLostError.met is not None:
            raise DeviceError("cuLaunchKernelEx returned CUDA_ERROR_ILLEGAL_ADDRESS while launching an innocent kernel")
        case = specs()["fmha"].parse_case(program.ptx)
        if case.seed in BREAKING_SEEDS:
            raise DeviceLostError("cuStreamSynchronize returned CUDA_ERROR_ILLEGAL_ADDRESS while waiting")
        if case.seed == REFUSED_SEED:
            raise DeviceError("cuLaunchKernelEx returned CUDA_ERROR_INVALID_VALUE while launching")
        for name, value in reference("fmha").simulated(case, {name: tensors[name] for name in "qkv"}).items():
            tensors[name].copy_(value)
        return Execution()


@dataclass(frozen=True)
class NamedCase:
    """A backend for FMHA on sm_90a whose program is the id of its case."""

    name: str = "named"

    def targets(self, op: str) -> tuple[Target, ...]:
        return ("sm_90a",) if op == "fmha" else ()

    def build(self, case: Case, target: Target) -> Program:
        return Program(target, case.id, ())


LOST_DEVICE = LostDevice()
NAMED_CASE = NamedCase()

"""An executor with a device that a kernel can break: no later program of the process runs. Workers find it by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megamoe.contract import DeviceError, DeviceLostError, Execution, Program, RunOptions, Target
from megamoe.ops import reference
from megamoe.spec.load import load_specs

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Case

BREAKING_SEEDS = (1, 4)
REFUSED_SEED = 3


class SimulatedDevice:
    """Computes the simulated reference. Seeds 1 and 4 break the device; seed 3 is refused and breaks nothing."""

    name = "simulated"
    schedules = ("eager",)

    def unavailable(self, target: Target) -> str | None:
        """Always available."""
        return None

    def run(self, program: Program, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        """After a fault every call fails, as on a real device."""
        if DeviceLostError.met is not None:
            raise DeviceError("cuLaunchKernelEx returned CUDA_ERROR_ILLEGAL_ADDRESS while launching an innocent kernel")
        case = load_specs()["fmha"].parse_case(program.ptx)
        if case.seed in BREAKING_SEEDS:
            raise DeviceLostError("cuStreamSynchronize returned CUDA_ERROR_ILLEGAL_ADDRESS while waiting")
        if case.seed == REFUSED_SEED:
            raise DeviceError("cuLaunchKernelEx returned CUDA_ERROR_INVALID_VALUE while launching")
        for name, value in reference("fmha").simulated(case, {name: tensors[name] for name in "qkv"}).items():
            tensors[name].copy_(value)
        return Execution()


@dataclass(frozen=True)
class NamedCase:
    """A backend whose program is the id of its case."""

    name: str = "named"

    def targets(self, op: str) -> tuple[Target, ...]:
        """FMHA on sm_90a."""
        return ("sm_90a",) if op == "fmha" else ()

    def build(self, case: Case, target: Target) -> Program:
        """A program without a kernel."""
        return Program(target, case.id, ())


EXECUTOR = SimulatedDevice()
BACKEND = NamedCase()

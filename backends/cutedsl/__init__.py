"""The production backend: kernels in CuTeDSL, compiled without a GPU. CuTeDSL itself is imported only to compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from backends.cutedsl.sm100_fmha_program import fmha_program
from megamoe.backend import HostProgram, Target, UnsupportedError

if TYPE_CHECKING:
    from megamoe.case import Case

KERNELS: dict[tuple[str, Target], Callable[[Case], HostProgram]] = {("fmha", "sm_100a"): fmha_program}


class CutedslBackend:
    """Programs compiled from CuTeDSL."""

    name = "cutedsl"

    def targets(self, op: str) -> tuple[Target, ...]:
        """Targets for which there is a kernel of `op`."""
        return tuple(target for known_op, target in KERNELS if known_op == op)

    def build(self, case: Case, target: Target) -> HostProgram:
        """The program of `case`. Raises UnsupportedError without CuTeDSL, or for an op or target without a kernel."""
        if (case.op, target) not in KERNELS:
            known = ", ".join(f"{op} on {known_target}" for op, known_target in KERNELS)
            raise UnsupportedError(f"{case.id}: the cutedsl backend has no {case.op} for {target}; it has {known}")
        return KERNELS[case.op, target](case)


BACKEND = CutedslBackend()

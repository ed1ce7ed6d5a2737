"""The production backend: kernels in CuTeDSL, compiled without a GPU; CuTeDSL is imported only to compile.

A folder with a program.py holds one kernel. Everything else is shared by kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from backends.cutedsl.sm90_fmha.program import fmha_program as sm90_fmha_program
from backends.cutedsl.sm90_moe.program import moe_program as sm90_moe_program
from backends.cutedsl.sm100_fmha.program import fmha_program
from backends.cutedsl.sm100_moe.program import moe_program
from megamoe.contract import HostProgram, Target, UnsupportedError

if TYPE_CHECKING:
    from megamoe.contract import Case


class CutedslBackend:
    """Programs compiled from CuTeDSL. `cta_group`: CTAs that share an MoE tile on sm_100a, 1 or 2; None: the faster.

    On the command line it is `cutedsl`. `backends.cutedsl:CTA_PAIRS` and `:SINGLE_CTAS` fix `cta_group` for every case.
    """

    def __init__(self, name: str = "cutedsl", cta_group: int | None = None) -> None:
        self.name = name
        self.kernels: dict[tuple[str, Target], Callable[[Case], HostProgram]] = {
            ("fmha", "sm_90a"): lambda case: sm90_fmha_program(case, **_on_few(case, splits=1)),
            ("fmha", "sm_100a"): lambda case: fmha_program(case, **_on_few(case, splits=1)),
            ("nvfp4_moe", "sm_90a"): lambda case: sm90_moe_program(case, **_on_few(case)),
            ("nvfp4_moe", "sm_100a"): lambda case: moe_program(case, cta_group, **_on_few(case)),
        }

    def targets(self, op: str) -> tuple[Target, ...]:
        """The targets that have a kernel of `op`."""
        return tuple(target for known_op, target in self.kernels if known_op == op)

    def build(self, case: Case, target: Target) -> HostProgram:
        """The program of `case`. UnsupportedError without CuTeDSL, or for an op or target that has no kernel."""
        if (case.op, target) not in self.kernels:
            known = ", ".join(f"{op} on {known_target}" for op, known_target in self.kernels)
            raise UnsupportedError(f"{case.id}: the cutedsl backend has no {case.op} for {target}; it has {known}")
        return self.kernels[case.op, target](case)


def _on_few(case: Case, **then: int) -> dict[str, int]:
    """Arguments for a case that limits its SMs (axis `sms`): max_ctas and `then`; {} for any other case.

    Attention then has one split: splits are there to fill idle SMs.
    """
    return {} if case["sms"] is None else {"max_ctas": case.int("sms"), **then}


BACKEND = CutedslBackend()
SINGLE_CTAS = CutedslBackend("cutedsl-single-ctas", 1)
CTA_PAIRS = CutedslBackend("cutedsl-cta-pairs", 2)

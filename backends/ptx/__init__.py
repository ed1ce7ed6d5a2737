"""The raw-PTX backend: kernels written instruction by instruction, in the words of builder.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from backends.ptx.sm90_fmha.program import fmha_program as hopper_fmha_program
from backends.ptx.sm90_moe.launch import moe_program as hopper_moe_program
from backends.ptx.sm100_fmha.kernel import fmha_program
from backends.ptx.sm100_moe.launch import moe_program
from megamoe.contract import Program, Target, UnsupportedError

if TYPE_CHECKING:
    from megamoe.contract import Case


class PtxBackend:
    """Builds programs of hand-written PTX. `part_keys`: keys of attention that a CTA visits, a multiple of 128; None:
    what the rule of split_keys.py says. A record names the backend, so one of another plan has another name."""

    def __init__(self, name: str = "ptx", part_keys: int | None = None) -> None:
        self.name = name
        self.kernels: dict[tuple[str, Target], Callable[[Case], Program]] = {
            ("fmha", "sm_90a"): lambda case: hopper_fmha_program(case, part_keys),
            ("fmha", "sm_100a"): lambda case: fmha_program(case, part_keys),
            ("nvfp4_moe", "sm_90a"): hopper_moe_program,
            ("nvfp4_moe", "sm_100a"): moe_program,
        }

    def targets(self, op: str) -> tuple[Target, ...]:
        """The targets that have a kernel of `op`."""
        return tuple(target for known_op, target in self.kernels if known_op == op)

    def build(self, case: Case, target: Target) -> Program:
        """The program of `case`. Raises UnsupportedError for an op, target or shape without a kernel."""
        if (case.op, target) not in self.kernels:
            known = ", ".join(f"{op} on {known_target}" for op, known_target in self.kernels)
            raise UnsupportedError(f"{case.id}: the ptx backend has no {case.op} for {target}; it has {known}")
        return self.kernels[case.op, target](case)


BACKEND = PtxBackend()

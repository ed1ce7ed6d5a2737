"""The raw-PTX backend: kernels written instruction by instruction with the vocabulary of builder.py.

A kernel is imported only when it is built. This package's assembler runs in a process of its own that needs no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from megamoe.contract import Program, Target, UnsupportedError

if TYPE_CHECKING:
    from megamoe.contract import Case


def _sm90_fmha(case: Case, part_keys: int | None) -> Program:
    from backends.ptx.sm90_fmha.program import fmha_program

    return fmha_program(case, part_keys)


def _sm100_fmha(case: Case, part_keys: int | None) -> Program:
    from backends.ptx.sm100_fmha.kernel import fmha_program

    return fmha_program(case, part_keys)


def _sm90_moe(case: Case, _: int | None) -> Program:
    from backends.ptx.sm90_moe.launch import moe_program

    return moe_program(case)


def _sm100_moe(case: Case, _: int | None) -> Program:
    from backends.ptx.sm100_moe.launch import moe_program

    return moe_program(case)


KERNELS: Final[Mapping[tuple[str, Target], Callable[[Case, int | None], Program]]] = {
    ("fmha", "sm_90a"): _sm90_fmha,
    ("fmha", "sm_100a"): _sm100_fmha,
    ("nvfp4_moe", "sm_90a"): _sm90_moe,
    ("nvfp4_moe", "sm_100a"): _sm100_moe,
}
"""Builders by op and target. They take the case and the number of keys per part."""


class PtxBackend:
    """Builds programs of hand-written PTX. `part_keys` is the number of keys that an attention CTA visits, a multiple
    of 128; with None the rule of split_keys.py decides. A record names the backend, so a different plan needs a
    different name."""

    def __init__(self, name: str = "ptx", part_keys: int | None = None) -> None:
        self.name = name
        self.part_keys = part_keys

    def targets(self, op: str) -> tuple[Target, ...]:
        """The targets that have a kernel of `op`."""
        return tuple(target for known_op, target in KERNELS if known_op == op)

    def build(self, case: Case, target: Target) -> Program:
        """The program of `case`. Raises UnsupportedError for an op, target or shape without a kernel."""
        if (case.op, target) not in KERNELS:
            known = ", ".join(f"{op} on {known_target}" for op, known_target in KERNELS)
            raise UnsupportedError(f"{case.id}: the ptx backend has no {case.op} for {target}; it has {known}")
        return KERNELS[case.op, target](case, self.part_keys)


BACKEND = PtxBackend()

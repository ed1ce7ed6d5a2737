"""Forward attention on sm_100a as a program of the harness: compiled once per head dimension, called with sizes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from backends.cutedsl.attention import PARAMETERS, attention_call
from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.compile.compile import compile_host_function, compiled_kernel
from backends.cutedsl.compile.parameters import fake_values
from backends.cutedsl.device import B200_SM_COUNT
from backends.cutedsl.sm100_fmha.plan import split_count
from megamoe.contract import HostProgram, UnsupportedError

if TYPE_CHECKING:
    from megamoe.contract import Case


def fmha_program(case: Case, splits: int | None = None, max_ctas: int = B200_SM_COUNT) -> HostProgram:
    """The call that performs `case`. `splits` replaces the rule of `split_count`.

    If there are more than `max_ctas` work items, CTAs take several in turn.
    """
    if case["sinks"]:
        raise UnsupportedError(f"{case.id}: the sm_100a kernel of the cutedsl backend has no attention sinks")
    if case["ragged"]:
        raise UnsupportedError(
            f"{case.id}: the sm_100a kernel of the cutedsl backend has neither sequences of their own lengths nor pages"
        )
    splits = splits or split_count(case.int("t"), case.int("s_k"))
    return attention_call(compiled(case.int("hd")), case, splits, max_ctas)


@functools.cache
def compiled(hd: int) -> Artifact:
    """The compiled kernel for one head dimension. UnsupportedError if CuTeDSL is not installed."""

    def build() -> Artifact:
        from backends.cutedsl.sm100_fmha.kernel import Sm100Fmha

        return compile_host_function(Sm100Fmha(hd), target="sm_100a", **fake_values(PARAMETERS, {"hd": hd}, {}))

    return compiled_kernel("sm100_fmha", "sm_100a", {"hd": hd}, build)

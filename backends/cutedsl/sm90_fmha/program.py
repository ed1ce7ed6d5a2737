"""Forward attention on sm_90a as a program of the harness: compiled once per plan, called with sizes."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from backends.cutedsl.attention import attention_call, parameters_of, sizes_of
from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.compile.compile import compile_host_function, compiled_kernel
from backends.cutedsl.compile.parameters import fake_values
from backends.cutedsl.device import H200_SM_COUNT
from backends.cutedsl.sm90_fmha.plan import OneRowPlan, Sm90FmhaPlan, kernel_plan, lone_plan, one_row_plan, split_count
from megamoe.contract import HostProgram

if TYPE_CHECKING:
    from megamoe.contract import Case


def fmha_program(
    case: Case, plan: Sm90FmhaPlan | None = None, splits: int | None = None, max_ctas: int = H200_SM_COUNT
) -> HostProgram:
    """The call that performs `case`. `plan` and `splits` replace the rules of plan.py.

    If there are more than `max_ctas` work items, CTAs take several in turn.
    """
    sizes = sizes_of(case)
    row = one_row_plan(sizes)
    if row and not (plan or splits or case["sinks"] or case["ragged"]):
        return attention_call(compiled_row(row), case, 1, max_ctas)
    lone = lone_plan(sizes)
    if lone and not (plan or splits or case["ragged"]):
        plan, splits = lone, -(-sizes.s_k // lone.tile_n)
    features = {"sinks": bool(case["sinks"]), "ragged": bool(case["ragged"]), "page_size": case.int("page_size")}
    plan = dataclasses.replace(plan or kernel_plan(sizes, features["ragged"]), **features)
    return attention_call(
        compiled(plan), case, splits or split_count(sizes, features["ragged"]), max_ctas, plan.short_parts
    )


@functools.cache
def compiled_row(plan: OneRowPlan) -> Artifact:
    """The compiled kernel of one_row.py. UnsupportedError if CuTeDSL is not installed."""

    def build() -> Artifact:
        from backends.cutedsl.sm90_fmha.one_row import OneRowFmha

        values = fake_values(parameters_of(sinks=False), {"hd": plan.hd}, {})
        return compile_host_function(OneRowFmha(plan), target="sm_90a", **values)

    return compiled_kernel("sm90_fmha", "sm_90a", dataclasses.asdict(plan), build, "sm90_fmha_row")


@functools.cache
def compiled(plan: Sm90FmhaPlan) -> Artifact:
    """The compiled kernel of one plan. UnsupportedError if CuTeDSL is not installed."""

    def build() -> Artifact:
        from backends.cutedsl.sm90_fmha.kernel import Sm90Fmha

        parameters = parameters_of(plan.sinks, plan.ragged, plan.page_size > 0, plan.short_parts)
        return compile_host_function(Sm90Fmha(plan), target="sm_90a", **fake_values(parameters, {"hd": plan.hd}, {}))

    return compiled_kernel("sm90_fmha", "sm_90a", dataclasses.asdict(plan), build)

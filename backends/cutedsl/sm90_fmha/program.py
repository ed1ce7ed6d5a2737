"""Forward attention on sm_90a as a program of the harness: compiled once a plan, called with sizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.compile.artifact_cache import ArtifactKey, cached_artifact, default_folder, imported
from backends.cutedsl.compile.compile import compile_host_function, compiler_version
from backends.cutedsl.compile.parameters import (
    Parameter,
    ScalarParameter,
    StreamParameter,
    TensorParameter,
    call_arguments,
    fake_values,
    workspace_bytes,
)
from backends.cutedsl.sm90_fmha.plan import SM_COUNT, UNBOUNDED, FmhaSizes, Sm90FmhaPlan, kernel_plan, split_count
from megamoe.contract import HostProgram

if TYPE_CHECKING:
    from megamoe.contract import Case

_O_PART, _LSE_PART = TensorParameter("f32", ("part_elements",)), TensorParameter("f32", ("part_rows",), align=4)
_LSE = TensorParameter("f32", ("flat_rows",), align=4)
PARAMETERS: Final[Mapping[str, Parameter]] = {
    "mQ": TensorParameter("bf16", ("kv_batches", "rows", "hd")),
    "mK": TensorParameter("bf16", ("kv_batches", "s_k", "hd")),
    "mV": TensorParameter("bf16", ("kv_batches", "s_k", "hd")),
    "mO": TensorParameter("bf16", ("kv_batches", "rows", "hd")),
    "mLSE": _LSE,
    "mO_part": _O_PART,
    "mLSE_part": _LSE_PART,
    **dict.fromkeys(("t", "left", "right"), ScalarParameter("s32")),
    "scale": ScalarParameter("f32"),
    **dict.fromkeys(("splits", "max_ctas"), ScalarParameter("s32")),
    "stream": StreamParameter(),
}
"""What the host function takes. A tensor's name in the case is its parameter's without the m, in small letters."""


def sizes_of(case: Case) -> FmhaSizes:
    """The sizes of `case` that its plan depends on."""
    return FmhaSizes(
        hd=case.int("hd"),
        t=case.int("t"),
        s_k=case.int("s_k"),
        rows=case.int("heads") // case.int("kv_heads") * case.int("t"),
        kv_batches=case.int("batch") * case.int("kv_heads"),
    )


def fmha_program(
    case: Case, plan: Sm90FmhaPlan | None = None, splits: int | None = None, max_ctas: int = SM_COUNT
) -> HostProgram:
    """The call that performs `case`. `plan` and `splits` replace the rules of plan.py.

    A CTA takes several work items in turn where there are more than `max_ctas` of them.
    """
    sized = sizes_of(case)
    plan = plan or kernel_plan(sized)
    splits = splits or split_count(sized)
    rows, kv_batches, hd = sized.rows, sized.kv_batches, sized.hd
    part_rows = splits * kv_batches * rows if splits > 1 else 1
    sizes = {"kv_batches": kv_batches, "rows": rows, "s_k": sized.s_k, "hd": hd, "flat_rows": kv_batches * rows}
    sizes |= {"part_rows": part_rows, "part_elements": part_rows * hd}
    window, scale = case["window"], case["scale"]
    scalars = {
        "t": sized.t,
        "left": UNBOUNDED if window is None else case.int("window"),
        "right": 0 if case["causal"] else UNBOUNDED,
        "scale": 1.0 / math.sqrt(hd) if scale is None else float(scale),
        "splits": splits,
        "max_ctas": max_ctas,
    }
    workspaces = {"o_part": _O_PART, "lse_part": _LSE_PART} | ({} if case["lse"] else {"lse": _LSE})
    names = {name: name.removeprefix("m").lower() for name in PARAMETERS}
    return compiled(plan).program(
        call_arguments(PARAMETERS, sizes, scalars, names),
        {name: workspace_bytes(tensor, sizes) for name, tensor in workspaces.items()},
    )


@functools.cache
def compiled(plan: Sm90FmhaPlan) -> Artifact:
    """The compiled kernel of one plan, from the user's cache if it is there.

    UnsupportedError if CuTeDSL is not installed.
    """
    key = ArtifactKey(
        name="sm90_fmha",
        sources=imported("sm90_fmha"),
        options={"hd": plan.hd, "share": plan.share},
        target="sm_90a",
        compiler=compiler_version(),
    )
    return cached_artifact(key, lambda: _compile(plan), default_folder(Path.home()))


def _compile(plan: Sm90FmhaPlan) -> Artifact:
    from backends.cutedsl.sm90_fmha.kernel import Sm90Fmha

    return compile_host_function(Sm90Fmha(plan), target="sm_90a", **fake_values(PARAMETERS, {"hd": plan.hd}, {}))

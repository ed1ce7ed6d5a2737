"""Forward attention on sm_90a as a program of the harness: compiled once a plan, called with sizes."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.compile.artifact_cache import ArtifactKey, cached_artifact, default_folder, imported
from backends.cutedsl.compile.compile import compile_host_function, compiler_version
from backends.cutedsl.sm90_fmha.plan import SM_COUNT, UNBOUNDED, FmhaSizes, Sm90FmhaPlan, kernel_plan, split_count
from megamoe.contract import HostArg, HostProgram, ScalarArg, StreamArg, TensorArg

if TYPE_CHECKING:
    from megamoe.contract import Case


def sizes_of(case: Case) -> FmhaSizes:
    """What the plan of `case` depends on."""
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
    """The call that performs `case`. `plan` and `splits` replace what plan.py says of it; a CTA walks over several work
    items when there are more than `max_ctas` of them."""
    sizes = sizes_of(case)
    plan = plan or kernel_plan(sizes)
    splits = splits or split_count(sizes)
    rows, kv_batches = sizes.rows, sizes.kv_batches
    part_rows = splits * kv_batches * rows if splits > 1 else 1
    scratch = {"o_part": part_rows * plan.hd * 4, "lse_part": part_rows * 4}
    if not case["lse"]:
        scratch["lse"] = kv_batches * rows * 4
    window, scale = case["window"], case["scale"]
    arguments: dict[str, HostArg] = {
        "mQ": TensorArg("q", "bf16", (kv_batches, rows, plan.hd)),
        "mK": TensorArg("k", "bf16", (kv_batches, sizes.s_k, plan.hd)),
        "mV": TensorArg("v", "bf16", (kv_batches, sizes.s_k, plan.hd)),
        "mO": TensorArg("o", "bf16", (kv_batches, rows, plan.hd)),
        "mLSE": TensorArg("lse", "f32", (kv_batches * rows,)),
        "mO_part": TensorArg("o_part", "f32", (part_rows * plan.hd,)),
        "mLSE_part": TensorArg("lse_part", "f32", (part_rows,)),
        "t": ScalarArg("s32", sizes.t),
        "left": ScalarArg("s32", UNBOUNDED if window is None else case.int("window")),
        "right": ScalarArg("s32", 0 if case["causal"] else UNBOUNDED),
        "scale": ScalarArg("f32", 1.0 / math.sqrt(plan.hd) if scale is None else float(scale)),
        "splits": ScalarArg("s32", splits),
        "max_ctas": ScalarArg("s32", max_ctas),
        "stream": StreamArg(),
    }
    return compiled(plan).program(arguments, scratch)


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
    from backends.cutedsl.sm90_fmha.signature import fmha_signature

    function, args = fmha_signature(plan)
    return compile_host_function(function, *args, target="sm_90a")

"""Forward attention on sm_100a as a program of the harness: compiled once a head dimension, called with sizes."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.compile.artifact_cache import ArtifactKey, cached_artifact, default_folder, imported
from backends.cutedsl.compile.compile import compile_host_function, compiler_version
from backends.cutedsl.sm100_fmha.plan import SM_COUNT, UNBOUNDED, split_count
from megamoe.contract import HostArg, HostProgram, ScalarArg, StreamArg, TensorArg

if TYPE_CHECKING:
    from megamoe.contract import Case


def fmha_program(case: Case, splits: int | None = None, max_ctas: int = SM_COUNT) -> HostProgram:
    """The call that performs `case`. `splits` replaces the rule of `split_count`; a CTA walks over several work items
    when there are more than `max_ctas` of them."""
    hd, t, s_k = case.int("hd"), case.int("t"), case.int("s_k")
    kv_batches = case.int("batch") * case.int("kv_heads")
    rows = case.int("heads") // case.int("kv_heads") * t
    if splits is None:
        splits = split_count(t, s_k)
    part_rows = splits * kv_batches * rows if splits > 1 else 1
    scratch = {"o_part": part_rows * hd * 4, "lse_part": part_rows * 4}
    if not case["lse"]:
        scratch["lse"] = kv_batches * rows * 4
    window, scale = case["window"], case["scale"]
    arguments: dict[str, HostArg] = {
        "mQ": TensorArg("q", "bf16", (kv_batches, rows, hd)),
        "mK": TensorArg("k", "bf16", (kv_batches, s_k, hd)),
        "mV": TensorArg("v", "bf16", (kv_batches, s_k, hd)),
        "mO": TensorArg("o", "bf16", (kv_batches, rows, hd)),
        "mLSE": TensorArg("lse", "f32", (kv_batches * rows,)),
        "mO_part": TensorArg("o_part", "f32", (part_rows * hd,)),
        "mLSE_part": TensorArg("lse_part", "f32", (part_rows,)),
        "t": ScalarArg("s32", t),
        "left": ScalarArg("s32", UNBOUNDED if window is None else case.int("window")),
        "right": ScalarArg("s32", 0 if case["causal"] else UNBOUNDED),
        "scale": ScalarArg("f32", 1.0 / math.sqrt(hd) if scale is None else float(scale)),
        "splits": ScalarArg("s32", splits),
        "max_ctas": ScalarArg("s32", max_ctas),
        "stream": StreamArg(),
    }
    return compiled(hd).program(arguments, scratch)


@functools.cache
def compiled(hd: int) -> Artifact:
    """The compiled kernel of one head dimension, from the user's cache if it is there.

    UnsupportedError if CuTeDSL is not installed.
    """
    key = ArtifactKey(
        name="sm100_fmha",
        sources=imported("sm100_fmha"),
        options={"hd": hd},
        target="sm_100a",
        compiler=compiler_version(),
    )
    return cached_artifact(key, lambda: _compile(hd), default_folder(Path.home()))


def _compile(hd: int) -> Artifact:
    from backends.cutedsl.sm100_fmha.signature import fmha_signature

    function, args = fmha_signature(hd)
    return compile_host_function(function, *args, target="sm_100a")

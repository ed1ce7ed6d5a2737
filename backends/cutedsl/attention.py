"""What a call of an attention kernel is, whatever the target: its parameters, the sizes that plans depend on, the call.

Imports no CuTeDSL. attention_tiles.py has what the device code shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from backends.cutedsl.compile.parameters import (
    Parameter,
    ScalarParameter,
    StreamParameter,
    TensorParameter,
    call_arguments,
    workspace_bytes,
)

if TYPE_CHECKING:
    from backends.cutedsl.compile.artifact import Artifact
    from megamoe.contract import Case, HostProgram

UNBOUNDED = 1 << 30
"""A window or look-ahead that hides no key: above every admissible s_k, and s_k + UNBOUNDED still fits an int32."""
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
"""What a host function takes. A tensor's name in the case is its parameter's without the m, in small letters.

mQ, mO (batch * kv_heads, heads / kv_heads * t, hd); mK, mV (batch * kv_heads, s_k, hd); mLSE (batch * kv_heads *
heads / kv_heads * t), natural logarithm; mO_part and mLSE_part the workspaces of `splits` partials, unused when
`splits` is 1. `t`: query tokens. A query at p sees keys j with p - left < j <= p + right. At most `max_ctas` CTAs share
the work.
"""


SINK: Final[Mapping[str, Parameter]] = {"mSink": TensorParameter("f32", ("heads",), align=4)}
"""What a host function with sinks takes besides: mSink (heads), natural logarithms."""


def parameters_of(sinks: bool) -> Mapping[str, Parameter]:
    """What a host function takes, with or without sinks."""
    return {**PARAMETERS, **SINK} if sinks else PARAMETERS


@dataclass(frozen=True, slots=True)
class FmhaSizes:
    """The sizes of a case that a plan may depend on; `rows` are the query rows of one (batch, kv head)."""

    hd: int
    t: int
    s_k: int
    rows: int
    kv_batches: int


def sizes_of(case: Case) -> FmhaSizes:
    """The sizes of `case`."""
    return FmhaSizes(
        hd=case.int("hd"),
        t=case.int("t"),
        s_k=case.int("s_k"),
        rows=case.int("heads") // case.int("kv_heads") * case.int("t"),
        kv_batches=case.int("batch") * case.int("kv_heads"),
    )


def attention_call(artifact: Artifact, case: Case, splits: int, max_ctas: int) -> HostProgram:
    """The call of `artifact`, a host function of the parameters of `case`, that performs `case` in `splits` parts.

    Where K and V are one latent tensor the kernel reads it as both. The second read of a tile comes soon after the
    first, so memory is read once and L2 twice.
    """
    sized = sizes_of(case)
    rows, kv_batches, hd = sized.rows, sized.kv_batches, sized.hd
    part_rows = splits * kv_batches * rows if splits > 1 else 1
    sizes = {"kv_batches": kv_batches, "rows": rows, "s_k": sized.s_k, "hd": hd, "flat_rows": kv_batches * rows}
    sizes |= {"part_rows": part_rows, "part_elements": part_rows * hd}
    parameters, values = parameters_of(bool(case["sinks"])), "k" if case["kv"] == "latent" else "v"
    sizes["heads"] = case.int("heads")
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
    names = {name: name.removeprefix("m").lower() for name in parameters} | {"mV": values}
    return artifact.program(
        call_arguments(parameters, sizes, scalars, names),
        {name: workspace_bytes(tensor, sizes) for name, tensor in workspaces.items()},
    )

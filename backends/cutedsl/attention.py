"""The call of an attention kernel on any target: its parameters, the sizes that plans depend on, its arguments.

Imports no CuTeDSL. attention_tiles.py has the shared device code.
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
"""Parameters of a host function. A tensor's name in the case is the parameter's without the m, in lower case.

mQ, mO (batch * kv_heads, heads / kv_heads * t, hd); mK, mV (batch * kv_heads, s_k, hd); mLSE (batch * kv_heads *
heads / kv_heads * t), natural logarithm; mO_part and mLSE_part: workspaces for `splits` partials, unused when
`splits` is 1. `t`: query tokens. A query at p sees keys j with p - left < j <= p + right. At most `max_ctas` CTAs share
the work.
"""


SINK: Final[Mapping[str, Parameter]] = {"mSink": TensorParameter("f32", ("heads",), align=4)}
"""The extra parameter of a host function with sinks: mSink (heads), natural logarithms."""


def _lengths(*dims: str) -> TensorParameter:
    return TensorParameter("s32", dims, align=4)


RAGGED: Final[Mapping[str, Parameter]] = {
    **dict.fromkeys(("mQ", "mO"), TensorParameter("bf16", ("total_q", "heads", "hd"))),
    **dict.fromkeys(("mK", "mV"), TensorParameter("bf16", ("total_k", "kv_heads", "hd"))),
    "s_k": ScalarParameter("s32"),
    "mCu_seqlens_q": _lengths("starts"),
}
"""Parameters that differ for ragged sequences. The tensors hold the tokens of all sequences, `t` and `s_k` are upper
bounds, and sequence b has the queries mCu_seqlens_q[b] to mCu_seqlens_q[b + 1] - 1. mLSE (total_q * heads)."""
STARTS: Final[Mapping[str, Parameter]] = {"mCu_seqlens_k": _lengths("starts")}
PAGES: Final[Mapping[str, Parameter]] = {"mSeqused_k": _lengths("batch"), "mBlock_table": _lengths("batch", "pages")}
"""The keys of ragged sequences: by start offsets (STARTS), or by counts and page tables (PAGES)."""


SHORT_PARTS: Final[Mapping[str, Parameter]] = {"mO_part": TensorParameter("bf16", ("part_elements",))}
"""The parameter that differs when partials of O are rounded to bf16."""


def parameters_of(
    sinks: bool, ragged: bool = False, paged: bool = False, short_parts: bool = False
) -> Mapping[str, Parameter]:
    """The parameters of a host function, with or without sinks, ragged sequences, pages, partials in bf16."""
    parameters = {**PARAMETERS, **SINK} if sinks else PARAMETERS
    parameters = {**parameters, **SHORT_PARTS} if short_parts else parameters
    return {**parameters, **RAGGED, **(PAGES if paged else STARTS)} if ragged else parameters


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


def attention_call(
    artifact: Artifact, case: Case, splits: int, max_ctas: int, short_parts: bool = False
) -> HostProgram:
    """The call of `artifact` that performs `case` with its keys in `splits` parts.

    `artifact` is compiled for the parameters of `case`. If K and V are one latent tensor, the kernel reads it as both.
    The second read of a tile comes soon after the first, so a tile is read once from memory and twice from L2.
    """
    sized = sizes_of(case)
    rows, kv_batches, hd, page = sized.rows, sized.kv_batches, sized.hd, case.int("page_size")
    flat_rows = case.int("total_q") * case.int("heads") if case["ragged"] else kv_batches * rows
    part_rows = splits * flat_rows if splits > 1 else 1
    sizes = {"kv_batches": kv_batches, "rows": rows, "s_k": sized.s_k, "hd": hd, "flat_rows": flat_rows}
    sizes |= {"part_rows": part_rows, "part_elements": part_rows * hd}
    sizes |= {axis: case.int(axis) for axis in ("heads", "kv_heads", "batch", "total_q", "total_k")}
    sizes |= {"starts": case.int("batch") + 1, "pages": -(-sized.s_k // page) if page else 0}
    parameters = parameters_of(bool(case["sinks"]), bool(case["ragged"]), page > 0, short_parts)
    values = "k" if case["kv"] == "latent" else "v"
    window, scale = case["window"], case["scale"]
    scalars = {
        "t": sized.t,
        "s_k": sized.s_k,
        "left": UNBOUNDED if window is None else case.int("window"),
        "right": 0 if case["causal"] else UNBOUNDED,
        "scale": 1.0 / math.sqrt(hd) if scale is None else float(scale),
        "splits": splits,
        "max_ctas": max_ctas,
    }
    o_part = parameters["mO_part"]
    assert isinstance(o_part, TensorParameter)
    workspaces = {"o_part": o_part, "lse_part": _LSE_PART} | ({} if case["lse"] else {"lse": _LSE})
    names = {name: name.removeprefix("m").lower() for name in parameters} | {"mV": values}
    return artifact.program(
        call_arguments(parameters, sizes, scalars, names),
        {name: workspace_bytes(tensor, sizes) for name, tensor in workspaces.items()},
    )

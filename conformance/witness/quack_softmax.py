"""quack's row softmax: one CTA a row block, or a cluster of CTAs that reduce long rows through each other's memory."""

# What is imported here comes with the extra `witness` only.
# pyright: reportMissingImports=false

from __future__ import annotations

import math
from functools import partial

import torch

from backends.cutedsl.compile.compile import compile_host_function
from conformance.witness.quack_gemm import PACKAGE
from conformance.witness.witness import Call, Witness
from megamoe.contract import StreamArg, Target, TensorArg


def _prepare(target: Target, rows: int, columns: int, online: bool) -> Call:
    import cutlass.cute as cute
    from cutlass import BFloat16
    from cutlass.cute.runtime import make_fake_stream
    from quack.compile_utils import make_fake_tensor
    from quack.softmax import Softmax

    batch = cute.sym_int()
    fakes = [make_fake_tensor(BFloat16, (batch, columns), divisibility=8) for _ in range(2)]
    kernel = Softmax(BFloat16, columns, online_softmax=online)
    artifact = compile_host_function(kernel, *fakes, make_fake_stream(), target=target)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()
    tensors = {"x": x, "o": torch.full_like(x, math.nan)}
    given = (TensorArg("x", "bf16", (rows, columns)), TensorArg("o", "bf16", (rows, columns)), StreamArg())
    arguments = dict(zip(artifact.parameters, given, strict=True))
    return Call((artifact.program(arguments),), tensors, {"o": x.double().softmax(-1)})


RAGGED = (
    "Softmax copies the rows that exist to shared memory, then reads its whole tile of rows from there; what it makes "
    "of the others it never stores."
)


def _witness(target: Target, rows: int, columns: int, online: bool, known_fault: str = "") -> Witness:
    said = f"bf16 online_softmax={online}"
    prepare = partial(_prepare, target, rows, columns, online)
    return Witness(PACKAGE, "Softmax", target, said, f"rows={rows} columns={columns}", prepare, known_fault)


WITNESSES = (
    _witness("sm_90a", 36, 1000, True),
    _witness("sm_90a", 37, 1000, True, RAGGED),
    _witness("sm_90a", 3, 32768, False),
    _witness("sm_90a", 2, 65536, True),
    _witness("sm_100a", 3, 32768, True),
)

"""quack's GEMMs for sm_90a and sm_100a, with and without block scales: d[l, m, n] = a[l, m, k] b[l, n, k]^T.

Sizes are dynamic. A persistent grid of two clusters walks over the tiles.
"""

# What is imported here comes with the extra `witness` only.
# pyright: reportMissingImports=false

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from backends.cutedsl.compile.compile import compile_host_function
from conformance.witness.block_scaled import FORMATS, scaled_operand
from conformance.witness.witness import Call, Witness
from megamoe.contract import HostArg, StreamArg, Target, TensorArg

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE = "quack-kernels"
ACTIVE_CLUSTERS = 2
TORCH_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "f32": torch.float32}


@dataclass(frozen=True, slots=True)
class Gemm:
    """One product of operands of `dtype`: bf16, f16, e4m3, or a block-scaled format of FORMATS."""

    target: Target
    dtype: str
    m: int
    n: int
    k: int
    tile: tuple[int, int] = (128, 128)
    cluster: tuple[int, int, int] = (1, 1, 1)
    batch: int = 1
    out: str = "bf16"
    options: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def scaled(self) -> bool:
        """Whether the operands have block scales."""
        return self.dtype in FORMATS


def _kernel(case: Gemm, operand: object) -> Callable[..., object]:
    from cutlass import Float32
    from quack.gemm_default_epi import GemmDefaultSm90, GemmDefaultSm100

    options = dict(case.options)
    if case.target == "sm_100a":
        options = {"use_clc_persistence": False, **options}
    if case.scaled:
        options["sf_vec_size"] = FORMATS[case.dtype].block
    kernel = GemmDefaultSm100 if case.target == "sm_100a" else GemmDefaultSm90
    return kernel(Float32, operand, case.tile, case.cluster, **options)


def _prepare(case: Gemm) -> Call:
    import cutlass
    from cutlass.cute.runtime import make_fake_stream
    from quack.gemm_tvm_ffi_utils import make_fake_gemm_tensors, make_fake_sf_tensor

    from conformance.witness.gemm_host import gemm_of, scaled_gemm_of

    names = {"bf16": "BFloat16", "f16": "Float16", "e4m3": "Float8E4M3FN", "e2m1x2": "Float4E2M1FN", "f32": "Float32",
             "ue8m0": "Float8E8M0FNU"}  # fmt: skip
    held = FORMATS[case.dtype].element if case.scaled else case.dtype
    operand, out = getattr(cutlass, names[held]), getattr(cutlass, names[case.out])
    a, b, d, _, _, _, _, batch = make_fake_gemm_tensors(operand, operand, out, None, "k", "k", "n", None)
    fakes, wrap = [a, b, d], gemm_of
    if case.scaled:
        scale = getattr(cutlass, names[FORMATS[case.dtype].scale])
        fakes, wrap = [*fakes, make_fake_sf_tensor(scale, batch), make_fake_sf_tensor(scale, batch)], scaled_gemm_of
    function = wrap(_kernel(case, operand), ACTIVE_CLUSTERS)
    artifact = compile_host_function(function, *fakes, make_fake_stream(), target=case.target)
    tensors, arguments, expected = _scaled_operands(case) if case.scaled else _operands(case)
    return Call((artifact.program({**arguments, "stream": StreamArg()}),), tensors, {"d": expected})


Operands = tuple[dict[str, torch.Tensor], dict[str, HostArg], torch.Tensor]


def _operands(case: Gemm) -> Operands:
    random = torch.Generator().manual_seed(case.m * 1000 + case.n)
    a, b = (
        torch.randn(case.batch, rows, case.k, generator=random).to(TORCH_TYPES[case.dtype]) for rows in (case.m, case.n)
    )
    tensors = {"a": a, "b": b, "d": _empty(case)}
    dtypes = {"a": case.dtype, "b": case.dtype, "d": case.out}
    arguments: dict[str, HostArg] = {
        name: TensorArg(name, dtypes[name], tuple(one.shape)) for name, one in tensors.items()
    }
    return tensors, arguments, a.double() @ b.double().transpose(1, 2)


def _scaled_operands(case: Gemm) -> Operands:
    random = torch.Generator().manual_seed(case.m * 1000 + case.n)
    a, b = (scaled_operand(FORMATS[case.dtype], case.batch, rows, case.k, random) for rows in (case.m, case.n))
    tensors = {"a": a.codes, "b": b.codes, "d": _empty(case), "sfa": a.scales, "sfb": b.scales}
    arguments: dict[str, HostArg] = {
        "a": a.codes_argument("a"),
        "b": b.codes_argument("b"),
        "d": TensorArg("d", case.out, tuple(tensors["d"].shape)),
        "sfa": a.scales_argument("sfa"),
        "sfb": b.scales_argument("sfb"),
    }
    return tensors, arguments, a.values @ b.values.transpose(1, 2)


def _empty(case: Gemm) -> torch.Tensor:
    return torch.full((case.batch, case.m, case.n), math.nan, dtype=TORCH_TYPES[case.out])


def _cases() -> list[Gemm]:
    blackwell, hopper = partial(Gemm, "sm_100a"), partial(Gemm, "sm_90a")
    return [
        blackwell("bf16", 200, 136, 136),
        blackwell("bf16", 256, 512, 128, tile=(128, 256)),
        blackwell("bf16", 520, 264, 200, tile=(256, 128), cluster=(2, 1, 1)),
        blackwell("bf16", 520, 264, 200, tile=(256, 128), cluster=(2, 1, 1), options={"use_clc_persistence": True}),
        blackwell("bf16", 256, 256, 128, cluster=(2, 2, 1), batch=2, out="f32"),
        blackwell("e4m3", 200, 144, 272),
        blackwell("nvfp4", 256, 256, 512),
        blackwell("nvfp4", 200, 144, 320, tile=(256, 128), cluster=(2, 1, 1)),
        blackwell("mxfp4", 256, 128, 512),
        blackwell("mxfp8", 256, 128, 384),
        blackwell("mxfp8", 200, 144, 320, tile=(256, 128), cluster=(2, 1, 1), batch=2),
        hopper("bf16", 200, 136, 136, tile=(128, 128)),
        hopper("bf16", 256, 512, 128, tile=(128, 256)),
        hopper("bf16", 200, 264, 200, tile=(128, 192), options={"pingpong": False, "is_persistent": False}),
        hopper("bf16", 256, 264, 136, tile=(64, 128), options={"pingpong": True}),
        hopper("bf16", 264, 136, 136, cluster=(2, 1, 1), batch=2, out="f32"),
        hopper("f16", 256, 128, 128, tile=(256, 128), cluster=(1, 2, 1), out="f16"),
        hopper("e4m3", 200, 144, 272),
    ]


def _witness(case: Gemm) -> Witness:
    said = [case.dtype, f"out={case.out}", f"tile={case.tile[0]}x{case.tile[1]}"]
    said += [f"cluster={case.cluster[0]}x{case.cluster[1]}"]
    said += [f"{name}={value}" for name, value in case.options.items()]
    shape = f"batch={case.batch} m={case.m} n={case.n} k={case.k}"
    kernel = "GemmDefaultSm100" if case.target == "sm_100a" else "GemmDefaultSm90"
    return Witness(PACKAGE, kernel, case.target, " ".join(said), shape, partial(_prepare, case))


WITNESSES = tuple(_witness(case) for case in _cases())

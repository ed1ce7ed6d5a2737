"""quack's kernels: GEMMs for sm_90a and sm_100a, with and without block scales, and the row softmax.

A GEMM computes d[l, m, n] = a[l, m, k] b[l, n, k]^T. Sizes are dynamic; a persistent grid of two clusters processes the
tiles. The softmax has one CTA a row block, or a cluster of CTAs that reduce a long row through distributed shared
memory.
"""

# These imports need the extra `witness`.
# pyright: reportMissingImports=false

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import torch

from backends.cutedsl.compile.compile import compile_host_function
from conformance.witness.witness import Call, Witness
from megamoe.contract import HostArg, StreamArg, Target, TensorArg

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE = "quack-kernels"
ACTIVE_CLUSTERS = 2
TORCH_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "f32": torch.float32}


_ATOM_ROWS, _ATOM_BLOCKS = 128, 4
"""A scale-factor atom: 128 rows of 4 blocks in 512 bytes, row r at byte 16 (r mod 32) + 4 (r div 32)."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Dtypes of elements and scales, in TensorArg's names, and how many elements share a scale."""

    element: str
    scale: str
    block: int


FORMATS: Mapping[str, BlockFormat] = {
    "nvfp4": BlockFormat("e2m1x2", "e4m3", 16),
    "mxfp4": BlockFormat("e2m1x2", "ue8m0", 32),
    "mxfp8": BlockFormat("e4m3", "ue8m0", 32),
}


@dataclass(frozen=True, slots=True)
class ScaledOperand:
    """Random codes, their scales in the layout of the tensor cores, and their values.

    `codes`: uint8 [batch, rows, ...]; `scales`: uint8 [batch, row atoms, block atoms, 32, 4, 4]; `values`: float64
    [batch, rows, k].
    """

    format: BlockFormat
    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor

    def codes_argument(self, name: str) -> TensorArg:
        """The codes as an argument of the host function."""
        return TensorArg(name, self.format.element, tuple(self.codes.shape))

    def scales_argument(self, name: str) -> TensorArg:
        """The scales as an argument of the host function."""
        return TensorArg(name, self.format.scale, tuple(self.scales.shape))


def _scaled_operand(form: BlockFormat, batch: int, rows: int, k: int, random: torch.Generator) -> ScaledOperand:
    """Random finite codes [batch, rows, k] and scales; `k` is a multiple of the block. Atoms are padded with zeros."""
    blocks = k // form.block
    if form.scale == "e4m3":
        scale_codes = torch.randint(0x28, 0x48, (batch, rows, blocks), generator=random).numpy().astype(np.uint8)
        scales = scale_codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        scale_codes = torch.randint(124, 130, (batch, rows, blocks), generator=random).numpy().astype(np.uint8)
        scales = scale_codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    if form.element == "e4m3":
        codes = torch.randn(batch, rows, k, generator=random).to(torch.float8_e4m3fn)
        values, stored = codes.double().numpy(), codes.view(torch.uint8)
    else:
        nibbles = torch.randint(0, 16, (batch, rows, k), generator=random).numpy().astype(np.uint8)
        values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        stored = torch.from_numpy(nibbles[..., 0::2] | nibbles[..., 1::2] << 4)
    return ScaledOperand(
        form, stored, torch.from_numpy(_atoms(scale_codes)), torch.from_numpy(values * np.repeat(scales, form.block, 2))
    )


def _atoms(codes: np.ndarray) -> np.ndarray:
    batch, rows, blocks = codes.shape
    row_atoms, block_atoms = -(-rows // _ATOM_ROWS), -(-blocks // _ATOM_BLOCKS)
    padded = np.zeros((batch, row_atoms * _ATOM_ROWS, block_atoms * _ATOM_BLOCKS), np.uint8)
    padded[:, :rows, :blocks] = codes
    split = padded.reshape(batch, row_atoms, 4, 32, block_atoms, 4)
    return np.ascontiguousarray(split.transpose(0, 1, 4, 3, 2, 5))


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

    from conformance.witness.host_functions import gemm_of, scaled_gemm_of

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
    a, b = (_scaled_operand(FORMATS[case.dtype], case.batch, rows, case.k, random) for rows in (case.m, case.n))
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


def _prepare_softmax(target: Target, rows: int, columns: int, online: bool) -> Call:
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


def _softmax_witness(target: Target, rows: int, columns: int, online: bool) -> Witness:
    said = f"bf16 online_softmax={online}"
    prepare = partial(_prepare_softmax, target, rows, columns, online)
    return Witness(PACKAGE, "Softmax", target, said, f"rows={rows} columns={columns}", prepare)


WITNESSES = (
    *(_witness(case) for case in _cases()),
    _softmax_witness("sm_90a", 36, 1000, True),
    _softmax_witness("sm_90a", 37, 1000, True),
    _softmax_witness("sm_90a", 3, 32768, False),
    _softmax_witness("sm_90a", 2, 65536, True),
    _softmax_witness("sm_100a", 3, 32768, True),
)

"""Cases of the official tutorials of Triton and Gluon, at small sizes: rings wrap, and each CTA has two tiles.

Most tutorials test themselves; tutorials that only print have drivers here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.testing import assert_close

from conformance.witness.public import Checkout, Named, PublicCase
from megamoe.contract import Target

_COMMIT = "9d9a2d7ac0b8b22d1888cb95056c94a64a4beed4"
TRITON = Checkout("triton-lang/triton", _COMMIT, "triton")
GLUON = Checkout("triton-lang/triton", _COMMIT, "triton", "3.8.0")
"""Gluon has no stable interface yet: a commit's tutorials work with one release."""
_OF_NO_RELEASE: Mapping[str, str] = dict.fromkeys(
    ("test_tma_tcgen05", "test_matmul_multicta"),
    "it calls tcgen05_mma_barrier_count with two arguments, and every release has it with three or not at all",
)
"""Tests that no release of Triton compiles at this commit."""
Driver = Callable[..., None]
Targets = tuple[Target, ...]
_TRITON, _GLUON = "python/tutorials", "python/tutorials/gluon"
_BOTH: Targets = ("sm_90a", "sm_100a")
_HOPPER: Targets = ("sm_90a",)
_BLACKWELL: Targets = ("sm_100a",)


# Triton: what its scripts show at the end, with a reference.


def _vector_add(tutorial: Any, size: int) -> None:
    x, y = torch.rand(size), torch.rand(size)
    assert_close(tutorial.add(x, y), x + y)


def _softmax(tutorial: Any, rows: int, columns: int) -> None:
    x = torch.randn(rows, columns)
    assert_close(tutorial.softmax(x), torch.softmax(x, 1))


def _matmul(tutorial: Any, m: int, n: int, k: int, activation: str = "", fp8: bool = False) -> None:
    a, b = (torch.rand(shape).half() - 0.5 for shape in ((m, k), (k, n)))
    if fp8:
        a, b = a.to(torch.float8_e5m2), b.T.to(torch.float8_e5m2).T
    expected = a.float() @ b.float()
    if activation:
        expected = torch.nn.functional.leaky_relu(expected)
    assert_close(tutorial.matmul(a, b, activation=activation).float(), expected, atol=1e-2, rtol=1e-2)


def _dropout(tutorial: Any, size: int) -> None:
    x, kept = torch.randn(size), (torch.rand(size) > 0.5).to(torch.int32)
    assert_close(tutorial.dropout(x, x_keep=kept, p=0.5), x * kept / 0.5)
    once, again, other = (tutorial.seeded_dropout(x, p=0.5, seed=seed) for seed in (123, 123, 512))
    assert torch.equal(once, again), "one seed gives two masks"
    assert not torch.equal(once, other), "two seeds give one mask"
    assert_close(once, torch.where(once != 0, x / 0.5, 0.0))


def _asin(tutorial: Any, size: int) -> None:
    x, out = torch.rand(size), torch.zeros(size)
    tutorial.asin_kernel[(-(-size // 1024),)](x, out, size, BLOCK_SIZE=1024)
    assert_close(out, torch.asin(x))


def _group_gemm(tutorial: Any, function: str, sizes: tuple[int, ...]) -> None:
    group_a = [torch.rand(size, size).half() for size in sizes]
    group_b = [torch.rand(size, size).half() for size in sizes]
    given = [b.T.contiguous() for b in group_b] if "tma" in function else group_b
    for out, a, b in zip(getattr(tutorial, function)(group_a, given), group_a, group_b, strict=True):
        assert_close(out, a @ b, atol=1e-2, rtol=1e-2)


def _persistent(tutorial: Any, function: str, m: int, n: int, k: int, dtype: torch.dtype, **options: object) -> None:
    a, b = torch.randn(m, k).half().to(dtype), torch.randn(k, n).half().to(dtype)
    # The output has the dtype of the operands, and an e4m3 is 3 bits wide.
    expected, rtol = (a.float() @ b.float()).to(dtype).float(), 2e-2 if dtype == torch.float16 else 0.13
    # Functions with descriptors take B transposed, as in the tutorial's validate.
    out = getattr(tutorial, function)(
        a, b if function in ("matmul", "matmul_persistent") else b.T.contiguous(), **options
    )
    assert_close(out.float(), expected, atol=0.5, rtol=rtol)


def _block_scaled(tutorial: Any, m: int, n: int, k: int, block_scale_type: str) -> None:
    tutorial.validate_block_scaled(m, n, k, block_scale_type=block_scale_type)


def _in_context(tutorial: Any, size: int) -> None:
    tutorial.validate(size)


def _script(file: str, targets: Targets, driver: Driver, /, **arguments: Any) -> Iterator[PublicCase]:
    function = arguments.get("function") or driver.__name__.strip("_")
    for target in targets:
        yield PublicCase("Triton tutorials", TRITON, f"{_TRITON}/{file}", target, function, arguments, driver, True)


def _test(file: str, targets: Targets, function: str, /, **arguments: Any) -> Iterator[PublicCase]:
    for target in targets:
        yield PublicCase("Triton tutorials", TRITON, f"{_TRITON}/{file}", target, function, arguments, script=True)


def _gathered(tutorial: Any, m: int, n: int, k: int, block_k: int, num_buffers: int) -> None:
    # The tutorial's own test does not allow for two roundings to bfloat16.
    rows, places = torch.randperm(m).to(torch.int32), torch.randperm(m).to(torch.int32)
    x, w = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    out = tutorial.matmul_fused_gather_scatter(x, rows, w, places, 128, 128, block_k, num_buffers=num_buffers)
    expected = torch.empty_like(out)
    expected[places] = x[rows] @ w
    assert_close(out, expected)


def _gluon(
    file: str, targets: Targets, function: str, driver: Driver | None = None, /, **arguments: Any
) -> Iterator[PublicCase]:
    for target in targets:
        path, skipped = f"{_GLUON}/{file}", _OF_NO_RELEASE.get(function, "")
        yield PublicCase("Gluon tutorials", GLUON, path, target, function, arguments, driver, True, skipped)


def _triton() -> Iterator[PublicCase]:
    yield from _script("01-vector-add.py", _BOTH, _vector_add, size=5000)
    yield from _script("02-fused-softmax.py", _BOTH, _softmax, rows=37, columns=781)
    for shape in ({"m": 256, "n": 200, "k": 192}, {"m": 130, "n": 128, "k": 256, "activation": "leaky_relu"}):
        yield from _script("03-matrix-multiplication.py", _BOTH, _matmul, **shape)
    yield from _script("03-matrix-multiplication.py", _BOTH, _matmul, m=256, n=256, k=256, fp8=True)
    yield from _script("04-low-memory-dropout.py", _BOTH, _dropout, size=3000)
    yield from _test("05-layer-norm.py", _BOTH, "test_layer_norm", M=70, N=300, dtype=torch.float16)
    for causal in (False, True):
        attention = {"Z": 1, "H": 2, "N_CTX": 256, "HEAD_DIM": 64, "causal": causal}
        # The backward test also checks the forward pass.
        for kind in ({"mode": "bwd", "provider": "triton-fp16"}, {"mode": "fwd", "provider": "triton-fp8"}):
            yield from _test("06-fused-attention.py", _BOTH, "test_op", **attention, **kind, warp_specialize=False)
            yield from _test("06-fused-attention.py", _BLACKWELL, "test_op", **attention, **kind, warp_specialize=True)
    yield from _script("07-extern-functions.py", _BOTH, _asin, size=3000)
    yield from _script("08-grouped-gemm.py", _BOTH, _group_gemm, function="group_gemm_fn", sizes=(256, 128, 128))
    yield from _script("08-grouped-gemm.py", _BOTH, _group_gemm, function="group_gemm_tma_fn", sizes=(256, 128, 128))
    shape = {"m": 512, "n": 512, "k": 256}
    for dtype in (torch.float16, torch.float8_e4m3fn):
        for function in ("matmul", "matmul_persistent"):
            yield from _script("09-persistent-matmul.py", _BOTH, _persistent, function=function, **shape, dtype=dtype)
        for function in ("matmul_tma", "matmul_tma_persistent", "matmul_descriptor_persistent"):
            given = {"function": function, **shape, "dtype": dtype}
            yield from _script("09-persistent-matmul.py", _BOTH, _persistent, **given, warp_specialize=False)
            yield from _script("09-persistent-matmul.py", _BLACKWELL, _persistent, **given, warp_specialize=True)
    # The tutorial itself fails for its other kinds, "mxfp4" and "mixed": they have no operands for cuBLAS.
    for kind in ("mxfp8", "nvfp4"):
        yield from _script(
            "10-block-scaled-matmul.py", _BLACKWELL, _block_scaled, m=256, n=256, k=512, block_scale_type=kind
        )
    yield from _script("11-programmatic-dependent-launch.py", _BOTH, _in_context, size=5000)


def _of_gluon() -> Iterator[PublicCase]:
    yield from _gluon("01-intro.py", _BOTH, "test_copy_scalar")
    yield from _gluon("01-intro.py", _BOTH, "test_memcpy", XBLOCK=64, xnumel=200)
    yield from _gluon("02-layouts.py", _BOTH, "test_memcpy_1d", XBLOCK=128, xnumel=1000, num_warps=4)
    for transposed in (False, True):
        sizes = {"XBLOCK": 32, "YBLOCK": 64, "xnumel": 50, "ynumel": 150}
        yield from _gluon("02-layouts.py", _BOTH, "test_memcpy_2d", **sizes, transposed=transposed, num_warps=4)
        directions = {"transpose_in": transposed, "transpose_out": not transposed}
        yield from _gluon("02-layouts.py", _BOTH, "test_memcpy_2d_inout", xnumel=150, ynumel=140, **directions)
    yield from _gluon("03-async-copy.py", _BOTH, "test_memcpy_1d_cpasync", xnumel=1000, XBLOCK=256)
    sizes = {"xnumel": 70, "ynumel": 300, "XBLOCK": 32, "YBLOCK": 32}
    yield from _gluon("03-async-copy.py", _BOTH, "test_elementwise_add", **sizes)
    yield from _gluon("03-async-copy.py", _BOTH, "test_elementwise_add_cpasync", **sizes)
    sizes = {"xnumel": 70, "ynumel": 600, "XBLOCK": 32, "YBLOCK": 64}
    for num_buffers in (1, 2, 3):
        yield from _gluon("03-async-copy.py", _BOTH, "test_elementwise_add_pipelined", **sizes, num_buffers=num_buffers)
        yield from _gluon("04-tma.py", _BOTH, "test_elementwise_add_pipelined", **sizes, num_buffers=num_buffers)
    yield from _gluon("04-tma.py", _BOTH, "test_memcpy_1d_tma", XBLOCK=64, xnumel=500)
    for num_warps in (4, 8):
        for register in (False, True):
            small = {"M": 64, "N": 128, "K": 64, "LHS_IN_REG": register, "INSTR_SHAPE_N": 64, "num_warps": num_warps}
            yield from _gluon("05-wgmma.py", _HOPPER, "test_small_mma", **small)
            small = {"M": 128, "N": 64, "K": 64, "LHS_IN_TMEM": register, "USE_COMMIT": register}
            yield from _gluon("06-tcgen05.py", _BLACKWELL, "test_small_mma", **small, num_warps=num_warps)
    yield from _gluon("06-tcgen05.py", _BLACKWELL, "test_tmem_example_kernel", M=128, N=64, num_warps=4)
    tiles = {"M": 208, "N": 416, "K": 304, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4}
    for file, targets in (("05-wgmma.py", _HOPPER), ("06-tcgen05.py", _BLACKWELL)):
        for transposed in (False, True):
            yield from _gluon(file, targets, "test_blocked_matmul", **tiles, TRANSPOSE_B=transposed)
        yield from _gluon(file, targets, "test_blocked_matmul_pipelined", **tiles)
    tiles = {
        "M": 416,
        "N": 400,
        "K": 304,
        "BLOCK_M": 128,
        "BLOCK_N": 128,
        "BLOCK_K": 64,
        "num_buffers": 3,
        "num_warps": 4,
    }
    yield from _gluon("07-persistence.py", _BOTH, "test_pipelined_matmul", **tiles)
    scheduler = {"SchedulerImpl": Named("schedulers.0")}
    yield from _gluon("07-persistence.py", _BOTH, "test_persistent_matmul", **tiles, **scheduler)
    grouped = {"SchedulerImpl": Named("schedulers.1")}
    yield from _gluon("07-persistence.py", _BOTH, "test_persistent_matmul", **tiles, **grouped)
    yield from _gluon("07-persistence.py", _BOTH, "test_persistent_matmul_pipelined", **tiles, **scheduler)
    for buffers in (1, 2):
        sizes = {"xnumel": 70, "ynumel": 600, "XBLOCK": 32, "YBLOCK": 64, "num_warps": 4}
        both = {"num_load_buffers": buffers, "num_store_buffers": buffers}
        yield from _gluon("08-warp-specialization.py", _BOTH, "test_elementwise_add_warp_specialized", **sizes, **both)
    for num_buffers in (2, 3):
        given = {**tiles, "num_buffers": num_buffers, "SUBTILE_FACTOR": 2, "SchedulerImpl": Named("t7.schedulers.1")}
        yield from _gluon("08-warp-specialization.py", _BLACKWELL, "test_matmul_warp_specialized", **given)


def _of_blackwell() -> Iterator[PublicCase]:
    for dtype in (torch.bfloat16, torch.float32):
        for y_offset in (-16, 48, 200):
            sizes = {"BLOCK_X": 32, "BLOCK_Y": 64, "dtype": dtype, "X_MAX": 128, "Y_MAX": 256, "fresh_knobs": None}
            yield from _gluon("09-tma-gather-scatter.py", _BLACKWELL, "test_async_gather", **sizes, y_offset=y_offset)
            if y_offset > 0:
                yield from _gluon(
                    "09-tma-gather-scatter.py", _BLACKWELL, "test_async_scatter", **sizes, y_offset=y_offset
                )
    for k, stages in ((128, 2), (64, 3)):
        given = {"m": 256, "n": 256, "k": 512, "block_k": k, "num_buffers": stages}
        yield from _gluon("09-tma-gather-scatter.py", _BLACKWELL, "matmul_fused_gather_scatter", _gathered, **given)
    for m, n, block, swizzle in ((128, 64, 64, 128), (128, 32, 32, 64), (128, 16, 16, 32), (256, 64, 64, 64)):
        copy = {"M": m, "N": n, "TMEM_BLOCK_N": block, "dtype": torch.float32, "swizzle": swizzle}
        yield from _gluon("10-tcgen05-copy.py", _BLACKWELL, "test_tcgen05_copy_nvmma_shared", **copy)
    tiles = {"M": 256, "N": 256, "K": 512, "BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64, "num_buffers": 3}
    yield from _gluon("10-tcgen05-copy.py", _BLACKWELL, "test_matmul_accumulate", **tiles, dtype=torch.float16)
    for formats in (("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp4"), ("nvfp4", "nvfp4")):
        named = dict(zip(("a_format", "b_format"), formats, strict=True))
        for function in (
            "simple_mma_scaled",
            "mma_scaled_contig",
            "mma_scaled_packed_block",
            "mma_scaled_tcgen05_copy",
        ):
            tiles = {"M": 256, "N": 128, "K": 512, **named, "BLOCK_N": 128, "BLOCK_K": 256}
            yield from _gluon("11-tcgen05-mma-scaled.py", _BLACKWELL, f"test_{function}", **tiles)
        for kernel in ("pipelined", "warp_specialized"):
            tiles = {"M": 256, "N": 512, "K": 1152, **named, "impl_kernel": Named(f"mma_scaled_{kernel}_kernel")}
            yield from _gluon("11-tcgen05-mma-scaled.py", _BLACKWELL, "test_mma_scaled_pipelined", **tiles)
    for use_clc in (True, False):
        yield from _gluon("12-cluster-launch-control.py", _BLACKWELL, "test_op", M=500, N=400, K=320, use_clc=use_clc)
    for form in ("simple", "padded", "offset", "multi_batch", "multi_batch_padded"):
        yield from _gluon("13-conv-im2col.py", _BOTH, f"test_tma_im2col_{form}")
    for r, stride, padding in ((3, 1, 1), (3, 2, 1), (1, 1, 0)):
        shape = {"N": 2, "H": 16, "W": 16, "Ci": 64, "Co": 64, "R": r, "S": r, "stride": stride, "padding": padding}
        yield from _gluon("13-conv-im2col.py", _BOTH, "test_conv2d_tma_im2col", **shape)
    for m, n in ((16, 256), (4, 2**15)):
        yield from _gluon("14-multicta.py", _BOTH, "test_multicta_softmax_f32", M=m, N=n)
    yield from _gluon("14-multicta.py", _BLACKWELL, "test_two_cta_tcgen05")
    yield from _gluon("14-multicta.py", _BOTH, "test_tma_multicast_copy")
    yield from _gluon("14-multicta.py", _BLACKWELL, "test_tma_tcgen05")
    yield from _gluon("14-multicta.py", _BLACKWELL, "test_matmul_multicta")


CASES = (*_triton(), *_of_gluon(), *_of_blackwell())

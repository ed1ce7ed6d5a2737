"""Cases of operator libraries written in Triton: Liger-Kernel, and flash-linear-attention with its own tests.

An operator of Liger is compared with PyTorch's, forward and backward: each driver draws the operands and provides the
reference. Rows are longer than a block of the kernel, and there are more rows than SMs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.testing import assert_close

from conformance.witness.public import Checkout, PublicCase
from megamoe.contract import Target

LIGER = Checkout("linkedin/Liger-Kernel", "ead96b618e5c67bddc6a6e9bcb99bfe6b5ab661c", "triton", root="src")
FLA = Checkout("fla-org/flash-linear-attention", "bc3b101dcb713ddc5bd8924b66754eb68b5ccf89", "triton", "3.8.0", ".")
"""Triton 3.9 refuses an autotuned kernel of this commit: its key names no argument of the kernel."""
_TARGETS: tuple[Target, ...] = ("sm_90a", "sm_100a")

Operator = Callable[..., Any]


def _agree(ours: Operator, theirs: Operator, *inputs: torch.Tensor, atol: float = 1e-4, rtol: float = 1e-3) -> None:
    """Checks that outputs and gradients of two operators of floating-point `inputs` are close; one output or
    several."""
    results = list[list[torch.Tensor]]()
    for operator in (ours, theirs):
        given = [one.clone().requires_grad_(one.is_floating_point()) for one in inputs]
        # Some operators work in place, which a leaf does not allow.
        found = operator(*(one.clone() if one.requires_grad else one for one in given))
        outputs = [found] if isinstance(found, torch.Tensor) else list(found)
        cotangents = [torch.linspace(-1, 1, one.numel()).reshape(one.shape).to(one.dtype) for one in outputs]
        torch.autograd.backward(outputs, cotangents)
        results.append([*(one.detach() for one in outputs), *(one.grad for one in given if one.grad is not None)])
    assert len(results[0]) == len(results[1]), "one operator has a gradient that the other lacks"
    for index, (found, expected) in enumerate(zip(*results, strict=True)):
        assert_close(found, expected, atol=atol, rtol=rtol, msg=lambda said, index=index: f"result {index}: {said}")


# Liger.


def _rms_norm(ops: Any, rows: int, hidden: int, offset: float, casting_mode: str, dtype: torch.dtype) -> None:
    def theirs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = x.float() if casting_mode != "none" else x
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (scaled * (offset + w.float())).to(dtype) if casting_mode == "gemma" else scaled.to(dtype) * (offset + w)

    def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ops.LigerRMSNormFunction.apply(x, w, 1e-6, offset, casting_mode, False)

    loose = {"atol": 2e-1, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    _agree(ours, theirs, torch.randn(rows, hidden, dtype=dtype), torch.randn(hidden, dtype=dtype), **loose)


def _fused_add_rms_norm(ops: Any, rows: int, hidden: int) -> None:
    def ours(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        return ops.LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 0.0, "llama", False)

    def theirs(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        s = x + r
        return s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-6) * w, s

    _agree(ours, theirs, torch.randn(rows, hidden), torch.randn(rows, hidden), torch.randn(hidden))


def _layer_norm(ops: Any, rows: int, hidden: int) -> None:
    def ours(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ops.LigerLayerNormFunction.apply(x, w, b, 1e-5)

    operands = torch.randn(rows, hidden), torch.randn(hidden), torch.randn(hidden)
    _agree(ours, lambda x, w, b: functional.layer_norm(x, (hidden,), w, b), *operands)


def _group_norm(ops: Any, batch: int, channels: int, groups: int, hidden: int) -> None:
    def ours(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ops.LigerGroupNormFunction.apply(x, w, b, channels, groups, 1e-5)

    operands = torch.randn(batch, channels, hidden), torch.randn(channels), torch.randn(channels)
    _agree(ours, lambda x, w, b: functional.group_norm(x, groups, w, b), *operands, atol=1e-3)


def _swiglu(ops: Any, rows: int, hidden: int) -> None:
    operands = torch.randn(rows, hidden), torch.randn(rows, hidden)
    _agree(ops.LigerSiLUMulFunction.apply, lambda a, b: functional.silu(a) * b, *operands)


def _geglu(ops: Any, rows: int, hidden: int) -> None:
    operands = torch.randn(rows, hidden), torch.randn(rows, hidden)
    _agree(ops.LigerGELUMulFunction.apply, lambda a, b: functional.gelu(a, approximate="tanh") * b, *operands)


def _relu_squared(ops: Any, rows: int, hidden: int) -> None:
    _agree(ops.LigerReLUSquaredFunction.apply, lambda x: functional.relu(x).square(), torch.randn(rows, hidden))


def _softmax(ops: Any, rows: int, hidden: int) -> None:
    _agree(ops.LigerSoftmaxFunction.apply, lambda x: torch.softmax(x, -1), torch.randn(rows, hidden))


def _sparsemax(ops: Any, rows: int, hidden: int) -> None:
    def theirs(x: torch.Tensor) -> torch.Tensor:
        sorted_x = x.sort(-1, descending=True).values
        count = torch.arange(1, hidden + 1)
        chosen = (1 + count * sorted_x > sorted_x.cumsum(-1)).sum(-1, keepdim=True)
        threshold = (sorted_x.cumsum(-1).gather(-1, chosen - 1) - 1) / chosen
        return functional.relu(x - threshold)

    _agree(lambda x: ops.LigerSparsemaxFunction.apply(x, -1), theirs, torch.randn(rows, hidden))


def _dyt(ops: Any, rows: int, hidden: int) -> None:
    def theirs(x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return torch.tanh(alpha * x) * gamma + beta

    operands = torch.randn(rows, hidden), torch.randn(1), torch.randn(hidden), torch.randn(hidden)
    _agree(ops.LigerDyTFunction.apply, theirs, *operands, atol=1e-3)


def _poly_norm(ops: Any, rows: int, hidden: int) -> None:
    def theirs(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        powers = (x**3, x**2, x)
        normed = [one * torch.rsqrt(one.square().mean(-1, keepdim=True) + 1e-6) for one in powers]
        return sum((w[index] * one for index, one in enumerate(normed)), b)

    def ours(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ops.LigerPolyNormFunction.apply(x, w, b, 1e-6, False)

    _agree(ours, theirs, torch.randn(rows, hidden), torch.randn(3), torch.randn(()), atol=1e-3)


def _rope(ops: Any, seqlen: int, heads: int, kv_heads: int, head_dim: int) -> None:
    angle = torch.arange(seqlen)[:, None] / 10_000 ** (torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = (torch.cat((one, one), -1)[None] for one in (angle.cos(), angle.sin()))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]

    operands = torch.randn(1, heads, seqlen, head_dim), torch.randn(1, kv_heads, seqlen, head_dim)
    _agree(lambda q, k: ops.LigerRopeFunction.apply(q, k, cos, sin), lambda q, k: (rotated(q), rotated(k)), *operands)


def _cross_entropy(ops: Any, rows: int, vocabulary: int, label_smoothing: float, reduction: str) -> None:
    target = torch.randint(0, vocabulary, (rows,))
    target[1] = -100

    def ours(x: torch.Tensor) -> torch.Tensor:
        return ops.LigerCrossEntropyFunction.apply(x, target, None, -100, 0.0, label_smoothing, reduction)[0]

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(x, target, reduction=reduction, label_smoothing=label_smoothing)

    _agree(ours, theirs, torch.randn(rows, vocabulary))


def _fused_linear_cross_entropy(ops: Any, rows: int, hidden: int, vocabulary: int) -> None:
    target = torch.randint(0, vocabulary, (rows,))

    def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ops.LigerFusedLinearCrossEntropyFunction.apply(x, w, target)[0]

    operands = torch.randn(rows, hidden) / 8, torch.randn(vocabulary, hidden)
    _agree(ours, lambda x, w: functional.cross_entropy(x @ w.T, target), *operands)


def _kl_div(ops: Any, rows: int, vocabulary: int, log_target: bool) -> None:
    target = torch.randn(rows, vocabulary).log_softmax(-1)
    target = target if log_target else target.exp()

    def ours(x: torch.Tensor) -> torch.Tensor:
        return ops.LigerKLDivLossFunction.apply(x.log_softmax(-1), target, "batchmean", log_target, 1e-10)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return functional.kl_div(x.log_softmax(-1), target, reduction="batchmean", log_target=log_target)

    _agree(ours, theirs, torch.randn(rows, vocabulary))


def _jsd(ops: Any, rows: int, vocabulary: int, beta: float) -> None:
    target = torch.randn(rows, vocabulary).log_softmax(-1)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return ops.LigerJSDFunction.apply(x.log_softmax(-1), target, None, beta, -100)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        q, p = x.log_softmax(-1).exp(), target.exp()
        mean = beta * p + (1 - beta) * q
        return (beta * p * (p.log() - mean.log()) + (1 - beta) * q * (q.log() - mean.log())).sum() / rows

    _agree(ours, theirs, torch.randn(rows, vocabulary))


def _tvd(ops: Any, rows: int, vocabulary: int) -> None:
    target = torch.randn(rows, vocabulary).softmax(-1)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return ops.LigerTVDLossFunction.apply(x.softmax(-1), target, None, "batchmean", -100)

    _agree(ours, lambda x: (x.softmax(-1) - target).abs().sum() / 2 / rows, torch.randn(rows, vocabulary))


def _liger(file: str, driver: Callable[..., None], **arguments: Any) -> Iterator[PublicCase]:
    path = f"src/liger_kernel/ops/{file}.py"
    for target in _TARGETS:
        yield PublicCase("Liger-Kernel ops", LIGER, path, target, driver.__name__.strip("_"), arguments, driver)


def _of_liger() -> Iterator[PublicCase]:
    rows = {"rows": 7, "hidden": 1100}
    for mode, offset in (("llama", 0.0), ("gemma", 1.0), ("none", 0.0)):
        for dtype in (torch.float32, torch.bfloat16):
            yield from _liger("rms_norm", _rms_norm, **rows, offset=offset, casting_mode=mode, dtype=dtype)
    for file, driver in (
        ("fused_add_rms_norm", _fused_add_rms_norm), ("layer_norm", _layer_norm), ("swiglu", _swiglu),
        ("geglu", _geglu),
        ("relu_squared", _relu_squared), ("softmax", _softmax), ("sparsemax", _sparsemax), ("dyt", _dyt),
        ("poly_norm", _poly_norm),
    ):  # fmt: skip
        yield from _liger(file, driver, **rows)
    yield from _liger("group_norm", _group_norm, batch=3, channels=6, groups=3, hidden=500)
    yield from _liger("rope", _rope, seqlen=19, heads=6, kv_heads=2, head_dim=64)
    for smoothing, reduction in ((0.0, "mean"), (0.1, "sum")):
        given = {"rows": 9, "vocabulary": 3000, "label_smoothing": smoothing, "reduction": reduction}
        yield from _liger("cross_entropy", _cross_entropy, **given)
    yield from _liger("fused_linear_cross_entropy", _fused_linear_cross_entropy, rows=12, hidden=64, vocabulary=1000)
    for log_target in (False, True):
        yield from _liger("kl_div", _kl_div, rows=6, vocabulary=1500, log_target=log_target)
    yield from _liger("jsd", _jsd, rows=6, vocabulary=1500, beta=0.5)
    yield from _liger("tvd", _tvd, rows=6, vocabulary=1500)


# flash-linear-attention: its own tests, each with a naive reference, forward and backward.


def _fla(file: str, function: str, **arguments: Any) -> Iterator[PublicCase]:
    yield PublicCase("flash-linear-attention ops", FLA, f"tests/ops/{file}.py", "sm_90a", function, arguments)


def _of_fla() -> Iterator[PublicCase]:
    shape = {"B": 1, "T": 130, "H": 2, "D": 64, "dtype": torch.float16}
    normal = {"gate_logit_normalizer": 1.0}
    for function in ("test_fused_recurrent", "test_chunk"):
        yield from _fla("test_gla", function, **{**shape, "T": 70}, **normal)
        yield from _fla("test_simple_gla", function, **shape, scale=0.1, **normal)
    for function in ("test_parallel", "test_fused_chunk"):
        yield from _fla("test_simple_gla", function, **shape, scale=0.1, **normal)
    yield from _fla("test_linear_attn", "test_fused_recurrent", **shape, scale=0.1)
    yield from _fla("test_linear_attn", "test_chunk", **shape)
    yield from _fla("test_linear_attn", "test_fused_chunk", **shape)
    for function in ("test_chunk", "test_parallel"):
        given = {"B": 1, "T": 130, "H": 2, "K": 64, "expand_ratio": 1, "dtype": torch.float16}
        yield from _fla("test_retention", function, **given)
    normed = {"use_qk_l2norm_in_kernel": True}
    yield from _fla("test_delta", "test_chunk", **shape, scale=1.0, **normed)
    gated = {**shape, "HV": 2, "scale": 1.0, **normal}
    yield from _fla("test_gdn", "test_fused_recurrent", **gated)
    yield from _fla("test_gdn", "test_chunk", **gated, mask_p=0.0, **normed)
    yield from _fla("test_kda", "test_fused_recurrent", **gated, **normed)
    for function in ("test_fused_recurrent", "test_chunk"):
        yield from _fla("test_hgrn", function, B=1, T=130, D=100, dtype=torch.float32)
        yield from _fla("test_gsa", function, **{**shape, "T": 70}, M=32, **normal)
        yield from _fla("test_iplr_delta", function, **{**shape, "T": 70}, scale=0.25)
    unnormed = {"use_qk_l2norm_in_kernel": False}
    yield from _fla("test_comba", "test_chunk", **shape, scale=1.0, **normal, mask_p=0.0, **unnormed)
    yield from _fla("test_rwkv6", "test_chunk", **{**shape, "T": 70}, **normal)
    yield from _fla(
        "test_rwkv7", "test_fused_mul_recurrent_fwd", **{**shape, "T": 40, "dtype": torch.float32}, scale=1.0
    )
    heads = {"B": 1, "T": 130, "H": 2, "HQ": 4, "D": 64, "scale": 0.1}
    without_scale = {name: value for name, value in heads.items() if name != "scale"}
    yield from _fla("test_attn", "test_parallel", **heads)
    yield from _fla("test_attn", "test_parallel_swa", **without_scale, W=40)
    yield from _fla("test_forgetting_attn", "test_parallel", **heads)
    yield from _fla("test_path_attn", "test_parallel", **without_scale, use_forget_gate=True, dtype=torch.float16)
    yield from _fla("test_based", "test_based", B=1, T=64, H=1, D=16, dtype=torch.float16)
    yield from _fla("test_log_linear_attn", "test_chunk", **{**shape, "T": 128, "dtype": torch.float32})
    yield from _fla(
        "test_delta_product", "test_chunk", **shape, scale=1.0, num_householder=2, use_qk_l2norm_in_kernel=True
    )
    yield from _fla("test_solve_tril", "test_solve_tril", B=1, T=130, H=2, chunk_size=64)


CASES = (*_of_liger(), *_of_fla())

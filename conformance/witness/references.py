"""A reference that public programs use and torch has only on a GPU: the product of block-scaled matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from megamoe.codec.nvfp4 import decode_e2m1, swizzled_shape, unpack, unswizzle_scales


@contextmanager
def on_host() -> Iterator[None]:
    """Makes torch._scaled_mm of block-scaled operands work on the CPU."""
    with patch.object(torch, "_scaled_mm", _scaled_mm(torch.__dict__["_scaled_mm"])):
        yield


def _scaled_mm(own: Callable[..., Any]) -> Callable[..., Any]:
    def product(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
        bias: torch.Tensor | None = None, scale_result: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """a [m, k] times b [k, n]; scales in atoms of 128 rows and 4 blocks, flat (cuBLAS, 1D block scaling)."""
        if scale_a.numel() == 1:
            return own(a, b, scale_a, scale_b, bias=bias, scale_result=scale_result, out_dtype=out_dtype, **options)
        left, right = _values(a), _values(b.t())
        found = (left * _scales(scale_a, left.shape)) @ (right * _scales(scale_b, right.shape)).t()
        return found.to(out_dtype or torch.bfloat16)

    return product


def _values(operand: torch.Tensor) -> torch.Tensor:
    """[rows, k] in float32; two e2m1 a byte, the first in the low half."""
    if operand.dtype != torch.float4_e2m1fn_x2:
        return operand.float()
    return decode_e2m1(unpack(operand.contiguous().view(torch.uint8)))


def _scales(flat: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scale of each element of `shape`."""
    rows, k = shape
    block = 16 if flat.dtype == torch.float8_e4m3fn else 32
    blocks = -(-k // block)
    plain = unswizzle_scales(flat.float().reshape(swizzled_shape(rows, blocks)), rows, blocks)
    return plain.repeat_interleave(block, 1)[:, :k]

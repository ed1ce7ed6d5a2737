"""FMHA forward: o = softmax(scale * q k^T + mask) v and its log-sum-exp, exact and as a good kernel rounds it.

Mask: query row i stands at position p = i + s_k - t (bottom-right aligned) and sees key j iff (not causal or j <= p)
and (window is null or j > p - window). A row that sees no key has o = 0 and lse = -inf. Query head h reads KV head
h // (heads // kv_heads). lse is the natural logarithm of the sum of exp(scale * q k^T) over the visible keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product
from typing import TYPE_CHECKING, Final

import torch

from megamoe.ops import Latitude
from megamoe.ops.fmha.inputs import key_range, make_inputs, softmax_scale

if TYPE_CHECKING:
    from megamoe.contract import Case

__all__ = [
    "ABSOLUTE_SCALE",
    "MATRIX_RATES",
    "free",
    "latitude",
    "make_inputs",
    "minimum_bytes",
    "oracle",
    "sample",
    "simulated",
    "useful_flops",
    "visible_keys",
]

# An absolute error of x in lse is a relative error of x in every probability derived from it.
ABSOLUTE_SCALE: Final[Mapping[str, float]] = {"lse": 1.0}
# Both products are of bf16 operands.
MATRIX_RATES: Final[Mapping[str, float]] = {}

# Scores held at once, so that a long cache costs no more memory than a short one.
SCORES: Final = 1 << 22

Rows = tuple[torch.Tensor, torch.Tensor]
AttendRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], Rows]


def visible_keys(case: Case, row: torch.Tensor) -> torch.Tensor:
    """bool [rows, s_k]: whether the query at row[r] (int64 [rows], 0 <= row < t) sees key j."""
    first, last = key_range(case, row)
    key = torch.arange(case.int("s_k"), device=row.device)
    return (key >= first[:, None]) & (key <= last[:, None])


def free(case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every element of o and lse has a meaning."""
    return {}


def latitude(
    case: Case,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
) -> Latitude:
    """A kernel has no choice but its roundings."""
    return Latitude()


def sample(case: Case, inputs: Mapping[str, torch.Tensor], most_flops: int) -> None:
    """None: every row is judged. Even the longest cache is a second's work in float64 on a device."""


def useful_flops(case: Case) -> int:
    """Multiplications and additions of both products, over the visible keys only."""
    first, last = key_range(case, torch.arange(case.int("t")))
    pairs = int((last - first + 1).clamp(min=0).sum())
    return 4 * case.int("hd") * pairs * case.int("heads") * case.int("batch")


def minimum_bytes(case: Case) -> int:
    """Bytes of q, of the keys and values that some query sees, of o and of lse, each moved once."""
    first, last = key_range(case, torch.arange(case.int("t")))
    seen = max(0, int(last.max()) - int(first.min()) + 1)
    rows = case.int("heads") * case.int("t")
    vectors = 2 * rows + 2 * case.int("kv_heads") * seen
    return case.int("batch") * (2 * case.int("hd") * vectors + (4 * rows if case["lse"] else 0))


def oracle(case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """float64 o [batch, heads, t, hd] and, if the case asks for it, lse [batch, heads, t]."""
    return _attend(case, inputs, _exact_rows, torch.float64, torch.float64)


def simulated(case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """bf16 o [batch, heads, t, hd] and f32 lse [batch, heads, t], rounded as a good kernel does.

    Products of bf16 q and k are accumulated in fp32; the softmax runs in fp32 on base 2, relative to the row maximum;
    P is rounded to bf16 for the second product, which is accumulated in fp32. The row sum is that of the fp32 P, before
    the rounding, as flash attention accumulates it: lse carries no bf16 error and o carries all of it. A kernel may
    divide o by the sum of the rounded P instead (that is closer to the oracle), but may not take lse from it.

    Raises ValueError if torch was told to lower the precision of fp32 matrix products.
    """
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        raise ValueError(
            f"{case.id}: torch's float32 matmul precision is {precision!r}; the simulated reference needs "
            "'highest' (torch.set_float32_matmul_precision)"
        )
    return _attend(case, inputs, _rounded_rows, torch.bfloat16, torch.float32)


def _attend(
    case: Case,
    inputs: Mapping[str, torch.Tensor],
    attend_rows: AttendRows,
    o_dtype: torch.dtype,
    lse_dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    batch, kv_heads, t, hd = case.int("batch"), case.int("kv_heads"), case.int("t"), case.int("hd")
    # The query heads of one KV head lie next to each other. Folded into rows, they read its keys once.
    rows = case.int("heads") // kv_heads * t
    q = q.reshape(batch, kv_heads, rows, hd)
    o = torch.empty(q.shape, dtype=o_dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=lse_dtype, device=q.device)
    row = torch.arange(rows, device=q.device) % t
    step = max(1, SCORES // case.int("s_k"))
    for kv in product(range(batch), range(kv_heads)):
        for start in range(0, rows, step):
            here = (*kv, slice(start, start + step))
            visible = visible_keys(case, row[start : start + step])
            o[here], lse[here] = attend_rows(q[here], k[kv], v[kv], visible, softmax_scale(case))
    outputs = {"o": o.view(inputs["q"].shape)}
    if case["lse"]:
        outputs["lse"] = lse.view(inputs["q"].shape[:-1])
    return outputs


def _exact_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> Rows:
    s = (q.double() @ k.double().mT).mul_(scale).masked_fill_(~visible, -math.inf)
    lse = torch.logsumexp(s, dim=-1)
    p = s.sub_(_finite(lse)[:, None]).exp_()
    return p @ v.double(), lse


def _rounded_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> Rows:
    s = (q.float() @ k.float().mT).masked_fill_(~visible, -math.inf)
    to_base_2 = torch.tensor(scale * math.log2(math.e), dtype=torch.float32, device=q.device)
    s = s.mul_(to_base_2)
    row_max = _finite(s.amax(dim=-1))
    p = torch.exp2(s.sub_(row_max[:, None]))
    row_sum = p.sum(dim=-1)
    acc = p.bfloat16().float() @ v.float()
    o = torch.where(row_sum[:, None] > 0, acc / row_sum[:, None], 0.0)
    lse = (row_max + torch.log2(row_sum)) * math.log(2.0)
    return o.bfloat16(), lse


def _finite(row_max: torch.Tensor) -> torch.Tensor:
    # A row without a visible key has the maximum -inf, and -inf - -inf is NaN.
    return row_max.masked_fill(row_max == -math.inf, 0.0)

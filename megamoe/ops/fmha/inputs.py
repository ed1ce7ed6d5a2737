"""Input distributions of FMHA. Each makes one kind of mistake visible."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import torch

from megamoe.spec.draws import normal, signs, uniform

if TYPE_CHECKING:
    from megamoe.contract import Case

Inputs = dict[str, torch.Tensor]

# exp overflows fp32 above 88.73, so a row whose largest logit is around 110 needs its maximum subtracted.
LOGIT_OFFSET: Final = 110.0
LOGIT_SPREAD: Final = 15.0
ONE_HOT_LOGIT: Final = 64.0
DISTINCT_KEYS: Final = 3
# Smallest normal bf16 and fp32 number.
SMALLEST_NORMAL: Final = 2.0**-126
QK_IMBALANCE: Final = 2.0**100


def softmax_scale(case: Case) -> float:
    """Factor of the logits: axis `scale`, or 1 / sqrt(hd) when it is null."""
    scale = case["scale"]
    return 1.0 / math.sqrt(case.int("hd")) if scale is None else float(scale)


def key_range(case: Case, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last visible key, int64, of the query rows `row` (int64, any shape); last < first if none is."""
    s_k = case.int("s_k")
    position = row + s_k - case.int("t")
    window = case["window"]
    last = position.clamp(max=s_k - 1) if case["causal"] else torch.full_like(row, s_k - 1)
    first = torch.zeros_like(row) if window is None else (position - int(window) + 1).clamp(min=0)
    return first, last


def make_inputs(case: Case, device: str | torch.device = "cpu") -> Inputs:
    """bf16 q [batch, heads, t, hd], k and v [batch, kv_heads, s_k, hd], drawn on the CPU and then moved to `device`.

    The bits depend on the case's id alone: op, axes, distribution and seed. ValueError for an unknown distribution.
    """
    if case.inputs not in DISTRIBUTIONS:
        known = ", ".join(DISTRIBUTIONS)
        raise ValueError(f"{case.id}: there is no input distribution {case.inputs!r} for fmha; there are: {known}")
    return {name: tensor.to(device) for name, tensor in DISTRIBUTIONS[case.inputs](case).items()}


def one_hot_keys(case: Case) -> torch.Tensor:
    """int64 [batch, heads, t]: the key that each query attends to under `one_hot_rows`.

    The last visible key, the first and one drawn between them take turns, so a mask that is off by one shows.
    A row that sees no key gets key 0.
    """
    first, last = key_range(case, torch.arange(case.int("t")))
    shape = (case.int("batch"), case.int("heads"), case.int("t"))
    inner = first + (uniform(case, "one_hot_keys", shape) * (last - first + 1)).long()
    turn = torch.arange(math.prod(shape)).reshape(shape) % 3
    key = torch.where(turn == 0, last, torch.where(turn == 1, first, torch.minimum(inner, last)))
    return torch.where(last >= first, key, 0)


def _q_shape(case: Case) -> tuple[int, int, int, int]:
    return case.int("batch"), case.int("heads"), case.int("t"), case.int("hd")


def _kv_shape(case: Case) -> tuple[int, int, int, int]:
    return case.int("batch"), case.int("kv_heads"), case.int("s_k"), case.int("hd")


def _effective_scale(case: Case) -> float:
    # With scale = 0 every logit is 0, so any finite input will do.
    return abs(softmax_scale(case)) or 1.0


def _bf16(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Inputs:
    return {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16()}


def _draw(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return normal(case, "q", _q_shape(case)), normal(case, "k", _kv_shape(case)), normal(case, "v", _kv_shape(case))


def _normal_inputs(case: Case) -> Inputs:
    """N(0, 1) in q, k and v: logits of N(0, 1) at the default scale."""
    return _bf16(*_draw(case))


def _large_logits(case: Case) -> Inputs:
    """Peaked rows around logits of +LOGIT_OFFSET and -LOGIT_OFFSET by turns, the first row positive.

    Without a row maximum, exp overflows in the positive rows. A zero-filled key past s_k wins in the negative rows.
    """
    q, k, v = _draw(case)
    scale = _effective_scale(case)
    q *= LOGIT_SPREAD / (scale * math.sqrt(case.int("hd")))
    q[..., 0] = k[..., 0] = math.sqrt(LOGIT_OFFSET / scale)
    batch, head, row = torch.meshgrid(*(torch.arange(size) for size in q.shape[:-1]), indexing="ij")
    negative = ((batch + head + row) % 2 == 1) != (softmax_scale(case) < 0)
    q[..., 0] *= torch.where(negative, -1.0, 1.0)
    return _bf16(q, k, v)


def _one_hot_rows(case: Case) -> Inputs:
    """k of random signs, q a multiple of one key (`one_hot_keys`): its logit is 64, the others' N(0, 64 / sqrt(hd))."""
    k = signs(case, "k", _kv_shape(case))
    group = case.int("heads") // case.int("kv_heads")
    key = one_hot_keys(case)[..., None].expand(_q_shape(case))
    q = k.repeat_interleave(group, dim=1).gather(2, key)
    q *= ONE_HOT_LOGIT / (case.int("hd") * _effective_scale(case)) * (-1.0 if softmax_scale(case) < 0 else 1.0)
    return _bf16(q, k, normal(case, "v", _kv_shape(case)))


def _constant_v(case: Case) -> Inputs:
    """v is the same for all keys of a KV head, so o is that vector, whatever the probabilities are."""
    q, k, _ = _draw(case)
    batch, kv_heads, _, hd = _kv_shape(case)
    v = normal(case, "v", (batch, kv_heads, 1, hd)).expand(_kv_shape(case))
    return _bf16(q, k, v.contiguous())


def _repeated_keys(case: Case) -> Inputs:
    """Every key is one of DISTINCT_KEYS: the row maximum is tied within and across tiles."""
    q, k, v = _draw(case)
    batch, kv_heads, s_k, hd = _kv_shape(case)
    choice = (uniform(case, "choice", (batch, kv_heads, s_k, 1)) * min(DISTINCT_KEYS, s_k)).long()
    return _bf16(q, k.gather(2, choice.expand(-1, -1, -1, hd)), v)


def _denormal_scale(case: Case) -> Inputs:
    """q tiny and k huge, their logits N(0, 1) at the default scale; v just above the smallest normal number.

    Every input is normal; averages of v are subnormal in fp32 and in bf16. Matrix products keep subnormal products and
    sums (measured on an H200, through cuBLAS), so if something flushes to zero, it is an epilogue.
    """
    q, k, _ = _draw(case)
    magnitude = 1.0 + uniform(case, "v", _kv_shape(case)).float()
    v = magnitude * signs(case, "v_sign", _kv_shape(case)) * SMALLEST_NORMAL
    return _bf16(q / QK_IMBALANCE, k * QK_IMBALANCE, v)


DISTRIBUTIONS: Final[Mapping[str, Callable[[Case], Inputs]]] = {
    "normal": _normal_inputs,
    "large_logits": _large_logits,
    "one_hot_rows": _one_hot_rows,
    "constant_v": _constant_v,
    "repeated_keys": _repeated_keys,
    "denormal_scale": _denormal_scale,
}

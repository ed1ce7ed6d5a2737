"""FMHA forward: o = softmax(scale * q k^T + mask) v and its log-sum-exp, exact and as a good kernel rounds it.

Mask: query row i has position p = i + s_k - t (bottom-right aligned) and sees key j iff (not causal or j <= p) and
(window is null or j > p - window). A row that sees no key has o = 0 and lse = -inf. Query head h reads KV head h //
(heads // kv_heads). lse is the natural logarithm of the sum of exp(scale * q k^T) over the visible keys.

With `sinks` the softmax of a row has one more term, the sink of its head, which has no value: lse counts it, and a row
that sees no key has lse = sink. With kv=latent, v is k.

With `ragged` the tensors hold the tokens of all sequences, [tokens, heads, hd]. Each sequence is computed as its own
case with batch 1, so everything said of such cases holds for it.

Each input distribution makes one kind of mistake visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import TYPE_CHECKING, Final

import torch

from megamoe.ops import Codes, Latitude, distribution_of, full_precision
from megamoe.spec.draws import normal, signs, uniform

if TYPE_CHECKING:
    from megamoe.contract import Case


Inputs = dict[str, torch.Tensor]

# exp overflows fp32 above 88.73, so a row whose largest logit is around 110 needs its maximum subtracted.
LOGIT_OFFSET: Final = 110.0
LOGIT_SPREAD: Final = 15.0
ONE_HOT_LOGIT: Final = 64.0
# Further above the row's other logits than 88.73, where exp overflows fp32.
LONE_LOGITS: Final = (384.0, 640.0)
LONE_STEP: Final = 37
DISTINCT_KEYS: Final = 3
# Smallest normal number of bf16 and fp32.
SMALLEST_NORMAL: Final = 2.0**-126
QK_IMBALANCE: Final = 2.0**100
# exp(-128) is 0 in fp32. A sum of 32 values of 3 bits has 8 bits.
EXACT_LOGIT: Final = 128.0
EXACT_KEYS: Final = 32
MAX_ATTEMPTS: Final = 50


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

    No v with kv=latent; f32 sink [heads] if there are sinks. If ragged, q is [total_q, heads, hd], k and v are
    [total_k, kv_heads, hd], and the int32 lengths and tables are as in the spec. The bits depend on the case's id
    alone: op, axes, distribution and seed. Raises ValueError for an unknown distribution.
    """
    draw = distribution_of(case, DISTRIBUTIONS)
    inputs = _ragged_inputs(case, draw) if case["ragged"] else draw(case)
    if case["kv"] == "latent":
        del inputs["v"]
    if case["sinks"]:
        inputs["sink"] = _sinks(case)
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _sinks(case: Case) -> torch.Tensor:
    """f32 [heads], near the lse of s_k logits of N(0, 1), so that a sink takes about half of a row.

    Under `large_logits` they alternate around +LOGIT_OFFSET and -LOGIT_OFFSET: as large as the logits of some rows, far
    above those of others, or far below.
    """
    sinks = normal(case, "sink", (case.int("heads"),)).float()
    if case.inputs == "large_logits":
        return sinks + torch.where(torch.arange(case.int("heads")) % 2 == 0, LOGIT_OFFSET, -LOGIT_OFFSET)
    return sinks + math.log(case.int("s_k")) + 0.5


def drawn_lengths(case: Case) -> tuple[list[int], list[int]]:
    """Query rows and keys of each sequence of a ragged case. One has the maximum length possible; others may be empty.

    Query rows add up to total_q and keys to total_k. With pages, the pages in use hold at most total_k.
    """
    queries = _shares(case, "t", case.int("total_q"))
    return queries, _shares(case, "s_k", case.int("total_k"), case.int("page_size"))


def _shares(case: Case, axis: str, total: int, page: int = 0) -> list[int]:
    """Deals `total` to the sequences, at most `axis` each. With pages, deals whole pages and may leave some over."""
    batch, longest = case.int("batch"), case.int(axis)
    lengths = [0] * batch
    order = uniform(case, f"order of {axis}", (batch,)).argsort().tolist()
    drawn = uniform(case, f"lengths of {axis}", (batch,)).tolist()
    for left, number in zip(reversed(range(batch)), order, strict=True):
        high = min(longest, total)
        low = 0 if page else max(0, total - left * longest)
        lengths[number] = high if left == batch - 1 else low + int(drawn[number] * (high - low + 1))
        total -= -(-lengths[number] // page) * page if page else lengths[number]
    return lengths


def _alone(case: Case, number: int, t: int, s_k: int) -> Case:
    """Sequence `number` of a ragged case as a separate case, with its own random numbers."""
    axes = {
        **dict(case.axes),
        "batch": 1,
        "t": t,
        "s_k": s_k,
        "ragged": False,
        "total_q": 0,
        "total_k": 0,
        "page_size": 0,
    }
    return replace(case, axes=tuple(axes.items()), id=f"{case.id}|sequence {number}")


def _sequences_of(case: Case) -> Iterator[Case]:
    """The sequences of a ragged case that have queries, with their drawn lengths. The case itself if it is not
    ragged."""
    if not case["ragged"]:
        yield case
        return
    for number, (t, s_k) in enumerate(zip(*drawn_lengths(case), strict=True)):
        if t:
            yield _alone(case, number, t, s_k)


def _ragged_inputs(case: Case, draw: Callable[[Case], Inputs]) -> Inputs:
    """Draws each sequence as a separate case. Where nothing may be read, k and v are NaN and block_table is -1."""
    queries, keys = drawn_lengths(case)
    packed: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": []}
    for number, (t, s_k) in enumerate(zip(queries, keys, strict=True)):
        # Distributions cannot draw empty tensors.
        drawn = draw(_alone(case, number, max(t, 1), max(s_k, 1)))
        for name, parts in packed.items():
            parts.append(drawn[name][0, :, : t if name == "q" else s_k].transpose(0, 1))
    tensors = {name: torch.cat(parts) for name, parts in packed.items()}
    tensors["cu_seqlens_q"] = _starts(queries)
    page = case.int("page_size")
    if not page:
        return {**tensors, "cu_seqlens_k": _starts(keys)}
    table = torch.full((case.int("batch"), -(-case.int("s_k") // page)), -1, dtype=torch.int32)
    pages = uniform(case, "pages", (case.int("total_k") // page,)).argsort().int()
    for entries, s_k in zip(table, keys, strict=True):
        used = -(-s_k // page)
        entries[:used], pages = pages[:used], pages[used:]
    tensors |= {"seqused_k": torch.tensor(keys, dtype=torch.int32), "block_table": table}
    rows = torch.cat([key_rows(case, tensors, number) for number in range(case.int("batch"))])
    for name in ("k", "v"):
        cache = torch.full((case.int("total_k"), *tensors[name].shape[1:]), math.nan, dtype=torch.bfloat16)
        cache[rows], tensors[name] = tensors[name], cache
    return tensors


def _starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def key_rows(case: Case, inputs: Mapping[str, torch.Tensor], number: int) -> torch.Tensor:
    """int64 [keys]: the rows of k and v that hold the keys of sequence `number`, in order."""
    page = case.int("page_size")
    if not page:
        start, end = inputs["cu_seqlens_k"][number : number + 2].tolist()
        return torch.arange(start, end, device=inputs["k"].device)
    key = torch.arange(int(inputs["seqused_k"][number]), device=inputs["k"].device)
    return inputs["block_table"][number].long()[key // page] * page + key % page


def _sequences(case: Case, inputs: Mapping[str, torch.Tensor]) -> Iterator[tuple[Case, Inputs]]:
    """Each sequence of ragged inputs that has queries, as a separate case."""
    starts = inputs["cu_seqlens_q"].tolist()
    for number, (start, end) in enumerate(pairwise(starts)):
        if start < end:
            rows = {"q": torch.arange(start, end, device=inputs["q"].device)}
            rows["k"] = rows["v"] = key_rows(case, inputs, number)
            own = {name: inputs[name][at].transpose(0, 1)[None] for name, at in rows.items() if name in inputs}
            yield _alone(case, number, end - start, len(rows["k"])), {**inputs, **own}


def one_hot_keys(case: Case) -> torch.Tensor:
    """int64 [batch, heads, t]: the key that each query attends to under `one_hot_rows`.

    Alternates between the last visible key, the first, and a random one between them, so an off-by-one mask shows. A
    row that sees no key gets key 0.
    """
    first, last = key_range(case, torch.arange(case.int("t")))
    shape = (case.int("batch"), case.int("heads"), case.int("t"))
    inner = first + (uniform(case, "one_hot_keys", shape) * (last - first + 1)).long()
    turn = torch.arange(math.prod(shape)).reshape(shape) % 3
    key = torch.where(turn == 0, last, torch.where(turn == 1, first, torch.minimum(inner, last)))
    return torch.where(last >= first, key, 0)


def lone_keys(case: Case) -> torch.Tensor:
    """int64 [batch, heads, t]: the key that each query attends to under `lone_keys`, 0 if it sees none.

    Successive rows step through their visible keys by LONE_STEP, so that every column of a key tile is hit by many
    rows.
    """
    first, last = key_range(case, torch.arange(case.int("t")))
    shape = (case.int("batch"), case.int("heads"), case.int("t"))
    turn = torch.arange(math.prod(shape)).reshape(shape) * LONE_STEP
    return torch.where(last >= first, first + turn % (last - first + 1).clamp(min=1), 0)


def _q_shape(case: Case) -> tuple[int, int, int, int]:
    return case.int("batch"), case.int("heads"), case.int("t"), case.int("hd")


def _kv_shape(case: Case) -> tuple[int, int, int, int]:
    return case.int("batch"), case.int("kv_heads"), case.int("s_k"), case.int("hd")


def _effective_scale(case: Case) -> float:
    # With scale = 0 every logit is 0, so any finite input works.
    return abs(softmax_scale(case)) or 1.0


def _bf16(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Inputs:
    return {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16()}


def _draw(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return normal(case, "q", _q_shape(case)), normal(case, "k", _kv_shape(case)), normal(case, "v", _kv_shape(case))


def _normal_inputs(case: Case) -> Inputs:
    """N(0, 1) in q, k and v, so logits are N(0, 1) at the default scale."""
    return _bf16(*_draw(case))


def _large_logits(case: Case) -> Inputs:
    """Peaked rows with logits alternating around +LOGIT_OFFSET and -LOGIT_OFFSET; the first row is positive.

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
    """k of random signs; q a multiple of one key (`one_hot_keys`) with logit 64. The other logits are N(0, 64 /
    sqrt(hd))."""
    k = signs(case, "k", _kv_shape(case))
    q = _towards(case, k, one_hot_keys(case)) * ONE_HOT_LOGIT
    return _bf16(q, k, normal(case, "v", _kv_shape(case)))


def _towards(case: Case, k: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """q: for each query, the multiple of its `key` of k (all signs) that has logit 1."""
    group = case.int("heads") // case.int("kv_heads")
    q = k.repeat_interleave(group, dim=1).gather(2, key[..., None].expand(_q_shape(case)))
    return q / (case.int("hd") * _effective_scale(case) * (-1.0 if softmax_scale(case) < 0 else 1.0))


def _lone_keys(case: Case) -> Inputs:
    """k of random signs, q a multiple of one key (`lone_keys`) that takes all of the softmax; a quarter of v is 0.

    That key's logit is in the range of LONE_LOGITS, the others are N(0, 1 / sqrt(hd)) of it: with a maximum that misses
    the key, a row overflows. o is that key's v, bit for bit, because P and the row sum are 1 up to errors far below a
    bf16 ulp. A kernel that truncates o shows where these errors point down; an accumulator that does not start at 0
    shows where v is 0.
    """
    k = signs(case, "k", _kv_shape(case))
    low, high = LONE_LOGITS
    logit = low + (high - low) * uniform(case, "logit", _q_shape(case)[:-1])
    v = normal(case, "v", _kv_shape(case)) * (uniform(case, "v is 0", _kv_shape(case)) >= 0.25)
    return _bf16(_towards(case, k, lone_keys(case)) * logit[..., None], k, v)


def _constant_v(case: Case) -> Inputs:
    """v is the same for all keys of a KV head, so o is that vector, whatever the probabilities."""
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
    """Tiny q and huge k with N(0, 1) logits at the default scale; v just above the smallest normal number.

    Every input is normal; averages of v are subnormal in fp32 and in bf16. Matrix products keep subnormal products and
    sums (measured on an H200, through cuBLAS), so anything that flushes to zero is in an epilogue.
    """
    q, k, _ = _draw(case)
    magnitude = 1.0 + uniform(case, "v", _kv_shape(case)).float()
    v = magnitude * signs(case, "v_sign", _kv_shape(case)) * SMALLEST_NORMAL
    return _bf16(q / QK_IMBALANCE, k * QK_IMBALANCE, v)


def _exact_sums(case: Case) -> Inputs:
    """Each query attends equally to 1, 2, 4, ... or 32 of its keys and to no other; v holds whole numbers.

    Each key belongs to one of hd classes, each a unit vector; a query is a multiple of one of them. P is 1 for the keys
    of its class and 0 for the others, the row sum is a power of two, and o has 8 bits: its fp32 sums are exact in every
    order, and no error of exp2 or of a reciprocal reaches a bf16. All values of a column have one sign, because a sum
    that cancels would show such errors. One key of the class too many or too few changes o.
    """
    classes, chosen = _classes(case)
    k = torch.nn.functional.one_hot(classes, case.int("hd")).double()
    q = torch.nn.functional.one_hot(chosen, case.int("hd")) * (EXACT_LOGIT / softmax_scale(case))
    column = torch.where(torch.arange(case.int("hd")) % 2 == 0, 1.0, -1.0)
    return _bf16(q, k, (uniform(case, "v", _kv_shape(case)) * 8).floor() * column)


def _classes(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The class of each key, int64 [batch, kv_heads, s_k], and of each query, int64 [batch, heads, t].

    In each group of eight classes, each is half as frequent as the one before. A query sees a power of two of keys of
    its class, EXACT_KEYS at most, with larger counts preferred. A query that sees no key has class 0.
    """
    hd, group = case.int("hd"), case.int("heads") // case.int("kv_heads")
    rank = torch.repeat_interleave(torch.arange(hd), 2 ** (7 - torch.arange(hd) % 8))
    visible = visible_keys(case, torch.arange(case.int("t"))).double()
    powers = 2.0 ** torch.arange(EXACT_KEYS.bit_length()).double()
    for attempt in range(MAX_ATTEMPTS):
        drawn = uniform(case, f"classes {attempt}", _kv_shape(case)[:-1])
        classes = rank[(drawn * len(rank)).long()]
        seen = visible @ torch.nn.functional.one_hot(classes, hd).double()
        counted = torch.where(torch.isin(seen, powers), seen, 0.0)
        if not ((counted.amax(dim=-1) == 0) & (seen.sum(dim=-1) > 0)).any():
            counted = counted.repeat_interleave(group, dim=1)
            return classes, (counted * uniform(case, "turns", tuple(counted.shape))).argmax(dim=-1)
    raise ValueError(f"{case.id}: some query sees no class of 1, 2, ... {EXACT_KEYS} keys; take another seed")


DISTRIBUTIONS: Final[Mapping[str, Callable[[Case], Inputs]]] = {
    "normal": _normal_inputs,
    "large_logits": _large_logits,
    "one_hot_rows": _one_hot_rows,
    "constant_v": _constant_v,
    "repeated_keys": _repeated_keys,
    "denormal_scale": _denormal_scale,
    "exact_sums": _exact_sums,
    "lone_keys": _lone_keys,
}
EXACT: Final = ("exact_sums", "lone_keys")
"""Distributions for which o has one right answer, bit for bit."""


# An absolute error of x in lse is a relative error of x in every probability derived from it.
ABSOLUTE_SCALE: Final[Mapping[str, float]] = {"lse": 1.0}
# Both products have bf16 operands.
MATRIX_RATES: Final[Mapping[str, float]] = {}

# Scores held at once, so that a long cache needs no more memory than a short one.
SCORES: Final = 1 << 22

Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Softmax:
    """Parameters of the softmax of some rows. `visible`: bool [rows, s_k]. `sink`: f32 [rows], -inf without sinks."""

    scale: float
    visible: torch.Tensor
    sink: torch.Tensor


AttendRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Softmax], Rows]


def visible_keys(case: Case, row: torch.Tensor) -> torch.Tensor:
    """bool [rows, s_k]: whether the query at row[r] (int64 [rows], 0 <= row < t) sees key j."""
    first, last = key_range(case, row)
    key = torch.arange(case.int("s_k"), device=row.device)
    return (key >= first[:, None]) & (key <= last[:, None])


def free(case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Empty: every element of o and lse has a meaning."""
    return {}


def latitude(
    case: Case,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
) -> Latitude:
    """A kernel's only freedom is rounding. Under EXACT it has none: o is the oracle's, bit for bit.

    With sinks, row sums are no powers of two, so EXACT does not apply.
    """
    if case.inputs not in EXACT or case["sinks"] or "o" not in outputs:
        return Latitude()
    right = expected["o"].bfloat16().double()
    rows = torch.arange(len(right), device=right.device)
    seen = outputs["o"].to(right.device).double()
    axes = ("total_q", "heads", "hd") if case["ragged"] else ("batch", "heads", "t", "hd")
    return Latitude(codes={"o": Codes(seen, right, right, axes, rows)})


def sample(case: Case, inputs: Mapping[str, torch.Tensor], most_flops: int) -> None:
    """None: every row is judged. Even the longest cache takes only a second in float64 on a device."""


def useful_flops(case: Case) -> int:
    """Multiplications and additions of both products, over the visible keys only."""
    flops = 0
    for one in _sequences_of(case):
        first, last = key_range(one, torch.arange(one.int("t")))
        pairs = int((last - first + 1).clamp(min=0).sum())
        flops += 4 * one.int("hd") * pairs * one.int("heads") * one.int("batch")
    return flops


def minimum_bytes(case: Case) -> int:
    """Bytes of q, of the keys and values that some query sees, of o, lse, sinks and lengths, each moved once.

    A page table counts only the entries that name a page of some sequence.
    """
    moved = 4 * case.int("heads") if case["sinks"] else 0
    if case["ragged"]:
        keys, page = drawn_lengths(case)[1], case.int("page_size")
        moved += 4 * (2 * case.int("batch") + (2 if not page else 1 + sum(-(-s_k // page) for s_k in keys)))
    for one in _sequences_of(case):
        first, last = key_range(one, torch.arange(one.int("t")))
        seen = max(0, int(last.max()) - int(first.min()) + 1)
        rows = one.int("heads") * one.int("t")
        vectors = 2 * rows + (1 if one["kv"] == "latent" else 2) * one.int("kv_heads") * seen
        moved += one.int("batch") * (2 * one.int("hd") * vectors + (4 * rows if one["lse"] else 0))
    return moved


def oracle(case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """float64 o [batch, heads, t, hd] and, if the case asks for it, lse [batch, heads, t].

    If ragged, o is [total_q, heads, hd] and lse [total_q, heads].
    """
    return _attend(case, inputs, _exact_rows, torch.float64, torch.float64)


def simulated(case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """bf16 o and f32 lse in the shapes of the oracle's, rounded as a good kernel does.

    Products of bf16 q and k are accumulated in fp32; the softmax runs in fp32 on base 2, relative to the row maximum; P
    is rounded to bf16 for the second product, which is accumulated in fp32. The row sum uses the fp32 P before
    rounding, as flash attention accumulates it, so lse carries no bf16 error and o carries all of it. A kernel may
    divide o by the sum of the rounded P instead (closer to the oracle), but may not take lse from it.

    Raises ValueError if torch uses reduced precision for fp32 matmuls.
    """
    full_precision(case)
    return _attend(case, inputs, _rounded_rows, torch.bfloat16, torch.float32)


def _attend(
    case: Case,
    inputs: Mapping[str, torch.Tensor],
    attend_rows: AttendRows,
    o_dtype: torch.dtype,
    lse_dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    if case["ragged"]:
        each = [_attend(*one, attend_rows, o_dtype, lse_dtype) for one in _sequences(case, inputs)]
        return {name: torch.cat([one[name][0].transpose(0, 1) for one in each]) for name in each[0]}
    q, k, v = inputs["q"], inputs["k"], inputs["k" if case["kv"] == "latent" else "v"]
    batch, kv_heads, t, hd = case.int("batch"), case.int("kv_heads"), case.int("t"), case.int("hd")
    # The query heads of one KV head are adjacent. Folded into rows, they read its keys once.
    rows = case.int("heads") // kv_heads * t
    q = q.reshape(batch, kv_heads, rows, hd)
    o = torch.empty(q.shape, dtype=o_dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=lse_dtype, device=q.device)
    row = torch.arange(rows, device=q.device) % t
    sink = inputs["sink"] if case["sinks"] else torch.full((case.int("heads"),), -math.inf, device=q.device)
    sink = sink.view(kv_heads, -1).repeat_interleave(t, dim=1)
    step = max(1, SCORES // max(1, case.int("s_k")))
    if not case.int("s_k"):
        attend_rows = _keyless_rows
    for kv in product(range(batch), range(kv_heads)):
        for start in range(0, rows, step):
            here = (*kv, slice(start, start + step))
            visible = visible_keys(case, row[start : start + step])
            softmax = Softmax(softmax_scale(case), visible, sink[here[1:]])
            o[here], lse[here] = attend_rows(q[here], k[kv], v[kv], softmax)
    outputs = {"o": o.view(inputs["q"].shape)}
    if case["lse"]:
        outputs["lse"] = lse.view(inputs["q"].shape[:-1])
    return outputs


def _keyless_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax) -> Rows:
    """Rows of a sequence without keys, the same in exact and in rounded arithmetic."""
    return torch.zeros_like(q), softmax.sink


def _exact_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax) -> Rows:
    s = (q.double() @ k.double().mT).mul_(softmax.scale).masked_fill_(~softmax.visible, -math.inf)
    lse = torch.logaddexp(torch.logsumexp(s, dim=-1), softmax.sink.double())
    p = s.sub_(_finite(lse)[:, None]).exp_()
    return p @ v.double(), lse


def _rounded_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax) -> Rows:
    s = (q.float() @ k.float().mT).masked_fill_(~softmax.visible, -math.inf)
    log2_e = math.log2(math.e)
    to_base_2 = torch.tensor(softmax.scale * log2_e, dtype=torch.float32, device=q.device)
    s, sink = s.mul_(to_base_2), softmax.sink * log2_e
    row_max = _finite(torch.maximum(s.amax(dim=-1), sink))
    p = torch.exp2(s.sub_(row_max[:, None]))
    row_sum = p.sum(dim=-1) + torch.exp2(sink - row_max)
    acc = p.bfloat16().float() @ v.float()
    o = torch.where(row_sum[:, None] > 0, acc / row_sum[:, None], 0.0)
    lse = (row_max + torch.log2(row_sum)) * math.log(2.0)
    return o.bfloat16(), lse


def _finite(row_max: torch.Tensor) -> torch.Tensor:
    # A row without a visible key has the maximum -inf, and -inf - -inf is NaN.
    return row_max.masked_fill(row_max == -math.inf, 0.0)

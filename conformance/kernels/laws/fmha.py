"""The laws of forward attention. A docstring states the law; its second paragraph says how exact it is and why."""

from __future__ import annotations

import hashlib
import math
from itertools import accumulate, pairwise

import torch

from conformance.kernels.laws.agreement import close, same_bits, within
from conformance.kernels.laws.law import (
    Axes,
    Bench,
    Tensors,
    inputs_of,
    law,
    spec_of,
)
from megamoe.contract import Case

# In units of the logits: exp overflows fp32 above 88.7 and underflows below -103.
LOGIT_SHIFT = 128.0
ROWS_TRIED = 3
PAGE = 16


PER_SEQUENCE = ("q", "k", "v")
"""Inputs with an entry for each sequence of the batch."""
BATCHED = {"ragged": False, "total_q": 0, "total_k": 0, "page_size": 0}
"""All sequences have t queries and s_k keys."""
FEW_KERNELS = {"hd": 64, "t": 3, "sinks": False}
"""Laws about the order in memory use one kernel of each layout, which compiles in seconds: the arithmetic is the
same."""


@law(
    "fmha",
    "tolerance",
    fixed={**BATCHED, "causal": False, "window": None},
    least={"s_k": 2},
    runs=lambda axes: [axes, axes],
)
def kv_permutation(bench: Bench, case: Case) -> None:
    """With no mask, permuting keys and values together changes neither o nor lse.

    Within the rounding of two correct kernels: another order of summation, and P rounded to bf16 relative to another
    running maximum.
    """
    inputs = inputs_of(case)
    order = torch.randperm(case.int("s_k"), generator=_generator(case))
    permuted = {**inputs, **{name: inputs[name][:, :, order] for name in _keys_and_values(inputs)}}
    sides = ("with keys permuted", "as they are")
    close(case, bench.run(case, permuted), bench.run(case, inputs), sides)


@law("fmha", "tolerance", fixed={**BATCHED, "sinks": False, "kv": "apart"}, runs=lambda axes: [axes, axes])
def logit_shift(bench: Bench, case: Case) -> None:
    """Adding the same number to all logits of a row leaves o as it is and adds that number to lse.

    The last element of every key is 0 at first and a constant c later. The last element of query row i alternates
    between +1 and -1: q . k changes by exactly +c or -c, in bf16, and c moves the logits by LOGIT_SHIFT. Within the
    rounding of two correct kernels: fp32 logits of another magnitude, and P rounded relative to another maximum.
    """
    scale = _scale(case)
    inputs = {name: tensor.clone() for name, tensor in inputs_of(case).items()}
    sign = torch.where(torch.arange(case.int("t")) % 2 == 0, 1.0, -1.0)
    inputs["q"][..., -1] = sign.bfloat16()
    inputs["k"][..., -1] = 0.0
    wanted = bench.run(case, inputs)
    step = torch.tensor(LOGIT_SHIFT / scale).bfloat16()
    inputs["k"][..., -1] = step
    if "lse" in wanted:
        wanted["lse"] = (wanted["lse"].double() + scale * sign.double() * step.double()).float()
    sides = ("with shifted logits", "expected of the plain ones")
    # The logits of either run may be as large as the shift, however small their lse is.
    close(case, bench.run(case, inputs), wanted, sides, least_scale={"lse": LOGIT_SHIFT})


@law("fmha", "tolerance", fixed={**BATCHED, "sinks": False, "kv": "apart"})
def constant_value(bench: Bench, case: Case) -> None:
    """If all values of a KV head are the same vector, o is that vector in every row that sees a key, and 0 in any
    other.

    Within one ulp of each element: half an ulp as P is rounded to bf16 but its row sum is not, and another half as o is
    rounded. A sum of subnormal products adds an absolute error of s_k smallest fp32 numbers.
    """
    inputs = inputs_of(case)
    first = inputs["v"][:, :, :1]
    inputs["v"] = first.expand_as(inputs["v"]).contiguous()
    o = bench.run(case, inputs)["o"]
    wanted = _per_query_head(case, first).double() * _sees_a_key(case)[:, None]
    slack, ulp = 1.0 + 2.0**-6, torch.finfo(torch.bfloat16).eps
    smallest = torch.finfo(torch.bfloat16).smallest_normal * ulp + case.int("s_k") * 2.0**-149
    bound = wanted.abs() * ulp * slack + smallest * (wanted != 0)
    # A row that sees no key has the bound 0, and 0 / 0 would be NaN.
    bound = torch.where(bound == 0, 2.0**-160, bound).expand_as(o)
    within(case, "o", o, wanted.expand_as(o), bound, "o is not the constant value")


def _whole_and_sequences(axes: Axes) -> list[Axes]:
    return [axes] + [{**axes, "batch": 1}] * _int(axes, "batch")


@law("fmha", "bitwise", fixed=BATCHED, least={"batch": 2}, runs=_whole_and_sequences)
def batch_invariant(bench: Bench, case: Case) -> None:
    """A batch of b sequences has the outputs of b batches of one.

    Bitwise: sequences share nothing, and serving relies on answers that do not change with their neighbours.
    """
    inputs, alone = inputs_of(case), spec_of(case.op).vary(case, batch=1)
    together = bench.run(case, inputs)
    for i in range(case.int("batch")):
        own = {name: tensor[i : i + 1] for name, tensor in inputs.items() if name in PER_SEQUENCE}
        single = bench.run(alone, {**inputs, **own})
        of_batch = {name: tensor[i : i + 1] for name, tensor in together.items()}
        same_bits(case, of_batch, single, (f"as sequence {i} of {case.int('batch')}", "alone"))


@law(
    "fmha",
    "bitwise",
    fixed=BATCHED,
    least={"heads": 2},
    speaks_of=lambda axes: axes["kv_heads"] != axes["heads"],
    runs=lambda axes: [axes, {**axes, "kv_heads": axes["heads"]}],
)
def gqa_equals_expanded_mha(bench: Bench, case: Case) -> None:
    """Query heads that share a KV head have the outputs of query heads that each have a copy of it.

    Bitwise: a row's arithmetic is on the same numbers in the same key tiles, whatever its place in a row tile.
    """
    inputs, heads = inputs_of(case), case.int("heads")
    expanded = {name: _per_query_head(case, inputs[name]) for name in _keys_and_values(inputs)}
    each = bench.run(spec_of(case.op).vary(case, kv_heads=heads), {**inputs, **expanded})
    same_bits(case, bench.run(case, inputs), each, ("shared", "with a KV head each"))


@law("fmha", "bitwise", fixed={**BATCHED, "window": None}, runs=lambda axes: [axes, axes])
def window_covers_all_equals_full(bench: Bench, case: Case) -> None:
    """A window as long as the cache, or longer, hides nothing.

    Bitwise: the shape is the same and no key is masked, so no intermediate number may differ. The window is s_k, the
    least that covers all keys, or a longer one, by turns.
    """
    inputs, s_k = inputs_of(case), case.int("s_k")
    window = (s_k, s_k + 1, 2 * s_k)[case.seed % 3]
    windowed = spec_of(case.op).vary(case, window=window)
    full = bench.run(case, inputs)
    same_bits(case, bench.run(windowed, inputs), full, (f"with window {window}", "with none"))


def _whole_and_rows(axes: Axes) -> list[Axes]:
    return [axes] + [{**axes, "t": 1}] * min(ROWS_TRIED, _int(axes, "t"))


@law("fmha", "tolerance", fixed={**BATCHED, "causal": True}, runs=_whole_and_rows)
def causal_equals_visible_prefix(bench: Bench, case: Case) -> None:
    """A row under a causal mask (and a window) equals full attention of that query over its visible keys alone.

    The law tries the first row, the last and one between. A row that sees no key has o = 0, and lse = -inf or its sink.
    Within the rounding of two correct kernels, as a kernel may tile by the number of keys; exact for rows that see
    nothing, not even a sink.
    """
    inputs = inputs_of(case)
    whole = bench.run(case, inputs)
    t, s_k, window = case.int("t"), case.int("s_k"), case["window"]
    between = int(torch.randint(t, (), generator=_generator(case)))
    for row in sorted({0, between, t - 1}):
        here = {name: tensor[:, :, row : row + 1] for name, tensor in whole.items()}
        end = row + s_k - t + 1
        first = 0 if window is None else max(0, end - int(window))
        if end <= 0:
            lse = inputs["sink"] if case["sinks"] else torch.full((case.int("heads"),), -math.inf)
            nothing = {"o": torch.zeros_like(here["o"]), "lse": lse[:, None].expand(here["o"].shape[:-1]).contiguous()}
            agree = close if case["sinks"] else same_bits
            agree(case, here, {name: nothing[name] for name in here}, (f"in row {row}", "as it sees no key"))
            continue
        alone = spec_of(case.op).vary(case, t=1, s_k=end - first, causal=False, window=None)
        seen = {name: inputs[name][:, :, first:end] for name in _keys_and_values(inputs)}
        wanted = bench.run(alone, {**inputs, "q": inputs["q"][:, :, row : row + 1], **seen})
        close(case, here, wanted, (f"in row {row} under the mask", f"alone with keys {first} to {end - 1}"))


@law("fmha", "bitwise", fixed={**BATCHED, **FEW_KERNELS}, runs=lambda axes: [axes, axes])
def paged_equals_contiguous(bench: Bench, case: Case) -> None:
    """Keys in pages, in any order and with anything between them, give the outputs of contiguous keys.

    Bitwise: the same numbers in the same key tiles. There are as many sequences as the batch of the case, and its t and
    s_k bound them.
    """
    random, batch, s_k = _generator(case), case.int("batch"), case.int("s_k")
    pages = batch * -(-s_k // PAGE) + int(torch.randint(3, (), generator=random))
    total_q = 1 + int(torch.randint(batch * case.int("t"), (), generator=random))
    paged = spec_of(case.op).vary(case, ragged=True, total_q=total_q, total_k=pages * PAGE, page_size=PAGE)
    inputs = inputs_of(paged)
    lengths = inputs["seqused_k"].tolist()
    table = inputs["block_table"].tolist()
    rows = [table[b][key // PAGE] * PAGE + key % PAGE for b in range(batch) for key in range(lengths[b])]
    together = {name: inputs[name] for name in inputs if name not in ("seqused_k", "block_table")}
    together |= {name: inputs[name][rows] for name in _keys_and_values(inputs)}
    together["cu_seqlens_k"] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    contiguous = spec_of(case.op).vary(paged, total_k=len(rows), page_size=0)
    same_bits(paged, bench.run(paged, inputs), bench.run(contiguous, together), ("in pages", "together"))


@law("fmha", "bitwise", fixed={**BATCHED, **FEW_KERNELS}, least={"batch": 2}, runs=_whole_and_sequences)
def ragged_equals_sequences(bench: Bench, case: Case) -> None:
    """A sequence in a ragged batch has the outputs that it has alone, whatever the other sequences are.

    Bitwise: the bounds t and s_k, by which a kernel may tile and split, are the same. Keys and values of one of the
    others are NaN. A sequence without queries or keys is not compared.
    """
    random, batch, t, s_k = _generator(case), case.int("batch"), case.int("t"), case.int("s_k")
    total_q, total_k = (1 + int(torch.randint(batch * most, (), generator=random)) for most in (t, s_k))
    ragged = spec_of(case.op).vary(case, ragged=True, total_q=total_q, total_k=total_k)
    inputs = inputs_of(ragged)
    queries, keys = (list(pairwise(inputs[f"cu_seqlens_{name}"].tolist())) for name in "qk")
    spoilt, victim = {**inputs}, int(torch.randint(batch, (), generator=random))
    for name in _keys_and_values(inputs):
        spoilt[name] = inputs[name].clone()
        spoilt[name][slice(*keys[victim])] = math.nan
    together = bench.run(ragged, spoilt)
    for b, (here, seen) in enumerate(zip(queries, keys, strict=True)):
        sizes = {"total_q": here[1] - here[0], "total_k": seen[1] - seen[0]}
        if b == victim or not all(sizes.values()):
            continue
        own = {name: inputs[name][slice(*seen)] for name in _keys_and_values(inputs)}
        own |= {f"cu_seqlens_{name[-1]}": torch.tensor([0, size], dtype=torch.int32) for name, size in sizes.items()}
        alone = spec_of(case.op).vary(ragged, batch=1, **sizes)
        single = bench.run(alone, {**inputs, **own, "q": inputs["q"][slice(*here)]})
        of_batch = {name: tensor[slice(*here)] for name, tensor in together.items()}
        same_bits(ragged, of_batch, single, (f"as sequence {b} of {batch}", "alone"))


def _keys_and_values(inputs: Tensors) -> list[str]:
    return [name for name in ("k", "v") if name in inputs]


def _int(axes: Axes, name: str) -> int:
    value = axes[name]
    assert isinstance(value, int), f"axis {name} is {value!r}"
    return value


def _generator(case: Case) -> torch.Generator:
    digest = hashlib.sha256(f"law|{case.id}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _scale(case: Case) -> float:
    scale = case["scale"]
    return 1.0 / math.sqrt(case.int("hd")) if scale is None else float(scale)


def _per_query_head(case: Case, kv: torch.Tensor) -> torch.Tensor:
    """Expands [batch, kv_heads, ...] to [batch, heads, ...], by query head."""
    return kv.repeat_interleave(case.int("heads") // case.int("kv_heads"), dim=1)


def _sees_a_key(case: Case) -> torch.Tensor:
    """bool [t]. Only a causal mask can hide all keys, from rows whose position is before the first key."""
    position = torch.arange(case.int("t")) + case.int("s_k") - case.int("t")
    return (position >= 0) if case["causal"] else torch.ones_like(position, dtype=torch.bool)

"""The operator behind megamoe.attention for sinks, a single latent K and V, sequence lengths, and pages.

It takes more tensors than the plain operator, whose calls must not pay for them. `fmha_call` serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from megamoe.contract.counted import counted
from megamoe.torch_ops.calls import (
    OpCall,
    Output,
    Wanted,
    call_for,
    require_one_device,
    with_defaults,
    without_derivatives,
)

MAX_CALLS = 4096
"""Number of sizes whose kernels are kept: a decoder that grows its cache by one key per step has new sizes in each."""
TILE = 64
MAX_MACHINE_WORK = 1 << 31
"""Query rows times keys times hd, in whole tiles: 4096 tiles of 64 x 64 at hd 128. The machine runs them one by one."""
Options = tuple[bool, int | None, float | None, str | None]
"""causal, window, scale, backend: the options that follow the tensors in the attention operators."""
TENSORS = "q, k, v, sinks and lengths"

_INPUTS = ("q", "k", "v", "sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")
_LIBRARY = torch.library.Library("megamoe", "FRAGMENT")
_LIBRARY.define(
    "sequence_attention(Tensor q, Tensor k, Tensor? v, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_k, Tensor? block_table, SymInt max_seqlen_q, SymInt max_seqlen_k, bool return_lse, "
    "bool causal=False, int? window=None, float? scale=None, str? backend=None) -> (Tensor, Tensor)",
    tags=torch.Tag.needs_exact_strides,
)


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """Positions of a batch's sequences if their lengths differ. Tensors are int32 and on the device of q.

    Sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of q [tokens, heads, hd]. Its keys are those
    from cu_seqlens_k[b] on of k and v [tokens, kv_heads, hd], or seqused_k[b] keys in pages: then k and v are [pages,
    page_size, kv_heads, hd], page_size is 16, 64 or 128, and key j lies in page block_table[b, j // page_size].
    Elements behind a sequence's last key in its last page may be NaN, and table entries behind its last page may be any
    number. `max_seqlen_q`, `max_seqlen_k`: no sequence has more. They choose the kernel, so that the tensors need not
    be read.
    """

    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    cu_seqlens_k: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None


class Given(NamedTuple):
    """The properties of a tensor that a call depends on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: int


class Sizes(NamedTuple):
    """Sizes of a call. The last three are 0 if all sequences have the same length."""

    batch: int
    heads: int
    kv_heads: int
    t: int
    s_k: int
    hd: int
    total_q: int = 0
    total_k: int = 0
    page_size: int = 0


def _given(tensor: torch.Tensor | None) -> Given | None:
    return None if tensor is None else Given(tensor.shape, tensor.dtype, tensor.get_device())


def _attention(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, (max_q, max_k, lse), options = list[torch.Tensor | None](given[:8]), given[8:11], given[11:]
    q, k, v, _, starts, _, _, table = given[:8]
    call = _call_of(tuple(map(_given, tensors)), max_q, max_k, lse, *options)
    if table is not None:
        tensors[1:3] = [None if cache is None else cache.flatten(0, 1) for cache in (k, v)]
        tensors[-1] = table[:, : -(-max_k // k.shape[1])]
    if starts is not None and not q.is_cuda:
        _hold_lengths(tensors, max_q, max_k, k.shape[1])
    outputs = call([one for one in tensors if one is not None])
    return outputs[0], outputs[1] if lse else q.new_empty(0, dtype=torch.float32)


@lru_cache(maxsize=MAX_CALLS)
def _call_of(given: tuple[Given | None, ...], max_q: int, max_k: int, lse: bool, *options: object) -> OpCall:
    """Shapes, dtypes and devices are checked here, so that a warm call checks nothing."""
    sizes = _sizes(given, max_q, max_k)
    device, *others = {one.device for one in given if one is not None}
    if others:
        raise ValueError(f"{TENSORS} must be on one device")
    inputs = tuple(name for name, one in zip(_INPUTS, given, strict=True) if one is not None)
    try:
        return fmha_call(sizes, inputs, device, lse, options)
    except ValueError as error:
        if "cu_seqlens_q" not in inputs:
            raise
        what = f"t is max_seqlen_q, {max_q}, and s_k max_seqlen_k, {max_k}; total_q are the tokens of q"
        raise ValueError(f"{error} ({what})") from None


def fmha_call(sizes: Sizes, inputs: tuple[str, ...], device: int, lse: bool, given: Sequence[object]) -> OpCall:
    """The call of op fmha with these `inputs`. `given`: Options, without trailing ones that have their defaults."""
    causal, window, scale, backend = with_defaults(given, (False, None, None, None))
    ragged, rows = "cu_seqlens_q" in inputs, sizes.heads // sizes.kv_heads * sizes.t
    tokens = (sizes.total_q, sizes.heads) if ragged else (sizes.batch, sizes.heads, sizes.t)
    axes = sizes._asdict()
    if not ragged:
        # Keep the default totals: a total of 0 would mean a batch without queries.
        del axes["total_q"], axes["total_k"], axes["page_size"]
    axes |= {"causal": causal, "window": window, "scale": scale, "lse": lse, "ragged": ragged}
    axes |= {"sinks": "sink" in inputs, "kv": "apart" if "v" in inputs else "latent"}
    o = Output("o", (*tokens, sizes.hd), torch.bfloat16)
    return call_for(
        Wanted(
            op="fmha",
            axes=axes,
            inputs=inputs,
            weights=(),
            outputs=(o, Output("lse", tokens, torch.float32)) if lse else (o,),
            work=sizes.batch * sizes.kv_heads * -(-rows // TILE) * TILE * -(-sizes.s_k // TILE) * TILE * sizes.hd,
            bound=MAX_MACHINE_WORK,
            unit=f"query rows x keys x hd, in tiles of {TILE} rows and {TILE} keys,",
            device=device,
            backend=backend,
        )
    )


def _sizes(given: Sequence[Given | None], max_q: int, max_k: int) -> Sizes:
    """The sizes of the call. Raises ValueError, with all shapes, if the tensors do not belong to one attention."""
    said = ", ".join(
        f"{name} {one.dtype} {list(one.shape)}".replace("torch.", "")
        for name, one in zip(_INPUTS, given, strict=True)
        if one is not None
    )
    q, k, v, sink, starts, starts_k, used, table = given
    assert q is not None
    assert k is not None
    wanted = dict(zip(_INPUTS, (*3 * (torch.bfloat16,), torch.float32, *4 * (torch.int32,)), strict=True))
    for name, one in zip(_INPUTS, given, strict=True):
        if one is not None and one.dtype != wanted[name]:
            raise ValueError(f"{name} must be {str(wanted[name]).removeprefix('torch.')}; given: {said}")
    if starts is None and (starts_k or used or table):
        raise ValueError(f"lengths of keys need cu_seqlens_q beside them; given: {said}")
    if starts is not None and (starts_k is None) == (used is None or table is None):
        raise ValueError(f"keys need either cu_seqlens_k, or seqused_k and block_table; given: {said}")
    dims = (3 if starts else 4, 4 if table or not starts else 3)
    if (len(q.shape), len(k.shape)) != dims or (v is not None and v.shape != k.shape):
        raise ValueError(
            f"q has {dims[0]} dimensions here, k {dims[1]}, and v the shape of k (megamoe.SequenceLengths says which); "
            f"given: {said}"
        )
    if starts is None:
        (batch, heads, t, hd), (k_batch, kv_heads, s_k, k_hd) = q.shape, k.shape
        sizes = Sizes(batch, heads, kv_heads, t, s_k, hd)
    else:
        (total_q, heads, hd), (kv_heads, k_hd) = q.shape, k.shape[-2:]
        batch = k_batch = starts.shape[0] - 1 if len(starts.shape) == 1 else 0
        page = k.shape[1] if table else 0
        if table and not page:
            raise ValueError(f"a page must have keys; given: {said}")
        sizes = Sizes(batch, heads, kv_heads, max_q, max_k, hd, total_q, k.shape[0] * max(1, page), page)
        _hold_shapes(given, sizes, said)
    if k_hd != hd or k_batch != batch or not kv_heads or sizes.heads % kv_heads or not sizes.heads:
        raise ValueError(
            f"k must have the batch and the hd of q, and heads that those of q are a multiple of; given: {said}"
        )
    if sink is not None and sink.shape != (sizes.heads,):
        raise ValueError(f"there must be a sink for each of {counted(sizes.heads, 'head')}; given: {said}")
    return sizes


def _hold_shapes(given: Sequence[Given | None], sizes: Sizes, said: str) -> None:
    """Raises ValueError if lengths and tables do not belong to one batch."""
    _, _, _, _, starts, starts_k, used, table = given
    pages = -(-sizes.s_k // max(1, sizes.page_size))
    for name, one, shape in (
        ("cu_seqlens_q", starts, (sizes.batch + 1,)),
        ("cu_seqlens_k", starts_k, (sizes.batch + 1,)),
        ("seqused_k", used, (sizes.batch,)),
    ):
        if one is not None and (not sizes.batch or one.shape != shape):
            raise ValueError(f"{name} must have the shape {list(shape)}, of a batch of 1 or more; given: {said}")
    if table is not None and (len(table.shape) != 2 or table.shape[0] != sizes.batch or table.shape[1] < pages):
        raise ValueError(
            f"block_table must be [{sizes.batch}, {pages} or more] for {counted(sizes.s_k, 'key')}; given: {said}"
        )


def _hold_lengths(tensors: Sequence[torch.Tensor | None], max_q: int, max_k: int, page: int) -> None:
    """Raises ValueError for impossible lengths on a CPU. On a device they are not checked, because that would wait for
    it."""
    q, k, _, _, starts, starts_k, used, table = tensors
    assert q is not None
    assert k is not None
    for name, one, total, most in (("q", starts, len(q), max_q), ("k", starts_k, len(k), max_k)):
        if one is not None:
            ends = one.tolist()
            lengths = [end - start for start, end in pairwise(ends)]
            if ends[0] != 0 or ends[-1] != total or min(lengths) < 0 or max(lengths) > most:
                raise ValueError(
                    f"cu_seqlens_{name} must go from 0 to {total}, the tokens of {name}, in steps of 0 to {most}, "
                    f"max_seqlen_{name}; it is {ends}"
                )
    if used is not None and table is not None:
        for keys, pages in zip(used.tolist(), table.tolist(), strict=True):
            if not 0 <= keys <= max_k:
                raise ValueError(f"seqused_k must be from 0 to {max_k}, max_seqlen_k; it is {used.tolist()}")
            named = pages[: -(-keys // page)]
            if named and not 0 <= min(named) <= max(named) < len(k) // page:
                raise ValueError(f"block_table must name pages from 0 to {len(k) // page - 1}; it names {named}")


def _fake(*given: object) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, (max_q, max_k, lse) = given[:8], given[8:11]
    there = [one for one in tensors if isinstance(one, torch.Tensor)]
    require_one_device(TENSORS, there)
    _sizes([_given(one) if isinstance(one, torch.Tensor) else None for one in tensors], max_q, max_k)  # pyright: ignore[reportArgumentType]
    q = there[0]
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1] if lse else (0,), dtype=torch.float32)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("sequence_attention", _attention, _key)
_OVERLOAD = torch.ops.megamoe.sequence_attention.default
_LIBRARY.impl("sequence_attention", without_derivatives("attention", _OVERLOAD), "Autograd", with_keyset=True)
torch.library.register_fake("megamoe::sequence_attention", _fake, lib=_LIBRARY)

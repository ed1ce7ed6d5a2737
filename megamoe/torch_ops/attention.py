"""megamoe.attention: forward attention as a PyTorch operator, with the kernels of op fmha.

    o = megamoe.attention(q, k, v, causal=True)

On a GPU the kernels run on torch's current stream, under torch.compile and in CUDA graphs. On a CPU the virtual machine
executes the kernels' PTX, so sizes must be small. docs/torch.md lists what is not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from megamoe.torch_ops.calls import OpCall, require_kinds, require_one_device, without_derivatives
from megamoe.torch_ops.sequences import MAX_CALLS, TENSORS, Options, SequenceLengths, Sizes, fmha_call

_KINDS = {"causal": "bool", "window": "int?", "scale": "float?", "backend": "str?"}
_OPTIONS = "bool causal=False, int? window=None, float? scale=None, str? backend=None"
_LIBRARY = torch.library.Library("megamoe", "FRAGMENT")
# torch.library.custom_op makes the same operator, but each call costs 3 us more CPU time
# (results/records/h200-torch-ops.json).
_LIBRARY.define(f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> Tensor", tags=torch.Tag.needs_exact_strides)
_LIBRARY.define(
    f"attention_with_lse(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    tags=torch.Tag.needs_exact_strides,
)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None, *, causal: bool = False,
    window: int | None = None, scale: float | None = None, return_lse: bool = False, backend: str | None = None,
    sinks: torch.Tensor | None = None, lengths: SequenceLengths | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(scale * q k^T + mask) v, and with `return_lse` the log-sum-exp of each row.

    q [batch, heads, t, hd], k and v [batch, kv_heads, s_k, hd], all bf16 on one device; hd 64, 128, 256 or 512; heads a
    multiple of kv_heads. Returns o bf16 [batch, heads, t, hd] and lse f32 [batch, heads, t] (natural logarithm).
    `causal`: query i sees the keys up to i + s_k - t. `window`: it sees only the last `window` of these. `scale`: None
    means 1 / sqrt(hd). `backend`: a registered one; None takes the fastest one that supports the call here. A tensor
    that is not contiguous is copied first. The first call with new sizes builds and loads its kernels.

    Without v, k serves as both, as in absorbed latent attention. `sinks` f32 [heads]: logits without a value, one more
    term in the softmax of each row of a head. `lengths`: sequences of different lengths, optionally with a paged cache.
    Then q and o are [tokens, heads, hd] and lse is [tokens, heads].

    Raises ValueError for unsupported tensors, options or sizes; UnsupportedError if no backend has the kernel here;
    RuntimeError if a tensor requires a gradient or has a tangent.
    """
    if not (type(causal) is bool and window is None and scale is None and backend is None):
        require_kinds({"causal": causal, "window": window, "scale": scale, "backend": backend}, _KINDS)
    if v is None or sinks is not None or lengths is not None:
        return _by_sequences((q, k, v, sinks), lengths, return_lse, (causal, window, scale, backend))
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        require_kinds({"q": q, "k": k, "v": v}, _KINDS)
    require_one_device("q, k and v", (q, k, v))
    if return_lse:
        return torch.ops.megamoe.attention_with_lse.default(q, k, v, causal, window, scale, backend)
    return torch.ops.megamoe.attention.default(q, k, v, causal, window, scale, backend)


def _by_sequences(
    tensors: Sequence[torch.Tensor | None], lengths: SequenceLengths | None, return_lse: bool, options: Options
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`tensors`: q, k, v and sinks."""
    if lengths is not None and not isinstance(lengths, SequenceLengths):
        raise ValueError(f"lengths is {repr(lengths)[:80]}; it must be a megamoe.SequenceLengths or None")
    named = dict(zip(("q", "k", "v", "sinks"), tensors, strict=True))
    bounds = (0, 0)
    if lengths is not None:
        bounds = lengths.max_seqlen_q, lengths.max_seqlen_k
        require_kinds(dict(zip(_BOUNDS, bounds, strict=True)), dict.fromkeys(_BOUNDS, "int"))
    named |= {name: getattr(lengths, name, None) for name in _LENGTHS}
    require_kinds({name: one for name, one in named.items() if one is not None or name in ("q", "k")}, {})
    require_one_device(TENSORS, (one for one in named.values() if one is not None))
    o, lse = torch.ops.megamoe.sequence_attention.default(*named.values(), *bounds, return_lse, *options)
    return (o, lse) if return_lse else o


_BOUNDS = ("max_seqlen_q", "max_seqlen_k")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: bool | float | str | None) -> torch.Tensor:
    return _call_of(
        False, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device(),
        *options,
    )((q, k, v))[0]  # fmt: skip


def _attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: bool | float | str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = _call_of(
        True, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device(),
        *options,
    )((q, k, v))  # fmt: skip
    return o, lse


@lru_cache(maxsize=MAX_CALLS)
def _call_of(lse: bool, *given: object) -> OpCall:
    """`given`: shapes of q, k and v, their dtypes, their devices, then options.

    Shapes, dtypes and devices are checked here, so that a warm call checks nothing.
    """
    shapes: tuple[torch.Size, ...] = given[:3]  # pyright: ignore[reportAssignmentType]
    dtypes: tuple[torch.dtype, ...] = given[3:6]  # pyright: ignore[reportAssignmentType]
    devices: tuple[int, ...] = given[6:9]  # pyright: ignore[reportAssignmentType]
    _check(shapes, dtypes)
    if len(set(devices)) > 1:
        raise ValueError("q, k and v must be on one device")
    (batch, heads, t, hd), (_, kv_heads, s_k, _) = shapes[0], shapes[1]
    return fmha_call(Sizes(batch, heads, kv_heads, t, s_k, hd), ("q", "k", "v"), devices[0], lse, given[9:])


def _check(shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Raises ValueError, with all three shapes, if the tensors are not q, k and v of one attention."""
    said = ", ".join(
        f"{name} {dtype} {list(shape)}" for name, shape, dtype in zip("qkv", shapes, dtypes, strict=True)
    ).replace("torch.", "")
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(f"q, k and v have four dimensions, [batch, heads, tokens, hd]; given: {said}")
    if any(dtype != torch.bfloat16 for dtype in dtypes):
        raise ValueError(f"q, k and v must be bfloat16, the one dtype of the kernels; given: {said}")
    q, k, v = shapes
    if k != v or q[0] != k[0] or q[3] != k[3]:
        raise ValueError(f"k and v must have one shape, and q the same batch and hd; given: {said}")
    if not q[1] or not k[1] or q[1] % k[1]:
        raise ValueError(f"heads of q must be a multiple of those of k and v, and neither may be 0; given: {said}")


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object) -> torch.Tensor:
    _check((q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype))
    require_one_device("q, k and v", (q, k, v))
    return q.new_empty(q.shape)


def _fake_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake(q, k, v), q.new_empty(q.shape[:3], dtype=torch.float32)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attention", _attention, _key)
    _LIBRARY.impl("attention_with_lse", _attention_with_lse, _key)
for _name in ("attention", "attention_with_lse"):
    _overload = getattr(torch.ops.megamoe, _name).default
    _LIBRARY.impl(_name, without_derivatives("attention", _overload), "Autograd", with_keyset=True)
torch.library.register_fake("megamoe::attention", _fake, lib=_LIBRARY)
torch.library.register_fake("megamoe::attention_with_lse", _fake_with_lse, lib=_LIBRARY)

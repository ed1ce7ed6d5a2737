"""megamoe.attention: forward attention as a PyTorch operator, by the kernels of op fmha.

    o = megamoe.attention(q, k, v, causal=True)

On a GPU the kernels run on torch's current stream, in torch.compile and in CUDA graphs. On a CPU the virtual machine
executes the kernels' PTX, so sizes must be small. docs/torch.md has what it does not do.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from megamoe.torch_ops.calls import (
    OpCall,
    Output,
    Wanted,
    call_for,
    require_kinds,
    require_one_device,
    without_derivatives,
)

MAX_CALLS = 4096
"""Sizes whose kernels are kept ready: a decoder that grows its cache by a key a step has new sizes in each."""
TILE = 64
MAX_MACHINE_WORK = 1 << 31
"""Query rows times keys times hd, in whole tiles: 4096 tiles of 64 x 64 at hd 128. The machine does them in turn."""

_KINDS = {"causal": "bool", "window": "int?", "scale": "float?", "backend": "str?"}
_OPTIONS = "bool causal=False, int? window=None, float? scale=None, str? backend=None"
_LIBRARY = torch.library.Library("megamoe", "FRAGMENT")
# torch.library.custom_op makes the same operator, and each call takes 3 us more of the CPU
# (results/records/h200-torch-ops.json).
_LIBRARY.define(f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> Tensor", tags=torch.Tag.needs_exact_strides)
_LIBRARY.define(
    f"attention_with_lse(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    tags=torch.Tag.needs_exact_strides,
)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, window: int | None = None,
    scale: float | None = None, return_lse: bool = False, backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """softmax(scale * q k^T + mask) v, and with `return_lse` the log-sum-exp of each row.

    q [batch, heads, t, hd], k and v [batch, kv_heads, s_k, hd], all bf16 on one device; hd 64, 128, 256 or 512; heads a
    multiple of kv_heads. Returns o bf16 [batch, heads, t, hd] and lse f32 [batch, heads, t] (natural logarithm).
    `causal`: query i sees the keys up to i + s_k - t. `window`: it sees the last `window` of these only. `scale`: None
    is 1 / sqrt(hd). `backend`: a registered one; None is the fastest that can do it here. A tensor that is not
    contiguous is copied first. The first call with new sizes builds and loads its kernels.

    ValueError for tensors, options or sizes that it does not do; UnsupportedError if no backend has the kernel here;
    RuntimeError if a tensor requires a gradient or has a tangent.
    """
    if not (type(causal) is bool and window is None and scale is None and backend is None):
        require_kinds({"causal": causal, "window": window, "scale": scale, "backend": backend}, _KINDS)
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        require_kinds({"q": q, "k": k, "v": v}, _KINDS)
    require_one_device("q, k and v", (q, k, v))
    if return_lse:
        return torch.ops.megamoe.attention_with_lse.default(q, k, v, causal, window, scale, backend)
    return torch.ops.megamoe.attention.default(q, k, v, causal, window, scale, backend)


Options = tuple[bool, int | None, float | None, str | None]
"""causal, window, scale, backend: what the operators take behind q, k and v."""


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

    What holds of shapes, dtypes and devices is asked here, so that a warm call asks nothing.
    """
    shapes: tuple[torch.Size, ...] = given[:3]  # pyright: ignore[reportAssignmentType]
    dtypes: tuple[torch.dtype, ...] = given[3:6]  # pyright: ignore[reportAssignmentType]
    devices: tuple[int, ...] = given[6:9]  # pyright: ignore[reportAssignmentType]
    causal, window, scale, backend = _filled(given[9:])
    _check(shapes, dtypes)
    if len(set(devices)) > 1:
        raise ValueError("q, k and v must be on one device")
    (batch, heads, t, hd), (_, kv_heads, s_k, _) = shapes[0], shapes[1]
    axes = {"hd": hd, "t": t, "s_k": s_k, "batch": batch, "heads": heads, "kv_heads": kv_heads}
    row_tiles = batch * kv_heads * -(-max(1, heads // max(1, kv_heads)) * t // TILE)
    o = Output("o", (batch, heads, t, hd), torch.bfloat16)
    return call_for(
        Wanted(
            op="fmha",
            axes={**axes, "causal": causal, "window": window, "scale": scale, "lse": lse},
            inputs=("q", "k", "v"),
            weights=(),
            outputs=(o, Output("lse", (batch, heads, t), torch.float32)) if lse else (o,),
            work=row_tiles * TILE * -(-s_k // TILE) * TILE * hd,
            bound=MAX_MACHINE_WORK,
            unit=f"query rows x keys x hd, in tiles of {TILE} rows and {TILE} keys,",
            device=devices[0],
            backend=backend,
        )
    )


def _filled(options: tuple[object, ...]) -> Options:
    # The dispatcher leaves out trailing options that have their default.
    causal, window, scale, backend = (*options, *(False, None, None, None)[len(options) :])
    return bool(causal), window, scale, backend  # pyright: ignore[reportReturnType]


def _check(shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """ValueError, with all three shapes, for tensors that are not q, k and v of one attention."""
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

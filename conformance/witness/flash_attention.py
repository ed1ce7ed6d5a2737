"""FlashAttention-4: the forward kernels for sm_90a and sm_100a, and on sm_100a split-KV over CTAs.

Our own host function calls them. FA4's entry takes some thirty arguments; ours passes tensors, numbers and a stream.
Sizes are dynamic: FA4 does not compile with static ones.
"""

# These imports need the extra `witness`.
# pyright: reportMissingImports=false

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING

import torch

from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.compile.compile import compile_host_function
from conformance.witness.witness import Call, Witness
from megamoe.contract import HostArg, ScalarArg, StreamArg, Target, TensorArg

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PACKAGE = "flash-attn-4"


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention forward in bf16.

    `window`: number of visible keys left and right of the diagonal; the last query is aligned with the last key.
    `options` go to the constructor of the kernel's class.
    """

    target: Target
    hd: int
    t: int
    s_k: int
    causal: bool = False
    hd_v: int = 0
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    window: tuple[int, int] | None = None
    options: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def head_sizes(self) -> tuple[int, int]:
        """hd of queries and keys, hd of values."""
        return self.hd, self.hd_v or self.hd


def _attention(case: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [batch, t, heads, hd_v] and natural-log LSE [batch, heads, t], both float64."""
    group = case.heads // case.kv_heads
    k, v = (one.double().repeat_interleave(group, dim=2) for one in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) / math.sqrt(case.hd)
    past = torch.arange(case.t)[:, None] + case.s_k - case.t - torch.arange(case.s_k)[None, :]
    if case.causal:
        scores = scores.masked_fill(past < 0, -math.inf)
    if case.window is not None:
        scores = scores.masked_fill((past > case.window[0]) | (-past > case.window[1]), -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def _kernel(case: Attention) -> Callable[..., object]:
    shared = {"qhead_per_kvhead": case.heads // case.kv_heads, "is_causal": case.causal,
              "is_local": case.window is not None}  # fmt: skip
    hd, hd_v = case.head_sizes
    if case.target == "sm_100a":
        from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100

        stages = 2 if case.t > 128 and hd_v <= 128 else 1
        return FlashAttentionForwardSm100(
            hd, hd_v, **{"q_stage": stages, "is_static_persistent": False, **shared, **case.options}
        )
    import cutlass
    from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
    from flash_attn.cute.interface import _tile_size_fwd_sm90

    tile = _tile_size_fwd_sm90(hd, hd_v, case.causal, case.window is not None)
    chosen = {"tile_m": tile.m_block_size, "tile_n": tile.n_block_size, "num_stages": 2, "num_threads": 384,
              "Q_in_regs": False, "intra_wg_overlap": tile.intra_wg_overlap,
              "mma_pv_is_rs": tile.mma_pv_is_rs}  # fmt: skip
    return FlashAttentionForwardSm90(cutlass.BFloat16, hd, hd_v, **{**chosen, **shared, **case.options})


def _prepare(case: Attention) -> Call:
    import cutlass.cute as cute
    from cutlass import BFloat16, Float32
    from cutlass.cute.runtime import make_fake_stream
    from quack.compile_utils import make_fake_tensor

    from conformance.witness.host_functions import forward_of

    forward = forward_of(_kernel(case), case.window or (None, None))
    batch, t, s_k, heads, kv_heads = (cute.sym_int32() for _ in range(5))
    hd, hd_v = case.head_sizes
    fake = partial(make_fake_tensor, BFloat16, divisibility=8)
    fakes = (fake((batch, t, heads, hd)), fake((batch, s_k, kv_heads, hd)), fake((batch, s_k, kv_heads, hd_v)),
             fake((batch, t, heads, hd_v)), make_fake_tensor(Float32, (batch, heads, t)))  # fmt: skip
    artifact = compile_host_function(forward, *fakes, Float32(1.0), make_fake_stream(), target=case.target)
    tensors, expected = _operands(case)
    arguments: dict[str, HostArg] = {
        name: TensorArg(name, "f32" if name == "lse" else "bf16", tuple(one.shape)) for name, one in tensors.items()
    }
    arguments |= {"scale": ScalarArg("f32", 1 / math.sqrt(hd)), "stream": StreamArg()}
    return Call((artifact.program(arguments),), tensors, expected)


def _operands(case: Attention) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors q, k, v, o and lse (o and lse all NaN), and the expected o and lse."""
    random = torch.Generator().manual_seed(case.t * 1000 + case.s_k)
    hd, hd_v = case.head_sizes

    def normal(length: int, heads: int, size: int) -> torch.Tensor:
        return torch.randn(case.batch, length, heads, size, generator=random).bfloat16()

    q, k, v = normal(case.t, case.heads, hd), normal(case.s_k, case.kv_heads, hd), normal(case.s_k, case.kv_heads, hd_v)
    o, lse = _attention(case, q, k, v)
    tensors = {"q": q, "k": k, "v": v, "o": torch.full(o.shape, math.nan, dtype=torch.bfloat16),
               "lse": torch.full(lse.shape, math.nan)}  # fmt: skip
    return tensors, {"o": o, "lse": lse}


def _cases() -> list[Attention]:
    blackwell, hopper = partial(Attention, "sm_100a"), partial(Attention, "sm_90a")
    return [
        blackwell(128, 128, 128),
        blackwell(128, 128, 512),
        blackwell(128, 200, 300, causal=True),
        blackwell(64, 128, 128),
        blackwell(64, 200, 300, causal=True),
        blackwell(96, 130, 200),
        blackwell(192, 130, 200, hd_v=128, causal=True),
        blackwell(256, 128, 256),
        blackwell(128, 200, 300, window=(100, 20)),
        blackwell(128, 512, 256, options={"use_2cta_instrs": True}),
        blackwell(256, 256, 256, causal=True, options={"use_2cta_instrs": True}),
        blackwell(128, 256, 256, causal=True, heads=3, options={"use_clc_scheduler": True}),
        blackwell(128, 200, 130, batch=3, heads=2, options={"is_static_persistent": True}),
        blackwell(64, 17, 200, causal=True, heads=8, kv_heads=2, options={"pack_gqa": True}),
        hopper(128, 128, 128),
        hopper(128, 128, 512),
        hopper(128, 200, 300, causal=True),
        hopper(64, 128, 128),
        hopper(64, 200, 300, causal=True),
        hopper(96, 130, 200),
        hopper(192, 130, 200, hd_v=128, causal=True),
        hopper(256, 130, 200),
        hopper(128, 200, 300, window=(100, 20)),
        hopper(64, 17, 200, causal=True, heads=8, kv_heads=2, options={"pack_gqa": True}),
    ]


def _witness(case: Attention) -> Witness:
    said = [f"hd={case.hd}" + (f"/{case.hd_v}" if case.hd_v else "")]
    said += ["causal"] * case.causal + ([f"window={case.window[0]},{case.window[1]}"] if case.window else [])
    said += [f"{name}={value}" for name, value in case.options.items()]
    sizes = {one.name: getattr(case, one.name) for one in fields(case)}
    shape = " ".join(f"{name}={sizes[name]}" for name in ("batch", "heads", "kv_heads", "t", "s_k"))
    kernel = "FlashAttentionForwardSm100" if case.target == "sm_100a" else "FlashAttentionForwardSm90"
    return Witness(PACKAGE, kernel, case.target, " ".join(said), shape, partial(_prepare, case))


def _prepare_split(case: Attention, splits: int) -> Call:
    tensors, expected = _operands(case)
    batch, heads, t, hd = case.batch, case.heads, case.t, case.hd
    parts = {"o_part": splits * batch * t * heads * hd * 4, "lse_part": splits * batch * heads * t * 4}
    arguments: dict[str, HostArg] = {
        **{name: TensorArg(name, "bf16", tuple(tensors[name].shape)) for name in "qkv"},
        "o": TensorArg("o_part", "f32", (splits, batch, t, heads, hd)),
        "lse": TensorArg("lse_part", "f32", (splits, batch, heads, t)),
        "scale": ScalarArg("f32", 1 / math.sqrt(hd)),
        "stream": StreamArg(),
    }
    rows, by_row = (batch, t, heads), (heads * t, 1, t)
    combining: dict[str, HostArg] = {
        "o_part": TensorArg("o_part", "f32", (splits, *rows, hd)),
        "lse_part": TensorArg("lse_part", "f32", (splits, *rows), (batch * heads * t, *by_row)),
        "o": TensorArg("o", "bf16", (*rows, hd)),
        "lse": TensorArg("lse", "f32", rows, by_row),
        "stream": StreamArg(),
    }
    forward = _split_forward(case).program(arguments, parts)
    return Call((forward, _split_combine(case, splits).program(combining)), tensors, expected)


def _split_forward(case: Attention) -> Artifact:
    import cutlass.cute as cute
    from cutlass import BFloat16, Float32
    from cutlass.cute.runtime import make_fake_stream
    from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100
    from quack.compile_utils import make_fake_tensor

    from conformance.witness.host_functions import forward_of

    kernel = FlashAttentionForwardSm100(case.hd, case.hd, is_split_kv=True, q_stage=1, is_static_persistent=False)
    splits, batch, t, s_k, heads = (cute.sym_int32() for _ in range(5))
    fake = partial(make_fake_tensor, BFloat16, divisibility=8)
    fakes = (fake((batch, t, heads, case.hd)), fake((batch, s_k, heads, case.hd)), fake((batch, s_k, heads, case.hd)))
    o_part = make_fake_tensor(Float32, (splits, batch, t, heads, case.hd), divisibility=4)
    lse_part = make_fake_tensor(Float32, (splits, batch, heads, t))
    function = forward_of(kernel, (None, None))
    return compile_host_function(function, *fakes, o_part, lse_part, Float32(1.0), make_fake_stream(), target="sm_100a")


def _split_combine(case: Attention, splits: int) -> Artifact:
    import cutlass.cute as cute
    from cutlass import BFloat16, Float32
    from cutlass.cute.runtime import make_fake_stream
    from flash_attn.cute.flash_fwd_combine import FlashAttentionForwardCombine
    from quack.compile_utils import make_fake_tensor

    from conformance.witness.host_functions import combine_of

    wide = case.hd > 64
    kernel = FlashAttentionForwardCombine(
        BFloat16, Float32, case.hd, case.heads, tile_m=8 if wide else 16, k_block_size=128 if wide else 64,
        log_max_splits=max(math.ceil(math.log2(splits)), 5 if wide else 4),
    )  # fmt: skip
    count, batch, t, heads = (cute.sym_int32() for _ in range(4))
    fakes = (
        make_fake_tensor(Float32, (count, batch, t, heads, case.hd), divisibility=4),
        make_fake_tensor(Float32, (count, batch, t, heads), leading_dim=2),
        make_fake_tensor(BFloat16, (batch, t, heads, case.hd), divisibility=4),
        make_fake_tensor(Float32, (batch, t, heads), leading_dim=1),
    )
    return compile_host_function(combine_of(kernel), *fakes, make_fake_stream(), target="sm_100a")


RAGGED = (
    "FlashAttentionForwardCombine loads the LSE of rows that exist and then reads those of its whole tile from shared "
    "memory; what it makes of the others it never stores."
)


def _split_witness(case: Attention, splits: int, known_fault: str = "") -> Witness:
    shape = f"batch={case.batch} heads={case.heads} kv_heads={case.kv_heads} t={case.t} s_k={case.s_k}"
    kernel = "FlashAttentionForwardSm100 and FlashAttentionForwardCombine"
    said = f"hd={case.hd} splits={splits}"
    return Witness(PACKAGE, kernel, case.target, said, shape, partial(_prepare_split, case, splits), known_fault)


WITNESSES = (
    *(_witness(case) for case in _cases()),
    _split_witness(Attention("sm_100a", 128, 12, 700, heads=2, kv_heads=2), 3),
    _split_witness(Attention("sm_100a", 64, 144, 300, batch=2), 2),
    _split_witness(Attention("sm_100a", 128, 17, 700, heads=2, kv_heads=2), 3, RAGGED),
)

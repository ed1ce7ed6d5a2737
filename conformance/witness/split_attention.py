"""FlashAttention-4 with the keys split among CTAs: the forward kernel for sm_100a, then the kernel that combines."""

# What is imported here comes with the extra `witness` only.
# pyright: reportMissingImports=false

from __future__ import annotations

import math
from functools import partial

from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.compile.compile import compile_host_function
from conformance.witness.flash_attention import PACKAGE, Attention, operands
from conformance.witness.witness import Call, Witness
from megamoe.contract import HostArg, ScalarArg, StreamArg, TensorArg


def _prepare(case: Attention, splits: int) -> Call:
    tensors, expected = operands(case)
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
    forward = _forward(case).program(arguments, parts)
    return Call((forward, _combine(case, splits).program(combining)), tensors, expected)


def _forward(case: Attention) -> Artifact:
    import cutlass.cute as cute
    from cutlass import BFloat16, Float32
    from cutlass.cute.runtime import make_fake_stream
    from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100
    from quack.compile_utils import make_fake_tensor

    from conformance.witness.attention_host import forward_of

    kernel = FlashAttentionForwardSm100(case.hd, case.hd, is_split_kv=True, q_stage=1, is_static_persistent=False)
    splits, batch, t, s_k, heads = (cute.sym_int32() for _ in range(5))
    fake = partial(make_fake_tensor, BFloat16, divisibility=8)
    fakes = (fake((batch, t, heads, case.hd)), fake((batch, s_k, heads, case.hd)), fake((batch, s_k, heads, case.hd)))
    o_part = make_fake_tensor(Float32, (splits, batch, t, heads, case.hd), divisibility=4)
    lse_part = make_fake_tensor(Float32, (splits, batch, heads, t))
    function = forward_of(kernel, (None, None))
    return compile_host_function(function, *fakes, o_part, lse_part, Float32(1.0), make_fake_stream(), target="sm_100a")


def _combine(case: Attention, splits: int) -> Artifact:
    import cutlass.cute as cute
    from cutlass import BFloat16, Float32
    from cutlass.cute.runtime import make_fake_stream
    from flash_attn.cute.flash_fwd_combine import FlashAttentionForwardCombine
    from quack.compile_utils import make_fake_tensor

    from conformance.witness.attention_host import combine_of

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


def _witness(case: Attention, splits: int, known_fault: str = "") -> Witness:
    shape = f"batch={case.batch} heads={case.heads} kv_heads={case.kv_heads} t={case.t} s_k={case.s_k}"
    kernel = "FlashAttentionForwardSm100 and FlashAttentionForwardCombine"
    said = f"hd={case.hd} splits={splits}"
    return Witness(PACKAGE, kernel, case.target, said, shape, partial(_prepare, case, splits), known_fault)


WITNESSES = (
    _witness(Attention("sm_100a", 128, 12, 700, heads=2, kv_heads=2), 3),
    _witness(Attention("sm_100a", 64, 144, 300, batch=2), 2),
    _witness(Attention("sm_100a", 128, 17, 700, heads=2, kv_heads=2), 3, RAGGED),
)

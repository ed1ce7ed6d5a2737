# pyright: reportMissingImports=false
"""The types that the MoE host functions are compiled for: fake tensors with run-time sizes. Imports CuTeDSL."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint8
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from backends.cutedsl.sm100_moe.kernel import Sm100Moe
from backends.cutedsl.sm100_moe.plan import UNIT_FIELDS

ALIGNMENT = 16
"""Bytes that tensors are aligned to: what TMA asks of a global address, and a 16-byte vector store."""
ATOM_BYTES = 512


def moe_signature(stage: str, cta_group: int, interleave: int) -> tuple[Callable[..., object], tuple[object, ...]]:
    """The host function of `stage` and an argument of each parameter's type, as compile_host_function takes them.

    Sizes that tensors share are one symbol, so that the compiled function refuses tensors that do not belong together.
    """
    function = Sm100Moe(cta_group, interleave).host_function(stage)
    arguments = _tensors() | _scalars()
    return function, tuple(arguments[name] for name in inspect.signature(function).parameters)


def _scalars() -> dict[str, object]:
    counts = {name: Int32(1) for name in ("num_experts", "weight_before", "max_ctas")}
    return {**counts, "clamp": Float32(1.0), "stream": make_fake_stream()}


def _tensors() -> dict[str, object]:
    def size(divisibility: int = 1) -> object:
        return cute.sym_int32(divisibility=divisibility)

    def tensor(dtype: object, *shape: object) -> object:
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=ALIGNMENT)

    tokens, topk, experts, routes = size(), size(), size(), size()
    hidden, hidden_bytes, hidden_atoms = size(128), size(64), size(2)
    intermediate, bytes_, atoms = size(128), size(64), size(2)
    rows, row_tiles = size(128), size()
    return {
        "x_codes": tensor(Uint8, tokens, hidden_bytes),
        "x_sf": tensor(Uint8, size(), hidden_atoms, ATOM_BYTES),
        "x_gs": tensor(Float32, tokens),
        "w1_codes": tensor(Uint8, experts, size(256), hidden_bytes),
        "w1_sf": tensor(Uint8, experts, size(2), hidden_atoms, ATOM_BYTES),
        "w1_gs": tensor(Float32, experts),
        "w2_codes": tensor(Uint8, experts, hidden, bytes_),
        "w2_sf": tensor(Uint8, experts, size(), atoms, ATOM_BYTES),
        "w2_gs": tensor(Float32, experts),
        "h": tensor(Float32, rows, intermediate),
        "a2_gs": tensor(Float32, experts),
        "topk_ids": tensor(Int32, tokens, topk),
        "topk_weights": tensor(Float32, tokens, topk),
        "row_of_route": tensor(Int32, routes),
        "route_of_row": tensor(Int32, rows),
        "units": tensor(Int32, size(), UNIT_FIELDS),
        "a1_codes": tensor(Uint8, rows, hidden_bytes),
        "a1_sf": tensor(Uint8, row_tiles, hidden_atoms, ATOM_BYTES),
        "a2_codes": tensor(Uint8, rows, bytes_),
        "a2_sf": tensor(Uint8, row_tiles, atoms, ATOM_BYTES),
        "rows": tensor(BFloat16, rows, hidden),
        "y": tensor(BFloat16, tokens, hidden),
    }

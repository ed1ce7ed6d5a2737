"""Other people's grouped GEMMs, on NVFP4 expert weights: rows sorted by expert, with no padding between them.

Only stage `l2` is comparable. Its operands are NVFP4 numbers, and code times block scale is exact in bf16. So a W4A16
or bf16 GEMM, made for bf16 operands, computes the same products as the contract. The result is judged by the row's own
tolerance.

humming (the distribution humming-kernels): W4A16 by wgmma, NVFP4 weights in memory, bf16 activations. It takes the
contract's weights, except that block scales are in plain rows. The product of an expert's two global scales is its
second weight scale. Activations are codes times block scales, exact in bf16, sorted by expert without padding. nvcc
takes seconds to compile. The output goes to memory of our own, because a case's expert rows have padding between them.

torch-grouped-mm: torch's grouped matrix product on weights dequantised to bf16, as a model without FP4 kernels runs it.
Weights are codes times block scales, exact in bf16. Both global scales go into the activations, rounded to bf16, so
that the product is the contract's row. torch allocates the result.

All of that is prepared, not timed; `collect` copies the results to the expert rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final

from backends.peers.peer import OwnResults, Peer, Tensors
from megamoe.contract import UnsupportedError

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Case, PreparedCall

PREPARED: Final = ("a2", "a2_codes", "a2_sf", "a2_gs", "w2_codes", "w2_sf", "w2_gs", "topk_ids")
_REASONS = {
    "layer": "stage layer: it is a grouped GEMM; routing, SwiGLU, requantisation and combine are other kernels",
    "l1": "stage l1: SwiGLU and requantisation to NVFP4 are not in its epilogue, so that a time would leave them out",
    "requantise": "stage requantise: it is a GEMM",
    "combine": "stage combine: it is a GEMM",
}


@dataclass(frozen=True, slots=True)
class GemmLimits:
    """Stage l2 only."""

    def refusal(self, case: Case) -> str | None:
        """Why the peer refuses `case`; None if it takes it."""
        return _REASONS.get(str(case["stage"]))

    def serves(self) -> str:
        """The stage."""
        return "stage l2"

    def refuses(self) -> Sequence[str]:
        """Every reason that `refusal` may give."""
        return tuple(_REASONS.values())


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The routes of a case, sorted by expert. `row`: int64 [routes], the row of each route in an expert-row tensor.

    `expert`: int64 [routes]. `ends`: int64 [num_experts], the routes up to and including each expert's.
    """

    row: torch.Tensor
    expert: torch.Tensor
    ends: torch.Tensor


def expert_rows(case: Case, tensors: Tensors) -> ExpertRows:
    """The routes of `case`. UnsupportedError if there is none: a GEMM of no rows measures nothing."""
    from megamoe.codec.routing import routing

    routes = routing(case, tensors["topk_ids"])
    if not len(routes.row):
        raise UnsupportedError(f"{case.id}: no route of this case comes to this rank, so there is no row to multiply")
    counts = routes.expert.bincount(minlength=case.int("num_experts"))
    return ExpertRows(routes.row, routes.expert, counts.cumsum(0))


def activations(case: Case, tensors: Tensors, rows: ExpertRows) -> torch.Tensor:
    """bf16 [routes, intermediate]: the case's own, or codes times block scales, exact, without the global scale."""
    if "a2" in tensors:
        return tensors["a2"][rows.row]
    import torch

    from megamoe.codec.nvfp4 import SF_VEC_SIZE, dequantise, unswizzle_scales

    codes = tensors["a2_codes"]
    sf = unswizzle_scales(tensors["a2_sf"], len(codes), case.int("intermediate") // SF_VEC_SIZE)
    # Leave padding rows out before decoding: their scales may be NaN.
    return dequantise(codes[rows.row], sf[rows.row], dtype=torch.bfloat16)


def weight_scales(case: Case, tensors: Tensors) -> torch.Tensor:
    """uint8 [num_experts, hidden, intermediate / 16]: the block scales of w2, row after row."""
    from megamoe.codec.nvfp4 import SF_VEC_SIZE, unswizzle_scales

    return unswizzle_scales(tensors["w2_sf"], case.int("hidden"), case.int("intermediate") // SF_VEC_SIZE)


def output_scale(tensors: Tensors) -> torch.Tensor:
    """f32 [num_experts]: the factor of an accumulator."""
    return tensors["a2_gs"] * tensors["w2_gs"] if "a2_gs" in tensors else tensors["w2_gs"]


def place_rows(tensors: Tensors, rows: ExpertRows, results: Sequence[torch.Tensor]) -> None:
    """Copies bf16 [routes, hidden] to the case's expert rows; padding rows stay as they are."""
    tensors["rows"].index_copy_(0, rows.row, results[0])


_GEMM: Final = "grouped_contiguous"


def _prepare_humming(case: Case, tensors: Tensors) -> PreparedCall:
    rows = expert_rows(case, tensors)
    a = activations(case, tensors, rows)
    layer = humming_layer(tensors["w2_codes"], weight_scales(case, tensors), output_scale(tensors))
    gemm = humming_gemm(layer, a, rows.ends, case.int("hidden"))
    return OwnResults(lambda: (gemm(),), partial(place_rows, tensors, rows))


def humming_gemm(layer: torch.nn.Module, a: torch.Tensor, ends: torch.Tensor, n: int) -> Callable[[], torch.Tensor]:
    """A function that multiplies `a`, bf16 [routes, k] sorted by expert, by `layer`.

    It returns bf16 [routes, n], in the same memory each time. `ends`: int64 [num_experts], the rows up to and including
    each expert's.
    """
    import torch

    offsets = torch.nn.functional.pad(ends, (1, 0))
    y = torch.empty(len(a), n, dtype=torch.bfloat16, device=a.device)
    # A single configuration serves any number of rows. In a list each configuration has a range of rows, and the
    # launcher first looks up one row, whatever the call has. A list from one row on is dozens of kernels to compile.
    tuning = import_module("humming.tune").get_heuristics_config(layer.humming_config, shape_m=len(a), gemm_type=_GEMM)

    def gemm() -> torch.Tensor:
        layer(
            a,
            outputs=y,
            expert_layout=offsets,
            valid_shape_m=len(a),
            compute_config={"gemm_type": _GEMM},
            tuning_config=tuning,
        )
        return y

    return gemm


def humming_layer(codes: torch.Tensor, sf: torch.Tensor, scale: torch.Tensor) -> torch.nn.Module:
    """A layer of expert weights, with their bytes in the order that the kernel wants.

    `codes` uint8 [num_experts, n, k / 2]; `sf` uint8 [num_experts, n, k / 16], block scales row after row; `scale` f32
    [num_experts], the factor of an accumulator.
    """
    import torch

    # Our measurements were made with humming compiling one kernel after the other.
    os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
    experts, n, k = codes.shape[0], codes.shape[1], 2 * codes.shape[2]
    layer = (
        import_module("humming.layer")
        .HummingLayer(
            shape_n=n,
            shape_k=k,
            num_experts=experts,
            torch_dtype=torch.bfloat16,
            weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        )
        .to(codes.device)
    )
    layer.load_from_tensors({"weight": codes, "weight_scale": sf.view(torch.float8_e4m3fn), "weight_scale_2": scale})
    layer.transform()
    return layer


HUMMING: Final = Peer(
    "humming",
    "nvfp4_moe",
    ("sm_90a",),
    ("humming-kernels", "torch"),
    GemmLimits(),
    _prepare_humming,
    "HummingLayer (modelopt, nvfp4) as grouped_contiguous, with its heuristic configuration",
    prepares=PREPARED,
)


def _prepare_grouped_mm(case: Case, tensors: Tensors) -> PreparedCall:
    import torch

    from megamoe.codec.nvfp4 import dequantise

    rows = expert_rows(case, tensors)
    scale = output_scale(tensors)[rows.expert][:, None]
    a = (activations(case, tensors, rows).float() * scale).bfloat16()
    w = dequantise(tensors["w2_codes"], weight_scales(case, tensors), dtype=torch.bfloat16).transpose(-2, -1)
    ends = rows.ends.int()
    return OwnResults(lambda: (torch.ops.aten._grouped_mm(a, w, ends),), partial(place_rows, tensors, rows))


TORCH_GROUPED_MM: Final = Peer(
    "torch-grouped-mm",
    "nvfp4_moe",
    ("sm_90a", "sm_100a"),
    ("torch",),
    GemmLimits(),
    _prepare_grouped_mm,
    "torch._grouped_mm on bf16 weights",
    prepares=PREPARED,
)

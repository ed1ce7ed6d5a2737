"""NVFP4 MoE as other people's grouped GEMMs take it: rows sorted by expert, with no padding between them.

Only stage `l2` is comparable. Its operands are NVFP4 numbers, and code times block scale is exact in bf16: a W4A16 or a
bf16 GEMM computes the same products as the contract. The row's own tolerance judges the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backends.peers.peer import Tensors
from megamoe.contract import UnsupportedError

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Case

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
    """The routes of a case, sorted by expert. `row`: int64 [routes], the row of each in an expert-row tensor. `expert`:
    int64 [routes]. `ends`: int64 [num_experts], the number of routes up to and including those of each expert.
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
    """bf16 [routes, intermediate]: codes times block scales, exact, without the global scale."""
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
    return tensors["a2_gs"] * tensors["w2_gs"]


def place_rows(tensors: Tensors, rows: ExpertRows, results: Sequence[torch.Tensor]) -> None:
    """Copies bf16 [routes, hidden] to the case's expert rows; padding rows stay as they are."""
    tensors["rows"].index_copy_(0, rows.row, results[0])

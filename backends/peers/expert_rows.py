"""NVFP4 MoE as other people's grouped GEMMs take it: rows sorted by expert with no padding between them.

The comparable unit is stage `l2`. Its operands are NVFP4 numbers, and code times block scale is exact in bf16, so that
a W4A16 or a bf16 GEMM computes the very products of the contract; what is judged is the row's own tolerance.
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
    """Stage l2 and nothing else."""

    def refusal(self, case: Case) -> str | None:
        """Why the peer does not do `case`; None if it does."""
        return _REASONS.get(str(case["stage"]))

    def serves(self) -> str:
        """The stage."""
        return "stage l2"

    def refuses(self) -> Sequence[str]:
        """Every reason that `refusal` may give."""
        return tuple(_REASONS.values())


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The routes of a case. `row`: int64 [routes], where each lies in an expert-row tensor; `expert`: int64 [routes].

    `ends`: int64 [num_experts], the routes up to and including those of each expert.
    """

    row: torch.Tensor
    expert: torch.Tensor
    ends: torch.Tensor


def expert_rows(case: Case, tensors: Tensors) -> ExpertRows:
    """The routes, sorted by expert. UnsupportedError if there is none: a GEMM of no rows is not a measurement."""
    from megamoe.codec.routing import routing

    routes = routing(case, tensors["topk_ids"])
    if not len(routes.row):
        raise UnsupportedError(f"{case.id}: no route of this case comes to this rank, so there is no row to multiply")
    counts = routes.expert.bincount(minlength=case.int("num_experts"))
    return ExpertRows(routes.row, routes.expert, counts.cumsum(0))


def activations(case: Case, tensors: Tensors, rows: ExpertRows) -> torch.Tensor:
    """bf16 [routes, intermediate]: codes times block scales, exact; without the global scale."""
    import torch

    from megamoe.codec.layout import unswizzle_scales
    from megamoe.codec.nvfp4 import SF_VEC_SIZE, dequantise

    codes = tensors["a2_codes"]
    sf = unswizzle_scales(tensors["a2_sf"], len(codes), case.int("intermediate") // SF_VEC_SIZE)
    # Padding rows may hold scales that are NaN, and are left out before anything is decoded.
    return dequantise(codes[rows.row], sf[rows.row], dtype=torch.bfloat16)


def weight_scales(case: Case, tensors: Tensors) -> torch.Tensor:
    """uint8 [num_experts, hidden, intermediate / 16]: the block scales of w2, row after row."""
    from megamoe.codec.layout import unswizzle_scales
    from megamoe.codec.nvfp4 import SF_VEC_SIZE

    return unswizzle_scales(tensors["w2_sf"], case.int("hidden"), case.int("intermediate") // SF_VEC_SIZE)


def output_scale(tensors: Tensors) -> torch.Tensor:
    """f32 [num_experts]: what an accumulator is multiplied with."""
    return tensors["a2_gs"] * tensors["w2_gs"]


def place_rows(tensors: Tensors, rows: ExpertRows, results: Sequence[torch.Tensor]) -> None:
    """Results bf16 [routes, hidden] into the case's expert rows; padding rows stay as they are."""
    tensors["rows"].index_copy_(0, rows.row, results[0])

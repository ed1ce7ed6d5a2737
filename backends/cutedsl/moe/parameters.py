"""Tensors of the op as parameters of a host function, and their sizes for a case. Imports no CuTeDSL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from backends.cutedsl.compile.parameters import Parameter, TensorParameter
from backends.cutedsl.moe.layout import ATOM_BYTES, MAX_EXPERTS, SF_VEC_SIZE, TILE_M
from megamoe.contract import UnsupportedError

if TYPE_CHECKING:
    from megamoe.contract import Case

OPERANDS: Final[Mapping[str, Parameter]] = {
    "x": TensorParameter("bf16", ("tokens", "hidden")),
    "x_codes": TensorParameter("u8", ("tokens", "hidden_bytes")),
    "x_sf": TensorParameter("u8", ("token_tiles", "hidden_atoms", "atom_bytes")),
    "x_gs": TensorParameter("f32", ("tokens",)),
    "w1_codes": TensorParameter("u8", ("experts", "w1_rows", "hidden_bytes")),
    "w1_sf": TensorParameter("u8", ("experts", "w1_tiles", "hidden_atoms", "atom_bytes")),
    "w1_gs": TensorParameter("f32", ("experts",)),
    "w2_codes": TensorParameter("u8", ("experts", "hidden", "intermediate_bytes")),
    "w2_sf": TensorParameter("u8", ("experts", "w2_tiles", "intermediate_atoms", "atom_bytes")),
    "w2_gs": TensorParameter("f32", ("experts",)),
    "h": TensorParameter("f32", ("rows", "intermediate")),
    "a2_gs": TensorParameter("f32", ("experts",)),
    "topk_ids": TensorParameter("s32", ("tokens", "topk")),
    "topk_weights": TensorParameter("f32", ("tokens", "topk")),
    "row_of_route": TensorParameter("s32", ("routes",)),
    "route_of_row": TensorParameter("s32", ("rows",)),
}
"""Inputs of a layer, as in specs/nvfp4_moe.yaml, and the maps between routes and rows."""
RESULTS: Final[Mapping[str, Parameter]] = {
    "a2_codes": TensorParameter("u8", ("rows", "intermediate_bytes")),
    "a2_sf": TensorParameter("u8", ("row_tiles", "intermediate_atoms", "atom_bytes")),
    "a2": TensorParameter("bf16", ("rows", "intermediate")),
    "rows": TensorParameter("bf16", ("rows", "hidden")),
    "y": TensorParameter("bf16", ("tokens", "hidden")),
}
"""Outputs of its stages."""
CONSTANTS: Final = {"atom_bytes": ATOM_BYTES}
DIVISORS: Final = {
    **dict.fromkeys(("hidden", "intermediate", "rows"), TILE_M),
    **dict.fromkeys(("hidden_bytes", "intermediate_bytes"), TILE_M // 2),
    **dict.fromkeys(("hidden_atoms", "intermediate_atoms", "w1_tiles"), 2),
    "w1_rows": 2 * TILE_M,
}
"""Divisors of run-time sizes that the kernels rely on."""


def experts_of(case: Case) -> int:
    """The number of experts of a case. UnsupportedError if there are more than the routing kernels count."""
    experts = case.int("num_experts")
    if experts > MAX_EXPERTS:
        raise UnsupportedError(
            f"{case.id}: {experts} experts; the routing kernel of cutedsl counts {MAX_EXPERTS} at most"
        )
    return experts


def sizes_of(case: Case) -> dict[str, int]:
    """All dimensions of OPERANDS and RESULTS for one case."""
    tokens, topk, experts = case.int("tokens"), case.int("topk"), case.int("num_experts")
    hidden, intermediate = case.int("hidden"), case.int("intermediate")
    row_tiles = (tokens * topk + (TILE_M - 1) * experts) // TILE_M
    atom_columns = 4 * SF_VEC_SIZE
    return {
        **CONSTANTS,
        "tokens": tokens,
        "topk": topk,
        "experts": experts,
        "routes": tokens * topk,
        "token_tiles": -(-tokens // TILE_M),
        "row_tiles": row_tiles,
        "rows": row_tiles * TILE_M,
        "hidden": hidden,
        "hidden_bytes": hidden // 2,
        "hidden_atoms": hidden // atom_columns,
        "intermediate": intermediate,
        "intermediate_bytes": intermediate // 2,
        "intermediate_atoms": intermediate // atom_columns,
        "w1_rows": 2 * intermediate,
        "w1_tiles": 2 * intermediate // TILE_M,
        "w2_tiles": hidden // TILE_M,
    }

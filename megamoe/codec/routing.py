"""Routing of NVFP4 MoE: which choice of which token is which expert row.

A route is a pair (token t, choice k) whose id names an expert of this rank; its number is t * topk + k. Expert rows are
the routes sorted by expert and, within an expert, by number. Each expert begins at a multiple of 128. The rows between
an expert's last route and the next expert, and after the last expert, are padding. An id of -1 is a route to an expert
of another rank (EP): it has no row and adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from megamoe.contract import Case

ROWS_PER_TILE: Final = 128
EP_RANKS: Final = 8
"""Ranks in the EP group of `load=slice`: 384 experts on 8 ranks are 48 per rank, 256 are 32."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The routes, in row order.

    `row`, `token`, `choice`, `expert`: int64 [routes]. `capacity`: the number of rows in every tensor of expert rows.
    """

    row: torch.Tensor
    token: torch.Tensor
    choice: torch.Tensor
    expert: torch.Tensor
    capacity: int

    def experts(self) -> list[tuple[int, slice]]:
        """Each expert that has a route, with the slice of its entries."""
        found, counts = torch.unique_consecutive(self.expert, return_counts=True)
        ends = counts.cumsum(0)
        spans = zip(found.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
        return [(expert, slice(start, end)) for expert, start, end in spans]


def expert_rows(case: Case) -> int:
    """The number of rows in every tensor of expert rows: enough for any routing."""
    routes = case.int("tokens") * case.int("topk")
    return (routes + (ROWS_PER_TILE - 1) * case.int("num_experts")) // ROWS_PER_TILE * ROWS_PER_TILE


def expected_routes(case: Case) -> int:
    """The number of routes to this rank that a caller can know in advance. For a slice: all routes to shared experts,
    and an equal share of the others."""
    tokens, shared = case.int("tokens"), case.int("shared")
    routes = tokens * (case.int("topk") - shared)
    return tokens * shared + (-(-routes // EP_RANKS) if case["load"] == "slice" else routes)


def routing(case: Case, topk_ids: torch.Tensor) -> Routing:
    """The routing of topk_ids [tokens, topk]."""
    ids = topk_ids.flatten().long()
    here = (ids >= 0).nonzero().flatten()
    order = here[torch.argsort(ids[here], stable=True)]
    expert, topk = ids[order], case.int("topk")
    counts = torch.bincount(expert, minlength=case.int("num_experts"))
    padded = (counts + ROWS_PER_TILE - 1) // ROWS_PER_TILE * ROWS_PER_TILE
    first_row, first_entry = padded.cumsum(0) - padded, counts.cumsum(0) - counts
    row = first_row[expert] + torch.arange(len(order), device=ids.device) - first_entry[expert]
    return Routing(row, order // topk, order % topk, expert, expert_rows(case))

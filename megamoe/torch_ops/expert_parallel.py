"""ExpertParallelMoe: megamoe.moe with the experts of a layer split over the ranks of a process group.

    layer = megamoe.ExpertParallelMoe(weights_of_this_rank, capacity=256)
    y = layer(x, topk_ids, topk_weights)

A token is sent once to each rank that has one of its experts, in a slot of a fixed-size buffer. No rank needs to know
how many tokens another sends: one all-to-all there, one back. The returned sums are added in rank order. A token that
finds no slot is an error on every rank; it is never dropped silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from megamoe.contract.counted import counted
from megamoe.torch_ops.calls import refuse_derivatives, require_one_device
from megamoe.torch_ops.moe import TENSORS, MoeWeights, moe

HEADER_BYTES = 16
"""Header that a rank sends to each other rank: the rank that it has most tokens for, and how many, both int32."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tokens of this rank go. `capacity`: places per rank.

    `place` int64 [tokens, ranks]: the token's index among the ranks * capacity places; ranks * capacity if it has none.
    `token` int64 [ranks * capacity]: the token in each place; the number of tokens if the place is empty. `counts`
    int64 [ranks]: tokens for each rank, which may exceed `capacity`.
    """

    place: torch.Tensor
    token: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, rank_of_choice: torch.Tensor, ranks: int, capacity: int) -> Places:
        """`rank_of_choice` int64 [tokens, topk]: the rank of each of a token's experts, -1 for none. Does not wait for
        the device."""
        device, tokens = rank_of_choice.device, len(rank_of_choice)
        wanted = (rank_of_choice[:, :, None] == torch.arange(ranks, device=device)).any(dim=1)
        turn = wanted.cumsum(dim=0) - 1
        nowhere = ranks * capacity
        first = capacity * torch.arange(ranks, device=device)
        place = torch.where(wanted & (turn < capacity), first + turn, nowhere)
        token = torch.full((nowhere + 1,), tokens, device=device)
        numbers = torch.arange(tokens, device=device)[:, None].expand(-1, ranks)
        token.scatter_(0, place.flatten(), numbers.flatten())
        return cls(place, token[:-1], wanted.sum(dim=0))

    def combined(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum of the rows returned for each token, accumulated in f32 in rank order, as bf16 [tokens, hidden].

        `rows` bf16 [ranks * capacity, hidden].
        """
        whole = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
        total = whole.new_zeros(len(self.place), rows.shape[1], dtype=torch.float32)
        for place in self.place.unbind(dim=1):
            total += whole[place]
        return total.to(rows.dtype)


class ExpertParallelMoe:
    """An NVFP4 layer whose rank r holds experts r * n to r * n + n - 1, where n = weights.num_experts on each rank."""

    def __init__(self, weights: MoeWeights, capacity: int, group: dist.ProcessGroup | None = None) -> None:
        """`capacity`: tokens that a rank may send to another one per call, the same on all ranks.

        Raises ValueError for a capacity below 1, or for shared experts, because each rank would add its own to a token.
        Raises RuntimeError before torch.distributed.init_process_group.
        """
        if not dist.is_initialized():
            raise RuntimeError("ExpertParallelMoe needs a process group: call torch.distributed.init_process_group")
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; a rank must be able to send a token")
        if weights.shared:
            raise ValueError(
                f"the weights hold {counted(weights.shared, 'shared expert')}, and each rank would "
                "add its own to a token; give "
                f"weights.experts(0, {weights.num_experts}), and add megamoe.moe of the shared ones"
            )
        self.weights, self.capacity, self.group = weights, capacity, group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._fullest = torch.zeros(self.ranks, 2, dtype=torch.int32)

    def __call__(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, clamp: float | None = None,
        weight: Literal["after", "before"] = "after", backend: str | None = None, wait: bool = True,
        activations: Literal["nvfp4", "bf16"] = "nvfp4",
    ) -> torch.Tensor:  # fmt: skip
        """Like megamoe.moe, with expert numbers over all ranks in `topk_ids`. Every rank must call it, even without
        tokens.

        What each rank adds to a token is rounded to bf16 before the sum. Raises OverflowError on every rank if one of
        them has more than `capacity` tokens for another. Without `wait` nothing waits for the device, so that a CUDA
        graph can capture the call: after an overflow y is NaN, and `raise_overflow` reports it.
        """
        refuse_derivatives("ExpertParallelMoe", (x, topk_weights, *self.weights.tensors()))
        require_one_device(TENSORS, (x, topk_ids, topk_weights, *self.weights.tensors()))
        experts = self.weights.num_experts
        here = (topk_ids >= 0) & (topk_ids < experts * self.ranks)
        rank_of_choice = torch.where(here, topk_ids // experts, -1)
        places = Places.of(rank_of_choice, self.ranks, self.capacity)
        received = self._exchanged(self._packed(places, x, topk_ids, topk_weights, rank_of_choice))
        tokens, ids, weights = self._unpacked(received, x.shape[1], min(experts, topk_ids.shape[1]))
        rows = moe(
            tokens, self.weights, ids, weights, clamp=clamp, weight=weight, backend=backend, activations=activations
        )
        y = places.combined(self._exchanged(rows.view(self.ranks, -1).view(torch.uint8)).view(x.dtype).view(rows.shape))
        overflown = (self._fullest[:, 1] > self.capacity).any()
        if wait:
            self.raise_overflow()
        return torch.where(overflown, torch.nan, y)

    def raise_overflow(self) -> None:
        """Raises OverflowError, naming both ranks, if a rank had too many tokens for another in the last call.
        Waits."""
        for sender, (receiver, count) in enumerate(self._fullest.tolist()):
            if count > self.capacity:
                raise OverflowError(
                    f"rank {sender} has {counted(count, 'token')} for the experts of rank {receiver}; the capacity is "
                    f"{counted(self.capacity, 'token')} from one rank to another"
                )

    def _packed(
        self, places: Places, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
        rank_of_choice: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """u8 [ranks, bytes]: for each rank its tokens, the ids of their experts, their weights, and the header.

        A token has at most as many choices there as the rank has experts.
        """
        tokens = len(x)
        if not tokens:
            # A row without a place, so that a rank without tokens still sends what the others wait for.
            x, topk_ids, topk_weights, rank_of_choice = (
                one.new_zeros(1, one.shape[1]) for one in (x, topk_ids, topk_weights, rank_of_choice)
            )
        row = places.token.clamp(max=len(x) - 1)
        receiver = torch.arange(self.ranks, device=x.device).repeat_interleave(self.capacity)
        is_theirs = (places.token < tokens)[:, None] & (rank_of_choice[row] == receiver[:, None])
        ids = torch.where(is_theirs, topk_ids[row] - (receiver * self.weights.num_experts)[:, None], -1)
        weights = topk_weights[row].float()
        if self.weights.num_experts < ids.shape[1]:
            chosen = (ids < 0).to(torch.int8).argsort(dim=1, stable=True)[:, : self.weights.num_experts]
            ids, weights = ids.gather(1, chosen), weights.gather(1, chosen)
        count, fullest = places.counts.max(dim=0)
        header = torch.stack((fullest, count)).to(torch.int32).expand(self.ranks, 2)
        room = torch.zeros(self.ranks, HEADER_BYTES - 8, dtype=torch.uint8, device=x.device)
        parts = (x[row], ids.to(torch.int32), weights, header.contiguous())
        return torch.cat([*(part.reshape(self.ranks, -1).view(torch.uint8) for part in parts), room], dim=1)

    def _unpacked(
        self, received: torch.Tensor, hidden: int, topk: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens bf16 [ranks * capacity, hidden], ids s32 and weights f32 [ranks * capacity, topk]."""
        sizes = [2 * self.capacity * hidden, 4 * self.capacity * topk, 4 * self.capacity * topk, HEADER_BYTES]
        tokens, ids, weights, header = (part.contiguous() for part in received.split(sizes, dim=1))
        self._fullest = header.view(torch.int32)[:, :2]
        rows = self.ranks * self.capacity
        return (
            tokens.view(torch.bfloat16).view(rows, hidden),
            ids.view(torch.int32).view(rows, topk),
            weights.view(torch.float32).view(rows, topk),
        )

    def _exchanged(self, sent: torch.Tensor) -> torch.Tensor:
        """Sends row r of `sent` to rank r. Returns u8 [ranks, bytes] with the row of each rank."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received

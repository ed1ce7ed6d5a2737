"""Tokens between ranks: each goes where its experts are, comes back, and none is lost silently."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megamoe
from megamoe.torch_ops import expert_parallel
from megamoe.torch_ops.expert_parallel import Places

RANKS, EXPERTS, SIZE, TOKENS = 2, 4, 128, 2


def scaled(
    x: torch.Tensor, weights: megamoe.MoeWeights, ids: torch.Tensor, w: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Replaces megamoe.moe in the example: expert e multiplies by its a2_gs."""
    factor = torch.where(ids >= 0, weights.a2_gs[ids.clamp(min=0).long()] * w, 0.0).sum(dim=1, keepdim=True)
    return (x.float() * factor).bfloat16()


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_parallel, "moe", scaled)


@pytest.mark.parametrize("seed", range(6))
def test_each_token_has_one_place_on_each_rank_that_it_needs(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    count, topk, ranks, capacity = 9, 3, 4, 9 if seed < 4 else 3
    rank_of_choice = torch.randint(-1, ranks, (count, topk), generator=source)
    places = Places.of(rank_of_choice, ranks, capacity)
    wanted = {(token, rank) for token, chosen in enumerate(rank_of_choice.tolist()) for rank in chosen if rank >= 0}
    held = {(token, at // capacity) for at, token in enumerate(places.token.tolist()) if token < count}
    full = {rank for rank, number in enumerate(places.counts.tolist()) if number > capacity}
    assert places.counts.tolist() == [sum(rank == r for _, r in wanted) for rank in range(ranks)], "counts"
    assert held <= wanted, "a token is where none of its experts is"
    assert {rank for _, rank in wanted - held} == full, "a token has no place, and no rank is too full"
    rows = torch.randn(ranks * capacity, 8, generator=source).bfloat16()
    for token, y in enumerate(places.combined(rows)):
        mine = [at for at, one in enumerate(places.token.tolist()) if one == token]
        total = torch.zeros(8)
        for at in mine:
            total += rows[at].float()
        assert torch.equal(y, total.bfloat16()), "not the sum in the order of the ranks"


def _layer() -> tuple[megamoe.MoeWeights, torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    gate, up, down = torch.randn(3, EXPERTS, SIZE, SIZE, generator=source) / SIZE**0.5
    weights = megamoe.MoeWeights.quantised(gate, up, down, torch.arange(1.0, EXPERTS + 1))
    x = torch.randn(RANKS, TOKENS, SIZE, generator=source).bfloat16()
    ids = torch.tensor([[[0, 2], [1, 0]], [[3, 1], [2, -1]]])
    return weights, x, ids, torch.randn(ids.shape, generator=source).softmax(dim=2)


def _work(rank: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    weights, x, ids, w = _layer()
    share = EXPERTS // RANKS
    said: list[Any] = []
    with torch.inference_mode():
        for capacity in (TOKENS, 1):
            layer = megamoe.ExpertParallelMoe(weights.experts(rank * share, share), capacity)
            try:
                said.append(layer(x[rank], ids[rank], w[rank]).float().tolist())
            except OverflowError as error:
                said.append(str(error))
        said.append(layer(x[rank], ids[rank], w[rank], wait=False).isnan().all().item())
        count = TOKENS * rank
        layer = megamoe.ExpertParallelMoe(weights.experts(rank * share, share), TOKENS)
        said.append(layer(x[rank][:count], ids[rank][:count], w[rank][:count]).float().tolist())
    results.put((rank, said))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_ranks_compute_what_one_does_and_both_say_that_one_overflows(tmp_path: Path) -> None:
    weights, x, ids, w = _layer()
    share = EXPERTS // RANKS
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    processes = [fork.Process(target=_work, args=(rank, str(tmp_path), results)) for rank in range(RANKS)]
    for one in processes:
        one.start()
    found = dict(results.get(timeout=100) for _ in processes)
    for one in processes:
        one.join()
    for rank in range(RANKS):
        y, overflow, spoilt, beside_nothing = found[rank]
        assert beside_nothing == y[: TOKENS * rank], "rank 0 has no tokens, which changes what rank 1 gets"
        total = torch.zeros(TOKENS, SIZE)
        for owner in range(RANKS):
            here = ids[rank] // share == owner
            local = torch.where(here & (ids[rank] >= 0), ids[rank] - owner * share, -1)
            total += scaled(x[rank], weights.experts(owner * share, share), local, w[rank]).float()
        assert torch.equal(torch.tensor(y), total.bfloat16().float()), f"rank {rank} computes something else"
        assert overflow == (
            "rank 0 has 2 tokens for the experts of rank 0; the capacity is 1 token from one rank to another"
        ), f"rank {rank} does not say who has too many tokens"
        assert spoilt, f"rank {rank}: a call that lost a token, and does not wait, returns numbers"


def test_it_needs_a_process_group_and_a_capacity(tmp_path: Path) -> None:
    weights, *_ = _layer()
    with pytest.raises(RuntimeError, match="init_process_group"):
        megamoe.ExpertParallelMoe(weights, 4)
    with pytest.raises(ValueError, match="experts 3 to 5 of 4"):
        weights.experts(3, 3)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="capacity is 0"):
            megamoe.ExpertParallelMoe(weights, 0)
        with pytest.raises(ValueError, match=r"hold 1 shared expert, .* give weights.experts\(0, 3\)"):
            megamoe.ExpertParallelMoe(replace(weights, shared=1), 4)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.usefixtures("alone")
def test_a_derivative_is_refused_before_anything_is_sent() -> None:
    weights, x, ids, w = _layer()
    layer = megamoe.ExpertParallelMoe(weights, 4)
    for call in (
        lambda: layer(x[0].requires_grad_(), ids[0], w[0]),
        lambda: layer(x[0], ids[0], w[0].requires_grad_()),
        lambda: torch.func.jvp(lambda one: layer(one, ids[0], w[0]), (x[0].detach(),), (x[0].detach(),)),
    ):
        with pytest.raises(RuntimeError, match="ExpertParallelMoe has no backward, and no forward derivative"):
            call()
    with pytest.raises(ValueError, match="must be on one device"):
        layer(x[0].detach(), ids[0].to("meta"), w[0].detach())

"""An NVFP4 layer over the GPUs of a host against the same layer on one: python -m conformance.gpu.ranks FILE

Tokens and experts are split over the ranks; the single GPU has all of both. Writes FILE as JSON: median microseconds of
device time of a graph's replay, on the slowest rank.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

import megamoe
from conformance.gpu.operators import replay_us

EXPERTS, HIDDEN, INTERMEDIATE, TOPK = 48, 7168, 3072, 8
TOKENS = (64, 512, 4096)
REPLAYS = 15
MIN_COSINE = 0.9999


def layer(device: torch.device) -> megamoe.MoeWeights:
    """Returns the whole layer, the same on every rank."""
    torch.manual_seed(0)
    shape = (EXPERTS, INTERMEDIATE, HIDDEN)
    gate, up = (torch.randn(shape, device=device, dtype=torch.bfloat16) / HIDDEN**0.5 for _ in range(2))
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, device=device, dtype=torch.bfloat16) / INTERMEDIATE**0.5
    return megamoe.MoeWeights.quantised(gate, up, down, torch.full((EXPERTS,), 8.0, device=device))


def replayed_us(call: Callable[[], torch.Tensor]) -> float:
    """Median microseconds of a replay, after one call outside a graph. Ranks replay together."""
    call()
    torch.cuda.synchronize()
    return replay_us(call, REPLAYS, warm=3)


def measured(tokens: int, whole: megamoe.MoeWeights, mine: megamoe.MoeWeights) -> dict[str, float]:
    """Measures one size, on every rank. AssertionError if a token differs from the single GPU's result."""
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), whole.w1_gs.device
    torch.manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    ids = torch.rand(tokens, EXPERTS, device=device).topk(TOPK).indices
    w = torch.randn(tokens, TOPK, device=device).softmax(dim=1)
    part = slice(rank * tokens // ranks, (rank + 1) * tokens // ranks)
    split = megamoe.ExpertParallelMoe(mine, capacity=tokens // ranks)
    y, alone = split(x[part], ids[part], w[part]), megamoe.moe(x, whole, ids, w)
    cosine = float(torch.nn.functional.cosine_similarity(y.double(), alone[part].double()).min())
    if cosine < MIN_COSINE:
        raise AssertionError(f"rank {rank}, {tokens} tokens: a cosine of {cosine} with one GPU")
    dist.barrier()
    together = torch.tensor(replayed_us(lambda: split(x[part], ids[part], w[part], wait=False)), device=device)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    return {
        "one GPU, us": round(replayed_us(lambda: megamoe.moe(x, whole, ids, w)), 1),
        f"{ranks} GPUs, us": round(float(together), 1),
        "least cosine of a token": round(cosine, 6),
    }


def work(rank: int, ranks: int, rendezvous: str, file: str) -> None:
    """Runs one rank's process."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    whole, share = layer(torch.device("cuda", rank)), EXPERTS // ranks
    mine = whole.experts(rank * share, share)
    report: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "ranks": ranks}
    for tokens in TOKENS:
        with torch.inference_mode():
            report[f"{tokens} tokens"] = measured(tokens, whole, mine)
        if rank == 0:
            print(tokens, report[f"{tokens} tokens"], flush=True)
            Path(file).write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        count = torch.cuda.device_count()
        arguments = (count, str(Path(folder) / "rendezvous"), sys.argv[1])
        start_processes(work, arguments, nprocs=count, start_method="spawn")

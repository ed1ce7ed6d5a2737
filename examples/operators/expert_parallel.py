"""An NVFP4 layer with its experts on two processes, compared with the layer in one; the last call overflows on purpose.

On a machine with two GPUs each process has one, and NCCL carries the tokens. Otherwise gloo does, and the kernels run
in the virtual machine.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import megamoe

RANKS, EXPERTS_A_RANK, HIDDEN, INTERMEDIATE, TOKENS, TOPK = 2, 1, 128, 128, 3, 2
EXPERTS = RANKS * EXPERTS_A_RANK
GPUS = torch.cuda.device_count() >= RANKS


def layer() -> megamoe.MoeWeights:
    """A random layer, the same in every process."""
    torch.manual_seed(0)
    gate, up = torch.randn(2, EXPERTS, INTERMEDIATE, HIDDEN) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5
    return megamoe.MoeWeights.quantised(gate, up, down, torch.full((EXPERTS,), 8.0))


def choices(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tokens of a rank, their experts and weights."""
    torch.manual_seed(1 + rank)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOPK] for _ in range(TOKENS)])
    return torch.randn(TOKENS, HIDDEN).bfloat16(), ids, torch.randn(TOKENS, TOPK).softmax(dim=1)


def work(rank: int, rendezvous: str) -> None:
    """The work of one process."""
    device = f"cuda:{rank}" if GPUS else "cpu"
    if GPUS:
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    backend = "nccl" if GPUS else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    whole = layer().to(device)
    x, ids, weights = (one.to(device) for one in choices(rank))
    with torch.inference_mode():
        split = megamoe.ExpertParallelMoe(whole.experts(rank * EXPERTS_A_RANK, EXPERTS_A_RANK), capacity=TOKENS)
        y, alone = split(x, ids, weights), megamoe.moe(x, whole, ids, weights)
        # Each rank rounds its partial sum to bf16 before the addition.
        torch.testing.assert_close(y, alone, atol=2e-2, rtol=2e-2)
        try:
            megamoe.ExpertParallelMoe(split.weights, capacity=1)(x, ids, weights)
            raise AssertionError("a token was dropped without a word")
        except OverflowError as error:
            print(f"rank {rank}: as one process; and {error}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(Path(folder) / "rendezvous"),)
        mp.start_processes(work, arguments, nprocs=RANKS, start_method="spawn" if GPUS else "fork")

"""Throughput of the NVFP4 codec on one core, beside the bar of issue 4: `nox -s bench -- nvfp4`.

`extra_info` holds the bar, and MB/s of bf16 a core by wall clock and by processor time, which other processes do not
change. No test asserts a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from megamoe.codec.nvfp4 import dequantise, global_scale, quantise, swizzle_scales
from megamoe.ops import reference
from megamoe.spec.load import load_specs

ROWS, K = 6144, 7168
BAR_MB_S = 200
BF16_BYTES = 2


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    """W1 of one expert of a real layer, bf16."""
    return torch.randn(ROWS, K, generator=torch.Generator().manual_seed(0)).bfloat16()


def _timed(benchmark: BenchmarkFixture, work: Callable[[], object]) -> None:
    seconds: list[tuple[float, float]] = []

    def once() -> None:
        started, clock = time.process_time(), time.perf_counter()
        work()
        seconds.append((time.process_time() - started, time.perf_counter() - clock))

    benchmark.pedantic(once, rounds=3, iterations=1, warmup_rounds=1)
    megabytes = ROWS * K * BF16_BYTES / 1e6
    benchmark.extra_info["bar_mb_s"] = BAR_MB_S
    benchmark.extra_info["mb_s_of_processor_time"] = round(megabytes / min(busy for busy, _ in seconds))
    benchmark.extra_info["mb_s"] = round(megabytes / min(clock for _, clock in seconds))


def test_quantise(benchmark: BenchmarkFixture, weight: torch.Tensor) -> None:
    """bf16 to codes and block scales, with one global scale."""
    gs = global_scale(weight)
    _timed(benchmark, lambda: quantise(weight, gs))


def test_quantise_and_swizzle_per_token(benchmark: BenchmarkFixture, weight: torch.Tensor) -> None:
    """As for activations: first find a global scale for each row, then also swizzle the block scales."""

    def work() -> None:
        codes, sf = quantise(weight, global_scale(weight, per=1))
        assert codes.numel(), "nothing was quantised"
        swizzle_scales(sf)

    _timed(benchmark, work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "global_scale"])
def test_dequantise(benchmark: BenchmarkFixture, weight: torch.Tensor, dtype: torch.dtype, scaled: bool) -> None:
    """Codes and block scales to numbers."""
    gs = global_scale(weight)
    codes, sf = quantise(weight, gs)
    _timed(benchmark, lambda: dequantise(codes, sf, gs if scaled else None, dtype))


def test_references_of_a_real_expert(benchmark: BenchmarkFixture) -> None:
    """Inputs, oracle and simulated reference of 128 tokens through one real expert: a few seconds."""
    case = load_specs()["nvfp4_moe"].case(hidden=7168, intermediate=3072, num_experts=1, tokens=128)
    room = reference("nvfp4_moe")

    def work() -> None:
        inputs = room.make_inputs(case)
        room.oracle(case, inputs)
        room.simulated(case, inputs)

    benchmark.pedantic(work, rounds=1, iterations=1)

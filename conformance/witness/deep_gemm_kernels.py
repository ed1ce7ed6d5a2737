"""Cases of DeepGEMM's kernels: headers, instantiated as in its own host code, compiled by nvcc, through the CUDA door.

With two SMs and small blocks, rings of three stages wrap, and each CTA has two tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from conformance.witness.cutedsl_examples import CUTLASS
from conformance.witness.public import SM_COUNT, Checkout, Header, PublicCase
from megamoe.contract import Target
from megamoe.cuda_source import nvccs
from megamoe.vm import tensor_map

DEEP_GEMM = Checkout("deepseek-ai/DeepGEMM", "54e22612409371d6364144b69086735beb54e98b", "torch")
_IMPLS = "deep_gemm/include/deep_gemm/impls"
_BLOCK_K, _STAGES = 128, 3
"""Bytes of a row of a stage, and the number of stages."""
_ALONE = 128 * 1024
"""Bytes of shared memory with which a CTA has its SM alone. DeepGEMM's host takes as many stages as there is room for,
and its sm_100a kernels trap where another CTA holds the first columns of tensor memory."""
_NORMAL, _OUT = "GemmType::Normal", "cutlass::bfloat16_t"
MAX_DIFFERENCE = 1e-3
"""The limit of DeepGEMM's own tests."""


def _kernel(header: str) -> str:
    """Returns the name of a header's kernel."""
    return header.replace(".cuh", "_impl")


def _launch(
    header: Header, template: Sequence[object], args: Sequence[object], *, threads: int, smem: int, cluster: int
) -> None:
    """Launches the kernel of a header, instantiated for the arguments `template`, on SM_COUNT CTAs."""
    cutlass = CUTLASS.folder(header.folder.parent)
    if cutlass is None or not (cutlass / "include").is_dir():
        pytest.skip(f"no headers of CUTLASS are beside {DEEP_GEMM.repository}")
    if not nvccs():
        pytest.skip("nvcc is not here")
    name = _kernel(header.name)
    source = f"""#include <deep_gemm/impls/{header.name}>
using namespace deep_gemm;
void instance() {{ auto at = reinterpret_cast<void*>(&{name}<{", ".join(map(str, template))}>); }}
"""
    places = f"-I{header.folder / 'deep_gemm/include'} -I{cutlass / 'include'}"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NVCC_APPEND_FLAGS", f"-std=c++20 {places}")
        header.device.launch(source, name, SM_COUNT, threads, *args, cluster=cluster, smem=smem)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Limits 1 - 2 x.y / (x.x + y.y), the measure of DeepGEMM's tests."""
    x, y = found.double(), expected.double()
    difference = 1 - 2 * (x * y).sum() / (x * x + y * y).sum()
    assert difference < MAX_DIFFERENCE, f"one minus the cosine is {float(difference):.3g} of {MAX_DIFFERENCE}"


def _map(tensor: torch.Tensor, rows: int, swizzle: Any = "128B", dtype: str | None = None) -> object:
    """The map of a K-major operand or of an output, with boxes of `rows` rows of 128 bytes."""
    return tensor_map(tensor, (rows, _BLOCK_K // tensor.element_size()), swizzle, dtype=dtype)


def _fp8(header: Header, m: int, n: int, k: int, cluster: int) -> None:
    """A has a factor for each row and 128 columns, B for each block of 128 by 128."""
    a, b = (torch.randn(shape).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
    sfa, sfb = torch.rand(k // 128, m) + 0.5, torch.rand(n // 128, k // 128) + 0.5
    d = torch.zeros(m, n, dtype=torch.bfloat16)
    template = ("cute::UMMA::Major::K", 0, n, k, 1, 64, 128, 128, 128, 128, 128, _STAGES, 128, 128, cluster, "false",
                SM_COUNT, _NORMAL, _OUT, "epilogue::transform::EpilogueIdentity")  # fmt: skip
    maps = (_map(a, 64, dtype="u8"), _map(b, 128, dtype="u8"), _map(d, 64), tensor_map(sfa, (1, 64)))
    smem = 64 * 128 * 2 + _STAGES * (64 * 128 + 128 * 128 + 64 * 4) + 1024
    _launch(header, template, (sfb, None, m, n, k, *maps), threads=256, smem=smem, cluster=cluster)
    factors = sfb.repeat_interleave(128, 0).repeat_interleave(128, 1)
    _close(d, (a.float() * sfa.T.repeat_interleave(128, 1)) @ (b.float() * factors).T)


def _bf16(header: Header, m: int, n: int, k: int, cluster: int) -> None:
    a, b = (torch.randn(shape).bfloat16() for shape in ((m, k), (n, k)))
    d = torch.zeros(m, n, dtype=torch.bfloat16)
    major, blackwell = "cute::UMMA::Major::K", "sm100" in header.name
    if blackwell:
        template = (major, major, 0, n, k, 128, 128, 64, 1, 128, 128, 128, _STAGES, 128, 128, cluster, "false",
                    SM_COUNT, 128, "false", "false", _NORMAL, "false", _OUT, 100)  # fmt: skip
        maps = (_map(a, 128), _map(b, 128 // cluster), _map(d, 128))
        smem = max(_ALONE, 2 * 128 * 64 * 2 + _STAGES * (128 + 128 // cluster) * 64 * 2 + 1024)
    else:
        template = (major, major, 0, n, k, 1, 64, 128, 64, 128, 128, 128, _STAGES, 128, 128, cluster, "false", SM_COUNT,
                    _NORMAL, "false", _OUT)  # fmt: skip
        maps = (_map(a, 64), _map(b, 128), _map(d, 64))
        smem = 64 * 128 * 2 + _STAGES * (64 + 128) * 64 * 2 + 1024
    _launch(header, template, (None, m, n, k, *maps), threads=256, smem=smem, cluster=cluster)
    _close(d, a.float() @ b.float().T)


def _case(header: str, target: Target, driver: Any, **sizes: int) -> PublicCase:
    return PublicCase("DeepGEMM kernels", DEEP_GEMM, f"{_IMPLS}/{header}", target, _kernel(header), sizes, driver)


CASES = (
    _case("sm90_fp8_gemm_1d2d.cuh", "sm_90a", _fp8, m=128, n=256, k=1024, cluster=1),
    _case("sm90_fp8_gemm_1d2d.cuh", "sm_90a", _fp8, m=256, n=256, k=640, cluster=2),
    _case("sm90_bf16_gemm.cuh", "sm_90a", _bf16, m=128, n=256, k=448, cluster=1),
    _case("sm90_bf16_gemm.cuh", "sm_90a", _bf16, m=256, n=256, k=320, cluster=2),
    _case("sm100_bf16_gemm.cuh", "sm_100a", _bf16, m=256, n=256, k=448, cluster=1),
    _case("sm100_bf16_gemm.cuh", "sm_100a", _bf16, m=512, n=256, k=320, cluster=2),
)

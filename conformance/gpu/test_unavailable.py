"""If a program cannot run on a device, the executor says why, and the row is unsupported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from backends.gpu import executor
from megamoe.contract import Row, Target
from megamoe.judge.judge import judge

GPU = executor.EXECUTOR


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    executor._no_device.cache_clear()
    yield
    executor._no_device.cache_clear()


def _device(patch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(executor, "_found", lambda module: True)
    patch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    patch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA" in str(GPU.unavailable("sm_90a"))


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    _device(monkeypatch, (9, 0))
    monkeypatch.setattr(executor, "_found", lambda module: module != "pynvml")
    assert GPU.unavailable("sm_90a") == "the package nvidia-ml-py is not installed; the extra `gpu` of megamoe has it"


def test_no_driver_is_said_in_torchs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver\n on your system.")

    _device(monkeypatch, None)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert GPU.unavailable("sm_90a") == "torch finds no device: Found no NVIDIA driver on your system."


@pytest.mark.parametrize(
    ("capability", "target", "runs"),
    [((9, 0), "sm_90a", True), ((9, 0), "sm_100a", False), ((10, 0), "sm_100a", True), ((10, 3), "sm_100a", False)],
)
def test_a_target_needs_exactly_its_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], target: Target, runs: bool
) -> None:
    _device(monkeypatch, capability)
    reason = GPU.unavailable(target)
    assert (reason is None) == runs, reason
    assert reason is None or f"this is NVIDIA H200 with {capability[0]}.{capability[1]}" in reason


def test_its_rows_are_unsupported_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _device(monkeypatch, (8, 9))
    row = Row("fmha:hd=64,t=2,s_k=3", "conformance.fakes.broken_kernels:FAULTY", "sm_90a", "gpu", "eager")
    record = judge(row, "run-1")
    assert record.status == "unsupported"
    assert "executor gpu cannot run sm_90a here: sm_90a needs compute capability 9.0" in record.sentence

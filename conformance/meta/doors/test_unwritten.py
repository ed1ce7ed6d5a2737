"""A kernel that reads what torch.empty handed out is noticed, and nobody is blamed for memory that somebody wrote."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from conformance.meta.doors.test_vm import HEAD
from megamoe import torch_cuda
from megamoe.given import unwritten
from megamoe.vm import Device, KernelFault

COUNT = 32
COPY = f"""{HEAD}
.visible .entry copy(.param .u64 y, .param .u64 x)
{{
  .reg .u64 %rd<4>;
  .reg .u32 %r<3>;
  ld.param.u64 %rd1, [y];
  ld.param.u64 %rd2, [x];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.u64 %rd1, %rd1, %rd3;
  add.u64 %rd2, %rd2, %rd3;
  ld.global.u32 %r2, [%rd2];
  st.global.u32 [%rd1], %r2;
  ret;
}}
"""


@pytest.fixture(autouse=True)
def on_host() -> Iterator[None]:
    with torch_cuda.on_host("sm_100a"):
        yield


def _copied(x: torch.Tensor, y: torch.Tensor | None = None) -> list[str]:
    """The rules that a kernel breaks which copies COUNT words of `x`."""
    vm = Device("sm_100a", profile="lenient")
    vm.launch(COPY, "copy", 1, COUNT, torch.zeros(COUNT, device="cuda") if y is None else y, x)
    return [one.rule for one in vm.findings]


EMPTY: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(COUNT, device="cuda"),
    "empty, of two dimensions": lambda: torch.empty((2, COUNT), device="cuda"),
    "empty, of a dtype": lambda: torch.empty(COUNT * 2, device="cuda", dtype=torch.bfloat16),
    "empty, a leaf": lambda: torch.empty(COUNT, device="cuda", requires_grad=True),
    "empty_like": lambda: torch.empty_like(torch.zeros(COUNT, device="cuda")),
    "empty_strided": lambda: torch.empty_strided((4, 8), (1, 4), device="cuda"),
    "empty_permuted": lambda: torch.empty_permuted((4, 8), (1, 0), device="cuda"),
    "new_empty": lambda: torch.zeros(3, device="cuda").new_empty(COUNT),
    "new_empty_strided": lambda: torch.zeros(3, device="cuda").new_empty_strided((COUNT,), (1,)),
    "a view": lambda: torch.empty(4, COUNT, device="cuda")[2],
    "a parameter": lambda: torch.nn.Parameter(torch.empty(COUNT, device="cuda")),
    "a copy onto itself": lambda: (made := torch.empty(COUNT, device="cuda")).copy_(made),
    "of many blocks of noise": lambda: torch.empty(1 << 17, device="cuda"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_kernel_that_reads_what_nobody_wrote_is_noticed(name: str) -> None:
    x = EMPTY[name]()
    assert _copied(x) == ["uninitialised-global"]
    assert _copied(x) == ["uninitialised-global"], "a launch that only reads writes nothing"
    with pytest.raises(KernelFault, match=r"byte 0 of `argument 1`, which was not yet written"):
        Device("sm_100a").launch(COPY, "copy", 1, COUNT, torch.zeros(COUNT, device="cuda"), EMPTY["empty"]())


def _by_numpy(x: torch.Tensor) -> None:
    x.detach().numpy()[-1] = 0


def _by_a_kernel(x: torch.Tensor) -> None:
    assert not _copied(torch.zeros(COUNT, device="cuda"), x), "a kernel that stores to it is silent"


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "fill_": lambda x: x.fill_(0),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(torch.ones(COUNT, device="cuda")),
    "random_": lambda x: x.random_(),
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "one element": lambda x: x.__setitem__(5, 1.0),
    "a slice": lambda x: x[3:7].fill_(1),
    "a view of bytes": lambda x: x.view(torch.uint8)[9:10].add_(1),
    "another shape": lambda x: x.view(4, 8).t()[0].mul_(2),
    "out=": lambda x: torch.add(torch.ones(COUNT), 1, out=x),
    "arange, out=": lambda x: torch.arange(COUNT, out=x),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([1]), 3.0),
    "masked_fill_": lambda x: x.masked_fill_(torch.ones(COUNT, dtype=torch.bool), 3.0),
    "a list of tensors": lambda x: torch._foreach_zero_([x]),  # pyright: ignore[reportPrivateImportUsage]
    "initialisation": lambda x: torch.nn.init.constant_(x, 0.5),
    "data": lambda x: x.data.fill_(1),
    "numpy": _by_numpy,
    "a kernel": _by_a_kernel,
}


@pytest.mark.parametrize("name", WRITES)
def test_memory_that_somebody_wrote_is_written(name: str) -> None:
    x = torch.empty(COUNT, device="cuda")
    assert unwritten.is_unwritten(x.data_ptr(), x.nbytes), "the memory is handed out"
    WRITES[name](x)
    assert not _copied(x), f"a write by {name} goes unseen"


@pytest.mark.parametrize("size", [0, 1, 4, 7, 8, 9, 1000])
def test_only_memory_that_cannot_be_the_noise_by_chance_is_judged(size: int) -> None:
    x = torch.empty(size, dtype=torch.uint8, device="cuda")
    assert unwritten.is_unwritten(x.data_ptr(), size) == (size >= unwritten.SMALLEST)


def test_memory_is_judged_when_the_graph_is_replayed() -> None:
    x, graph = torch.empty(COUNT, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.fill_(1)
    assert _copied(x) == ["uninitialised-global"], "a capture writes to nothing"
    graph.replay()
    assert not _copied(x)


def test_an_allocation_that_follows_at_the_same_place_is_its_own() -> None:
    for _ in range(50):
        assert not _copied(torch.empty(COUNT, device="cuda").fill_(0))
        assert not _copied(torch.full((COUNT,), 2.0, device="cuda"))
    assert not _copied(torch.from_numpy(np.zeros(COUNT, np.float32)))


def test_large_and_old_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwritten, "LARGEST", 64)
    monkeypatch.setattr(unwritten, "_KEPT", 1)
    monkeypatch.setattr(unwritten, "_HANDED_OUT", OrderedDict[int, int]())
    assert not _copied(torch.empty(COUNT, device="cuda"))
    old, new = (torch.empty(16, device="cuda") for _ in range(2))
    assert [unwritten.is_unwritten(one.data_ptr(), one.nbytes) for one in (old, new)] == [False, True]

"""megamoe.torch_cuda: seeds, and allocations like a device's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megamoe import torch_cuda


@pytest.fixture
def on_host() -> Iterator[None]:
    with torch_cuda.on_host("sm_90a"):
        yield


@pytest.mark.usefixtures("on_host")
def test_a_seed_repeats_what_is_drawn() -> None:
    for seed in (torch.manual_seed, torch.cuda.manual_seed, torch.cuda.manual_seed_all):
        seed(7)
        first = torch.rand(5, device="cuda")
        seed(7)
        assert torch.equal(first, torch.rand(5, device="cuda")), f"{seed.__qualname__} does not seed"


@pytest.mark.usefixtures("on_host")
def test_allocations_are_aligned_and_keep_what_they_hold() -> None:
    made = [
        *(torch.arange(size, device="cuda") for size in range(1, 40)),
        torch.randn(3, 5, device="cuda", requires_grad=True),
        torch.empty_strided((4, 3), (1, 4), device="cuda").fill_(2),
        torch.arange(12.0).to("cuda").reshape(3, 4).t().contiguous(),
    ]
    for tensor in made:
        assert tensor.data_ptr() % torch_cuda.ALIGNMENT == 0, f"{tensor.shape} lies at {tensor.data_ptr():#x}"
    assert all(one.tolist() == list(range(size)) for size, one in enumerate(made[:39], 1)), "values were lost"
    assert made[39].requires_grad, "a leaf lost its gradient"
    assert made[40].stride() == (1, 4), "strides were lost"
    assert made[41].tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]], "a transposed copy is wrong"


@pytest.mark.usefixtures("on_host")
def test_a_tensor_that_is_given_back_stays_as_autograd_keeps_it() -> None:
    for size in range(1, 40):
        x = torch.randn(size, device="cuda", requires_grad=True)
        torch.log_softmax(x, 0).contiguous().sum().backward()
        assert x.grad is not None, "the backward pass ran"


@pytest.mark.usefixtures("on_host")
def test_a_view_stays_in_its_allocation() -> None:
    whole = torch.zeros(64, device="cuda")
    part = whole[3:9].to("cuda")
    part += 1
    assert whole.sum() == 6, "a view was moved out of its tensor"


@pytest.mark.usefixtures("on_host")
def test_a_graph_does_its_work_at_each_replay() -> None:
    x = torch.arange(4.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        doubled = 2 * x
        x += 1
        x[0] = 9
    assert x.tolist() == [0, 1, 2, 3], "a capture writes to nothing"
    for wanted in ([0, 2, 4, 6], [18, 4, 6, 8]):
        graph.replay()
        assert doubled.tolist() == wanted, "a replay begins with what lies there"
    assert x.tolist() == [9, 3, 4, 5]


@pytest.mark.usefixtures("on_host")
def test_an_event_has_a_handle_once_it_is_recorded() -> None:
    one, other = torch.cuda.Event(), torch.cuda.Event()
    assert not one.cuda_event, "torch makes an event when it is recorded first"
    one.record()
    other.record()
    handle = one.cuda_event
    one.record()
    assert handle == one.cuda_event != other.cuda_event

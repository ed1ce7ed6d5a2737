"""A Triton softmax and its tests, as they are for a GPU: nothing here knows of megamoe."""

# Without a GPU: pytest --megamoe-vm sm_100a --megamoe-schedule lazy examples/tests

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x, y, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < columns
    scores = tl.load(x + row * columns + column, mask=inside, other=-float("inf"))
    weights = tl.exp(scores - tl.max(scores, axis=0))
    tl.store(y + row * columns + column, weights / tl.sum(weights, axis=0), mask=inside)


def softmax(x):
    y = torch.empty_like(x)
    softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


@pytest.mark.parametrize("columns", [1, 100, 128, 1000])
def test_softmax(columns):
    x = torch.randn(4, columns, device="cuda")
    torch.testing.assert_close(softmax(x), torch.softmax(x, dim=1))

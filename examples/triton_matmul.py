"""A Triton matmul with TMA descriptors made on the device, under two schedules of its asynchronous copies."""

import torch
import triton
import triton.language as tl

import megamoe.triton


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pm, pn = tl.program_id(0), tl.program_id(1)
    of_a = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    of_b = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    of_c = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        sums = tl.dot(of_a.load([pm * BM, k]), of_b.load([pn * BN, k]).T, sums)
    of_c.store([pm * BM, pn * BN], sums.to(tl.float16))


M, N, K = 256, 128, 192
a, b, c = torch.randn(M, K).half(), torch.randn(N, K).half(), torch.empty(M, N).half()
for schedule in ("eager", "lazy"):
    megamoe.triton.install("sm_100a", schedule=schedule)
    matmul[(M // 128, N // 64)](a, b, c.zero_(), M, N, K, BM=128, BN=64, BK=64)
    assert torch.allclose(c.float(), a.float() @ b.float().T, atol=0.05, rtol=0.01)
print("the same under both schedules")

"""Wrong explanations in the notes of a Blackwell kernel author, from which this project started.

The notes record observations on a B200, and those hold. These explanations do not:

- "kind::f16 scales its result by 0.5." It sums the products of what lies in its operands. A of 16-bit values from
  tensor memory takes two values a column, so K = 16 is 8 columns. As far as the notes show, they put one value in each
  of 16 columns: the mma read 8 of them and as many empty upper halves (`test_no_mma_scales_by_a_half`).
- "An accumulator and operand A are addressed differently in tensor memory." There is one map, lane and column; they
  differ in how many values a column holds (the same test; test_tensor_core.py for every type).
- "For hd above 64, P must go through shared memory, as S, P and O do not fit." P may overwrite S: S is no longer
  needed, and P is half as wide (`test_p_takes_the_place_of_s`).

The notes also ask which register holds which (M, N) of a fused SwiGLU tile; the answer is in
conformance/kernels/ptx/test_moe_layer.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conformance.vm.isa.test_tensor_core import KINDS, SCHEDULES, product
from conformance.vm.kernel import assert_clean
from megamoe.contract import Row
from megamoe.explain.explain import explain
from megamoe.explain.tmem import tmem_map
from megamoe.spec.load import load_specs

K, B_VALUE = 16, 2.0


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(("a_row", "seen"), [([1.0] * K, 32.0), ([1.0, 0.0] * (K // 2), 16.0)])
def test_no_mma_scales_by_a_half(kind: str, a_row: list[float], seen: float) -> None:
    """Ones times twos over K = 16: 32.0 with two ones a column, the 16.0 of the notes with one and an empty half."""
    dtype = KINDS[kind][1]
    a, b = np.array([a_row] * 128).astype(dtype), np.full((16, K), B_VALUE).astype(dtype)
    item = replace(product(kind, 128, 16, from_tmem=True), a=a, b=b)
    cells = item.expected()
    assert (cells[:, :16].view(np.float32) == seen).all(), "the example is not that of the notes"
    assert_clean(item.kernel(), {"cells": cells}, SCHEDULES)


@pytest.mark.parametrize("hd", [128, 256, 512])
def test_p_takes_the_place_of_s(hd: int) -> None:
    """The raw-PTX attention has P in tensor memory for every hd, in columns of the S that it came from."""
    row = Row(f"fmha:hd={hd},t=4,s_k=256", "ptx", "sm_100a", "vm", "eager")
    found = explain(load_specs(None)["fmha"], row)
    assert found.violation is None
    map_ = tmem_map(found.trace.launches[0].ctas[0], found.trace.steps)
    assert map_ is not None
    columns = {name: [one.columns for one in map_.holdings if one.name == name] for name in ("S", "P")}
    assert columns["P"], "there is no P in tensor memory"
    assert all(any(s[0] <= p[0] and p[1] <= s[1] for s in columns["S"]) for p in columns["P"])

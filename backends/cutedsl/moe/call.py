"""Kernel calls in the host functions of both targets: names, grids, arguments, and the combine."""

from __future__ import annotations

from types import SimpleNamespace

import cutlass.cute as cute
from cutlass import Int32

from backends.cutedsl.moe import combine


def ceil_div(a: Int32, b: int) -> Int32:
    """a / b, rounded up."""
    return (a + b - 1) // b


def flat(mTensor: cute.Tensor) -> cute.Tensor:
    """A compact tensor viewed with rank 1."""
    return cute.make_tensor(mTensor.iterator, cute.make_layout(cute.size(mTensor)))


def named(family: str, kernel, name: str):
    """The kernel, with an entry name that begins with `family`_`name`."""
    kernel.set_name_prefix(f"{family}_{name}", remove_cutlass_symbol=True, keep_mangled_name=False)
    return kernel


def launch_combine(family: str, call: SimpleNamespace) -> None:
    """Queue the combine, y from the expert rows. `call`: the arguments of the host function by name."""
    ids, weights, topk = flat(call.topk_ids), flat(call.topk_weights), call.topk_ids.shape[1]
    kernel, weighted = named(family, combine.combine_kernel, "combine"), 1 - call.weight_before
    kernel(ids, weights, call.row_of_route, call.rows, call.y, topk, weighted).launch(
        grid=[call.y.shape[0], ceil_div(call.y.shape[1], combine.COLUMNS), 1],
        block=[combine.THREADS, 1, 1],
        stream=call.stream,
        use_pdl=True,
    )

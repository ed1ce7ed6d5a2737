"""The cost of a launch through a door beyond the machine's own launch: `python -m conformance.witness --doors`.

The record is results/doors.json, by door: the median and the largest CPU milliseconds of one thread. The kernels are
defined here because Triton reads their source and CuTeDSL the names of their module.
"""

# pyright: basic

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
import torch
import triton
import triton.language as tl
from cutlass.cute.runtime import from_dlpack

import megamoe.cutedsl
import megamoe.triton
from conformance.witness.public_record import DOORS
from megamoe.records.files import write_file
from megamoe.vm import Device

LAUNCHES = 40
_SIZE = 1000
PTX = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry twice(.param .u64 x, .param .u64 y)
{
  .reg .b32 %r<3>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd0, [x];
  ld.param.u64 %rd1, [y];
  mov.u32 %r0, %tid.x;
  mul.wide.u32 %rd2, %r0, 4;
  add.u64 %rd3, %rd0, %rd2;
  ld.global.b32 %r1, [%rd3];
  add.u32 %r2, %r1, %r1;
  add.u64 %rd3, %rd1, %rd2;
  st.global.b32 [%rd3], %r2;
  ret;
}
"""


@triton.jit
def triton_twice(x, y, size, BLOCK: tl.constexpr):
    """The kernel for Triton."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < size), mask=at < size)


@cute.kernel
def _twice(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    at = block * 128 + thread
    if at < cute.size(x):
        y[at] = x[at] + x[at]  # pyright: ignore[reportOperatorIssue]


@cute.jit
def cute_twice(x: cute.Tensor, y: cute.Tensor):
    """The function for CuTeDSL."""
    _twice(x, y).launch(grid=[cute.ceil_div(cute.size(x), 128), 1, 1], block=[128, 1, 1])


def measured() -> dict[str, dict[str, float]]:
    """Measures the three doors of kernels, by name."""
    return {"CUDA/PTX": _of_ptx(), "Triton": _of_triton(), "CuTeDSL": _of_cutedsl()}


def _beside(device: Device, call: Callable[[], object]) -> dict[str, float]:
    """CPU time of `call` without the machine's launch inside it."""
    machine: Any = device.machine._machine  # pyright: ignore[reportAttributeAccessIssue]
    own, inside, over = machine.launch, list[float](), list[float]()

    def launch(*args: Any, **named: Any) -> Any:
        begin = time.thread_time()
        try:
            return own(*args, **named)
        finally:
            inside.append(time.thread_time() - begin)

    machine.launch = launch
    try:
        for _ in range(LAUNCHES):
            begin = time.thread_time()
            call()
            over.append((time.thread_time() - begin - inside.pop()) * 1e3)
    finally:
        machine.launch = own
    return {"median_ms": round(statistics.median(over), 2), "most_ms": round(max(over[1:]), 2)}


def _of_ptx() -> dict[str, float]:
    device, x, y = Device("sm_90a"), torch.ones(128), torch.zeros(128)
    return _beside(device, lambda: device.launch(PTX, "twice", 1, 128, x, y))


def _of_triton() -> dict[str, float]:
    device = Device("sm_90a")
    megamoe.triton.install(device)
    x, y = torch.ones(_SIZE), torch.zeros(_SIZE)
    try:
        return _beside(device, lambda: triton_twice[(8,)](x, y, _SIZE, BLOCK=128))  # pyright: ignore[reportArgumentType]
    finally:
        megamoe.triton.uninstall()


def _of_cutedsl() -> dict[str, float]:
    device = megamoe.cutedsl.install("sm_90a")
    try:
        x, y = (from_dlpack(torch.ones(_SIZE), assumed_align=16) for _ in range(2))
        compiled = cute.compile(cute_twice, x, y)
        return _beside(device, lambda: compiled(x, y))
    finally:
        megamoe.cutedsl.uninstall()


def renew() -> None:
    """Measures and writes the record."""
    write_file(DOORS, json.dumps(measured(), indent=1) + "\n", "the record of the doors")

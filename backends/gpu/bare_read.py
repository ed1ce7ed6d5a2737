"""How long a kernel takes that only reads a given number of bytes: the floor for a memory-bound kernel.

Measured cold, like the rows: 16-byte loads, eight in flight per thread, at the best of three grids.
"""

from __future__ import annotations

import statistics
from functools import cache
from typing import TYPE_CHECKING, Final

from backends.gpu.stopwatch import DeviceStopwatch
from megamoe.contract import BufferArg, Launch, Program, RunOptions, ScalarArg

if TYPE_CHECKING:
    from megamoe.contract import Flush, Target, TimedExecutor

THREADS: Final = 512
CTAS_PER_SM: Final = (1, 2, 4)
UNROLL: Final = 8
VECTOR: Final = 16
SAMPLES: Final = 25
MAX_BYTES: Final = 4 << 30
_LOADS = "\n".join(
    f"    ld.global.nc.v4.b32 {{%x{4 * i}, %x{4 * i + 1}, %x{4 * i + 2}, %x{4 * i + 3}}}, [%at{i}];\n"
    f"    add.s64 %at{i + 1}, %at{i}, %stride;"
    for i in range(UNROLL)
)
_XORS = "\n".join(f"    xor.b32 %sum, %sum, %x{i};" for i in range(4 * UNROLL))
_TEXT = f"""
.visible .entry bare_read(.param .u64 source, .param .u64 sink, .param .u32 steps)
{{
    .reg .pred %more, %odd;
    .reg .b32 %thread, %threads, %block, %blocks, %sum, %left, %x<{4 * UNROLL}>;
    .reg .b64 %stride, %sink, %at<{UNROLL + 1}>;
    ld.param.u64 %at0, [source];
    ld.param.u64 %sink, [sink];
    ld.param.u32 %left, [steps];
    mov.u32 %thread, %tid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %blocks, %nctaid.x;
    mad.lo.u32 %thread, %block, %threads, %thread;
    mul.lo.u32 %blocks, %blocks, %threads;
    mul.wide.u32 %stride, %blocks, {VECTOR};
    mad.wide.u32 %at0, %thread, {VECTOR}, %at0;
    mov.b32 %sum, 0;
again:
{_LOADS}
    mov.b64 %at0, %at{UNROLL};
{_XORS}
    sub.u32 %left, %left, 1;
    setp.ne.u32 %more, %left, 0;
    @%more bra again;
    setp.eq.u32 %odd, %sum, 1;
    @%odd st.global.u32 [%sink], %sum;
    ret;
}}
"""


def bare_read_program(target: Target, size: int, ctas: int) -> Program:
    """A kernel of `ctas` CTAs that reads `size` bytes of the buffer `source`, rounded up to whole steps of all threads.

    It writes to `sink` only if the xor of the words is 1. The buffer holds zeros, so it never writes.
    """
    steps = max(1, -(-size // step_bytes(ctas)))
    args = (BufferArg("source"), BufferArg("sink"), ScalarArg("u32", steps))
    ptx = f".version 8.6\n.target {target}\n.address_size 64\n{_TEXT}"
    return Program(target, ptx, (Launch("bare_read", (ctas, 1, 1), (THREADS, 1, 1), args),))


def step_bytes(ctas: int) -> int:
    """Bytes that `ctas` CTAs read in one iteration of their loop."""
    return ctas * THREADS * UNROLL * VECTOR


@cache
def bare_read_us(executor: TimedExecutor, target: Target, size: int, flush: Flush) -> float | None:
    """Median microseconds to read `size` bytes cold at the best grid; None above MAX_BYTES."""
    import torch

    if size > MAX_BYTES:
        return None
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    grids = [sms * ctas for ctas in CTAS_PER_SM]
    room = max(-(-size // step_bytes(ctas)) * step_bytes(ctas) for ctas in grids)
    tensors = {
        "source": torch.zeros(max(room, 1) // 4, dtype=torch.int32, device="cuda"),
        "sink": torch.zeros(1, dtype=torch.int32, device="cuda"),
    }
    found: list[float] = []
    for ctas in grids:
        with executor.bind(bare_read_program(target, size, ctas), tensors, RunOptions()) as call:
            found.append(statistics.median(DeviceStopwatch(call, flush=flush).samples("cold", 1, SAMPLES)))
    return min(found)

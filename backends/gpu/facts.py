"""The device as its driver describes it, its measured ceilings, and the proof that the L2 flush works."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from backends.gpu.driver import clocks, driver_version, faults_of_others
from backends.gpu.stopwatch import DeviceStopwatch, flushing
from megamoe.contract import DeviceFacts, Temperature

if TYPE_CHECKING:
    from collections.abc import Callable

COPY_BYTES: Final = 2 << 30
MATMUL: Final = 8192
REPETITIONS: Final = 10
EMPTY_LAUNCHES: Final = 100
WARM_UP: Final = 3


def measured_facts() -> DeviceFacts:
    """Facts about torch's current device. Needs a second, 4 GiB and an idle device. Raises DeviceError on a fault."""
    import torch

    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    # Read before measuring: the record wants the clocks as the run found them.
    found = clocks()
    with faults_of_others("measuring the device's ceilings"):
        copy, flops, ratio = copy_bytes_per_s(), bf16_flops_per_s(), flushed_l2_ratio(properties.L2_cache_size)
        empty = empty_kernel_us()
    torch.cuda.empty_cache()
    return DeviceFacts(
        name=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        driver=driver_version(),
        toolkit=str(torch.version.cuda),
        multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        sm_clock_mhz=found.sm_mhz,
        memory_clock_mhz=found.memory_mhz,
        power_limit_w=found.power_limit_w,
        copy_bytes_per_s=copy,
        bf16_flops_per_s=flops,
        flushed_l2_ratio=ratio,
        empty_kernel_us=empty,
    )


class _Nothing:
    """A call of a kernel that ends at once: it reads the clock and waits for 0 cycles."""

    def enqueue(self) -> None:
        """Launches the kernel on torch's current stream."""
        import torch

        torch.cuda._sleep(0)  # pyright: ignore[reportPrivateUsage]

    def collect(self) -> None:
        """Does nothing: there is no result."""


def empty_kernel_us() -> dict[Temperature, float]:
    """Device time of an empty kernel, cold and hot, in microseconds, measured with the same stopwatch as the rows."""
    watch = DeviceStopwatch(_Nothing())
    cold, hot = watch.samples("cold", 1, REPETITIONS), watch.samples("hot", EMPTY_LAUNCHES, REPETITIONS)
    return {"cold": round(statistics.median(cold), 3), "hot": round(statistics.median(hot), 3)}


def copy_bytes_per_s() -> float:
    """Bytes read plus bytes written per second by a copy of COPY_BYTES (or a quarter of the free memory)."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    source = torch.empty(min(COPY_BYTES, free // 4), dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(lambda: target.copy_(source))


def bf16_flops_per_s() -> float:
    """Multiplications and additions per second in a product of two random bf16 matrices [MATMUL, MATMUL]."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(MATMUL, MATMUL, dtype=torch.bfloat16, device="cuda", generator=generator) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * MATMUL**3 / _seconds(lambda: torch.mm(a, b, out=out))


def flushed_l2_ratio(l2_bytes: int) -> float:
    """Time to read half an L2 of data after a flush, divided by the time to read it again right after."""
    import torch

    data = torch.ones(l2_bytes // 8, dtype=torch.float32, device="cuda")
    out = torch.empty((), dtype=torch.float32, device="cuda")

    def read() -> Any:
        return torch.sum(data, dim=0, out=out)

    empty_l2 = flushing("clean")

    def reread() -> None:
        empty_l2()
        read()
        read()

    return _seconds(read, empty_l2) / _seconds(read, reread)


def _seconds(timed: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """Median seconds of REPETITIONS runs, each between two events. `before` runs right before the start event and hides
    the host's launch time."""
    import torch

    before = before or timed
    times: list[float] = []
    for repetition in range(WARM_UP + REPETITIONS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        start.record()
        timed()
        end.record()
        end.synchronize()
        if repetition >= WARM_UP:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)

"""Throttling and device code on a fake driver and fake assemblers; the stopwatch on a device of known times.

The stopwatch returns device time and no host time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from backends.gpu import driver, kernels
from backends.gpu import stopwatch as module
from backends.gpu.bare_read import bare_read_program, step_bytes
from backends.gpu.stopwatch import DeviceStopwatch
from conformance.fakes.timeline import FlushedBuffer, SimulatedCall, Timeline
from megamoe.contract import (
    DeviceError,
    DeviceLostError,
    Flush,
    RunOptions,
    Temperature,
    UnsupportedError,
    assembly,
    load_executor,
)


class NotSupportedError(Exception):
    """Stands in for NVML's exception."""


class NoPermissionError(Exception):
    """Stands in for NVML's exception."""


@dataclass
class FakeNvml:
    """`mask`: reasons at this moment. `lost_ns`: counter of time lost to heat, None if the board lacks it."""

    mask: int = 0
    lost_ns: int | None = 0
    NVML_CLOCK_SM: int = 1
    NVML_CLOCK_MEM: int = 2
    NVMLError_NotSupported: type = NotSupportedError
    NVMLError_FunctionNotFound: type = NotSupportedError
    NVMLError_NoPermission: type = NoPermissionError
    mhz: dict[int, int] = field(default_factory=lambda: {1: 1980, 2: 3201})

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: object) -> int:  # noqa: N802
        return self.mask

    def nvmlDeviceGetViolationStatus(self, device: object, policy: int) -> SimpleNamespace:  # noqa: N802
        if self.lost_ns is None:
            raise NotSupportedError
        return SimpleNamespace(violationTime=self.lost_ns)

    def nvmlDeviceGetClockInfo(self, device: object, kind: int) -> int:  # noqa: N802
        return self.mhz[kind]

    def nvmlDeviceGetEnforcedPowerLimit(self, device: object) -> int:  # noqa: N802
        raise NoPermissionError


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setattr(driver, "_nvml", lambda: fake)
    monkeypatch.setattr(driver, "_handle", lambda: None)
    monkeypatch.setattr(driver, "_lost_before", {})
    return fake


def test_a_device_that_runs_as_it_can_is_not_throttled(nvml: FakeNvml) -> None:
    idle, by_request, power_cap = 0x1, 0x2, 0x4
    nvml.mask = idle | by_request | power_cap
    assert driver.throttle_reasons() is None


@pytest.mark.parametrize(("bit", "reason"), driver.REASONS.items())
def test_each_reason_has_a_name(nvml: FakeNvml, bit: int, reason: str) -> None:
    nvml.mask = bit
    assert driver.throttle_reasons() == reason


def test_time_lost_to_heat_counts_once(nvml: FakeNvml) -> None:
    nvml.lost_ns = 7_000_000
    assert driver.throttle_reasons() is None, "what was lost before the first question is nobody's"
    nvml.lost_ns = 9_500_000
    assert driver.throttle_reasons() == "2.5 ms lost to heat"
    assert driver.throttle_reasons() is None
    nvml.lost_ns = None
    assert driver.throttle_reasons() is None


def test_what_the_driver_does_not_tell_is_none(nvml: FakeNvml) -> None:
    assert driver.clocks() == driver.Clocks(sm_mhz=1980, memory_mhz=3201, power_limit_w=None)


def assembler(ptx: str, target: str) -> SimpleNamespace:
    """Refuses the empty text."""
    if not ptx:
        raise ValueError("line 1: syntax error")
    return SimpleNamespace(cubin=b"\x7fELF" + target.encode())


def missing(ptx: str, target: str) -> SimpleNamespace:
    """An assembler that is not installed."""
    raise UnsupportedError("there is no ptxas here")


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    points: list[EntryPoint] = []
    monkeypatch.setattr(assembly, "entry_points", lambda group: points)
    kernels.device_code.cache_clear()
    return points


def _point(name: str) -> EntryPoint:
    return EntryPoint(name, f"{__name__}:{name}", assembly.GROUP)


def test_the_first_assembler_that_is_here_makes_the_code(register: list[EntryPoint]) -> None:
    register += [_point("missing"), _point("assembler")]
    assert kernels.device_code("text", "sm_90a") == b"\x7fELFsm_90a"


def test_without_an_assembler_the_driver_gets_the_text(register: list[EntryPoint]) -> None:
    register.append(_point("missing"))
    assert kernels.device_code(".version 8.0", "sm_90a") == b".version 8.0\0"


def test_what_an_assembler_refuses_is_a_sentence(register: list[EntryPoint]) -> None:
    register.append(_point("assembler"))
    with pytest.raises(DeviceError, match="the assembler assembler refuses the program for sm_90a: line 1: syntax"):
        kernels.device_code("", "sm_90a")


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    line = Timeline()
    line.install(monkeypatch)
    return line


def _refuse() -> NoReturn:
    raise RuntimeError("operation not permitted when stream is capturing")


CALLS = [(5.0, 3.0), (5.0, 60.0), (5.0, 900.0), (1000.0, 3.0), (5000.0, 400.0)]


@pytest.mark.parametrize(("device_us", "host_us"), CALLS)
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("launches", [1, 7])
def test_a_sample_is_the_devices_time(
    line: Timeline, device_us: float, host_us: float, captured: bool, launches: int
) -> None:
    watch = DeviceStopwatch(SimulatedCall(line, device_us, host_us, None if captured else _refuse))
    assert watch.method == ("graph" if captured else "events")
    assert watch.sample("cold", 1) == pytest.approx(device_us), "the host's time is in a cold sample"
    assert watch.sample("hot", launches) == pytest.approx(device_us), "the host's time is in a hot sample"


def test_an_idle_device_would_have_shown_the_host(line: Timeline) -> None:
    """Plants the fault that the test above finds: without a flush in front, the stopwatch measures the wait for the
    launch."""
    call = SimulatedCall(line, 5.0, 900.0)
    watch = DeviceStopwatch(call, cold_by_graph=False)
    watch._enqueue_host_us = 0.0
    assert watch.sample("cold", 1) > 100.0


@pytest.mark.parametrize("temperature", ["cold", "hot"])
def test_samples_in_a_row_are_as_many_single_ones(line: Timeline, temperature: Temperature) -> None:
    watch = DeviceStopwatch(SimulatedCall(line, 30.0, 200.0, _refuse))
    launches = 1 if temperature == "cold" else 4
    assert watch.samples(temperature, launches, 10) == pytest.approx([30.0] * 10)


def test_work_lies_behind_the_last_sample(line: Timeline) -> None:
    watch = DeviceStopwatch(SimulatedCall(line, 30.0))
    watch.samples("cold", 1, 5)
    assert line.device > line.host, "the queue ran dry before the last sample was over"


def test_every_cold_sample_comes_after_a_flush(line: Timeline) -> None:
    watch = DeviceStopwatch(SimulatedCall(line, 5.0))
    for _ in range(3):
        before = line.flushes
        watch.sample("cold", 1)
        assert line.flushes > before


@pytest.mark.parametrize("flush", ["clean", "dirty"])
def test_a_stopwatch_empties_the_l2_as_it_says(line: Timeline, flush: Flush, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(FlushedBuffer, "zero_", lambda self: written.append("zero_"))
    watch = DeviceStopwatch(SimulatedCall(line, 5.0), flush=flush)
    watch.sample("cold", 1)
    assert watch.flush == flush
    assert bool(written) == (flush == "dirty"), f"a {flush} flush wrote its buffer {len(written)} times"


@pytest.mark.parametrize("word", [0, 1, 3 * 512 * 32 - 1, 3 * 512 * 32, 2 * 3 * 512 * 32 - 1])
def test_a_bare_read_reads_every_word(word: int) -> None:
    """Two steps of three CTAs read it. The only nonzero word shows in the sink, wherever it is."""
    size = 2 * step_bytes(3)
    tensors = {"source": torch.zeros(size // 4, dtype=torch.int32), "sink": torch.zeros(1, dtype=torch.int32)}
    tensors["source"][word] = 1
    execution = load_executor("vm").run(bare_read_program("sm_90a", size, 3), tensors, RunOptions())
    assert execution.violation is None, execution.violation
    assert int(tensors["sink"][0]) == 1, f"word {word} of {size // 4} was not read"


def test_a_fault_while_capturing_is_no_refusal(line: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "lost_to", lambda: "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access)")
    with pytest.raises(DeviceLostError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        DeviceStopwatch(SimulatedCall(line, 5.0, refuses=_refuse))
    monkeypatch.setattr(DeviceLostError, "met", None)

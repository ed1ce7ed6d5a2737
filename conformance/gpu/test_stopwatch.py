"""The stopwatch on a simulated device of known times: it returns device time and no host time."""

from __future__ import annotations

from typing import NoReturn

import pytest

from backends.gpu import stopwatch as module
from backends.gpu.stopwatch import DeviceStopwatch
from conformance.fakes.timeline import SimulatedCall, Timeline
from megamoe.contract import DeviceLostError, Temperature


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
    """The fault that the law above finds: without a flush in front, the stopwatch measures the wait for the launch."""
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


def test_a_fault_while_capturing_is_no_refusal(line: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "lost_to", lambda: "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access)")
    with pytest.raises(DeviceLostError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        DeviceStopwatch(SimulatedCall(line, 5.0, refuses=_refuse))
    monkeypatch.setattr(DeviceLostError, "met", None)

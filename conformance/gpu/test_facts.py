"""Throttling and device code, on a fake driver and fake assemblers."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from backends.gpu import clocks, kernels
from megamoe.contract import DeviceError, UnsupportedError, assembly


class NotSupportedError(Exception):
    """NVML's."""


class NoPermissionError(Exception):
    """NVML's."""


@dataclass
class FakeNvml:
    """`mask`: reasons at this moment. `lost_ns`: counter of time lost to heat, None for a board without it."""

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
    monkeypatch.setattr(clocks, "_nvml", lambda: fake)
    monkeypatch.setattr(clocks, "_handle", lambda: None)
    monkeypatch.setattr(clocks, "_lost_before", {})
    return fake


def test_a_device_that_runs_as_it_can_is_not_throttled(nvml: FakeNvml) -> None:
    idle, by_request, power_cap = 0x1, 0x2, 0x4
    nvml.mask = idle | by_request | power_cap
    assert clocks.throttle_reasons() is None


@pytest.mark.parametrize(("bit", "reason"), clocks.REASONS.items())
def test_each_reason_has_a_name(nvml: FakeNvml, bit: int, reason: str) -> None:
    nvml.mask = bit
    assert clocks.throttle_reasons() == reason


def test_time_lost_to_heat_counts_once(nvml: FakeNvml) -> None:
    nvml.lost_ns = 7_000_000
    assert clocks.throttle_reasons() is None, "what was lost before the first question is nobody's"
    nvml.lost_ns = 9_500_000
    assert clocks.throttle_reasons() == "2.5 ms lost to heat"
    assert clocks.throttle_reasons() is None
    nvml.lost_ns = None
    assert clocks.throttle_reasons() is None


def test_what_the_driver_does_not_tell_is_none(nvml: FakeNvml) -> None:
    assert clocks.clocks() == clocks.Clocks(sm_mhz=1980, memory_mhz=3201, power_limit_w=None)


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

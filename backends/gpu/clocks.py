"""Clocks, power and throttling through NVML (nvidia-ml-py). Reads only: nothing of the device is ever set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final

from megamoe.contract import DeviceError

# Bits of nvmlDeviceGetCurrentClocksEventReasons: the device runs slower than it could. Left out: an idle device, clocks
# that somebody set, and the power cap, the board's ordinary state under a heavy kernel.
REASONS: Final = {
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
THERMAL_POLICY: Final = 1
"""NVML_PERF_POLICY_THERMAL: its counter holds the nanoseconds lost to heat since the driver was loaded."""

_lost_before: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class Clocks:
    """None where the driver does not tell."""

    sm_mhz: int | None
    memory_mhz: int | None
    power_limit_w: float | None


def clocks() -> Clocks:
    """The clocks now."""
    nvml, device = _nvml(), _handle()
    limit = _asked(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(device))
    return Clocks(
        sm_mhz=_asked(lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)),
        memory_mhz=_asked(lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM)),
        power_limit_w=None if limit is None else limit / 1000,
    )


def driver_version() -> str:
    """The driver's version, as nvidia-smi prints it."""
    return str(_nvml().nvmlSystemGetDriverVersion())


def throttle_reasons() -> str | None:
    """Why the clocks are lowered now, or how much time was lost to heat since the last call; None if neither."""
    nvml, device = _nvml(), _handle()
    mask = _asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))
    reasons = [name for bit, name in REASONS.items() if (mask or 0) & bit]
    lost = _asked(lambda: nvml.nvmlDeviceGetViolationStatus(device, THERMAL_POLICY).violationTime)
    if lost is not None:
        since = lost - _lost_before.get("thermal", lost)
        _lost_before["thermal"] = lost
        reasons += [f"{since / 1e6:g} ms lost to heat"] if since else []
    return ", ".join(reasons) or None


@cache
def _nvml() -> Any:
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise DeviceError(f"nvmlInit returned {error} while asking for the clocks") from None
    return nvml


@cache
def _handle() -> Any:
    """The NVML handle of torch's current device, found by its PCI address: NVML counts devices in its own order."""
    import torch

    nvml, properties = _nvml(), torch.cuda.get_device_properties(torch.cuda.current_device())
    address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        return nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
    except nvml.NVMLError as error:
        raise DeviceError(f"nvmlDeviceGetHandleByPciBusId returned {error} for {address}") from None


def _asked(question: Callable[[], Any]) -> Any:
    """The answer; None if this driver or board does not support the question."""
    nvml = _nvml()
    try:
        return question()
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
        return None

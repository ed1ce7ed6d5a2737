"""Calls of the CUDA driver (cuda.bindings.driver), and clocks, power and throttling read through NVML.

Every return code is checked and reported as a sentence. NVML (nvidia-ml-py) is read only: no device setting is ever
changed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final

from megamoe.contract import DeviceError, DeviceLostError

SUCCESS = 0
# CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED to _WRONG_THREAD. Not faults: the driver refuses to wait during a graph capture.
CAPTURE_ERRORS = range(900, 909)


def driver() -> Any:
    """The module cuda.bindings.driver, imported at the first call that needs it."""
    return import_module("cuda.bindings.driver")


@cache
def driver_library() -> ctypes.CDLL:
    """The driver library itself, for kernels.encoded_map, which the bindings cannot do, and for launches."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object, doing: str) -> Any:
    """Calls driver function `name` and returns its results: None, one value, or a tuple.

    Raises DeviceError with the code, its meaning and `doing`; DeviceLostError if the device no longer answers.
    """
    code, *results = getattr(driver(), name)(*arguments)
    if int(code) != SUCCESS:
        raise failure(name, code, doing)
    return (results or [None])[0] if len(results) < 2 else tuple(results)


def failure(name: str, code: Any, doing: str) -> DeviceError:
    """The exception for the `code` that `name` returned while `doing`."""
    sentence = f"{name} returned {described(code)} while {doing}"
    return DeviceError(sentence) if lost_to() is None else DeviceLostError(sentence)


def lost_to() -> str | None:
    """The fault that killed the context, or None if it is alive. A dead context answers every wait with its fault."""
    code = driver().cuCtxSynchronize()[0]
    return None if int(code) == SUCCESS or int(code) in CAPTURE_ERRORS else described(code)


@contextmanager
def faults_of_others(doing: str) -> Iterator[None]:
    """Turns a device fault raised in foreign code (torch, a peer's kernel) into a DeviceLostError."""
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:
        fault = lost_to()
        if fault is None:
            raise
        raise DeviceLostError(f"the device reports {fault} while {doing}") from error


def described(code: Any) -> str:
    """Name and meaning of a code: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)."""
    name, meaning = (_text(function, code) for function in ("cuGetErrorName", "cuGetErrorString"))
    return f"{name or f'the unknown code {int(code)}'} ({meaning or 'without a description'})"


def _text(function: str, code: Any) -> str:
    asked, text = getattr(driver(), function)(code)
    return text.decode(errors="replace") if int(asked) == SUCCESS and text else ""


# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean the device runs slower than it could. Left out: an idle
# device, clocks set by a user, and the power cap, which is the board's ordinary state under a heavy kernel.
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
    """Clocks and power limit now. A field is None where the driver does not report it."""

    sm_mhz: int | None
    memory_mhz: int | None
    power_limit_w: float | None


def clocks() -> Clocks:
    """Reads the clocks now."""
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
    """Why the clocks are lowered now, and how much time was lost to heat since the last call; None if neither."""
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
    """The NVML handle of torch's current device, found by PCI address: NVML numbers devices in its own order."""
    import torch

    nvml, properties = _nvml(), torch.cuda.get_device_properties(torch.cuda.current_device())
    address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        return nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
    except nvml.NVMLError as error:
        raise DeviceError(f"nvmlDeviceGetHandleByPciBusId returned {error} for {address}") from None


def _asked(question: Callable[[], Any]) -> Any:
    """The answer, or None if this driver or board does not support the question."""
    nvml = _nvml()
    try:
        return question()
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission):
        return None

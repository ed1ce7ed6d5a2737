"""A HostProgram on the device: its host function called with real addresses on torch's current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from backends.gpu.driver import described, driver, lost_to
from backends.gpu.host_library import FFI, runtime_library, shared_library
from backends.gpu.host_values import CUDA, FfiAny, HostValues, ffi_values, packed_values
from backends.gpu.kernels import current_stream, scratch_memory
from megamoe.contract import DeviceError, DeviceLostError

if TYPE_CHECKING:
    import torch

    from megamoe.contract import HostProgram

OBJECT_HEADER: Final = 24
"""Bytes of a TVMFFIObject, in front of an error's cell (tvm/ffi/c_api.h)."""


class _Text(ctypes.Structure):
    """TVMFFIByteArray."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class HostCall:
    """One call of a compiled host function. `enqueue` calls it; the launches it makes are its own."""

    def __init__(self, program: HostProgram, tensors: Mapping[str, torch.Tensor]) -> None:
        import torch

        self._program = program
        self._library = shared_library(program.host_object)
        self._scratch = scratch_memory(program.scratch)
        self._tensors = tensors
        self._addresses = {name: tensor.data_ptr() for name, tensor in {**tensors, **self._scratch}.items()}
        self._device = torch.cuda.current_device()
        self._values: dict[int, HostValues] = {}
        try:
            self._entry = self._library[program.entry]
        except AttributeError:
            raise DeviceError(f"the host object, compiled by {program.compiler}, has no {program.entry!r}") from None
        if program.convention == "packed":
            _start(self._library, program, self._device)

    def enqueue(self) -> None:
        """DeviceError with the function's own words if it refuses its arguments, or with the code of a CUDA call."""
        stream = current_stream()
        if self._program.convention == "packed":
            self._call_packed(stream)
        else:
            self._call_ffi(stream)

    def collect(self) -> None:
        """The kernels write to the case's tensors themselves."""

    def _call_ffi(self, stream: int) -> None:
        ffi = ctypes.CDLL(str(runtime_library(FFI)))
        if stream not in self._values:
            self._values[stream] = ffi_values(self._program.args, self._addresses, self._device, stream)
        values, result = self._values[stream], FfiAny()
        ffi.TVMFFIEnvSetStream(CUDA, self._device, ctypes.c_void_p(stream), None)
        count = len(self._program.args)
        code = self._entry(None, ctypes.byref(values.slots), ctypes.c_int32(count), ctypes.byref(result))
        if code:
            raise _failure(f"the host function of {self._program.compiler} refuses the call: {_raised(ffi)}")

    def _call_packed(self, stream: int) -> None:
        if stream not in self._values:
            self._values[stream] = packed_values(self._program.args, self._addresses, stream)
        values = self._values[stream]
        self._entry(ctypes.byref(values.slots), ctypes.c_int32(len(values.slots)))
        code = values.kept[-1]
        assert isinstance(code, ctypes.c_int32)
        if code.value:
            raise _failure(f"the host function {self._program.entry} returned {_runtime_error(code.value)}")


def _start(library: ctypes.CDLL, program: HostProgram, device: int) -> None:
    """What the generated header does before the first call: load the library, then its kernels on the device."""
    prefix, found, _ = program.entry.partition("__mlir_ciface_")
    if not found:
        raise DeviceError(f"the entry {program.entry!r} is not of the packed convention: PREFIX__mlir_ciface_NAME")
    handle, number, code = ctypes.c_uint64(0), ctypes.c_int32(device), ctypes.c_int32(0)
    slot = ctypes.c_uint64(ctypes.addressof(handle))
    places = {"library": ctypes.addressof(slot), "device": ctypes.addressof(number), "code": ctypes.addressof(code)}
    for step, names in (("cuda_init", ("library", "code")), ("cuda_load_to_device", ("library", "device", "code"))):
        slots = (ctypes.c_uint64 * len(names))(*(places[name] for name in names))
        library[f"{prefix}_{step}"](ctypes.byref(slots))
        if code.value:
            raise _failure(f"the host object's {step} returned {_runtime_error(code.value)}")


def _failure(sentence: str) -> DeviceError:
    fault = lost_to()
    return DeviceError(sentence) if fault is None else DeviceLostError(f"{sentence}; the device reports {fault}")


def _runtime_error(code: int) -> str:
    # Codes of the runtime and of the driver agree for all that compiled code meets (cudaError_t, CUDA 11 and later).
    try:
        return described(driver().CUresult(code))
    except ValueError:
        return f"CUDA error {code}"


def _raised(ffi: ctypes.CDLL) -> str:
    """Kind and message of the error that the last call has left behind."""
    error = ctypes.c_void_p()
    ffi.TVMFFIErrorMoveFromRaised(ctypes.byref(error))
    if not error.value:
        return "it gives no reason"
    kind, message = (_Text * 2).from_address(error.value + OBJECT_HEADER)
    said = ": ".join(ctypes.string_at(one.data, one.size).decode(errors="replace") for one in (kind, message))
    ffi.TVMFFIObjectDecRef(error)
    return said

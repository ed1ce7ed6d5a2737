"""Runtime calls about devices, libraries, kernels and errors, with the signatures of the CUDA runtime API."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

from backends.vm.host.abi import DEVICE_CUDA, HostError, copy_from
from backends.vm.host.runtime import (
    GIVEN_STREAM,
    INT,
    INVALID_VALUE,
    LIBRARY,
    POINTER,
    SIZE,
    STRING,
    SUCCESS,
    UINT,
    Runtime,
    answers,
    put_s32,
    put_u64,
)
from backends.vm.machine.special import ctas_of_sm

_IMAGES = (b"\x50\xed\x55\xba", b"\x7fELF")
_SHARED_SIZE, _MAX_THREADS, _CONST_SIZE, _LOCAL_SIZE, _MAX_DYNAMIC = 1, 0, 2, 3, 8
_NON_PORTABLE_CLUSTER = 14


@answers("_cudaGetDevice", POINTER)
def get_device(runtime: Runtime, device: int) -> None:
    """Report device 0, the only one."""
    put_s32(device, 0)


@answers("_cudaGetDeviceCount", POINTER)
def get_device_count(runtime: Runtime, count: int) -> None:
    """Report one device."""
    put_s32(count, 1)


@answers("_cuDeviceGet", POINTER, INT)
def device_get(runtime: Runtime, device: int, ordinal: int) -> int:
    """Report handle 0 for device 0."""
    put_s32(device, 0)
    return SUCCESS if ordinal == 0 else INVALID_VALUE


@answers("_cudaSetDevice", INT)
def set_device(runtime: Runtime, device: int) -> int:
    """Accept device 0 only."""
    return SUCCESS if device == 0 else INVALID_VALUE


@answers("_cudaDeviceGetAttribute", POINTER, INT, INT)
def device_get_attribute(runtime: Runtime, value: int, attribute: int, device: int) -> None:
    """Report an attribute of the device."""
    put_s32(value, runtime.device.attribute(attribute))


@answers("_cudaDeviceSynchronize")
def device_synchronize(runtime: Runtime) -> None:
    """Nothing to wait for: every launch ends before its call returns."""
    runtime.last_in = None


@answers("_cudaGetLastError")
def get_last_error(runtime: Runtime) -> int:
    """Report success: an error ends the call, so none is left to report."""
    return SUCCESS


@answers("_cudaLibraryLoadData", POINTER, POINTER, POINTER, POINTER, UINT, POINTER, POINTER, UINT)
def library_load_data(
    runtime: Runtime, library: int, image: int, jit: int, jit_values: int, jit_count: int, options: int, values: int,
    count: int,
) -> None:  # fmt: skip
    """Accept an image and ignore it: the PTX that came with the program runs."""
    magic = copy_from(image, 4, "the device code given to cudaLibraryLoadData")
    if magic not in _IMAGES:
        raise HostError(f"cudaLibraryLoadData is given an image that begins with {magic.hex()}, no fatbin and no cubin")
    put_u64(library, LIBRARY)


@answers("_cudaLibraryUnload", POINTER)
def library_unload(runtime: Runtime, library: int) -> None:
    """Do nothing: libraries hold no resources here."""


@answers("_cudaLibraryGetKernel", POINTER, POINTER, STRING)
def library_get_kernel(runtime: Runtime, kernel: int, library: int, name: bytes) -> None:
    """Report the kernel with the name of a PTX entry."""
    put_u64(kernel, runtime.kernel_handle(name.decode()))


@answers("_cuKernelGetAttribute", POINTER, INT, POINTER, INT)
def kernel_get_attribute(runtime: Runtime, value: int, attribute: int, kernel: int, device: int) -> None:
    """Report CUfunction_attribute 0, 1, 2, 3 or 8. PTX does not tell the number of registers."""
    layout = runtime.module.entry(runtime.kernel_name(kernel))
    known = {
        _MAX_THREADS: 1024,
        _SHARED_SIZE: layout.static_shared,
        _CONST_SIZE: 0,
        _LOCAL_SIZE: 0,
        _MAX_DYNAMIC: runtime.device.attribute(97) - layout.static_shared,
    }
    if attribute not in known:
        raise HostError(
            f"the host function asks for kernel attribute {attribute} (CUfunction_attribute), unknown to the VM"
        )
    put_s32(value, known[attribute])


@answers("_cudaFuncSetAttribute", POINTER, INT, INT)
def func_set_attribute(runtime: Runtime, kernel: int, attribute: int, value: int) -> int:
    """Opt in to more than 48 KiB of shared memory or to clusters of more than 8 CTAs. Other attributes are hints."""
    entry = runtime.kernel_name(kernel)
    if attribute == _MAX_DYNAMIC:
        if value > runtime.device.attribute(97) - runtime.module.entry(entry).static_shared:
            return INVALID_VALUE
        runtime.dynamic_smem_limit[entry] = value
    elif attribute == _NON_PORTABLE_CLUSTER and value:
        runtime.large_clusters.add(entry)
    return SUCCESS


@answers("_cudaKernelSetAttributeForDevice", POINTER, INT, INT, INT)
def kernel_set_attribute(runtime: Runtime, kernel: int, attribute: int, value: int, device: int) -> int | None:
    """As cudaFuncSetAttribute."""
    return func_set_attribute(runtime, kernel, attribute, value)


@answers("_cudaOccupancyMaxActiveBlocksPerMultiprocessor", POINTER, POINTER, INT, SIZE)
def occupancy(runtime: Runtime, count: int, kernel: int, threads: int, dynamic_smem: int) -> None:
    """Report how many CTAs an SM holds, by threads and shared memory."""
    static = runtime.module.entry(runtime.kernel_name(kernel)).static_shared
    put_s32(count, ctas_of_sm(threads, static + dynamic_smem))


@answers("cuda_dialect_init_library_once", POINTER, POINTER, POINTER, POINTER)
def init_library_once(runtime: Runtime, state: int, init: int, load_to_device: int, set_error: int) -> int:
    """Start a TVM FFI function of CuTeDSL lazily: `init(&library)`, then `load_to_device(&library, device)`."""
    slot = ctypes.c_uint64.from_address(state)
    if slot.value:
        return SUCCESS
    library = ctypes.c_uint64(0)
    code = _call(init, ctypes.addressof(library)) or (
        _call(load_to_device, ctypes.addressof(library), 0) if load_to_device else SUCCESS
    )
    if runtime.broken is None and code:
        raise HostError(f"the host object's start-up returned CUDA error {code}")
    slot.value = library.value
    return code


@answers("cuda_dialect_unload_library_once", POINTER, result=None)
def unload_library_once(runtime: Runtime, state: int) -> None:
    """Do nothing: libraries hold no resources here."""


def _call(function: int, *arguments: int) -> int:
    types = [ctypes.c_uint64, ctypes.c_int][: len(arguments)]
    prototype: Callable[[int], Callable[..., int]] = ctypes.CFUNCTYPE(ctypes.c_int, *types)
    return prototype(function)(*arguments)


# Runtime calls that report an error of compiled code, and the stream for TVM FFI functions.


_LONGEST = 4096


@answers("TVMFFIErrorSetRaisedFromCStr", STRING, STRING, result=None)
def set_raised(runtime: Runtime, kind: bytes, message: bytes) -> None:
    """Note that the host function refuses its arguments."""
    runtime.refusal = f"{_text(kind)}: {_text(message)}"


@answers("TVMFFIErrorSetRaisedFromCStrParts", STRING, POINTER, INT, result=None)
def set_raised_from_parts(runtime: Runtime, kind: bytes, parts: int, count: int) -> None:
    """As set_raised, with the message in pieces."""
    pointers = struct.unpack(f"<{count}Q", copy_from(parts, 8 * count, "the parts of an error message"))
    runtime.refusal = f"{_text(kind)}: {''.join(_string(pointer) for pointer in pointers if pointer)}"


@answers("TVMFFIEnvGetStream", INT, INT, result=POINTER)
def env_get_stream(runtime: Runtime, device_type: int, device: int) -> int:
    """The stream of the caller's environment."""
    if device_type != DEVICE_CUDA:
        raise HostError(
            f"the host function asks for a stream of device type {device_type}, where only CUDA's ({DEVICE_CUDA}) exist"
        )
    return GIVEN_STREAM


@answers("CuteDSLRT_TVMFFISetRaisedCudaError", POINTER, INT, result=None)
def set_raised_cuda_error(runtime: Runtime, set_error: int, code: int) -> None:
    """Note that a runtime call has failed."""
    runtime.refusal = f"CUDA error {code}"


@answers(
    "CuteDSLRT_TVMFFISetRaisedCudaLaunchError",
    POINTER, INT, INT, INT, INT, INT, INT, INT, POINTER, INT, INT, INT, INT, INT, INT, INT, INT, INT, INT, STRING,
    STRING, INT, INT, INT,
    result=None,
)  # fmt: skip
def set_raised_launch_error(runtime: Runtime, set_error: int, *values: int | bytes) -> None:
    """Note that the check compiled in front of a launch has found sizes that the device does not support."""
    violation = values[18]
    runtime.refusal = (
        f"a launch of grid {values[0:3]}, block {values[3:6]} and {values[7]} bytes of dynamic smem is refused: "
        f"{_text(violation) if isinstance(violation, bytes) else violation}"
    )


@answers("cuda_dialect_assert_success", INT, result=None)
def assert_success(runtime: Runtime, code: int) -> None:
    """HostError for a nonzero code, where CuTeDSL's runtime ends the process."""
    if code:
        raise HostError(f"the host function asserts that a CUDA call has succeeded, which returned error {code}")


@answers("cuda_dialect_print_on_error", INT, result=None)
def print_on_error(runtime: Runtime, code: int) -> None:
    """As assert_success, where CuTeDSL's runtime prints the error and goes on."""
    assert_success(runtime, code)


@answers("cuda_dialect_get_error_name", INT, result=POINTER)
def get_error_name(runtime: Runtime, code: int) -> int:
    """HostError: only code that handles a CUDA error asks for its name."""
    raise HostError(f"the host function asks for the name of CUDA error {code}")


def _text(raw: bytes | None) -> str:
    return "" if raw is None else raw.decode(errors="replace")


def _string(address: int) -> str:
    pieces: list[bytes] = []
    for at in range(address, address + _LONGEST):
        one = copy_from(at, 1, "a part of an error message")
        if one == b"\0":
            break
        pieces.append(one)
    return b"".join(pieces).decode(errors="replace")

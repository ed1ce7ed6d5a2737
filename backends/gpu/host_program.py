"""A HostProgram on the device: its object linked and opened, its host function called with real addresses.

The object is linked against CuTeDSL's runtime and TVM FFI, and its function runs on torch's current stream.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backends.gpu.driver import described, driver, lost_to
from backends.gpu.host_values import CUDA, FfiAny, HostValues, ffi_values, packed_values
from backends.gpu.kernels import current_stream, scratch_memory
from megamoe.contract import DeviceError, DeviceLostError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from megamoe.contract import HostProgram

RUNTIME: Final = "libcute_dsl_runtime.so"
FFI: Final = "libtvm_ffi.so"
# The wheel for CUDA 13 first: an installation may hold both.
_DISTRIBUTIONS: Final = {
    RUNTIME: ("nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-base"),
    FFI: ("apache-tvm-ffi",),
}
LINKERS: Final = ("cc", "gcc", "clang")
MAX_LINK_SECONDS: Final = 60
OBJECT_HEADER: Final = 24
"""Bytes of the TVMFFIObject that precedes an error's cell (tvm/ffi/c_api.h)."""


class _Text(ctypes.Structure):
    """TVMFFIByteArray."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class HostCall:
    """One call of a compiled host function, which makes its own launches."""

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
        """Calls it. DeviceError with the function's own words if it refuses its arguments, or with a CUDA error."""
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
    """Loads the library, then its kernels on the device, as the generated header does before the first call."""
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
    # Runtime and driver share the codes that compiled code meets (cudaError_t, CUDA 11 and later).
    try:
        return described(driver().CUresult(code))
    except ValueError:
        return f"CUDA error {code}"


def _raised(ffi: ctypes.CDLL) -> str:
    """Kind and message of the error that the last call left behind."""
    error = ctypes.c_void_p()
    ffi.TVMFFIErrorMoveFromRaised(ctypes.byref(error))
    if not error.value:
        return "it gives no reason"
    kind, message = (_Text * 2).from_address(error.value + OBJECT_HEADER)
    said = ": ".join(ctypes.string_at(one.data, one.size).decode(errors="replace") for one in (kind, message))
    ffi.TVMFFIObjectDecRef(error)
    return said


@cache
def shared_library(host_object: bytes) -> ctypes.CDLL:
    """`host_object`, linked and opened once a process: it stays loaded on the device until the process ends.

    UnsupportedError without the libraries or a linker, DeviceError if the object cannot be linked.
    """
    linker = next((path for name in LINKERS if (path := shutil.which(name))), None)
    if linker is None:
        raise UnsupportedError(f"linking a host program needs a C compiler; none of {', '.join(LINKERS)} is on PATH")
    libraries = [runtime_library(RUNTIME), runtime_library(FFI)]
    with tempfile.TemporaryDirectory(prefix="megamoe-host-") as folder:
        source, library = Path(folder, "host.o"), Path(folder, "host.so")
        source.write_bytes(host_object)
        rpath = [f"-Wl,-rpath,{path.parent}" for path in libraries]
        command = [linker, "-shared", "-o", str(library), str(source), *map(str, libraries), *rpath]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_LINK_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise DeviceError(f"{linker} was still linking the host object after {MAX_LINK_SECONDS} s") from None
        if done.returncode:
            raise DeviceError(f"{linker} cannot link the host object (status {done.returncode}): {done.stderr.strip()}")
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:
            raise DeviceError(f"the linked host object cannot be opened: {error}") from error


@cache
def runtime_library(name: str) -> Path:
    """The path of a library that a host object calls. UnsupportedError if it is in no installed wheel."""
    for package in _DISTRIBUTIONS[name]:
        for file in _files(package):
            if file.name == name and "stubs" not in file.parts:
                return file
    raise UnsupportedError(
        f"a host program needs {name}, which none of {', '.join(_DISTRIBUTIONS[name])} has here: "
        f"install the extra `cutedsl` of megamoe"
    )


def _files(package: str) -> list[Path]:
    try:
        found: Distribution = distribution(package)
    except PackageNotFoundError:
        return []
    return [path for file in found.files or () if (path := Path(str(found.locate_file(file)))).is_file()]

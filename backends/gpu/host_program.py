"""A HostProgram on the device: links and opens its object, and calls its host function with real addresses.

The object is linked against CuTeDSL's runtime and TVM FFI, and its function runs on torch's current stream. Arguments
are TVM FFI values or pointers to packed descriptors, with the structures of TVM FFI's public C header (tvm/ffi/c_api.h)
and DLPack 1.x.

backends/vm/host (abi.py, arguments.py) declares and fills the same structures but shares no code with this file, on
purpose: if one of the two is wrong, a host program that passes in the VM fails on a device.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from backends.gpu.driver import call, described, driver, lost_to
from backends.gpu.kernels import address_of, current_stream, scalar_bytes, scratch_memory
from megamoe.contract import (
    BufferArg,
    DeviceError,
    DeviceLostError,
    HostArg,
    ScalarArg,
    ShapeArg,
    StreamArg,
    TensorArg,
    UnsupportedError,
)
from megamoe.contract.scratch import scratch_folder

if TYPE_CHECKING:
    import torch

    from megamoe.contract import HostProgram

NONE, INT, BOOL, FLOAT, POINTER, DLTENSOR, ARRAY = 0, 1, 2, 3, 4, 7, 71
CUDA: Final = 2
"""kDLCUDA"""

# dtype -> DLDataTypeCode, bits, lanes. A packed pair of 4-bit floats is one element of two lanes.
DL_TYPES: Final[Mapping[str, tuple[int, int, int]]] = {
    "s8": (0, 8, 1), "s16": (0, 16, 1), "s32": (0, 32, 1), "s64": (0, 64, 1),
    "u8": (1, 8, 1), "u16": (1, 16, 1), "u32": (1, 32, 1), "u64": (1, 64, 1),
    "f16": (2, 16, 1), "f32": (2, 32, 1), "f64": (2, 64, 1), "bf16": (4, 16, 1), "bool": (6, 8, 1),
    "e4m3": (10, 8, 1), "e5m2": (12, 8, 1), "ue8m0": (14, 8, 1), "e2m1x2": (17, 4, 2),
}  # fmt: skip


class DLTensor(ctypes.Structure):
    """DLPack's tensor: sizes and strides in elements."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Payload(ctypes.Union):
    """The value of an FfiAny; its type_index says which member."""

    _fields_ = (("integer", ctypes.c_int64), ("real", ctypes.c_double), ("pointer", ctypes.c_uint64))


class FfiAny(ctypes.Structure):
    """TVMFFIAny, 16 bytes."""

    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", Payload))


class FfiArray(ctypes.Structure):
    """TVMFFIObject (24 bytes) followed by a TVMFFISeqCell of FfiAny."""

    _fields_ = (
        ("references", ctypes.c_uint64),
        ("type_index", ctypes.c_int32),
        ("padding", ctypes.c_uint32),
        ("deleter", ctypes.c_uint64),
        ("data", ctypes.POINTER(FfiAny)),
        ("size", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("data_deleter", ctypes.c_uint64),
    )


@dataclass(slots=True)
class HostValues:
    """`slots` are the arguments of the function; `kept` keeps alive everything that their addresses point to."""

    slots: ctypes.Array[FfiAny] | ctypes.Array[ctypes.c_uint64]
    kept: list[object] = field(default_factory=list[object])


def ffi_values(args: Sequence[HostArg], addresses: Mapping[str, int], device: int, stream: int) -> HostValues:
    """One TVMFFIAny per argument; tensors become DLTensors on `device`. Raises DeviceError for a missing tensor."""
    kept: list[object] = []
    values = [_ffi(arg, addresses, device, stream, kept) for arg in args]
    return HostValues((FfiAny * max(len(values), 1))(*values), kept)


def packed_values(args: Sequence[HostArg], addresses: Mapping[str, int], stream: int) -> HostValues:
    """Pointers to descriptors as CuTeDSL's generated header declares them; the last slot points to the error code."""
    kept: list[object] = []
    for arg in args:
        kept += [ctypes.create_string_buffer(content) for content in _packed(arg, addresses, stream)]
    code = ctypes.c_int32(0)
    kept.append(code)
    places = [ctypes.addressof(one) for one in kept]  # pyright: ignore[reportArgumentType]
    return HostValues((ctypes.c_uint64 * len(places))(*places), kept)


def _ffi(arg: HostArg, addresses: Mapping[str, int], device: int, stream: int, kept: list[object]) -> FfiAny:
    match arg:
        case None:
            return FfiAny(NONE, 0)
        case TensorArg():
            tensor = _dl_tensor(arg, addresses, device, kept)
            return FfiAny(DLTENSOR, 0, Payload(pointer=ctypes.addressof(tensor)))
        case BufferArg():
            return FfiAny(POINTER, 0, Payload(pointer=address_of(arg.tensor, arg.offset, addresses)))
        case StreamArg():
            return FfiAny(POINTER, 0, Payload(pointer=stream))
        case ShapeArg():
            return FfiAny(ARRAY, 0, Payload(pointer=_array(arg.sizes, kept)))
        case ScalarArg(dtype="bool"):
            return FfiAny(BOOL, 0, Payload(integer=int(bool(arg.value))))
        case ScalarArg():
            scalar_bytes(arg)
            if arg.dtype.startswith("f"):
                return FfiAny(FLOAT, 0, Payload(real=float(arg.value)))
            return FfiAny(INT, 0, Payload(integer=int(arg.value)))


def _packed(arg: HostArg, addresses: Mapping[str, int], stream: int) -> list[bytes]:
    match arg:
        case None:
            return []
        case TensorArg():
            strides, fields = _strides(arg), arg.packed
            dims = [arg.shape[axis] for axis in fields.dims]
            steps = [strides[axis] for axis in fields.strides]
            # "@" pads between 4- and 8-byte members as the C struct does.
            form = f"@P{len(dims)}{_integer(fields.dim_bits)}{len(steps)}{_integer(fields.stride_bits)}"
            return [struct.pack(form, address_of(arg.tensor, arg.offset, addresses), *dims, *steps)]
        case BufferArg():
            return [struct.pack("<Q", address_of(arg.tensor, arg.offset, addresses))]
        case StreamArg():
            return [struct.pack("<Q", stream)]
        case ShapeArg():
            return [struct.pack(f"<{_integer(arg.bits)}", size) for size in arg.sizes]
        case ScalarArg():
            return [scalar_bytes(arg)]


def _integer(bits: int) -> str:
    return "i" if bits == 32 else "q"


def _strides(arg: TensorArg) -> tuple[int, ...]:
    if arg.strides is not None:
        return arg.strides
    strides: list[int] = []
    step = 1
    for size in reversed(arg.shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _array(sizes: Sequence[int], kept: list[object]) -> int:
    count = len(sizes)
    values = (FfiAny * max(count, 1))(*(FfiAny(INT, 0, Payload(integer=size)) for size in sizes))
    array = FfiArray(1, ARRAY, 0, 0, values, count, count, 0)
    kept += [values, array]
    return ctypes.addressof(array)


def _dl_tensor(arg: TensorArg, addresses: Mapping[str, int], device: int, kept: list[object]) -> DLTensor:
    if arg.dtype not in DL_TYPES:
        raise DeviceError(f"tensor argument {arg.tensor!r} has dtype {arg.dtype!r}; known are: {', '.join(DL_TYPES)}")
    rank = len(arg.shape)
    shape, strides = (ctypes.c_int64 * rank)(*arg.shape), (ctypes.c_int64 * rank)(*_strides(arg))
    address = address_of(arg.tensor, arg.offset, addresses)
    tensor = DLTensor(address, CUDA, device, rank, *DL_TYPES[arg.dtype], shape, strides, 0)
    kept += [shape, strides, tensor]
    return tensor


RUNTIME: Final = "libcute_dsl_runtime.so"
FFI: Final = "libtvm_ffi.so"
# CUDA 13's wheel first: an installation may hold both.
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
    """One call of a compiled host function, which does its own launches, on tensors with fixed addresses."""

    def __init__(self, program: HostProgram, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {**tensors, **scratch_memory(program, tensors)}
        self._addresses = [tensor.data_ptr() for tensor in self._tensors.values()]
        self._loaded = LoadedHost(program, tuple(self._tensors))
        if program.prepare:
            stream = current_stream()
            self._loaded.prepare(self._addresses, stream)
            call("cuStreamSynchronize", stream, doing="waiting for the preparation of the weights")

    def enqueue(self) -> None:
        """Calls the function. Raises DeviceError with its own message for refused arguments, or with a CUDA error."""
        self._loaded.launch(self._addresses, current_stream())

    def collect(self) -> None:
        """Does nothing: the kernels write to the case's tensors themselves."""


class LoadedHost:
    """A host function on torch's current device. Each call gives it the addresses to use.

    `names` are the tensors and workspaces whose addresses a call gives, in this order. Raises UnsupportedError and
    DeviceError as shared_library does, and DeviceError if the library lacks the entry.
    """

    def __init__(self, program: HostProgram, names: Sequence[str]) -> None:
        import torch

        library, device = shared_library(program.host_object), torch.cuda.current_device()
        try:
            entry = library[program.entry]
        except AttributeError:
            raise DeviceError(f"the host object, compiled by {program.compiler}, has no {program.entry!r}") from None
        if program.convention == "packed":
            _start(library, program, device)
            bound = _PackedHost(program, tuple(names), entry)
            self.prepare, self.launch = partial(bound, program.prepare), partial(bound, program.args)
        else:
            self.prepare = _FfiHost(program, program.prepare, tuple(names), entry, device).enqueue
            self.launch = _FfiHost(program, program.args, tuple(names), entry, device).enqueue


class _FfiHost:
    """TVM FFI values, built once; a call only stores addresses and the stream in them."""

    def __init__(
        self, program: HostProgram, args: Sequence[HostArg], names: Sequence[str], entry: Any, device: int
    ) -> None:
        self._ffi = ctypes.CDLL(str(runtime_library(FFI)))
        self._compiler, self._device, self._lock = program.compiler, device, Lock()
        self._values = ffi_values(args, dict.fromkeys(names, 0), device, 0)
        places = {name: index for index, name in enumerate(names)}
        slots = self._values.slots
        self._cells: list[tuple[int, int, ctypes.c_uint64]] = []
        self._streams: list[ctypes.c_uint64] = []
        self._stream = 0
        for slot, arg in zip(slots, args, strict=False):
            cell = ctypes.c_uint64.from_address(ctypes.addressof(slot) + FfiAny.value.offset)
            if isinstance(arg, TensorArg):
                # A DLTensor begins with its address.
                self._cells.append((places[arg.tensor], arg.offset, ctypes.c_uint64.from_address(cell.value)))
            elif isinstance(arg, BufferArg):
                self._cells.append((places[arg.tensor], arg.offset, cell))
            elif isinstance(arg, StreamArg):
                self._streams.append(cell)
        self._result = FfiAny()
        self._entry = entry
        # Without argument types ctypes passes references twice as fast as addresses.
        self._given = (None, ctypes.byref(slots), len(args), ctypes.byref(self._result))

    def enqueue(self, addresses: Sequence[int], stream: int) -> None:
        """Raises DeviceError with the function's own message if it refuses its arguments, or with a CUDA error."""
        with self._lock:
            for place, offset, cell in self._cells:
                cell.value = addresses[place] + offset
            if stream != self._stream:
                for cell in self._streams:
                    cell.value = stream
                self._stream = stream
            if not self._streams:
                self._ffi.TVMFFIEnvSetStream(CUDA, self._device, ctypes.c_void_p(stream), None)
            if self._entry(*self._given):
                raise _failure(f"the host function of {self._compiler} refuses the call: {_raised(self._ffi)}")


class _PackedHost:
    """Packed descriptors, built anew in each call: no program that we compile uses this convention."""

    def __init__(self, program: HostProgram, names: Sequence[str], entry: Any) -> None:
        self._program, self._names, self._entry = program, names, entry

    def __call__(self, args: Sequence[HostArg], addresses: Sequence[int], stream: int) -> None:
        """Raises DeviceError with the CUDA error that the function returns."""
        values = packed_values(args, dict(zip(self._names, addresses, strict=True)), stream)
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
    # Runtime and driver use the same numbers for the errors that compiled code meets (cudaError_t, CUDA 11 and later).
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
    """`host_object`, linked and opened once per process. It stays loaded on the device until the process ends.

    Raises UnsupportedError without the libraries or a linker, DeviceError if the object cannot be linked.
    """
    linker = next((path for name in LINKERS if (path := shutil.which(name))), None)
    if linker is None:
        raise UnsupportedError(f"linking a host program needs a C compiler; none of {', '.join(LINKERS)} is on PATH")
    libraries = [runtime_library(RUNTIME), runtime_library(FFI)]
    with scratch_folder("host") as folder:
        source, library = folder / "host.o", folder / "host.so"
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
    """The path of a library that a host object calls. Raises UnsupportedError if no installed wheel has it."""
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

"""Runtime calls about memory, tensor maps, streams and events.

Work is done at once, in call order. Every correct use of streams and events permits this order, so an incorrect use
that a device would only get right by luck goes unnoticed.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault
from backends.vm.host.abi import HostError, copy_from
from backends.vm.host.runtime import INT, INVALID_VALUE, POINTER, SIZE, SUCCESS, UINT, Runtime, answers, put_u64
from backends.vm.memory.map_fences import MAP_BYTES
from backends.vm.tensor.tensor_map import MAX_RANK, Im2col, TensorMapError, encode_tensor_map

Bytes = npt.NDArray[np.uint8]
_HOST_TO_HOST, _TO_DEVICE, _TO_HOST, _DEVICE_TO_DEVICE, _DEFAULT = range(5)


@answers("_cudaMalloc", POINTER, SIZE)
def malloc(runtime: Runtime, pointer: int, size: int) -> None:
    """Allocate device memory, filled with 0xFF."""
    put_u64(pointer, runtime.allocate(size) if size else 0)


@answers("_cudaMallocAsync", POINTER, SIZE, POINTER)
def malloc_async(runtime: Runtime, pointer: int, size: int, stream: int) -> None:
    """As cudaMalloc, in stream order."""
    runtime.check_stream(stream, "cudaMallocAsync")
    malloc(runtime, pointer, size)


@answers("_cudaMallocHost", POINTER, SIZE)
def malloc_host(runtime: Runtime, pointer: int, size: int) -> None:
    """Allocate host memory that kernels can access too."""
    malloc(runtime, pointer, size)


@answers("_cudaMallocManaged", POINTER, SIZE, UINT)
def malloc_managed(runtime: Runtime, pointer: int, size: int, flags: int) -> None:
    """As cudaMalloc."""
    malloc(runtime, pointer, size)


@answers("_cudaFree", POINTER)
def free(runtime: Runtime, pointer: int) -> None:
    """Free memory. A later access to it is a fault."""
    runtime.free(pointer)


@answers("_cudaFreeAsync", POINTER, POINTER)
def free_async(runtime: Runtime, pointer: int, stream: int) -> None:
    """As cudaFree, in stream order."""
    runtime.check_stream(stream, "cudaFreeAsync")
    runtime.free(pointer)


@answers("_cudaFreeHost", POINTER)
def free_host(runtime: Runtime, pointer: int) -> None:
    """As cudaFree."""
    runtime.free(pointer)


@answers("_cudaMemcpy", POINTER, POINTER, SIZE, INT)
def memcpy(runtime: Runtime, to: int, source: int, size: int, kind: int) -> None:
    """Copy between host and device memory. The device side must lie inside one tensor or allocation."""
    if not _HOST_TO_HOST <= kind <= _DEFAULT:
        raise HostError(f"cudaMemcpy is called with kind {kind}; 0 to 4 exist (cudaMemcpyKind)")
    runtime.last_in = None
    if size == 0:
        return
    from_device = kind in (_TO_HOST, _DEVICE_TO_DEVICE) or (kind == _DEFAULT and _mapped(runtime, source))
    to_device = kind in (_TO_DEVICE, _DEVICE_TO_DEVICE) or (kind == _DEFAULT and _mapped(runtime, to))
    if from_device:
        moved = _device(runtime, source, size, "the source of cudaMemcpy").tobytes()
    else:
        moved = copy_from(source, size, "the source of cudaMemcpy")
    if to_device:
        _device(runtime, to, size, "the destination of cudaMemcpy", writing=True)[:] = np.frombuffer(moved, np.uint8)
    else:
        ctypes.memmove(to, moved, size)


@answers("_cudaMemcpyAsync", POINTER, POINTER, SIZE, INT, POINTER)
def memcpy_async(runtime: Runtime, to: int, source: int, size: int, kind: int, stream: int) -> None:
    """As cudaMemcpy, in stream order."""
    runtime.check_stream(stream, "cudaMemcpyAsync")
    memcpy(runtime, to, source, size, kind)


@answers("_cudaMemset", POINTER, INT, SIZE)
def memset(runtime: Runtime, to: int, value: int, size: int) -> None:
    """Set bytes of device memory."""
    runtime.last_in = None
    if size:
        _device(runtime, to, size, "the destination of cudaMemset", writing=True)[:] = value & 0xFF


@answers("_cudaMemsetAsync", POINTER, INT, SIZE, POINTER)
def memset_async(runtime: Runtime, to: int, value: int, size: int, stream: int) -> None:
    """As cudaMemset, in stream order."""
    runtime.check_stream(stream, "cudaMemsetAsync")
    memset(runtime, to, value, size)


@answers("_cudaStreamCreate", POINTER)
def stream_create(runtime: Runtime, stream: int) -> None:
    """Create a stream."""
    handle = runtime.new_handle()
    runtime.streams.add(handle)
    put_u64(stream, handle)


@answers("_cudaStreamDestroy", POINTER)
def stream_destroy(runtime: Runtime, stream: int) -> None:
    """Destroy a stream."""
    runtime.check_stream(stream, "cudaStreamDestroy")
    runtime.streams.discard(stream)


@answers("_cudaStreamSynchronize", POINTER)
def stream_synchronize(runtime: Runtime, stream: int) -> None:
    """Check the stream. Nothing is outstanding."""
    runtime.check_stream(stream, "cudaStreamSynchronize")
    runtime.last_in = None


@answers("_cudaStreamWaitEvent", POINTER, POINTER)
def stream_wait_event(runtime: Runtime, stream: int, event: int) -> int:
    """Check both handles. The recorded work is already over."""
    runtime.check_stream(stream, "cudaStreamWaitEvent")
    runtime.last_in = None
    return SUCCESS if event in runtime.events else INVALID_VALUE


@answers("_cudaEventCreate", POINTER)
def event_create(runtime: Runtime, event: int) -> None:
    """Create an event."""
    handle = runtime.new_handle()
    runtime.events.add(handle)
    put_u64(event, handle)


@answers("_cudaEventRecord", POINTER, POINTER)
def event_record(runtime: Runtime, event: int, stream: int) -> int:
    """Record an event, which completes at once."""
    runtime.check_stream(stream, "cudaEventRecord")
    return SUCCESS if event in runtime.events else INVALID_VALUE


@answers("_cudaEventDestroy", POINTER)
def event_destroy(runtime: Runtime, event: int) -> None:
    """Destroy an event."""
    runtime.events.discard(event)


def _mapped(runtime: Runtime, address: int) -> bool:
    try:
        runtime.machine.memory.find(address, 1, "")
    except Fault:
        return False
    return True


def _device(runtime: Runtime, address: int, size: int, what: str, *, writing: bool = False) -> Bytes:
    buffer = runtime.machine.memory.find(address, size, what)
    if writing and not buffer.writable:
        raise Fault("read-only", f"{what} lies in `{buffer.name}`, which is an input", address=address)
    if writing:
        buffer.mark_written(np.array([address - buffer.base]), size)
    return buffer.data[address - buffer.base : address - buffer.base + size]


# Tensor-map encoders as runtime calls: they translate the driver's enumerations into this machine's names.


# CUtensorMapDataType and CUtensorMapSwizzle, in their order; measured on an H200 up to 12 (facts.md 6.3).
_DTYPES = (
    "u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz", "b4x16",
    "b4x16_p64", "b6x16_p32",
)  # fmt: skip
_SWIZZLES = ("none", "32B", "64B", "128B", "128B_ATOM_32B", "128B_ATOM_32B_FLIP_8B", "128B_ATOM_64B")


@answers(
    "_cuTensorMapEncodeTiled",
    POINTER, INT, UINT, POINTER, POINTER, POINTER, POINTER, POINTER, INT, INT, INT, INT,
)  # fmt: skip
def encode_tiled(
    runtime: Runtime, tensor_map: int, dtype: int, rank: int, address: int, dims: int, strides: int, box: int,
    element_strides: int, *modes: int,
) -> None:  # fmt: skip
    """Write 128 bytes at `tensor_map`. HostError, with a full sentence, for what the driver's encoder refuses."""
    tensor = _Encoding("cuTensorMapEncodeTiled", dtype, rank, address, dims, strides, element_strides, modes)
    tensor.write(runtime, tensor_map, tensor.numbers("I", box, rank, "box"))


@answers(
    "_cuTensorMapEncodeIm2col",
    POINTER, INT, UINT, POINTER, POINTER, POINTER, POINTER, POINTER, UINT, UINT, POINTER, INT, INT, INT, INT,
)  # fmt: skip
def encode_im2col(
    runtime: Runtime, tensor_map: int, dtype: int, rank: int, address: int, dims: int, strides: int, *pixels: int
) -> None:
    """As encode_tiled. `pixels`: the corners (width first, as Triton and CUTLASS give them), channels, pixels,
    element strides and modes."""
    lower, upper, channels, count, element_strides, *modes = pixels
    tensor = _Encoding("cuTensorMapEncodeIm2col", dtype, rank, address, dims, strides, element_strides, tuple(modes))
    first, last = (tensor.numbers("i", corner, max(rank - 2, 0), "corner") for corner in (lower, upper))
    tensor.write(runtime, tensor_map, (channels,), Im2col(first, last, count))


@dataclass(frozen=True, slots=True)
class _Encoding:
    """Arguments common to both encoders. `modes`: interleave, swizzle, L2 promotion and fill, in the driver's codes."""

    call: str
    dtype: int
    rank: int
    address: int
    dims: int
    strides: int
    element_strides: int
    modes: tuple[int, ...]

    def __post_init__(self) -> None:
        interleave, swizzle, _, oob_fill = self.modes
        if not 1 <= self.rank <= MAX_RANK:
            raise HostError(f"{self.call} is asked for {self.rank} dimensions; 1 to {MAX_RANK} are possible")
        if interleave:
            raise HostError(f"{self.call} is asked for interleave {interleave}; the VM has layouts without only")
        if not (0 <= self.dtype < len(_DTYPES) and 0 <= swizzle < len(_SWIZZLES) and oob_fill in (0, 1)):
            raise HostError(
                f"{self.call} is called with data type {self.dtype}, swizzle {swizzle} and out-of-bounds fill "
                f"{oob_fill}; the VM knows types 0 to {len(_DTYPES) - 1}, swizzles 0 to {len(_SWIZZLES) - 1}, fills 0 "
                "and 1"
            )

    def numbers(self, code: str, address: int, count: int, what: str) -> tuple[int, ...]:
        """Reads `count` numbers from memory."""
        layout = struct.Struct(f"<{count}{code}")
        return layout.unpack(copy_from(address, layout.size, f"the {what} given to {self.call}"))

    def write(self, runtime: Runtime, tensor_map: int, box: Sequence[int], im2col: Im2col | None = None) -> None:
        """Encodes the map and writes 128 bytes at `tensor_map`."""
        _, swizzle, _, oob_fill = self.modes
        try:
            encoded = encode_tensor_map(
                self.address,
                _DTYPES[self.dtype],
                self.numbers("Q", self.dims, self.rank, "dims"),
                self.numbers("Q", self.strides, self.rank - 1, "strides"),
                box,
                swizzle=_SWIZZLES[swizzle],
                element_strides=self.numbers("I", self.element_strides, self.rank, "element strides"),
                oob_fill="nan" if oob_fill else "zero",
                target="sm_100a" if runtime.device.target == "sm_100a" else "sm_90a",
                im2col=im2col,
            )
        except TensorMapError as refused:
            raise HostError(f"{self.call} refuses: {refused}") from None
        ctypes.memmove(tensor_map, encoded, MAP_BYTES)

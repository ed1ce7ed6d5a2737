"""Turns named arguments into what compiled code takes: TVM FFI values, or pointers to packed descriptors.

Arguments are read through protocols with the fields of megamoe.contract's TensorArg and similar classes, so this file
does not import megamoe. The returned object keeps everything alive that compiled code reads.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from backends.vm.faults import counted
from backends.vm.host.abi import (
    DEVICE_CUDA,
    DL_TYPES,
    FFI_ARRAY,
    FFI_BOOL,
    FFI_DLTENSOR,
    FFI_FLOAT,
    FFI_INT,
    FFI_NONE,
    FFI_POINTER,
    DLTensor,
    FfiAny,
    FfiArray,
    FfiPayload,
    HostError,
    scalar_bytes,
)
from backends.vm.host.runtime import GIVEN_STREAM
from backends.vm.memory.global_memory import Buffer


class PackedFieldsLike(Protocol):
    """The fields that the packed convention passes after a tensor's address."""

    @property
    def dims(self) -> Sequence[int]: ...
    @property
    def strides(self) -> Sequence[int]: ...
    @property
    def dim_bits(self) -> int: ...
    @property
    def stride_bits(self) -> int: ...


@runtime_checkable
class TensorArgLike(Protocol):
    """A tensor with its layout, in elements."""

    @property
    def tensor(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def strides(self) -> Sequence[int] | None: ...
    @property
    def offset(self) -> int: ...
    @property
    def packed(self) -> PackedFieldsLike: ...


@runtime_checkable
class BufferArgLike(Protocol):
    """A bare device address."""

    @property
    def tensor(self) -> str: ...
    @property
    def offset(self) -> int: ...


@runtime_checkable
class ScalarArgLike(Protocol):
    """A number passed by value."""

    @property
    def dtype(self) -> str: ...
    @property
    def value(self) -> int | float: ...


@runtime_checkable
class ShapeArgLike(Protocol):
    """A tuple of integers."""

    @property
    def sizes(self) -> Sequence[int]: ...
    @property
    def bits(self) -> int: ...


@dataclass(slots=True)
class Passed:
    """Arguments in memory. `kept` holds the C objects that they point to."""

    addresses: list[int] = field(default_factory=list[int])
    values: list[FfiAny] = field(default_factory=list[FfiAny])
    kept: list[object] = field(default_factory=list[object])

    def keep(self, content: bytes) -> int:
        """The address of a copy of `content`. The copy lives as long as this object."""
        held = ctypes.create_string_buffer(content, max(len(content), 1))
        self.kept.append(held)
        return ctypes.addressof(held)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor argument in memory: the address of its first element, sizes and strides in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dl_type: tuple[int, int, int]


def pass_by_ffi(args: Sequence[object], buffers: Mapping[str, Buffer]) -> Passed:
    """TVM FFI values, one per argument. HostError for a tensor that is missing or exceeds its memory."""
    passed = Passed()
    for arg in args:
        passed.values.append(_ffi_value(arg, buffers, passed))
    return passed


def pass_packed(args: Sequence[object], buffers: Mapping[str, Buffer]) -> Passed:
    """Pointers to descriptors as CuTeDSL's generated header declares them: address, sizes, strides."""
    passed = Passed()
    for arg in args:
        if isinstance(arg, ShapeArgLike):
            passed.addresses += [passed.keep(_packed_size(size, arg.bits)) for size in arg.sizes]
        elif arg is not None:
            passed.addresses.append(passed.keep(_packed_bytes(arg, buffers)))
    return passed


def _ffi_value(arg: object, buffers: Mapping[str, Buffer], passed: Passed) -> FfiAny:
    value = FfiAny(FFI_NONE, 0)
    if isinstance(arg, TensorArgLike):
        value.type_index = FFI_DLTENSOR
        value.value.pointer = _dl_tensor(_place(arg, buffers), passed)
    elif isinstance(arg, BufferArgLike):
        value.type_index, value.value.pointer = FFI_POINTER, _address(arg, buffers)
    elif isinstance(arg, ScalarArgLike):
        scalar_bytes(arg.dtype, arg.value)
        if arg.dtype == "bool":
            value.type_index, value.value.integer = FFI_BOOL, int(bool(arg.value))
        elif arg.dtype.startswith("f"):
            value.type_index, value.value.real = FFI_FLOAT, float(arg.value)
        else:
            value.type_index, value.value.integer = FFI_INT, int(arg.value)
    elif isinstance(arg, ShapeArgLike):
        value.type_index, value.value.pointer = FFI_ARRAY, _shape(arg, passed)
    elif _is_stream(arg):
        value.type_index, value.value.pointer = FFI_POINTER, GIVEN_STREAM
    elif arg is not None:
        raise _unknown(arg)
    return value


def _packed_bytes(arg: object, buffers: Mapping[str, Buffer]) -> bytes:
    if isinstance(arg, TensorArgLike):
        placed, fields = _place(arg, buffers), arg.packed
        dim, stride = _integer(fields.dim_bits), _integer(fields.stride_bits)
        dims = [placed.shape[axis] for axis in fields.dims]
        strides = [placed.strides[axis] for axis in fields.strides]
        # "@" pads between 4- and 8-byte members as a C struct does.
        return struct.pack(f"@P{len(dims)}{dim}{len(strides)}{stride}", placed.address, *dims, *strides)
    if isinstance(arg, BufferArgLike):
        return struct.pack("<Q", _address(arg, buffers))
    if isinstance(arg, ScalarArgLike):
        return scalar_bytes(arg.dtype, arg.value)
    if _is_stream(arg):
        return struct.pack("<Q", GIVEN_STREAM)
    raise _unknown(arg)


def _packed_size(size: int, bits: int) -> bytes:
    try:
        return struct.pack(f"<{_integer(bits)}", size)
    except struct.error:
        raise HostError(f"the size {size} does not fit {bits} bits") from None


def _integer(bits: int) -> str:
    if bits not in (32, 64):
        raise HostError(f"a packed descriptor with integers of {bits} bits; 32 and 64 exist")
    return "i" if bits == 32 else "q"


def _is_stream(arg: object) -> bool:
    return type(arg).__name__ == "StreamArg"


def _unknown(arg: object) -> HostError:
    return HostError(
        f"an argument of type {type(arg).__name__}; there are tensors, buffers, scalars, shapes, streams and None"
    )


def _buffer(name: str, buffers: Mapping[str, Buffer]) -> Buffer:
    if name not in buffers:
        raise HostError(f"the program passes the tensor {name!r}, which was not given; there are {', '.join(buffers)}")
    return buffers[name]


def _address(arg: BufferArgLike, buffers: Mapping[str, Buffer]) -> int:
    buffer = _buffer(arg.tensor, buffers)
    if not 0 <= arg.offset <= buffer.data.size:
        raise HostError(
            f"the offset {arg.offset} lies outside of {arg.tensor!r}, which has {counted(buffer.data.size, 'byte')}"
        )
    return buffer.base + arg.offset


def _place(arg: TensorArgLike, buffers: Mapping[str, Buffer]) -> _Placed:
    buffer, shape = _buffer(arg.tensor, buffers), tuple(arg.shape)
    if arg.dtype not in DL_TYPES:
        raise HostError(f"tensor argument {arg.tensor!r} has dtype {arg.dtype!r}; known are {', '.join(DL_TYPES)}")
    strides = tuple(arg.strides) if arg.strides is not None else compact(shape)
    if len(strides) != len(shape) or min(shape, default=0) < 0 or min(strides, default=0) < 0:
        raise HostError(
            f"tensor argument {arg.tensor!r} has shape {shape} and strides {strides}, which do not go together"
        )
    _, bits, lanes = DL_TYPES[arg.dtype]
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else -1
    reach = arg.offset + (last + 1) * bits * lanes // 8
    if arg.offset < 0 or reach > buffer.data.size:
        raise HostError(
            f"tensor argument {arg.tensor!r} of shape {shape}, strides {strides}, dtype {arg.dtype} and offset "
            f"{arg.offset} reaches to byte {reach} of a tensor of {counted(buffer.data.size, 'byte')}"
        )
    return _Placed(buffer.base + arg.offset, shape, strides, DL_TYPES[arg.dtype])


def compact(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a dense tensor whose last dimension is the fastest."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _shape(arg: ShapeArgLike, passed: Passed) -> int:
    for size in arg.sizes:
        _packed_size(size, arg.bits)
    count = len(arg.sizes)
    values = (FfiAny * count)(*(FfiAny(FFI_INT, 0, FfiPayload(integer=size)) for size in arg.sizes))
    array = FfiArray(1, FFI_ARRAY, 0, 0, values, count, count, 0)
    passed.kept += [values, array]
    return ctypes.addressof(array)


def _dl_tensor(placed: _Placed, passed: Passed) -> int:
    rank = len(placed.shape)
    shape, strides = (ctypes.c_int64 * rank)(*placed.shape), (ctypes.c_int64 * rank)(*placed.strides)
    tensor = DLTensor(placed.address, DEVICE_CUDA, 0, rank, *placed.dl_type, shape, strides, 0)
    passed.kept += [shape, strides, tensor]
    return ctypes.addressof(tensor)

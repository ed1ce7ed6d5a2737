"""The device and the VM get the same arguments: two encoders, written independently, must give the same bytes."""

from __future__ import annotations

import ctypes
import struct
from importlib.util import find_spec

import numpy as np
import pytest

from backends.gpu import host_program
from backends.gpu.kernels import scalar_bytes
from backends.vm.host import arguments as vm
from backends.vm.machine.machine import Machine
from backends.vm.memory.global_memory import Buffer
from megamoe.contract import (
    BufferArg,
    DeviceError,
    HostArg,
    HostProgram,
    PackedFields,
    ScalarArg,
    ShapeArg,
    StreamArg,
    TensorArg,
)

STREAM = vm.GIVEN_STREAM
ARGUMENTS: list[HostArg] = [
    TensorArg("x", "f32", (4, 8), packed=PackedFields(dims=(0, 1), strides=(0,))),
    TensorArg("x", "bf16", (2, 3, 4), (16, 4, 1), 32, PackedFields(dims=(2,), strides=(0, 1), stride_bits=32)),
    TensorArg("x", "e2m1x2", (8,), packed=PackedFields(dims=(0,), dim_bits=64)),
    BufferArg("x", 16),
    ScalarArg("f32", 0.1),
    ScalarArg("s32", -7),
    ScalarArg("bool", 1),
    ScalarArg("u64", 2**63),
    ShapeArg((3, 5)),
    ShapeArg((3, 5), 64),
    StreamArg(),
    None,
]


@pytest.fixture
def buffers() -> dict[str, Buffer]:
    return {"x": Machine().memory.add("x", np.zeros(256, np.uint8))}


def _told(value: ctypes.Structure) -> object:
    """The values that a called function reads from a TVMFFIAny, through its pointers."""
    kind, place = value.type_index, value.value.pointer  # pyright: ignore[reportAttributeAccessIssue]
    if kind == host_program.DLTENSOR:
        tensor = host_program.DLTensor.from_address(place)
        sizes = [(tensor.shape[i], tensor.strides[i]) for i in range(tensor.ndim)]
        return tensor.data, tensor.device_type, tensor.code, tensor.bits, tensor.lanes, sizes, tensor.byte_offset
    if kind == host_program.ARRAY:
        array = host_program.FfiArray.from_address(place)
        return array.type_index, [(array.data[i].type_index, array.data[i].value.integer) for i in range(array.size)]
    return kind, place


@pytest.mark.parametrize("argument", ARGUMENTS, ids=str)
def test_tvm_ffi_values_are_those_of_the_vm(argument: HostArg, buffers: dict[str, Buffer]) -> None:
    addresses = {name: buffer.base for name, buffer in buffers.items()}
    ours = host_program.ffi_values([argument], addresses, 0, STREAM)
    theirs = vm.pass_by_ffi([argument], buffers)
    assert _told(ours.slots[0]) == _told(theirs.values[0])  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(find_spec("tvm_ffi") is None, reason="TVM FFI comes with the extra `cutedsl`")
def test_a_warm_call_passes_what_one_made_anew_would() -> None:
    seen: list[list[object]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
    def entry(_: object, values: int, count: int, result: object) -> int:
        size = ctypes.sizeof(host_program.FfiAny)
        seen.append([_told(host_program.FfiAny.from_address(values + size * index)) for index in range(count)])
        return 0

    program = HostProgram(target="sm_90a", ptx="", host_object=b"", entry="entry", args=tuple(ARGUMENTS))
    warm = host_program._FfiHost(program, ARGUMENTS, ("y", "x"), entry, 0)
    for address, stream in ((1 << 12, STREAM), (1 << 13, STREAM), (1 << 13, STREAM + 8), (1 << 12, 0)):
        warm.enqueue((7, address), stream)
        anew = host_program.ffi_values(ARGUMENTS, {"x": address}, 0, stream)
        assert seen.pop() == [_told(one) for one in anew.slots], f"x at {address:#x}, stream {stream:#x}"  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("argument", ARGUMENTS, ids=str)
def test_packed_values_are_those_of_the_vm(argument: HostArg, buffers: dict[str, Buffer]) -> None:
    addresses = {name: buffer.base for name, buffer in buffers.items()}
    ours = host_program.packed_values([argument], addresses, STREAM)
    theirs = vm.pass_packed([argument], buffers)
    assert len(ours.slots) == len(theirs.addresses) + 1, "one slot an argument, and one for the error code"
    for mine, other, kept in zip(ours.slots, theirs.addresses, theirs.kept, strict=False):
        size = ctypes.sizeof(kept)  # pyright: ignore[reportArgumentType]
        assert ctypes.string_at(mine, size) == ctypes.string_at(other, size)


def test_a_scalar_that_does_not_fit_is_refused() -> None:
    assert scalar_bytes(ScalarArg("u32", 7)) == struct.pack("<I", 7)
    with pytest.raises(DeviceError, match="does not fit a scalar argument of u8"):
        scalar_bytes(ScalarArg("u8", 256))
    with pytest.raises(DeviceError, match="dtype 'f24'"):
        scalar_bytes(ScalarArg("f24", 1))


def test_a_tensor_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match=r"the tensor 'y', which was not given; there are: x"):
        host_program.ffi_values([BufferArg("y")], {"x": 16}, 0, 0)

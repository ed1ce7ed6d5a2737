"""The bytes of a kernel's parameters, made of what Python code passes for them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from megamoe.contract.counted import counted
from megamoe.contract.machine import LaunchRefusedError, Parameter
from megamoe.host_memory import Reached
from megamoe.tensor_maps import TensorMapOf

_SCALARS = {
    "b8": "B", "u8": "B", "s8": "b", "b16": "H", "u16": "H", "s16": "h", "b32": "I", "u32": "I", "s32": "i", "b64": "Q",
    "u64": "Q", "s64": "q", "f16": "e", "f32": "f", "f64": "d",
}  # fmt: skip


def encoded(entry: str, parameters: Sequence[Parameter], args: Sequence[object], reached: Reached) -> list[bytes]:
    if len(parameters) != len(args):
        wanted = ", ".join(f".{one.type} {one.name}" for one in parameters)
        raise LaunchRefusedError(
            f"{entry} takes {counted(len(parameters), 'argument')} ({wanted}) and is given {len(args)}"
        )
    return [
        _parameter(
            f"argument {index} of {entry} (.{one.type} {one.name}, {counted(one.size, 'byte')})", one, arg, reached
        )
        for index, (one, arg) in enumerate(zip(parameters, args, strict=True))
    ]


def _parameter(what: str, parameter: Parameter, arg: object, reached: Reached) -> bytes:
    if isinstance(arg, TensorMapOf):
        raw = _encode_map(what, arg, reached)
    elif arg is None:
        raw = bytes(8)
    elif isinstance(arg, bytes | bytearray | memoryview | np.generic) and not _is_number(parameter, arg):
        raw = bytes(arg) if not isinstance(arg, np.generic) else arg.tobytes()
    elif (address := reached.address(arg)) is not None:
        raw = struct.pack("<Q", address)
    else:
        raw = _scalar(what, parameter, arg)
    if arg is None and len(raw) != parameter.size:
        raise LaunchRefusedError(f"{what} is no pointer, and is given None, a null pointer of 8 bytes")
    if len(raw) != parameter.size:
        raise LaunchRefusedError(f"{what} is given {type(arg).__name__}, which makes {counted(len(raw), 'byte')}")
    return raw


def _is_number(parameter: Parameter, arg: object) -> bool:
    code = _SCALARS.get(parameter.type)
    return code is not None and struct.calcsize(code) == parameter.size and isinstance(arg, np.number | np.bool_)


def _scalar(what: str, parameter: Parameter, arg: Any) -> bytes:
    code = _SCALARS.get(parameter.type)
    if code is None or struct.calcsize(code) != parameter.size:
        raise LaunchRefusedError(f"{what} is a struct; give its bytes, not {arg!r}")
    try:
        if isinstance(arg, str):
            raise TypeError
        if code in "efd":
            return struct.pack(f"<{code}", float(arg))
        number, bits = int(arg), 8 * parameter.size
        if number != arg or not -(1 << bits - 1) <= number < 1 << bits:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        wanted = "a number" if code in "efd" else f"a whole number of {8 * parameter.size} bits"
        if parameter.size == 8 and code not in "efd":
            wanted += ", or, for a pointer, an array (on the command line, f32[1024]) or a null pointer (None, null)"
        raise LaunchRefusedError(f"{what} cannot be {arg!r}; it takes {wanted}") from None
    # The sign is up to the kernel: nvcc declares an `int` as .u32.
    return (number % (1 << bits)).to_bytes(parameter.size, "little")


def _encode_map(what: str, asked: TensorMapOf, reached: Reached) -> bytes:
    try:
        return reached.machine.tensor_map(
            reached.address(asked.tensor) or 0,
            asked.dtype,
            asked.dims,
            asked.strides,
            asked.box,
            swizzle=asked.swizzle,
            element_strides=asked.element_strides,
            oob_fill=asked.oob_fill,
            im2col=asked.im2col,
        )
    except reached.machine.refusals as refused:
        raise LaunchRefusedError(f"{what}: {refused}") from None

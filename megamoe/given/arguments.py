"""The bytes of a kernel's parameters, made of what Python code passes for them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from numbers import Integral
from operator import index
from reprlib import repr as shown
from typing import Any

import numpy as np

from megamoe.contract.counted import counted
from megamoe.contract.machine import LaunchRefusedError, Parameter
from megamoe.given.entry_names import source_name
from megamoe.given.host_memory import SMALLEST_ADDRESS, Reached
from megamoe.given.tensor_maps import TensorMapOf

_SCALARS = {
    "b8": "B", "u8": "B", "s8": "b", "b16": "H", "u16": "H", "s16": "h", "b32": "I", "u32": "I", "s32": "i", "b64": "Q",
    "u64": "Q", "s64": "q", "f16": "e", "f32": "f", "f64": "d",
}  # fmt: skip


def addresses_among(parameters: Sequence[Parameter], args: Sequence[object]) -> list[int]:
    """The numbers that are passed for pointers and may be addresses of this process."""
    given = zip(parameters, args, strict=False)
    numbers = [int(arg) for one, arg in given if _is_pointer(one) and isinstance(arg, Integral)]
    return [one for one in numbers if SMALLEST_ADDRESS <= one < 1 << 63]


def encoded(entry: str, parameters: Sequence[Parameter], args: Sequence[object], reached: Reached) -> list[bytes]:
    """The bytes of each parameter. LaunchRefusedError for a value that does not fit."""
    kernel = source_name(entry)
    # Compilers of C++ call a parameter KERNEL_param_0.
    kinds = [f".{one.type} {one.name.removeprefix(f'{entry}_')}" for one in parameters]
    if len(parameters) != len(args):
        wanted = f"{counted(len(kinds), 'argument')} ({', '.join(kinds)})" if kinds else "no arguments"
        raise LaunchRefusedError(f"{kernel} takes {wanted} and is given {len(args)}")
    return [
        _parameter(f"argument {index} of {kernel} ({kind}, {counted(one.size, 'byte')})", one, arg, reached)
        for index, (kind, one, arg) in enumerate(zip(kinds, parameters, args, strict=True))
    ]


def _parameter(what: str, parameter: Parameter, arg: object, reached: Reached) -> bytes:
    if isinstance(arg, TensorMapOf):
        raw = _encode_map(what, arg, reached)
    elif arg is None:
        if not _may_be_pointer(parameter):
            raise LaunchRefusedError(f"{what} is no pointer, and is given None, a null pointer of 8 bytes")
        raw = bytes(8)
    elif isinstance(arg, bytes | bytearray | memoryview | np.generic) and not _is_number(parameter, arg):
        raw = bytes(arg) if not isinstance(arg, np.generic) else arg.tobytes()
    elif (address := reached.address(arg)) is not None:
        if not _may_be_pointer(parameter):
            told = f"{_kind_of(parameter)}, and is given {_told(arg)}"
            raise LaunchRefusedError(f"{what} is {told}; {_instead(parameter)}")
        raw = struct.pack("<Q", address)
    else:
        raw = _scalar(what, parameter, arg, reached)
    if len(raw) != parameter.size:
        hint = f"; {_FOR_A_POINTER}" if _may_be_pointer(parameter) else ""
        raise LaunchRefusedError(f"{what} is given {type(arg).__name__}, which makes {counted(len(raw), 'byte')}{hint}")
    return raw


_FOR_A_POINTER = "for a pointer, give an array (on the command line, f32[1024]) or a null pointer (None, null)"


def _may_be_pointer(parameter: Parameter) -> bool:
    return parameter.size == 8 and parameter.type in ("u64", "s64", "b64")


def _is_pointer(parameter: Parameter) -> bool:
    return parameter.pointer and _may_be_pointer(parameter)


def _is_number(parameter: Parameter, arg: object) -> bool:
    """Whether a NumPy scalar is passed as a number rather than as its bytes."""
    untyped = parameter.type.startswith("b") and isinstance(arg, np.floating)
    return _code(parameter) is not None and isinstance(arg, np.number | np.bool_) and not untyped


def _code(parameter: Parameter) -> str | None:
    """The letter of `struct` for a scalar; None for a struct or an array."""
    code = _SCALARS.get(parameter.type)
    return code if code is not None and struct.calcsize(code) == parameter.size else None


def _kind_of(parameter: Parameter) -> str:
    return f"a {'struct' if _code(parameter) is None else 'scalar'} of {counted(parameter.size, 'byte')}"


def _told(array: Any) -> str:
    return f"a {type(array).__name__} of dtype {str(array.dtype).removeprefix('torch.')} and shape {tuple(array.shape)}"


def _instead(parameter: Parameter) -> str:
    if _code(parameter) is None:
        return "give the bytes of the struct: the .tobytes() of a NumPy scalar"
    return "give a number: the .item() of a tensor with one element"


def _scalar(what: str, parameter: Parameter, arg: Any, reached: Reached) -> bytes:
    code = _code(parameter)
    if code is None:
        raise LaunchRefusedError(f"{what} is a struct; give its bytes, not {shown(arg)}")
    bits = 8 * parameter.size
    try:
        if code in "efd":
            if isinstance(arg, str):
                raise TypeError
            return struct.pack(f"<{code}", float(arg))
        number = int(arg) if isinstance(arg, np.bool_) else index(arg)
        if not -(1 << bits - 1) <= number < 1 << bits:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise LaunchRefusedError(f"{what} cannot be {shown(arg)}; it takes {_wanted(parameter, arg)}") from None
    if number and _is_pointer(parameter) and not reached.knows(number):
        raise LaunchRefusedError(
            f"{what} is a pointer, and there is no memory at the address that it is given, {number % (1 << bits):#x} "
            f"({shown(arg)}); {_FOR_A_POINTER}"
        )
    # The sign is up to the kernel: nvcc declares an `int` as .u32.
    return (number % (1 << bits)).to_bytes(parameter.size, "little")


def _wanted(parameter: Parameter, arg: object) -> str:
    if _is_pointer(parameter):
        return f"an address: {_FOR_A_POINTER}"
    bits = 8 * parameter.size
    if parameter.type.startswith("f"):
        return "a number"
    wanted = f"a whole number of {bits} bits"
    if isinstance(arg, float | np.floating):
        wanted += f", {int(arg)}" if float(arg).is_integer() else ""
        wanted += f"; np.float{bits}(...) passes the bits of a float" * (parameter.type[0] == "b" and bits > 8)
    return wanted + f"; {_FOR_A_POINTER}" * _may_be_pointer(parameter)


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

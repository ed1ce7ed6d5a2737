"""Runs a few PTX instructions on given values, one value a thread: the harness under the instruction-family tests.

    run_ptx("add.f32 %d, %a, %b;", {"a": x, "b": y}, {"d": np.float32})["d"]

Every input is a register that holds its array's element when the body begins, every output a register whose value is
read back when the body falls off its end. A name in both starts with the input, which is how a test shows that lanes
that take no part keep their value. A name only among the outputs begins unwritten, as the machine checks.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from backends.vm.load import load
from backends.vm.machine.machine import Machine

Array = npt.NDArray[np.generic]
_Scalar = TypeVar("_Scalar", bound=np.generic)

_HEAD = ".version 9.2\n.target sm_100a\n.address_size 64\n"


def run_ptx(
    body: str,
    inputs: Mapping[str, npt.ArrayLike],
    outputs: Mapping[str, type[_Scalar] | np.dtype[_Scalar]],
    *,
    declare: str = "",
    block: int = 32,
    threads: int | None = None,
    machine: Machine | None = None,
) -> dict[str, npt.NDArray[_Scalar]]:
    """Runs `body` in every thread; returns one array of shape [threads] for each output.

    Registers are called `%name` and are as wide as the array's dtype (bool: a predicate; 8-bit: a 16-bit register).
    Scalars are given to every thread. `declare` holds further declarations (`.reg`, `.shared`). The grid has blocks of
    `block` threads, or a single one where there are fewer values; the last value fills up the last block. `threads` is
    needed if no input is an array. Raises what the machine raises; ValueError for arrays of unlike sizes.
    """
    values = {name: np.asarray(value) for name, value in inputs.items()}
    count = _thread_count(values, threads)
    block = min(block, count)
    filled = -(-count // block) * block
    given = {name: _filled(value, count, filled) for name, value in values.items()}
    results = {name: np.zeros(filled, dtype) for name, dtype in outputs.items()}
    machine = machine or Machine()
    params: list[bytes] = []
    for role, arrays in (("in", given), ("out", results)):
        for name, array in arrays.items():
            base = machine.memory.add(f"{role}_{name}", array.view(np.uint8)).base
            params.append(struct.pack("<Q", base))
    function = load(_kernel(body, given, results, declare)).entry("body")
    machine.launch(function, (filled // block, 1, 1), (block, 1, 1), params)
    return {name: result[:count] for name, result in results.items()}


def lanes_of(mask: int) -> npt.NDArray[np.bool_]:
    """The 32 bits of `mask` as a predicate for each lane: bool [32]."""
    return (mask >> np.arange(32) & 1).astype(np.bool_)


def _thread_count(values: Mapping[str, Array], threads: int | None) -> int:
    sizes = {value.size for value in values.values() if value.ndim}
    if threads is not None:
        sizes.add(threads)
    if len(sizes) != 1:
        raise ValueError(f"the arrays hold {sorted(sizes)} values; each thread takes one value of each")
    return sizes.pop()


def _filled(value: Array, count: int, size: int) -> Array:
    array = np.broadcast_to(value, count)
    return np.concatenate([array, np.repeat(array[-1:], size - count)])


def _kernel(body: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array], declare: str) -> str:
    registers = {name: array.dtype for name, array in (*inputs.items(), *outputs.items())}
    params = [*(f"in_{name}" for name in inputs), *(f"out_{name}" for name in outputs)]
    lines = [
        _HEAD,
        f".visible .entry body({', '.join(f'.param .u64 {param}' for param in params)})",
        "{",
        *(f".reg {_register_type(dtype)} %{name};" for name, dtype in registers.items()),
        ".reg .b64 %harness_address, %harness_index; .reg .b32 %harness_thread; .reg .b16 %harness_bool;",
        declare,
        "{",
        ".reg .b32 %size, %cta;",
        "mov.u32 %harness_thread, %tid.x;",
        "mov.u32 %size, %ntid.x;",
        "mov.u32 %cta, %ctaid.x;",
        "mad.lo.s32 %harness_thread, %cta, %size, %harness_thread;",
        "}",
    ]
    for name, array in inputs.items():
        lines += _address(f"in_{name}", array.dtype)
        if array.dtype == np.bool_:
            lines += ["ld.global.u8 %harness_bool, [%harness_address];", f"setp.ne.u16 %{name}, %harness_bool, 0;"]
        else:
            lines.append(f"ld.global.b{8 * array.dtype.itemsize} %{name}, [%harness_address];")
    lines += ["{", body, "}"]
    for name, array in outputs.items():
        lines += _address(f"out_{name}", array.dtype)
        if array.dtype == np.bool_:
            lines += [f"selp.b16 %harness_bool, 1, 0, %{name};", "st.global.b8 [%harness_address], %harness_bool;"]
        else:
            lines.append(f"st.global.b{8 * array.dtype.itemsize} [%harness_address], %{name};")
    return "\n".join([*lines, "ret;", "}"])


def _address(param: str, dtype: np.dtype[np.generic]) -> list[str]:
    return [
        f"ld.param.u64 %harness_address, [{param}];",
        f"mul.wide.u32 %harness_index, %harness_thread, {dtype.itemsize};",
        "add.s64 %harness_address, %harness_address, %harness_index;",
    ]


def _register_type(dtype: np.dtype[np.generic]) -> str:
    return ".pred" if dtype == np.bool_ else f".b{max(8 * dtype.itemsize, 16)}"

# pyright: reportMissingImports=false
"""The parameters of a host function, declared once for both the compiler (as fake values) and a call (as arguments).

Only `fake_values` imports CuTeDSL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from megamoe.contract import HostArg, ScalarArg, StreamArg, TensorArg

_BYTES: Final = {"u8": 1, "bf16": 2, "f32": 4, "s32": 4}


@dataclass(frozen=True, slots=True)
class TensorParameter:
    """A compact tensor, its last dimension the fastest; `align` in bytes.

    `dims` are names of sizes. Tensors that share a name share the size: the compiled function refuses a call where they
    differ.
    """

    dtype: str
    dims: tuple[str, ...]
    align: int = 16

    def argument(self, tensor: str, sizes: Mapping[str, int]) -> TensorArg:
        """The case's tensor or workspace `tensor` with this layout."""
        return TensorArg(tensor, self.dtype, tuple(sizes[dim] for dim in self.dims))


@dataclass(frozen=True, slots=True)
class ScalarParameter:
    """A number by value: dtype "s32" or "f32"."""

    dtype: str

    def argument(self, value: float) -> ScalarArg:
        """The number as an argument."""
        return ScalarArg(self.dtype, value)


@dataclass(frozen=True, slots=True)
class StreamParameter:
    """The stream that the host function queues its kernels on."""


Parameter = TensorParameter | ScalarParameter | StreamParameter


def call_arguments(
    parameters: Mapping[str, Parameter],
    sizes: Mapping[str, int],
    scalars: Mapping[str, float],
    tensors: Mapping[str, str] | None = None,
) -> dict[str, HostArg]:
    """An argument for each parameter, by name. `tensors`: the name of a tensor in the case, where it differs."""
    arguments: dict[str, HostArg] = {}
    for name, parameter in parameters.items():
        match parameter:
            case TensorParameter():
                arguments[name] = parameter.argument((tensors or {}).get(name, name), sizes)
            case ScalarParameter():
                arguments[name] = parameter.argument(scalars[name])
            case StreamParameter():
                arguments[name] = StreamArg()
    return arguments


def workspace_bytes(tensor: TensorParameter, sizes: Mapping[str, int]) -> int:
    """Bytes of a tensor."""
    return math.prod(sizes[dim] for dim in tensor.dims) * _BYTES[tensor.dtype]


def fake_values(
    parameters: Mapping[str, Parameter], constants: Mapping[str, int], divisors: Mapping[str, int]
) -> dict[str, object]:
    """A value of each parameter's type, as compile_host_function takes them.

    Sizes in `constants` are compiled in; the others are run-time values, multiples of `divisors` (1 where absent).
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    dtypes = {"u8": cutlass.Uint8, "bf16": cutlass.BFloat16, "f32": cutlass.Float32, "s32": cutlass.Int32}
    sizes: dict[str, object] = dict(constants)
    values: dict[str, object] = {}
    for name, parameter in parameters.items():
        match parameter:
            case TensorParameter(dtype, dims, align):
                for dim in dims:
                    if dim not in sizes:
                        sizes[dim] = cute.sym_int32(divisibility=divisors.get(dim, 1))
                shape, order = tuple(sizes[dim] for dim in dims), tuple(reversed(range(len(dims))))
                values[name] = make_fake_compact_tensor(dtypes[dtype], shape, stride_order=order, assumed_align=align)
            case ScalarParameter(dtype):
                values[name] = dtypes[dtype](1)
            case StreamParameter():
                values[name] = make_fake_stream()
    return values

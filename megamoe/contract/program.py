"""Program: what a backend returns. PTX with its launches, a compiled host function, or a Python call.

A program refers to tensors by name; the harness owns their memory. An executor binds the names to memory, encodes the
tensor maps and performs the launches in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from megamoe.contract.counted import counted

if TYPE_CHECKING:
    import torch

Target = Literal["sm_90a", "sm_100a"]
TARGETS: tuple[Target, ...] = ("sm_90a", "sm_100a")
Dim3 = tuple[int, int, int]
Swizzle = Literal["none", "32B", "64B", "128B"]
MAX_PTX = 64 << 20
"""Most characters of a program's PTX. Everything that keeps, parses or assembles a program relies on this limit."""


def _check_size(ptx: str) -> None:
    if len(ptx) > MAX_PTX:
        raise ValueError(f"a program has {counted(len(ptx), 'character')} of PTX; it may have {MAX_PTX:,} at most")


@dataclass(frozen=True, slots=True)
class BufferArg:
    """A 64-bit device address: the first byte of the tensor or workspace named `tensor`, plus `offset` bytes."""

    tensor: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class ScalarArg:
    """A kernel parameter passed by value. `dtype` is a PTX fundamental type: "u32", "s32", "f32", "u64", ..."""

    dtype: str
    value: int | float


@dataclass(frozen=True, slots=True)
class TensorMapArg:
    """A 128-byte tensor map (cuTensorMapEncodeTiled), passed by value. Dimension 0 is the contiguous one.

    `dims` and `box` are in elements. `strides` are in bytes, for dimensions 1 and up (one entry fewer than `dims`).
    `dtype` as in the specs: "bf16", "f16", "f32", "u8", ...
    """

    tensor: str
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle = "none"
    element_strides: tuple[int, ...] | None = None
    oob_fill: Literal["zero", "nan"] = "zero"
    offset: int = 0


KernelArg = BufferArg | ScalarArg | TensorMapArg


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. `dynamic_smem` is in bytes per CTA; `args` are in the order of the entry's parameters."""

    entry: str
    grid: Dim3
    block: Dim3
    args: tuple[KernelArg, ...]
    cluster: Dim3 = (1, 1, 1)
    dynamic_smem: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """PTX and the launches that perform one case. `scratch` maps workspace names to sizes in bytes.

    `prepare`: launches that bring weights into the kernels' own layout, in workspaces. An executor performs them once,
    in order, when it binds the program to tensors, and again when the weights change. Their entries are in `ptx`. They
    are neither timed nor counted, so they may read only weights: work that depends on activations belongs in
    `launches`.

    Raises ValueError for PTX of more than MAX_PTX characters.
    """

    target: Target
    ptx: str
    launches: tuple[Launch, ...]
    scratch: Mapping[str, int] = field(default_factory=dict[str, int])
    prepare: tuple[Launch, ...] = ()

    def __post_init__(self) -> None:
        _check_size(self.ptx)


@dataclass(frozen=True, slots=True)
class PackedFields:
    """What the packed convention passes after a tensor's address: the sizes of `dims`, then the `strides`."""

    dims: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dim_bits: int = 32
    stride_bits: int = 64


@dataclass(frozen=True, slots=True)
class TensorArg:
    """A tensor and its layout. `shape` and `strides` are in elements (None: compact, last dimension fastest), `offset`
    in bytes.

    `dtype` as in the specs: "bf16", "f32", "e4m3", ...; "e2m1x2" is a pair of 4-bit floats in a byte.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    offset: int = 0
    packed: PackedFields = PackedFields()


@dataclass(frozen=True, slots=True)
class StreamArg:
    """The CUDA stream that the host function uses; the executor supplies it."""


@dataclass(frozen=True, slots=True)
class ShapeArg:
    """One parameter of the host function that is a tuple of integers: a shape, strides or coordinates."""

    sizes: tuple[int, ...]
    bits: Literal[32, 64] = 32


HostArg = TensorArg | BufferArg | ScalarArg | ShapeArg | StreamArg | None


@dataclass(frozen=True, slots=True)
class HostProgram:
    """A compiled host function that launches kernels itself, and the PTX of these kernels.

    - `host_object`: a relocatable object for this machine's processor.
    - `entry`: the symbol to call.
    - `convention`: "tvm_ffi" passes DLTensors, and the function checks them; "packed" passes descriptors, and the
      function trusts them.
    - `scratch`: as in Program.
    - `prepare`: the arguments of a call of the same function that does what Program.prepare does; () if there is none.
    - `prepared`: the workspaces that hold the results of `prepare`.
    - `compiler`: name and version, for error messages.
    """

    target: Target
    ptx: str
    host_object: bytes
    entry: str
    args: tuple[HostArg, ...]
    convention: Literal["tvm_ffi", "packed"] = "tvm_ffi"
    scratch: Mapping[str, int] = field(default_factory=dict[str, int])
    compiler: str = "an unknown compiler"
    prepare: tuple[HostArg, ...] = ()
    prepared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_size(self.ptx)


class PreparedCall(Protocol):
    """A call whose plans, workspaces and layouts already exist. PythonProgram.prepare makes it."""

    def enqueue(self) -> None:
        """Launches on torch's current stream. It neither allocates nor waits, so a CUDA graph can capture it."""
        ...

    def collect(self) -> None:
        """Copies the results into the case's output tensors, if the call writes elsewhere. Not timed.

        It may overwrite its source after the copy, so that a replay that computes nothing is noticed. Launch once
        before each call of it.
        """
        ...


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """Third-party kernels behind a Python call. They run on a device only: a machine has no PTX to run.

    `prepare(tensors)` does the untimed one-time work. `software` maps each package that runs to its version, for the
    record. `prepares` names the inputs that `prepare` converts, so that the call no longer reads these tensors. A
    benchmark changes the other inputs, and the results must follow.
    """

    target: Target
    prepare: Callable[[Mapping[str, torch.Tensor]], PreparedCall]
    software: Mapping[str, str]
    prepares: tuple[str, ...] = ()
    ptx: None = None


AnyProgram = Program | HostProgram | PythonProgram

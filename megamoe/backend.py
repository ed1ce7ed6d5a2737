"""The contract between a kernel author and the harness: Program is data, an Executor runs it.

A backend turns a `Case` into a `Program` for one target. The program names tensors; the harness owns their
memory. An executor binds names to memory, encodes tensor maps and performs the launches in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from megamoe.case import Case

Target = Literal["sm_90a", "sm_100a"]
TARGETS: tuple[Target, ...] = ("sm_90a", "sm_100a")
Dim3 = tuple[int, int, int]
Swizzle = Literal["none", "32B", "64B", "128B"]


@dataclass(frozen=True, slots=True)
class BufferArg:
    """A 64-bit device address: the first byte of `tensor`, or of a scratch buffer, plus `offset` bytes."""

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

    `dims` and `box` in elements; `strides` in bytes, for dimensions 1 and up (so one entry fewer than `dims`).
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
    """One kernel launch. `dynamic_smem` in bytes a CTA; `args` in the order of the entry's parameters."""

    entry: str
    grid: Dim3
    block: Dim3
    args: tuple[KernelArg, ...]
    cluster: Dim3 = (1, 1, 1)
    dynamic_smem: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """PTX and the launches that perform one case. `scratch` maps names of workspaces to their size in bytes."""

    target: Target
    ptx: str
    launches: tuple[Launch, ...]
    scratch: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class PackedFields:
    """What the packed convention passes of a tensor after its address: sizes of `dims`, then strides of `strides`."""

    dims: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dim_bits: int = 32
    stride_bits: int = 64


@dataclass(frozen=True, slots=True)
class TensorArg:
    """A tensor with its layout: `shape` and `strides` in elements (None: compact, last fastest), `offset` in bytes.

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
    """The CUDA stream on which the host function shall work; the executor has it."""


@dataclass(frozen=True, slots=True)
class ShapeArg:
    """A tuple of integers (a shape, strides, coordinates) that is one parameter of the host function."""

    sizes: tuple[int, ...]
    bits: Literal[32, 64] = 32


HostArg = TensorArg | BufferArg | ScalarArg | ShapeArg | StreamArg | None


@dataclass(frozen=True, slots=True)
class HostProgram:
    """A compiled host function that launches kernels itself, and the PTX of these kernels.

    `host_object`: a relocatable object for this machine's processor. `entry`: the symbol to call. `convention`:
    "tvm_ffi" passes DLTensors, which the function checks; "packed" passes descriptors, which it trusts. `scratch` as
    in Program. `compiler`: name and version, for error messages.
    """

    target: Target
    ptx: str
    host_object: bytes
    entry: str
    args: tuple[HostArg, ...]
    convention: Literal["tvm_ffi", "packed"] = "tvm_ffi"
    scratch: Mapping[str, int] = field(default_factory=dict[str, int])
    compiler: str = "an unknown compiler"


class PreparedCall(Protocol):
    """A call whose plans, workspaces and layouts exist; see PythonProgram."""

    def enqueue(self) -> None:
        """Launches on torch's current stream; neither allocates anew nor waits, so that a graph can capture it."""
        ...

    def collect(self) -> None:
        """Brings what the call has computed into the case's output tensors, where it writes elsewhere. Not timed.

        May spoil what it has read, so that a replay that computes nothing is noticed: one launch before each.
        """
        ...


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """Somebody else's kernel behind a Python call, for a device only: there is no PTX to hand to a machine.

    `prepare(tensors)` does once what is not timed. `software` names what runs, with versions, for the record.
    """

    target: Target
    prepare: Callable[[Mapping[str, torch.Tensor]], PreparedCall]
    software: Mapping[str, str]
    ptx: None = None


AnyProgram = Program | HostProgram | PythonProgram


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How an executor shall run a program. `schedule`: "eager", "lazy" or "random:SEED" (VM only).

    `accumulate`: "fast" (float32 BLAS), "exact" (float64) or "hopper" (bit-exact model of an H200; VM only).
    `trace`: whether to record what the agents do; an executor that cannot leaves Execution.trace None.
    `outputs`: the tensors that the program may write, None for any; an executor that can refuses writes to others.
    """

    schedule: str = "eager"
    accumulate: str = "fast"
    step_budget: int = 200_000_000
    trace: bool = False
    outputs: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Execution:
    """What an executor observed. `violation` is a sentence when the kernel broke a rule of the machine.

    `trace` is JSON-like data that megamoe.explain_trace reads.
    """

    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    violation: str | None = None
    trace: Mapping[str, object] | None = None


class UnsupportedError(Exception):
    """This backend or executor cannot do this case or target; the text says why. Becomes status `unsupported`."""


@runtime_checkable
class Backend(Protocol):
    """A source of programs.

    A backend may have `executors`, a tuple of names: it owes rows on these only. Without it, it owes rows on all.
    """

    name: str

    def targets(self, op: str) -> tuple[Target, ...]:
        """Targets for which this backend has `op`; empty if it has none."""
        ...

    def build(self, case: Case, target: Target) -> AnyProgram:
        """The program of `case`. Raises UnsupportedError with a reason for what it cannot do."""
        ...


@runtime_checkable
class Borrowed(Backend, Protocol):
    """A backend that calls packages of others, which need not be installed."""

    def missing(self) -> str | None:
        """A sentence about what is not installed here; None if all is."""
        ...


@runtime_checkable
class Executor(Protocol):
    """A machine that runs programs.

    An executor may have `device`, the torch device in whose memory the tensors of its programs lie; without it, "cpu".
    It may have `schedules`, a tuple of names: rows are owed on it under these only. Without it, under all.
    """

    name: str

    def unavailable(self, target: Target) -> str | None:
        """Why this machine cannot run `target` here and now, or None if it can."""
        ...

    def run(self, program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        """Run every launch in order on `tensors` (contiguous, in memory that this executor can address).

        UnsupportedError, or an exception of its own, for a kind of program that it does not run.
        """
        ...


def backend_names() -> tuple[str, ...]:
    """Names of all registered backends, sorted. A registration is one line of pyproject.toml."""
    return tuple(sorted(_points("megamoe.backends")))


def executor_names() -> tuple[str, ...]:
    """Names of all registered executors, sorted."""
    return tuple(sorted(_points("megamoe.executors")))


# Every look goes through the metadata of all that is installed, and each row of a matrix asks.
@cache
def _points(group: str) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def _load(group: str, kind: str, name: str) -> object:
    points = _points(group)
    if ":" in name:
        return _load_attribute(group, kind, name)
    if name not in points:
        known = ", ".join(sorted(points)) or "none"
        raise UnsupportedError(
            f"there is no {kind} named {name!r}; registered in pyproject.toml: {known}; "
            f"one of your own is named package.module:ATTRIBUTE"
        )
    return points[name].load()


def _load_attribute(group: str, kind: str, name: str) -> object:
    try:
        return EntryPoint(name, name, group).load()
    except (ModuleNotFoundError, AttributeError) as error:
        raise UnsupportedError(f"the {kind} {name!r} cannot be loaded: {error}") from error


def load_backend(name: str) -> Backend:
    """The backend registered under `name`, or the object at "package.module:ATTRIBUTE", which needs no registration.

    Raises UnsupportedError when there is none; an exception of the module itself passes through.
    """
    loaded = _load("megamoe.backends", "backend", name)
    if not isinstance(loaded, Backend):
        raise UnsupportedError(
            f"the backend {name!r} is of type {type(loaded).__name__}, without name, targets() and build()"
        )
    return loaded


def load_executor(name: str) -> Executor:
    """The executor registered under `name`, or the object at "package.module:ATTRIBUTE"; raises as load_backend."""
    loaded = _load("megamoe.executors", "executor", name)
    if not isinstance(loaded, Executor):
        raise UnsupportedError(
            f"the executor {name!r} is of type {type(loaded).__name__}, without name, unavailable() and run()"
        )
    return loaded

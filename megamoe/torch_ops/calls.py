"""From tensors to a kernel: which backend, target and executor perform a call, and the call itself.

A call is made once for each key of shapes and options, and kept. On a device it holds a program that is loaded there; a
warm call allocates its outputs and one block of workspaces from torch's allocator, stores addresses and launches. On a
CPU it runs the program in the machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, Final, Protocol

import torch
from torch._C._dynamo import guards
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe import SPECS
from megamoe.contract import (
    AnyProgram,
    Case,
    Executor,
    HostProgram,
    LoadedProgram,
    LoadingExecutor,
    Program,
    RunOptions,
    ScalarArg,
    Target,
    UnsupportedError,
    as_program,
    load_backend,
    load_executor,
)
from megamoe.contract.program import TARGETS
from megamoe.spec.load import load_spec
from megamoe.spec.spec import Spec

# Shape, strides and dtype to a new tensor on the current device, as code that torch.compile writes makes it. Stubs
# do not know it.
empty_on_device = guards._empty_strided_cuda  # pyright: ignore[reportAttributeAccessIssue]
MACHINE, DEVICE = "vm", "gpu"
MACHINE_TARGETS: Final[tuple[Target, ...]] = ("sm_100a", "sm_90a")
"""What a CPU runs, the first that can: kernels of sm_100a cost the machine less than those of sm_90a, whose MoE repacks
weights in each call."""
PREFERRED: Final[Mapping[str, tuple[str, ...]]] = {DEVICE: ("cutedsl", "ptx"), MACHINE: ("ptx", "cutedsl")}
"""Backends by executor, the first that can do the case is taken: the faster kernels on a device; on a CPU those that
need no compiler."""
ALIGNMENT: Final = 16
"""Bytes. Bulk copies and tensor maps want it of an address (PTX ISA, cp.async.bulk; CUDA driver API, tensor maps)."""
SHARED_BYTES: Final = 1 << 16
EMPTY_AXES: Final = ("batch", "t", "total_q", "tokens")
"""Of an output without elements one of these is 0. No kernel is launched for it."""
BLOCK_ALIGNMENT: Final = 512
"""Of a workspace in its block: what torch's allocator gives."""


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a call makes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call shall do.

    `axes`: of the case. `inputs`: names, in the order in which a call gives the tensors. `weights`: those of them that
    a program may bring into a layout of its own. `work`: what it costs the machine, in the unit of `bound`; `unit` says
    what that is. `device`: number of the device, -1 for the CPU.
    """

    op: str
    axes: Mapping[str, int | float | str | bool | None]
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[Output, ...]
    work: int
    bound: int
    unit: str
    device: int
    backend: str | None


class OpCall(Protocol):
    """An op at one shape on one device."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """New outputs for `inputs` of the shapes that the call was made for.

        Those that are not contiguous, or begin at no multiple of ALIGNMENT bytes, are copied first.
        """
        ...


def require_kinds(given: Mapping[str, object], options: Mapping[str, str]) -> None:
    """ValueError for what is no tensor among `given` or, by `options`, no option of its kind.

    A kind is a word of an operator's schema: bool, int, float or str, with ? where None will do.
    """
    for name, value in given.items():
        kind = options.get(name, "tensor")
        if value is None and kind.endswith("?"):
            continue
        # A bool is an int, too.
        if isinstance(value, _KINDS[kind.rstrip("?")][0]) and isinstance(value, bool) == (kind == "bool"):
            continue
        none = " or None" if kind.endswith("?") else ""
        raise ValueError(f"{name} is {repr(value)[:80]}; it must be {_KINDS[kind.rstrip('?')][1]}{none}")


# torch.compile passes symbols for sizes that change.
_KINDS: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "tensor": ((torch.Tensor,), "a tensor"),
    "bool": ((bool,), "True or False"),
    "int": ((int, torch.SymInt), "an integer"),
    "float": ((int, float, torch.SymInt, torch.SymFloat), "a number"),
    "str": ((str,), "text"),
}


def require_one_device(said: str, tensors: Iterable[torch.Tensor]) -> None:
    """ValueError if `tensors` are on several devices; `said` names them.

    The dispatcher gives tensors of which one is on `meta` to the function for fakes, which computes nothing. That asks
    too, but torch.compile makes another error of what it raises: the public functions ask in every call.
    """
    devices = dict.fromkeys([one.device for one in tensors])
    if len(devices) > 1:
        raise ValueError(f"{said} must be on one device; they are on {' and '.join(map(str, devices))}")


def with_defaults(options: Sequence[object], defaults: Sequence[object]) -> tuple[Any, ...]:
    """`options` of an operator: the dispatcher leaves out those at their defaults, from the last on."""
    return (*options, *defaults[len(options) :])


def refuse_derivatives(op: str, tensors: Iterable[object]) -> None:
    """RuntimeError if one of `tensors` requires a gradient, or has a tangent (torch.func.jvp)."""
    backward, forward = torch.is_grad_enabled(), forward_ad._current_level >= 0
    if not backward and not forward:
        return
    for one in tensors:
        if not isinstance(one, torch.Tensor):
            continue
        if (backward and one.requires_grad) or (forward and forward_ad.unpack_dual(one).tangent is not None):
            raise RuntimeError(
                f"megamoe.{op} has no backward, and no forward derivative: call it on tensors without tangents, under "
                f"torch.no_grad() or torch.inference_mode()"
            )


def without_derivatives(op: str, overload: Any) -> Callable[..., Any]:
    """What stands in the dispatcher for the derivative of `overload`: it refuses, or goes on to the op itself.

    Without it torch would give outputs that require no gradient and have no tangent, and not say so.
    """

    def refusing(keys: Any, *args: Any) -> Any:
        tensors = (one for arg in args for one in (arg if isinstance(arg, list | tuple) else (arg,)))
        refuse_derivatives(op, tensors)
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *args)

    return refusing


@cache
def spec_of(op: str) -> Spec:
    """The spec of `op`, as it comes with megamoe."""
    return load_spec(SPECS / f"{op}.yaml")


def case_of(wanted: Wanted) -> Case:
    """The case that `wanted` names. ValueError, with the limit of the spec, if there is none."""
    spec = spec_of(wanted.op)
    if (reason := spec.admits(wanted.axes)) is not None:
        raise ValueError(f"megamoe has no such case of {wanted.op}: {reason}")
    return spec.case(**wanted.axes)  # pyright: ignore[reportArgumentType]


def call_for(wanted: Wanted) -> OpCall:
    """The call that does what `wanted` says.

    ValueError for sizes outside the spec, or too large for the machine; UnsupportedError, with the reason of each
    backend, if none has such a kernel here.
    """
    axes = {name: 1 if name in EMPTY_AXES and value == 0 else value for name, value in wanted.axes.items()}
    case = case_of(replace(wanted, axes=axes))
    if axes != wanted.axes:
        return EmptyCall(wanted)
    if wanted.device < 0:
        if wanted.work > wanted.bound:
            raise ValueError(
                f"on a CPU {wanted.op} runs in the virtual machine, which takes small sizes: {wanted.unit} are "
                f"{wanted.work} here and may be {wanted.bound}"
            )
        return _first_that_can(wanted, case, load_executor(MACHINE), MACHINE_TARGETS)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{wanted.op} is called for the first time with these sizes ({case.id}) while a CUDA graph is captured; "
            f"call it once before, so that its kernels are loaded"
        )
    with torch.cuda.device(wanted.device):
        executor = load_executor(DEVICE)
        refused: list[str] = []
        for target in TARGETS:
            reason = executor.unavailable(target)
            if reason is None:
                return _first_that_can(wanted, case, executor, (target,))
            refused.append(reason)
        raise UnsupportedError("; ".join(dict.fromkeys(refused)))


def _first_that_can(wanted: Wanted, case: Case, executor: Executor, targets: Sequence[Target]) -> OpCall:
    names = (wanted.backend,) if wanted.backend else PREFERRED[executor.name]
    refused: list[str] = []
    for target, name in product(targets, names):
        try:
            program = as_program(load_backend(name).build(case, target), name)
            if isinstance(executor, LoadingExecutor):
                return DeviceCall(wanted, program, executor)
            return MachineCall(wanted, program, executor)
        except UnsupportedError as reason:
            refused.append(f"{name}: {reason}")
    reasons = "; ".join(dict.fromkeys(refused))
    raise UnsupportedError(f"no kernel does {case.id} on {' or '.join(targets)}: {reasons}")


def _as_read(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of it if it is not contiguous or begins at no multiple of ALIGNMENT bytes."""
    if tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class EmptyCall:
    """Outputs without elements."""

    wanted: Wanted

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Looks at the device of the first input."""
        return [torch.empty(one.shape, dtype=one.dtype, device=inputs[0].device) for one in self.wanted.outputs]


class MachineCall:
    """A program in the virtual machine, on CPU tensors."""

    def __init__(self, wanted: Wanted, program: AnyProgram, executor: Executor) -> None:
        self._wanted, self._program, self._executor = wanted, program, executor
        self._options = RunOptions(outputs=tuple(one.name for one in wanted.outputs))

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs it. RuntimeError with the machine's sentence if the kernel breaks a rule."""
        outputs = {one.name: torch.empty(one.shape, dtype=one.dtype) for one in self._wanted.outputs}
        tensors = dict(zip(self._wanted.inputs, map(_as_read, inputs), strict=True)) | outputs
        violation = self._executor.run(self._program, tensors, self._options).violation
        if violation is not None:
            raise RuntimeError(f"the kernel of {self._wanted.op} broke a rule of the machine: {violation}")
        return list(outputs.values())


class DeviceCall:
    """A program that is loaded on a device.

    Addresses go to it in the order inputs, outputs, prepared weights, workspaces.
    """

    def __init__(self, wanted: Wanted, program: AnyProgram, executor: LoadingExecutor) -> None:
        if not isinstance(program, Program | HostProgram):
            raise UnsupportedError("it is a Python call, which holds its tensors")
        self._device = wanted.device
        self._outputs = [(one.shape, _compact(one.shape), one.dtype) for one in wanted.outputs]
        made = _prepared_by(program)
        kept = {name: size for name, size in program.scratch.items() if name in made}
        scratch = {name: size for name, size in program.scratch.items() if name not in made}
        self._kept_offsets, self._kept_bytes = _laid_out(kept)
        self._offsets, self._bytes = _laid_out(scratch)
        self._places: dict[int, list[int]] = {}
        """stream -> addresses of the workspaces in the block that its calls share, which is never freed."""
        self._loaded: LoadedProgram = executor.load(
            program, (*wanted.inputs, *(one.name for one in wanted.outputs), *kept, *scratch)
        )
        self._launch = self._loaded.launch
        self._others = torch.cuda.device_count() > 1
        # Code that torch.compile writes calls these names of torch._C too: their public kin parse options and make
        # objects of streams, which costs as much as the launch. A torch without CUDA has none of them.
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice
        self._stream_of: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
        self._weights = tuple(i for i, name in enumerate(wanted.inputs) if name in wanted.weights) if kept else ()
        self._kind = (wanted.device, _maker_of(program), tuple(kept.items()))

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Enqueues it on torch's current stream. DeviceError if the driver refuses."""
        device = self._device
        if self._others and self._current_device() != device:
            with torch.cuda.device(device):
                return self(inputs)
        stream = self._stream_of(device)
        addresses: list[int] = []
        for tensor in inputs:
            address = tensor.data_ptr()
            if address % ALIGNMENT or not tensor.is_contiguous():
                return self([_as_read(one) for one in inputs])
            addresses.append(address)
        outputs: list[torch.Tensor] = []
        for shape, strides, dtype in self._outputs:
            tensor = empty_on_device(shape, strides, dtype)
            addresses.append(tensor.data_ptr())
            outputs.append(tensor)
        if self._weights:
            base = self._prepared(inputs, stream).data_ptr()
            addresses += [base + offset for offset in self._kept_offsets]
        if self._bytes:
            places = self._places.get(stream)
            # Stream 0 is the legacy one, which cannot be captured (CUDA runtime API, cudaStreamBeginCapture).
            if places is None or (stream and self._capturing()):
                # What is enqueued on the stream later may have its memory: it may die before the kernels end.
                _held, places = self._workspaces(stream)
            addresses += places
        self._launch(addresses, stream)
        return outputs

    def _workspaces(self, stream: int) -> tuple[torch.Tensor, list[int]]:
        """Memory for the workspaces, and their addresses. Small ones share a block a stream, whose calls run in order.

        A graph has memory of its own: its replays may run beside the stream that it was captured on.
        """
        shared = self._bytes <= SHARED_BYTES and not self._capturing()
        block = _SHARED.get((self._device, stream)) if shared else None
        if block is None:
            block = _block(SHARED_BYTES if shared else self._bytes)
        base = block.data_ptr()
        places = [base + offset for offset in self._offsets]
        if shared:
            _SHARED[self._device, stream] = block
            self._places[stream] = places
        return block, places

    def _prepared(self, inputs: Sequence[torch.Tensor], stream: int) -> torch.Tensor:
        """The weights in the kernels' own layout, made by the first call and again when they have changed.

        Work of `stream`, the current one, comes after what made the layout.
        """
        weights = [inputs[index] for index in self._weights]
        key = (self._kind, tuple(tensor.data_ptr() for tensor in weights))
        versions = tuple(0 if tensor.is_inference() else tensor._version for tensor in weights)
        found = _PREPARED.get(key)
        if found is not None and found.versions == versions and not any(one.expired() for one in found.storages):
            if stream not in found.ordered:
                found.order(stream, self._device)
            return found.block
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the weights are new or have changed since the last call, and a CUDA graph is being captured; call the "
                "op once before the capture, so that they are brought into the kernels' layout"
            )
        for old in [old for old, one in _PREPARED.items() if any(storage.expired() for storage in one.storages)]:
            del _PREPARED[old]
        found = _PREPARED.get(key)
        if found is None:
            storages = [StorageWeakRef(one.untyped_storage()) for one in weights]
            found = _PREPARED[key] = _Prepared(storages, _block(self._kept_bytes), torch.cuda.Event())
        else:
            # A block that a captured graph reads stays where it is. Other streams, and replays on streams that nobody
            # names, may read it now.
            found.versions = None
            torch.cuda.synchronize(self._device)
        base = found.block.data_ptr()
        addresses = [tensor.data_ptr() for tensor in inputs] + [0] * len(self._outputs)
        addresses += [base + offset for offset in self._kept_offsets] + [0] * len(self._offsets)
        self._loaded.prepare(addresses, stream)
        current = torch.cuda.current_stream(self._device)
        found.ready.record(current)
        found.block.record_stream(current)
        found.versions, found.ordered = versions, {stream}
        return found.block


@dataclass(slots=True)
class _Prepared:
    """Weights in the kernels' own layout, as long as the `storages` of the originals live.

    `ready`: recorded behind what made the layout. `ordered`: streams whose work comes after it. `versions`: of the
    originals, None until the layout is made and when it is known to be old.
    """

    storages: list[StorageWeakRef]
    block: torch.Tensor
    ready: torch.cuda.Event
    ordered: set[int] = field(default_factory=set[int])
    versions: tuple[int, ...] | None = None

    def order(self, stream: int, device: int) -> None:
        """Work of `stream`, the current one of `device`, comes after the layout, and the block outlives it.

        Nothing for a stream that is captured: CUDA forbids it to wait for what is outside of its graph, and
        torch.cuda.graph has waited for the device.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(device)
        current.wait_event(self.ready)
        self.block.record_stream(current)
        self.ordered.add(stream)


def forget_layouts(weights: Iterable[torch.Tensor]) -> None:
    """The next call with `weights`, or with views of them, brings them into the kernels' layout again."""
    storages = {StorageWeakRef(one.untyped_storage()) for one in weights}
    for one in _PREPARED.values():
        if not storages.isdisjoint(one.storages):
            # The block stays: a captured graph may read it.
            one.versions = None


_SHARED: dict[tuple[int, int], torch.Tensor] = {}
"""(device, stream) -> SHARED_BYTES for small workspaces, as torch keeps them for cuBLAS."""
_PREPARED: dict[tuple[object, tuple[int, ...]], _Prepared] = {}


def _block(size: int) -> torch.Tensor:
    """`size` bytes on the current device."""
    return empty_on_device((size,), (1,), torch.uint8)


def _compact(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements, the last dimension the fastest."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _laid_out(sizes: Mapping[str, int]) -> tuple[list[int], int]:
    """Where workspaces of `sizes` bytes begin in one block, and the bytes of the block."""
    offsets: list[int] = []
    end = 0
    for size in sizes.values():
        offsets.append(end)
        end += -(-size // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
    return offsets, end


def _prepared_by(program: Program | HostProgram) -> frozenset[str]:
    """The workspaces that hold what `program` makes of weights."""
    if isinstance(program, Program):
        named = {arg.tensor for launch in program.prepare for arg in launch.args if not isinstance(arg, ScalarArg)}
        return frozenset(named & set(program.scratch))
    if program.prepare and not program.prepared:
        raise UnsupportedError("its program prepares weights and does not say which workspaces hold them")
    return frozenset(program.prepared)


def _maker_of(program: Program | HostProgram) -> object:
    """What makes the layout of weights: programs that share it make the same of the same weights."""
    if isinstance(program, HostProgram):
        return program.entry, program.host_object
    wanted = {launch.entry for launch in program.prepare}
    parts = re.split(r"(?m)^(?=\.visible \.entry )", program.ptx) if wanted else []
    return program.prepare, "".join(part for part in parts if any(f".entry {name}(" in part for name in wanted))

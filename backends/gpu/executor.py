"""The executor `gpu`: runs and times programs on torch's current CUDA device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from backends.gpu.driver import call as call_driver
from backends.gpu.driver import faults_of_others
from megamoe.contract import (
    AnyProgram,
    DeviceError,
    Execution,
    HostProgram,
    LoadedProgram,
    PreparedCall,
    Program,
    RunOptions,
    Target,
    UnsupportedError,
)

if TYPE_CHECKING:
    import torch

    from backends.gpu.stopwatch import DeviceStopwatch
    from megamoe.contract import DeviceFacts, Flush

CAPABILITIES: Final[Mapping[Target, tuple[int, int]]] = {"sm_90a": (9, 0), "sm_100a": (10, 0)}
"""Code with the suffix "a" runs on exactly one compute capability (PTX ISA, .target)."""
NEEDED: Final = {"cuda.bindings": "cuda-bindings", "pynvml": "nvidia-ml-py"}


class GpuExecutor:
    """Runs programs in order on torch's current stream. Only the hardware schedules what runs inside a program.

    `flush` is how its stopwatches empty the L2 before a cold sample. `gpu` on the command line reads a buffer;
    `backends.gpu.executor:DIRTY` writes one, as triton.testing.do_bench does.
    """

    device = "cuda"
    schedules = ("eager",)

    def __init__(self, name: str = "gpu", flush: Flush = "clean") -> None:
        self.name = name
        self.flush: Flush = flush

    def unavailable(self, target: Target) -> str | None:
        """Why `target` cannot run here: no torch with CUDA, no driver, no device, or another compute capability."""
        reason = _no_device()
        if reason is not None:
            return reason
        import torch

        found, wanted = torch.cuda.get_device_capability(), CAPABILITIES.get(target)
        if wanted is None:
            return f"the gpu executor knows {', '.join(CAPABILITIES)}, not {target}"
        if found != wanted:
            return (
                f"{target} needs compute capability {wanted[0]}.{wanted[1]}; this is {torch.cuda.get_device_name()} "
                f"with {found[0]}.{found[1]}"
            )
        return None

    def run(self, program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        """Runs the program once on `tensors`, in device memory, and waits for it to finish.

        Raises DeviceError if the driver refuses, and DeviceLostError if a kernel faults; the process is unusable after
        that.
        """
        with self.bind(program, tensors, options) as call:
            _perform(call)
        return Execution()

    @contextmanager
    def bind(
        self, program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions
    ) -> Iterator[PreparedCall]:
        """`program`, loaded and ready on `tensors`. Each binding has its own workspaces, filled with noise."""
        _check(program, tensors, options)
        if isinstance(program, Program):
            from backends.gpu.kernels import bound_program

            with bound_program(program, tensors) as call:
                yield call
        elif isinstance(program, HostProgram):
            from backends.gpu.host_program import HostCall

            yield HostCall(program, tensors)
        else:
            with faults_of_others("preparing the call"):
                call = program.prepare(tensors)
            yield call

    def load(self, program: AnyProgram, names: Sequence[str]) -> LoadedProgram:
        """`program` on torch's current device until the process ends. Programs with the same PTX share one module.

        Raises UnsupportedError for a Python call.
        """
        import torch

        if isinstance(program, Program):
            from backends.gpu.kernels import LoadedKernels, loaded_module

            module = loaded_module(program.ptx, program.target, torch.cuda.current_device())
            return LoadedKernels(program, names, module)
        if isinstance(program, HostProgram):
            from backends.gpu.host_program import LoadedHost

            return LoadedHost(program, names)
        raise UnsupportedError(f"a {type(program).__name__} holds its tensors; only compiled programs are loaded")

    @contextmanager
    def stopwatch(self, call: PreparedCall) -> Iterator[DeviceStopwatch]:
        """A stopwatch for `call`. Entering the context warms up and captures."""
        from backends.gpu.stopwatch import DeviceStopwatch

        with faults_of_others("timing"):
            yield DeviceStopwatch(call, flush=self.flush)

    def bare_read_us(self, size: int) -> float | None:
        """Median microseconds, cold, of a kernel that only reads `size` bytes; None if that does not fit."""
        import torch

        from backends.gpu.bare_read import bare_read_us

        found = torch.cuda.get_device_capability()
        target = next((target for target, wanted in CAPABILITIES.items() if wanted == found), None)
        return None if target is None else bare_read_us(self, target, size, self.flush)

    def facts(self) -> DeviceFacts:
        """The device and its measured ceilings. Measured once per process."""
        return _facts()

    def throttled(self) -> str | None:
        """Why the device lowered its clocks since the last call; None if it did not."""
        from backends.gpu.driver import throttle_reasons

        return throttle_reasons()


def _perform(call: PreparedCall) -> None:
    import torch

    with faults_of_others("running the program"):
        call.enqueue()
        stream = torch.cuda.current_stream().cuda_stream
        call_driver("cuStreamSynchronize", stream, doing="waiting for the end of the program")
        call.collect()
        call_driver("cuStreamSynchronize", stream, doing="waiting for the results")


def _check(program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> None:
    if options.schedule != "eager":
        raise DeviceError(f"the schedule {options.schedule!r} on a device, whose only one is called eager")
    for name, tensor in tensors.items():
        if tensor.device.type != "cuda" or not tensor.is_contiguous():
            raise DeviceError(
                f"tensor {name!r} is on {tensor.device} with strides {tensor.stride()}; the gpu executor needs "
                f"contiguous tensors in the device's memory"
            )


@cache
def _facts() -> DeviceFacts:
    from backends.gpu.facts import measured_facts

    return measured_facts()


@cache
def _no_device() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    for module, package in NEEDED.items():
        if not _found(module):
            return f"the package {package} is not installed; the extra `gpu` of megamoe has it"
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch finds no device: {' '.join(str(error).split())}"
    return "torch finds no device"


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


EXECUTOR = GpuExecutor()
DIRTY = GpuExecutor("gpu-dirty", "dirty")

# pyright: reportMissingImports=false
"""The door for CuTeDSL: `run(fn, x, y, 3.0, target="sm_100a")` on CPU tensors, with no GPU.

    import megamoe.cutedsl

    megamoe.cutedsl.run(fn, x, y, 3.0, target="sm_100a")

`fn` is a cute.jit function, an object whose __call__ is one, or the result of cute.compile. CuTeDSL compiles it and
packs its arguments as usual. Its host code runs on this processor, the kernels that it launches run on the machine.
`install` does the same for a whole process, so functions can be called as on a device.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megamoe.contract.backend import UnsupportedError
from megamoe.contract.machine import CompiledHost, LaunchRefusedError
from megamoe.contract.scratch import scratch_folder
from megamoe.given.host_memory import SMALLEST_ADDRESS, Reached, view_of
from megamoe.vm import Device, host_waited, submit

try:
    import cutlass
except ModuleNotFoundError as missing:
    if missing.name != "cutlass":
        raise
    raise ModuleNotFoundError("megamoe.cutedsl needs CuTeDSL: the extra `cutedsl` of megamoe", name="cutlass") from None

import cuda.bindings.driver as cuda_driver
import cuda.bindings.runtime as cuda_runtime
import cutlass.testing
import cutlass.utils
import torch
from cuda.bindings.driver import CUresult, CUstream
from cuda.bindings.runtime import cudaError_t
from cutlass.base_dsl.common import DSLCudaRuntimeError
from cutlass.base_dsl.compiler import CompileOptions, DumpDir, EnableTVMFFI, GenerateLineInfo, KeepPTX
from cutlass.base_dsl.jit_executor import ExecutionArgs, JitCompiledFunction
from cutlass.cute import runtime as cute_runtime
from cutlass.cute import testing as cute_testing
from cutlass.cutlass_dsl import CuTeDSL

SM_COUNT = 4
"""The SM count that persistent kernels see by default. It is small so that each CTA does several tiles."""
_PREFIX = "megamoe"
_TENSOR, _POINTER, _FLOAT = "cute.Tensor", "cute.Pointer", "float"
_CUDA = 2
"""kDLCUDA (dlpack.h)."""
_LAST_ADDRESS = 1 << 47
"""The end of this process's addresses. Packed numbers may lie below it, but no live tensor is there."""


def run(
    fn: Callable[..., Any], *args: object, target: str = "sm_100a", sm_count: int = SM_COUNT, schedule: str = "eager",
    accumulate: str = "fast", step_budget: int = 200_000_000, profile: str = "default",
    suppress: str | Path | None = None, **named: object,
) -> Any:  # fmt: skip
    """Call `fn`, run every kernel that it launches to its end, and return what `fn` returns.

    `args`, `named`: whatever CuTeDSL accepts, that is torch CPU tensors and NumPy arrays (they become cute tensors,
    with assumed alignment 16 if they are 16-byte aligned), cute tensors and pointers of cute.runtime, numbers, tuples,
    streams. `sm_count`: the number of SMs that HardwareInfo and the host code see. The other options are those of
    megamoe.vm.Device.

    KernelFault for findings that count in the profile and for one that ends a launch, LaunchRefusedError for host code
    or a launch that no GPU would accept, UnsupportedError for what the machine lacks. Errors of CuTeDSL pass through.
    """
    options = {"sm_count": sm_count, "schedule": schedule, "accumulate": accumulate, "step_budget": step_budget}
    with _installed(Device(target, profile=profile, suppress=suppress, **options)):
        return fn(*map(_as_cute, args), **{name: _as_cute(value) for name, value in named.items()})


def install(
    target: str | Device = "sm_100a", *, sm_count: int = SM_COUNT, schedule: str = "eager", accumulate: str = "fast",
    step_budget: int = 200_000_000, profile: str = "default", suppress: str | Path | None = None,
) -> Device:  # fmt: skip
    """Let every cute.jit function of this process run on the machine, until `uninstall`. Options as in `run`.

    `target`: a target name or a Device.
    """
    uninstall()
    options = {"sm_count": sm_count, "schedule": schedule, "accumulate": accumulate, "step_budget": step_budget}
    device = target
    if not isinstance(device, Device):
        device = Device(device, profile=profile, suppress=suppress, **options)
    _INSTALLED.append(_installed(device))
    _INSTALLED[-1].__enter__()
    return device


def uninstall() -> None:
    """Let functions run on a GPU again."""
    if _INSTALLED:
        _INSTALLED.pop().__exit__(None, None, None)


_INSTALLED: list[Any] = []


@contextmanager
def _installed(device: Device) -> Iterator[None]:
    """Patch every part of CuTeDSL that has to know about the machine."""
    dsl = CuTeDSL._get_dsl()
    arch, file_caching = dsl.envar._arch, dsl.envar.disable_file_caching
    sm_count = device.sm_count or SM_COUNT
    info = cutlass.utils.HardwareInfo
    with scratch_folder("cutedsl") as folder:
        replaced = [
            _replace(CompileOptions, "apply_envar_settings", partial(_keeping_ptx, str(folder))),
            _replace(JitCompiledFunction, "run_compiled_program", partial(_run, device)),
            _replace(ExecutionArgs, "generate_execution_args", _with_stream),
            _replace(CuTeDSL, "generate_mlir_function_types", _packing),
            _replace(ExecutionArgs, "record_arg_specs_from_compile_args", _recorded),
            _replace(cute_runtime._Tensor, "__init__", _made),
            _replace(info, "__init__", lambda own, self, device_id=0: None),
            _replace(info, "get_max_active_clusters", lambda own, self, size, stream=None: max(sm_count // size, 1)),
            _replace(info, "get_device_multiprocessor_count", lambda own, self: sm_count),
            *(_replace(place, name, _timed) for place, name in _TIMERS),
            _replace(cutlass.testing, "_benchmark_for_autotune", _tuned),
            _replace(cutlass.cuda, "initialize_cuda_context", lambda own, *asked, **options: None),
            _replace(cutlass.cuda, "stream_sync", lambda own, *asked, **options: host_waited()),
            _replace(cuda_driver, "cuInit", lambda own, flags: (CUresult.CUDA_SUCCESS,)),
            _replace(cuda_driver, "cuDeviceGetCount", lambda own: (CUresult.CUDA_SUCCESS, 1)),
            *(_replace(cuda_runtime, name, partial(_answered, answer)) for name, answer in _RUNTIME.items()),
        ]
        dsl.envar.arch, dsl.envar.disable_file_caching = device.machine.target, True
        try:
            yield
        finally:
            for owner, name, own in replaced:
                setattr(owner, name, own)
            dsl.envar._arch, dsl.envar.disable_file_caching = arch, file_caching


_MEMORY: dict[int, Any] = {}
"""Live cudaMalloc allocations by address."""


def _malloc(size: int) -> int:
    """Host memory, aligned as on a device."""
    room = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
    address = -(-room.data_ptr() // _ALIGNMENT) * _ALIGNMENT
    _MEMORY[address] = room
    return address


_ALIGNMENT = 256
_RUNTIME: dict[str, Callable[..., object]] = {
    "cudaMalloc": _malloc,
    "cudaFree": lambda pointer: _MEMORY.pop(int(pointer), None),
    "cudaMemset": lambda pointer, value, size: ctypes.memset(int(pointer), value, size),
    "cudaDeviceSynchronize": host_waited,
    "cudaStreamSynchronize": lambda stream: host_waited(),
    "cudaGetLastError": lambda: None,
}
"""Host versions of the cuda.bindings.runtime calls that example programs make around their kernels."""


def _answered(answer: Callable[..., object], own: object, *asked: object) -> tuple[object, ...]:
    found = answer(*asked)
    return (cudaError_t.cudaSuccess, found) if answer is _malloc else (cudaError_t.cudaSuccess,)


_TIMERS = ((cutlass.testing, "benchmark"), (cute_testing, "benchmark"))


def _tuned(
    own: object, function: Callable[..., object], *args: object, warmup_iterations: int = 0, iterations: int = 0,
    use_cold_l2: bool = True, print_verbose: bool = False, current_stream: object = None, **named: object,
) -> float:  # fmt: skip
    """Stands in for the function that times a configuration. A tuner's last call makes the results that count."""
    function(*args, **named)
    return 1.0


def _timed(own: object, function: Callable[..., object], *rest: object, **options: Any) -> float:
    """Stands in for the function that times a function. Without a clock, everything takes the same 1.0 us.

    Calls the function once if the caller keeps the arguments. If a generator makes them, nothing is called: nobody sees
    the results.
    """
    if (given := options.get("kernel_arguments")) is not None:
        function(*given.args, **given.kwargs)
    return 1.0


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> tuple[Any, str, Any]:
    """Replace a method or function by `replacement`(original, ...); returns what restores it."""
    own = getattr(owner, name)

    def method(*args: Any, **named: Any) -> Any:
        return replacement(own, *args, **named)

    setattr(owner, name, method)
    return owner, name, own


# Compiling


def _keeping_ptx(folder: str, own: Callable[..., object], options: Any, envar: Any, function: str) -> object:
    """Applies the environment's options, then asks for PTX with line information. envar.keep_ptx would disable
    CuTeDSL's cache.

    A TVM FFI function would call the CUDA runtime by itself, so it is compiled with CuTeDSL's own convention instead.
    """
    options.options[KeepPTX].value = options.options[GenerateLineInfo].value = True
    options.options[DumpDir].value = folder
    own(options, envar, function)
    options.options[EnableTVMFFI].value = False


_HOSTS: weakref.WeakKeyDictionary[Any, CompiledHost] = weakref.WeakKeyDictionary()


def _host(compiled: Any) -> CompiledHost:
    """The host object of a compiled function, with its kernels' PTX."""
    if (known := _HOSTS.get(compiled)) is not None:
        return known
    ptx = compiled.__ptx__
    ptx = (ptx.decode() if isinstance(ptx, bytes) else ptx or "").rstrip("\0")
    if compiled.has_gpu_module and ".entry" not in ptx:
        raise UnsupportedError(
            f"{compiled.function_name} was compiled without the machine and has no PTX; compile it inside of run or "
            f"after install, or with cute.compile(..., options='--keep-ptx')"
        )
    arguments = compiled.execution_args
    signature = arguments.signature
    # The object contains the pickled signature, and defaults such as a stream cannot be pickled.
    plain = [one.replace(default=one.empty) for one in signature.parameters.values()]
    arguments.signature = signature.replace(parameters=plain)
    try:
        code = compiled.dump_to_object(_PREFIX)
    finally:
        arguments.signature = signature
    entry = f"_mlir_{_PREFIX}__mlir_ciface_{compiled.function_name}"
    host = CompiledHost(ptx, code, entry, f"CuTeDSL {cutlass.__version__}")
    _HOSTS[compiled] = host
    return host


# Running


def _with_stream(own: Callable[..., Any], arguments: Any, args: Any, named: Any) -> Any:
    """Passes the default stream for a parameter that TVM FFI would have filled from its environment."""
    parameters = list(arguments.signature.parameters.values())
    left = [one for one in parameters[len(args) :] if one.name not in named and one.default is one.empty]
    streams = {one.name: CUstream(0) for one in left if "CUstream" in str(one.annotation)}
    fakes = getattr(arguments, "_megamoe_fakes", {})
    args = [_packed(fakes.get(one.name), arg) for one, arg in zip(parameters, args, strict=False)] + list(
        args[len(parameters) :]
    )
    named = {name: _packed(fakes.get(name), arg) for name, arg in named.items()}
    packed, kept = own(arguments, tuple(args), {**named, **streams})
    # CuTeDSL keeps the second list alive until the call ends.
    _PACKED[:] = [*kept, *args, *named.values()]
    return packed, list(_PACKED)


def _recorded(own: Callable[..., None], arguments: Any, args: Any, named: Any) -> None:
    """Keeps the fake tensors for which a function was compiled: they define how it reads a tensor's layout."""
    own(arguments, args, named)
    names = list(arguments.signature.parameters)
    given = {**dict(zip(names, args, strict=False)), **named}
    arguments._megamoe_fakes = {name: one for name, one in given.items() if type(one) is cute_runtime._FakeTensor}


_PACKED = list[Any]()
"""The objects that own the arguments of the most recently packed call."""


def _packing(own: Callable[..., Any], dsl: Any, *args: Any, **named: Any) -> Any:
    """Notes the owners of the arguments, as _with_stream does, for the call that compiles a function."""
    packed, types, kept = own(dsl, *args, **named)
    _PACKED[:] = [args, named, kept]
    return packed, types, kept


class _PackedTensor:
    """A tensor as host code reads it: its address, then the sizes and strides not known at compile time."""

    def __init__(self, fake: Any, array: Any) -> None:
        sizes, strides = _struct(fake.shape, array.shape), _struct(fake.stride, array.stride())
        fields = [("address", ctypes.c_void_p), ("sizes", type(sizes)), ("strides", type(strides))]
        self._layout = type("_Layout", (ctypes.Structure,), {"_fields_": fields})(array.data_ptr(), sizes, strides)
        self._array = array

    def __c_pointers__(self) -> list[int]:
        return [ctypes.addressof(self._layout)]


def _struct(symbols: Sequence[Any], values: Sequence[int]) -> ctypes.Structure:
    dynamic = [(one.width, value) for one, value in zip(symbols, values, strict=True) if not isinstance(one, int)]
    fields = [(f"_{at}", ctypes.c_int64 if width == 64 else ctypes.c_int32) for at, (width, _) in enumerate(dynamic)]
    return type("_Numbers", (ctypes.Structure,), {"_fields_": fields})(*(value for _, value in dynamic))


def _packed(fake: Any, arg: Any) -> Any:
    """`arg` in the layout that the function was compiled for. CuTeDSL packs sizes in 32 bits and strides in 64; a
    function compiled for TVM FFI may use other widths."""
    if fake is None or not (hasattr(arg, "data_ptr") and hasattr(arg, "stride")):
        return arg
    usual = [one.width == 32 for one in fake.shape if not isinstance(one, int)]
    usual += [one.width == 64 for one in fake.stride if not isinstance(one, int)]
    return arg if all(usual) else _PackedTensor(fake, arg)


def _run(device: Device, own: Callable[..., object], compiled: Any, pointers: Sequence[Any]) -> int:
    """Stands in for JitCompiledFunction.run_compiled_program: the arguments are packed, and nothing has run yet."""
    addresses = [one if isinstance(one, int) else ctypes.cast(one, ctypes.c_void_p).value or 0 for one in pointers]
    machine = device.machine
    if not compiled.has_gpu_module:
        own(compiled, pointers)
        return 0
    host, reached = _host(compiled), _memory_behind(device, addresses)
    # A graph replays later, when the caller may have released the owners of the arguments.
    alive = (pointers, *_PACKED)

    def work() -> object:
        with device.watched(host.ptx):
            machine.call(host, addresses, reached.memory())
        return alive

    try:
        submit(work)
    except LaunchRefusedError as refused:
        if refused.cuda_error:
            raise LaunchFailedError(refused) from refused
        raise
    return 0


class LaunchFailedError(DSLCudaRuntimeError, LaunchRefusedError):
    """A launch that the CUDA runtime refuses with an error that CuTeDSL's callers may handle."""

    def __init__(self, refused: LaunchRefusedError) -> None:
        self.cuda_error = refused.cuda_error
        super().__init__(refused.cuda_error, cudaError_t(refused.cuda_error).name, str(refused))

    def __reduce__(self):
        # The text holds the refusal, which is not kept.
        return Exception.__new__, (type(self), *self.args), self.__dict__


_CUTE: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Cute tensors by the address of their first element; each refers to its source array."""
_FOUND: dict[int, weakref.ref[Any] | None] = {}
"""For each address looked up, the tensor that it points into; None if there is none."""


def _memory_behind(device: Device, pointers: Sequence[int]) -> Reached:
    """The memory behind the packed arguments. Each argument begins with an address or is a number."""
    arrays, sought = list[Any](), list[int]()
    for pointer in pointers:
        value = ctypes.c_uint64.from_address(pointer).value
        if not SMALLEST_ADDRESS <= value < _LAST_ADDRESS:
            continue
        if (made := _CUTE.get(value)) is not None:
            arrays.append(made._megamoe_source)
        elif value not in _FOUND:
            sought.append(value)
        elif (known := _FOUND[value]) is not None:
            if (tensor := known()) is None:
                sought.append(value)
            else:
                arrays.append(tensor)
    reached = Reached(device.machine, arrays, addresses=sought, in_place=True)
    for value in sought:
        at = next((one for one in reached.live if _within(value, one)), None)
        _FOUND[value] = None if at is None else weakref.ref(at)
    return reached


def _within(address: int, array: Any) -> bool:
    view = view_of(array)
    return view is not None and view.allocation <= address < view.allocation + view.size


# Tensors


class _OnDevice:
    """A host array that claims to be on a device, so that CuTeDSL types it as global memory."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **asked: object) -> object:
        capsule = self.array.__dlpack__()
        api = ctypes.pythonapi
        api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        name = api.PyCapsule_GetName(capsule)
        # A DLManagedTensorVersioned has 32 bytes before its DLTensor; there the device type follows the address.
        at = api.PyCapsule_GetPointer(capsule, name) + (0 if name == b"dltensor" else 32) + 8
        ctypes.c_int32.from_address(at).value = _CUDA
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0


def _made(own: Callable[..., None], tensor: Any, source: Any, *args: Any, **named: Any) -> None:
    """Stands in for the constructor of a cute tensor."""
    view = view_of(source)
    own(tensor, source if view is None else _OnDevice(source), *args, **named)
    if view is not None:
        tensor._megamoe_source = source
        _CUTE[view.first] = tensor


def _as_cute(value: Any) -> Any:
    """Converts an array to a cute tensor; returns anything else unchanged."""
    view = view_of(value)
    if view is None:
        return value
    return cute_runtime.from_dlpack(value, assumed_align=16 if view.first % 16 == 0 else None)

"""Run a host program: link its object, pass the tensors, and run every launch it makes on the machine."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from backends.vm.host import launch_calls, library_calls, memory_calls
from backends.vm.host.abi import FfiAny, HostError, copy_from
from backends.vm.host.arguments import Passed, pass_by_ffi, pass_packed
from backends.vm.host.object_file import PROCESS_SYMBOLS, LinkedObject, ObjectFile
from backends.vm.host.runtime import (
    PROCESS_END,
    SYMBOLS,
    LaunchRecord,
    Runtime,
    aligned_memory,
    answering,
    bind_runtime,
)
from backends.vm.load import Shelf, load
from backends.vm.machine.machine import Machine
from backends.vm.memory.global_memory import Buffer


class CompiledHostLike(Protocol):
    """A compiled host function with the PTX of its kernels; see megamoe.contract.machine.CompiledHost."""

    @property
    def ptx(self) -> str: ...
    @property
    def host_object(self) -> bytes: ...
    @property
    def entry(self) -> str: ...
    @property
    def compiler(self) -> str: ...


@runtime_checkable
class HostProgramLike(CompiledHostLike, Protocol):
    """A compiled host function with its target and arguments; see megamoe.contract's HostProgram."""

    @property
    def target(self) -> str: ...
    @property
    def convention(self) -> str: ...
    @property
    def args(self) -> Sequence[object]: ...
    @property
    def scratch(self) -> Mapping[str, int]: ...


OBJECT_VERSION: Final = "1.1"
ANSWERED: Final = (launch_calls, library_calls, memory_calls)
"""Modules that register runtime symbols on import."""


def map_in_place(
    machine: Machine,
    memory: Mapping[str, npt.NDArray[np.uint8]],
    scratch: Mapping[str, int],
    outputs: Collection[str] | None = None,
) -> dict[str, Buffer]:
    """Map `memory` (bytes of each tensor) on the machine at its real addresses, because host code uses them.

    `scratch` maps names of workspaces to sizes in bytes; they are allocated here, filled with 0xFF. `outputs`: the
    tensors that may be written (None: all). An empty tensor is mapped away from the others. HostError if two tensors
    share memory.
    """
    places = dict(memory)
    for name, size in scratch.items():
        places[name] = aligned_memory(size)
    _check_disjoint(places)
    machine.memory.place_above(PROCESS_END)
    buffers: dict[str, Buffer] = {}
    for name, data in places.items():
        base = int(data.ctypes.data) if data.size else None
        writable = outputs is None or name in outputs or name in scratch
        buffers[name] = machine.memory.add(name, data, base, writable=writable)
    return buffers


def _check_disjoint(places: Mapping[str, npt.NDArray[np.uint8]]) -> None:
    spans = sorted((int(data.ctypes.data), data.size, name) for name, data in places.items() if data.size)
    for (base, size, name), (next_base, _, other) in itertools.pairwise(spans):
        if base + size > next_base:
            raise HostError(f"the tensors {name!r} and {other!r} share memory; each must have its own")


def run_host_program(
    program: HostProgramLike, machine: Machine, buffers: Mapping[str, Buffer], parsed: Shelf | None = None
) -> tuple[LaunchRecord, ...]:
    """Call the host function once on `buffers` (mapped at their real addresses). Returns the launches it made.

    `parsed`: a store of parsed modules, as in backends.vm.load.load.

    HostError for an object, symbol or argument that does not fit; Fault and LaunchError from its launches.
    """
    source = ObjectFile(program.host_object)
    if program.convention not in _CONVENTIONS:
        raise HostError(f"the calling convention {program.convention!r} is none of {', '.join(_CONVENTIONS)}")
    _check_symbols(source, program.entry, program.compiler)
    runtime = Runtime(machine, load(program.ptx, parsed, ring=machine.ring), program.target)
    bind_runtime()
    linked = LinkedObject(source)
    try:
        _check_version(source, linked, program.compiler)
        with answering(runtime):
            code = _CONVENTIONS[program.convention](linked, program, buffers, runtime)
    finally:
        linked.close()
    _conclude(runtime, code, program.entry)
    return tuple(runtime.launches)


class LinkedHost:
    """A host object that stays linked. Callers pass pointers to arguments that they have packed.

    HostError for an object, symbol or entry that does not fit.
    """

    def __init__(self, program: CompiledHostLike) -> None:
        source = ObjectFile(program.host_object)
        _check_symbols(source, program.entry, program.compiler)
        bind_runtime()
        self._entry = program.entry
        self._linked = LinkedObject(source)
        _check_version(source, self._linked, program.compiler)

    def call(self, runtime: Runtime, pointers: Sequence[int]) -> None:
        """Call the function. Fault and LaunchError come from its launches."""
        with answering(runtime):
            code = _call_at(self._linked, self._entry, pointers, runtime)
        # Output of compiled code is still in the C library's buffer.
        ctypes.CDLL(None).fflush(None)
        _conclude(runtime, code, self._entry)


def _conclude(runtime: Runtime, code: int, entry: str) -> None:
    if runtime.broken is not None:
        raise runtime.broken
    if runtime.refusal is not None:
        raise HostError(f"the host function {entry} refuses its arguments: {runtime.refusal}")
    if code:
        raise HostError(f"the host function {entry} returned error {code}")
    leaked = runtime.leaked()
    if leaked:
        raise HostError(leaked)


def _check_symbols(source: ObjectFile, entry: str, compiler: str) -> None:
    unknown = sorted(source.undefined - SYMBOLS.keys() - PROCESS_SYMBOLS)
    if unknown:
        raise HostError(
            f"the host object, compiled by {compiler}, calls {', '.join(unknown)}, which the VM's CUDA runtime "
            f"does not have"
        )
    if entry not in source.defined:
        entries = ", ".join(sorted(n for n in source.defined if "tvm_ffi_" in n or "_mlir_ciface_" in n)) or "none"
        raise HostError(f"the host object, compiled by {compiler}, has no entry {entry!r}; its entries are: {entries}")


def _check_version(source: ObjectFile, linked: LinkedObject, compiler: str) -> None:
    for symbol in sorted(name for name in source.defined if name.endswith("_version")):
        raw = copy_from(linked.address(symbol), len(OBJECT_VERSION) + 1, f"the version of the object ({symbol})")
        version = raw.rstrip(b"\0").decode("ascii", "replace")
        if version != OBJECT_VERSION:
            raise HostError(
                f"the host object, compiled by {compiler}, has format {version!r}; the VM knows {OBJECT_VERSION!r}"
            )


def _call_ffi(linked: LinkedObject, program: HostProgramLike, buffers: Mapping[str, Buffer], runtime: Runtime) -> int:
    passed = pass_by_ffi(program.args, buffers)
    values, result = (FfiAny * len(passed.values))(*passed.values), FfiAny()
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
    function = prototype(linked.address(program.entry))
    return function(None, ctypes.addressof(values), len(passed.values), ctypes.addressof(result))


def _call_packed(
    linked: LinkedObject, program: HostProgramLike, buffers: Mapping[str, Buffer], runtime: Runtime
) -> int:
    passed: Passed = pass_packed(program.args, buffers)
    return _call_at(linked, program.entry, passed.addresses, runtime)


def _call_at(linked: LinkedObject, entry: str, addresses: Sequence[int], runtime: Runtime) -> int:
    prefix, found, _ = entry.partition("__mlir_ciface_")
    if not found or not prefix.startswith("_mlir_"):
        raise HostError(f"the entry {entry!r} is not of the packed convention: _mlir_PREFIX__mlir_ciface_NAME")
    _start(linked, prefix, runtime)
    if runtime.broken is not None:
        return 0
    code = ctypes.c_int32(0)
    slots = (ctypes.c_uint64 * (len(addresses) + 1))(*addresses, ctypes.addressof(code))
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)
    prototype(linked.address(entry))(ctypes.addressof(slots), len(slots))
    return code.value


def _start(linked: LinkedObject, prefix: str, runtime: Runtime) -> None:
    """Does what the generated header does before the first call: load the library, then its kernels on device 0."""
    library, device, code = ctypes.c_uint64(0), ctypes.c_int32(0), ctypes.c_int32(0)
    slot = ctypes.c_uint64(ctypes.addressof(library))
    addresses = {"library": ctypes.addressof(slot), "device": ctypes.addressof(device), "code": ctypes.addressof(code)}
    for step, names in (("cuda_init", ("library", "code")), ("cuda_load_to_device", ("library", "device", "code"))):
        slots = (ctypes.c_uint64 * len(names))(*(addresses[name] for name in names))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(linked.address(f"{prefix}_{step}"))(ctypes.addressof(slots))
        if runtime.broken is None and code.value:
            raise HostError(f"the host object's {step} returned CUDA error {code.value}")


_CONVENTIONS: Final = {"tvm_ffi": _call_ffi, "packed": _call_packed}

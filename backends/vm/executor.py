"""The VM behind the harness's Executor contract. Programs are read by their shape, so nothing of ours is imported."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from backends.vm.faults import Fault, LaunchError, UnknownInstructionError
from backends.vm.host.contract import HostProgramLike
from backends.vm.load import load
from backends.vm.machine.machine import Machine
from backends.vm.machine.special import Dim3
from backends.vm.memory.global_memory import Buffer
from backends.vm.ptx.syntax_error import PtxSyntaxError
from backends.vm.tensor.tensor_map import encode_tensor_map
from backends.vm.trace.recorder import Recorder

Target = str


class LaunchLike(Protocol):
    """One launch of a program."""

    @property
    def entry(self) -> str: ...
    @property
    def grid(self) -> Dim3: ...
    @property
    def block(self) -> Dim3: ...
    @property
    def cluster(self) -> Dim3: ...
    @property
    def dynamic_smem(self) -> int: ...
    @property
    def args(self) -> Sequence[object]: ...


class ProgramLike(Protocol):
    """PTX with its launches and workspaces."""

    @property
    def target(self) -> Target: ...
    @property
    def ptx(self) -> str: ...
    @property
    def launches(self) -> Sequence[LaunchLike]: ...
    @property
    def scratch(self) -> Mapping[str, int]: ...


class OptionsLike(Protocol):
    """How to run: schedule, accumulation policy, budget of basic blocks."""

    @property
    def schedule(self) -> str: ...
    @property
    def accumulate(self) -> str: ...
    @property
    def step_budget(self) -> int: ...
    @property
    def trace(self) -> bool: ...
    @property
    def outputs(self) -> tuple[str, ...] | None: ...


@dataclass(frozen=True, slots=True)
class VmExecution:
    """Counters of the run, the sentence of the first rule broken, if one was, and a trace if one was asked for."""

    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    violation: str | None = None
    trace: Mapping[str, object] | None = None


_SCALAR_FORMATS = {
    "u8": "<B", "s8": "<b", "u16": "<H", "s16": "<h", "u32": "<I", "s32": "<i", "b32": "<I", "f32": "<f", "u64": "<Q",
    "s64": "<q", "b64": "<Q", "f64": "<d",
}  # fmt: skip


PARSED = Path.home() / ".cache" / "megamoe" / "ptx"
"""Where parsed modules are kept between processes; see backends.vm.ptx.parse_cache."""


class VmExecutor:
    """Runs PTX for sm_90a and sm_100a on the CPU; tensors are mapped where they lie, without a copy."""

    name = "vm"

    def unavailable(self, target: Target) -> str | None:
        """None: this machine needs nothing but a CPU."""
        return None if target in ("sm_90a", "sm_100a") else f"the VM executes sm_90a and sm_100a, not {target}"

    def run(
        self, program: ProgramLike | HostProgramLike, tensors: Mapping[str, torch.Tensor], options: OptionsLike
    ) -> VmExecution:
        """Perform every launch on `tensors` (contiguous CPU tensors). A broken rule ends the run and is reported.

        HostError if a host program's object, runtime calls or arguments do not fit this machine.
        """
        recorder = Recorder() if options.trace else None
        machine = Machine(options.schedule, options.accumulate, options.step_budget, recorder)
        try:
            if isinstance(program, HostProgramLike):
                _call_host(program, machine, tensors, options.outputs)
            else:
                _run_launches(program, machine, tensors, options.outputs)
        except (Fault, LaunchError, UnknownInstructionError, PtxSyntaxError) as broken:
            violation = f"{broken} (schedule {options.schedule})"
            return VmExecution(dict(machine.counters), violation, recorder and recorder.as_json())
        return VmExecution(dict(machine.counters), None, recorder and recorder.as_json())


def _run_launches(
    program: ProgramLike, machine: Machine, tensors: Mapping[str, torch.Tensor], outputs: tuple[str, ...] | None
) -> None:
    addresses: dict[str, int] = {}
    for name, tensor in tensors.items():
        writable = outputs is None or name in outputs
        addresses[name] = machine.memory.add(name, _bytes_of(name, tensor), writable=writable).base
    for name, size in program.scratch.items():
        addresses[name] = machine.memory.add(name, np.full(size, 0xFF, np.uint8)).base
    module = load(program.ptx, PARSED)
    for launch in program.launches:
        params = [_encode(arg, addresses, program.target) for arg in launch.args]
        machine.launch(
            module.entry(launch.entry), launch.grid, launch.block, params, launch.cluster, launch.dynamic_smem
        )


def _call_host(
    program: HostProgramLike, machine: Machine, tensors: Mapping[str, torch.Tensor], outputs: tuple[str, ...] | None
) -> None:
    # Only host programs need LLVM, which takes a while to load.
    from backends.vm.host.program import run_host_program

    run_host_program(program, machine, map_tensors(machine, tensors, program.scratch, outputs), PARSED)


def map_tensors(
    machine: Machine,
    tensors: Mapping[str, torch.Tensor],
    scratch: Mapping[str, int],
    outputs: tuple[str, ...] | None = None,
) -> dict[str, Buffer]:
    """Put contiguous CPU tensors and workspaces (bytes by name) where host programs on `machine` find them.

    `outputs`: the tensors that may be written (None: all).
    """
    from backends.vm.host.program import map_in_place

    return map_in_place(machine, {name: _bytes_of(name, tensor) for name, tensor in tensors.items()}, scratch, outputs)


def _bytes_of(name: str, tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"tensor {name!r} is on {tensor.device} with strides {tensor.stride()}; the VM needs contiguous CPU tensors"
        )
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _encode(arg: object, addresses: Mapping[str, int], target: Target) -> bytes:
    kind = type(arg).__name__
    if kind == "ScalarArg":
        return struct.pack(_SCALAR_FORMATS[arg.dtype], arg.value)  # type: ignore[attr-defined]
    address = addresses[arg.tensor] + arg.offset  # type: ignore[attr-defined]
    if kind == "BufferArg":
        return struct.pack("<Q", address)
    return encode_tensor_map(
        address=address,
        dtype=arg.dtype,  # type: ignore[attr-defined]
        dims=arg.dims,  # type: ignore[attr-defined]
        strides=arg.strides,  # type: ignore[attr-defined]
        box=arg.box,  # type: ignore[attr-defined]
        swizzle=arg.swizzle,  # type: ignore[attr-defined]
        target="sm_100a" if target == "sm_100a" else "sm_90a",
        element_strides=arg.element_strides,  # type: ignore[attr-defined]
        oob_fill=arg.oob_fill,  # type: ignore[attr-defined]
    )


EXECUTOR = VmExecutor()

"""The VM behind the harness's Executor contract."""

from __future__ import annotations

import struct
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from backends.vm.faults import Fault, Findings, LaunchError, UnknownInstructionError
from backends.vm.host.abi import scalar_bytes
from backends.vm.load import load
from backends.vm.machine.machine import Machine
from backends.vm.memory.global_memory import Buffer
from backends.vm.numerics.compiled import keep_between_processes
from backends.vm.ptx.tree import PtxSyntaxError
from backends.vm.tensor.tensor_map import encode_tensor_map
from backends.vm.trace.recorder import Recorder
from megamoe.contract import (
    AnyProgram,
    BufferArg,
    Execution,
    HostProgram,
    KernelArg,
    Program,
    RunOptions,
    ScalarArg,
    Target,
    UnsupportedError,
)
from megamoe.contract.cache import user_cache
from megamoe.contract.poison import SAMPLE, poison_seeds

MAX_WORKSPACES = 4 << 30
"""Limit on the bytes of all workspaces of a program: more than any layer needs that a CPU runs in a minute."""
PARSED = user_cache("ptx")
"""Directory that keeps parsed modules and machine code between processes; see backends.vm.ptx.parse_cache."""
keep_between_processes(PARSED)


class VmExecutor:
    """Runs PTX for sm_90a and sm_100a on the CPU. Tensors are mapped in place, without a copy.

    `findings` collects faults that a launch can survive, as the doors do; without it the first fault ends the run. With
    it, `lines_run` holds the PTX lines that some warp has executed. `machines` makes the machine of each run.
    """

    name = "vm"
    machines: Callable[[str, str, int, Recorder | None], Machine] = Machine
    findings: Findings | None = None
    lines_run: frozenset[int] = frozenset()
    _machine: Machine | None = None

    def whereabouts(self) -> str:
        """Where the warps of the running program are, in the words of a deadlock report; "" if there are none."""
        return self._machine.whereabouts() if self._machine is not None else ""

    def unavailable(self, target: Target) -> str | None:
        """Why `target` cannot run here, or None: the VM needs nothing but a CPU."""
        return None if target in ("sm_90a", "sm_100a") else f"the VM executes sm_90a and sm_100a, not {target}"

    def run(self, program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        """Perform every launch on `tensors` (contiguous CPU tensors). A broken rule ends the run and is reported.

        Raises HostError for a scalar argument that does not fit its type, and if a host program's object, runtime calls
        or arguments do not fit this machine; UnsupportedError for a Python call.
        """
        recorder = Recorder() if options.trace else None
        self._machine = machine = self.machines(options.schedule, options.accumulate, options.step_budget, recorder)
        machine.looks_after_each, machine.findings = self.findings is not None, self.findings
        violation = None
        try:
            if isinstance(program, Program | HostProgram):
                _check_workspaces(program.scratch)
            if isinstance(program, HostProgram):
                _call_host(program, machine, tensors, options.outputs)
            elif isinstance(program, Program):
                _run_launches(program, machine, tensors, options.outputs)
            else:
                raise UnsupportedError(f"the VM runs PTX, and a {type(program).__name__} has none")
            if not machine.looks_after_each:
                machine.check_outcome()
        except (Fault, LaunchError, UnknownInstructionError, PtxSyntaxError) as broken:
            violation = f"{broken} (schedule {options.schedule})"
            # The frames hold the fault, and with it the machine: a cycle.
            traceback.clear_frames(broken.__traceback__)
        finally:
            self._machine = None
            if self.findings is not None:
                self.lines_run = machine.lines_run()
        return Execution(dict(machine.counters), violation, recorder and recorder.finished())


def _run_launches(
    program: Program, machine: Machine, tensors: Mapping[str, torch.Tensor], outputs: tuple[str, ...] | None
) -> None:
    addresses: dict[str, int] = {}
    seeds = workspace_seeds(program, tensors)
    for name, tensor in tensors.items():
        writable = outputs is None or name in outputs
        buffer = machine.memory.add(name, _bytes_of(name, tensor), writable=writable)
        addresses[name] = buffer.base
        if outputs is not None and writable:
            buffer.forget(scratch=False)
    for name, size in program.scratch.items():
        buffer = machine.memory.add(name, np.zeros(size, np.uint8))
        _poison(buffer, seeds[name])
        addresses[name] = buffer.base
    module = load(program.ptx, PARSED, ring=machine.ring)
    for launches in (program.prepare, program.launches):
        machine.counters.clear()  # drop what `prepare` cost
        for launch in launches:
            params = [_encode(arg, addresses, program.target) for arg in launch.args]
            function = module.entry(launch.entry)
            machine.launch(function, launch.grid, launch.block, params, launch.cluster, launch.dynamic_smem)


def _check_workspaces(sizes: Mapping[str, int]) -> None:
    """Raise LaunchError for bad workspace sizes before anything is allocated."""
    for name, size in sizes.items():
        if size < 0:
            raise LaunchError(f"the workspace {name!r} has {size} bytes; there are 0 or more")
    if sum(sizes.values()) > MAX_WORKSPACES:
        raise LaunchError(f"the program's workspaces have {sum(sizes.values())} bytes; at most {MAX_WORKSPACES} do")


def workspace_seeds(program: Program | HostProgram, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The seed of the noise in each workspace of `program`, by name (megamoe.contract.poison)."""
    bytes_of = {name: _bytes_of(name, tensor) for name, tensor in tensors.items()}
    return poison_seeds(program, {name: (data.size, data[:SAMPLE].tobytes()) for name, data in bytes_of.items()})


def _poison(buffer: Buffer, seed: int) -> None:
    """Fill a workspace with noise (see megamoe.contract.poison), and mark it unwritten."""
    buffer.data[:] = np.random.default_rng(seed).integers(0, 256, buffer.data.size, np.uint8)
    buffer.forget(scratch=True)


def _call_host(
    program: HostProgram, machine: Machine, tensors: Mapping[str, torch.Tensor], outputs: tuple[str, ...] | None
) -> None:
    # Imported here because only host programs need LLVM, which loads slowly.
    from backends.vm.host.program import run_host_program

    buffers = map_tensors(machine, tensors, workspace_seeds(program, tensors), program.scratch, outputs)
    if program.prepare:
        run_host_program(replace(program, args=program.prepare), machine, buffers, PARSED)
        machine.counters.clear()  # as for a Program
    run_host_program(program, machine, buffers, PARSED)


def map_tensors(
    machine: Machine,
    tensors: Mapping[str, torch.Tensor],
    seeds: Mapping[str, int],
    scratch: Mapping[str, int],
    outputs: tuple[str, ...] | None = None,
) -> dict[str, Buffer]:
    """Map contiguous CPU tensors and workspaces (bytes by name) for host programs on `machine`.

    `seeds`: by workspace, for its noise. `outputs`: the tensors that may be written (None: all).
    """
    from backends.vm.host.program import map_in_place

    bytes_of = {name: _bytes_of(name, tensor) for name, tensor in tensors.items()}
    buffers = map_in_place(machine, bytes_of, scratch, outputs)
    for name in scratch:
        _poison(buffers[name], seeds[name])
    for name in outputs or ():
        buffers[name].forget(scratch=False)
    return buffers


def _bytes_of(name: str, tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"tensor {name!r} is on {tensor.device} with strides {tensor.stride()}; the VM needs contiguous CPU tensors"
        )
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _encode(arg: KernelArg, addresses: Mapping[str, int], target: Target) -> bytes:
    if isinstance(arg, ScalarArg):
        return scalar_bytes(arg.dtype, arg.value)
    if arg.tensor not in addresses:
        known = ", ".join(addresses)
        raise ValueError(f"a launch names the tensor {arg.tensor!r}; the case and the program's scratch have: {known}")
    address = addresses[arg.tensor] + arg.offset
    if isinstance(arg, BufferArg):
        return struct.pack("<Q", address)
    return encode_tensor_map(
        address=address,
        dtype=arg.dtype,
        dims=arg.dims,
        strides=arg.strides,
        box=arg.box,
        swizzle=arg.swizzle,
        target=target,
        element_strides=arg.element_strides,
        oob_fill=arg.oob_fill,
    )


EXECUTOR = VmExecutor()

"""A device whose memory is the host's: programs loaded on it run in the virtual machine.

Like a driver, it sees only addresses, and it knows the size of each allocation.
"""

from __future__ import annotations

import struct
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from backends.gpu.kernels import scalar_bytes
from megamoe.contract import AnyProgram, BufferArg, KernelArg, Launch, Program, ScalarArg, TensorMapArg
from megamoe.contract.backend import open_machine
from megamoe.contract.machine import KernelMachine, Stretch
from megamoe.torch_ops import calls


@dataclass
class MachineDevice:
    """An executor that loads programs.

    `done`: counts of prepares and launches. `made`: tensors that it allocated. `given`: addresses of the last launch.
    `stream`: the current one. `order`: stream operations, in order.
    """

    name: str = "gpu"
    done: Counter[str] = field(default_factory=Counter[str])
    made: list[weakref.ref[torch.Tensor]] = field(default_factory=list[weakref.ref[torch.Tensor]])
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    given: tuple[int, ...] = ()
    order: list[tuple[object, ...]] = field(default_factory=list[tuple[object, ...]])
    stream: int = 0
    fails: bool = False
    capturing: bool = False

    def unavailable(self, target: str) -> str | None:
        """Takes only sm_90a, like an H200."""
        return None if target == "sm_90a" else f"this device is an sm_90a, not {target}"

    def run(self, program: AnyProgram, tensors: Any, options: Any) -> Any:
        """Never called."""
        raise NotImplementedError

    def load(self, program: AnyProgram, names: Sequence[str]) -> LoadedOnMachine:
        """Loads `program` in a machine of its own."""
        assert isinstance(program, Program)
        return LoadedOnMachine(self, program, tuple(names), open_machine("vm", program.target))

    def know(self, *tensors: torch.Tensor) -> None:
        """Registers tensors as memory of this device."""
        for one in tensors:
            self.sizes[one.data_ptr()] = max(1, one.nbytes)
            weakref.finalize(one, self.sizes.pop, one.data_ptr(), None)

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Registers `tensor` and returns it."""
        self.know(tensor)
        return tensor

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a new tensor with all bytes 0xFF."""
        made = torch.empty_strided(shape, strides, dtype=dtype)
        made.view(torch.uint8).fill_(0xFF)
        self.know(made)
        self.made.append(weakref.ref(made))
        return made

    def live(self) -> int:
        """Counts its allocated tensors that are still referenced."""
        return sum(one() is not None for one in self.made)


@dataclass
class LoadedOnMachine:
    """Stands in for megamoe.contract.LoadedProgram."""

    device: MachineDevice
    program: Program
    names: tuple[str, ...]
    machine: KernelMachine

    def prepare(self, addresses: Sequence[int], stream: int) -> None:
        """Runs the program's preparation."""
        self.device.done["prepared"] += 1
        self.device.order.append(("prepare", stream))
        self._run(self.program.prepare, addresses)

    def launch(self, addresses: Sequence[int], stream: int) -> None:
        """Runs the program's launches."""
        if self.device.fails:
            raise RuntimeError("the driver refuses")
        self.device.done["launched"] += 1
        self.device.order.append(("launch", stream))
        self.device.given = tuple(addresses)
        self._run(self.program.launches, addresses)

    def _run(self, launches: Sequence[Launch], addresses: Sequence[int]) -> None:
        places = dict(zip(self.names, addresses, strict=True))
        known = sorted(self.device.sizes.items())
        memory = [Stretch(f"allocation at {start:#x}", start, size) for start, size in known]
        for launch in launches:
            params = [self._encoded(arg, places) for arg in launch.args]
            self.machine.launch(
                self.program.ptx, launch.entry, launch.grid, launch.block, params, cluster=launch.cluster,
                dynamic_smem=launch.dynamic_smem, memory=memory,
            )  # fmt: skip

    def _encoded(self, arg: KernelArg, places: dict[str, int]) -> bytes:
        if isinstance(arg, ScalarArg):
            return scalar_bytes(arg)
        assert isinstance(arg, BufferArg | TensorMapArg)
        address = places[arg.tensor] + arg.offset
        home = next(start for start, size in self.device.sizes.items() if start <= address < start + size)
        seen = self.machine.address_of(address, home)
        if isinstance(arg, BufferArg):
            return struct.pack("<Q", seen)
        return self.machine.tensor_map(seen, arg.dtype, arg.dims, arg.strides, arg.box, swizzle=arg.swizzle)


@dataclass
class StreamOfMachine:
    """Stands in for torch.cuda.Stream."""

    device: MachineDevice
    number: int

    def wait_event(self, event: EventOfMachine) -> None:
        """Orders its later work after what `event` has recorded."""
        self.device.order.append(("wait", self.number, event.recorded))


@dataclass
class EventOfMachine:
    """Stands in for torch.cuda.Event. `recorded`: the stream."""

    recorded: int = -1

    def record(self, stream: StreamOfMachine) -> None:
        """Records the work of `stream` so far."""
        self.recorded = stream.number


@contextmanager
def device_on_machine() -> Iterator[MachineDevice]:
    """Makes megamoe.torch_ops find this device as number 0."""
    device = MachineDevice()
    with pytest.MonkeyPatch.context() as patch:
        as_read = calls._as_read
        patch.setattr(calls, "load_executor", lambda name: device)
        patch.setattr(calls, "_SHARED", {})
        patch.setattr(calls, "_as_read", lambda tensor: device.known(as_read(tensor)))
        patch.setattr(torch.cuda, "device", lambda number: torch.no_grad())
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
        patch.setattr(torch.cuda, "current_stream", lambda number: StreamOfMachine(device, device.stream))
        patch.setattr(torch.cuda, "Event", EventOfMachine)
        patch.setattr(torch.cuda, "synchronize", lambda number: device.order.append(("synchronize",)))
        patch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: device.order.append(("keep", stream.number))
        )
        for name, answer in {
            "_cuda_getDevice": lambda: 0,
            "_cuda_isCurrentStreamCapturing": lambda: device.capturing,
            "_cuda_getCurrentRawStream": lambda number: device.stream,
        }.items():
            patch.setattr(torch._C, name, answer, raising=False)
        patch.setattr(calls, "empty_on_device", device.empty)  # pyright: ignore
        yield device

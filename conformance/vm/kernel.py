"""Runs whole little kernels: buffers and tensor maps by name, every schedule, planted faults found by their line.

A kernel is the body of an entry. Each buffer `x` is the 64-bit register `%x`, each tensor map `m` the register `%m`
with its generic address. Registers %r0..%r47, %rd0..%rd23, %f0..%f15, %h0..%h7 and %p0..%p15 are declared, and %tx,
%warp, %lane, %cta hold %tid.x, the warp's number, the lane and %ctaid.x. The line that must be blamed ends in `//!`.

`others` holds the bodies of further entries with the same parameters, `sequence` the entries to launch, each with
whether it is a dependent launch; without a sequence `kernel` is launched `launches` times.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault
from backends.vm.load import load
from backends.vm.machine.machine import Machine
from backends.vm.tensor.tensor_map import encode_tensor_map

EVERY_SCHEDULE = ("eager", "lazy", *(f"random:{seed}" for seed in range(4)))
TWENTY = ("eager", "lazy", *(f"random:{seed}" for seed in range(20)))
Array = npt.NDArray[Any]

_HEAD = ".version 8.7\n.target sm_100a\n.address_size 64\n"
_REGISTERS = """.reg .b32 %r<48>; .reg .b64 %rd<24>; .reg .f32 %f<16>; .reg .b16 %h<8>; .reg .pred %p<16>;
.reg .b32 %tx, %warp, %lane, %cta;
mov.u32 %tx, %tid.x; shr.u32 %warp, %tx, 5; and.b32 %lane, %tx, 31; mov.u32 %cta, %ctaid.x;"""


@dataclass(frozen=True)
class Map:
    """A tensor map over a buffer: dimensions and box innermost first, strides in bytes from dimension 1 on."""

    buffer: str
    dtype: str
    dims: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: str = "none"
    offset: int = 0
    element_strides: Sequence[int] | None = None
    fill: str = "zero"


@dataclass(frozen=True)
class Kernel:
    """A kernel with what it is launched on. `buffers` are copied for each run; names in `inputs` are read-only."""

    body: str
    buffers: Mapping[str, Array] = field(default_factory=dict)
    maps: Mapping[str, Map] = field(default_factory=dict)
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_smem: int = 0
    inputs: tuple[str, ...] = ()
    step_budget: int = 2_000_000
    module: str = ""
    launches: int = 1
    others: Mapping[str, str] = field(default_factory=dict)
    sequence: Sequence[tuple[str, bool]] = ()

    @property
    def ptx(self) -> str:
        """The module. Everything before the body stays on lines of its own, so that lines can be looked up."""
        params = [f".param .u64 p_{name}" for name in self.buffers]
        params += [f".param .align 64 .b8 p_{name}[128]" for name in self.maps]
        names = [*self.buffers, *self.maps]
        head = [f".visible .entry ENTRY({', '.join(params)})", "{", _REGISTERS]
        head += [f".reg .b64 %{name};" for name in names]
        head += [f"ld.param.u64 %{name}, [p_{name}];" for name in self.buffers]
        head += [f"mov.b64 %{name}, p_{name}; cvta.param.u64 %{name}, %{name};" for name in self.maps]
        entries = [
            "\n".join([*head, body, "}"]).replace("ENTRY", name, 1)
            for name, body in {"kernel": self.body, **self.others}.items()
        ]
        return "\n".join([f"{_HEAD}{self.module}", *entries])

    @property
    def blamed_line(self) -> int:
        """The line that ends in `//!`."""
        marked = [number for number, line in enumerate(self.ptx.splitlines(), 1) if line.rstrip().endswith("//!")]
        assert len(marked) == 1, f"{len(marked)} lines are marked"
        return marked[0]

    def run(self, schedule: str = "eager", accumulate: str = "fast") -> tuple[dict[str, Array], Counter[str]]:
        """The buffers after the launches, and the machine's counters."""
        machine = Machine(schedule, accumulate, self.step_budget)
        data = {name: np.ascontiguousarray(array).copy() for name, array in self.buffers.items()}
        addresses = {
            name: machine.memory.add(name, array.reshape(-1).view(np.uint8), writable=name not in self.inputs).base
            for name, array in data.items()
        }
        params = [struct.pack("<Q", addresses[name]) for name in data]
        for item in self.maps.values():
            params.append(
                encode_tensor_map(
                    addresses[item.buffer] + item.offset,
                    item.dtype,
                    item.dims,
                    item.strides,
                    item.box,
                    swizzle=item.swizzle,
                    element_strides=item.element_strides,
                    oob_fill="nan" if item.fill == "nan" else "zero",
                )
            )
        module = load(self.ptx)
        for entry, dependent in self.sequence or [("kernel", False)] * self.launches:
            machine.launch(
                module.entry(entry), self.grid, self.block, params, self.cluster, self.dynamic_smem, dependent=dependent
            )
        return data, machine.counters


def assert_blamed(kernel: Kernel, rule: str, *clauses: str, schedules: Sequence[str] = EVERY_SCHEDULE) -> None:
    """Under every schedule the marked line is blamed for breaking `rule`, in a sentence that holds every clause."""
    for schedule in schedules:
        fault = _fault_of(kernel, schedule)
        assert fault is not None, f"{schedule}: nothing was found wrong; [{rule}] was planted"
        said = str(fault)
        assert fault.rule == rule, f"{schedule}: [{fault.rule}] instead of [{rule}]: {said}"
        assert fault.line == kernel.blamed_line, f"{schedule}: line {fault.line}, not {kernel.blamed_line}: {said}"
        missing = [clause for clause in clauses if clause not in said]
        assert not missing, f"{schedule}: {missing} not in: {said}"


def _fault_of(kernel: Kernel, schedule: str) -> Fault | None:
    try:
        kernel.run(schedule)
    except Fault as fault:
        return fault
    return None


def assert_clean(kernel: Kernel, expected: Mapping[str, npt.ArrayLike], schedules: Sequence[str] = TWENTY) -> None:
    """No schedule finds fault with a correct kernel, and all of them leave exactly the expected values."""
    for schedule in schedules:
        found, _ = kernel.run(schedule)
        for name, values in expected.items():
            wanted = np.asarray(values)
            wrong = np.flatnonzero((found[name] != wanted).reshape(-1))
            assert not wrong.size, (
                f"{schedule}: {wrong.size} elements of `{name}` are wrong, first at {wrong[0]}: "
                f"{found[name].reshape(-1)[wrong[0]]} instead of {wanted.reshape(-1)[wrong[0]]}"
            )

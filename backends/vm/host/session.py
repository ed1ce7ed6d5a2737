"""A machine that stays up between launches: the doors megamoe.vm, .triton and .cutedsl run kernels on it.

It implements megamoe.contract's KernelMachine. Arguments are addresses, so it depends on no tensor library.
"""

from __future__ import annotations

import ctypes
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from backends.vm.faults import Fault, Findings, LaunchError, SourcePlace, UnknownInstructionError
from backends.vm.host.abi import HostError
from backends.vm.host.runtime import PROCESS_END, HostedDevice, Runtime
from backends.vm.load import LoadedModule, load
from backends.vm.machine.machine import LaunchRequest, Machine, launch_shape
from backends.vm.machine.special import Dim3
from backends.vm.memory.global_memory import Buffer
from backends.vm.ptx.ast import Variable
from backends.vm.ptx.source_lines import source_of
from backends.vm.ptx.tree import PtxSyntaxError
from backends.vm.rules import AT_SHARED, RULES, MachineRule
from backends.vm.tensor.tensor_map import Im2col, OobFill, Target, TensorMapError, encode_tensor_map

if TYPE_CHECKING:
    from backends.vm.host.program import CompiledHostLike, LinkedHost

ALIGNMENT: Final = 256
"""Bytes, as cudaMalloc guarantees (CUDA programming guide, device memory accesses)."""
DEFAULT_STREAM: Final = 0
MOST_COMPARED: Final = 64 << 20
"""Bytes at the start of a tensor in which a change by the host between two launches is noticed."""
TARGETS: Final[tuple[Target, ...]] = ("sm_90a", "sm_100a")


class StretchLike(Protocol):
    """Bytes of this process that kernels may access; see megamoe.contract.machine.Stretch."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    @property
    def scratch(self) -> bool: ...
    @property
    def unwritten(self) -> bool: ...


class PixelBoxLike(Protocol):
    """The bounding box of an im2col map; see megamoe.contract.machine.PixelBox."""

    @property
    def lower(self) -> Sequence[int]: ...
    @property
    def upper(self) -> Sequence[int]: ...
    @property
    def pixels(self) -> int: ...


class Session:
    """One GPU of `target` for as long as this object lives; see megamoe.contract.machine.KernelMachine."""

    faults: tuple[type[Exception], ...] = (Fault,)
    refusals: tuple[type[Exception], ...] = (LaunchError, PtxSyntaxError, TensorMapError, HostError)
    misreads: tuple[type[Exception], ...] = (PtxSyntaxError,)
    unknowns: tuple[type[Exception], ...] = (UnknownInstructionError,)
    rules: Mapping[str, MachineRule] = RULES

    def __init__(
        self, target: str, schedule: str, accumulate: str, step_budget: int, sm_count: int | None, parsed: Path | None
    ) -> None:
        known: dict[str, Target] = {one: one for one in TARGETS}
        if target not in known:
            raise LaunchError(f"the machine executes {' and '.join(TARGETS)}, not {target!r}")
        self.target: Target = known[target]
        self.printed: Callable[[str], object] = _dropped
        self._options = (schedule, accumulate, step_budget)
        self._sm_count = sm_count
        self._parsed = parsed
        self._linked: dict[bytes, LinkedHost] = {}
        self._machine = Machine(*self._options)
        self._found = Findings()
        self._last_in: int | None = None
        self._left: dict[tuple[int, int], int] = {}
        self._texts: dict[str, str] = {}

    @property
    def counters(self) -> Mapping[str, int]:
        """Counters of the last launch or call."""
        return self._machine.counters

    @property
    def findings(self) -> Sequence[Fault]:
        """Faults that the last launch or call was found to have, one per site."""
        return tuple(self._found.worse_first)

    def whereabouts(self) -> str:
        """Where the running launch is, in the words of a deadlock report; "" if none runs."""
        return self._machine.whereabouts()

    def entries(self, ptx: str) -> Mapping[str, tuple[Variable, ...]]:
        """The entries of a module and their parameters. PtxSyntaxError for text that is not PTX."""
        functions = self._load(ptx).module.functions
        return {name: function.params for name, function in functions.items() if function.is_entry}

    def source_of(self, ptx: str, line: int) -> Sequence[SourcePlace]:
        """The source places of a PTX line, innermost first; () if the PTX names none."""
        return source_of(ptx, line)

    def _load(self, ptx: str) -> LoadedModule:
        return load(ptx, self._parsed, ring=self._machine.ring)

    def bind(self, ptx: str, entry: str) -> None:
        """Bind an entry. UnknownInstructionError for an instruction that the machine does not know."""
        module = self._load(ptx)
        self._check_target(module)
        module.entry(entry)

    def _check_target(self, module: LoadedModule) -> None:
        built_for = module.module.target
        if any(_runs_on(one, self.target) for one in built_for):
            return
        other = next((target for target in TARGETS for one in built_for if _runs_on(one, target)), None)
        raise LaunchError(
            f"the PTX is for {', '.join(built_for)}, which this {self.target} does not run; compile it for "
            f"{self.target}{f', or choose the target {other} (--target {other})' if other else ''}"
        )

    def address_of(self, address: int, allocation: int) -> int:
        """`address` if the allocation is aligned as on a GPU, else an address above those of the process.

        Allocations are also mapped at their real addresses, because kernels may find such addresses in memory.

        Above the process, distances between allocations are multiplied by ALIGNMENT, so that allocations stay apart.
        """
        return address if allocation % ALIGNMENT == 0 else _elsewhere(allocation) + address - allocation

    def holds(self, address: int) -> bool:
        """Whether a variable of a module or memory that a kernel allocated lies at `address`."""
        return self._machine.memory.holding(address) is not None

    def launch(
        self,
        ptx: str,
        entry: str,
        grid: Dim3,
        block: Dim3,
        params: Sequence[bytes],
        *,
        cluster: Dim3 = (1, 1, 1),
        dynamic_smem: int = 0,
        memory: Sequence[StretchLike] = (),
        cooperative: bool = False,
        dependent: bool = False,
    ) -> None:
        """Run a grid to its end. Fault for an error that ends the run, LaunchError for what no GPU would launch."""
        self._found = Findings()
        module = self._load(ptx)
        self._check_target(module)
        function = module.entry(entry)
        shape = launch_shape(function, grid, block, cluster, dynamic_smem)
        if cooperative:
            HostedDevice(self.target, self._sm_count).check_cooperative(entry, shape, function.static_shared)
        with self._mapped(memory, ptx, [entry], may_overlap=dependent) as machine:
            dependent, self._last_in = dependent and self._last_in == DEFAULT_STREAM, DEFAULT_STREAM
            machine.perform(LaunchRequest(function, shape, params, dependent, cooperative))

    def call(self, program: CompiledHostLike, pointers: Sequence[int], memory: Sequence[StretchLike]) -> None:
        """Call a host function. Fault and LaunchError come from its launches, HostError for what does not fit."""
        # Imported late: only host programs need it, and LLVM is slow to load.
        from backends.vm.host.program import LinkedHost

        self._found = Findings()
        linked = self._linked.get(program.host_object)
        if linked is None:
            linked = self._linked[program.host_object] = LinkedHost(program)
        entries = self.entries(program.ptx) if program.ptx else ()
        with self._mapped(memory, program.ptx, entries, may_overlap=True) as machine:
            machine.memory.place_above(PROCESS_END)
            runtime = Runtime(machine, self._load(program.ptx), self.target, self._sm_count)
            runtime.last_in = self._last_in
            linked.call(runtime, pointers)
            self._last_in = runtime.last_in

    def host_waited(self) -> None:
        """From now on no launch overlaps one from before: the host has waited for them."""
        self._last_in = None

    def tensor_map(
        self,
        address: int,
        dtype: str,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        *,
        swizzle: str = "none",
        element_strides: Sequence[int] | None = None,
        oob_fill: OobFill = "zero",
        im2col: PixelBoxLike | None = None,
    ) -> bytes:
        """A tensor map of 128 bytes. TensorMapError for what the driver's encoder refuses."""
        return encode_tensor_map(
            address,
            dtype,
            dims,
            strides,
            box,
            swizzle=swizzle,
            element_strides=element_strides,
            oob_fill=oob_fill,
            target=self.target,
            im2col=None if im2col is None else Im2col(tuple(im2col.lower), tuple(im2col.upper), im2col.pixels),
        )

    @contextmanager
    def _mapped(
        self, memory: Sequence[StretchLike], ptx: str, entries: Collection[str], *, may_overlap: bool
    ) -> Iterator[Machine]:
        """The machine with `memory` mapped and its counters, findings and step budget reset.

        An exception replaces the machine. `ptx`, with these `entries`, locates the findings in the source.
        `may_overlap`: a launch may be a dependent one, so whether the host has worked since the last one matters.
        """
        machine = self._machine
        machine.findings = self._found
        machine.counters.clear()
        machine.steps_left = machine.step_budget
        machine.printed = self.printed
        added = list[Buffer]()
        try:
            for one in memory:
                data = np.frombuffer(memoryview((ctypes.c_uint8 * one.size).from_address(one.address)), np.uint8)
                places = sorted({one.address, self.address_of(one.address, one.address)})
                mapped = [machine.memory.add(one.name, data, place, writable=one.writable) for place in places]
                added += mapped
                for buffer in mapped:
                    buffer.scratch = one.scratch
                if one.unwritten:
                    mapped[0].forget(scratch=one.scratch)
                    # What is stored at one of the two addresses is defined at the other.
                    for buffer in mapped[1:]:
                        buffer.state, buffer.sources = mapped[0].state, mapped[0].sources
            if may_overlap:
                self._notice_host_work(added)
            yield machine
        except Exception as stop:
            if isinstance(stop, Fault):
                self._found.add(stop, ends=True)
            # As on a device: a fault ends the context, and with it the variables of all modules.
            self._machine = Machine(*self._options)
            self._machine.counters.update(machine.counters)
            self._last_in = None
            raise
        finally:
            for fault in self._found.by_site.values():
                if not fault.line:
                    _place(fault, ptx)
                if fault.rule in AT_SHARED and fault.address is not None:
                    fault.spot = self._spot(ptx, fault.kernel, fault.address)
                if fault.rule == "global-race" and not self._found.is_between_ctas_too(fault):
                    _say_copies(fault, ptx)
                fault.source = source_of(ptx, fault.line)
                if fault.other is not None:
                    text = ptx
                    if fault.rule == "dependent-launch-not-awaited":
                        text = self._texts.get(fault.other.who, ptx if fault.other.who in entries else "")
                    fault.other.source = source_of(text, fault.other.line)
        self._note_launches(machine, added, ptx, entries)
        for buffer in added:
            machine.memory.remove(buffer)

    def _notice_host_work(self, buffers: Sequence[Buffer]) -> None:
        """Take a change of memory since the last launch for work of the host, which then lay between two launches."""
        known = [one for one in buffers if (one.base, one.end) in self._left]
        if any(_checksum(one) != self._left[one.base, one.end] for one in known):
            self._last_in = None

    def _note_launches(self, machine: Machine, buffers: Sequence[Buffer], ptx: str, entries: Iterable[str]) -> None:
        """Note what a dependent launch that comes next may overlap: what lies in memory, and the texts of kernels."""
        if not machine.races.chain.before:
            self._left.clear()
            self._texts.clear()
        self._left |= {(one.base, one.end): _checksum(one) for one in buffers if machine.races.touched(one)}
        for name in entries:
            # Kernels of several modules may have one name. Then no line can be told.
            self._texts[name] = ptx if self._texts.get(name, ptx) == ptx else ""

    def _spot(self, ptx: str, kernel: str, address: int) -> str:
        module = self._load(ptx)
        function = module.module.functions.get(kernel)
        return module.entry(kernel).spot_of(address) if function is not None and function.is_entry else ""


def _checksum(buffer: Buffer) -> int:
    return zlib.crc32(buffer.data[:MOST_COMPARED].data)


_PTX_LINES = re.compile(r"PTX lines? (\d+)")


def _place(fault: Fault, ptx: str) -> None:
    """Place a fault without an instruction, such as a deadlock, at the first PTX line that its message names.

    Each PTX line in the message is prefixed with its source line, if it has one.
    """

    def with_source(found: re.Match[str]) -> str:
        source = source_of(ptx, int(found[1]))
        return f"{source[0].file}:{source[0].line}:{source[0].column}, {found[0]}" if source else found[0]

    if (first := _PTX_LINES.search(fault.detail)) is not None:
        fault.line = int(first[1])
        fault.text = ptx.splitlines()[fault.line - 1].strip()
    fault.detail = _PTX_LINES.sub(with_source, fault.detail)


def _say_copies(fault: Fault, ptx: str) -> None:
    """Explain the likely cause of a race between a load and a predicated store of two warps of one CTA.

    Where a block has fewer elements than threads, Triton gives an element to several warps: all load it, one stores it.
    """
    other = fault.other
    if other is None or not other.line:
        return
    lines = ptx.splitlines()
    mine, theirs = lines[fault.line - 1].strip(), lines[other.line - 1].strip()
    store, load = (theirs, mine) if other.did == "wrote" else (mine, theirs)
    if store.startswith("@") and " st." in store and "ld." in load:
        fault.detail += (
            "; the store has a predicate: where warps hold copies of one element and one of them stores it, the others "
            "load a value that they do not use, and the race changes no result"
        )


def _elsewhere(allocation: int) -> int:
    # A 57-bit address space has room for 256 times any address of a process.
    return PROCESS_END + ALIGNMENT * allocation


def _dropped(text: str) -> None:
    return None


def _runs_on(built_for: str, target: str) -> bool:
    """Whether PTX of this `.target` runs on `target` (PTX ISA 11.1.2): `a` on one architecture, `f` on a family."""
    name, suffix = built_for.rstrip("af"), built_for[len(built_for.rstrip("af")) :]
    if not name.startswith("sm_") or not name[3:].isdigit():
        return False
    number, here = int(name[3:]), int(target[3:].rstrip("af"))
    if suffix == "a":
        return built_for == target
    return here // 10 == number // 10 and here >= number if suffix == "f" else here >= number


def open_session(
    target: str, *, schedule: str = "eager", accumulate: str = "fast", step_budget: int = 200_000_000,
    sm_count: int | None = None, parsed: Path | None = None,
) -> Session:  # fmt: skip
    """A machine of `target` that reports `sm_count` SMs to host functions. LaunchError for an unknown target.

    `parsed`: a folder for parsed modules, as in backends.vm.load.load.
    """
    return Session(target, schedule, accumulate, step_budget, sm_count, parsed)

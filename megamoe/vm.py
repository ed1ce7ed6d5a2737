"""The door for PTX and CUDA C++: `Device("sm_100a").launch(source, "entry", grid, block, a, b)`, with no GPU.

    import megamoe.vm

    vm = megamoe.vm.Device("sm_100a")
    vm.launch("axpy.cu", "axpy", 8, 128, a, b, 3.0)

Arrays are torch tensors on the CPU or NumPy arrays; kernels work on their memory, without a copy.
docs/bring-your-kernel.md has more.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import struct
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megamoe.contract.backend import UnsupportedError, open_machine
from megamoe.contract.counted import counted
from megamoe.contract.known_names import nearest
from megamoe.contract.machine import KernelFault, KernelMachine, LaunchRefusedError, Parameter, PixelBox, Stretch
from megamoe.contract.plain import plain_bytes
from megamoe.contract.program import TARGETS, Dim3
from megamoe.cuda_source import compiled
from megamoe.findings import KernelFinding, Ledger, module_of
from megamoe.runner.limits import TimeIsUpError, time_at_most

Size = int | Sequence[int]
Swizzle = Literal["none", "32B", "64B", "128B", "128B_ATOM_32B", "128B_ATOM_64B"]

_SCALARS = {
    "b8": "B", "u8": "B", "s8": "b", "b16": "H", "u16": "H", "s16": "h", "b32": "I", "u32": "I", "s32": "i", "b64": "Q",
    "u64": "Q", "s64": "q", "f16": "e", "f32": "f", "f64": "d",
}  # fmt: skip
_MAP_DTYPES = {
    "uint8": "u8", "int8": "u8", "bool": "u8", "uint16": "u16", "int16": "u16", "uint32": "u32", "int32": "s32",
    "uint64": "u64", "int64": "s64", "float16": "f16", "float32": "f32", "float64": "f64", "bfloat16": "bf16",
    "float8_e4m3fn": "u8", "float8_e5m2": "u8", "float8_e8m0fnu": "u8", "float4_e2m1fn_x2": "u8",
}  # fmt: skip
MAX_SOURCE_NAME = 200
"""Longest name that a message repeats, in characters."""
SMALLEST_ADDRESS = 1 << 22
"""No allocation lies below this, where programs like Debian's Python begin, so tensors of small counts and indices are
not searched."""


@dataclass(frozen=True, slots=True)
class View:
    """An array of `bytes` bytes at address `first`, in an allocation of `size` bytes. Addresses are this process's."""

    first: int
    bytes: int
    allocation: int
    size: int
    writable: bool


@dataclass(frozen=True, slots=True)
class TensorMapOf:
    """A TMA descriptor that is encoded when it is passed. `tensor_map` makes it and documents its fields."""

    tensor: Any
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str
    element_strides: tuple[int, ...] | None
    oob_fill: Literal["zero", "nan"]
    im2col: PixelBox | None


def tensor_map(
    tensor: object, box: Sequence[int], swizzle: Swizzle = "none", *, dtype: str | None = None,
    element_strides: Sequence[int] | None = None, oob_fill: Literal["zero", "nan"] = "zero",
    im2col: PixelBox | None = None,
) -> TensorMapOf:  # fmt: skip
    """A tensor map (cuTensorMapEncodeTiled) of a torch tensor or NumPy array, to pass by value or in memory.

    `box` and `element_strides` are in elements, in the order of the tensor's own dimensions (the last one is
    contiguous). `dtype`: the map's, where it differs from the tensor's ("tf32", "b4x16", ...; a b4x16 map of uint8
    bytes counts two elements per byte in its last dimension). ValueError for a tensor whose last dimension is strided.

    With `im2col` it is a cuTensorMapEncodeIm2col map for a tensor [images, .., width, channels]. `box` is then the
    number of channels, and the corners of the PixelBox follow the order of the tensor's own dimensions.
    """
    shape, strides, bytes_each, name = _layout(tensor)
    if strides and strides[-1] != 1 and shape[-1] != 1:
        raise ValueError(f"a tensor map needs a last dimension of stride 1; the tensor has the strides {strides}")
    chosen = dtype or _MAP_DTYPES.get(name)
    if chosen is None:
        raise ValueError(f"no tensor map has elements of {name}; name the type with dtype=, e.g. dtype='u8'")
    dims = list(reversed(shape))
    if chosen.startswith("b4x16"):
        dims[0] *= 2
    elif chosen.startswith("b6x16"):
        dims[0] = dims[0] * 4 // 3
    return TensorMapOf(
        tensor,
        chosen,
        tuple(dims),
        tuple(stride * bytes_each for stride in reversed(strides[:-1])),
        tuple(reversed(tuple(box))),
        swizzle,
        None if element_strides is None else tuple(reversed(tuple(element_strides))),
        oob_fill,
        None if im2col is None else PixelBox(tuple(im2col.lower)[::-1], tuple(im2col.upper)[::-1], im2col.pixels),
    )


class Device:
    """A GPU of `target` ("sm_90a" or "sm_100a") in software. Module variables live as long as the device.

    `schedule`: when asynchronous work completes, "eager", "lazy" or "random:SEED"; a correct kernel computes the same
    under all. `accumulate`: how matrix products are summed, "fast", "exact", "hopper" or "ring", as in RunOptions.
    `step_budget`: a launch counts as hung after this many steps. `sm_count`: the SM count that host functions see
    (None: as in the full product). `machine`: the registered machine to use. `profile`: which findings raise
    KernelFault, "strict" (errors and portability), "default" (errors) or "lenient" (none); a fault that ends its launch
    always raises. `suppress`: a YAML file of findings that do not count; megamoe.findings reads it.

    Attributes: `printed` receives what kernels print, by default on standard output. `reported` receives each new
    finding that does not count, by default as a warning of the logger "megamoe". `ledger` has all findings of all
    launches. After `timeout` host seconds a launch raises OverdueError; None means no limit.
    """

    def __init__(
        self, target: str = "sm_100a", *, schedule: str = "eager", accumulate: str = "fast",
        step_budget: int = 200_000_000, sm_count: int | None = None, machine: str = "vm", profile: str = "default",
        suppress: str | Path | None = None,
    ) -> None:  # fmt: skip
        self.sm_count = sm_count
        self.schedule = schedule
        self.timeout: float | None = None
        self.printed: Callable[[str], object] = _to_stdout
        self.reported: Callable[[KernelFinding], object] = _to_log
        if target not in TARGETS:
            raise UnsupportedError(f"there is no machine for the target {target!r}; there is {' and '.join(TARGETS)}")
        if step_budget < 1:
            raise ValueError(f"step_budget is {step_budget}; a launch needs at least one step")
        self.machine = open_machine(
            machine, target, schedule=schedule, accumulate=accumulate, step_budget=step_budget, sm_count=sm_count
        )
        self.machine.printed = lambda text: self.printed(text)
        self.ledger = Ledger.of(profile, suppress, self.machine.rules)
        _DEVICES.add(self)

    @property
    def findings(self) -> list[KernelFinding]:
        """The findings of all launches, one per site."""
        return self.ledger.findings

    @contextmanager
    def watched(self, ptx: str, origin: str = "") -> Iterator[None]:
        """Context of one launch or call on `machine` of `ptx` from the file `origin`; puts its findings into the
        ledger.

        Raises KernelFault if one of them counts or the launch could not continue, and whatever `sentences` raises.
        """
        # The machine keeps the previous launch's findings until the next one begins, and an exception may come earlier.
        before = tuple(self.machine.findings)
        stop: KernelFault | None = None
        try:
            with sentences(self.machine, origin), self._in_time():
                yield
        except KernelFault as fault:
            stop = fault
        except KeyboardInterrupt:
            # The machine's own frames say nothing about the kernel.
            raise KeyboardInterrupt("interrupted in a launch") from None
        finally:
            new = [one for one in self.machine.findings if not any(one is old for old in before)]
            module = module_of(ptx) if new else ""
            found = [KernelFinding.of(one, origin, module, self.schedule) for one in new]
            fresh = self.ledger.take(found)
        failing = [one for one in found if self.ledger.counts(one)]
        for one in fresh:
            if one not in failing and self.ledger.suppression_of(one) is None:
                self.reported(one)
        if stop is None and not failing:
            return
        if stop is not None and not failing:
            for tell in ON_FAULT:
                tell(stop)
            raise stop
        first = next((one for one in failing if one.ends), failing[0])
        others = len(failing) - (first in failing)
        told = first.sentence + (f"; the other access: {first.other}" if first.other and first.other.source else "")
        more = f" (and {counted(others, 'more finding')} that count{'s' * (others == 1)})" if others else ""
        fault = KernelFault(f"{told}{more}", first.rule, found)
        for tell in ON_FAULT:
            tell(fault)
        raise fault from (stop.__cause__ if stop is not None else None)

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        if self.timeout is None:
            yield
            return
        try:
            with time_at_most(self.timeout, self.machine.whereabouts):
                yield
        except TimeIsUpError as late:
            raise OverdueError(f"the launch was stopped: {late}") from None

    def launch(
        self, source: str | Path, entry: str, grid: Size, block: Size, /, *args: object, cluster: Size = 1,
        smem: int = 0, memory: Iterable[object] = (), scratch: Iterable[object] = (), cooperative: bool = False,
        dependent: bool = False,
    ) -> Mapping[str, int]:  # fmt: skip
        """Runs a kernel to its end; returns its counters.

        - `source`: PTX or CUDA C++, as text or as the name of a file (.ptx, .cu).
        - `entry`: the kernel, or its name in C++.
        - `grid`, `block`, `cluster`: one to three sizes.
        - `args`: a torch CPU tensor or a NumPy array for a pointer, None for a null pointer, numbers for scalars (typed
          by the kernel's own parameters), tensor_map(...), `bytes` or a NumPy scalar for a struct.
        - `smem`: bytes of dynamic shared memory.
        - `memory`: arrays that the kernel reaches only through addresses that it reads from memory.
        - `scratch`: workspaces, passed as arguments or not. Nobody reads what a launch leaves in them, so the kernel
          may store uninitialised values there.
        - `cooperative`: all CTAs are resident at once, so that cooperative_groups' grid.sync() works.
        - `dependent`: it may begin before the launch before it has ended, as with the launch attribute
          cudaLaunchAttributeProgrammaticStreamSerialization, and what it accesses before its griddepcontrol.wait is
          checked. Work of the host in between orders the two: `host_waited`, or a change of their memory.

        Raises KernelFault for findings that count in the profile and for one that ends the launch, LaunchRefusedError
        for a launch that no GPU would accept, UnsupportedError for an instruction that the machine lacks. Arrays keep
        what was written until then.
        """
        ptx, text = as_ptx(source, self.machine.target), str(source)
        with sentences(self.machine, "" if _is_text(source) else text):
            entries = self.machine.entries(ptx)
            name = _entry_named(entry, entries)
            held = _several("memory", memory)
            for one in held:
                _array("memory", one)
            reached = Reached(self.machine, [*args, *held], scratch=_several("scratch", scratch))
            params = _encoded(name, entries[name], args, reached)
            sizes = _dim3("grid", grid), _dim3("block", block)
            clusters = _dim3("cluster", cluster)
            with self.watched(ptx, "" if _is_text(source) else text):
                self.machine.launch(
                    ptx,
                    name,
                    *sizes,
                    params,
                    cluster=clusters,
                    dynamic_smem=_whole("smem", smem),
                    memory=reached.stretches,
                    cooperative=cooperative,
                    dependent=dependent,
                )
        return dict(self.machine.counters)


_DEVICES = weakref.WeakSet[Device]()


def host_waited() -> None:
    """Says that the host has waited for all launches so far: a dependent launch that follows overlaps none of them."""
    for device in _DEVICES:
        device.machine.host_waited()


class OverdueError(KernelFault):
    """A launch took more host seconds than its device's `timeout`. It broke no rule, and it has no results."""


ON_FAULT: list[Callable[[KernelFault], object]] = []
"""Called for each launch that has findings that count or did not finish, even if the caller swallows the exception."""


def _to_log(finding: KernelFinding) -> None:
    logging.getLogger("megamoe").warning("%s", finding)


def _to_stdout(text: str) -> None:
    # Looked up at each call, because a test may have replaced the stream.
    sys.stdout.write(text)


@contextmanager
def sentences(machine: KernelMachine, origin: str = "") -> Iterator[None]:
    """Turns a machine's exceptions into KernelFault, LaunchRefusedError and UnsupportedError.

    `origin`: the file of the PTX or CUDA C++, which the machine does not know.
    """
    try:
        yield
    except Exception as stop:
        if isinstance(stop, machine.faults):
            raise KernelFault(str(stop), getattr(stop, "rule", "")) from stop
        if isinstance(stop, machine.refusals):
            raise LaunchRefusedError(_in_file(str(stop), origin), getattr(stop, "cuda_error", 0)) from stop
        if isinstance(stop, machine.unknowns):
            raise UnsupportedError(f"{origin}, {stop}" if origin else str(stop)) from stop
        raise


def _in_file(said: str, origin: str) -> str:
    """`said` with the file in place of <ptx>, as a machine calls a text."""
    if not origin or not said.startswith(_NO_FILE):
        return said
    return (origin if origin.endswith(".ptx") else f"the PTX of {origin}") + said.removeprefix(_NO_FILE)


_NO_FILE = "<ptx>"

# Work that graphs capture

_CAPTURES = list[Callable[[Callable[[], object]], object]]()
"""Receivers of submitted work, one for each capturing graph, innermost last."""


def submit(work: Callable[[], object]) -> None:
    """Does a launch or torch's own work now, or hands it to the innermost capturing graph."""
    if _CAPTURES:
        _CAPTURES[-1](work)
    else:
        work()


def capturing() -> bool:
    """Whether submitted work waits for a replay."""
    return bool(_CAPTURES)


def begin_capture(keep: Callable[[Callable[[], object]], object]) -> None:
    """From now on, passes submitted work to `keep` instead of doing it."""
    _CAPTURES.append(keep)


def end_capture(keep: Callable[[Callable[[], object]], object]) -> None:
    """Ends the capture by `keep`. ValueError if `keep` is not capturing."""
    _CAPTURES.remove(keep)


# Memory


def view_of(array: Any) -> View | None:
    """The memory of a torch tensor or NumPy array; None for anything else.

    LaunchRefusedError for a tensor on a device and for one whose elements do not lie in one allocation.
    """
    if isinstance(array, np.ndarray):
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        start, end = np.lib.array_utils.byte_bounds(root)
        return View(array.ctypes.data, array.nbytes, start, end - start, array.flags.writeable)
    if hasattr(array, "untyped_storage") and hasattr(array, "data_ptr"):
        if array.device.type != "cpu":
            raise LaunchRefusedError(f"a tensor is on {array.device}; the machine works on tensors of the CPU: t.cpu()")
        if str(array.layout) != "torch.strided":
            raise LaunchRefusedError(
                f"a tensor has the layout {array.layout}; the machine works on torch.strided ones: t.to_dense()"
            )
        storage = array.untyped_storage()
        own = array.numel() * array.element_size()
        return View(array.data_ptr(), own, storage.data_ptr(), storage.nbytes(), True)
    return None


def _array(option: str, array: object) -> View:
    if (view := view_of(array.tensor if isinstance(array, TensorMapOf) else array)) is None:
        raise LaunchRefusedError(f"{option} is given {type(array).__name__}; it takes tensors and NumPy arrays")
    return view


def _several(option: str, given: object) -> tuple[Any, ...]:
    if not isinstance(given, Iterable):
        raise LaunchRefusedError(f"{option} is {given!r}; it takes a list of tensors and NumPy arrays")
    return tuple(given)


class Reached:
    """The memory that a launch may access: its arguments, and the live tensors (`live`) whose addresses they hold."""

    def __init__(
        self, machine: KernelMachine, arrays: Sequence[object], *, addresses: Sequence[int] = (),
        in_place: bool = False, scratch: Sequence[object] = (),
    ) -> None:  # fmt: skip
        """`addresses`: pointers into further live tensors. `in_place`: kernels get the process's own addresses,
        whatever their alignment. `scratch`: the arrays that are workspaces, whether or not they are in `arrays`.

        LaunchRefusedError for a workspace that is not an array or shares its allocation with another array.
        """
        self.machine, self._in_place = machine, in_place
        self.live = list[Any]()
        self._kept = [one.tensor if isinstance(one, TensorMapOf) else one for one in arrays]
        named = [(f"argument {index}", view) for index, one in enumerate(self._kept) if (view := view_of(one))]
        self._given = list(named)
        pointers = {f"argument {index}": found for index, one in enumerate(self._kept)
                    if (found := _addresses_in(one)) is not None}  # fmt: skip
        if addresses:
            pointers["the arguments"] = np.array(addresses, np.int64)
        if pointers:
            self.live += _pointed_at(np.unique(np.concatenate([*pointers.values()])))
            named += [(_name_of(view, pointers), view) for one in self.live if (view := view_of(one))]
        self._spaces = [_array("scratch", one) for one in scratch]
        self.stretches = list(map(self._judged, _united([*named, *(("scratch", view) for view in self._spaces)])))

    def _judged(self, stretch: Stretch) -> Stretch:
        """Marks `stretch` as a workspace if scratch lies in it. LaunchRefusedError if another argument does, too."""
        spaces = {(one.first, one.bytes) for one in self._spaces if stretch.has(one.first)}
        if not spaces:
            return stretch
        for name, one in self._given:
            if one.bytes and stretch.has(one.first) and (one.first, one.bytes) not in spaces:
                raise LaunchRefusedError(
                    f"a scratch array shares its allocation with {name}, of which the results count; "
                    "give it an allocation of its own"
                )
        return replace(stretch, scratch=True)

    def address(self, array: object) -> int | None:
        """The address at which kernels see the first byte of `array`; None if it is not an array."""
        view = view_of(array)
        if view is None or not view.size:
            return None if view is None else 0
        if self._in_place:
            return view.first
        home = next(one for one in self.stretches if one.address <= view.first <= one.address + one.size)
        return self.machine.address_of(view.first, home.address)

    def encode(self, asked: TensorMapOf) -> bytes:
        """The 128 bytes of a tensor map."""
        return self.machine.tensor_map(
            self.address(asked.tensor) or 0,
            asked.dtype,
            asked.dims,
            asked.strides,
            asked.box,
            swizzle=asked.swizzle,
            element_strides=asked.element_strides,
            oob_fill=asked.oob_fill,
            im2col=asked.im2col,
        )


def _united(named: Iterable[tuple[str, View]]) -> Iterator[Stretch]:
    """Disjoint stretches. Overlapping ones are merged, since a NumPy array and a tensor made of it may both be
    passed."""
    spans = list[tuple[str, int, int, bool]]()
    for name, one in sorted(named, key=lambda pair: (pair[1].allocation, -pair[1].size)):
        start, end = one.allocation, one.allocation + one.size
        if spans and start < spans[-1][2]:
            first, begin, last, writable = spans[-1]
            spans[-1] = (first, begin, max(last, end), writable or one.writable)
        elif one.size:
            spans.append((name, start, end, one.writable))
    for name, start, end, writable in spans:
        yield Stretch(name, start, end - start, writable)


def _addresses_in(array: Any) -> npt.NDArray[np.int64] | None:
    """The values of an array of 64-bit integers if any of them may be an address, else None."""
    if view_of(array) is None or "int64" not in str(array.dtype):
        return None
    values = np.asarray(array).astype(np.int64, copy=False).reshape(-1)
    return values if values.size and values.max() >= SMALLEST_ADDRESS else None


def _name_of(view: View, pointers: Mapping[str, npt.NDArray[np.int64]]) -> str:
    """Names memory by the first pointer into it, because its address differs from run to run."""
    return next(
        f"memory of pointer {inside[0]} in {holder}"
        for holder, values in pointers.items()
        if (inside := np.flatnonzero((values >= view.allocation) & (values < view.allocation + view.size))).size
    )


def _pointed_at(values: npt.NDArray[np.int64]) -> Iterator[Any]:
    """The live tensors into which `values`, sorted, point."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    # isinstance would ask proxies for their class, and some proxies then import the object they stand for.
    for one in [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]:
        if one.layout is not torch.strided or one.device.type != "cpu" or type(one).__name__ == "FakeTensor":
            continue
        view = view_of(one)
        if view and view.size:
            at = int(np.searchsorted(values, view.allocation))
            if at < values.size and values[at] < view.allocation + view.size:
                yield one


# Parameters


def _dim3(what: str, sizes: Size) -> Dim3:
    given = (sizes,) if isinstance(sizes, Integral) else tuple(sizes) if isinstance(sizes, Iterable) else (sizes,)
    if not all(isinstance(size, Integral) for size in given):
        raise LaunchRefusedError(f"{what} is {sizes!r}; it must be a number of whole units, or one to three of them")
    if not 1 <= len(given) <= 3:
        raise LaunchRefusedError(f"{what} has {counted(len(given), 'size')}; one to three are possible")
    x, y, z = (int(size) for size in (*given, 1, 1)[:3])
    return x, y, z


def _whole(what: str, number: object) -> int:
    if not isinstance(number, Integral):
        raise LaunchRefusedError(f"{what} is {number!r}; it must be a whole number of bytes")
    return int(number)


def _entry_named(entry: str, entries: Mapping[str, object]) -> str:
    if not isinstance(entry, str):
        raise LaunchRefusedError(f"the entry is {entry!r}; it must be the name of a kernel: {', '.join(entries)}")
    if entry in entries:
        return entry
    mangled = [name for name in entries if f"::{plain_name(name)}".endswith(f"::{entry}")]
    if len(mangled) == 1:
        return mangled[0]
    known = ", ".join(mangled or entries) or "none"
    several = "more than one" if mangled else "no"
    guess = nearest(entry, entries)
    raise LaunchRefusedError(f"the module has {several} entry {entry!r}; its entries are: {known}{guess}")


def plain_name(mangled: str) -> str:
    """ns::kernel for _ZN2ns6kernelIfEEvPT_; "" for a name that C++ did not mangle (Itanium C++ ABI 5.1.2)."""
    if not mangled.startswith("_Z"):
        return ""
    nested = mangled.startswith("_ZN")
    rest, parts = mangled[3 if nested else 2 :], list[str]()
    while found := re.match(r"L?(\d+)", rest):
        end = found.end() + int(found[1])
        parts.append(rest[found.end() : end])
        rest = rest[end:]
        if not nested:
            break
    # Anonymous namespaces get generated names that no user writes.
    return "::".join(one for one in parts if not one.startswith(("_GLOBAL__N_", "_INTERNAL_")))


def _encoded(entry: str, parameters: Sequence[Parameter], args: Sequence[object], reached: Reached) -> list[bytes]:
    if len(parameters) != len(args):
        wanted = ", ".join(f".{one.type} {one.name}" for one in parameters)
        raise LaunchRefusedError(
            f"{entry} takes {counted(len(parameters), 'argument')} ({wanted}) and is given {len(args)}"
        )
    return [
        _parameter(
            f"argument {index} of {entry} (.{one.type} {one.name}, {counted(one.size, 'byte')})", one, arg, reached
        )
        for index, (one, arg) in enumerate(zip(parameters, args, strict=True))
    ]


def _parameter(what: str, parameter: Parameter, arg: object, reached: Reached) -> bytes:
    if isinstance(arg, TensorMapOf):
        raw = _encode_map(what, arg, reached)
    elif arg is None:
        raw = bytes(8)
    elif isinstance(arg, bytes | bytearray | memoryview | np.generic) and not _is_number(parameter, arg):
        raw = bytes(arg) if not isinstance(arg, np.generic) else arg.tobytes()
    elif (address := reached.address(arg)) is not None:
        raw = struct.pack("<Q", address)
    else:
        raw = _scalar(what, parameter, arg)
    if arg is None and len(raw) != parameter.size:
        raise LaunchRefusedError(f"{what} is no pointer, and is given None, a null pointer of 8 bytes")
    if len(raw) != parameter.size:
        raise LaunchRefusedError(f"{what} is given {type(arg).__name__}, which makes {counted(len(raw), 'byte')}")
    return raw


def _is_number(parameter: Parameter, arg: object) -> bool:
    code = _SCALARS.get(parameter.type)
    return code is not None and struct.calcsize(code) == parameter.size and isinstance(arg, np.number | np.bool_)


def _scalar(what: str, parameter: Parameter, arg: Any) -> bytes:
    code = _SCALARS.get(parameter.type)
    if code is None or struct.calcsize(code) != parameter.size:
        raise LaunchRefusedError(f"{what} is a struct; give its bytes, not {arg!r}")
    try:
        if isinstance(arg, str):
            raise TypeError
        if code in "efd":
            return struct.pack(f"<{code}", float(arg))
        number, bits = int(arg), 8 * parameter.size
        if number != arg or not -(1 << bits - 1) <= number < 1 << bits:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        wanted = "a number" if code in "efd" else f"a whole number of {8 * parameter.size} bits"
        if parameter.size == 8 and code not in "efd":
            wanted += ", or, for a pointer, an array (on the command line, f32[1024]) or a null pointer (None, null)"
        raise LaunchRefusedError(f"{what} cannot be {arg!r}; it takes {wanted}") from None
    # The sign is up to the kernel: nvcc declares an `int` as .u32.
    return (number % (1 << bits)).to_bytes(parameter.size, "little")


def _encode_map(what: str, asked: TensorMapOf, reached: Reached) -> bytes:
    try:
        return reached.encode(asked)
    except reached.machine.refusals as refused:
        raise LaunchRefusedError(f"{what}: {refused}") from None


def _layout(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], int, str]:
    """Shape, strides in elements, bytes per element, and the dtype's name."""
    if isinstance(tensor, np.ndarray):
        each = tensor.itemsize
        return tensor.shape, tuple(stride // each for stride in tensor.strides), each, tensor.dtype.name
    if view_of(tensor) is None:
        raise ValueError(f"a tensor map is of a torch tensor or a NumPy array, not of {type(tensor).__name__}")
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), str(tensor.dtype).partition(".")[2]


# Sources


def _is_text(source: str | Path) -> bool:
    """Whether `source` is CUDA C++ or PTX text rather than a file name."""
    return not isinstance(source, Path) and ("\n" in source or "__global__" in source)


def as_ptx(source: str | Path, target: str) -> str:
    """Returns PTX for PTX or CUDA C++ given as text or file. UnsupportedError if no compiler is found."""
    if not isinstance(source, str | Path):
        raise LaunchRefusedError(f"the source is {type(source).__name__}; it must be text or the name of a file")
    text, name = str(source), "the source"
    if not _is_text(source):
        name = text
        try:
            text = plain_bytes(Path(source)).decode("utf-8")
        except (OSError, ValueError) as problem:
            if isinstance(problem, UnicodeDecodeError):
                raise LaunchRefusedError(f"the source {name!r} is no text in UTF-8: byte {problem.start}") from None
            why = problem.strerror if isinstance(problem, OSError) else str(problem)
            shown = f"the source {name[:MAX_SOURCE_NAME]!r}"
            if isinstance(source, Path):
                raise LaunchRefusedError(f"{shown} cannot be read: {why}; name a file of PTX or CUDA C++") from None
            raise LaunchRefusedError(
                f"{shown} is neither text of several lines nor a file that can be read: {why}"
            ) from None
    if not text.strip():
        raise LaunchRefusedError(f"{name} is empty")
    # A PTX module begins with .version, after comments (PTX ISA 5.1).
    if any(line.lstrip().startswith(".version") for line in text.splitlines()):
        return text
    return compiled(text, target, os.path.abspath(name) if name == str(source) else "")

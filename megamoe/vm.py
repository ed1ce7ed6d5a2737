"""The door for PTX and CUDA C++: `Device("sm_100a").launch(source, "entry", grid, block, a, b)`, with no GPU.

    import megamoe.vm

    vm = megamoe.vm.Device("sm_100a")
    vm.launch("axpy.cu", "axpy", 8, 128, a, b, 3.0)

Arrays are torch tensors on the CPU or NumPy arrays; kernels work on their memory, without a copy.
docs/bring-your-kernel.md has more.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path

from megamoe.contract.backend import UnsupportedError, open_machine
from megamoe.contract.counted import counted
from megamoe.contract.machine import KernelFault, KernelMachine, LaunchRefusedError, MisreadPtxError
from megamoe.contract.plain import plain_bytes
from megamoe.contract.program import TARGETS, Dim3
from megamoe.cuda_source import compiled, is_template, template_named, templates_named, templates_wanting
from megamoe.findings import ENDS_HERE, KernelFinding, Ledger, module_of
from megamoe.given.arguments import addresses_among, encoded
from megamoe.given.entry_names import entries_named, entry_named, with_source_names
from megamoe.given.host_memory import Reached, array_of, several
from megamoe.given.tensor_maps import PixelBox as PixelBox
from megamoe.given.tensor_maps import array_behind
from megamoe.given.tensor_maps import tensor_map as tensor_map
from megamoe.runner.limits import TimeIsUpError, time_at_most

Size = int | Sequence[int]

MAX_SOURCE_NAME = 200
"""Longest name that a message repeats, in characters."""


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
            known = {id(one) for one in before}
            new = [one for one in self.machine.findings if id(one) not in known]
            module = module_of(ptx) if new else ""
            found = [KernelFinding.of(one, origin, module, self.schedule) for one in new]
            fresh, found = self.ledger.in_order(self.ledger.take(found)), self.ledger.in_order(found)
        failing = [one for one in found if self.ledger.counts(one)]
        for one in fresh:
            if not self.ledger.counts(one) and self.ledger.suppression_of(one) is None:
                self.reported(one)
        if stop is None and not failing:
            return
        if stop is not None and not failing:
            for tell in ON_FAULT:
                tell(stop)
            raise stop from None
        first, others = failing[0], len(failing) - 1
        told = first.sentence + (f"; the other access: {first.other}" if first.other and first.other.source else "")
        cause = self.ledger.said_of_cause(first)
        told += f"; it may follow from {cause}" if cause else ""
        more = f" (and {counted(others, 'more finding')} that count{'s' * (others == 1)})" if others else ""
        ending = [f"{one.short} ended the launch" for one in failing[1:] if one.ends]
        ending += [str(stop)] if isinstance(stop, OverdueError) else []
        more += "".join(f"; {one}" for one in ending)
        behind = [*first.advice, *([f"  {ENDS_HERE}"] if first.ends else [])]
        fault = KernelFault("\n".join([f"{told}{more}", *behind]), first.rule, found)
        for tell in ON_FAULT:
            tell(fault)
        raise fault from None

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
        text = str(source)
        with sentences(self.machine, "" if _is_text(source) else text):
            ptx, name = with_entry(self.machine, source, entry)
            entries = self.machine.entries(ptx)
            held = [array_behind(one) for one in several("memory", memory)]
            for one in held:
                array_of("memory", one)
            given = [array_behind(one) for one in args]
            reached = Reached(
                self.machine,
                [*given, *held],
                addresses=addresses_among(entries[name], args),
                scratch=several("scratch", scratch),
            )
            params = encoded(name, entries[name], args, reached)
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
                    memory=reached.memory(),
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
    """Turns a machine's exceptions into KernelFault, LaunchRefusedError and UnsupportedError, without the machine's own
    frames, which say nothing about the kernel.

    `origin`: the file of the PTX or CUDA C++, which the machine does not know.
    """
    try:
        yield
    except Exception as stop:
        if isinstance(stop, machine.faults):
            raise KernelFault(str(stop), getattr(stop, "rule", "")) from None
        if isinstance(stop, machine.refusals):
            refused = MisreadPtxError if isinstance(stop, machine.misreads) else LaunchRefusedError
            raise refused(_in_file(with_source_names(str(stop)), origin), getattr(stop, "cuda_error", 0)) from None
        if isinstance(stop, machine.unknowns):
            told = str(stop).splitlines()
            raise UnsupportedError("\n".join(f"{origin}, {one}" for one in told) if origin else str(stop)) from None
        raise


def _in_file(said: str, origin: str) -> str:
    """`said` with the file in place of <ptx>, as a machine calls a text."""
    file = origin if not origin or origin.endswith(".ptx") else f"the PTX of {origin}"
    return _NO_FILE.sub(lambda _: file, said) if file else said


_NO_FILE = re.compile("^<ptx>", re.MULTILINE)

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


# Sources


def _is_text(source: str | Path) -> bool:
    """Whether `source` is CUDA C++ or PTX text rather than a file name."""
    return isinstance(source, str) and ("\n" in source or "__global__" in source)


def with_entry(machine: KernelMachine, source: str | Path, entry: str) -> tuple[str, str]:
    """PTX of `source` with the kernel `entry`, and the name of this kernel in it.

    A C++ template that the source does not instantiate is instantiated. LaunchRefusedError if there is no such kernel.
    """
    ptx = as_ptx(source, machine.target)
    try:
        return _with_entry(machine, source, ptx, entry)
    except LaunchRefusedError as refused:
        if _is_text(source):
            raise
        raise LaunchRefusedError(f"{source}: {refused}") from None


def _with_entry(machine: KernelMachine, source: str | Path, ptx: str, entry: str) -> tuple[str, str]:
    before = machine.entries(ptx)
    try:
        return ptx, entry_named(entry, before)
    except LaunchRefusedError as refused:
        text, file = _read(source)
        # Of several, the refusal says how to choose one.
        if _is_ptx(text, file) or not isinstance(entry, str) or entries_named(entry, before):
            raise
        name = template_named(entry)
        if not name:
            wanting = templates_wanting(text)
            raise LaunchRefusedError(f"{refused}; {wanting}" if wanting else str(refused)) from None
        try:
            ptx = compiled(text, machine.target, file, name)
        except LaunchRefusedError as problem:
            # Kernels of that name that are no templates are among the entries. Which of several functions the
            # compiler could not choose is said by the candidates.
            plain = entries_named(re.split(r"[<(]", name)[0], before) and not is_template(text, name)
            why = "" if plain or "cannot determine which instance" in str(problem) else str(problem)
            told = (str(refused), why, "" if plain else templates_named(text, name))
            raise LaunchRefusedError("; ".join(filter(None, told))) from None
    return ptx, _instantiated(entry, before, machine.entries(ptx))


def _instantiated(entry: str, before: Collection[str], entries: Mapping[str, object]) -> str:
    """The kernel that was asked for as `entry`. Its arguments may be spelt otherwise: k<N> is k<4>."""
    added = [name for name in entries if name not in before]
    try:
        return entry_named(entry, entries)
    except LaunchRefusedError:
        if len(added) == 1:
            return added[0]
        raise


def no_kernel(source: str | Path) -> str:
    """Says that `source`, whose PTX has no entry, holds no kernel, and what to add if it has templates of kernels."""
    text, file = _read(source)
    wanting = "" if _is_ptx(text, file) else templates_wanting(text)
    return f"{source} holds no kernel: there is no .entry in it{wanting and f'; {wanting}'}"


def as_ptx(source: str | Path, target: str) -> str:
    """Returns PTX for PTX or CUDA C++ given as text or file. UnsupportedError if no compiler is found."""
    text, file = _read(source)
    return text if _is_ptx(text, file) else compiled(text, target, file)


def _is_ptx(text: str, file: str) -> bool:
    """Whether it is PTX rather than CUDA C++: by the name of its file, "" for none, or by a directive of a module."""
    return file.endswith(".ptx") or _DIRECTIVE.search(text) is not None


_DIRECTIVE = re.compile(r"^\s*\.(version\b|target\s+sm_|((visible|weak|extern)\s+)?entry\s)", re.MULTILINE)
"""Begins a line of PTX and none of C++. A text that lacks .version, which PTX ISA 5.1 wants first, may have others."""


def _read(source: str | Path) -> tuple[str, str]:
    """The text of a source and the absolute name of its file, "" if it is given as text."""
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
    return text, os.path.abspath(name) if name == str(source) else ""

"""KernelMachine: the machine that megamoe.vm, .triton and .cutedsl (the doors) use to run kernels on host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megamoe.contract.program import Dim3

Grade = Literal["error", "portability", "note"]
"""`error`: undefined or wrong. `portability`: the ISA does not promise it, though kernels rely on it. `note`:
remark."""


class KernelFault(Exception):
    """A kernel broke a rule of the machine that ran it. `rule` is a stable slug, the text a sentence with the place.

    `findings`: the megamoe.findings.KernelFinding objects of the launch or call, causes first. The text begins with the
    first one that counts, and `rule` is its rule.
    """

    def __init__(self, sentence: str, rule: str = "", findings: Sequence[Any] = ()) -> None:
        super().__init__(sentence)
        self.rule = rule
        self.findings = tuple(findings)


class RuleLike(Protocol):
    """A rule of a machine. `wrong` says what goes wrong, `missing` which ordering is absent, `mend` what to do.

    `section`: of the PTX ISA, "" for none. `reliance`: who relies on more than the ISA promises. `page`: the file in
    the repository that explains it, "" for none. `leads_to`: rules of which violations may follow from this one's,
    elsewhere in the kernel.
    """

    @property
    def grade(self) -> Grade: ...
    @property
    def section(self) -> str: ...
    @property
    def wrong(self) -> str: ...
    @property
    def mend(self) -> str: ...
    @property
    def missing(self) -> str: ...
    @property
    def reliance(self) -> str: ...
    @property
    def page(self) -> str: ...
    @property
    def leads_to(self) -> Sequence[str]: ...


class SourceLike(Protocol):
    """A place in the source. `function` is the function inlined there, "" if none or unknown."""

    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...
    @property
    def column(self) -> int: ...
    @property
    def function(self) -> str: ...


class AccessLike(Protocol):
    """The other access: `who` did `did` (such as "wrote") at PTX `line`, 0 if unknown. `source` is innermost first.

    `elsewhere`: in a race, it is of another CTA.
    """

    @property
    def who(self) -> str: ...
    @property
    def did(self) -> str: ...
    @property
    def line(self) -> int: ...
    @property
    def source(self) -> Sequence[SourceLike]: ...
    @property
    def elsewhere(self) -> bool: ...


class FaultLike(Protocol):
    """A rule broken in a launch, reported once per site. `times` counts the repetitions; `ends` is true if it stopped
    the launch.

    `where`: CTA and warp, or the copy. `detail`: a sentence fragment with the values seen. `about`: the rule. `spot`:
    the variable and byte at `address`, "" if unknown.
    """

    @property
    def rule(self) -> str: ...
    @property
    def about(self) -> RuleLike: ...
    @property
    def detail(self) -> str: ...
    @property
    def kernel(self) -> str: ...
    @property
    def line(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def source(self) -> Sequence[SourceLike]: ...
    @property
    def where(self) -> str: ...
    @property
    def lane(self) -> int | None: ...
    @property
    def address(self) -> int | None: ...
    @property
    def spot(self) -> str: ...
    @property
    def other(self) -> AccessLike | None: ...
    @property
    def times(self) -> int: ...
    @property
    def ends(self) -> bool: ...


class LaunchRefusedError(ValueError):
    """A kernel, launch or argument that no GPU would accept. The text names it, its value, and what is possible.

    `cuda_error`: the cudaError_t that host code would get and may handle; 0 for none.
    """

    def __init__(self, text: str, cuda_error: int = 0) -> None:
        super().__init__(text)
        self.cuda_error = cuda_error


class MisreadPtxError(LaunchRefusedError):
    """A text that is not PTX. Each line of it is a sentence with the file and the place."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """`size` bytes of this process's memory at `address`, in one allocation, that kernels may access.

    `scratch`: a workspace; nothing reads what a launch leaves in it. `unwritten`: nobody has written any of it yet, so
    that it holds nothing until the kernel stores it.
    """

    name: str
    address: int
    size: int
    writable: bool = True
    scratch: bool = False
    unwritten: bool = False

    def has(self, address: int) -> bool:
        """Whether the byte at `address` lies in this stretch."""
        return self.address <= address < self.address + self.size


class Parameter(Protocol):
    """A parameter of a kernel as its PTX declares it. `type` is "u32", "f32", "b8", ...; sizes are in bytes.

    An array or a struct has the type of its elements, and a `size` larger than one element. `pointer`: the kernel is
    known to take it for an address in global memory; false if the machine cannot tell.
    """

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def align(self) -> int: ...
    @property
    def pointer(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class CompiledHost:
    """A host function that launches kernels itself, compiled for this processor, and the PTX of its kernels.

    `entry`: the symbol to call, in the packed convention `_mlir_PREFIX__mlir_ciface_NAME`. `compiler`: name and
    version.
    """

    ptx: str
    host_object: bytes
    entry: str
    compiler: str


@dataclass(frozen=True, slots=True)
class PixelBox:
    """The bounding box of an im2col tensor map, and how many of its pixels one copy takes.

    `lower` and `upper` are the offsets of the box corners from the first and the last pixel, in the dimensions between
    channels and images, width first.
    """

    lower: Sequence[int]
    upper: Sequence[int]
    pixels: int


class KernelMachine(Protocol):
    """A machine that stays up between launches. Module variables keep their values, as on a device.

    After a broken rule the kernel continues where that makes sense, as if the missing ordering were there. Otherwise
    the launch ends with one of `faults`, and the machine starts afresh. `findings` holds both kinds. `counters` and
    `findings` belong to the last launch or call.

    The machine raises `refusals` for PTX, launches and maps that no GPU would accept, and `unknowns` for what it does
    not implement. Those of the refusals that are `misreads` are about the text of the PTX; each of their lines is a
    sentence with its place. `printed` receives what kernels print. `rules` maps slugs to all rules that the machine
    knows.
    """

    target: str
    counters: Mapping[str, int]
    findings: Sequence[FaultLike]
    faults: tuple[type[Exception], ...]
    refusals: tuple[type[Exception], ...]
    misreads: tuple[type[Exception], ...]
    unknowns: tuple[type[Exception], ...]
    printed: Callable[[str], object]

    @property
    def rules(self) -> Mapping[str, RuleLike]: ...

    def whereabouts(self) -> str:
        """Says where the running launch is, for a caller whose timeout expired; "" if none is running."""
        ...

    def entries(self, ptx: str) -> Mapping[str, Sequence[Parameter]]:
        """The kernels of a module and their parameters."""
        ...

    def source_of(self, ptx: str, line: int) -> Sequence[SourceLike]:
        """The places in the source of a PTX line, innermost first; () if the PTX names none."""
        ...

    def bind(self, ptx: str, entry: str) -> None:
        """Bind every instruction of a kernel to its semantics, as the first step of a launch does."""
        ...

    def address_of(self, address: int, allocation: int) -> int:
        """The address at which kernels see byte `address` of the allocation at `allocation`, aligned as on a GPU."""
        ...

    def holds(self, address: int) -> bool:
        """Whether the machine itself has memory at `address`: a variable of a module, or what a kernel allocated."""
        ...

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
        memory: Sequence[Stretch] = (),
        cooperative: bool = False,
        dependent: bool = False,
    ) -> None:
        """Run a grid to its end. Kernels see `memory` both at its host address and at address_of.

        Grid and block are in CTAs and threads, sizes in bytes. `cooperative`: all CTAs are resident at once and may
        wait for each other. `dependent`: it may begin before the launch before it has ended (programmatic dependent
        launch), unless the host has waited since, or has changed memory that the launches before have accessed.
        """
        ...

    def host_waited(self) -> None:
        """Says that the host has waited for all launches so far, so that no later one overlaps them."""
        ...

    def call(self, program: CompiledHost, pointers: Sequence[int], memory: Sequence[Stretch]) -> None:
        """Call a host function on pointers to its arguments, and run the kernels that it launches."""
        ...

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
        oob_fill: Literal["zero", "nan"] = "zero",
        im2col: PixelBox | None = None,
    ) -> bytes:
        """The 128 bytes that cuTensorMapEncodeTiled makes. `dims` and `box` are in elements, `strides` in bytes.

        With `im2col`, the bytes that cuTensorMapEncodeIm2col makes; `box` then holds the channels per pixel.
        """
        ...

"""The executable form of a function: basic blocks of steps, and what a step returns to its warp.

A block is a straight run of steps and a tail. An instruction that may wait is the tail of a block of its own, so that a
parked warp executes only that instruction again. Branch targets are block numbers. Block numbers grow with the program
counter: when a warp diverges, the strand in the lowest block runs.

A tail returns the number of the next block (int), NEXT to fall through, a Wait to park, or HANDLED when it has
rearranged the warp's strands itself. What other steps return is ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, reduce
from itertools import pairwise
from operator import or_
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from backends.vm.machine.paths import Deciding, idle_waits
from backends.vm.memory.shared import dynamic_offset
from backends.vm.memory.strong_writes import STRONG
from backends.vm.numpy_calls import address_of
from backends.vm.ptx.ast import Function, Immediate, Instruction, Variable
from backends.vm.ptx.functions import SEPARATOR

if TYPE_CHECKING:
    from backends.vm.machine.undefined import Carrier, Undefined
    from backends.vm.machine.warp import Warp
    from backends.vm.memory.definedness import Origin


Step = Callable[["Warp"], object]
Key = tuple[int, int]
"""A register: its container width in bits, and its row among the registers of that width."""


class _Sentinel:
    pass


NEXT: Final = None
OFTEN, FACTOR = 2, 4
"""A block first looks for runs at execution OFTEN, and again each time FACTOR times as many have passed. Most kinds of
instructions have machine code by then, from other functions. A block that runs once does not repay the search."""
HANDLED: Final = _Sentinel()
MAX_PATHS: Final = 256
"""Paths whose deciding registers a function remembers."""


@dataclass(slots=True)
class Wait:
    """Why a strand cannot go on.

    Once `ready` returns true, `finish` runs for its effects and the strand continues after the instruction; with
    `again` it re-executes the instruction instead. `reason` returns a clause for reports.

    `expire` is set by waits that may give up (mbarrier.try_wait): it is called when nothing else in the machine can
    move. `target` is the object that ends the wait, if there is one. `local`: only other lanes of the same warp can end
    the wait, so they run on meanwhile.
    """

    ready: Callable[[], bool]
    reason: Callable[[], str]
    finish: Callable[[], None] | None = None
    again: bool = False
    expire: Callable[[], None] | None = None
    target: object = None
    local: bool = False


class QuickRun(Protocol):
    """Does the next `count` steps of a block at once. They use no registers but `touches`. `part` does some of them,
    for when one of these registers is undefined."""

    @property
    def count(self) -> int: ...
    @property
    def touches(self) -> frozenset[Key]: ...

    def step(self, warp: Warp) -> None:
        """Do all of them."""
        ...

    def part(self, warp: Warp, first: int, count: int) -> None:
        """Do `count` of them, from number `first` of the run."""
        ...


class Flow(NamedTuple):
    """What an instruction reads, its guard included, and writes. `computes`: it does nothing but write its results."""

    uses: tuple[Key, ...]
    defines: tuple[Key, ...]
    computes: bool


FindRuns = Callable[[int], tuple[Mapping[int, QuickRun], bool]]
"""Takes the number of executions since the last call. Returns the runs of a block by their first step, and whether
there may be more later."""


def _done(warp: Warp) -> None:
    """Placeholder for a step that a run has already done, so that steps and instructions share one index."""


@dataclass(slots=True)
class Block:
    """Steps in order, then `tail` (None: fall through). `classes` counts its instructions by counter name.

    `make_carriers` makes one carrier per instruction. It runs the instruction when a register that it touches may be
    undefined. `find_touched`: the registers that they touch. `find_flow`: what each reads and writes.

    `quick` holds the steps for when every register is defined, with `runs` (by the index of their first step) in place.
    After `left` more executions the block calls `find_runs` again; the interval grows by FACTOR each time. A block
    whose `find_runs` is None never does.
    """

    steps: list[Step]
    instructions: list[Instruction]
    tail: Step | None = None
    classes: Counter[str] = field(default_factory=Counter[str])
    make_carriers: Callable[[], Sequence[Carrier]] = tuple
    find_touched: Callable[[], frozenset[Key]] = frozenset
    find_flow: Callable[[], Sequence[Flow]] = tuple
    find_runs: FindRuns | None = None
    runs: Mapping[int, QuickRun] = field(init=False, default_factory=dict[int, "QuickRun"])
    quick: list[Step] = field(init=False)
    left: int = field(init=False, default_factory=lambda: OFTEN)
    _often: int = field(init=False, default_factory=lambda: OFTEN)
    _carriers: Sequence[Carrier] | None = field(init=False, default=None)
    _touched: frozenset[Key] | None = field(init=False, default=None)
    _together: int | None = field(init=False, default=None)
    _polls: bool | None = field(init=False, default=None)
    _polls_memory: bool | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.quick = self.steps

    def quicken(self) -> None:
        """Find the runs available by now and put them into `quick`."""
        if self.find_runs is None:
            return
        (self.runs, more), self.quick = self.find_runs(self._often), self.steps.copy()
        for first, run in self.runs.items():
            self.quick[first : first + run.count] = [run.step, *[_done] * (run.count - 1)]
        self._often *= FACTOR
        self.left = self._often if more else 0

    @property
    def carriers(self) -> Sequence[Carrier]:
        """The carriers, by instruction."""
        if self._carriers is None:
            self._carriers = self.make_carriers()
        return self._carriers

    def touched(self) -> frozenset[Key]:
        """The registers that an instruction of the block reads or writes."""
        if self._touched is None:
            self._touched = self.find_touched()
        return self._touched

    def together(self) -> int:
        """The lanes, as bits, that execute an instruction of the block together unless they have exited."""
        if self._together is None:
            self._together = reduce(or_, map(lanes_together, self.instructions), 0)
        return self._together

    def polls(self) -> bool:
        """Whether it asks for what other threads change: by a strong load, an atomic or a test of an mbarrier."""
        if self._polls is None:
            self._polls = self.polls_memory() or any(map(_tests_mbarrier, self.instructions))
        return self._polls

    def polls_memory(self) -> bool:
        """Whether it does so by a strong load or an atomic."""
        if self._polls_memory is None:
            self._polls_memory = any(map(_polls_memory, self.instructions))
        return self._polls_memory


def _tests_mbarrier(one: Instruction) -> bool:
    return one.parts[0] == "mbarrier" and one.parts[1] in ("test_wait", "try_wait")


def _polls_memory(one: Instruction) -> bool:
    name, *words = one.parts
    return name == "atom" or (name == "ld" and not STRONG.isdisjoint(words))


@lru_cache(maxsize=256)
def lanes_in(bits: int) -> npt.NDArray[np.bool_]:
    """The lanes that `bits` have, read-only."""
    lanes = (bits >> np.arange(LANES) & 1).astype(np.bool_)
    lanes.setflags(write=False)
    return lanes


def lanes_together(one: Instruction) -> int:
    """The lanes, as bits, that an instruction waits for: all for an `.aligned` one, and those of a constant membermask.

    The barrier of a cluster counts threads, whatever its spelling. ptxas takes wgmma without `.aligned`, which it has
    always.
    """
    name, *words = one.parts
    if name in ("bar", "barrier") and words[:1] in (["warp"], ["cluster"]):
        return 0
    if name in ("bar", "wgmma") or "aligned" in words:
        return (1 << LANES) - 1
    if name in ("shfl", "vote", "match", "redux", "elect") and isinstance(mask := one.operands[-1], Immediate):
        return mask.value & (1 << LANES) - 1
    return 0


@dataclass(slots=True)
class Code:
    """The blocks of a function. `unwritten`: the registers that some path reads before it has written them.

    `at_start`: their undefined bits at the start of a warp, by its number of lanes. `own`: the rows of the special
    registers that differ between warps, and their contents, by the warp's index and the block. Both are filled on
    demand.
    """

    function: Function
    blocks: list[Block]
    rows: RegisterRows
    unwritten: Mapping[Key, Origin]
    at_start: dict[int, dict[Key, Undefined]] = field(default_factory=dict[int, "dict[Key, Undefined]"])
    own: dict[tuple[int, object], tuple[RowIndex, Row]] = field(
        default_factory=dict[tuple[int, object], "tuple[RowIndex, Row]"]
    )
    _classes: tuple[tuple[str, ...], npt.NDArray[np.int64]] | None = None
    _constant_loads: dict[int, str] | None = None
    _idle_waits: frozenset[int] | None = None
    _deciding: dict[frozenset[int], Deciding] = field(default_factory=dict[frozenset[int], Deciding])

    @property
    def idle_waits(self) -> frozenset[int]:
        """The blocks of waits that may time out and, when they have, are asked again with nothing in between."""
        if self._idle_waits is None:
            self._idle_waits = idle_waits(self)
        return self._idle_waits

    def deciding(self, path: frozenset[int]) -> Deciding:
        """The registers that change in the blocks `path` and decide there what happens outside of registers.

        A branch, a guard, an address, a stored value, or an operand of an instruction that synchronises, copies or
        multiplies matrices depends on them, through any number of instructions of `path`. As long as a warp stays in
        `path`, only they tell apart what it does next.
        """
        known = self._deciding.get(path)
        if known is None:
            if len(self._deciding) >= MAX_PATHS:
                self._deciding.clear()
            known = self._deciding[path] = Deciding.of([self.blocks[at] for at in sorted(path)])
        return known

    @property
    def classes(self) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
        """The counter names of its instructions, and how many each block has of each: [blocks, names]."""
        if self._classes is None:
            names = tuple(dict.fromkeys(name for block in self.blocks for name in block.classes))
            counts = [[block.classes[name] for name in names] for block in self.blocks]
            self._classes = names, np.array(counts, np.int64).reshape(len(self.blocks), len(names))
        return self._classes

    @property
    def constant_loads(self) -> Mapping[int, str]:
        """The texts of the loads with .nc, by PTX line."""
        if self._constant_loads is None:
            self._constant_loads = {one.line: one.text for one in self.function.instructions if "nc" in one.parts}
        return self._constant_loads


@dataclass(slots=True)
class BoundFunction:
    """A function that a machine can launch: its code and where everything that it names lies, in bytes.

    `offsets`: state space and offset of each symbol. `dynamic`: the names of dynamic shared memory. `variables`: the
    module's variables, one mapping shared by all its functions. `of_system`: it asks where the reserved shared memory
    is, as cooperative groups of several warps do, and may access it.
    """

    code: Code
    variables: Mapping[str, Variable]
    offsets: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    dynamic: frozenset[str] = frozenset()
    static_shared: int = 0
    dynamic_align: int = 16
    local_size: int = 0
    param_size: int = 0
    of_system: bool = False

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.code.function.name

    def place_of(self, name: str, dynamic_offset: int) -> tuple[str, int]:
        """State space and offset of a symbol; dynamic shared memory begins at `dynamic_offset`."""
        if name in self.dynamic:
            return "shared", dynamic_offset
        return self.offsets[name]

    def spot_of(self, address: int) -> str:
        """The variable and byte at an address of a CTA's shared memory; "" below its first variable."""
        dynamic = dynamic_offset(self.static_shared, self.dynamic_align)
        if address >= dynamic:
            return f"byte {address - dynamic} of the dynamic shared memory"
        sizes = {one.name: one.size for one in (*self.variables.values(), *self.code.function.variables)}
        for name, (space, offset) in self.offsets.items():
            if space == "shared" and offset <= address < offset + sizes[name]:
                return f"byte {address - offset} of `{name.partition(SEPARATOR)[0]}`"
        return ""


# Register files: untyped bit containers, one row of 32 lanes per register, with a view for each way to read them. PTX
# as CuTeDSL writes it declares only `.pred/.b16/.b32/.b64/.b128` and applies any operation of that width (facts.md
# 0.1), so a register is storage and the instruction brings the type.


LANES = 32

WIDTH_OF_TYPE = {
    "pred": 1, "b8": 16, "u8": 16, "s8": 16, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32,
    "b64": 64, "u64": 64, "s64": 64, "f64": 64, "f32x2": 64, "b128": 128,
}  # fmt: skip
"""Container width in bits of a register declared with a PTX type; 8-bit registers live in 16-bit containers."""

_DTYPES: dict[int, tuple[tuple[str, type[np.generic]], ...]] = {
    1: (("pred", np.bool_),),
    16: (("u16", np.uint16), ("s16", np.int16), ("f16", np.float16)),
    32: (("u32", np.uint32), ("s32", np.int32), ("f32", np.float32), ("u16x2", np.uint16)),
    64: (("u64", np.uint64), ("s64", np.int64), ("f64", np.float64), ("f32x2", np.float32), ("u32x2", np.uint32)),
    128: (("u64x2", np.uint64),),
}
STORAGE: dict[int, type[np.generic]] = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64, 128: np.uint64}

WIDTH_OF_VIEW = {name: width for width, views in _DTYPES.items() for name, _ in views}
DTYPE_OF_VIEW = {name: np.dtype(dtype) for views in _DTYPES.values() for name, dtype in views}
BYTES_OF_VIEW = {name: dtype.itemsize for name, dtype in DTYPE_OF_VIEW.items()}
"""Bytes of one element."""


@cache
def first_lanes(count: int) -> npt.NDArray[np.bool_]:
    """The mask of a warp's first `count` lanes. Read-only and cached: machine code holds its address."""
    lanes = np.arange(LANES) < count
    lanes.setflags(write=False)
    return lanes


Row = npt.NDArray[np.generic]
RowIndex = slice | npt.NDArray[np.intp]


_WIDTHS: Final = tuple(STORAGE)
BYTES_OF_ROW: Final = {
    width: LANES * np.dtype(kind).itemsize * (2 if width == 128 else 1) for width, kind in STORAGE.items()
}


SCRATCH_ROWS: Final = 4
SCRATCH_PLACES: Final = tuple((2 * len(_WIDTHS), row * BYTES_OF_ROW[32]) for row in range(SCRATCH_ROWS))


def index_of(rows: Sequence[int]) -> RowIndex:
    """An index that selects `rows` of RegisterFile.words: a slice, which makes no copy, if they are neighbours."""
    if rows and rows[0] >= 0 and all(b - a == 1 for a, b in pairwise(rows)):
        return slice(rows[0], rows[-1] + 1)
    return np.array(rows, np.intp)


@cache
def place_of(key: Key) -> tuple[int, int]:
    """Where machine code finds a row: the index of the bound it is counted from, and the offset in bytes."""
    width, row = key
    return _WIDTHS.index(width) + (len(_WIDTHS) if row < 0 else 0), row * BYTES_OF_ROW[width]


WARP_WORDS: Final = (
    "parameters", "parameter_bytes", "launch", "changes", "shared", "base", "seen", "agent", "cluster", "mark", "met",
    "uneven", "answer", "served", "stored", "stored_globally", "changed", "changed_globally",
)  # fmt: skip
"""What memory-accessing machine code reads from and leaves for its warp. It reads: the address and size in bytes of the
launch's parameters, the number of the launch, the address of access_code.CHANGES, the address of shared memory (0: not
for machine code) and its base, the warp's clock, its agent, the mark of its cluster, its own mark and how often it has
met, and whether its lanes know unevenly. It leaves: the last answer that Python must look at, how many groups of lanes
the banks have served, the stores to shared and to global memory, and how many of these have changed something."""
WORD: Final = {name: 2 * len(_WIDTHS) + 1 + index for index, name in enumerate(WARP_WORDS)}


_SPECIAL_WIDTHS: Final = {"%is_explicit_cluster": 1, "%gridid": 64}
"""The widths of special registers that do not have 32 bits (PTX ISA 10.10, 10.11)."""


@dataclass(slots=True)
class RegisterRows:
    """The rows given to the registers, literals, special registers and symbol addresses of one function.

    Rows count from 0 in each width. Literals follow the registers. `used` holds the registers that any instruction of
    the function reads.
    """

    widths: Mapping[str, int]
    types: Mapping[str, str]
    symbols: Mapping[str, str]
    rows: dict[str, Key] = field(default_factory=dict[str, Key])
    counts: dict[int, int] = field(default_factory=dict[int, int])
    constants: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    specials: dict[str, Key] = field(default_factory=dict[str, Key])
    addresses: dict[tuple[str, int, int], Key] = field(default_factory=dict[tuple[str, int, int], Key])
    used: set[Key] = field(default_factory=set[Key])
    _literals: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    _blank: Blank | None = None

    @classmethod
    def of(cls, types: Mapping[str, str], symbols: Mapping[str, str]) -> RegisterRows:
        """Rows for declared registers (`types`: name to PTX type) beside `symbols` (name to state space)."""
        made = cls({name: WIDTH_OF_TYPE[kind] for name, kind in types.items()}, types, symbols)
        for name, width in made.widths.items():
            made.rows[name] = made.reserve(width)
        return made

    def extended(self) -> RegisterRows:
        """A copy of these rows that can take more. It shares the set `used`, because bound instructions hold it."""
        constants = {width: list(known) for width, known in self.constants.items()}
        return replace(self, rows=dict(self.rows), counts=dict(self.counts), constants=constants,
                       specials=dict(self.specials), addresses=dict(self.addresses), _literals=dict(self._literals),
                       _blank=None)  # fmt: skip

    def reserve(self, width: int) -> Key:
        """A fresh row of `width` bits."""
        row = self.counts.get(width, 0)
        self.counts[width] = row + 1
        return width, row

    def literal(self, width: int, bits: int) -> int:
        """The row of a literal: negative, since literals are at the end of a RegisterFile."""
        known = self._literals.get((width, bits))
        if known is None:
            pool = self.constants.setdefault(width, [])
            pool.append(bits)
            known = self._literals[width, bits] = -len(pool)
        return known

    def blank(self) -> Blank:
        """The initial register contents of a warp."""
        sizes = (*self.counts.items(), *((width, len(found)) for width, found in self.constants.items()))
        if self._blank is None or self._blank.sizes != sizes:
            self._blank = Blank(sizes, self.counts, self.constants)
        return self._blank

    def special(self, name: str) -> Key:
        """The row where a warp puts special register `name` when it starts."""
        if name not in self.specials:
            self.specials[name] = self.reserve(_SPECIAL_WIDTHS.get(name, 32))
        return self.specials[name]

    def address(self, name: str, offset: int, width: int) -> Key:
        """The row where a warp puts the address of symbol `name` plus `offset` when it starts."""
        key = (name, offset, width)
        if key not in self.addresses:
            self.addresses[key] = self.reserve(width)
        return self.addresses[key]


class Shown(dict[int, Row]):
    """The rows of one view, by row number. Made lazily: with machine code, few are needed."""

    __slots__ = ("_shown",)

    def __init__(self, shown: Row) -> None:
        super().__init__()
        self._shown = shown

    def __missing__(self, row: int) -> Row:
        made = self[row] = self._shown[row]
        return made


_LINE: Final = 64
"""The rows of each width begin at a multiple of this many bytes."""


class Blank:
    """The bytes of a register file with its literals and all registers zero. `counts`: the number of registers of each
    width. `begins`: by width, the first byte and the number of rows. `sizes`: what decides `begins`."""

    def __init__(
        self, sizes: Sequence[tuple[int, int]], counts: Mapping[int, int], literals: Mapping[int, Sequence[int]]
    ) -> None:
        self.sizes = sizes
        self.begins: dict[int, tuple[int, int]] = {}
        end = 0
        for width in STORAGE:
            rows = counts.get(width, 0) + len(literals.get(width, ()))
            self.begins[width] = end, rows
            end += -(-rows * BYTES_OF_ROW[width] // _LINE) * _LINE
        self.content = np.zeros(end, np.uint8)
        self.bounds = self._bounds()
        for width in literals:
            storage = self.shown_in(self.content, width)
            if found := literals[width]:
                wide = [[[bits & (2**64 - 1), bits >> 64]] for bits in reversed(found)]
                one_lane = np.array(wide, np.uint64) if width == 128 else np.array(found[::-1], STORAGE[width])[:, None]
                storage[-len(found) :] = one_lane

    def _bounds(self) -> npt.NDArray[np.int64]:
        """Where the rows of each width begin in the bytes of a file, then where they end."""
        ends = [begin + rows * BYTES_OF_ROW[width] for width, (begin, rows) in self.begins.items()]
        return np.array([*(begin for begin, _ in self.begins.values()), *ends], np.int64)

    def shown_in(self, content: npt.NDArray[np.uint8], width: int) -> Row:
        """The rows of a width in the bytes of a file: [rows, 32], for 128 bits [rows, 32, 2]."""
        begin, rows = self.begins[width]
        part = content[begin : begin + rows * BYTES_OF_ROW[width]].view(STORAGE[width])
        return part.reshape((rows, LANES, 2) if width == 128 else (rows, LANES))


class _Storage(dict[int, Row]):
    """The rows of each width in the bytes of a file. Made lazily: machine code needs none."""

    __slots__ = ("_blank", "_content")

    def __init__(self, blank: Blank, content: npt.NDArray[np.uint8]) -> None:
        super().__init__()
        self._blank, self._content = blank, content

    def __missing__(self, width: int) -> Row:
        made = self[width] = self._blank.shown_in(self._content, width)
        return made


class RegisterFile:
    """The registers of one warp: rows of each width, [registers and literals, 32], for 128 bits [.., 32, 2].

    Registers start as zero; bind/definedness.py finds those that may be read unwritten. Literals fill the rows from the
    last one backwards: literal number i is row -(i+1). `bounds`, int64: where the rows of each width begin, then where
    they end, the address of `scratch`, and WARP_WORDS. `scratch`, uint32 [4, 32]: where machine code puts words that an
    instruction then moves to its registers. `told`: a memoryview of the bounds, which is set in half the time.
    """

    def __init__(self, rows: RegisterRows) -> None:
        self.rows, self.blank = rows, rows.blank()
        self._counts = rows.counts
        self._content = np.empty_like(self.blank.content)
        self._storage = _Storage(self.blank, self._content)
        self._views: dict[str, Shown] = {}
        self.bounds = np.zeros(2 * len(STORAGE) + 1 + len(WARP_WORDS), np.int64)
        self.told = memoryview(cast("Any", self.bounds))
        np.add(self.blank.bounds, address_of(self._content), out=self.bounds[: 2 * len(STORAGE)])
        self.scratch = np.zeros((SCRATCH_ROWS, LANES), np.uint32)
        self.bounds[2 * len(STORAGE)] = address_of(self.scratch)
        self.bounds_address = address_of(self.bounds)

    def begin(self, as_: RegisterFile | None = None) -> None:
        """Set every register to zero, or to its value in `as_`, the registers of another warp of the function."""
        self._content[:] = self.blank.content if as_ is None else as_._content

    def write(self, width: int, rows: RowIndex, content: Row) -> None:
        """Write [rows, 32] or [rows, 1] to registers of `width` bits."""
        self._storage[width][rows] = content

    @cached_property
    def words(self) -> npt.NDArray[np.uint32]:
        """The registers of 32 bits and their literals, by row: [rows, 32]."""
        return cast("npt.NDArray[np.uint32]", self._storage[32])

    def content(self, of: Mapping[int, RowIndex]) -> bytes:
        """The values of the registers `of`: their rows, by width."""
        return b"".join([self._storage[width][rows].tobytes() for width, rows in of.items()])

    def view(self, name: str) -> Shown:
        """The rows as the view `name` shows them: arrays [32], or [32, n] for packed views."""
        if name not in self._views:
            width = WIDTH_OF_VIEW[name]
            rows = self._storage[width]
            shown = rows.view(dict(_DTYPES[width])[name])
            if width in (32, 64) and shown.shape != rows.shape:
                shown = shown.reshape(rows.shape[0], LANES, shown.shape[-1] // LANES)
            self._views[name] = Shown(shown)
        return self._views[name]


# Making a file, with an array for each row, takes longer than many a warp runs.
_SPARE: dict[int, list[RegisterFile]] = {}
_MAX_SPARE = 64
_MAX_SPARE_BYTES = 4 << 20
"""Limit on the bytes of spare files kept for one function."""
_MAX_FUNCTIONS = 16


def take_registers(rows: RegisterRows, warps: int) -> list[RegisterFile]:
    """The registers of `warps` warps that begin a function with `rows`, taken from ended warps if there are some.

    Their contents are stale until `begin`.
    """
    spare, blank = _SPARE.get(id(rows), []), rows.blank()
    taken = [spare.pop() for _ in range(min(warps, len(spare)))]
    return [file if file.blank is blank else RegisterFile(rows) for file in taken] + [
        RegisterFile(rows) for _ in range(warps - len(taken))
    ]


def give_registers_back(file: RegisterFile) -> None:
    """Take back the registers of a warp that has ended."""
    spare = _SPARE.setdefault(id(file.rows), [])
    if len(spare) < min(_MAX_SPARE, _MAX_SPARE_BYTES // max(file.blank.content.nbytes, 1)):
        spare.append(file)
    if len(_SPARE) > _MAX_FUNCTIONS:
        del _SPARE[next(iter(_SPARE))]
